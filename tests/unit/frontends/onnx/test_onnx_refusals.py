"""Where TVM gives other numbers than ONNX defines, it is not asked: refused by name, or written in other operators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, draw, load, model, value
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.onnx.operators import EXTENSION_OPERATORS, OPERATORS

node = helper.make_node
F = np.float32


def resize(scales: list[float], **attributes: Any) -> Any:
    return model(
        [node("Resize", ["x", "", "scales"], ["y"], **attributes)],
        [value("x", [1, 1, 4, 4])],
        [value("y", None)],
        {"scales": np.array(scales, F)},
    )


def unary(operator: str, outputs: int = 1, opset: int = 17, **attributes: Any) -> Any:
    names = ["y", "z", "u"][:outputs]
    return model(
        [node(operator, ["x"], names, **attributes)],
        [value("x", [1, 4, 4, 4])],
        [value(name, None) for name in names],
        opset=opset,
    )


def batch_norm() -> Any:
    ones = {name: np.ones(4, F) for name in ("s", "b", "m", "v")}
    nodes = [node("BatchNormalization", ["x", *ones], ["y", "m2", "v2"], training_mode=1)]
    outputs = [value(name, None) for name in ("y", "m2", "v2")]
    return model(nodes, [value("x", [1, 4, 4, 4])], outputs, ones)


def conv_transpose() -> Any:
    nodes = [node("ConvTranspose", ["x", "w"], ["y"], output_shape=[13, 8], strides=[3, 2])]
    return model(nodes, [value("x", [1, 1, 3, 3])], [value("y", None)], {"w": draw(1, 2, 3, 3)})


def dropout() -> Any:
    training: dict[str, Array] = {"ratio": np.array(0.5, F), "training": np.array(True)}
    nodes = [node("Dropout", ["x", *training], ["y"])]
    return model(nodes, [value("x", [2, 3])], [value("y", None)], training)


def sequence(operator: str) -> Any:
    """Three tensors, one of which is removed or doubled; the first of what is left."""
    change = ["s", "zero"] if operator == "SequenceErase" else ["s", "x", "zero"]
    nodes = [
        node("SequenceConstruct", ["x", "w", "x"], ["s"]),
        node(operator, change, ["t"]),
        node("SequenceAt", ["t", "zero"], ["y"]),
    ]
    zero: dict[str, Array] = {"zero": np.array(0, np.int64), "w": np.zeros(2, F)}
    return model(nodes, [value("x", [2])], [value("y", None)], zero)


def cast() -> Any:
    nodes = [
        node("Cast", ["x"], ["n"], to=TensorProto.FLOAT8E5M2),
        node("Cast", ["n"], ["y"], to=1),
    ]
    return model(nodes, [value("x", [4])], [value("y", None)], opset=21)


def scatter_elements() -> Any:
    operands: dict[str, Array] = {"i": np.zeros((1, 2, 2), np.int64), "u": draw(1, 2, 2)}
    nodes = [node("ScatterElements", ["x", *operands], ["y"])]
    return model(nodes, [value("x", [1, 4, 3])], [value("y", None)], operands)


CASES = {
    "BatchNormalization": (batch_norm, "in training mode"),
    "Cast": (cast, "to float8e5m2"),
    "ConvTranspose": (conv_transpose, "with output_shape"),
    "Dropout": (dropout, "in training mode"),
    "ScatterElements": (scatter_elements, "with indices of fewer rows than the data"),
    "SequenceErase": (lambda: sequence("SequenceErase"), "at a position"),
    "SequenceInsert": (lambda: sequence("SequenceInsert"), "at a position"),
}


@pytest.mark.parametrize("operator", CASES)
def test_miscomputed_operators_are_rejected(tmp_path: Path, operator: str) -> None:
    """The operator, the case and the node are in the message."""
    make, case = CASES[operator]
    with pytest.raises(ImportFailed, match=f"TVM miscomputes {operator} {case} \\(node"):
        load(make(), tmp_path)


@pytest.mark.parametrize("operator", EXTENSION_OPERATORS)
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_operators_of_other_frontends_are_unknown_in_files(
    tmp_path: Path, operator: str, domain: str
) -> None:
    """ONNX has no operators of these names, whose operands and attributes nobody has checked."""
    opsets = [helper.make_opsetid(name, version) for name, version in (("", 17), (domain, 1))]
    made = model(
        [node(operator, ["x"], ["y"], domain=domain)],
        [value("x", [1, 4, 4, 4])],
        [value("y", None)],
        opset_imports=opsets if domain else opsets[:1],
    )
    name = f"{domain}.{operator}" if domain else operator
    with pytest.raises(ImportFailed, match=f"TVM has no operator {name} \\(node"):
        load(made, tmp_path)


@pytest.mark.parametrize("domain", ["tvmflow", "tvmflow.operators", "tvmflow.weights"])
def test_domains_of_tvmflow_are_refused_in_files(tmp_path: Path, domain: str) -> None:
    """Only the import makes nodes in them."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    made = model(
        [node("Sort", ["x"], ["y"], domain=domain)],
        [value("x", [1, 4, 4, 4])],
        [value("y", None)],
        opset_imports=opsets,
    )
    text = f"Sort (node with output 'y') has the domain '{domain}', which tvmflow reserves"
    with pytest.raises(ImportFailed, match=re.escape(text)):
        load(made, tmp_path)


def test_every_miscomputed_operator_is_tested() -> None:
    """Some are expanded into other operators, and TopK has a test with its converter."""
    others = {"LayerNormalization", "RMSNormalization", "SpaceToDepth", "TopK"}
    miscomputed = {name for name, entry in OPERATORS.items() if entry.miscomputed}
    assert {*CASES} | others == miscomputed


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 28, reason="this onnx has no mode CRD yet")
def test_new_attributes_are_kept(tmp_path: Path) -> None:
    """ONNX's version converter drops them silently, and the result would be that of the default."""
    made = unary("SpaceToDepth", opset=28, blocksize=2, mode="CRD")
    feed = {"x": draw(1, 4, 4, 4)}
    (actual,) = compute(load(made, tmp_path, feed), feed)
    (expected,) = ReferenceEvaluator(made).run(None, feed)
    np.testing.assert_array_equal(actual, expected)


def test_statistics_of_a_layer_norm_come_from_its_definition(tmp_path: Path) -> None:
    """TVM returns zeros for them, so the operator is expanded into its definition."""
    made = model(
        [node("LayerNormalization", ["x", "s", "b"], ["y", "mean", "dev"], axis=-1)],
        [value("x", [2, 3])],
        [value("y", None), value("mean", None), value("dev", None)],
        {"s": draw(3), "b": draw(3, seed=1)},
    )
    agree(made, tmp_path, {"x": draw(2, 3, seed=2)})


def test_unused_outputs_are_accepted(tmp_path: Path) -> None:
    """Exporters name masks and statistics that no node reads."""
    made = model(
        [
            node("LayerNormalization", ["x", "s"], ["n", "mean", "dev"], axis=-1),
            node("Dropout", ["n"], ["d", "mask"]),
            node("Relu", ["d"], ["y"]),
        ],
        [value("x", [2, 3])],
        [value("y", None)],
        {"s": draw(3)},
    )
    agree(made, tmp_path, {"x": draw(2, 3, seed=2)})


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_exact_resize_factors_are_supported(tmp_path: Path, mode: str) -> None:
    """TVM and ONNX agree on twice and half the size."""
    agree(resize([1, 1, 2.0, 0.5], mode=mode), tmp_path, {"x": draw(1, 1, 4, 4)})


def test_attention_is_expanded(tmp_path: Path) -> None:
    """TVM's converter of this name is for Microsoft's operator, which is another one."""
    made = model(
        [node("Attention", ["q", "k", "v"], ["y"])],
        [value(name, [1, 2, 3, 4]) for name in "qkv"],
        [value("y", None)],
        opset=23,
    )
    made.ir_version = 11
    agree(made, tmp_path, {name: draw(1, 2, 3, 4, seed=i) for i, name in enumerate("qkv")})


def test_relu6_of_mobilenets(tmp_path: Path) -> None:
    """Clip becomes kernels that the importer writes; they must stay in the module."""
    made = model(
        [node("Clip", ["x", "low", "high"], ["y"])],
        [value("x", [2, 8])],
        [value("y", [2, 8])],
        {"low": np.array(0, F), "high": np.array(6, F)},
    )
    agree(made, tmp_path, {"x": 10 * draw(2, 8)})


# Each takes a minute, or never ends, where nothing stops it.
MANY = """
g (float[1] x) => (y) <int64[1] s = {3000000}> {
  a = ConstantOfShape(s)
  b = Cast<to=7>(a)
  c = ConstantOfShape(b)
  y = Add(x, c)
}"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MANY, "ConstantOfShape (node with output 'c') lists 3,000,000 axes, and the limit is 64"),
        (
            "g (float[1] x, int64[99999] s) => (y) { y = Expand(x, s) }",
            "Expand (node with output 'y') lists 99,999 axes, and the limit is 64",
        ),
        (
            "g (float[1000000] x) => (y) { s = SplitToSequence(x) y = ConcatFromSequence<axis=0>(s) }",
            "SplitToSequence (node with output 's') cannot be imported: it has 1,000,000 parts, and the limit is 4,096",
        ),
        (
            "g (float[4] x) => (y) <int64 n = {0}> { s = SplitToSequence(x, n) y = ConcatFromSequence<axis=0>(s) }",
            "SplitToSequence (node with output 's') cannot be imported: a part cannot have 0 elements",
        ),
        (
            "g (float[1] x) => (y) <int64 a = {0}, int64 b = {9}, int64 c = {0}> "
            "{ r = Range(a, b, c) f = Cast<to=1>(r) y = Add(x, f) }",
            "Range (node with output 'r') cannot be imported: there is no conversion of it for its attributes and the "
            "operands int64[], int64[], int64[]",
        ),
    ],
)
def test_a_small_file_cannot_ask_for_a_large_graph(
    text: str, sentence: str, tmp_path: Path
) -> None:
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    with pytest.raises(ImportFailed) as caught:
        load(made, tmp_path)
    assert caught.value.message == sentence
