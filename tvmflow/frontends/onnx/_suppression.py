"""NonMaxSuppression: a kernel of static shape, which counts the boxes that it selects, and the node that calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax
from tvm.script import tirx as T

from tvmflow.compiler.counts import COUNTED_KERNEL

# A row of the result: batch, class and box.
_COLUMNS: Final = 3


class _Suppression(NamedTuple):
    """Parameters of the kernel.

    Attributes:
        batch: The number of images.
        classes: The number of classes.
        boxes: The number of boxes of an image.
        rows: The most boxes that are selected in all.
        is_centered: Whether a box is a center, a width and a height; two corners otherwise.
        takes_all_scores: Whether there is no threshold for scores.
    """

    batch: int
    classes: int
    boxes: int
    rows: int
    is_centered: bool
    takes_all_scores: bool


def convert(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> Any:
    """Return the selected boxes, and in the rows after them zeros: as many rows as can be selected.

    As in ONNX Runtime, boxes come class by class, by falling score, equal scores in the order of the
    boxes, and one is left out that overlaps a selected one by more than the threshold. A score that is
    NaN is never selected.
    """
    boxes, scores = inputs[:2]
    limit, overlap, threshold = [*inputs[2:], None, None, None][:3]
    batch, classes, count = (int(extent) for extent in scores.ty.shape)
    most = count
    if limit is None:
        most = 0
    elif isinstance(limit, tvm.ir.Constant):
        # "All boxes" is often written as the largest number.
        most = min(max(int(limit.value.numpy().item()), 0), count)
    rows = batch * classes * most
    if rows == 0:
        return relax.const(np.zeros((0, _COLUMNS), np.int64), "int64")
    scores = builder.emit(scores)
    order = builder.emit(relax.op.argsort(scores, axis=-1, descending=True, dtype="int32"))
    operands = [
        _as_vector(builder, value, default)
        for value, default in (
            (limit, np.int64(0)),
            (overlap, np.float32(0)),
            (threshold, np.float32(-np.inf)),
        )
    ]
    is_centered = bool(attributes.get("center_point_box", 0))
    suppression = _Suppression(batch, classes, count, rows, is_centered, threshold is None)
    kernel = builder.add_func(_make_kernel(suppression), "non_max_suppression")
    types = [relax.TensorType((rows, _COLUMNS), "int64"), relax.TensorType((1,), "int64")]
    result = builder.emit(relax.call_tir(kernel, [boxes, scores, order, *operands], types))
    return builder.emit(relax.TupleGetItem(result, 0))


def _as_vector(builder: relax.BlockBuilder, value: Any, default: Any) -> Any:
    """Return an operand, or the default of a missing one, as a tensor of one number."""
    if value is None:
        return relax.const(default.reshape(1), str(default.dtype))
    if isinstance(value, tvm.ir.Constant):
        number = value.value.numpy().astype(default.dtype).reshape(1)
        return relax.const(number, str(default.dtype))
    number = builder.emit(relax.op.astype(value, str(default.dtype)))
    return builder.emit(relax.op.reshape(number, (1,)))


def _make_kernel(suppression: _Suppression) -> Any:
    """Return the kernel; its results are the rows, and their number."""
    batch, classes, n, rows, is_centered, takes_all_scores = suppression
    overlaps = _make_overlap(is_centered)
    # its loops depend on the data: nothing is fused with it, and no rule or search schedules it
    attributes = {"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8}
    attributes[COUNTED_KERNEL] = True

    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]  # TVM has no types
    def non_max_suppression(
        boxes_handle: T.handle,
        scores_handle: T.handle,
        order_handle: T.handle,
        limit_handle: T.handle,
        overlap_handle: T.handle,
        threshold_handle: T.handle,
        selected_handle: T.handle,
        count_handle: T.handle,
    ) -> None:
        T.func_attr(attributes)
        boxes = T.match_buffer(boxes_handle, (batch, n, 4), "float32")
        scores = T.match_buffer(scores_handle, (batch, classes, n), "float32")
        order = T.match_buffer(order_handle, (batch, classes, n), "int32")
        limit = T.match_buffer(limit_handle, (1,), "int64")
        overlap = T.match_buffer(overlap_handle, (1,), "float32")
        threshold = T.match_buffer(threshold_handle, (1,), "float32")
        selected = T.match_buffer(selected_handle, (rows, 3), "int64")
        count = T.match_buffer(count_handle, (1,), "int64")
        with T.sblock("non_max_suppression"):
            T.reads(
                boxes[0:batch, 0:n, 0:4],
                scores[0:batch, 0:classes, 0:n],
                order[0:batch, 0:classes, 0:n],
                limit[0:1],
                overlap[0:1],
                threshold[0:1],
            )
            T.writes(selected[0:rows, 0:3], count[0:1])
            kept = T.sblock_alloc_buffer((n,), "int32")
            # the rows so far, those of this class, and whether a box stays
            state = T.sblock_alloc_buffer((3,), "int32")
            state[0] = 0
            for b in T.serial(batch):
                for c in T.serial(classes):
                    state[1] = 0
                    for i in T.serial(n):
                        box: T.let = order[b, c, i]
                        score: T.let = scores[b, c, box]
                        state[2] = 0
                        if (
                            score > threshold[0]
                            or (T.bool(takes_all_scores) and score == threshold[0])
                        ) and T.Cast("int64", state[1]) < limit[0]:
                            state[2] = 1
                            for k in T.serial(state[1]):
                                # the second condition is not computed for a box that is out
                                if state[2] == 1:  # noqa: SIM102
                                    if overlaps(boxes, b, box, kept[k], overlap[0]):
                                        state[2] = 0
                        if state[2] == 1:
                            kept[state[1]] = box
                            selected[state[0], 0] = T.Cast("int64", b)
                            selected[state[0], 1] = T.Cast("int64", c)
                            selected[state[0], 2] = T.Cast("int64", box)
                            state[0] = state[0] + 1
                            state[1] = state[1] + 1
            for row in T.serial(rows - state[0]):
                for column in T.serial(3):
                    selected[state[0] + row, column] = T.int64(0)
            count[0] = T.Cast("int64", state[0])

    return non_max_suppression


def _make_overlap(is_centered: bool) -> Any:
    """Return a function that returns whether two boxes overlap by more than a threshold."""

    def sides(boxes: Any, batch: Any, box: Any) -> list[tuple[Any, Any]]:
        values = [boxes[batch, box, column] for column in range(4)]
        if is_centered:
            pairs = zip(values[:2], values[2:], strict=True)
            halves = [(middle, size / T.float32(2)) for middle, size in pairs]
            return [(middle - half, middle + half) for middle, half in halves]
        pairs = zip(values[:2], values[2:], strict=True)
        return [(T.min(one, other), T.max(one, other)) for one, other in pairs]

    def overlaps(boxes: Any, batch: Any, first: Any, second: Any, threshold: Any) -> Any:
        zero = T.float32(0)
        ones, others = sides(boxes, batch, first), sides(boxes, batch, second)
        shared = [
            T.min(one[1], other[1]) - T.max(one[0], other[0])
            for one, other in zip(ones, others, strict=True)
        ]
        area, other_area, common = (
            x * y
            for x, y in (
                [high - low for low, high in ones],
                [high - low for low, high in others],
                shared,
            )
        )
        union = area + other_area - common
        is_positive = [value > zero for value in (*shared, area, other_area, common, union)]
        return T.And(tvm.tirx.all(*is_positive), common / union > threshold)

    return overlaps
