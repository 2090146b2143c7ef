"""Splits reductions of a whole tensor to one number in two.

First rows of vectors are reduced on all cores, then the few results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

# Each of these gives the same of all numbers as of the results of rows of the same length. The mean
# of rows of integers would be rounded, and the product of a row can be too large where that of all is not.
_FLOATS: Final = frozenset({"float32", "float64"})
_INTEGERS: Final = frozenset({"int32", "int64"})
_DTYPES: Final = {
    "relax.max": _FLOATS | _INTEGERS,
    "relax.min": _FLOATS | _INTEGERS,
    "relax.sum": _FLOATS | _INTEGERS,
    "relax.mean": _FLOATS,
    "relax.prod": _INTEGERS,
}
_MIN_NUMBERS: Final = 2048
# Up to this, one row is reduced as fast as any by the rule for rows.
_MAX_SINGLE_ROW: Final = 1 << 16
_MIN_ROW: Final = 64
_MAX_ROW: Final = 8192
_GOOD_ROW: Final = 1024
_WHOLE_VECTORS: Final = 64


def split_reductions(mod: tvm.IRModule) -> tvm.IRModule:
    """Split reductions over all axes of large tensors."""
    return rewrite_main(mod, _ReductionSplitter)


class _ReductionSplitter(MainRewriter):
    """Rewrites reductions over all axes."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        dtypes = _DTYPES.get(ir.operator_name(call))
        if dtypes is None or ir.dtype_of(call.args[0]) not in dtypes:
            return rewritten
        shape, results = self.numbers.shape(call.args[0]), ir.shape_of(call)
        if shape is None or results is None or math.prod(results) != 1:
            return rewritten
        [data] = rewritten.args
        numbers = math.prod(shape)
        if numbers < _MIN_NUMBERS or _is_row(call, shape):
            return rewritten
        axes = _choose_axes(shape)
        if axes is None:
            if ir.shape_of(call.args[0]) is None:
                return rewritten
            if (row := _choose_row(numbers)) is None:
                return rewritten
            data, axes = self.reshape(data, [numbers // row, row]), [1]
        reduce = getattr(relax.op, ir.operator_name(call).removeprefix("relax."))
        result = self.emit(reduce(self.emit(reduce(data, axes))))
        return relax.op.reshape(result, results) if results else result


def _is_row(call: relax.Call, shape: Sequence[int]) -> bool:
    """Return whether a reduction is that of a row, of which there happens to be one."""
    axes = [] if call.attrs.axis is None else [int(axis) % len(shape) for axis in call.attrs.axis]
    is_last = len(shape) > 1 and axes == [len(shape) - 1]
    return is_last and shape[-1] <= _MAX_SINGLE_ROW


def _choose_axes(shape: Sequence[int]) -> list[int] | None:
    """Return the last axes, if they make rows: kernels before the reduction can become part of it then."""
    for first in reversed(range(1, len(shape))):
        row = math.prod(shape[first:])
        if row >= _MIN_ROW:
            is_split = row <= _MAX_ROW and math.prod(shape[:first]) > 1
            return list(range(first, len(shape))) if is_split else None
    return None


def _choose_row(numbers: int) -> int | None:
    """Return the length of rows into which numbers can be divided; None if there is none."""
    rows = range(_MIN_ROW, min(_MAX_ROW, numbers // 2) + 1)
    return min((row for row in rows if numbers % row == 0), key=_rate, default=None)


def _rate(row: int) -> tuple[bool, float]:
    """Return how bad a length of rows is: first whether whole vectors do not fill it."""
    return row % _WHOLE_VECTORS != 0, abs(math.log(row / _GOOD_ROW))
