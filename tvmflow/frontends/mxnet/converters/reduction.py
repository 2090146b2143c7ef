"""Converters of reductions. A full reduction has shape (1,), as in MXNet."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op

R = relax.op


def _reduced_axes(op: Op) -> list[int]:
    """Return the axes that a reduction removes, in order; with `exclude`, all others than `axis`."""
    listed = [op.axis(axis) for axis in op.optional_integers("axis") or ()]
    all_axes = range(op.rank())
    if op.flag("exclude", False):
        return [axis for axis in all_axes if axis not in listed] if listed else list(all_axes)
    return sorted(listed) or list(all_axes)


def _reduce(op: Op, function: Callable[..., Expr], value: Expr, axes: list[int]) -> Expr:
    keep = op.flag("keepdims", False)
    out = function(value, axes, keepdims=keep)
    # MXNet has no tensors of rank 0.
    return R.reshape(out, (1,)) if len(axes) == op.rank() and not keep else out


def _reduction(function: Callable[..., Expr]) -> Converter:
    return lambda op: _reduce(op, function, op[0], _reduced_axes(op))


def _norm(op: Op) -> Expr:
    """`norm`: the 1-norm or 2-norm over axes."""
    order = op.integer("ord", 2)
    if order not in (1, 2):
        op.refuse(f"ord={order} is not supported, only 1 and 2")
    op.require("out_dtype", op.dtype(), "the dtype cannot change")
    axes = _reduced_axes(op)
    if order == 1:
        return _reduce(op, R.sum, R.abs(op[0]), axes)
    return R.sqrt(_reduce(op, R.sum, op[0] * op[0], axes))


def _arg_reduction(function: Callable[..., Expr]) -> Converter:
    """Return the converter of argmax or argmin.

    The index has the dtype of the data, and is the first of equal values.
    """

    def convert(op: Op) -> Expr:
        axis = op.optional_integer("axis")
        keep = op.flag("keepdims", False)
        if axis is None:
            flat = R.reshape(op[0], (math.prod(op.shape()),))
            index = R.reshape(function(flat, axis=0), (1,) * op.rank() if keep else (1,))
        else:
            index = function(op[0], axis=op.axis(axis), keepdims=keep)
            if op.rank() == 1 and not keep:
                index = R.reshape(index, (1,))
        return R.astype(index, op.dtype())

    return convert


def _argmax_channel(op: Op) -> Expr:
    if op.rank() != 2:
        op.refuse(f"its data has {op.rank()} dimensions, 2 are needed")
    return R.astype(R.argmax(op[0], axis=1), op.dtype())


CONVERTERS: Final[dict[str, Converter]] = {
    **dict.fromkeys(("max", "max_axis"), _reduction(R.max)),
    **dict.fromkeys(("min", "min_axis"), _reduction(R.min)),
    **dict.fromkeys(("sum", "sum_axis"), _reduction(R.sum)),
    "argmax": _arg_reduction(R.argmax),
    "argmax_channel": _argmax_channel,
    "argmin": _arg_reduction(R.argmin),
    "mean": _reduction(R.mean),
    "norm": _norm,
    "prod": _reduction(R.prod),
}
