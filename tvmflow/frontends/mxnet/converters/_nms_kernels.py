"""TIR functions of non-maximum suppression, of static shape.

They follow MXNet's CPU code step by step (`src/operator/contrib/multibox_detection.cc` and
`bounding_box-inl.h`): candidates by falling score, equal scores in the order of the data, and -1
in the rows that are left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from tvmflow.frontends.mxnet._op import Expr


class MultiboxNms(NamedTuple):
    """Parameters of the kernel of MultiBoxDetection.

    Attributes:
        batch: Number of images.
        rows: Number of anchors of an image.
        dtype: Of the data.
        top: Number of candidates that are compared, 0 for all.
        threshold: Overlap from which the candidate with the lower score is removed.
        ignores_class: Whether candidates of different classes are compared too.
        suppresses: Whether candidates are compared at all.
    """

    batch: int
    rows: int
    dtype: str
    top: int
    threshold: float
    ignores_class: bool
    suppresses: bool


def multibox_kernel(nms: MultiboxNms) -> Any:
    """Return the kernel of MultiBoxDetection.

    Its arguments are candidates (batch, rows, 6) of class, score, left, top, right, bottom; their
    order by score (batch, rows); the order in which MXNet first writes them (batch, rows); the
    number of valid candidates (batch,); and the output (batch, rows, 6).
    """
    batch, n, dtype, top, suppresses = nms.batch, nms.rows, nms.dtype, nms.top, nms.suppresses
    copy_candidates = _copy_candidates(n, dtype)
    remove_overlapping = _remove_overlapping_rows(nms)

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
                rows[0:batch, 0:n, 0:6], order[0:batch, 0:n], written[0:batch, 0:n], count[0:batch]
            )
            T.writes(out[0:batch, 0:n, 0:6])
            kept = T.sblock_alloc_buffer((1,), "int32")
            for b in T.serial(batch):
                kept[0] = count[b]
                if top > 0:
                    kept[0] = T.min(count[b], top)
                copy_candidates(rows, order, written, count, out, kept, b)
                if suppresses:
                    remove_overlapping(out, kept, b)

    return multibox_detection


def _copy_candidates(n: int, dtype: str) -> Any:
    @T.macro  # type: ignore[untyped-decorator]  # TVM has no types
    def copy(rows: Any, order: Any, written: Any, count: Any, out: Any, kept: Any, b: Any) -> None:
        for i in T.serial(n):
            for c in T.serial(6):
                if i < kept[0]:
                    out[b, i, c] = rows[b, order[b, i], c]
                elif i < count[b] and c > 0:
                    # Beyond the top k MXNet removes the class and leaves the rest.
                    out[b, i, c] = rows[b, written[b, i], c]
                else:
                    out[b, i, c] = T.Cast(dtype, -1)

    return copy


def _remove_overlapping_rows(nms: MultiboxNms) -> Any:
    dtype, threshold, ignores_class = nms.dtype, nms.threshold, nms.ignores_class

    @T.macro  # type: ignore[untyped-decorator]  # TVM has no types
    def remove(out: Any, kept: Any, b: Any) -> None:
        for i in T.serial(kept[0]):
            if out[b, i, 0] >= T.Cast(dtype, 0):
                for k in T.serial(kept[0] - i - 1):
                    j: T.let = i + k + 1
                    if out[b, j, 0] >= T.Cast(dtype, 0) and (
                        T.bool(ignores_class) or out[b, i, 0] == out[b, j, 0]
                    ):
                        w: T.let = _overlap(
                            out[b, i, 2], out[b, i, 4], out[b, j, 2], out[b, j, 4], dtype
                        )
                        h: T.let = _overlap(
                            out[b, i, 3], out[b, i, 5], out[b, j, 3], out[b, j, 5], dtype
                        )
                        union: T.let = (
                            (out[b, i, 4] - out[b, i, 2]) * (out[b, i, 5] - out[b, i, 3])
                            + (out[b, j, 4] - out[b, j, 2]) * (out[b, j, 5] - out[b, j, 3])
                            - w * h
                        )
                        if union > T.Cast(dtype, 0) and w * h / union >= T.Cast(dtype, threshold):
                            out[b, j, 0] = T.Cast(dtype, -1)

    return remove


class BoxNms(NamedTuple):
    """Parameters of the kernel of box_nms.

    Attributes:
        batch: Number of images.
        rows: Number of boxes of an image.
        width: Number of columns of a row.
        dtype: Of the data.
        top: Number of candidates that are compared.
        first: Column of the first of a box's four coordinates.
        class_column: Column of the class, or -1 to compare boxes of all classes.
        threshold: Overlap above which the box with the lower score is removed.
        is_centered: Whether boxes are given as x, y, width, height instead of as corners.
    """

    batch: int
    rows: int
    width: int
    dtype: str
    top: int
    first: int
    class_column: int
    threshold: float
    is_centered: bool


def box_kernel(nms: BoxNms) -> Any:
    """Return the kernel of box_nms.

    Its arguments are boxes (batch, rows, width); their order by score (batch, rows); the number of
    valid boxes (batch,); and the output (batch, rows, width).
    """
    batch, n, width, dtype, top = nms.batch, nms.rows, nms.width, nms.dtype, nms.top
    read_boxes, remove_overlapping = _read_boxes(nms), _remove_overlapping_boxes(nms)

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
            # Left, top, right, bottom and area of the candidates in their order.
            box = T.sblock_alloc_buffer((n, 5), dtype)
            removed = T.sblock_alloc_buffer((n,), "int32")
            # The number of candidates, and of rows that are written.
            total = T.sblock_alloc_buffer((2,), "int32")
            for b in T.serial(batch):
                total[0] = T.min(count[b], top)
                total[1] = 0
                for i in T.serial(total[0]):
                    removed[i] = 0
                    read_boxes(rows, order, box, b, i)
                for i in T.serial(total[0]):
                    if removed[i] == 0:
                        for c in T.serial(width):
                            out[b, total[1], c] = rows[b, order[b, i], c]
                        total[1] = total[1] + 1
                        remove_overlapping(rows, order, box, removed, total, b, i)
                for i in T.serial(n):
                    if i >= total[1]:
                        for c in T.serial(width):
                            out[b, i, c] = T.Cast(dtype, -1)

    return box_nms


def _read_boxes(nms: BoxNms) -> Any:
    dtype, is_centered = nms.dtype, nms.is_centered
    x, y, x2, y2 = range(nms.first, nms.first + 4)

    @T.macro  # type: ignore[untyped-decorator]  # TVM has no types
    def read(rows: Any, order: Any, box: Any, b: Any, i: Any) -> None:
        at: T.let = order[b, i]
        if is_centered:
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
            box[i, 4] = T.max(rows[b, at, x2] - rows[b, at, x], T.Cast(dtype, 0)) * T.max(
                rows[b, at, y2] - rows[b, at, y], T.Cast(dtype, 0)
            )

    return read


def _remove_overlapping_boxes(nms: BoxNms) -> Any:
    dtype, threshold, column = nms.dtype, nms.threshold, max(nms.class_column, 0)
    ignores_class = nms.class_column < 0

    @T.macro  # type: ignore[untyped-decorator]  # TVM has no types
    def remove(rows: Any, order: Any, box: Any, removed: Any, total: Any, b: Any, i: Any) -> None:
        for k in T.serial(total[0] - i - 1):
            j: T.let = i + k + 1
            if removed[j] == 0 and (
                T.bool(ignores_class)
                or T.Cast("int32", rows[b, order[b, i], column])
                == T.Cast("int32", rows[b, order[b, j], column])
            ):
                w: T.let = _overlap(box[i, 0], box[i, 2], box[j, 0], box[j, 2], dtype)
                h: T.let = _overlap(box[i, 1], box[i, 3], box[j, 1], box[j, 3], dtype)
                if w * h / (box[i, 4] + box[j, 4] - w * h) > T.Cast(dtype, threshold):
                    removed[j] = 1

    return remove


def _overlap(start: Expr, end: Expr, other_start: Expr, other_end: Expr, dtype: str) -> Expr:
    """Return the length that two intervals share, or 0."""
    return T.max(T.min(end, other_end) - T.max(start, other_start), T.Cast(dtype, 0))
