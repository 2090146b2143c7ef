"""Converters of MXNet's rearrangements: shapes, slices, lookups, sorting, constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op, static_shape
from tvmflow.frontends.mxnet._sort import argsort

R = relax.op


# -- shapes ----------------------------------------------------------------------------------


def _flatten(op: Op) -> Expr:
    shape = op.shape()
    return R.reshape(op[0], (shape[0], math.prod(shape[1:])))


def _reshape(op: Op) -> Expr:
    codes = op.integers("shape", ())
    reverse = op.flag("reverse", False)
    old = op.integers("target_shape", ())
    keep = op.flag("keep_highest", False)
    shape = op.shape()
    if not codes and old:
        # the form of MXNet 0.x: 0 is inferred
        codes = tuple(-1 if size == 0 else size for size in old)
        if keep:
            codes = (shape[0], *codes[1:])
    if not codes:
        op.refuse("the attribute shape is missing")
    return R.reshape(op[0], _reshaped(op, shape, codes, reverse))


def _reshaped(
    op: Op, shape: tuple[int, ...], codes: Sequence[int], reverse: bool
) -> tuple[int, ...]:
    """MXNet's codes: 0 keep, -1 infer, -2 keep the rest, -3 join two, -4 split one into the two that follow."""
    if reverse:
        if -4 in codes:
            op.refuse(f"shape={tuple(codes)} with reverse=True is not supported")
        return _reshaped(op, shape[::-1], codes[::-1], False)[::-1]
    out: list[int] = []
    source = iter(shape)
    pending = iter(codes)
    try:
        for code in pending:
            if code == 0:
                out.append(next(source))
            elif code == -1:
                next(source, None)
                out.append(-1)
            elif code == -2:
                out.extend(source)
            elif code == -3:
                out.append(next(source) * next(source))
            elif code == -4:
                whole, first, second = next(source), next(pending), next(pending)
                if first == -1:
                    first = whole // second
                out.extend((first, whole // first if second == -1 else second))
            else:
                next(source, None)
                out.append(code)
    except StopIteration:
        op.refuse(f"shape={tuple(codes)} asks for more dimensions than data of shape {shape} have")
    if out.count(-1) == 1:
        known = math.prod(size for size in out if size != -1)
        out[out.index(-1)] = math.prod(shape) // known
    if math.prod(out) != math.prod(shape) or min(out) < 0:
        op.refuse(f"shape={tuple(codes)} does not fit data of shape {shape}")
    return tuple(out)


def _reshape_like(op: Op) -> Expr:
    """Dimensions `lhs_begin:lhs_end` of the first become `rhs_begin:rhs_end` of the second's."""
    left, right = op.shape(0), op.shape(1)
    ends = []
    for side, shape in (("lhs", left), ("rhs", right)):
        begin = op.optional_integer(f"{side}_begin") or 0
        end = op.optional_integer(f"{side}_end")
        ends.append(slice(*slice(begin, end).indices(len(shape))))
    shape = (*left[: ends[0].start], *right[ends[1]], *left[ends[0].stop :])
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
    shape = op.shape()
    given = op.optional_integers("axis")
    axes = (
        [axis for axis, size in enumerate(shape) if size == 1]
        if given is None
        else [op.axis(axis) for axis in given]
    )
    rest = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if math.prod(rest) != math.prod(shape):
        op.refuse(f"axis {given} is not 1 in data of shape {shape}")
    return R.reshape(op[0], rest or (1,))


def _depth_to_space(op: Op) -> Expr:
    block = op.integer("block_size")
    batch, channels, height, width = _four(op)
    depth = channels // block**2
    split = R.reshape(op[0], (batch, block, block, depth, height, width))
    moved = R.permute_dims(split, [0, 3, 4, 1, 5, 2])
    return R.reshape(moved, (batch, depth, height * block, width * block))


def _space_to_depth(op: Op) -> Expr:
    block = op.integer("block_size")
    batch, channels, height, width = _four(op)
    split = R.reshape(op[0], (batch, channels, height // block, block, width // block, block))
    moved = R.permute_dims(split, [0, 3, 5, 1, 2, 4])
    return R.reshape(moved, (batch, channels * block**2, height // block, width // block))


def _four(op: Op) -> tuple[int, int, int, int]:
    if op.rank() != 4:
        op.refuse(f"its data has {op.rank()} dimensions, 4 are needed")
    batch, channels, height, width = op.shape()
    return batch, channels, height, width


# -- joining and splitting -------------------------------------------------------------------


def _concat(op: Op) -> Expr:
    values = op.all_inputs()
    return R.concat(values, axis=op.axis(op.integer("dim", 1)))


def _stack(op: Op) -> Expr:
    return R.stack(op.all_inputs(), axis=op.axis(op.integer("axis", 0), op.rank() + 1))


def _pieces(op: Op, axis: int, starts: Sequence[int], squeeze: bool) -> list[Expr]:
    """The data cut along `axis` at `starts`, which begin with 0."""
    size = op.shape()[axis]
    pieces = []
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        piece = R.strided_slice(op[0], [axis], [start], [stop])
        pieces.append(R.squeeze(piece, [axis]) if squeeze else piece)
    return pieces


def _slice_channel(op: Op) -> list[Expr]:
    axis, count = op.axis(op.integer("axis", 1)), op.integer("num_outputs")
    size = op.shape()[axis]
    if size % count:
        op.refuse(f"{size} does not divide into num_outputs={count}")
    squeeze = op.flag("squeeze_axis", False)
    return _pieces(op, axis, range(0, size, size // count), squeeze)


def _split_v2(op: Op) -> list[Expr]:
    axis, sections = op.axis(op.integer("axis", 1)), op.integer("sections", 0)
    squeeze = op.flag("squeeze_axis", False)
    size = op.shape()[axis]
    if sections:
        op.ignore("indices")
        if size % sections:
            op.refuse(f"{size} does not divide into sections={sections}")
        return _pieces(op, axis, range(0, size, size // sections), squeeze)
    return _pieces(op, axis, op.integers("indices"), squeeze)


def _slice(op: Op) -> Expr:
    begin, end = op.bounds("begin"), op.bounds("end")
    step = op.bounds("step") if op.has("step") else ()
    step = step or (None,) * len(begin)
    if not len(begin) == len(end) == len(step) <= op.rank():
        op.refuse(f"begin={begin}, end={end}, step={step} do not fit {op.rank()} dimensions")
    value = op[0]
    axes, starts, stops, steps = [], [], [], []
    for axis, (b, e, s) in enumerate(zip(begin, end, step, strict=True)):
        size = op.shape()[axis]
        positions = range(*slice(b, e, s or 1).indices(size))
        if not positions:
            op.refuse(f"it takes nothing of axis {axis}, which has {size}")
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
    positions = range(
        *slice(op.integer("begin"), op.optional_integer("end")).indices(op.shape()[axis])
    )
    if not positions:
        op.refuse(f"it takes nothing of axis {axis}, which has {op.shape()[axis]}")
    return R.strided_slice(op[0], [axis], [positions[0]], [positions[-1] + 1])


def _slice_like(op: Op) -> Expr:
    axes = [op.axis(axis) for axis in op.integers("axes", ())] or list(range(op.rank(1)))
    like = op.shape(1)
    for axis in axes:
        if axis >= len(like) or like[axis] > op.shape()[axis]:
            op.refuse(f"shape {like} cannot be cut from data of shape {op.shape()}")
    return R.strided_slice(op[0], axes, [0] * len(axes), [like[axis] for axis in axes])


def _crop(op: Op) -> Expr:
    """The window of the last two axes of size `h_w`, or of the second input's."""
    count = op.integer("num_args", len(op))
    wanted = op.shape(1)[2:] if count == 2 else op.integers("h_w", (0, 0))
    offset = op.integers("offset", (0, 0))
    op.ignore("h_w")
    size = op.shape()[2:]
    if op.flag("center_crop", False):
        offset = tuple((n - w) // 2 for n, w in zip(size, wanted, strict=True))
    if any(o + w > n or w < 1 for o, w, n in zip(offset, wanted, size, strict=True)):
        op.refuse(f"a window of {tuple(wanted)} at {offset} is not within {size}")
    return R.strided_slice(
        op[0], [2, 3], list(offset), [o + w for o, w in zip(offset, wanted, strict=True)]
    )


# -- repeating, padding, turning round ------------------------------------------------------


def _tile(op: Op) -> Expr:
    return R.tile(op[0], list(op.integers("reps")))


def _repeat(op: Op) -> Expr:
    axis = op.optional_integer("axis")
    times = op.integer("repeats")
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


# -- broadcasting -----------------------------------------------------------------------------


def _broadcast(op: Op, shape: Sequence[int]) -> Expr:
    if len(shape) != op.rank() or any(
        old not in (1, new) for old, new in zip(op.shape(), shape, strict=True)
    ):
        op.refuse(f"data of shape {op.shape()} do not broadcast to {tuple(shape)}")
    return R.broadcast_to(op[0], tuple(shape))


def _broadcast_to(op: Op) -> Expr:
    wanted = op.integers("shape")
    if len(wanted) != op.rank():
        op.refuse(f"shape={wanted} does not fit {op.rank()} dimensions")
    return _broadcast(op, [new or old for old, new in zip(op.shape(), wanted, strict=True)])


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
    for mine, theirs in zip(left, right, strict=True):
        shape[op.axis(mine)] = op.shape(1)[op.axis(theirs, op.rank(1))]
    return _broadcast(op, shape)


# -- lookups ----------------------------------------------------------------------------------


def _gather(op: Op, data: Expr, axis: int, index: int, mode: str) -> Expr:
    """Entries of `data` along `axis` at input `index`, whose dimensions replace the axis."""
    shape = op.shape(index)
    flat = R.reshape(R.astype(op[index], "int32"), (math.prod(shape),))
    around = static_shape(data)
    taken = R.take(data, flat, axis=axis, mode=mode)
    return R.reshape(taken, (*around[:axis], *shape, *around[axis + 1 :]))


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


def _picked(op: Op, axis: int, keep: bool, mode: str) -> Expr:
    size = relax.const(op.shape()[axis], "int32")
    given = R.astype(op[1], "int32")
    zero, last = relax.const(0, "int32"), relax.const(op.shape()[axis] - 1, "int32")
    positions = (
        R.floor_mod(given, size) if mode == "wrap" else R.minimum(R.maximum(given, zero), last)
    )
    one = tuple(1 if position == axis else size for position, size in enumerate(op.shape()))
    taken = R.gather_elements(op[0], R.reshape(positions, one), axis=axis)
    if keep:
        return taken
    return R.reshape(taken, one[:axis] + one[axis + 1 :] or (1,))


def _pick(op: Op) -> Expr:
    axis = op.optional_integer("axis", -1)
    if axis is None:
        op.refuse("axis=None is not supported")
    mode = op.choice("mode", "clip", ("clip", "wrap"))
    return _picked(op, op.axis(axis), op.flag("keepdims", False), mode)


def _batch_take(op: Op) -> Expr:
    return _picked(op, 1, False, "clip")


def _gather_nd(op: Op) -> Expr:
    """MXNet's indices have the coordinates first, Relax' have them last."""
    rank = op.rank(1)
    indices = R.permute_dims(R.astype(op[1], "int64"), [*range(1, rank), 0])
    return R.gather_nd(op[0], indices)


def _one_hot(op: Op) -> Expr:
    depth = op.integer("depth")
    dtype = op.choice("dtype", "float32", _DTYPES)
    on, off = op.number("on_value", 1.0), op.number("off_value", 0.0)
    places = relax.const(np.arange(depth, dtype="int32"), "int32")
    hot = R.equal(R.expand_dims(R.astype(op[0], "int32"), op.rank()), places)
    return R.where(hot, relax.const(on, dtype), relax.const(off, dtype))


# -- sorting: the order of equal values is that of the data -----------------------------------


def _sorted_axis(op: Op) -> tuple[Expr, int]:
    """The data and the axis to sort; without an axis MXNet sorts everything as one."""
    axis = op.optional_integer("axis", -1)
    if axis is None:
        return R.reshape(op[0], (math.prod(op.shape()),)), 0
    return op[0], op.axis(axis)


def _sort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    data = op.emit(data)
    order = argsort(op, data, axis, ascending=op.flag("is_ascend", True))
    return R.gather_elements(data, order, axis=axis)


def _argsort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    dtype = op.choice("dtype", "float32", _DTYPES)
    order = argsort(op, op.emit(data), axis, ascending=op.flag("is_ascend", True))
    return R.astype(order, dtype)


def _top_k(op: Op) -> list[Expr]:
    data, axis = _sorted_axis(op)
    data = op.emit(data)
    size = int(data.ty.shape.values[axis])
    count = op.integer("k", 1)
    count = size if count < 1 else min(count, size)
    dtype = op.choice("dtype", "float32", _DTYPES)
    wanted = op.choice("ret_typ", "indices", ("indices", "value", "both"))
    order = argsort(op, data, axis, ascending=op.flag("is_ascend", False))
    order = op.emit(R.strided_slice(order, [axis], [0], [count]))
    results = {
        "indices": lambda: [R.astype(order, dtype)],
        "value": lambda: [R.gather_elements(data, order, axis=axis)],
        "both": lambda: [R.gather_elements(data, order, axis=axis), R.astype(order, dtype)],
    }
    return results[wanted]()


# -- constants ----------------------------------------------------------------------------------

_DTYPES: Final = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")


def _filled(value: float) -> Converter:
    def convert(op: Op) -> Expr:
        shape = op.integers("shape", ()) or (1,)
        dtype = op.choice("dtype", "float32", _DTYPES)
        return R.full(shape, relax.const(value, dtype), dtype)

    return convert


def _full(op: Op) -> Expr:
    return _filled(op.number("value"))(op)


def _filled_like(value: float) -> Converter:
    return lambda op: R.full(op.shape(), op.scalar(value), op.dtype())


def _counting(start: float, step: float, count: int, repeat: int, dtype: str) -> Any:
    # MXNet computes each element by itself, in the dtype of the result
    steps = np.arange(count).astype(dtype) * np.dtype(dtype).type(step)
    return np.repeat(np.dtype(dtype).type(start) + steps, repeat).astype(dtype)


def _arange(op: Op) -> Expr:
    start, step, repeat = op.number("start"), op.number("step", 1.0), op.integer("repeat", 1)
    op.require("infer_range", "false", "the range must be given")
    stop = op.number("stop", math.nan)
    if math.isnan(stop):
        start, stop = 0.0, start
    count = max(math.ceil((stop - start) / step), 0)
    dtype = op.choice("dtype", "float32", _DTYPES)
    return relax.const(_counting(start, step, count, repeat, dtype), dtype)


def _arange_like(op: Op) -> Expr:
    axis, repeat = op.optional_integer("axis"), op.integer("repeat", 1)
    shape = op.shape() if axis is None else (op.shape()[op.axis(axis)],)
    total = math.prod(shape)
    values = _counting(
        op.number("start", 0.0), op.number("step", 1.0), -(-total // repeat), repeat, op.dtype()
    )
    return relax.const(values[:total].reshape(shape), op.dtype())


def _eye(op: Op) -> Expr:
    rows, offset = op.integer("N"), op.integer("k", 0)
    columns = op.integer("M", 0) or rows
    dtype = op.choice("dtype", "float32", _DTYPES)
    return relax.const(np.eye(rows, columns, offset, dtype=dtype), dtype)


def _shape_array(op: Op) -> Expr:
    return relax.const(np.array(op.shape(), "int64"), "int64")


def _size_array(op: Op) -> Expr:
    return relax.const(np.array([math.prod(op.shape())], "int64"), "int64")


def _first(op: Op) -> Expr:
    return op[0]


def _div_sqrt_dim(op: Op) -> Expr:
    return R.divide(op[0], op.scalar(math.sqrt(op.shape()[-1])))


CONVERTERS: Final[dict[str, Converter]] = {
    "Concat": _concat,
    "Crop": _crop,
    "Embedding": _embedding,
    "Flatten": _flatten,
    "Pad": _pad,
    "Reshape": _reshape,
    "SliceChannel": _slice_channel,
    "SwapAxis": _swap_axis,
    "_CrossDeviceCopy": _first,
    "_arange": _arange,
    "_contrib_arange_like": _arange_like,
    "_contrib_div_sqrt_dim": _div_sqrt_dim,
    "_copy": _first,
    "_copyto": _first,
    "_eye": _eye,
    "_full": _full,
    "_identity_with_attr_like_rhs": _first,
    "_ones": _filled(1.0),
    "_rnn_param_concat": _concat,
    "_split_v2": _split_v2,
    "_zeros": _filled(0.0),
    "_zeros_without_dtype": _filled(0.0),
    "argsort": _argsort,
    "batch_take": _batch_take,
    "broadcast_axes": _broadcast_axis,
    "broadcast_axis": _broadcast_axis,
    "broadcast_like": _broadcast_like,
    "broadcast_to": _broadcast_to,
    "concat": _concat,
    "crop": _slice,
    "depth_to_space": _depth_to_space,
    "expand_dims": _expand_dims,
    "flatten": _flatten,
    "flip": _reverse,
    "gather_nd": _gather_nd,
    "identity": _first,
    "one_hot": _one_hot,
    "ones_like": _filled_like(1.0),
    "pad": _pad,
    "pick": _pick,
    "repeat": _repeat,
    "reshape": _reshape,
    "reshape_like": _reshape_like,
    "reverse": _reverse,
    "shape_array": _shape_array,
    "size_array": _size_array,
    "slice": _slice,
    "slice_axis": _slice_axis,
    "slice_like": _slice_like,
    "sort": _sort,
    "space_to_depth": _space_to_depth,
    "split": _slice_channel,
    "squeeze": _squeeze,
    "stack": _stack,
    "swapaxes": _swap_axis,
    "take": _take,
    "tile": _tile,
    "topk": _top_k,
    "transpose": _transpose,
    "zeros_like": _filled_like(0.0),
}

# Operators whose outputs MXNet numbers, told from their attributes; hidden outputs count
NUMBERED_OUTPUTS: Final[dict[str, Callable[[Mapping[str, str]], bool]]] = {
    "SliceChannel": lambda attrs: True,
    "split": lambda attrs: True,
    "_split_v2": lambda attrs: True,
    "amp_multicast": lambda attrs: True,
    "topk": lambda attrs: attrs.get("ret_typ") in ("both", "value"),
    "sort": lambda attrs: True,
    "_contrib_box_nms": lambda attrs: True,
}
