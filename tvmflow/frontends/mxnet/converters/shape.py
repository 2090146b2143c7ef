"""Converters of operators that change the shape or the order of data: reshaping, joining, splitting, repeating, broadcasting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import first_input

R = relax.op


def _flatten(op: Op) -> Expr:
    shape = op.shape()
    return R.reshape(op[0], (shape[0], math.prod(shape[1:])))


def _reshape(op: Op) -> Expr:
    shape, codes, reverse = op.shape(), op.integers("shape", ()), op.flag("reverse", False)
    # In MXNet 0.x target_shape had 0 for the size to infer.
    old_codes = tuple(size or -1 for size in op.integers("target_shape", ()))
    if op.flag("keep_highest", False) and old_codes:
        old_codes = (shape[0], *old_codes[1:])
    codes = codes or old_codes
    if not codes:
        op.refuse("the attribute shape is missing")
    return R.reshape(op[0], _resolve_shape(op, shape, codes, reverse))


def _resolve_shape(
    op: Op, shape: tuple[int, ...], codes: Sequence[int], reverse: bool
) -> tuple[int, ...]:
    """Return the shape for MXNet's codes.

    0 keeps a size, -1 infers it, -2 keeps the rest, -3 joins two, -4 splits one into the two that follow.
    """
    if reverse:
        if -4 in codes:
            op.refuse(f"shape={tuple(codes)} with reverse=True is not supported")
        return _resolve_shape(op, shape[::-1], codes[::-1], False)[::-1]
    out: list[int] = []
    source, pending = iter(shape), iter(codes)
    try:
        for code in pending:
            out.extend(_resolve_code(code, source, pending))
    except StopIteration:
        op.refuse(f"shape={tuple(codes)} needs more dimensions than data of shape {shape} has")
    if out.count(-1) == 1:
        known = math.prod(size for size in out if size != -1)
        out[out.index(-1)] = math.prod(shape) // known
    if math.prod(out) != math.prod(shape) or min(out) < 0:
        op.refuse(f"shape={tuple(codes)} does not fit data of shape {shape}")
    return tuple(out)


def _resolve_code(code: int, source: Iterator[int], pending: Iterator[int]) -> Iterable[int]:
    """Return the sizes for one code, taking sizes of the data and the operands of the code.

    Raises:
        StopIteration: when there are not enough of them.
    """
    match code:
        case 0:
            return (next(source),)
        case -2:
            return list(source)
        case -3:
            return (next(source) * next(source),)
        case -4:
            size, first, second = next(source), next(pending), next(pending)
            first = size // second if first == -1 else first
            return first, size // first if second == -1 else second
        case _:
            next(source, None)
            return (code,)


def _reshape_like(op: Op) -> Expr:
    """`reshape_like`: replaces dimensions `lhs_begin:lhs_end` by `rhs_begin:rhs_end` of the second input."""
    left, right = (
        slice(op.optional_integer(f"{side}_begin"), op.optional_integer(f"{side}_end"))
        for side in ("lhs", "rhs")
    )
    shape = list(op.shape())
    start, stop, _ = left.indices(len(shape))
    shape[start:stop] = op.shape(1)[right]
    return R.reshape(op[0], shape)


def _transpose(op: Op) -> Expr:
    axes = op.integers("axes", ())
    return R.permute_dims(op[0], [op.axis(axis) for axis in axes] or None)


def _swap_axis(op: Op) -> Expr:
    axes = list(range(op.rank()))
    first, second = op.axis(op.integer("dim1", 0)), op.axis(op.integer("dim2", 0))
    axes[first], axes[second] = axes[second], axes[first]
    return R.permute_dims(op[0], axes)


def _expand_dims(op: Op) -> Expr:
    return R.expand_dims(op[0], op.axis(op.integer("axis"), op.rank() + 1))


def _squeeze(op: Op) -> Expr:
    shape, listed = op.shape(), op.optional_integers("axis")
    if listed is None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    else:
        axes = [op.axis(axis) for axis in listed]
    rest = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if math.prod(rest) != math.prod(shape):
        op.refuse(f"axis {listed} does not have size 1 in data of shape {shape}")
    return R.reshape(op[0], rest or (1,))


def _depth_to_space(op: Op) -> Expr:
    block = op.integer("block_size")
    batch, channels, height, width = _nchw_shape(op)
    depth = channels // block**2
    split = R.reshape(op[0], (batch, block, block, depth, height, width))
    moved = R.permute_dims(split, [0, 3, 4, 1, 5, 2])
    return R.reshape(moved, (batch, depth, height * block, width * block))


def _space_to_depth(op: Op) -> Expr:
    block = op.integer("block_size")
    batch, channels, height, width = _nchw_shape(op)
    split = R.reshape(op[0], (batch, channels, height // block, block, width // block, block))
    moved = R.permute_dims(split, [0, 3, 5, 1, 2, 4])
    return R.reshape(moved, (batch, channels * block**2, height // block, width // block))


def _nchw_shape(op: Op) -> tuple[int, int, int, int]:
    if op.rank() != 4:
        op.refuse(f"its data has {op.rank()} dimensions, 4 are needed")
    batch, channels, height, width = op.shape()
    return batch, channels, height, width


def _concat(op: Op) -> Expr:
    return R.concat(op.all_inputs(), axis=op.axis(op.integer("dim", 1)))


def _stack(op: Op) -> Expr:
    return R.stack(op.all_inputs(), axis=op.axis(op.integer("axis", 0), op.rank() + 1))


def _split_at(op: Op, axis: int, starts: Sequence[int]) -> list[Expr]:
    """Return the data split along `axis` at `starts`, the first of which is 0."""
    squeeze = op.flag("squeeze_axis", False)
    pieces = []
    for start, stop in zip(starts, [*starts[1:], op.shape()[axis]], strict=True):
        piece = R.strided_slice(op[0], [axis], [start], [stop])
        pieces.append(R.squeeze(piece, [axis]) if squeeze else piece)
    return pieces


def _split_evenly(op: Op, axis: int, key: str) -> list[Expr]:
    """Return the data split along `axis` into as many parts as the attribute `key` says."""
    size, count = op.shape()[axis], op.integer(key)
    if size % count:
        op.refuse(f"axis {axis} of size {size} cannot be split into {key}={count}")
    return _split_at(op, axis, range(0, size, size // count))


def _slice_channel(op: Op) -> list[Expr]:
    return _split_evenly(op, op.axis(op.integer("axis", 1)), "num_outputs")


def _split_v2(op: Op) -> list[Expr]:
    axis = op.axis(op.integer("axis", 1))
    if not op.integer("sections", 0):
        return _split_at(op, axis, op.integers("indices"))
    op.ignore("indices")
    return _split_evenly(op, axis, "sections")


def _tile(op: Op) -> Expr:
    return R.tile(op[0], list(op.integers("reps")))


def _repeat(op: Op) -> Expr:
    axis, times = op.optional_integer("axis"), op.integer("repeats")
    if axis is None:
        return R.repeat(R.reshape(op[0], (math.prod(op.shape()),)), times, axis=0)
    return R.repeat(op[0], times, axis=op.axis(axis))


def _reverse(op: Op) -> Expr:
    value = op[0]
    for axis in op.integers("axis"):
        value = R.flip(value, op.axis(axis))
    return value


_PAD_MODES: Final = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}


def _pad(op: Op) -> Expr:
    mode = op.choice("mode", "", tuple(_PAD_MODES))
    width = op.integers("pad_width")
    if len(width) != 2 * op.rank() or min(width) < 0:
        op.refuse(f"pad_width={width} does not fit {op.rank()} dimensions")
    value = op.number("constant_value", 0.0)
    return R.nn.pad(op[0], list(width), pad_mode=_PAD_MODES[mode], pad_value=value)


def _broadcast(op: Op, shape: Sequence[int]) -> Expr:
    if len(shape) != op.rank() or any(
        old not in (1, new) for old, new in zip(op.shape(), shape, strict=True)
    ):
        op.refuse(f"data of shape {op.shape()} cannot be broadcast to {tuple(shape)}")
    return R.broadcast_to(op[0], tuple(shape))


def _broadcast_to(op: Op) -> Expr:
    shape = op.integers("shape")
    if len(shape) != op.rank():
        op.refuse(f"shape={shape} does not fit {op.rank()} dimensions")
    return _broadcast(op, [new or old for old, new in zip(op.shape(), shape, strict=True)])


def _broadcast_axis(op: Op) -> Expr:
    shape = list(op.shape())
    for axis, size in zip(op.integers("axis", ()), op.integers("size", ()), strict=True):
        shape[op.axis(axis)] = size
    return _broadcast(op, shape)


def _broadcast_like(op: Op) -> Expr:
    left, right = op.optional_integers("lhs_axes"), op.optional_integers("rhs_axes")
    if left is None or right is None:
        return _broadcast(op, op.shape(1))
    shape = list(op.shape())
    for left_axis, right_axis in zip(left, right, strict=True):
        shape[op.axis(left_axis)] = op.shape(1)[op.axis(right_axis, op.rank(1))]
    return _broadcast(op, shape)


_COPIES: Final = "_CrossDeviceCopy _copy _copyto _identity_with_attr_like_rhs identity".split()

CONVERTERS: Final[dict[str, Converter]] = {
    **dict.fromkeys(_COPIES, first_input),
    **dict.fromkeys(("Concat", "concat", "_rnn_param_concat"), _concat),
    **dict.fromkeys(("Flatten", "flatten"), _flatten),
    **dict.fromkeys(("Pad", "pad"), _pad),
    **dict.fromkeys(("Reshape", "reshape"), _reshape),
    **dict.fromkeys(("SliceChannel", "split"), _slice_channel),
    **dict.fromkeys(("SwapAxis", "swapaxes"), _swap_axis),
    **dict.fromkeys(("broadcast_axes", "broadcast_axis"), _broadcast_axis),
    **dict.fromkeys(("flip", "reverse"), _reverse),
    "_split_v2": _split_v2,
    "broadcast_like": _broadcast_like,
    "broadcast_to": _broadcast_to,
    "depth_to_space": _depth_to_space,
    "expand_dims": _expand_dims,
    "repeat": _repeat,
    "reshape_like": _reshape_like,
    "space_to_depth": _space_to_depth,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
}
