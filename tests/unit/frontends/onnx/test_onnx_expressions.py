"""Operators that Relax lacks give the numbers of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, draw, load, model, value
from tests.unit.frontends.onnx.models import BATCH, agree_at, single
from tvmflow.core.errors import ImportFailed

F, INT = np.float32, np.int64

WINDOWS: dict[str, tuple[Array, dict[str, Any]]] = {
    "a row with padding": (
        np.round(draw(2, 3, 11)),
        {"kernel_shape": [3], "strides": [2], "pads": [1, 1]},
    ),
    "gaps and uneven padding": (
        np.round(draw(1, 2, 10, 9)),
        {"kernel_shape": [2, 3], "strides": [1, 2], "dilations": [3, 2], "pads": [1, 1, 1, 2]},
    ),
    "one image of one channel": (
        draw(1, 1, 8, 9),
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 1]},
    ),
    "a last window beyond the data": (
        draw(1, 2, 10, 9),
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    ),
    "padding for all windows": (
        draw(1, 2, 5, 7),
        {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    "columns of a volume first": (
        draw(2, 2, 5, 6, 7),
        {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2], "storage_order": 1},
    ),
    "padding around a single channel": (
        np.round(draw(1, 1, 8, 8)),
        {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]},
    ),
    "a window of many elements": (
        np.round(draw(1, 1, 60, 60)),
        {"kernel_shape": [48, 50], "strides": [5, 4], "pads": [2, 3, 0, 1]},
    ),
    "bytes": (
        np.arange(72).reshape(1, 2, 6, 6).astype(np.uint8) % 7,
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_maxima_have_places(case: str, tmp_path: Path) -> None:
    """Of equal elements, the first one counts."""
    data, attributes = WINDOWS[case]
    made, feed = single("MaxPool", {"x": data}, outputs=2, opset=12, **attributes)
    agree(made, tmp_path, feed)


@pytest.mark.parametrize(
    ("shape", "given", "attributes"),
    [
        ([2, 3, 9], [], {"kernel_shape": [3], "strides": [3]}),
        (
            [1, 2, 9, 10],
            [],
            {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]},
        ),
        ([2, 3, 9, 7], [2, 3, 9, 7], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ],
    ids=["row", "padding", "shape"],
)
def test_maxima_return_to_their_places(
    shape: list[int], given: list[int], attributes: dict[str, Any], tmp_path: Path
) -> None:
    """Behind the pooling that found them, as in a decoder of SegNet."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["m", "p"], **attributes),
        helper.make_node("MaxUnpool", ["m", "p", *(["s"] if given else [])], ["y"], **attributes),
    ]
    constants: dict[str, Array] = {"s": np.array(given, INT)} if given else {}
    made = model(nodes, [value("x", shape)], [value("y", None)], constants, opset=12)
    agree(made, tmp_path, {"x": draw(*shape)})


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_sequences_are_reversed(dtype: str, tmp_path: Path) -> None:
    """As many steps of each as it is long."""
    lengths = np.array([5, 1, 3], INT)
    steps_first: Array = (draw(5, 3, 2, 2) * 9).astype(dtype)
    made, feed = single("ReverseSequence", {"x": steps_first, "n": lengths})
    agree(made, tmp_path, feed)
    made, feed = single(
        "ReverseSequence", {"x": steps_first[:3, :, 0, 0]}, {"n": lengths[::-1]},
        batch_axis=0, time_axis=1,
    )  # fmt: skip
    feed["x"] = feed["x"][:, :3]
    made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([3, 1, 2], INT), "n"))
    agree(made, tmp_path, feed)


def test_determinants_of_small_matrices(tmp_path: Path) -> None:
    """Also of singular matrices, and of permutations, whose pivots are not in the first row."""
    singular = draw(3, 4, 4)
    singular[0], singular[1, :, 0], singular[2, 0] = 0, 0, 0
    permutations = np.eye(4, dtype=F)[np.array([[1, 0, 3, 2], [1, 2, 3, 0], [0, 1, 3, 2]])]
    for matrices in (draw(2, 3, 5, 5), draw(1, 1), np.concatenate([singular, permutations])):
        made, feed = single("Det", {"x": matrices})
        agree(made, tmp_path, feed)


BOXES = np.array(
    [[0, 1, 12, 9], [3, 2, 30, 15.5], [-4, 6, 9, 40], [5, 5, 5, 5], [9, 9, 3, 3], [-90, -9, -50, 0]],
    F,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("aligned", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("samples", [0, 2, 5])
def test_regions_are_sampled_as_by_onnx_runtime(
    mode: str, aligned: str, samples: int, tmp_path: Path
) -> None:
    """Also those beyond the image, and those of no size, which have no sample where these are counted."""
    made, feed = single(
        "RoiAlign",
        {"x": draw(2, 3, 9, 11), "boxes": BOXES, "image": np.array([0, 1, 1, 0, 1, 0], INT)},
        opset=16,
        mode=mode,
        coordinate_transformation_mode=aligned,
        sampling_ratio=samples,
        output_height=3,
        output_width=4,
        spatial_scale=0.4,
    )
    agree(made, tmp_path, feed)


def test_operators_follow_dynamic_shapes(tmp_path: Path) -> None:
    """Places of maxima, reversed sequences, determinants and regions of any number of images."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["m", "p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["count"]),
        helper.make_node("Expand", ["two", "count"], ["lengths"]),
        helper.make_node("ReverseSequence", ["x", "lengths"], ["r"], batch_axis=0, time_axis=1),
        helper.make_node("Det", ["m"], ["d"]),
        helper.make_node("Cast", ["lengths"], ["number"], to=1),
        helper.make_node("Unsqueeze", ["number", "one"], ["numbers"]),
        helper.make_node("Mul", ["numbers", "box"], ["boxes"]),
        helper.make_node("Sub", ["lengths", "lengths"], ["images"]),
        helper.make_node("RoiAlign", ["x", "boxes", "images"], ["a"], sampling_ratio=2),
    ]
    constants: dict[str, Array] = {"zero": np.array([0], INT), "two": np.array([2], INT)}
    constants |= {"one": np.array([1], INT), "box": np.array([[0, 0.5, 1, 2]], F)}
    outputs = [value(name, None, "int64" if name == "p" else "float32") for name in "mprda"]
    made = model(nodes, [value("x", ["batch", 2, 6, 6])], outputs, constants)
    agree_at(made, tmp_path, [BATCH], [{"batch": 1}, {"batch": 5}])


IMAGES, ONE_BOX, FIRST = draw(2, 3, 9, 11), BOXES[:1], np.zeros(1, INT)
POOLED, PLACES = draw(1, 1, 2, 2), np.array([0, 5, 10, 63], INT).reshape(1, 1, 2, 2)
WINDOW: dict[str, Any] = {"kernel_shape": [4, 4], "strides": [4, 4]}

REFUSED: dict[str, tuple[str, dict[str, Array], dict[str, Array], dict[str, Any], str]] = {
    "empty window": ("MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [0, 2]}, r"kernel_shape is \[0, 2\]"),
    "endless window": (
        "MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [2**31, 2]}, "at most 16,777,216 elements",
    ),
    "window below 0": ("MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [2, -1]}, "kernel_shape is"),
    "no step": ("MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [2, 2], "strides": [0, 1]}, "strides is"),
    "few steps": ("MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [2, 2], "strides": [1]}, "2 numbers"),
    "padding below 0": (
        "MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [2, 2], "pads": [-1] * 4}, "pads is",
    ),
    "padding alone": (
        "MaxPool", {"x": IMAGES}, {}, {"kernel_shape": [2, 2], "pads": [3] * 4}, "pads are not smaller",
    ),
    "places of another shape": (
        "MaxUnpool", {"x": POOLED, "p": PLACES[:, :, :1]}, {}, WINDOW, "do not match values",
    ),
    "result of another rank": (
        "MaxUnpool", {"x": POOLED, "p": PLACES}, {"s": np.array([64], INT)}, WINDOW, "have room for",
    ),
    "small result": (
        "MaxUnpool", {"x": POOLED, "p": PLACES}, {"s": np.array([1, 1, 2, 2], INT)}, WINDOW,
        "have room for",
    ),
    "large result": (
        "MaxUnpool", {"x": POOLED, "p": PLACES}, {"s": np.array([1, 1, 2**20, 2**20], INT)}, WINDOW,
        "the limit",
    ),
    "empty result": (
        "MaxUnpool", {"x": POOLED, "p": PLACES}, {}, {"kernel_shape": [3, 3], "pads": [2] * 4}, "sizes",
    ),
    "few lengths": (
        "ReverseSequence", {"x": draw(4, 3), "n": np.ones(2, INT)}, {}, {}, "do not fit 3 sequences",
    ),
    "same axes": (
        "ReverseSequence", {"x": draw(4, 3), "n": np.ones(3, INT)}, {}, {"time_axis": 1}, "have to be",
    ),
    "one axis": ("ReverseSequence", {"x": draw(4), "n": np.ones(4, INT)}, {}, {}, "of 1 axes"),
    "oblong matrices": ("Det", {"x": draw(2, 3)}, {}, {}, "not square matrices"),
    "a row": ("Det", {"x": draw(3)}, {}, {}, "not square matrices"),
    "large matrices": ("Det", {"x": draw(17, 17)}, {}, {}, "at most 16 rows, and has 17"),
    "five sides": (
        "RoiAlign", {"x": IMAGES, "b": draw(1, 5), "i": FIRST}, {}, {}, "regions of shape",
    ),
    "too many images": (
        "RoiAlign", {"x": IMAGES, "b": ONE_BOX, "i": np.zeros(2, INT)}, {}, {}, "numbers of images",
    ),
    "no bins": (
        "RoiAlign", {"x": IMAGES, "b": ONE_BOX, "i": FIRST}, {}, {"output_height": 0}, "0×1",
    ),
    "samples below 0": (
        "RoiAlign", {"x": IMAGES, "b": ONE_BOX, "i": FIRST}, {}, {"sampling_ratio": -1}, "sampling_ratio",
    ),
    "endless samples": (
        "RoiAlign", {"x": IMAGES, "b": ONE_BOX, "i": FIRST}, {}, {"sampling_ratio": 2**40}, "sampling_ratio",
    ),
    "unknown mode": (
        "RoiAlign", {"x": IMAGES, "b": ONE_BOX, "i": FIRST}, {}, {"mode": "sum"}, "mode is sum",
    ),
    "no scale": (
        "RoiAlign", {"x": IMAGES, "b": ONE_BOX, "i": FIRST}, {}, {"spatial_scale": float("nan")}, "scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    """By name, at import: sizes that contradict each other, and attributes out of range."""
    operator, feed, constants, attributes, text = REFUSED[case]
    count = 2 if operator == "MaxPool" else 1
    made, feed = single(operator, feed, constants, outputs=count, opset=16, **attributes)
    with pytest.raises(ImportFailed, match=f"{operator} .*{text}"):
        load(made, tmp_path, feed)


FAR = [-(2**40), -1, 64, 2**40]


def test_places_and_lengths_out_of_range_are_limited(tmp_path: Path) -> None:
    """They count as the nearest that is within, and nothing else is read or written."""
    for number in FAR:
        near = min(max(number, 0), 63)
        places = PLACES.copy()
        places[0, 0, 1, 1] = number
        made, feed = single("MaxUnpool", {"x": POOLED, "p": places}, opset=16, **WINDOW)
        expected = np.zeros(64, F)
        expected[[0, 5, 10]] = POOLED.ravel()[:3]
        expected[near] = POOLED.ravel()[3]
        [actual] = compute(load(made, tmp_path, feed), feed)
        np.testing.assert_array_equal(actual.ravel(), expected)

        steps = draw(4, 3)
        made, feed = single("ReverseSequence", {"x": steps, "n": np.array([2, 1, number], INT)})
        expected = steps.copy()
        expected[:2, 0] = steps[1::-1, 0]
        expected[:, 2] = steps[::-1, 2] if number > 0 else steps[:, 2]
        [actual] = compute(load(made, tmp_path, feed), feed)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("samples", [0, 2])
def test_regions_of_images_that_are_missing_have_the_nearest(samples: int, tmp_path: Path) -> None:
    """Nothing beyond the images is read."""
    boxes = np.repeat(ONE_BOX, len(FAR), 0)
    results = []
    for images in (FAR, [0, 0, 1, 1]):
        made, feed = single(
            "RoiAlign",
            {"x": IMAGES, "b": boxes, "i": np.array(images, INT)},
            opset=16,
            sampling_ratio=samples,
        )
        results += compute(load(made, tmp_path, feed), feed)
    actual, expected = results
    np.testing.assert_array_equal(actual, expected)
