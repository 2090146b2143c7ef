"""Converters of operators that change shapes, move or look up elements, or create constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem
from tvmflow.frontends.mxnet._op import DTYPES, Converter, Expr, Op, shown
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, known_sizes

R = relax.op


def _sorted_axis(op: Op) -> tuple[Expr, int]:
    """Return the data and the axis to sort; without an axis MXNet sorts the flattened data."""
    axis = op.optional_integer("axis", -1)
    if axis is None:
        return op.emit(R.reshape(op[0], (math.prod(op.sizes()),))), 0
    return op.emit(op[0]), op.axis(axis)


def _sort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    return R.sort(data, axis=axis, descending=not op.flag("is_ascend", True))


def _argsort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    dtype = op.choice("dtype", "float32", DTYPES)
    order = R.argsort(data, axis=axis, descending=not op.flag("is_ascend", True), dtype="int32")
    return R.astype(order, dtype)


def _top_k(op: Op) -> list[Expr]:
    """`topk`: values, indices or both of the k largest (or smallest) entries; k below 1 means all."""
    data, axis = _sorted_axis(op)
    [size], count = op.fixed([known_sizes(data)[axis]]), op.integer("k", 1)
    count = size if count < 1 else min(count, size)
    dtype = op.choice("dtype", "float32", DTYPES)
    returned = op.lookup("ret_typ", "indices", {"indices": [1], "value": [0], "both": [0, 1]})
    largest = not op.flag("is_ascend", False)
    both = op.emit(R.topk(data, k=count, axis=axis, largest=largest, dtype="int32"))
    results = both[0], R.astype(both[1], dtype)
    return [results[index] for index in returned]


# ---------------------------------------------------------------- shapes


def _reshape(op: Op) -> Expr:
    shape, codes, reverse = op.sizes(), op.integers("shape", ()), op.flag("reverse", False)
    # In MXNet 0.x target_shape had 0 for the size to infer.
    old_codes = tuple(size or -1 for size in op.integers("target_shape", ()))
    if op.flag("keep_highest", False) and old_codes:
        old_codes = (shape[0], *old_codes[1:])
    codes = codes or old_codes
    if not codes:
        op.refuse("the attribute shape is missing")
    return R.reshape(op[0], _resolve_shape(op, shape, codes, reverse))


def _resolve_shape(
    op: Op, shape: tuple[IrSize, ...], codes: Sequence[int], reverse: bool
) -> tuple[IrSize, ...]:
    """Return the shape for MXNet's codes.

    0 keeps a size, -1 infers it, -2 keeps the rest, -3 joins two, -4 splits one into the two that follow.
    """
    if reverse:
        if -4 in codes:
            op.refuse(f"shape={tuple(codes)} with reverse=True is not supported")
        return _resolve_shape(op, shape[::-1], codes[::-1], False)[::-1]
    out: list[IrSize] = []
    source, pending = iter(shape), iter(codes)
    try:
        for code in pending:
            out.extend(_resolve_code(code, source, pending))
    except StopIteration:
        op.refuse(
            f"shape={tuple(codes)} needs more dimensions than data of shape {shown(shape)} has"
        )
    if inferred := [axis for axis, size in enumerate(out) if not is_dynamic(size) and size == -1]:
        known = math.prod(size for axis, size in enumerate(out) if axis != inferred[0])
        out[inferred[0]] = op.ranges.simplify(math.prod(shape) // known)
    is_negative = any(not is_dynamic(size) and size < 0 for size in out)
    if is_negative or not op.ranges.is_equal(math.prod(out), math.prod(shape)):
        op.refuse(f"shape={tuple(codes)} does not fit data of shape {shown(shape)}")
    return tuple(out)


def _resolve_code(code: int, source: Iterator[IrSize], pending: Iterator[int]) -> Iterable[IrSize]:
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
    shape = list(op.sizes())
    start, stop, _ = left.indices(len(shape))
    shape[start:stop] = op.sizes(1)[right]
    return R.reshape(op[0], shape)


def _transpose(op: Op) -> Expr:
    axes = op.integers("axes", ())
    return R.permute_dims(op[0], [op.axis(axis) for axis in axes] or None)


def _swap_axis(op: Op) -> Expr:
    axes = list(range(op.rank()))
    first, second = op.axis(op.integer("dim1", 0)), op.axis(op.integer("dim2", 0))
    axes[first], axes[second] = axes[second], axes[first]
    return R.permute_dims(op[0], axes)


def _squeeze(op: Op) -> Expr:
    shape, listed = op.sizes(), op.optional_integers("axis")
    ones = [axis for axis, size in enumerate(shape) if op.ranges.is_equal(size, 1)]
    axes = ones if listed is None else [op.axis(axis) for axis in listed]
    rest = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if not set(axes) <= set(ones):
        op.refuse(f"axis {listed} does not have size 1 in data of shape {shown(shape)}")
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
    for size in (height, width):
        if is_dynamic(size) and not op.ranges.is_equal(size // block * block, size):
            text = f"{size} may not be a multiple of block_size={block}; set `multiple_of` in `dimensions`"
            raise DynamicShapeProblem(text)
    split = R.reshape(op[0], (batch, channels, height // block, block, width // block, block))
    moved = R.permute_dims(split, [0, 3, 5, 1, 2, 4])
    return R.reshape(moved, (batch, channels * block**2, height // block, width // block))


def _nchw_shape(op: Op) -> tuple[IrSize, int, IrSize, IrSize]:
    op.expect_rank(4)
    batch, _, height, width = op.sizes()
    return batch, op.size(1), height, width


def _split_at(op: Op, axis: int, starts: Sequence[int]) -> list[Expr]:
    """Return the data split along `axis` at `starts`, which begin with 0."""
    squeeze = op.flag("squeeze_axis", False)
    pieces = []
    end = op.sizes()[axis]
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        if is_dynamic(stop) and not op.ranges.is_certain(start < stop):
            raise DynamicShapeProblem(f"its last part may be empty: {end} may be {start} or less")
        piece = _cut(op[0], [axis], [start], [stop])
        pieces.append(R.squeeze(piece, [axis]) if squeeze else piece)
    return pieces


def _split_evenly(op: Op, axis: int, key: str) -> list[Expr]:
    """Return the data split along `axis` into as many parts as the attribute `key` says."""
    size, count = op.size(axis), op.integer(key)
    if size % count:
        op.refuse(f"axis {axis} of size {size} cannot be split into {key}={count}")
    return _split_at(op, axis, range(0, size, size // count))


def _split_v2(op: Op) -> list[Expr]:
    axis = op.axis(op.integer("axis", 1))
    if not op.integer("sections", 0):
        return _split_at(op, axis, op.integers("indices"))
    op.ignore("indices")
    return _split_evenly(op, axis, "sections")


def _repeat(op: Op) -> Expr:
    axis, times = op.optional_integer("axis"), op.integer("repeats")
    if axis is None:
        return R.repeat(R.reshape(op[0], (math.prod(op.sizes()),)), times, axis=0)
    return R.repeat(op[0], times, axis=op.axis(axis))


def _reverse(op: Op) -> Expr:
    value = op[0]
    for axis in op.integers("axis"):
        value = R.flip(value, op.axis(axis))
    return value


_PAD_MODES: Final = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}


def _pad(op: Op) -> Expr:
    mode = op.lookup("mode", "", _PAD_MODES)
    width = op.integers("pad_width")
    if len(width) != 2 * op.rank() or min(width) < 0:
        op.refuse(f"pad_width={width} does not fit {op.rank()} dimensions")
    value = op.number("constant_value", 0.0)
    return R.nn.pad(op[0], list(width), pad_mode=mode, pad_value=value)


def _broadcast(op: Op, shape: Sequence[IrSize]) -> Expr:
    if len(shape) != op.rank() or not all(
        op.ranges.is_equal(old, 1) or op.ranges.is_equal(old, new)
        for old, new in zip(op.sizes(), shape, strict=True)
    ):
        op.refuse(f"data of shape {shown(op.sizes())} cannot be broadcast to {shown(shape)}")
    return R.broadcast_to(op[0], tuple(shape))


def _broadcast_to(op: Op) -> Expr:
    shape = op.integers("shape")
    if len(shape) != op.rank():
        op.refuse(f"shape={shape} does not fit {op.rank()} dimensions")
    return _broadcast(op, [new or old for old, new in zip(op.sizes(), shape, strict=True)])


def _broadcast_axis(op: Op) -> Expr:
    shape = list(op.sizes())
    for axis, size in zip(op.integers("axis", ()), op.integers("size", ()), strict=True):
        shape[op.axis(axis)] = size
    return _broadcast(op, shape)


def _broadcast_like(op: Op) -> Expr:
    left, right = op.optional_integers("lhs_axes"), op.optional_integers("rhs_axes")
    if left is None or right is None:
        return _broadcast(op, op.sizes(1))
    shape = list(op.sizes())
    for left_axis, right_axis in zip(left, right, strict=True):
        shape[op.axis(left_axis)] = op.sizes(1)[op.axis(right_axis, op.rank(1))]
    return _broadcast(op, shape)


_COPIES: Final = "_CrossDeviceCopy _copy _copyto _identity_with_attr_like_rhs identity".split()


# ---------------------------------------------------------------- slices and lookups


def _slice(op: Op) -> Expr:
    begin, end = op.bounds("begin"), op.bounds("end")
    step = (op.bounds("step") if op.has("step") else ()) or (None,) * len(begin)
    if not len(begin) == len(end) == len(step) <= op.rank():
        op.refuse(f"begin={begin}, end={end}, step={step} do not fit {op.rank()} dimensions")
    value = op[0]
    cuts: list[tuple[int, Any, Any, int]] = []
    for axis, (b, e, s) in enumerate(zip(begin, end, step, strict=True)):
        size = op.sizes()[axis]
        if is_dynamic(size):
            if (b or 0, e, s or 1) != (0, None, 1):
                cuts.append((axis, *_dynamic_bounds(op, axis, b or 0, e, s or 1), s or 1))
            continue
        positions = range(*slice(b, e, s or 1).indices(size))
        if not positions:
            op.refuse(f"its slice of axis {axis} of size {size} is empty")
        if positions.step < 0:
            value = R.flip(value, axis)
            positions = range(size - 1 - positions[0], size - positions[-1], -positions.step)
        cuts.append((axis, positions[0], positions[-1] + 1, positions.step))
    return _cut(value, *map(list, zip(*cuts, strict=True))) if cuts else value


def _cut(
    value: Expr,
    axes: Sequence[int],
    starts: Sequence[IrSize],
    stops: Sequence[IrSize],
    steps: Sequence[int] | None = None,
) -> Expr:
    """Return a slice; bounds that are dynamic are known to lie within the data."""
    within = any(map(is_dynamic, (*starts, *stops)))
    return R.strided_slice(value, axes, starts, stops, steps, assume_inbound=within)


def _dynamic_bounds(op: Op, axis: int, begin: int, end: int | None, step: int) -> tuple[Any, Any]:
    """Return where a slice of dynamic size begins and ends; it has an element at all sizes."""
    size = op.sizes()[axis]
    if step < 1:
        raise DynamicShapeProblem(f"a step below 1 along {size} is not supported")
    start = op.ranges.clamp(begin, size)
    stop = size if end is None else op.ranges.clamp(end, size)
    if not op.ranges.is_certain(start < stop):
        text = f"its slice of axis {axis} may be empty, or is not known, for some sizes of {size}"
        raise DynamicShapeProblem(f"{text}; raise `min` in `dimensions`")
    return start, stop


def _slice_axis(op: Op) -> Expr:
    axis = op.axis(op.integer("axis"))
    size, bounds = op.sizes()[axis], slice(op.integer("begin"), op.optional_integer("end"))
    if is_dynamic(size):
        start, stop = _dynamic_bounds(op, axis, bounds.start, bounds.stop, 1)
        return _cut(op[0], [axis], [start], [stop])
    start, stop, _ = bounds.indices(size)
    if start >= stop:
        op.refuse(f"its slice of axis {axis} of size {size} is empty")
    return R.strided_slice(op[0], [axis], [start], [stop])


def _slice_like(op: Op) -> Expr:
    like = op.sizes(1)
    axes = [op.axis(axis) for axis in op.integers("axes", ())] or list(range(len(like)))
    for axis in axes:
        if axis >= len(like) or not op.ranges.is_certain(like[axis] <= op.sizes()[axis]):
            op.refuse(f"shape {shown(like)} cannot be cut from data of shape {shown(op.sizes())}")
    return _cut(op[0], axes, [0] * len(axes), [like[axis] for axis in axes])


def _crop(op: Op) -> Expr:
    """`Crop`: a window of the last two axes, of size `h_w` or that of the second input."""
    count = op.integer("num_args", len(op))
    window = op.sizes(1)[2:] if count == 2 else op.integers("h_w", (0, 0))
    offset = op.integers("offset", (0, 0))
    op.ignore("h_w")
    size = op.sizes()[2:]
    if op.flag("center_crop", False):
        offset = tuple((n - w) // 2 for n, w in zip(size, window, strict=True))
    is_certain = op.ranges.is_certain
    if not all(
        is_certain(o + w <= n) and is_certain(w >= 1)
        for o, w, n in zip(offset, window, size, strict=True)
    ):
        op.refuse(f"a window of {shown(window)} at {shown(offset)} is not within {shown(size)}")
    ends = [o + w for o, w in zip(offset, window, strict=True)]
    return _cut(op[0], [2, 3], list(offset), ends)


def _gather(op: Op, data: Expr, axis: int, index: int, mode: str) -> Expr:
    """Return entries of `data` along `axis`; the dimensions of the positions replace the axis."""
    shape = op.sizes(index)
    flat = R.reshape(R.astype(op[index], "int64"), (math.prod(shape),))
    data_shape = known_sizes(data)
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
    shape, index, length = op.sizes(), R.astype(op[1], "int32"), op.size(axis)
    if mode == "wrap":
        positions = R.floor_mod(index, relax.const(length, "int32"))
    else:
        last = relax.const(length - 1, "int32")
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


def _gather_nd(op: Op) -> Expr:
    """`gather_nd`: MXNet's indices have the coordinates on the first axis, those of Relax on the last."""
    indices = R.permute_dims(R.astype(op[1], "int64"), [*range(1, op.rank(1)), 0])
    count, zero = op.sizes(1)[0], relax.const(0, "int64")
    sizes = op.sizes()[:count]
    if all(isinstance(size, int) for size in sizes):
        ends = R.add(indices, relax.const(np.array(sizes), "int64"))
        indices = R.where(R.less(indices, zero), ends, indices)
    return R.gather_nd(op[0], indices)


def _one_hot(op: Op) -> Expr:
    depth = op.integer("depth")
    dtype = op.choice("dtype", "float32", DTYPES)
    on, off = op.number("on_value", 1.0), op.number("off_value", 0.0)
    positions = relax.const(np.arange(depth, dtype="int32"), "int32")
    hot = R.equal(R.expand_dims(R.astype(op[0], "int32"), op.rank()), positions)
    return R.where(hot, relax.const(on, dtype), relax.const(off, dtype))


# ---------------------------------------------------------------- constants


def _fill(value: float) -> Converter:
    def convert(op: Op) -> Expr:
        shape = op.integers("shape", ()) or (1,)
        dtype = op.choice("dtype", "float32", DTYPES)
        return R.full(shape, relax.const(value, dtype), dtype)

    return convert


def _fill_like(value: float) -> Converter:
    return lambda op: R.full(op.sizes(), op.scalar(value), op.dtype())


def _arange_values(start: float, step: float, count: int, repeat: int, dtype: str) -> Any:
    # MXNet computes each element from its index, in the dtype of the result.
    steps = np.arange(count).astype(dtype) * np.dtype(dtype).type(step)
    return np.repeat(np.dtype(dtype).type(start) + steps, repeat).astype(dtype)


def _arange(op: Op) -> Expr:
    """`arange`: without `stop`, from 0 to `start`; each value `repeat` times."""
    start, step, repeat = op.number("start"), op.number("step", 1.0), op.integer("repeat", 1)
    if not step:
        op.refuse("its step is 0")
    op.require("infer_range", "false", "stop must be set")
    stop = op.number("stop", math.nan)
    if math.isnan(stop):
        start, stop = 0.0, start
    count = max(math.ceil((stop - start) / step), 0)
    op.check_constant(count * max(repeat, 1))
    dtype = op.choice("dtype", "float32", DTYPES)
    return relax.const(_arange_values(start, step, count, repeat, dtype), dtype)


def _arange_like(op: Op) -> Expr:
    """`contrib.arange_like`: as many values as the data or one of its axes has."""
    axis, repeat = op.optional_integer("axis"), op.integer("repeat", 1)
    shape = op.sizes() if axis is None else (op.sizes()[op.axis(axis)],)
    total = math.prod(shape)
    if is_dynamic(total) and repeat == 1 and op.dtype() == "float32":
        places = R.astype(R.arange(0, total, 1, "int64"), op.dtype())
        step, start = op.scalar(op.number("step", 1.0)), op.scalar(op.number("start", 0.0))
        return R.reshape(op.emit(places) * step + start, shape)
    shape = op.fixed(shape)
    total = math.prod(shape)
    op.check_constant(total)
    values = _arange_values(
        op.number("start", 0.0), op.number("step", 1.0), -(-total // repeat), repeat, op.dtype()
    )
    return relax.const(values[:total].reshape(shape), op.dtype())


def _eye(op: Op) -> Expr:
    rows, offset = op.integer("N"), op.integer("k", 0)
    columns = op.integer("M", 0) or rows
    op.check_constant(rows * columns)
    dtype = op.choice("dtype", "float32", DTYPES)
    return relax.const(np.eye(rows, columns, offset, dtype=dtype), dtype)


CONVERTERS: Final[dict[str, Converter]] = {
    "argsort": _argsort,
    "sort": _sort,
    "topk": _top_k,
    **dict.fromkeys(_COPIES, lambda op: op[0]),
    **dict.fromkeys(
        ("Concat", "concat", "_rnn_param_concat"),
        lambda op: R.concat(op.all_inputs(), axis=op.axis(op.integer("dim", 1))),
    ),
    **dict.fromkeys(
        ("Flatten", "flatten"),
        lambda op: R.reshape(op[0], (op.sizes()[0], math.prod(op.sizes()[1:]))),
    ),
    **dict.fromkeys(("Pad", "pad"), _pad),
    **dict.fromkeys(("Reshape", "reshape"), _reshape),
    **dict.fromkeys(
        ("SliceChannel", "split"),
        lambda op: _split_evenly(op, op.axis(op.integer("axis", 1)), "num_outputs"),
    ),
    **dict.fromkeys(("SwapAxis", "swapaxes"), _swap_axis),
    **dict.fromkeys(("broadcast_axes", "broadcast_axis"), _broadcast_axis),
    **dict.fromkeys(("flip", "reverse"), _reverse),
    "_split_v2": _split_v2,
    "broadcast_like": _broadcast_like,
    "broadcast_to": _broadcast_to,
    "depth_to_space": _depth_to_space,
    "expand_dims": lambda op: R.expand_dims(op[0], op.axis(op.integer("axis"), op.rank() + 1)),
    "repeat": _repeat,
    "reshape_like": _reshape_like,
    "space_to_depth": _space_to_depth,
    "squeeze": _squeeze,
    "stack": lambda op: R.stack(
        op.all_inputs(), axis=op.axis(op.integer("axis", 0), op.rank() + 1)
    ),
    "tile": lambda op: R.tile(op[0], list(op.integers("reps"))),
    "transpose": _transpose,
    "Crop": _crop,
    "Embedding": _embedding,
    "batch_take": lambda op: _pick_along(op, 1, False, "clip"),
    "crop": _slice,
    "gather_nd": _gather_nd,
    "one_hot": _one_hot,
    "pick": _pick,
    "slice": _slice,
    "slice_axis": _slice_axis,
    "slice_like": _slice_like,
    "take": _take,
    "_arange": _arange,
    "_contrib_arange_like": _arange_like,
    "_eye": _eye,
    "_full": lambda op: _fill(op.number("value"))(op),
    "_ones": _fill(1.0),
    "_zeros": _fill(0.0),
    "_zeros_without_dtype": _fill(0.0),
    "ones_like": _fill_like(1.0),
    "shape_array": lambda op: relax.const(np.array(op.shape(), "int64"), "int64"),
    "size_array": lambda op: relax.const(np.array([math.prod(op.shape())], "int64"), "int64"),
    "zeros_like": _fill_like(0.0),
}
