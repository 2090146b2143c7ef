"""Infinities, NaN, zeros, the smallest and the largest values give what ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, load, model, open_session, value
from tests.unit.frontends.onnx.models import single
from tvmflow.core.errors import ImportFailed

INF, NAN = np.inf, np.nan
VALUES = [
    *(NAN, INF, -INF, -0.0, 0.0, 1e30, -1e30, 3e38, -3e38, 1e-40, -1e-40, 1e-20, 1.0, -1.0),
    *(0.5, -0.5, 1.5, 2.5, -2.5, 3.3, -17.0, -40.0, 87.0, -88.0, -104.0, 65504.0, -1e20),
]
UNARY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in "Abs Ceil Erf Exp Floor Gelu Identity IsInf IsNaN".split()),
    *((name, {}) for name in "LeakyRelu Log Neg Reciprocal Round Sigmoid Softplus Sqrt Tanh".split()),
    *((name, {}) for name in "Elu Selu Sign ThresholdedRelu Celu HardSwish Mish Softsign".split()),
    ("Celu", {"alpha": 2.0}),
    ("Celu", {"alpha": -0.3}),
    ("Elu", {"alpha": -0.5}),
    ("Elu", {"alpha": 1e4}),
    ("Gelu", {"approximate": "tanh"}),
    ("Selu", {"alpha": 2.0, "gamma": -1.0}),
    ("Shrink", {"lambd": 1.0, "bias": 0.5}),
    ("Shrink", {"lambd": -1.0, "bias": 0.5}),
    ("ThresholdedRelu", {"alpha": -0.5}),
]  # fmt: skip
ROWS = np.array(
    [[-INF] * 4, [INF, 1, 2, -INF], [3e38, 0, 0, 1], [-3e38] * 4, [0] * 4, [-INF, -1, -2, -3],
     [88, 89, 90, -100], [1e30, 0, 2, 1], [-4, -5, -6, -7], [1e-40, 1e-30, 0, 0]], np.float32
)  # fmt: skip
HALF_ROWS = np.array(
    [[300] * 4, [6e4, 6e4, -6e4, 1], [3e4] * 4, [256, 256, 256, 1], [6e-8, 0, 0, 0], [1, 2, 3, 4], [0] * 4],
    np.float16,
)  # fmt: skip
REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare"
).split()


def agree(
    nodes: Sequence[NodeProto], x: Array, folder: Path, opset: int = 20, **constants: Array
) -> None:
    """Compare nodes that read x, one by one, with ONNX Runtime."""
    names = [name for node in nodes for name in node.output]
    inputs = [value("x", x.shape, str(x.dtype))]
    outputs = [helper.ValueInfoProto(name=name) for name in names]
    made = model(nodes, inputs, outputs, constants, opset=opset)
    made.ir_version = 10
    actual = compute(load(made, folder, {"x": x}), {"x": x})
    expected = open_session(made).run(None, {"x": x})
    rtol = 2e-3 if x.dtype == np.float16 else 2e-5
    owner = {name: node for node in nodes for name in node.output}
    for name, a, b in zip(names, actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), owner[name]
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7, err_msg=str(owner[name]))


def test_elementwise_operators(tmp_path: Path) -> None:
    nodes = [
        helper.make_node(name, ["x"], [f"y{n}"], **attributes)
        for n, (name, attributes) in enumerate(UNARY)
    ]
    agree(nodes, np.array(VALUES, np.float32), tmp_path)


@pytest.mark.parametrize("rows", [ROWS, HALF_ROWS], ids=["float32", "float16"])
def test_reductions_and_norms(rows: Array, tmp_path: Path) -> None:
    """Squares and sums of float16 are computed in float32, and begin with infinities where these are all."""
    named = [
        *((name, ["x", "axes"], {"keepdims": 0}) for name in REDUCTIONS),
        *((name, ["x"], {"axis": 1}) for name in ("Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin")),
        *(("LpNormalization", ["x"], {"axis": 1, "p": p}) for p in (1, 2)),
    ]  # fmt: skip
    if rows.dtype == np.float32:
        named = [entry for entry in named if entry[0] != "LpNormalization"]
    nodes = [
        helper.make_node(name, inputs, [f"y{n}"], **attributes)
        for n, (name, inputs, attributes) in enumerate(named)
    ]
    agree(nodes, rows, tmp_path, axes=np.array([1]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("is_empty", [False, True], ids=["absent", "empty"])
@pytest.mark.parametrize("keeps_all", [0, 1])
def test_reductions_without_axes(
    dtype: str, is_empty: bool, keeps_all: int, tmp_path: Path
) -> None:
    """`noop_with_empty_axes` keeps all axes; the functions around the sum are applied all the same."""
    x = np.array([[2, 1, 3], [100, 4, 1]], dtype)
    if dtype != "int32":
        x = x - np.array(2.5, dtype)
    inputs = ["x", "none"] if is_empty else ["x"]
    names = [name for name in REDUCTIONS if dtype == "float32" or "Log" not in name]
    nodes = [
        helper.make_node(name, inputs, [name], noop_with_empty_axes=keeps_all) for name in names
    ]
    agree(nodes, x, tmp_path, none=np.zeros(0, np.int64))


WINDOW = np.array(np.arange(84).reshape(1, 2, 7, 6) % 11 - 5, np.float32)
LARGE = (WINDOW * 100).astype(np.float16)
FAR = np.array([[3e4, -3e4, 6e4, 1], [1, 2, 3, 4]], np.float16).reshape(1, 2, 4)
CASES: dict[str, Any] = {
    "scale of zeros": lambda: single("DynamicQuantizeLinear", {"x": np.zeros(6, np.float32)}, outputs=3),
    "scale of a range": lambda: single("DynamicQuantizeLinear", {"x": WINDOW}, outputs=3),
    "shift by all bits": lambda: single(
        "BitShift",
        {"x": np.array([1, 255, 7, 7], np.uint8), "n": np.array([8, 9, 255, 1], np.uint8)},
        direction="LEFT",
    ),
    "shift by all 64 bits": lambda: single(
        "BitShift", {"x": np.array([1, 2**63], np.uint64)}, {"n": np.array(64, np.uint64)}, direction="RIGHT"
    ),
    "swish": lambda: single("Swish", {"x": WINDOW}, opset=24, alpha=1.702),
    "sums of powers of float16": lambda: single("GlobalLpPool", {"x": LARGE}),
    "variances of float16": lambda: single("InstanceNormalization", {"x": FAR}, {
        "s": np.ones(2, np.float16), "b": np.zeros(2, np.float16)}),
    "response of float16": lambda: single("LRN", {"x": LARGE}, size=3),
    "blocks of infinities": lambda: single(
        "Col2Im", {"x": np.where(np.arange(192).reshape(2, 12, 8) == 31, INF, 1.5).astype(np.float32)},
        {"image": np.array([5, 4]), "block": np.array([2, 3])}, pads=[0, 1, 1, 0], strides=[1, 2], dilations=[2, 1]),
    "wider statistics": lambda: single("BatchNormalization", {"x": LARGE}, {
        "s": np.ones(2, np.float16), "b": np.zeros(2, np.float16),
        "m": np.ones(2, np.float32), "v": np.full(2, 9e4, np.float32)}),
    "mean and variance of float16": lambda: single("MeanVarianceNormalization", {"x": LARGE}),
    "variance far from zero": lambda: single("MeanVarianceNormalization", {"x": WINDOW + 3e3}),
    **{
        f"{n}: windows of norm {p}": lambda x=x, p=p, how=how: single("LpPool", {"x": x}, p=p, **how)
        for n, (x, p, how) in enumerate([
            (LARGE, 2, {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
            (WINDOW, 3, {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 1, 1], "ceil_mode": 1}),
            (WINDOW, 1, {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 2], "ceil_mode": 1}),
        ])
    },
    **{
        f"{n}: means of windows with gaps": lambda x=x, how=how: single("AveragePool", {"x": x}, opset=20, **how)
        for n, (x, how) in enumerate([
            (WINDOW, {"kernel_shape": [2, 3], "strides": [2, 1], "dilations": [2, 1], "ceil_mode": 1}),
            (WINDOW, {"kernel_shape": [2, 2], "strides": [3, 2], "dilations": [3, 2], "pads": [0, 1, 1, 1]}),
            (LARGE, {"kernel_shape": [3, 2], "strides": [2, 2], "dilations": [2, 2], "pads": [1, 0, 2, 1]}),
            (WINDOW, {"kernel_shape": [2, 2], "dilations": [2, 2], "pads": [1] * 4, "count_include_pad": 1}),
        ])
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_corners(case: str, tmp_path: Path) -> None:
    made, feed = CASES[case]()
    actual = compute(load(made, tmp_path, feed), feed)
    if case == "swish":
        x = feed["x"]
        expected = [x / (1 + np.exp(-1.702 * x))]
    else:
        expected = open_session(made).run(None, dict(feed))
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        rtol = 3e-3 if b.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_constants_without_elements_are_computed_with(tmp_path: Path) -> None:
    """A tensor between two steps of a fused kernel has no elements, either."""
    nodes = [
        helper.make_node("BatchNormalization", ["none", "s", "s", "s", "s"], ["norm"]),
        helper.make_node("Relu", ["norm"], ["y"]),
    ]
    empty = np.zeros((1, 2, 3, 0), np.float32)
    made = model(nodes, [value("s", [2])], [value("y", [1, 2, 3, 0])], {"none": empty})
    feed = {"s": np.ones(2, np.float32)}
    assert [a.shape for a in compute(load(made, tmp_path, feed), feed)] == [empty.shape]


SLICES = [
    ([3], [1], [0], [1]),
    ([1, 1], [-(2**31), -(2**31)], [-2, -1], [2, 3]),
    ([1], [4], [0], [-1]),
    ([9], [12], [0], [1]),
    ([-9], [-12], [0], [-1]),
    ([-9], [-(2**31)], [0], [-1]),
    ([2**31 - 1], [-(2**63)], [0], [-2]),
    ([0, -1], [2**63 - 1, -9], [0, 1], [3, -1]),
]


def test_bounds_of_slices(tmp_path: Path) -> None:
    """They may be outside of the data or the wrong way round, and a slice may be empty."""
    nodes: list[NodeProto] = []
    constants: dict[str, Array] = {}
    for n, bounds in enumerate(SLICES):
        names = [f"{name}{n}" for name in ("starts", "ends", "axes", "steps")]
        nodes.append(helper.make_node("Slice", ["x", *names], [f"y{n}"]))
        constants |= {k: np.array(v, np.int64) for k, v in zip(names, bounds, strict=True)}
    agree(nodes, np.arange(15, dtype=np.float32).reshape(5, 3), tmp_path, 20, **constants)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float64"])
def test_images_that_are_no_float32_are_resized(dtype: str, tmp_path: Path) -> None:
    """Integers that are mixed are cut, and those that are antialiased are rounded after each axis."""
    nodes: list[NodeProto] = []
    constants: dict[str, Array] = {}
    cases: list[tuple[list[int], dict[str, Any]]] = [
        ([2, 2, 7, 2], {"mode": "linear"}),
        ([2, 2, 1, 1], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        ([2, 2, 2, 3], {"mode": "nearest"}),
        *([([2, 2, 2, 3], {"mode": "linear", "antialias": 1})] if dtype == "uint8" else []),
    ]
    for n, (sizes, how) in enumerate(cases):
        nodes.append(helper.make_node("Resize", ["x", "", "", f"s{n}"], [f"y{n}"], **how))
        constants[f"s{n}"] = np.array(sizes, np.int64)
    low = 0 if dtype == "uint8" else -7
    x = np.random.default_rng(1).integers(low, 8, (2, 2, 4, 5)).astype(dtype)
    if dtype != "float64":
        agree(nodes, x, tmp_path, 19, **constants)
        return
    # ONNX Runtime has no kernel for it
    made, _ = single(
        "Resize",
        {"x": x + 1 / 3},
        {"n": np.zeros(0), "m": np.zeros(0), "s": constants["s0"]},
        mode="linear",
    )
    (actual,) = compute(load(made, tmp_path, {"x": x + 1 / 3}), {"x": x + 1 / 3})
    expected = ReferenceEvaluator(made).run(None, {"x": x + 1 / 3})[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_constant_without_elements_is_quantized_with_a_scale_of_1(tmp_path: Path) -> None:
    """The reduction of no elements was memory that nothing had written."""
    shapes = [(0,), (3, 0), (2, 0, 4)]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", [f"c{n}"], [f"{name}{n}" for name in "ysz"])
        for n in range(len(shapes))
    ]
    constants = {f"c{n}": np.zeros(shape, np.float32) for n, shape in enumerate(shapes)}
    agree(
        [*nodes, helper.make_node("Identity", ["x"], ["y"])],
        np.ones(3, np.float32),
        tmp_path,
        20,
        **constants,
    )


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_static_reductions_of_no_elements(dtype: str, tmp_path: Path) -> None:
    """They give what the reduction begins with; a mean is 0, as in ONNX Runtime."""
    bounds = {"s": np.array([2]), "e": np.array([2]), "a": np.array([1])}
    names = [n for n in REDUCTIONS if dtype == "float32" or "Log" not in n]
    nodes = [helper.make_node("Slice", ["x", "s", "e", "a"], ["rows"])]
    nodes += [helper.make_node(name, ["rows", "a"], [name], keepdims=0) for name in names]
    made = model(
        nodes,
        [value("x", [2, 3, 4], dtype)],
        [helper.ValueInfoProto(name=name) for name in names],
        bounds,
        opset=18,
    )
    feed = {"x": np.ones((2, 3, 4), dtype)}
    actual = compute(load(made, tmp_path, feed), feed)
    for a, b in zip(actual, open_session(made).run(None, feed), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


REFUSED: dict[str, tuple[list[NodeProto], str]] = {
    "mean of no pixels": (
        [helper.make_node("GlobalAveragePool", ["none"], ["y"])],
        "GlobalAveragePool (node with output 'y') cannot be imported: its data of shape [1, 0, 4, 5] has no pixels",
    ),
    "maximum of no pixels": (
        [helper.make_node("GlobalMaxPool", ["none"], ["y"])],
        "GlobalMaxPool (node with output 'y') cannot be imported: its data of shape [1, 0, 4, 5] has no pixels",
    ),
    "place among no elements": (
        [helper.make_node("ArgMax", ["none"], ["y"], axis=1)],
        "ArgMax (node with output 'y') cannot be imported: its data has no elements along the axis",
    ),
    "window larger than the data": (
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[6, 2])],
        "MaxPool (node with output 'y') cannot be imported: its result would have the shape [1, 2, -1, 4]: a window is larger than the padded data",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_no_elements_are_refused(case: str, tmp_path: Path) -> None:
    """What ONNX Runtime refuses, too."""
    nodes, message = REFUSED[case]
    none = helper.make_node("Slice", ["x", "s", "s", "s"], ["none"])
    inputs, outputs = [value("x", [1, 2, 4, 5])], [helper.ValueInfoProto(name="y")]
    made = model([none, *nodes], inputs, outputs, {"s": np.array([1])}, opset=17)
    with pytest.raises(ImportFailed) as error:
        load(made, tmp_path)
    assert error.value.message == message


@pytest.mark.parametrize("operator", ["Expand", "ConstantOfShape"])
def test_shapes_that_are_inputs_are_refused_by_name(operator: str, tmp_path: Path) -> None:
    names = ["x", "shape"][operator == "ConstantOfShape" :]
    made = model(
        [helper.make_node(operator, names, ["y"])],
        [value("x", [2, 1]), value("shape", [2], "int64")],
        [helper.ValueInfoProto(name="y")],
    )
    with pytest.raises(ImportFailed) as error:
        load(made, tmp_path)
    assert error.value.message == (
        f"{operator} (node with output 'y') cannot be imported: the shape of its result depends on "
        "the values of shape"
    )
    assert error.value.fix == "make it constant with inputs.shape.value"


@pytest.mark.parametrize("reduction", ["add", "mul"])
def test_bools_are_scattered(reduction: str, tmp_path: Path) -> None:
    """A sum of bools is whether one is true, a product whether all are."""
    x = np.array([1, 0, 1, 1, 0], bool)
    nodes = [
        helper.make_node("ScatterND", ["x", "rows", "u"], ["y"], reduction=reduction),
        helper.make_node("ScatterElements", ["x", "i", "u"], ["z"], reduction=reduction),
    ]
    places = np.array([0, 1, 1, -1])
    agree(nodes, x, tmp_path, rows=places[:, None], i=places, u=np.array([1, 1, 0, 1], bool))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sizes", [(9,), (6, 6), (5, 4, 3)], ids=str)
def test_windows_of_infinities(dtype: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Their maximum is -inf, as in PyTorch; ONNX Runtime has the lowest finite value with padding."""
    x = np.full((1, 20, *sizes), -INF, dtype)
    x[0, 1] = np.arange(x[0, 1].size).reshape(sizes)
    feed = {"x": x}
    windows: dict[str, Any] = {"kernel_shape": [2] * len(sizes), "pads": [1] * 2 * len(sizes)}
    made, _ = single("MaxPool", feed, **windows)
    (actual,) = compute(load(made, tmp_path, feed), feed)
    assert np.isneginf(actual[0, np.arange(20) != 1]).all()
    expected = open_session(made).run(None, feed)[0]
    np.testing.assert_array_equal(actual[0, 1], expected[0, 1])
