"""Converters without MXNet: what they refuse, shapes that they infer, and the old names of operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.mxnet_runs import Array, compute, specs, write_checkpoint
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS, _onnx_graph
from tvmflow.frontends.mxnet import _arithmetic, _arrays, _layers
from tvmflow.frontends.mxnet._graph import CONVERTERS
from tvmflow.frontends.onnx.graph import known_values
from tvmflow.frontends.onnx.prepare import prepare

frontend = FRONTENDS["mxnet"]

Shape = tuple[int, ...]


def load(folder: Path, op: str, shapes: list[Shape], dtype: str, attrs: dict[str, str]) -> Any:
    """Import a symbol of one operator, all of whose inputs are inputs of the recipe."""
    names = [f"input{index}" for index in range(len(shapes))]
    nodes: list[dict[str, Any]] = [{"op": "null", "name": name} for name in names]
    nodes.append({"op": op, "name": "it", "inputs": list(range(len(names))), "attrs": attrs})
    files = write_checkpoint(folder, nodes, [[len(names), 0, 0]], {})
    inputs = tuple(TensorSpec(*spec, dtype) for spec in zip(names, shapes, strict=True))
    return frontend.load(files, inputs)


def test_every_operator_has_one_converter() -> None:
    """No module replaces the converter of another one."""
    total = sum(len(module.CONVERTERS) for module in (_arithmetic, _arrays, _layers))
    assert total == len(CONVERTERS)


IMAGE = (1, 4, 6, 6)
REFUSALS: list[tuple[str, list[Shape], dict[str, str], str]] = [
    ("Convolution", [(2, 3), (4, 3)], {"kernel": "(3,)", "num_filter": "4"}, "its data has 2 dimensions, 3 to 5 are supported"),
    ("Convolution", [IMAGE, IMAGE], {"kernel": "(3,)", "num_filter": "4"}, "kernel (3,) does not fit data of shape (1, 4, 6, 6)"),
    ("Convolution", [IMAGE, IMAGE], {"kernel": "(3, 3)", "num_filter": "4", "layout": "NHWC"}, "layout='NHWC' is not supported: data must be NCHW"),
    ("Convolution", [IMAGE, (4, 4, 3, 3)], {"kernel": "(3, 3)", "num_filter": "4", "stride": "(2,)", "no_bias": "True"}, "stride has 1 value, but the data has 2 spatial dimensions"),
    ("Convolution", [IMAGE, (4, 4, 3, 3)], {"kernel": "(3, 3)", "num_filter": "4", "no_bias": "maybe"}, "no_bias='maybe' is not true or false"),
    ("Convolution", [IMAGE, (4, 4, 3, 3)], {"num_filter": "4"}, "the attribute kernel is missing"),
    ("Deconvolution", [IMAGE, (4, 2, 3, 3)], {"kernel": "(3, 3)", "num_filter": "2", "target_shape": "(9, 9)"}, "target_shape=(9, 9) is larger than its largest output (8, 8)"),
    ("Deconvolution", [IMAGE, (4, 2, 3, 3)], {"kernel": "(3, 3)", "num_filter": "2", "stride": "(2, 2)", "dilate": "(2, 2)"}, "stride=(2, 2) with dilate=(2, 2) is not supported"),
    ("Deconvolution", [IMAGE, (4, 2, 3, 3)], {"kernel": "(3, 3)", "num_filter": "2", "adj": "(1, 1)"}, "adj (1, 1) must be smaller than stride (1, 1)"),
    ("Pooling", [IMAGE], {"pool_type": "lp", "kernel": "(2, 2)", "p_value": "4"}, "p_value=4 is not supported, only 1, 2 and 3"),
    ("Pooling", [IMAGE], {"pool_type": "max"}, "the attribute kernel is missing"),
    ("GroupNorm", [IMAGE, (4,), (4,)], {"num_groups": "3"}, "4 channels do not divide into num_groups=3"),
    ("LRN", [IMAGE], {"nsize": "4"}, "nsize=4 is even"),
    ("LRN", [(1, 4, 6)], {"nsize": "3"}, "its data has 3 dimensions, 4 are needed"),
    ("LeakyReLU", [IMAGE, (3,)], {"act_type": "prelu"}, "gamma of shape (3,) does not fit data of shape (1, 4, 6, 6)"),
    ("softmax", [(2, 3)], {"use_length": "True"}, "use_length=True is not supported"),
    ("UpSampling", [(1, 1, 4, 4), (1, 1, 3, 3)], {"scale": "2", "sample_type": "nearest", "num_args": "2"}, "input 1 of size (3, 3) does not divide (8, 8)"),
    ("UpSampling", [IMAGE, (4, 1, 4, 4)], {"scale": "2", "sample_type": "bilinear", "num_filter": "3"}, "num_filter is not its data's 4 channels"),
    ("_contrib_BilinearResize2D", [IMAGE], {"height": "1", "width": "3"}, "resizing to 1 with align_corners is not supported"),
    ("_contrib_ROIAlign", [IMAGE, (2, 4)], {"pooled_size": "(2, 2)", "spatial_scale": "1"}, "regions have 4 columns, 5 are needed"),
    ("_contrib_ROIAlign", [IMAGE, (2, 5)], {"aligned": "True"}, "aligned='True' is not supported"),
    ("dot", [(2, 3, 4), (4, 5)], {"transpose_a": "True"}, "transposed data of 3 and 2 dimensions are not supported"),
    ("_linalg_gemm2", [(2, 3), (3, 4)], {"axis": "-3"}, "axis='-3' is not supported: matrices must be the last two axes"),
    ("norm", [(2, 3)], {"ord": "3"}, "ord=3 is not supported, only 1 and 2"),
    ("argmax_channel", [(2, 3, 4)], {}, "its data has 3 dimensions, 2 are needed"),
    ("add_n", [(2, 3), (2, 3)], {"num_args": "3"}, "num_args is 3, but it has 2 inputs"),
    ("depth_to_space", [(2, 8)], {"block_size": "2"}, "its data has 2 dimensions, 4 are needed"),
    ("SliceChannel", [(2, 5)], {"num_outputs": "2"}, "axis 1 of size 5 cannot be split into num_outputs=2"),
    ("_split_v2", [(2, 5)], {"sections": "2"}, "axis 1 of size 5 cannot be split into sections=2"),
    ("SliceChannel", [(2, 4)], {"num_outputs": "2", "squeeze_axis": "True"}, "squeeze_axis=True needs parts of size 1, and one has the size 2"),
    ("Pad", [(2, 3)], {"mode": "constant", "pad_width": "(0, 1)"}, "pad_width=(0, 1) does not fit 2 dimensions"),
    ("broadcast_to", [(2, 3)], {"shape": "(2, 3, 4)"}, "shape=(2, 3, 4) does not fit 2 dimensions"),
    ("broadcast_to", [(2, 3)], {"shape": "(4, 3)"}, "data of shape (2, 3) cannot be broadcast to (4, 3)"),
    ("squeeze", [(2, 3)], {"axis": "1"}, "axis (1,) does not have size 1 in data of shape (2, 3)"),
    ("Reshape", [(2, 3)], {"shape": "(-4, 1, 2, 0, 0)"}, "needs more dimensions than data of shape (2, 3) has"),
    ("Reshape", [(2, 3)], {"shape": "(-4, 1, 2, 0)", "reverse": "True"}, "with reverse=True is not supported"),
    ("slice", [(2, 3)], {"begin": "(2,)", "end": "(2,)"}, "its slice of axis 0 of size 2 is empty"),
    ("slice", [(2, 3)], {"begin": "(0, 0)", "end": "(1,)"}, "do not fit 2 dimensions"),
    ("slice_like", [(2, 3), (4, 3)], {}, "shape (4, 3) cannot be cut from data of shape (2, 3)"),
    ("Crop", [IMAGE], {"h_w": "(4, 4)", "offset": "(3, 0)", "num_args": "1"}, "a window of (4, 4) at (3, 0) is not within (6, 6)"),
    ("pick", [(2, 3), (2,)], {"axis": "None"}, "axis=None is not supported"),
    ("_contrib_MultiBoxDetection", [(1, 1, 5), (1, 20), (1, 5, 4)], {}, "its class scores have 1 classes, at least 2 are needed"),
    ("_contrib_MultiBoxDetection", [(1, 2, 5), (1, 20), (1, 5, 4)], {"variances": "(0.1, 0.2)"}, "variances=(0.1, 0.2) must be four numbers"),
    ("_contrib_box_nms", [(1, 5, 6)], {"coord_start": "3"}, "coord_start=3 does not fit rows of 6 values"),
    ("_contrib_box_nms", [(1, 5, 6)], {"score_index": "-1"}, "score_index=-1 does not fit rows of 6 values"),
    ("_contrib_box_nms", [(1, 5, 6)], {"id_index": "6"}, "id_index=6 does not fit rows of 6 values"),
    ("topk", [(2, 3)], {"ret_typ": "mask"}, "ret_typ='mask' is not supported, only indices, value, both"),
    ("Cast", [(2, 3)], {"dtype": "bfloat16"}, "dtype='bfloat16' is not supported, only float16, float32"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shapes", "attrs", "message"), REFUSALS)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, op: str, shapes: list[Shape], attrs: dict[str, str], message: str
) -> None:
    """The message names operator, node and reason."""
    with pytest.raises(ImportFailed) as caught:
        load(tmp_path, op, shapes, "float32", attrs)
    assert caught.value.message.startswith(f"{op} 'it' cannot be imported: ")
    assert message in caught.value.message


def test_one_hot_makes_its_classes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are constants: none of them is looked at as a size that may be dynamic."""
    checked: list[object] = []

    def record(size: object) -> bool:
        checked.append(size)
        return False

    monkeypatch.setattr(_onnx_graph, "is_dynamic", record)
    [output] = load(tmp_path, "one_hot", [(2,)], "int32", {"depth": "50000"}).outputs
    assert output.shape == (2, 50_000)
    assert len(checked) < 1000


def test_shapes_are_known_after_operators_that_onnx_lacks() -> None:
    """Checks and rewrites of the ONNX frontend need those of later values."""
    graph = _onnx_graph.Graph()
    spec = TensorSpec("data", (2, 3), "float32")
    data = graph.input(spec)
    order = graph.add_own("ArgSort", data, "int32", data, axis=1, descending=0)
    result = graph.add("Neg", order)
    prepared = prepare(graph.finish([("it", result)]), (spec,))
    assert known_values(prepared).shapes == dict.fromkeys(
        ("data", order.name, result.name, "it"), (2, 3)
    )


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("_div_scalar", {"scalar": "2"}, "int32 data are not supported, only floating point"),
        ("_plus_scalar", {"scalar": "0.5"}, "int32 data with the scalar 0.5 are not supported"),
    ],
)
def test_integer_arithmetic_that_differs_between_versions_is_refused(
    tmp_path: Path, op: str, attrs: dict[str, str], message: str
) -> None:
    """Versions of MXNet round it differently."""
    with pytest.raises(ImportFailed, match=message):
        load(tmp_path, op, [(2, 3)], "int32", attrs)


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "expected"),
    [
        ("Reshape", (2, 3, 4), {"shape": "(0, -1)"}, (2, 12)),
        ("Reshape", (2, 3, 4), {"shape": "(-3, 0)"}, (6, 4)),
        ("Reshape", (2, 3, 4), {"shape": "(0, -2)"}, (2, 3, 4)),
        ("Reshape", (2, 3, 4), {"shape": "(-4, 1, -1, -2)"}, (1, 2, 3, 4)),
        ("Reshape", (2, 3, 4), {"shape": "(-4, -1, 2, -2)"}, (1, 2, 3, 4)),
        ("Reshape", (2, 3, 4), {"shape": "(8, 3)"}, (8, 3)),
        ("Reshape", (10, 5, 4), {"shape": "(-1, 0)", "reverse": "True"}, (50, 4)),
        ("Reshape", (2, 3, 4), {"target_shape": "(0, 8)"}, (3, 8)),
        ("Reshape", (2, 3, 4), {"target_shape": "(0, 0)", "keep_highest": "True"}, (2, 12)),
        ("Pooling", (1, 1, 6, 6), {"kernel": "(3, 3)", "stride": "(2, 2)"}, (1, 1, 2, 2)),
        (
            "Pooling",
            (1, 1, 6, 6),
            {"kernel": "(3, 3)", "stride": "(2, 2)", "pooling_convention": "full"},
            (1, 1, 3, 3),
        ),
        ("slice", (4, 5), {"begin": "(None, 4)", "end": "(None, 0)", "step": "(2, -2)"}, (2, 2)),
        ("topk", (3, 7), {"k": "0", "ret_typ": "value"}, (3, 7)),
        ("sum", (2, 3, 4), {"axis": "1", "exclude": "True"}, (3,)),
        ("sum", (2, 3, 4), {}, (1,)),
        ("_contrib_arange_like", (2, 6), {"axis": "1", "repeat": "4"}, (6,)),
        ("_contrib_BilinearResize2D", (1, 1, 5, 6), {"mode": "to_even_up"}, (1, 1, 6, 6)),
    ],
)
def test_shapes_follow_mxnets_rules(
    tmp_path: Path, op: str, shape: Shape, attrs: dict[str, str], expected: Shape
) -> None:
    """The codes of Reshape, conventions of pooling, and what an omitted attribute means."""
    assert load(tmp_path, op, [shape], "float32", attrs).outputs[0].shape == expected


def _compare(function: Callable[[Array, Any], Array]) -> Callable[[Array, Any], Array]:
    return lambda a, b: function(a, b).astype("float32")


BINARY: dict[str, Callable[[Any, Any], Array]] = {
    "plus": np.add,
    "minus": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "mod": np.mod,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "hypot": np.hypot,
    "equal": _compare(np.equal),
    "not_equal": _compare(np.not_equal),
    "greater": _compare(np.greater),
    "greater_equal": _compare(np.greater_equal),
    "lesser": _compare(np.less),
    "lesser_equal": _compare(np.less_equal),
    "logical_and": _compare(np.logical_and),
    "logical_or": _compare(np.logical_or),
    "logical_xor": _compare(np.logical_xor),
}
CAMEL = {"plus", "minus", "mul", "div", "mod", "power", "maximum", "minimum"}
SWAPPED = {"minus", "div", "mod", "power"}


def _names() -> dict[str, tuple[Callable[[Any, Any], Array], bool | None]]:
    """Give every name of a binary function, with whether its scalar is left, or None for two tensors."""
    names: dict[str, tuple[Callable[[Any, Any], Array], bool | None]] = {}
    for name, function in BINARY.items():
        names[f"_{name}"] = names[f"broadcast_{name}"] = function, None
        names[f"_{name}_scalar"] = function, False
        if name in CAMEL:
            names[f"_{name.title()}"] = function, None
            names[f"_{name.title()}Scalar"] = function, False
        if name in SWAPPED:
            names[f"_r{name}_scalar"] = function, True
            names[f"_R{name.title()}Scalar"] = function, True
    return names


def test_old_names_of_arithmetic_compute_the_same(tmp_path: Path) -> None:
    """Elementwise operators under the names of MXNet 0.x and 1.x, with tensors and with scalars."""
    draw = np.random.RandomState(7)
    feed = {
        name: (draw.randint(0, 4, (3, 5)) + 0.5 * (name == "a")).astype("float32") for name in "ab"
    }
    feed["b"][0, :2] = feed["a"][0, :2]
    feed["b"] += 1.0
    names = {name: spec for name, spec in _names().items() if name in CONVERTERS}
    assert len(names) > 60
    nodes: list[dict[str, Any]] = [{"op": "null", "name": name} for name in feed]
    for name, (_, is_left) in names.items():
        inputs, attrs = ([0, 1], {}) if is_left is None else ([0], {"scalar": "1.5"})
        nodes.append({"op": name, "name": f"n{len(nodes)}", "inputs": inputs, "attrs": attrs})
    heads = [[index, 0, 0] for index in range(2, len(nodes))]
    model = frontend.load(write_checkpoint(tmp_path, nodes, heads, {}), specs(feed))
    results = compute(model, feed)
    for (name, (function, is_left)), result in zip(names.items(), results, strict=True):
        operands = (feed["a"], feed["b"] if is_left is None else np.float32(1.5))
        expected = function(*(reversed(operands) if is_left else operands))
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6, err_msg=name)
