"""Where TVM gives other numbers than ONNX defines, it is not asked: refused by name, or written in other operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, draw, load, model, value
from tvmflow.errors import ImportFailed
from tvmflow.frontends.onnx._operators import KNOWN_WRONG

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
    nodes = [node("ConvTranspose", ["x", "w"], ["y"], output_shape=[10, 8], strides=[3, 2])]
    return model(nodes, [value("x", [1, 1, 3, 3])], [value("y", None)], {"w": draw(1, 2, 3, 3)})


def roi_align() -> Any:
    nodes = [
        node("RoiAlign", ["x", "rois", "batch"], ["y"], mode="max", output_height=2, output_width=2)
    ]
    inputs = [value("x", [1, 1, 8, 8]), value("rois", [1, 4]), value("batch", [1], "int64")]
    return model(nodes, inputs, [value("y", None)])


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


CASES = {
    "BatchNormalization": (batch_norm, "in training mode"),
    "ConvTranspose": (conv_transpose, "with output_shape"),
    "Dropout": (lambda: unary("Dropout", 2), "with its mask"),
    "IsInf": (lambda: unary("IsInf", detect_negative=0), "for one sign only"),
    "Resize": (lambda: resize([1, 1, 0.6, 0.6], mode="linear"), "by a factor that is rounded"),
    "RoiAlign": (roi_align, "with mode max"),
    "SequenceErase": (lambda: sequence("SequenceErase"), "at a position"),
    "SequenceInsert": (lambda: sequence("SequenceInsert"), "at a position"),
}


@pytest.mark.parametrize("operator", CASES)
def test_what_tvm_has_wrong_is_refused(tmp_path: Path, operator: str) -> None:
    """The operator, the case and the node are in the message."""
    make, case = CASES[operator]
    with pytest.raises(ImportFailed, match=f"TVM computes {case} wrongly: {operator} \\(node"):
        load(make(), tmp_path)


def test_every_known_case_is_tested() -> None:
    """Two of them are written in other operators instead."""
    assert {*CASES, "LayerNormalization", "SpaceToDepth"} == set(KNOWN_WRONG)


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 28, reason="this onnx has no mode CRD yet")
def test_a_new_attribute_is_not_lost(tmp_path: Path) -> None:
    """ONNX's converter drops it without a word, and the numbers would be those of the default."""
    made = unary("SpaceToDepth", opset=28, blocksize=2, mode="CRD")
    feed = {"x": draw(1, 4, 4, 4)}
    (ours,) = compute(load(made, tmp_path, feed), feed)
    (expected,) = ReferenceEvaluator(made).run(None, feed)
    np.testing.assert_array_equal(ours, expected)


def test_statistics_of_a_layer_norm_come_from_its_definition(tmp_path: Path) -> None:
    """TVM gives zeros for them: the operator is expanded into what ONNX defines it by."""
    made = model(
        [node("LayerNormalization", ["x", "s", "b"], ["y", "mean", "dev"], axis=-1)],
        [value("x", [2, 3])],
        [value("y", None), value("mean", None), value("dev", None)],
        {"s": draw(3), "b": draw(3, seed=1)},
    )
    agree(made, tmp_path, {"x": draw(2, 3, seed=2)})


def test_outputs_that_nobody_reads_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Exporters give masks and statistics a name."""
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
def test_exact_factors_are_fine(tmp_path: Path, mode: str) -> None:
    """Twice and half the size mean the same to everyone."""
    agree(resize([1, 1, 2.0, 0.5], mode=mode), tmp_path, {"x": draw(1, 1, 4, 4)})


def test_attention_is_written_in_other_operators(tmp_path: Path) -> None:
    """TVM knows Microsoft's operator of that name, which is another one."""
    made = model(
        [node("Attention", ["q", "k", "v"], ["y"])],
        [value(name, [1, 2, 3, 4]) for name in "qkv"],
        [value("y", None)],
        opset=23,
    )
    made.ir_version = 11
    agree(made, tmp_path, {name: draw(1, 2, 3, 4, seed=i) for i, name in enumerate("qkv")})


def test_relu6_as_mobile_nets_have_it(tmp_path: Path) -> None:
    """Clip becomes kernels that the importer writes itself; they must stay beside `main`."""
    made = model(
        [node("Clip", ["x", "low", "high"], ["y"])],
        [value("x", [2, 8])],
        [value("y", [2, 8])],
        {"low": np.array(0, F), "high": np.array(6, F)},
    )
    agree(made, tmp_path, {"x": 10 * draw(2, 8)})
