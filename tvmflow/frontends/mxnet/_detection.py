"""Converters of MXNet's detection operators: anchors, box decoding, non-maximum suppression, region pooling.

Suppression is a TIR function of static shape that follows MXNet's CPU code step by step
(`src/operator/contrib/multibox_detection.cc`, `bounding_box-inl.h`): candidates by falling score,
equal scores in the order of the data, and -1 where nothing is left.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from tvm import relax
from tvm.script import tirx as T

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet._sort import argsort, call_tir

R = relax.op


# -- anchors ---------------------------------------------------------------------------------


def _multibox_prior(op: Op) -> Expr:
    """Anchors of every position: all sizes at the first ratio, then the first size at the other ratios."""
    height, width = op.shape()[2:4]
    sizes = np.array(op.numbers("sizes", (1.0,)), "float32")
    ratios = np.sqrt(np.array(op.numbers("ratios", (1.0,)), "float32"))
    steps = [np.float32(step) for step in op.numbers("steps", (-1.0, -1.0))]
    if steps[0] <= 0 or steps[1] <= 0:
        steps = [np.float32(1) / np.float32(height), np.float32(1) / np.float32(width)]
    offset_y, offset_x = (np.float32(offset) for offset in op.numbers("offsets", (0.5, 0.5)))
    two = np.float32(2)
    aspect = np.float32(height), np.float32(width)
    half = [
        (size * aspect[0] / aspect[1] * ratios[0] / two, size / ratios[0] / two) for size in sizes
    ]
    half += [
        (sizes[0] * aspect[0] / aspect[1] * ratio / two, sizes[0] / ratio / two)
        for ratio in ratios[1:]
    ]
    boxes = np.empty((height, width, len(half), 4), "float32")
    centre_y = ((np.arange(height, dtype="float32") + offset_y) * steps[0])[:, None, None]
    centre_x = ((np.arange(width, dtype="float32") + offset_x) * steps[1])[None, :, None]
    half_w, half_h = (np.array(column, "float32") for column in zip(*half, strict=True))
    boxes[..., 0], boxes[..., 1] = centre_x - half_w, centre_y - half_h
    boxes[..., 2], boxes[..., 3] = centre_x + half_w, centre_y + half_h
    if op.flag("clip", False):
        boxes = boxes.clip(0, 1)
    return relax.const(boxes.reshape(1, -1, 4), "float32")


# -- boxes -----------------------------------------------------------------------------------


def _columns(value: Expr, start: int = 0, count: int = 4) -> list[Expr]:
    """The last axis' columns, each of size 1."""
    return [
        R.strided_slice(value, [-1], [start + column], [start + column + 1])
        for column in range(count)
    ]


def _to_centre(corners: list[Expr], half: Expr) -> list[Expr]:
    left, top, right, bottom = corners
    return [
        R.multiply(R.add(left, right), half),
        R.multiply(R.add(top, bottom), half),
        R.subtract(right, left),
        R.subtract(bottom, top),
    ]


def _to_corner(centre: list[Expr], half: Expr) -> list[Expr]:
    x, y, width, height = centre
    half_w, half_h = R.multiply(width, half), R.multiply(height, half)
    return [R.subtract(x, half_w), R.subtract(y, half_h), R.add(x, half_w), R.add(y, half_h)]


def _decoded(
    op: Op, deltas: list[Expr], anchors: list[Expr], scales: tuple[float, ...]
) -> list[Expr]:
    """Corners of boxes that are given relative to anchors (x, y, width, height)."""
    half = op.scalar(0.5)
    x, y, width, height = anchors
    dx, dy, dw, dh = (
        R.multiply(delta, op.scalar(scale)) for delta, scale in zip(deltas, scales, strict=True)
    )
    return _to_corner(
        [
            R.add(R.multiply(dx, width), x),
            R.add(R.multiply(dy, height), y),
            R.multiply(R.exp(dw), width),
            R.multiply(R.exp(dh), height),
        ],
        half,
    )


_FORMATS: Final = ("corner", "center")


def _box_decode(op: Op) -> Expr:
    anchors = _columns(op[1])
    if op.choice("format", "center", _FORMATS) == "corner":
        anchors = _to_centre(anchors, op.scalar(0.5))
    scales = tuple(op.number(f"std{index}", 1.0) for index in range(4))
    limit = op.number("clip", -1.0)
    deltas = _columns(op[0])
    if limit > 0:
        # MXNet limits the scaled logarithms of width and height
        for index in (2, 3):
            deltas[index] = R.minimum(
                R.multiply(deltas[index], op.scalar(scales[index])), op.scalar(limit)
            )
        scales = (scales[0], scales[1], 1.0, 1.0)
    return R.concat(_decoded(op, deltas, anchors, scales), axis=-1)


def _box_iou(op: Op) -> Expr:
    """Overlaps of all boxes of the first with all of the second."""
    shapes = op.shape(0)[:-1], op.shape(1)[:-1]
    counts = math.prod(shapes[0]), math.prod(shapes[1])
    half = op.scalar(0.5)
    zero = op.scalar(0.0)
    centred = op.choice("format", "corner", _FORMATS) == "center"
    sides = []
    for index, form in ((0, (counts[0], 1, 4)), (1, (1, counts[1], 4))):
        columns = [op.emit(c) for c in _columns(op.emit(R.reshape(op[index], form)))]
        corners = [op.emit(c) for c in _to_corner(columns, half)] if centred else columns
        if centred:
            width, height = columns[2], columns[3]
        else:
            width, height = R.subtract(columns[2], columns[0]), R.subtract(columns[3], columns[1])
        flat = R.logical_or(R.less(width, zero), R.less(height, zero))
        sides.append((corners, R.where(flat, zero, R.multiply(width, height))))
    (a, area_a), (b, area_b) = sides
    wide, high = (
        R.maximum(R.subtract(R.minimum(a[i + 2], b[i + 2]), R.maximum(a[i], b[i])), zero)
        for i in (0, 1)
    )
    shared = op.emit(R.multiply(wide, high))
    union = R.subtract(R.add(area_a, area_b), shared)
    overlap = R.where(R.greater(shared, zero), R.divide(shared, union), zero)
    return R.reshape(overlap, (*shapes[0], *shapes[1]))


# -- suppression ---------------------------------------------------------------------------


def _candidate_order(op: Op, valid: Expr, score: Expr) -> tuple[Expr, Expr]:
    """Positions by falling score, invalid ones last; and how many are valid, per image."""
    lowest = op.scalar(-math.inf)
    keys = op.emit(R.where(valid, score, lowest))
    count = R.sum(R.astype(valid, "int32"), [1])
    return argsort(op, keys, 1, ascending=False), op.emit(count)


def _multibox_detection(op: Op) -> Expr:
    """Rows of (class, score, left, top, right, bottom), class -1 where nothing is.

    The class is the best of 1, 2, …, less one: MXNet does not read `background_id`.
    """
    op.ignore("background_id")
    batch, classes, anchors = op.shape(0)
    op.expect_shape(1, (batch, anchors * 4))
    op.expect_shape(2, (1, anchors, 4))
    if classes < 2:
        op.refuse(f"its class scores have {classes} classes, at least 2 are needed")
    scales = op.numbers("variances", (0.1, 0.1, 0.2, 0.2))
    if len(scales) != 4:
        op.refuse(f"variances={scales} must be four numbers")
    clip = op.flag("clip", True)
    top = op.integer("nms_topk", -1)
    limit = op.number("nms_threshold", 0.5)
    force = op.flag("force_suppress", False)

    foreground = op.emit(R.strided_slice(op[0], [1], [1], [classes]))
    score = op.emit(R.max(foreground, [1]))
    label = R.astype(R.argmax(foreground, axis=1), op.dtype())
    valid = op.emit(
        R.logical_and(
            R.greater(score, op.scalar(-1.0)),
            R.greater_equal(score, op.scalar(op.number("threshold", 0.01))),
        )
    )
    deltas = _columns(op.emit(R.reshape(op[1], (batch, anchors, 4))))
    corners = _decoded(op, deltas, _to_centre(_columns(op[2]), op.scalar(0.5)), scales)
    if clip:
        corners = [R.minimum(R.maximum(c, op.scalar(0.0)), op.scalar(1.0)) for c in corners]
    rows = R.concat([R.expand_dims(label, 2), R.expand_dims(score, 2), *corners], axis=2)
    rows = op.emit(rows)

    suppress = 0 < limit <= 1
    top = max(top, 0) if suppress else 0
    order, count = _candidate_order(op, valid, score if suppress else R.zeros_like(score))
    # the order in which MXNet first writes what is valid; seen only beyond the top k
    written = _candidate_order(op, valid, R.zeros_like(score))[0] if top else order
    function = _multibox_nms(batch, anchors, op.dtype(), top, limit, force, suppress)
    return call_tir(
        op,
        function,
        "multibox_detection",
        [rows, order, written, count],
        (batch, anchors, 6),
        op.dtype(),
    )


def _multibox_nms(
    batch: int, n: int, dtype: str, top: int, limit: float, force: bool, suppress: bool
) -> Any:
    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]  # TVM has no types
    def multibox_detection(
        rows_handle: T.handle,
        order_handle: T.handle,
        written_handle: T.handle,
        count_handle: T.handle,
        out_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True})
        rows = T.match_buffer(rows_handle, (batch, n, 6), dtype)
        order = T.match_buffer(order_handle, (batch, n), "int32")
        written = T.match_buffer(written_handle, (batch, n), "int32")
        count = T.match_buffer(count_handle, (batch,), "int32")
        out = T.match_buffer(out_handle, (batch, n, 6), dtype)
        with T.sblock("multibox_detection"):
            T.reads(
                rows[0:batch, 0:n, 0:6],
                order[0:batch, 0:n],
                written[0:batch, 0:n],
                count[0:batch],
            )
            T.writes(out[0:batch, 0:n, 0:6])
            kept = T.sblock_alloc_buffer((1,), "int32")
            for b in T.serial(batch):
                kept[0] = count[b]
                if top > 0:
                    kept[0] = T.min(count[b], top)
                for i in T.serial(n):
                    for c in T.serial(6):
                        if i < kept[0]:
                            out[b, i, c] = rows[b, order[b, i], c]
                        elif i < count[b] and c > 0:
                            # beyond the top k MXNet takes the class away and leaves the rest
                            out[b, i, c] = rows[b, written[b, i], c]
                        else:
                            out[b, i, c] = T.Cast(dtype, -1)
                if suppress:
                    for i in T.serial(kept[0]):
                        if out[b, i, 0] >= T.Cast(dtype, 0):
                            for k in T.serial(kept[0] - i - 1):
                                j: T.let = i + k + 1
                                if out[b, j, 0] >= T.Cast(dtype, 0) and (
                                    T.bool(force) or out[b, i, 0] == out[b, j, 0]
                                ):
                                    w: T.let = T.max(
                                        T.min(out[b, i, 4], out[b, j, 4])
                                        - T.max(out[b, i, 2], out[b, j, 2]),
                                        T.Cast(dtype, 0),
                                    )
                                    h: T.let = T.max(
                                        T.min(out[b, i, 5], out[b, j, 5])
                                        - T.max(out[b, i, 3], out[b, j, 3]),
                                        T.Cast(dtype, 0),
                                    )
                                    union: T.let = (
                                        (out[b, i, 4] - out[b, i, 2])
                                        * (out[b, i, 5] - out[b, i, 3])
                                        + (out[b, j, 4] - out[b, j, 2])
                                        * (out[b, j, 5] - out[b, j, 3])
                                        - w * h
                                    )
                                    if union > T.Cast(dtype, 0) and w * h / union >= T.Cast(
                                        dtype, limit
                                    ):
                                        out[b, j, 0] = T.Cast(dtype, -1)

    return multibox_detection


def _box_nms(op: Op) -> Expr:
    """Rows that survive, by falling score, then rows of -1."""
    shape, dtype = op.shape(), op.dtype()
    n, width = shape[-2:]
    batch = math.prod(shape[:-2])
    first, score_at = op.integer("coord_start", 2), op.integer("score_index", 1)
    id_at, background = op.integer("id_index", -1), op.integer("background_id", -1)
    top = op.integer("topk", -1)
    in_format = op.choice("in_format", "corner", _FORMATS)
    out_format = op.choice("out_format", "corner", _FORMATS)
    lowest = op.number("valid_thresh", 0.0)
    limit, force = op.number("overlap_thresh", 0.5), op.flag("force_suppress", False)
    if top == 0:
        return op[0]

    rows = op.emit(R.reshape(op[0], (batch, n, width)))
    score = op.emit(R.squeeze(_columns(rows, score_at, 1)[0], [2]))
    valid = R.greater(score, op.scalar(lowest))
    if id_at >= 0:
        # the default, -1, also counts
        label = R.squeeze(_columns(rows, id_at, 1)[0], [2])
        valid = R.logical_and(valid, R.not_equal(label, op.scalar(background)))
    order, count = _candidate_order(op, op.emit(valid), score)
    function = _corner_nms(
        batch,
        n,
        width,
        dtype,
        kept=n if top < 0 else min(top, n),
        first=first,
        id_at=-1 if force else id_at,
        limit=limit,
        centred=in_format == "center",
    )
    out = call_tir(op, function, "box_nms", [rows, order, count], (batch, n, width), dtype)
    if in_format != out_format:
        out = _reformatted(op, out, first, width, out_format)
    return R.reshape(out, shape)


def _reformatted(op: Op, rows: Expr, first: int, width: int, wanted: str) -> Expr:
    """Boxes in the other format; MXNet leaves those alone whose first coordinate is negative."""
    columns = _columns(rows, first)
    change = {"center": _to_centre, "corner": _to_corner}[wanted]
    changed = R.concat(change(columns, op.scalar(0.5)), axis=2)
    boxes = R.strided_slice(rows, [2], [first], [first + 4])
    boxes = R.where(R.less(columns[0], op.scalar(0.0)), boxes, changed)
    parts = [boxes]
    if first > 0:
        parts.insert(0, R.strided_slice(rows, [2], [0], [first]))
    if first + 4 < width:
        parts.append(R.strided_slice(rows, [2], [first + 4], [width]))
    return R.concat(parts, axis=2) if len(parts) > 1 else boxes


def _corner_nms(
    batch: int,
    n: int,
    width: int,
    dtype: str,
    *,
    kept: int,
    first: int,
    id_at: int,
    limit: float,
    centred: bool,
) -> Any:
    x, y, x2, y2 = range(first, first + 4)
    label = max(id_at, 0)

    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]  # TVM has no types
    def box_nms(
        rows_handle: T.handle, order_handle: T.handle, count_handle: T.handle, out_handle: T.handle
    ) -> None:
        T.func_attr({"tirx.noalias": True})
        rows = T.match_buffer(rows_handle, (batch, n, width), dtype)
        order = T.match_buffer(order_handle, (batch, n), "int32")
        count = T.match_buffer(count_handle, (batch,), "int32")
        out = T.match_buffer(out_handle, (batch, n, width), dtype)
        with T.sblock("box_nms"):
            T.reads(rows[0:batch, 0:n, 0:width], order[0:batch, 0:n], count[0:batch])
            T.writes(out[0:batch, 0:n, 0:width])
            # left, top, right, bottom and area of the candidates in their order
            box = T.sblock_alloc_buffer((n, 5), dtype)
            gone = T.sblock_alloc_buffer((n,), "int32")
            total = T.sblock_alloc_buffer((2,), "int32")
            for b in T.serial(batch):
                total[0] = T.min(count[b], kept)
                total[1] = 0
                for i in T.serial(total[0]):
                    at: T.let = order[b, i]
                    gone[i] = 0
                    if centred:
                        box[i, 0] = rows[b, at, x] - rows[b, at, x2] / T.Cast(dtype, 2)
                        box[i, 1] = rows[b, at, y] - rows[b, at, y2] / T.Cast(dtype, 2)
                        box[i, 2] = rows[b, at, x] + rows[b, at, x2] / T.Cast(dtype, 2)
                        box[i, 3] = rows[b, at, y] + rows[b, at, y2] / T.Cast(dtype, 2)
                        box[i, 4] = T.max(rows[b, at, x2], T.Cast(dtype, 0)) * T.max(
                            rows[b, at, y2], T.Cast(dtype, 0)
                        )
                    else:
                        box[i, 0] = rows[b, at, x]
                        box[i, 1] = rows[b, at, y]
                        box[i, 2] = rows[b, at, x2]
                        box[i, 3] = rows[b, at, y2]
                        box[i, 4] = T.max(
                            rows[b, at, x2] - rows[b, at, x], T.Cast(dtype, 0)
                        ) * T.max(rows[b, at, y2] - rows[b, at, y], T.Cast(dtype, 0))
                for i in T.serial(total[0]):
                    if gone[i] == 0:
                        for c in T.serial(width):
                            out[b, total[1], c] = rows[b, order[b, i], c]
                        total[1] = total[1] + 1
                        for k in T.serial(total[0] - i - 1):
                            j: T.let = i + k + 1
                            if gone[j] == 0 and (
                                T.bool(id_at < 0)
                                or T.Cast("int32", rows[b, order[b, i], label])
                                == T.Cast("int32", rows[b, order[b, j], label])
                            ):
                                w: T.let = T.max(
                                    T.min(box[i, 2], box[j, 2]) - T.max(box[i, 0], box[j, 0]),
                                    T.Cast(dtype, 0),
                                )
                                h: T.let = T.max(
                                    T.min(box[i, 3], box[j, 3]) - T.max(box[i, 1], box[j, 1]),
                                    T.Cast(dtype, 0),
                                )
                                if w * h / (box[i, 4] + box[j, 4] - w * h) > T.Cast(dtype, limit):
                                    gone[j] = 1
                for i in T.serial(n):
                    if i >= total[1]:
                        for c in T.serial(width):
                            out[b, i, c] = T.Cast(dtype, -1)

    return box_nms


# -- regions ---------------------------------------------------------------------------------


def _roi_pooling(op: Op) -> Expr:
    return R.vision.roi_pool(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        layout="NCHW",
    )


def _roi_align(op: Op) -> Expr:
    op.require("position_sensitive", "false", "only the plain form can be imported")
    op.require("aligned", "false", "TVM's and MXNet's results differ")
    if op.shape(1)[-1] != 5:
        op.refuse(f"regions have {op.shape(1)[-1]} columns, 5 are needed")
    return R.vision.roi_align(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        sample_ratio=op.integer("sample_ratio", -1),
        layout="NCHW",
        mode="avg",
    )


CONVERTERS: Final[dict[str, Converter]] = {
    "ROIPooling": _roi_pooling,
    "_contrib_ROIAlign": _roi_align,
    "_contrib_MultiBoxDetection": _multibox_detection,
    "_contrib_MultiBoxPrior": _multibox_prior,
    "_contrib_box_decode": _box_decode,
    "_contrib_box_iou": _box_iou,
    "_contrib_box_nms": _box_nms,
}
