"""Libraries of a slightly different model, and of a faulty runtime: `verify` must reject each with its default inputs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.onnx_models import draw, model, save, value
from tests.support.verification import Verified
from tvmflow.core.errors import VerifyFailed
from tvmflow.targets import c_runtime

node = helper.make_node


def _number(n: float, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.array(n, dtype)


# ---------------------------------------------------------------- models


def _attend(
    nodes_of_mask: Sequence[onnx.NodeProto], length: int | str, **weights: Any
) -> onnx.ModelProto:
    """One head of causal attention: `data` (n, 16) to `out` (n, 8)."""
    nodes = [
        node("MatMul", ["data", "q"], ["queries"]),
        node("MatMul", ["data", "k"], ["keys"]),
        node("Transpose", ["keys"], ["turned"], perm=[1, 0]),
        node("MatMul", ["queries", "turned"], ["scores"]),
        *nodes_of_mask,
        node("Where", ["mask", "scores", "least"], ["masked"]),
        node("Softmax", ["masked"], ["shares"], axis=-1),
        node("MatMul", ["data", "v"], ["values"]),
        node("MatMul", ["shares", "values"], ["out"]),
    ]
    weights |= {name: draw(16, 8, seed=seed) / 4 for seed, name in enumerate("qkv")}
    weights["least"] = _number(-1e9)
    return model(nodes, [value("data", [length, 16])], [value("out", [length, 8])], weights)


def _mask(diagonal: int = 0, leak: tuple[int, int] | None = None) -> onnx.ModelProto:
    """Attention of 16 positions, of which each sees those before it and itself."""
    mask = np.tril(np.ones((16, 16), bool), diagonal)
    if leak:
        mask[leak] = True
    return _attend([], 16, mask=mask)


def _computed_mask(compare: str = "LessOrEqual", offset: int = 0) -> onnx.ModelProto:
    """Attention of n positions, whose mask is computed."""
    nodes = [
        node("Shape", ["data"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"]),
        node("Range", ["zero", "n", "one"], ["positions"]),
        node("Unsqueeze", ["positions", "last"], ["rows"]),
        node("Unsqueeze", ["positions", "first"], ["all"]),
        node("Sub", ["all", "offset"], ["columns"]),
        node(compare, ["columns", "rows"], ["mask"]),
    ]
    integers = {"zero": 0, "one": 1, "offset": offset}
    weights = {name: _number(n, "int64") for name, n in integers.items()}
    return _attend(nodes, "n", last=np.array([1]), first=np.array([0]), **weights)


CLASS: Final = node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0)
THREE: Final = node("TopK", ["scores", "three"], ["values", "best"])


def _classify(
    end: onnx.NodeProto | None = None,
    *,
    channel: float = 1.0,
    bias: float = 0.0,
    classes: Sequence[int] = (3, 7),
) -> onnx.ModelProto:
    """Two convolutions and a dense layer: `data` (1, 3, 12, 12) to scores or classes."""
    first, last, biases = draw(8, 3, 3, 3, seed=1), draw(16, 10, seed=3), np.zeros(16, np.float32)
    first[3] *= channel
    biases[4] = bias
    last[:, [3, 7]] = last[:, [*classes]]
    nodes = [
        node("Conv", ["data", "a"], ["t"], pads=[1] * 4),
        node("Relu", ["t"], ["u"]),
        node("Conv", ["u", "b", "biases"], ["v"], pads=[1] * 4),
        node("GlobalAveragePool", ["v"], ["w"]),
        node("Flatten", ["w"], ["x"]),
        node("MatMul", ["x", "c"], ["scores"]),
        *([end] if end else []),
    ]
    output = value("scores", [1, 10])
    if end:
        output = value("best", [1, 3] if end is THREE else [1], "int64")
    weights = {"a": first, "b": draw(16, 8, 3, 3, seed=2), "biases": biases, "c": last}
    if end is THREE:
        weights["three"] = np.array([3])
    return model(nodes, [value("data", [1, 3, 12, 12])], [output], weights)


def _classify_rows(channel: float = 1.0) -> onnx.ModelProto:
    first = draw(16, 32, seed=1)
    first[:, 3] *= channel
    nodes = [
        node("MatMul", ["data", "a"], ["t"]),
        node("Relu", ["t"], ["u"]),
        node("MatMul", ["u", "b"], ["scores"]),
        CLASS,
    ]
    weights = {"a": first, "b": draw(32, 10, seed=2)}
    return model(nodes, [value("data", ["n", 16])], [value("best", ["n"], "int64")], weights)


def _choose(
    condition: Sequence[onnx.NodeProto], other: str, rows: int | str, **weights: Any
) -> onnx.ModelProto:
    """Tanh where a condition is true, else another operator."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [node(operator, ["data"], [name])], name, [], [value(name, [rows, 16])]
        )
        for name, operator in (("then", "Tanh"), ("else", other))
    }
    nodes = [*condition, node("If", ["condition"], ["out"], **branches)]
    inputs = [value("data", [rows, 16])]
    if not condition:
        inputs.append(value("condition", [], "bool"))
    return model(nodes, inputs, [value("out", [rows, 16])], weights)


def _choose_by_mean(other: str, least: float) -> onnx.ModelProto:
    nodes = [
        node("ReduceMean", ["data"], ["mean"], keepdims=0),
        node("Greater", ["mean", "least"], ["condition"]),
    ]
    return _choose(nodes, other, 4, least=_number(least))


def _choose_by_size(other: str) -> onnx.ModelProto:
    nodes = [
        node("Shape", ["data"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"]),
        node("Less", ["n", "limit"], ["condition"]),
    ]
    return _choose(nodes, other, "n", zero=_number(0, "int64"), limit=_number(30, "int64"))


def _embed(wrong_row: int | None = None, *, with_layer: bool = False) -> onnx.ModelProto:
    """A table of 1,000 tokens, which is read alone or before a dense layer."""
    table = draw(1000, 8, seed=1)
    if wrong_row is not None:
        table[wrong_row] *= -1
    nodes = [
        node("Gather", ["table", "tokens"], ["rows"]),
        node("ReduceMean", ["rows"], ["mean"], axes=[1], keepdims=0),
        node("MatMul", ["mean", "w"], ["out"]),
    ]
    weights = {"table": table, "w": draw(8, 4, seed=2)}
    outputs = [value("out", [1, 4])]
    if not with_layer:
        nodes, outputs = nodes[:1], [value("rows", [1, 16, 8])]
        del weights["w"]
    return model(nodes, [value("tokens", [1, 16], "int64")], outputs, weights)


def _compute(
    *nodes: onnx.NodeProto,
    shape: Sequence[int] = (4, 64),
    to: Sequence[int] | None = None,
    dtype: str = "float32",
    output: str = "",
    **weights: Any,
) -> onnx.ModelProto:
    """`data` of a shape to `out`."""
    out = value("out", to or shape, output or dtype)
    return model(nodes, [value("data", shape, dtype)], [out], weights)


def _apply(operator: str, **attributes: Any) -> onnx.ModelProto:
    return _compute(node(operator, ["data"], ["out"], **attributes))


def _clip(most: float) -> onnx.ModelProto:
    return _compute(
        node("Clip", ["data", "zero", "most"], ["out"]), zero=_number(0), most=_number(most)
    )


def _select(slope: float) -> onnx.ModelProto:
    nodes = [
        node("Greater", ["data", "least"], ["chosen"]),
        node("Mul", ["data", "slope"], ["other"]),
        node("Where", ["chosen", "data", "other"], ["out"]),
    ]
    return _compute(*nodes, least=_number(2.5), slope=_number(slope))


def _pixels(most: float) -> onnx.ModelProto:
    nodes = [
        node("Cast", ["data"], ["floats"], to=TensorProto.FLOAT),
        node("Min", ["floats", "most"], ["capped"]),
        node("Mul", ["capped", "scale"], ["out"]),
    ]
    numbers: dict[str, Any] = {"most": _number(most), "scale": _number(1 / 255)}
    return _compute(*nodes, dtype="uint8", output="float32", **numbers)


def _softmax(*, subtracts: bool) -> onnx.ModelProto:
    if subtracts:
        return _apply("Softmax", axis=1)
    nodes = [
        node("Exp", ["data"], ["e"]),
        node("ReduceSum", ["e", "axes"], ["sum"]),
        node("Div", ["e", "sum"], ["out"]),
    ]
    return _compute(*nodes, axes=np.array([1]))


def _modulo(truncates: int) -> onnx.ModelProto:
    five = _number(5, "int32")
    return _compute(
        node("Mod", ["data", "five"], ["out"], fmod=truncates), dtype="int32", five=five
    )


def _image(operator: str, to: int, *inputs: str, **attributes: Any) -> onnx.ModelProto:
    """An operator on an image of 8 x 8."""
    weights = {
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "twice": np.array([1, 1, 2, 2], np.float32),
    }
    used: dict[str, Any] = {name: weights[name] for name in inputs if name}
    operation = node(operator, ["data", *inputs], ["out"], **attributes)
    return _compute(operation, shape=(1, 4, 8, 8), to=(1, 4, to, to), **used)


def _recur(linear_before_reset: int) -> onnx.ModelProto:
    gru = node(
        "GRU",
        ["data", "w", "r", "b"],
        ["all"],
        hidden_size=8,
        linear_before_reset=linear_before_reset,
    )
    weights = {
        "w": draw(1, 24, 6, seed=1) / 2,
        "r": draw(1, 24, 8, seed=2) / 2,
        "b": draw(1, 48, seed=3) / 2,
    }
    return model([gru], [value("data", [10, 1, 6])], [value("all", [10, 1, 1, 8])], weights)


def _normalize(epsilon: float) -> onnx.ModelProto:
    operation = node("LayerNormalization", ["data", "w"], ["out"], epsilon=epsilon)
    return _compute(operation, w=np.ones(64, np.float32))


MUTANTS: Final[dict[str, tuple[onnx.ModelProto, onnx.ModelProto]]] = {
    "causal mask shifted by one": (_mask(), _mask(1)),
    "causal mask with one future position": (_mask(), _mask(leak=(5, 6))),
    "computed mask shifted by one": (_computed_mask(), _computed_mask(offset=1)),
    "computed mask without the position itself": (_computed_mask(), _computed_mask("Less")),
    "inner channel times 1.001 before a class": (_classify(CLASS), _classify(CLASS, channel=1.001)),
    "inner channel times 1.001 before three": (_classify(THREE), _classify(THREE, channel=1.001)),
    "inner channel times 1.001 before scores": (_classify(), _classify(channel=1.001)),
    "inner channel times 1.001 of n rows": (_classify_rows(), _classify_rows(1.001)),
    "inner bias of 0.001 before a class": (_classify(CLASS), _classify(CLASS, bias=0.001)),
    "two classes exchanged": (_classify(CLASS), _classify(CLASS, classes=(7, 3))),
    "else-branch": (_choose_by_mean("Sigmoid", 0), _choose_by_mean("Tanh", 0)),
    "rare else-branch": (_choose_by_mean("Sigmoid", -5), _choose_by_mean("Tanh", -5)),
    "else-branch of an input": (_choose([], "Sigmoid", 4), _choose([], "Tanh", 4)),
    "else-branch of large sizes": (_choose_by_size("Sigmoid"), _choose_by_size("Tanh")),
    "other side of Where": (_select(0.5), _select(0.6)),
    "one row of a table": (_embed(), _embed(700)),
    "one row of a table before a layer": (
        _embed(with_layer=True),
        _embed(999, with_layer=True),
    ),
    "sign of integers": (
        _compute(node("Abs", ["data"], ["out"]), dtype="int32"),
        _compute(node("Identity", ["data"], ["out"]), dtype="int32"),
    ),
    "modulo of negative integers": (_modulo(0), _modulo(1)),
    "bright pixels": (_pixels(1e9), _pixels(200)),
    "slope of LeakyRelu": (_apply("LeakyRelu", alpha=0.01), _apply("LeakyRelu", alpha=0.02)),
    "Relu for Relu6": (_clip(6), _clip(1e9)),
    "no upper bound": (_clip(50), _clip(1e9)),
    "Softmax that overflows": (_softmax(subtracts=True), _softmax(subtracts=False)),
    "padding that counts": (
        _image("AveragePool", 8, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=0),
        _image("AveragePool", 8, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
    ),
    "edge for reflection": (
        _image("Pad", 10, "pads", mode="reflect"),
        _image("Pad", 10, "pads", mode="edge"),
    ),
    "coordinates of Resize": (
        _image("Resize", 16, "", "twice", mode="linear"),
        _image(
            *("Resize", 16, "", "twice"),
            mode="linear",
            coordinate_transformation_mode="align_corners",
        ),
    ),
    "reset gate of GRU": (_recur(0), _recur(1)),
    "epsilon of a norm": (_normalize(1e-5), _normalize(1e-3)),
}
"""Mutant -> the model, and the one whose library is delivered."""

RUNTIME_FAULTS: Final = {
    "last task lost with 3 threads": (
        "  const tf_thread before = tf_here;\n",
        "  if (context->threads == 3 && task == tasks - 1) return;\n",
    ),
    "last task lost with several threads": (
        "  const tf_thread before = tf_here;\n",
        "  if (context->threads > 1 && task == tasks - 1) return;\n",
    ),
    "loops skipped with one thread": (
        "  if (tf_here.is_serial || tasks == 1) {\n",
        "    if (context->threads == 1) return 0;\n",
    ),
}
"""Fault of the runtime -> a line of it, and what is inserted behind."""


def _verify(mutant: str, folder: Path) -> Any:
    made = []
    for side, graph in zip(("right", "wrong"), MUTANTS[mutant], strict=True):
        own = folder / side
        own.mkdir()
        shape = graph.graph.input[0].type.tensor_type.shape.dim
        fields: dict[str, Any] = {}
        if shape[0].dim_param:
            fields["dimensions"] = {"n": {"min": 1, "max": 64}}
            fields["inputs"] = {"data": {"shape": ["n", 16]}}
        made.append(Verified(own / "stages", {"onnx": "model.onnx"}, save(graph, own), **fields))
    right, wrong = made
    return right.verify(of=wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=pytest.mark.nightly if place % 4 else ())
        for place, mutant in enumerate(MUTANTS)
    ],
)
def test_a_library_of_another_model_is_rejected(mutant: str, tmp_path: Path) -> None:
    found = _verify(mutant, tmp_path)
    assert isinstance(found, VerifyFailed), found


@pytest.mark.slow
@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
def test_a_fault_of_some_numbers_of_threads_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of a fixed shape is run with one, two and three threads."""
    made = _compute(
        node("Conv", ["data", "w"], ["out"], pads=[1] * 4),
        shape=(1, 32, 56, 56),
        w=draw(32, 32, 3, 3),
    )
    verified = Verified(tmp_path / "stages", {"onnx": "model.onnx"}, save(made, tmp_path))
    right = verified.verify()
    assert not isinstance(right, VerifyFailed), right
    assert right["threads"] == {"1": True, "3": True}
    sources = tmp_path / "c_runtime"
    shutil.copytree(Path(c_runtime.__file__).parent, sources)
    line, inserted = RUNTIME_FAULTS[fault]
    text = (sources / "runtime.c").read_text()
    assert line in text
    (sources / "runtime.c").write_text(text.replace(line, line + inserted, 1))
    monkeypatch.setattr(c_runtime, "_FOLDER", sources)
    assert isinstance(verified.verify(), VerifyFailed)
