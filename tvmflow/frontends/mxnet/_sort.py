"""A stable sort as a TIR function: deterministic, and without library calls, so that any target can have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.script import tirx as T

from tvmflow.frontends.mxnet._op import Expr, Op, signature

R = relax.op


def call_tir(
    op: Op, function: Any, name: str, args: Sequence[Expr], shape: Sequence[int], dtype: str
) -> Expr:
    """Emit a call to a TIR function with one output."""
    # its loops are what we want: nothing for a tuner to search
    function = function.with_attr("tirx.is_scheduled", True)
    callee = op.builder.add_func(function, name)
    result = relax.TensorType(tuple(shape), dtype)
    return op.emit(relax.call_tir(callee, [op.emit(arg) for arg in args], result))


def argsort(op: Op, data: Expr, axis: int, *, ascending: bool) -> Expr:
    """int32 positions that sort emitted `data` along `axis`; equal values keep their order."""
    shape, dtype = signature(data)
    last = len(shape) - 1
    axes = [*(position for position in range(last + 1) if position != axis), axis]
    moved = data if axis == last else op.emit(R.permute_dims(data, axes))
    sizes = [shape[position] for position in axes]
    rows = op.emit(R.reshape(moved, (-1, sizes[-1])))
    grid = signature(rows)[0]
    function = _merge_sort(grid[0], grid[1], dtype, ascending)
    order = R.reshape(call_tir(op, function, "stable_argsort", [rows], grid, "int32"), sizes)
    if axis == last:
        return order
    return R.permute_dims(order, [axes.index(position) for position in range(last + 1)])


def _merge_sort(rows: int, n: int, dtype: str, ascending: bool) -> Any:
    """Bottom-up merge sort of each row's positions, in passes over runs of 1, 2, 4, … elements."""
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
                            # the right run's element comes first only when it is strictly before the left one's
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
