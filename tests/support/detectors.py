"""Detectors: models whose outputs are the boxes that non-maximum suppression selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from tests.support.onnx_models import model, value

Array = np.ndarray[Any, Any]

ALL_BOXES: Final = np.iinfo(np.int64).max
"""The limit that torch exports for `torchvision.ops.nms`."""


def constants(**values: Any) -> dict[str, Array]:
    """Return constants of int64, those of floats as float32."""
    arrays = {name: np.asarray(number) for name, number in values.items()}
    return {n: a.astype("float32" if a.dtype.kind == "f" else "int64") for n, a in arrays.items()}


def make_detector(
    boxes: int = 64,
    more: Sequence[onnx.NodeProto] = (),
    outputs: Sequence[onnx.ValueInfoProto] = (),
    **more_constants: Any,
) -> onnx.ModelProto:
    """Return `boxes[keep], scores[keep], keep` for `keep = torchvision.ops.nms(boxes, scores, 0.5)`, as torch exports it.

    Args:
        boxes: The number of boxes.
        more: Nodes after these; the selected boxes are `kept_boxes`, their scores `kept_scores`.
        outputs: Outputs of those nodes.
        **more_constants: Constants that they read.
    """
    nodes = [
        helper.make_node("Unsqueeze", ["boxes", "zero"], ["image"]),
        helper.make_node("Unsqueeze", ["scores", "zero_one"], ["classes"]),
        helper.make_node("NonMaxSuppression", ["image", "classes", "all", "overlap"], ["selected"]),
        helper.make_node("Slice", ["selected", "two", "three", "one"], ["column"]),
        helper.make_node("Squeeze", ["column", "one"], ["keep"]),
        helper.make_node("Gather", ["boxes", "keep"], ["kept_boxes"], axis=0),
        helper.make_node("Gather", ["scores", "keep"], ["kept_scores"], axis=0),
    ]
    weights = constants(
        zero=[0], zero_one=[0, 1], one=[1], two=[2], three=[3], all=[ALL_BOXES], overlap=[0.5]
    )
    return model(
        [*nodes, *more],
        [value("boxes", [boxes, 4]), value("scores", [boxes])],
        [
            value("kept_boxes", ["n", 4]),
            value("kept_scores", ["n"]),
            value("keep", ["n"], "int64"),
            *outputs,
        ],
        {**weights, **constants(**more_constants)},
        opset=18,
    )


def draw_boxes(boxes: int = 64, seed: int = 0, size: float = 1.0) -> dict[str, Array]:
    """Return random boxes with scores, some of them equal; larger ones overlap more."""
    rng = np.random.default_rng(seed)
    corners = rng.random((boxes, 4), np.float32)
    corners[:, 2:] = corners[:, :2] + size * corners[:, 2:]
    return {"boxes": corners, "scores": np.round(rng.random(boxes, np.float32) * 16) / 16}


def run_onnx_runtime(made: onnx.ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of ONNX Runtime."""
    session = onnxruntime.InferenceSession(made.SerializeToString())
    return list(session.run(None, dict(feed)))
