"""Converters of slices and lookups."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op, static_shape
from tvmflow.frontends.mxnet.converters._common import DTYPES

R = relax.op


def _slice(op: Op) -> Expr:
    begin, end = op.bounds("begin"), op.bounds("end")
    step = (op.bounds("step") if op.has("step") else ()) or (None,) * len(begin)
    if not len(begin) == len(end) == len(step) <= op.rank():
        op.refuse(f"begin={begin}, end={end}, step={step} do not fit {op.rank()} dimensions")
    value = op[0]
    axes, starts, stops, steps = [], [], [], []
    for axis, (b, e, s) in enumerate(zip(begin, end, step, strict=True)):
        size = op.shape()[axis]
        positions = range(*slice(b, e, s or 1).indices(size))
        if not positions:
            op.refuse(f"its slice of axis {axis} of size {size} is empty")
        if positions.step < 0:
            value = R.flip(value, axis)
            positions = range(size - 1 - positions[0], size - positions[-1], -positions.step)
        axes.append(axis)
        starts.append(positions[0])
        stops.append(positions[-1] + 1)
        steps.append(positions.step)
    return R.strided_slice(value, axes, starts, stops, steps)


def _slice_axis(op: Op) -> Expr:
    axis = op.axis(op.integer("axis"))
    size, bounds = op.shape()[axis], slice(op.integer("begin"), op.optional_integer("end"))
    start, stop, _ = bounds.indices(size)
    if start >= stop:
        op.refuse(f"its slice of axis {axis} of size {size} is empty")
    return R.strided_slice(op[0], [axis], [start], [stop])


def _slice_like(op: Op) -> Expr:
    like = op.shape(1)
    axes = [op.axis(axis) for axis in op.integers("axes", ())] or list(range(len(like)))
    for axis in axes:
        if axis >= len(like) or like[axis] > op.shape()[axis]:
            op.refuse(f"shape {like} cannot be cut from data of shape {op.shape()}")
    return R.strided_slice(op[0], axes, [0] * len(axes), [like[axis] for axis in axes])


def _crop(op: Op) -> Expr:
    """`Crop`: a window of the last two axes, of size `h_w` or that of the second input."""
    count = op.integer("num_args", len(op))
    window = op.shape(1)[2:] if count == 2 else op.integers("h_w", (0, 0))
    offset = op.integers("offset", (0, 0))
    op.ignore("h_w")
    size = op.shape()[2:]
    if op.flag("center_crop", False):
        offset = tuple((n - w) // 2 for n, w in zip(size, window, strict=True))
    if any(o + w > n or w < 1 for o, w, n in zip(offset, window, size, strict=True)):
        op.refuse(f"a window of {tuple(window)} at {offset} is not within {size}")
    ends = [o + w for o, w in zip(offset, window, strict=True)]
    return R.strided_slice(op[0], [2, 3], list(offset), ends)


def _gather(op: Op, data: Expr, axis: int, index: int, mode: str) -> Expr:
    """Return the entries of `data` along `axis` at the positions in an input, whose dimensions replace the axis."""
    shape = op.shape(index)
    flat = R.reshape(R.astype(op[index], "int32"), (math.prod(shape),))
    data_shape = static_shape(data)
    taken = R.take(data, flat, axis=axis, mode=mode)
    return R.reshape(taken, (*data_shape[:axis], *shape, *data_shape[axis + 1 :]))


def _embedding(op: Op) -> Expr:
    rows, columns = op.integer("input_dim"), op.integer("output_dim")
    op.require("dtype", "float32", "weights must be float32")
    op.ignore("sparse_grad")
    weight = op.expect_shape(1, (rows, columns))
    return _gather(op, weight, 0, 0, "clip")


def _take(op: Op) -> Expr:
    axis = op.axis(op.integer("axis", 0))
    mode = op.choice("mode", "clip", ("clip", "wrap"))
    return _gather(op, op[0], axis, 1, mode)


def _pick_along(op: Op, axis: int, keep: bool, mode: str) -> Expr:
    shape, index = op.shape(), R.astype(op[1], "int32")
    if mode == "wrap":
        positions = R.floor_mod(index, relax.const(shape[axis], "int32"))
    else:
        last = relax.const(shape[axis] - 1, "int32")
        positions = R.minimum(R.maximum(index, relax.const(0, "int32")), last)
    before, after = shape[:axis], shape[axis + 1 :]
    taken = R.gather_elements(op[0], R.reshape(positions, (*before, 1, *after)), axis=axis)
    return taken if keep else R.reshape(taken, before + after or (1,))


def _pick(op: Op) -> Expr:
    axis = op.optional_integer("axis", -1)
    if axis is None:
        op.refuse("axis=None is not supported")
    mode = op.choice("mode", "clip", ("clip", "wrap"))
    return _pick_along(op, op.axis(axis), op.flag("keepdims", False), mode)


def _batch_take(op: Op) -> Expr:
    return _pick_along(op, 1, False, "clip")


def _gather_nd(op: Op) -> Expr:
    """`gather_nd`: MXNet's indices have the coordinates on the first axis, those of Relax on the last."""
    indices = R.permute_dims(R.astype(op[1], "int64"), [*range(1, op.rank(1)), 0])
    return R.gather_nd(op[0], indices)


def _one_hot(op: Op) -> Expr:
    depth = op.integer("depth")
    dtype = op.choice("dtype", "float32", DTYPES)
    on, off = op.number("on_value", 1.0), op.number("off_value", 0.0)
    positions = relax.const(np.arange(depth, dtype="int32"), "int32")
    hot = R.equal(R.expand_dims(R.astype(op[0], "int32"), op.rank()), positions)
    return R.where(hot, relax.const(on, dtype), relax.const(off, dtype))


CONVERTERS: Final[dict[str, Converter]] = {
    "Crop": _crop,
    "Embedding": _embedding,
    "batch_take": _batch_take,
    "crop": _slice,
    "gather_nd": _gather_nd,
    "one_hot": _one_hot,
    "pick": _pick,
    "slice": _slice,
    "slice_axis": _slice_axis,
    "slice_like": _slice_like,
    "take": _take,
}
