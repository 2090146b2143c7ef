"""Converters of detection: anchors, boxes, and non-maximum suppression."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from tvm import relax

from tvmflow.compiler.ir_operators import BoxNms, MultiboxDetection
from tvmflow.compiler.open_sizes import IrSize, is_open, sizes_of
from tvmflow.frontends.mxnet._op import Converter, Expr, Op

R = relax.op

_FORMATS: Final = ("corner", "center")


def _multibox_prior(op: Op) -> Expr:
    """Convert `MultiBoxPrior`: at each position, all sizes with ratio 0, then size 0 with the others."""
    height, width = op.size(2), op.size(3)
    sizes = np.array(op.numbers("sizes", (1.0,)), "float32")
    ratios = np.sqrt(np.array(op.numbers("ratios", (1.0,)), "float32"))
    offsets = np.array(op.numbers("offsets", (0.5, 0.5)), "float32")
    steps = np.array(op.numbers("steps", (-1.0, -1.0)), "float32")
    if min(steps) <= 0:
        steps = 1 / np.array([height, width], "float32")
    anchor_sizes = np.append(sizes, np.repeat(sizes[0], len(ratios) - 1))
    anchor_ratios = np.append(np.repeat(ratios[0], len(sizes)), ratios[1:])
    half_w = anchor_sizes * height / width * anchor_ratios / 2
    half_h = anchor_sizes / anchor_ratios / 2
    y = ((np.arange(height, dtype="float32") + offsets[0]) * steps[0])[:, None, None]
    x = ((np.arange(width, dtype="float32") + offsets[1]) * steps[1])[None, :, None]
    corners = np.broadcast_arrays(x - half_w, y - half_h, x + half_w, y + half_h)
    boxes = np.stack(corners, axis=-1)
    if op.flag("clip", False):
        boxes = boxes.clip(0, 1)
    return relax.const(boxes.reshape(1, -1, 4), "float32")


def _columns(value: Expr, start: int = 0, count: int = 4) -> list[Expr]:
    """Return columns of the last axis, each of size 1."""
    sizes = sizes_of(value)
    # TVM counts axes from the start where sizes are open
    axis = len(sizes) - 1 if sizes and any(map(is_open, sizes)) else -1
    return [R.strided_slice(value, [axis], [i], [i + 1]) for i in range(start, start + count)]


def _to_center(op: Op, corners: list[Expr]) -> list[Expr]:
    """Convert left, top, right, bottom to x, y, width, height."""
    left, top, right, bottom = corners
    half = op.scalar(0.5)
    return [(left + right) * half, (top + bottom) * half, right - left, bottom - top]


def _to_corners(op: Op, center: list[Expr]) -> list[Expr]:
    """Convert x, y, width, height to left, top, right, bottom."""
    x, y, width, height = center
    half_w, half_h = width * op.scalar(0.5), height * op.scalar(0.5)
    return [x - half_w, y - half_h, x + half_w, y + half_h]


def _decode_boxes(
    op: Op, deltas: list[Expr], anchors: list[Expr], scales: tuple[float, ...]
) -> list[Expr]:
    """Return the corners of boxes that are encoded relative to anchors (x, y, width, height)."""
    x, y, width, height = anchors
    dx, dy, dw, dh = (delta * op.scalar(scale) for delta, scale in zip(deltas, scales, strict=True))
    center = [dx * width + x, dy * height + y, R.exp(dw) * width, R.exp(dh) * height]
    return _to_corners(op, center)


def _box_decode(op: Op) -> Expr:
    """`box_decode`: corners of boxes that are encoded relative to anchors."""
    anchors = _columns(op[1])
    if op.choice("format", "center", _FORMATS) == "corner":
        anchors = _to_center(op, anchors)
    scales = tuple(op.number(f"std{index}", 1.0) for index in range(4))
    limit = op.number("clip", -1.0)
    deltas = _columns(op[0])
    if limit > 0:
        # MXNet limits the scaled logarithms of width and height.
        for index in (2, 3):
            deltas[index] = R.minimum(deltas[index] * op.scalar(scales[index]), op.scalar(limit))
        scales = (scales[0], scales[1], 1.0, 1.0)
    return R.concat(_decode_boxes(op, deltas, anchors, scales), axis=-1)


def _box_iou(op: Op) -> Expr:
    """`box_iou`: intersection over union of all boxes of the first input with all of the second."""
    zero = op.scalar(0.0)
    a, a_area = _corners_and_area(op, 0, (-1, 1, 4))
    b, b_area = _corners_and_area(op, 1, (1, -1, 4))
    width, height = (
        R.maximum(R.minimum(a[i + 2], b[i + 2]) - R.maximum(a[i], b[i]), zero) for i in (0, 1)
    )
    intersection = op.emit(width * height)
    union = a_area + b_area - intersection
    overlap = R.where(intersection > zero, intersection / union, zero)
    return R.reshape(overlap, (*op.sizes(0)[:-1], *op.sizes(1)[:-1]))


def _corners_and_area(op: Op, index: int, shape: tuple[int, int, int]) -> tuple[list[Expr], Expr]:
    """Return corners and areas of the boxes in an input; boxes of negative size have the area 0."""
    zero = op.scalar(0.0)
    corners = [op.emit(c) for c in _columns(op.emit(R.reshape(op[index], shape)))]
    if op.choice("format", "corner", _FORMATS) == "center":
        width, height = corners[2], corners[3]
        corners = [op.emit(c) for c in _to_corners(op, corners)]
    else:
        width, height = corners[2] - corners[0], corners[3] - corners[1]
    is_empty = R.logical_or(width < zero, height < zero)
    return corners, R.where(is_empty, zero, width * height)


def _order_candidates(op: Op, valid: Expr, score: Expr) -> tuple[Expr, Expr]:
    """Return positions by falling score with invalid ones last, and the number of valid ones per image."""
    keys = op.emit(R.where(valid, score, op.scalar(-math.inf)))
    count = R.sum(R.astype(valid, "int32"), [1])
    order = R.argsort(keys, axis=1, descending=True, dtype="int32")
    return op.emit(order), op.emit(count)


def _multibox_detection(op: Op) -> Expr:
    """`MultiBoxDetection`: rows of (class, score, left, top, right, bottom), class -1 where there is none.

    The class is the best of 1, 2, …, minus one: MXNet does not read `background_id`.
    """
    op.ignore("background_id")
    batch, classes, anchors = _scores(op)
    op.expect_shape(1, (batch, anchors * 4))
    op.expect_shape(2, (1, anchors, 4))
    if classes < 2:
        op.refuse(f"its class scores have {classes} classes, at least 2 are needed")
    top, threshold = op.integer("nms_topk", -1), op.number("nms_threshold", 0.5)
    ignores_class = op.flag("force_suppress", False)
    rows, score, valid = _multibox_candidates(op)

    suppresses = 0 < threshold <= 1
    top = max(top, 0) if suppresses else 0
    order, count = _order_candidates(op, valid, score if suppresses else R.zeros_like(score))
    # MXNet first writes valid candidates in the order of the data. That is only seen beyond the top k.
    written = _order_candidates(op, valid, R.zeros_like(score))[0] if top else order
    detection = MultiboxDetection(
        top=top, threshold=threshold, ignores_class=ignores_class, suppresses=suppresses
    )
    return op.emit(detection.call(rows, order, written, count))


def _scores(op: Op) -> tuple[IrSize, int, IrSize]:
    """Return the numbers of images, classes and anchors."""
    batch, _, anchors = op.sizes(0)
    return batch, op.size(1), anchors


def _multibox_candidates(op: Op) -> tuple[Expr, Expr, Expr]:
    """Return class, score and corners of every anchor as rows, the scores, and which are valid."""
    batch, classes, anchors = _scores(op)
    scales = op.numbers("variances", (0.1, 0.1, 0.2, 0.2))
    if len(scales) != 4:
        op.refuse(f"variances={scales} must be four numbers")
    foreground = op.emit(R.strided_slice(op[0], [1], [1], [classes]))
    score = op.emit(R.max(foreground, [1]))
    label = R.astype(R.argmax(foreground, axis=1), op.dtype())
    valid = op.emit(
        R.logical_and(score > op.scalar(-1.0), score >= op.scalar(op.number("threshold", 0.01)))
    )
    deltas = _columns(op.emit(R.reshape(op[1], (batch, anchors, 4))))
    corners = _decode_boxes(op, deltas, _to_center(op, _columns(op[2])), scales)
    if op.flag("clip", True):
        corners = [R.minimum(R.maximum(c, op.scalar(0.0)), op.scalar(1.0)) for c in corners]
    rows = R.concat([R.expand_dims(label, 2), R.expand_dims(score, 2), *corners], axis=2)
    return op.emit(rows), score, valid


def _box_nms(op: Op) -> Expr:
    """`box_nms`: the rows that are kept, by falling score, then rows of -1."""
    shape = op.sizes()
    n, width = op.fixed(shape[-2:])
    batch = math.prod(shape[:-2])
    first, score_column = op.integer("coord_start", 2), op.integer("score_index", 1)
    class_column, background = op.integer("id_index", -1), op.integer("background_id", -1)
    top = op.integer("topk", -1)
    in_format = op.choice("in_format", "corner", _FORMATS)
    out_format = op.choice("out_format", "corner", _FORMATS)
    min_score = op.number("valid_thresh", 0.0)
    threshold, ignores_class = op.number("overlap_thresh", 0.5), op.flag("force_suppress", False)
    if top == 0:
        return op[0]

    rows = op.emit(R.reshape(op[0], (batch, n, width)))
    score = op.emit(R.squeeze(_columns(rows, score_column, 1)[0], [2]))
    valid = score > op.scalar(min_score)
    if class_column >= 0:
        # MXNet also excludes the class -1, the default of background_id.
        label = R.squeeze(_columns(rows, class_column, 1)[0], [2])
        valid = R.logical_and(valid, R.not_equal(label, op.scalar(background)))
    order, count = _order_candidates(op, op.emit(valid), score)
    nms = BoxNms(
        top=n if top < 0 else min(top, n),
        first=first,
        class_column=-1 if ignores_class else class_column,
        threshold=threshold,
        is_centered=in_format == "center",
    )
    out = op.emit(nms.call(rows, order, count))
    if in_format != out_format:
        out = _convert_format(op, out, first, width, out_format)
    return R.reshape(out, shape)


def _convert_format(op: Op, rows: Expr, first: int, width: int, out_format: str) -> Expr:
    """Return rows with boxes in the other format.

    MXNet does not convert boxes whose first coordinate is negative.
    """
    coordinates = _columns(rows, first)
    convert = {"center": _to_center, "corner": _to_corners}[out_format]
    converted = R.concat(convert(op, coordinates), axis=2)
    boxes = R.strided_slice(rows, [2], [first], [first + 4])
    boxes = R.where(coordinates[0] < op.scalar(0.0), boxes, converted)
    parts = [boxes]
    if first > 0:
        parts.insert(0, R.strided_slice(rows, [2], [0], [first]))
    if first + 4 < width:
        parts.append(R.strided_slice(rows, [2], [first + 4], [width]))
    return R.concat(parts, axis=2) if len(parts) > 1 else boxes


CONVERTERS: Final[dict[str, Converter]] = {
    "_contrib_MultiBoxDetection": _multibox_detection,
    "_contrib_MultiBoxPrior": _multibox_prior,
    "_contrib_box_decode": _box_decode,
    "_contrib_box_iou": _box_iou,
    "_contrib_box_nms": _box_nms,
}
