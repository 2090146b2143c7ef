"""Corners of operators that TVM lacks or miscomputes, which random graphs (`tests/fuzz`) hardly reach."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, draw, load, model, value
from tests.unit.frontends.onnx.models import Feed, single
from tvmflow.core.errors import ImportFailed

F, INT, INF = np.float32, np.int64, np.inf


SIGNS = np.array([-3.5, 3.5, -INF, INF, 2.0, -2.0], F)
ROWS = np.array([[-INF, -INF], [-INF, 2.0], [INF, 1.0]], F)
NONE = np.zeros(0, F)


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
    "hyperbolic sine of small and large numbers": lambda: single(
        "Sinh", {"x": np.array([1e-6, -0.3, 0.999, 1.001, -5.0], F)}
    ),
    "positive infinity": lambda: single("IsInf", {"x": SIGNS}, detect_negative=0),
    "negative infinity": lambda: single("IsInf", {"x": SIGNS}, detect_positive=0),
    "no infinity": lambda: single("IsInf", {"x": SIGNS}, detect_positive=0, detect_negative=0),
    "larger of infinities": lambda: single("Max", {"x": ROWS, "y": ROWS[::-1], "z": ROWS[:1]}),
    "smaller of infinities": lambda: single("Min", {"x": -ROWS, "y": -ROWS[:1]}),
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
    "power of integers": lambda: single(
        "Pow", {"x": np.array([3, -7, 2], np.int32)}, {"y": np.array([3, 5, 20], INT)}
    ),
    "squares that wrap": lambda: single(
        "Pow", {"x": np.array([50000, -70000, 9], np.int32)}, {"y": np.array(2, np.int32)}
    ),
    "cubes that wrap": lambda: single(
        "Pow", {"x": np.array([2**40 + 1, -(2**31), 9], INT)}, {"y": np.array(3, INT)}
    ),
    "squares": lambda: single("Pow", {"x": SIGNS}, {"y": np.array([2.0], F)}),
    "cubes": lambda: single("Pow", {"x": draw(3, 5)}, {"y": np.array(3, INT)}),
    "square of a scalar in two axes": lambda: single(
        "Pow", {"x": np.array(3.0, F)}, {"y": np.full((1, 1), 2.0, F)}
    ),
    "square roots": lambda: single("Pow", {"x": SIGNS[[1, 3, 4]]}, {"y": np.array(0.5, F)}),
    "repeats of one row": lambda: single(
        "Tile", {"x": draw(1, 3, 1)}, {"n": np.array([2, 1, 4], INT)}
    ),
    "repeats of two rows": lambda: single(
        "Tile", {"x": draw(1, 3, 2)}, {"n": np.array([2, 2, 1], INT)}
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
    "smallest of infinities": lambda: single("ReduceMin", {"x": -ROWS}, {"a": np.array([1], INT)}),
    "rounded size": lambda: resized([1, 1, 0.6, 0.6], mode="linear"),
    "rounded size, cubic without edges": lambda: resized(
        [1, 1, 0.8, 0.7], mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5
    ),
    "same aspect ratio": lambda: resized(
        None, [4, 9], mode="nearest", axes=[2, 3], keep_aspect_ratio_policy="not_larger"
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
    "split with an empty part": lambda: split_and_concatenated([8, 0]),
    "split with empty parts": lambda: split_and_concatenated([0, 5, 0, 3]),
    "mish before it was an operator": lambda: mish_of_three_nodes(draw(3, 40)),
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


def test_the_logarithm_of_a_sigmoid_is_finite(tmp_path: Path) -> None:
    """As PyTorch computes logsigmoid, which it exports as two nodes."""
    x = np.array([-1000, -100, -17, -0.1, 0, 0.1, 17, 100], F)
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"]),
        helper.make_node("Log", ["s"], ["y"]),
    ]
    made = model(nodes, [value("x", [8])], [value("y", [8])], opset=18)
    [actual] = compute(load(made, tmp_path, {"x": x}), {"x": x})
    np.testing.assert_allclose(actual, -np.logaddexp(0, -x.astype(np.float64)), 1e-5, 1e-7)


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


@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_images_are_resized_as_before_there_were_modes(
    operator: str, opset: int, mode: str, tmp_path: Path
) -> None:
    """ONNX's converter to newer opsets leaves the modes to defaults that sample elsewhere."""
    scales = {"s": np.array([1, 1, 2, 1.5], F)}
    made, feed = single(operator, {"x": draw(1, 2, 4, 6)}, scales, opset=opset, mode=mode)
    agree(made, tmp_path, feed)


@pytest.mark.parametrize(
    ("operator", "feed", "constants"),
    [
        ("Selu", {"x": draw(40).astype(np.float64)}, {}),
        ("AffineGrid", {"x": draw(2, 2, 3).astype(np.float16)}, {"n": np.array([2, 1, 3, 4], INT)}),
    ],
)
def test_results_have_the_dtype_of_the_data(
    operator: str, feed: Feed, constants: Feed, tmp_path: Path
) -> None:
    """TVM's constants and grids are float32."""
    made, _ = single(operator, feed, constants, opset=20)
    [actual] = compute(load(made, tmp_path, feed), feed)
    [expected] = ReferenceEvaluator(made).run(None, feed)
    assert actual.dtype == feed["x"].dtype
    rtol = 1e-2 if actual.dtype == np.float16 else 1e-7
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int16"])
def test_small_integers_are_sorted(dtype: str, tmp_path: Path) -> None:
    made, feed = single(
        "TopK",
        {"x": np.array([[5, 1, 4], [7, 9, 3]], dtype)},
        {"k": np.array([2], INT)},
        outputs=2,
    )
    values, places = compute(load(made, tmp_path, feed), feed)
    assert values.dtype == dtype
    assert values.tolist() == [[5, 4], [9, 7]]
    assert places.tolist() == [[0, 2], [1, 0]]


def test_a_selection_of_nothing_is_refused(tmp_path: Path) -> None:
    """TVM takes 0 for all."""
    made, feed = single("TopK", {"x": draw(2, 3)}, {"k": np.array([0], INT)}, outputs=2)
    with pytest.raises(ImportFailed, match="TopK with K = 0"):
        load(made, tmp_path, feed)


@pytest.mark.parametrize("split", [2, [3, 0, 2], 1, None])
def test_parts_of_a_sequence_are_those_of_onnx(split: Any, tmp_path: Path) -> None:
    """All of one size except the last, or of given sizes; the import used to read parts without end."""
    names = ["x"] if split is None else ["x", "n"]
    made = model(
        [
            helper.make_node("SplitToSequence", names, ["s"], axis=0),
            helper.make_node("SequenceAt", ["s", "i"], ["y"]),
            helper.make_node("ConcatFromSequence", ["s"], ["z"], axis=0),
        ],
        [value("x", [5, 3])],
        [value("y", None), value("z", None)],
        {"i": np.array(0, INT)} | ({} if split is None else {"n": np.array(split, INT)}),
    )
    agree(made, tmp_path, {"x": draw(5, 3)})


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


def test_texts_of_tvm_do_not_reach_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of the node stand in their place."""
    import tvm.relax.frontend.onnx.onnx_frontend as tvm_frontend

    def fail(*_: Any) -> Any:
        raise TypeError("Binary operators must have the same datatype, got R.Tensor and T.int64(1)")

    monkeypatch.setattr(tvm_frontend.Where, "_impl_v16", fail)
    made, feed = single("Where", {"c": SIGNS > 0, "x": SIGNS, "y": SIGNS})
    with pytest.raises(ImportFailed, match=r"operands bool\[6\], float32\[6\], float32\[6\]"):
        load(made, tmp_path, feed)


def test_computed_axes_are_refused_by_name(tmp_path: Path) -> None:
    """The message names the operator and the operand."""
    made, feed = single("CumProd", {"x": draw(3), "axis": np.array(0, INT)}, opset=26)
    with pytest.raises(ImportFailed, match=r"CumProd \(node .*axis depends on the inputs"):
        load(made, tmp_path, feed)
