"""Converters of sorting operators. The sort is stable: equal values keep the order of the data."""

from __future__ import annotations

import math
from typing import Any, Final

from tvm import relax
from tvm.script import tirx as T

from tvmflow.frontends.mxnet._op import Converter, Expr, Op, signature, static_shape
from tvmflow.frontends.mxnet.converters._common import DTYPES

R = relax.op


def _sorted_axis(op: Op) -> tuple[Expr, int]:
    """Return the data and the axis to sort; without an axis MXNet sorts the flattened data."""
    axis = op.optional_integer("axis", -1)
    if axis is None:
        return op.emit(R.reshape(op[0], (math.prod(op.shape()),))), 0
    return op.emit(op[0]), op.axis(axis)


def _sort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    order = argsort(op, data, axis, ascending=op.flag("is_ascend", True))
    return R.gather_elements(data, order, axis=axis)


def _argsort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    dtype = op.choice("dtype", "float32", DTYPES)
    order = argsort(op, data, axis, ascending=op.flag("is_ascend", True))
    return R.astype(order, dtype)


def _top_k(op: Op) -> list[Expr]:
    """`topk`: values, indices or both of the k largest (or smallest) entries; k below 1 means all."""
    data, axis = _sorted_axis(op)
    size, count = static_shape(data)[axis], op.integer("k", 1)
    count = size if count < 1 else min(count, size)
    dtype = op.choice("dtype", "float32", DTYPES)
    returned = op.choice("ret_typ", "indices", ("indices", "value", "both"))
    order = argsort(op, data, axis, ascending=op.flag("is_ascend", False))
    order = op.emit(R.strided_slice(order, [axis], [0], [count]))
    values, indices = R.gather_elements(data, order, axis=axis), R.astype(order, dtype)
    return {"indices": [indices], "value": [values], "both": [values, indices]}[returned]


def argsort(op: Op, data: Expr, axis: int, *, ascending: bool) -> Expr:
    """Return the int32 positions that sort emitted `data` along `axis`; equal values keep their order."""
    shape, dtype = signature(data)
    last = len(shape) - 1
    axes = [*(position for position in range(last + 1) if position != axis), axis]
    moved = data if axis == last else op.emit(R.permute_dims(data, axes))
    sizes = [shape[position] for position in axes]
    rows = op.emit(R.reshape(moved, (-1, sizes[-1])))
    grid = signature(rows)[0]
    function = _merge_sort(grid[0], grid[1], dtype, ascending)
    order = R.reshape(op.call_tir(function, "stable_argsort", [rows], grid, "int32"), sizes)
    if axis == last:
        return order
    return R.permute_dims(order, [axes.index(position) for position in range(last + 1)])


def _merge_sort(rows: int, n: int, dtype: str, ascending: bool) -> Any:
    """Return a bottom-up merge sort of each row's positions, in passes over runs of 1, 2, 4, … elements.

    It calls no library, so that every target can have it.
    """
    passes = (n - 1).bit_length()

    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]  # TVM has no types
    def stable_argsort(keys_handle: T.handle, order_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True})
        keys = T.match_buffer(keys_handle, (rows, n), dtype)
        order = T.match_buffer(order_handle, (rows, n), "int32")
        with T.sblock("stable_argsort"):
            T.reads(keys[0:rows, 0:n])
            T.writes(order[0:rows, 0:n])
            runs = T.sblock_alloc_buffer((2, n), "int32")
            at = T.sblock_alloc_buffer((2,), "int32")
            for row in T.serial(rows):
                for i in T.serial(n):
                    runs[0, i] = i
                for p in T.serial(passes):
                    source: T.int32 = p % 2
                    width: T.int32 = T.shift_left(1, p)
                    for run in T.serial((n + 2 * width - 1) // (2 * width)):
                        start: T.int32 = run * 2 * width
                        middle: T.int32 = T.min(start + width, n)
                        end: T.int32 = T.min(start + 2 * width, n)
                        at[0] = start
                        at[1] = middle
                        for k in T.serial(end - start):
                            # The element of the right run comes first only if it is strictly before that of the left run.
                            if at[0] >= middle:
                                runs[1 - source, start + k] = runs[source, at[1]]
                                at[1] = at[1] + 1
                            elif at[1] >= end:
                                runs[1 - source, start + k] = runs[source, at[0]]
                                at[0] = at[0] + 1
                            else:
                                left: T.let = keys[row, runs[source, at[0]]]
                                right: T.let = keys[row, runs[source, at[1]]]
                                if (right < left) if ascending else (right > left):
                                    runs[1 - source, start + k] = runs[source, at[1]]
                                    at[1] = at[1] + 1
                                else:
                                    runs[1 - source, start + k] = runs[source, at[0]]
                                    at[0] = at[0] + 1
                for i in T.serial(n):
                    order[row, i] = runs[passes % 2, i]

    return stable_argsort


CONVERTERS: Final[dict[str, Converter]] = {"argsort": _argsort, "sort": _sort, "topk": _top_k}
