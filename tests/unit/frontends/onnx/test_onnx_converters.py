"""Operators that TVM lacks or miscomputes give the numbers of ONNX's reference evaluator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, draw, load, model, value
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.onnx._activations import ACTIVATION_CONVERTERS
from tvmflow.frontends.onnx._attention import ATTENTION_CONVERTERS
from tvmflow.frontends.onnx._converters import CONVERTERS
from tvmflow.frontends.onnx._reductions import REDUCTION_CONVERTERS
from tvmflow.frontends.onnx._rewrites import _REWRITES

F, INT, INF = np.float32, np.int64, np.inf
Feed = dict[str, Array]


def single(
    operator: str, feed: Feed, constants: Feed | None = None, opset: int = 19, **attributes: Any
) -> tuple[onnx.ModelProto, Feed]:
    """Return a model of one node, which reads the feed and then the constants; empty arrays are missing operands."""
    constants = constants or {}
    names = [name if array.size else "" for name, array in (feed | constants).items()]
    outputs = attributes.pop("outputs", 1)
    results = [f"y{n}" for n in range(outputs)]
    made = model(
        [helper.make_node(operator, names, results, **attributes)],
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feed.items()
        ],
        [value(name, None) for name in results],
        {name: array for name, array in constants.items() if array.size},
        opset=opset,
    )
    made.ir_version = 10
    for output in made.graph.output:
        output.ClearField("type")
    return made, feed


SIGNS = np.array([-3.5, 3.5, -INF, INF, 2.0, -2.0], F)
ROWS = np.array([[-INF, -INF], [-INF, 2.0], [INF, 1.0]], F)
NONE = np.zeros(0, F)
LINE = {"x": draw(1, 9, 2, seed=3)}


def resized(scales: list[float] | None = None, sizes: list[int] | None = None, **how: Any) -> Any:
    constants: Feed = {
        "roi": NONE,
        "scales": np.array(scales or [], F),
        "sizes": np.array(sizes or [], INT),
    }
    if not sizes:
        del constants["sizes"]
    return single("Resize", {"x": draw(1, 2, 7, 5)}, constants, **how)


BOXES: Feed = {
    "boxes": np.array([[[0, 0, 2, 2], [0, 0, 2, 4], [1, 0, 2, 2], [4, 4, 5, 5]]], F),
    "scores": np.array([[[0.9, 0.8, 0.7, 0.2], [-0.5, 0.1, 0.3, 0.4]]], F),
}


def split_and_concatenated(sizes: list[int]) -> tuple[onnx.ModelProto, Feed]:
    """Return a model that splits a tensor, and concatenates the parts the other way round."""
    parts = [f"p{n}" for n in range(len(sizes))]
    made = model(
        [
            helper.make_node("Split", ["x", "n"], parts, axis=-1),
            helper.make_node("Relu", [parts[0]], ["first"]),
            helper.make_node("Concat", [*parts[:0:-1], "first"], ["y"], axis=-1),
        ],
        [value("x", [2, 3, 8])],
        [value("y", [2, 3, 8])],
        {"n": np.array(sizes, INT)},
        opset=19,
    )
    return made, {"x": draw(2, 3, 8)}


def mish_of_three_nodes(x: Array) -> tuple[onnx.ModelProto, Feed]:
    nodes = [
        helper.make_node("Softplus", ["x"], ["s"]),
        helper.make_node("Tanh", ["s"], ["t"]),
        helper.make_node("Mul", ["x", "t"], ["y"]),
    ]
    shape = list(x.shape)
    return model(nodes, [value("x", shape)], [value("y", shape)], opset=13), {"x": x}


CASES: dict[str, Any] = {
    "bits of numbers": lambda: single(
        "BitCast", {"x": draw(2, 3)}, opset=26, to=TensorProto.INT32
    ),
    "hyperbolic cosine": lambda: single("Cosh", {"x": SIGNS[[0, 1, 4, 5]]}),
    "hyperbolic sine of small and large numbers": lambda: single(
        "Sinh", {"x": np.array([1e-6, -0.3, 0.999, 1.001, -5.0], F)}
    ),
    "product of all before": lambda: single(
        "CumProd", {"x": draw(3, 4)}, {"axis": np.array(-1, INT)}, opset=26, exclusive=1, reverse=1
    ),
    "unit in float16": lambda: single("Elu", {"x": draw(5).astype(np.float16)}),
    "positive infinity": lambda: single("IsInf", {"x": SIGNS}, detect_negative=0),
    "negative infinity": lambda: single("IsInf", {"x": SIGNS}, detect_positive=0),
    "no infinity": lambda: single("IsInf", {"x": SIGNS}, detect_positive=0, detect_negative=0),
    "larger of infinities": lambda: single("Max", {"x": ROWS, "y": ROWS[::-1], "z": ROWS[:1]}),
    "smaller of infinities": lambda: single("Min", {"x": -ROWS, "y": -ROWS[:1]}),
    "sum of a row and a column": lambda: single("Sum", {"x": draw(3, 1), "y": draw(4), "z": draw(1)}),
    "mean of a table and a row": lambda: single("Mean", {"x": draw(3, 4), "y": draw(4)}),
    "remainder by infinity": lambda: single("Mod", {"x": SIGNS[[0, 1]], "y": SIGNS[[3, 2]]}),
    "negative one-hot indices": lambda: single(
        "OneHot",
        {"i": np.array([[0, -1], [4, 9]], INT)},
        {"depth": np.array(5.0, F), "values": np.array([2.0, 7.0], F)},
        axis=1,
    ),
    "one-hot numbers of 64 bits": lambda: single(
        "OneHot",
        {"i": np.array([0, 2], INT)},
        {"depth": np.array(3, INT), "values": np.array([0.1, 1e-300])},
    ),
    "norm of rows of float64": lambda: single(
        "LayerNormalization",
        {"x": draw(2, 3, 5).astype(np.float64)},
        {"s": draw(3, 5, seed=1).astype(np.float64), "b": draw(3, 5, seed=2).astype(np.float64)},
        axis=-2,
        outputs=1,
    ),
    "signs of numbers without one": lambda: single("Sign", {"x": np.array([0, 1, 255], np.uint8)}),
    "power of floats and integers": lambda: single(
        "Pow", {"x": draw(4)}, {"y": np.array([0, 1, 2, 3], np.int32)}
    ),
    "power of integers": lambda: single(
        "Pow", {"x": np.array([3, -7, 2], np.int32)}, {"y": np.array([3, 5, 20], INT)}
    ),
    "where a row of zeros is largest": lambda: single(
        "ArgMax", {"x": np.zeros((2, 4), np.uint8)}, axis=1
    ),
    "where a row of zeros is largest, from the end": lambda: single(
        "ArgMax", {"x": np.zeros((2, 4), np.uint8)}, axis=-1, select_last_index=1
    ),
    "where a row of infinities is smallest": lambda: single(
        "ArgMin", {"x": np.full((2, 4), np.inf, F)}, keepdims=0
    ),
    "largest of infinities": lambda: single("ReduceMax", {"x": ROWS}, {"a": np.array([1], INT)}),
    "mean of integers": lambda: single(
        "ReduceMean", {"x": np.arange(-20, 15, dtype=np.int32).reshape(5, 7)}, {"a": np.array([1], INT)}
    ),
    "smallest of infinities": lambda: single("ReduceMin", {"x": -ROWS}, {"a": np.array([1], INT)}),
    "largest boolean": lambda: single(
        "ReduceMax", {"x": ROWS > 0}, {"a": np.array([1], INT)}, opset=20
    ),
    "norm of squares over all axes": lambda: single(
        "RMSNormalization", {"x": draw(3, 4)}, {"s": draw(3, 4, seed=1)}, opset=23, axis=0
    ),
    "rounded size": lambda: resized([1, 1, 0.6, 0.6], mode="linear"),
    "rounded size, nearest": lambda: resized([1, 1, 1.35, 0.7], mode="nearest"),
    "rounded size, cubic without edges": lambda: resized(
        [1, 1, 0.8, 0.7], mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5
    ),
    "symmetric": lambda: resized(
        [1, 1, 0.6, 1.3], mode="linear", coordinate_transformation_mode="half_pixel_symmetric"
    ),
    "antialiased": lambda: resized([1, 1, 0.3, 0.6], mode="cubic", antialias=1),
    "same aspect ratio": lambda: resized(
        None, [4, 9], mode="nearest", axes=[2, 3], keep_aspect_ratio_policy="not_larger"
    ),
    "spectrum": lambda: single("DFT", LINE, {"n": np.array(7, INT)}, axis=1),
    "longer spectrum of real numbers": lambda: single(
        "DFT", {"x": draw(2, 9, 1)}, {"n": np.array(12, INT)}, axis=1, onesided=1
    ),
    "inverse spectrum": lambda: single("DFT", LINE, axis=1, inverse=1),
    "spectra of frames": lambda: single(
        "STFT",
        {"x": draw(2, 33, 1)},
        {"step": np.array(5, INT), "window": draw(8, seed=2), "n": np.array(8, INT)},
    ),
    "mask of dropout": lambda: single("Dropout", {"x": draw(2, 3)}, outputs=2),
    "diagonal of another type": lambda: single(
        "EyeLike", {"x": np.zeros((3, 4), np.int32)}, dtype=TensorProto.DOUBLE, k=-1
    ),
    "halves that are turned by their positions": lambda: single(
        "RotaryEmbedding",
        {
            "x": draw(2, 3, 32),
            "cos": draw(50, 4, seed=1),
            "sin": draw(50, 4, seed=2),
            "positions": np.array([[9, 47, 36], [24, 11, 12]], INT),
        },
        opset=23,
        num_heads=4,
    ),
    "boxes that overlap as much as the threshold": lambda: single(
        "NonMaxSuppression",
        BOXES,
        {"count": np.array([3], INT), "overlap": np.array([0.5], F), "score": np.array([0.2], F)},
    ),
    "split of one part": lambda: single("Split", {"x": draw(2, 8)}, {"n": np.array([8], INT)}, axis=1),
    "split with an empty part": lambda: split_and_concatenated([8, 0]),
    "split with empty parts": lambda: split_and_concatenated([0, 5, 0, 3]),
    "mish": lambda: single("Mish", {"x": draw(3, 40)}),
    "mish of doubles": lambda: single("Mish", {"x": draw(3, 40).astype(np.float64)}),
    "mish before it was an operator": lambda: mish_of_three_nodes(draw(3, 40)),
    "overlapping blocks": lambda: single(
        "Col2Im",
        {"x": draw(2, 3 * 6, 12)},
        {"image": np.array([8, 7], INT), "block": np.array([3, 2], INT)},
        strides=[2, 3],
        pads=[1, 0, 0, 2],
        dilations=[1, 2],
    ),
    "overlapping blocks of a volume": lambda: single(
        "Col2Im",
        {"x": draw(1, 2 * 4, 18)},
        {"image": np.array([4, 4, 4], INT), "block": np.array([2, 2, 1], INT)},
        strides=[1, 2, 2],
        pads=[0, 1, 0, 0, 1, 0],
    ),
    "aligned regions of a scaled image": lambda: single(
        "RoiAlign",
        {
            "x": draw(2, 3, 9, 11),
            "boxes": np.array([[0, 1, 12, 9], [3, 2, 30, 15.5], [-4, 6, 9, 40]], F),
            "batch": np.array([0, 1, 1], INT),
        },
        opset=16,
        output_height=3,
        output_width=4,
        sampling_ratio=2,
        spatial_scale=0.4,
    ),
    "norm of zeros": lambda: single(
        "LpNormalization", {"x": np.array([[0, 0], [3, 4]], F)}, opset=22, axis=1
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operators_agree_with_onnx(case: str, tmp_path: Path) -> None:
    """Values, shapes and dtypes."""
    made, feed = CASES[case]()
    actual = compute(load(made, tmp_path, feed), feed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ReferenceEvaluator(made).run(None, feed)
    for a, b in zip(actual, expected, strict=True):
        b = np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        rtol = 1e-3 if b.dtype == np.float16 else 2e-5
        scale = (
            np.abs(b[np.isfinite(b)], dtype=np.float64).max(initial=0.0) if b.dtype != bool else 0
        )
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("make", [lambda x: single("Mish", {"x": x}), mish_of_three_nodes])
def test_mish_keeps_its_digits(make: Any, tmp_path: Path) -> None:
    """For large negative values, where 1 + eˣ is 1, and for large ones, whose eˣ is infinite."""
    x = np.array([-90, -30, -17, -3, -0.1, 0, 0.1, 3, 17, 89, 1000], F)
    made, feed = make(x)
    [actual] = compute(load(made, tmp_path, feed), feed)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(actual, wide * np.tanh(np.logaddexp(0, wide)), 1e-6, 1e-35)


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("float16", "float16"), ("float16", "float32"), ("float64", "float64")],
)
def test_batch_norms_of_every_float(dtype: str, weights: str, tmp_path: Path) -> None:
    """Alone and behind a convolution, and with weights of float32 for data of float16."""
    names = ["scale", "shift", "mean", "variance"]
    parameters = {n: np.abs(draw(3, seed=i)).astype(weights) for i, n in enumerate(names)}
    kernel = {"w": draw(3, 3, 2, 2).astype(dtype)}
    nodes = [
        helper.make_node("BatchNormalization", ["x", *names], ["alone"]),
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", *names], ["behind"]),
    ]
    outputs = [value(n, None, dtype) for n in ("alone", "behind")]
    made = model(nodes, [value("x", [1, 3, 5, 4], dtype)], outputs, parameters | kernel)
    feed = {"x": draw(1, 3, 5, 4).astype(dtype)}
    actual = compute(load(made, tmp_path, feed), feed)
    rtol = 1e-2 if dtype == "float16" else 1e-9
    for a, b in zip(actual, ReferenceEvaluator(made).run(None, feed), strict=True):
        assert (a.shape, a.dtype) == (b.shape, dtype)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("how", ["NOTSET", "SAME_UPPER"])
@pytest.mark.parametrize("size", [[10, 6], [7, 4]])
def test_the_size_of_a_transposed_convolution_gives_its_padding(
    how: str, size: list[int], tmp_path: Path
) -> None:
    """A larger result is padded after, a smaller one cut on both sides."""
    data: Feed = {"x": draw(1, 1, 3, 3)}
    weights: Feed = {"w": draw(1, 2, 3, 3)}
    made, feed = single(
        "ConvTranspose", data, weights, output_shape=size, strides=[3, 2], auto_pad=how
    )
    agree(made, tmp_path, feed)


WINDOWS = [([5], [4], [2]), ([7, 3], [4, 3], [2, 2]), ([3, 5, 3], [1, 4, 3], [2, 2, 2])]
# Windows that end before the data, which ONNX Runtime refuses for MaxPool.
WITH_GAPS = ([6, 9], [1, 2], [2, 3])


@pytest.mark.parametrize("how", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(
    ("operator", "sizes", "kernel", "strides"),
    [
        (operator, *windows)
        for operator in ("AveragePool", "Conv", "LpPool", "MaxPool")
        for windows in (*WINDOWS, WITH_GAPS)
        if (operator, windows) != ("MaxPool", WITH_GAPS)
    ],
    ids=str,
)
def test_padding_keeps_the_number_of_strides(
    operator: str, how: str, sizes: list[int], kernel: list[int], strides: list[int], tmp_path: Path
) -> None:
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "auto_pad": how}
    weights: Feed = {"w": draw(3, 2, *kernel)} if operator == "Conv" else {}
    if operator == "Conv":
        del attributes["kernel_shape"]
    made, feed = single(operator, {"x": draw(1, 2, *sizes)}, weights, **attributes)
    agree(made, tmp_path, feed)


def test_the_smallest_hyperbolic_sines_are_exact(tmp_path: Path) -> None:
    """The difference of two exponentials near 1 would have an error of a tenth."""
    made, feed = single("Sinh", {"x": np.array([1e-6, -3e-4], F)})
    (actual,) = compute(load(made, tmp_path, feed), feed)
    np.testing.assert_allclose(actual, np.sinh(feed["x"]), rtol=2e-7)


@pytest.mark.parametrize("overlap", [None, 0.0, 0.5])
def test_boxes_are_suppressed_as_onnx_runtime_does(overlap: float | None, tmp_path: Path) -> None:
    """Without a threshold, each that overlaps; scores below 0 count where there is no threshold."""
    constants: Feed = {"count": np.array([3], INT)}
    if overlap is not None:
        constants["overlap"] = np.array([overlap], F)
    made, feed = single("NonMaxSuppression", BOXES, constants)
    (actual,) = compute(load(made, tmp_path, feed), feed)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    (expected,) = session.run(None, dict(feed))
    assert np.array_equal(actual, expected)


def test_every_converter_is_tested() -> None:
    """Clip, PRelu and CastLike have tests with the models that need them, those with windows and TopK with ONNX Runtime, as those in `test_onnx_expressions` and `test_onnx_attention`, ConvInteger with the kernels of dynamic quantization, GroupedWeights with the nodes that it stands for. Reductions and activations are in `test_onnx_special_values`."""
    tested = {node.op_type for make in CASES.values() for node in make()[0].graph.node}
    elsewhere = {*ATTENTION_CONVERTERS, *ACTIVATION_CONVERTERS, *REDUCTION_CONVERTERS}
    assert {*CONVERTERS, *_REWRITES} - elsewhere - tested == {
        *("Clip", "PRelu", "CastLike", "ConvInteger", "ConvTranspose", "TopK"),
        *("AveragePool", "Conv", "MaxPool", "GroupedWeights"),
        *("Det", "MaxUnpool", "ReverseSequence"),
    }


def test_computed_axes_are_refused_by_name(tmp_path: Path) -> None:
    """The message names the operator and the operand."""
    made, feed = single("CumProd", {"x": draw(3), "axis": np.array(0, INT)}, opset=26)
    with pytest.raises(ImportFailed, match=r"CumProd \(node .*axis depends on the inputs"):
        load(made, tmp_path, feed)
