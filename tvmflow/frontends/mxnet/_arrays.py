"""Converters of shape, data movement, indexing and constant operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem
from tvmflow.frontends._onnx_graph import Value
from tvmflow.frontends.mxnet._op import DTYPES, Converter, Op, shown
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic


def _flat(op: Op) -> Value:
    return op.graph.reshape(op[0], (math.prod(op.sizes()),))


def _sorted_axis(op: Op) -> tuple[Value, int]:
    """Return the data and the axis to sort; without an axis, MXNet flattens the data."""
    axis = op.optional_integer("axis", -1)
    return (_flat(op), 0) if axis is None else (op[0], op.axis(axis))


def _sort(op: Op) -> Value:
    data, axis = _sorted_axis(op)
    descending = int(not op.flag("is_ascend", True))
    return op.graph.add_own("Sort", data, data.dtype, data, axis=axis, descending=descending)


def _argsort(op: Op) -> Value:
    data, axis = _sorted_axis(op)
    dtype = op.choice("dtype", "float32", DTYPES)
    descending = int(not op.flag("is_ascend", True))
    order = op.graph.add_own("ArgSort", data, "int32", data, axis=axis, descending=descending)
    return op.graph.cast(order, dtype)


def _top_k(op: Op) -> list[Value]:
    """Convert `topk`: values, indices or both of the k largest (or smallest) entries; k < 1 means all."""
    data, axis = _sorted_axis(op)
    [size], count = op.fixed([data.shape[axis]]), op.integer("k", 1)
    count = size if count < 1 else min(count, size)
    dtype = op.choice("dtype", "float32", DTYPES)
    returned = op.lookup("ret_typ", "indices", {"indices": [1], "value": [0], "both": [0, 1]})
    largest = int(not op.flag("is_ascend", False))
    values, indices = op.graph.add_several(
        "TopK", 2, data, op.graph.integers([count]), axis=axis, largest=largest
    )
    results = values, op.graph.cast(indices, dtype)
    return [results[index] for index in returned]


# ---------------------------------------------------------------- shapes


def _reshape(op: Op) -> Value:
    shape, codes, reverse = op.sizes(), op.integers("shape", ()), op.flag("reverse", False)
    # In MXNet 0.x, 0 in target_shape was the size to infer.
    old_codes = tuple(size or -1 for size in op.integers("target_shape", ()))
    if op.flag("keep_highest", False) and old_codes:
        old_codes = (shape[0], *old_codes[1:])
    codes = codes or old_codes
    if not codes:
        op.refuse("the attribute shape is missing")
    return op.graph.reshape(op[0], _resolve_shape(op, shape, codes, reverse))


def _resolve_shape(
    op: Op, shape: tuple[IrSize, ...], codes: Sequence[int], reverse: bool
) -> tuple[IrSize, ...]:
    """Return the shape for MXNet's reshape codes.

    0 keeps a size, -1 infers it, -2 keeps the rest, -3 joins two, -4 splits one into the two codes that follow.
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
    """Return the sizes for one code, consuming sizes of the data and operands of the code."""
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


def _reshape_like(op: Op) -> Value:
    """Convert `reshape_like`: replace axes `lhs_begin:lhs_end` by the second input's `rhs_begin:rhs_end`."""
    left, right = (
        slice(op.optional_integer(f"{side}_begin"), op.optional_integer(f"{side}_end"))
        for side in ("lhs", "rhs")
    )
    shape = list(op.sizes())
    start, stop, _ = left.indices(len(shape))
    shape[start:stop] = op.sizes(1)[right]
    return op.graph.reshape(op[0], shape)


def _transpose(op: Op) -> Value:
    axes = [op.axis(axis) for axis in op.integers("axes", ())]
    return op.graph.transpose(op[0], axes or list(range(op.rank()))[::-1])


def _swap_axis(op: Op) -> Value:
    axes = list(range(op.rank()))
    first, second = op.axis(op.integer("dim1", 0)), op.axis(op.integer("dim2", 0))
    axes[first], axes[second] = axes[second], axes[first]
    return op.graph.transpose(op[0], axes)


def _expand_dims(op: Op) -> Value:
    return op.graph.expand_dims(op[0], op.axis(op.integer("axis"), op.rank() + 1))


def _squeeze(op: Op) -> Value:
    shape, listed = op.sizes(), op.optional_integers("axis")
    ones = [axis for axis, size in enumerate(shape) if op.ranges.is_equal(size, 1)]
    axes = ones if listed is None else [op.axis(axis) for axis in listed]
    rest = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if not set(axes) <= set(ones):
        op.refuse(f"axis {listed} does not have size 1 in data of shape {shown(shape)}")
    return op.graph.reshape(op[0], rest or (1,))


def _stack(op: Op) -> Value:
    return op.graph.stack(op.all_inputs(), op.axis(op.integer("axis", 0), op.rank() + 1))


def _block_converter(operator: str) -> Converter:
    def convert(op: Op) -> Value:
        op.expect_rank(4)
        op.size(1)
        return op.add(operator, op[0], blocksize=op.integer("block_size"))

    return convert


def _split_at(op: Op, axis: int, starts: Sequence[int]) -> list[Value]:
    """Split the data along `axis` at `starts`, which begin with 0."""
    squeeze, shape = op.flag("squeeze_axis", False), op.sizes()
    pieces = []
    for start, stop in zip(starts, [*starts[1:], shape[axis]], strict=True):
        if is_dynamic(stop) and not op.ranges.is_certain(start < stop):
            text = f"its last part may be empty: {stop} may be {start} or less"
            raise DynamicShapeProblem(text)
        piece = op.graph.cut(op[0], {axis: slice(start, stop)})
        if squeeze:
            if not op.ranges.is_equal(size := piece.shape[axis], 1):
                op.refuse(f"squeeze_axis=True needs parts of size 1, and one has the size {size}")
            piece = op.graph.reshape(piece, (*shape[:axis], *shape[axis + 1 :]))
        pieces.append(piece)
    return pieces


def _split_evenly(op: Op, axis: int, key: str) -> list[Value]:
    """Split the data along `axis` into equal parts; the attribute `key` holds their number."""
    size, count = op.size(axis), op.integer(key)
    if size % count:
        op.refuse(f"axis {axis} of size {size} cannot be split into {key}={count}")
    return _split_at(op, axis, range(0, size, size // count))


def _split_v2(op: Op) -> list[Value]:
    axis = op.axis(op.integer("axis", 1))
    if not op.integer("sections", 0):
        return _split_at(op, axis, op.integers("indices"))
    op.ignore("indices")
    return _split_evenly(op, axis, "sections")


def _repeat(op: Op) -> Value:
    axis, times, data = op.optional_integer("axis"), op.integer("repeats"), op[0]
    if axis is None:
        data, axis = _flat(op), 0
    axis = op.axis(axis, data.rank)
    before, size, after = data.shape[:axis], data.shape[axis], data.shape[axis + 1 :]
    data = op.graph.reshape(data, (*before, size, 1, *after))
    shape = op.graph.integers((*before, size, times, *after))
    return op.graph.reshape(op.add("Expand", data, shape), (*before, size * times, *after))


def _tile(op: Op) -> Value:
    """Convert `tile`, which prepends ones to the shorter of shape and `reps`."""
    times = op.integers("reps")
    rank = max(op.rank(), len(times))
    data = op.graph.reshape(op[0], [1] * (rank - op.rank()) + list(op.sizes()))
    return op.add("Tile", data, op.graph.integers([1] * (rank - len(times)) + list(times)))


def _reverse(op: Op) -> Value:
    value = op[0]
    for axis in op.integers("axis"):
        value = op.graph.cut(value, {op.axis(axis): slice(None, None, -1)})
    return value


def _pad(op: Op) -> Value:
    mode = op.choice("mode", "", ("constant", "edge", "reflect"))
    width = op.integers("pad_width")
    if len(width) != 2 * op.rank() or min(width) < 0:
        op.refuse(f"pad_width={width} does not fit {op.rank()} dimensions")
    widths = op.graph.integers([*width[::2], *width[1::2]])
    return op.add("Pad", op[0], widths, op.scalar(op.number("constant_value", 0.0)), mode=mode)


def _broadcast(op: Op, shape: Sequence[IrSize]) -> Value:
    if len(shape) != op.rank() or not all(
        op.ranges.is_equal(old, 1) or op.ranges.is_equal(old, new)
        for old, new in zip(op.sizes(), shape, strict=True)
    ):
        op.refuse(f"data of shape {shown(op.sizes())} cannot be broadcast to {shown(shape)}")
    return op.add("Expand", op[0], op.graph.integers(shape))


def _broadcast_to(op: Op) -> Value:
    shape = op.integers("shape")
    if len(shape) != op.rank():
        op.refuse(f"shape={shape} does not fit {op.rank()} dimensions")
    return _broadcast(op, [new or old for old, new in zip(op.sizes(), shape, strict=True)])


def _broadcast_axis(op: Op) -> Value:
    shape = list(op.sizes())
    for axis, size in zip(op.integers("axis", ()), op.integers("size", ()), strict=True):
        shape[op.axis(axis)] = size
    return _broadcast(op, shape)


def _broadcast_like(op: Op) -> Value:
    left, right = op.optional_integers("lhs_axes"), op.optional_integers("rhs_axes")
    if left is None or right is None:
        return _broadcast(op, op.sizes(1))
    shape = list(op.sizes())
    for left_axis, right_axis in zip(left, right, strict=True):
        shape[op.axis(left_axis)] = op.sizes(1)[op.axis(right_axis, op.rank(1))]
    return _broadcast(op, shape)


_COPIES: Final = "_CrossDeviceCopy _copy _copyto _identity_with_attr_like_rhs identity".split()


# ---------------------------------------------------------------- slices and lookups


def _slice(op: Op) -> Value:
    begin, end = op.bounds("begin"), op.bounds("end")
    step = (op.bounds("step") if op.has("step") else ()) or (None,) * len(begin)
    if not len(begin) == len(end) == len(step) <= op.rank():
        op.refuse(f"begin={begin}, end={end}, step={step} do not fit {op.rank()} dimensions")
    parts = enumerate(map(slice, begin, end, step))
    return op.graph.cut(op[0], {axis: _checked(op, axis, part) for axis, part in parts})


def _checked(op: Op, axis: int, part: slice) -> slice:
    """Return the slice of an axis, checked; refuse a slice that may be empty."""
    size, step = op.sizes()[axis], part.step or 1
    if not is_dynamic(size):
        if not range(*slice(part.start, part.stop, step).indices(size)):
            op.refuse(f"its slice of axis {axis} of size {size} is empty")
        return part
    if step < 1:
        raise DynamicShapeProblem(f"a step below 1 along {size} is not supported")
    start, stop = part.start or 0, part.stop
    first = op.ranges.clamp(start, size)
    if not op.ranges.is_certain(first < (size if stop is None else op.ranges.clamp(stop, size))):
        text = f"its slice of axis {axis} may be empty, or is not known, for some sizes of {size}"
        raise DynamicShapeProblem(f"{text}; raise `min` in `dimensions`")
    return part


def _slice_axis(op: Op) -> Value:
    axis = op.axis(op.integer("axis"))
    part = slice(op.integer("begin"), op.optional_integer("end"))
    return op.graph.cut(op[0], {axis: _checked(op, axis, part)})


def _slice_like(op: Op) -> Value:
    like = op.sizes(1)
    axes = [op.axis(axis) for axis in op.integers("axes", ())] or list(range(len(like)))
    for axis in axes:
        if axis >= len(like) or not op.ranges.is_certain(like[axis] <= op.sizes()[axis]):
            op.refuse(f"shape {shown(like)} cannot be cut from data of shape {shown(op.sizes())}")
    return op.graph.cut(op[0], {axis: slice(0, like[axis]) for axis in axes})


def _crop(op: Op) -> Value:
    """Convert `Crop`: a window of the last two axes, with the size `h_w` or the second input's."""
    count = op.integer("num_args", len(op))
    window = op.sizes(1)[2:] if count == 2 else op.integers("h_w", (0, 0))
    offset: Sequence[IrSize] = op.integers("offset", (0, 0))
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
    parts = [slice(o, op.ranges.simplify(o + w)) for o, w in zip(offset, window, strict=True)]
    return op.graph.cut(op[0], dict(enumerate(parts, 2)))


def _gather(op: Op, data: Value, axis: int, index: int, mode: str) -> Value:
    """Gather entries of `data` along `axis`; the shape of the indices (input `index`) replaces the axis."""
    shape = (*data.shape[:axis], *op.sizes(index), *data.shape[axis + 1 :])
    result = data._replace(shape=shape)
    return op.graph.add_own("Take", result, data.dtype, data, op[index], axis=axis, mode=mode)


def _embedding(op: Op) -> Value:
    rows, columns = op.integer("input_dim"), op.integer("output_dim")
    op.require("dtype", "float32", "weights must be float32")
    op.ignore("sparse_grad")
    weight = op.expect_shape(1, (rows, columns))
    return _gather(op, weight, 0, 0, "clip")


def _take(op: Op) -> Value:
    axis = op.axis(op.integer("axis", 0))
    mode = op.choice("mode", "clip", ("clip", "wrap"))
    return _gather(op, op[0], axis, 1, mode)


def _pick_along(op: Op, axis: int, keep: bool, mode: str) -> Value:
    before, length, after = op.sizes()[:axis], op.size(axis), op.sizes()[axis + 1 :]
    positions = op.graph.cast(op[1], "int64")
    if mode == "wrap":
        positions = op.add("Mod", positions, length)
    else:
        positions = op.add("Min", op.add("Max", positions, 0), length - 1)
    positions = op.graph.reshape(positions, (*before, 1, *after))
    taken = op.add("GatherElements", op[0], positions, axis=axis)
    return taken if keep else op.graph.reshape(taken, before + after or (1,))


def _pick(op: Op) -> Value:
    axis = op.optional_integer("axis", -1)
    if axis is None:
        op.refuse("axis=None is not supported")
    mode = op.choice("mode", "clip", ("clip", "wrap"))
    return _pick_along(op, op.axis(axis), op.flag("keepdims", False), mode)


def _gather_nd(op: Op) -> Value:
    """Convert `gather_nd`: coordinates are on the first axis of MXNet's indices, in ONNX on the last."""
    indices = op.graph.cast(op[1], "int64")
    indices = op.graph.transpose(indices, [*range(1, op.rank(1)), 0])
    ends = op.add("Add", indices, op.graph.integers(op.sizes()[: op.size(0, 1)]))
    indices = op.add("Where", op.add("Less", indices, 0), ends, indices)
    return op.add("GatherND", op[0], indices)


def _one_hot(op: Op) -> Value:
    depth = op.integer("depth")
    op.check_constant(depth)
    dtype = op.choice("dtype", "float32", DTYPES)
    on, off = op.number("on_value", 1.0), op.number("off_value", 0.0)
    indices = op.graph.expand_dims(op.graph.cast(op[0], "int64"), op.rank())
    hot = op.add("Equal", indices, op.graph.constant(np.arange(depth)))
    return op.add("Where", hot, op.scalar(on, dtype), op.scalar(off, dtype))


# ---------------------------------------------------------------- constants


def _fill(value: float) -> Converter:
    def convert(op: Op) -> Value:
        shape = op.integers("shape", ()) or (1,)
        return op.filled(value, shape, op.choice("dtype", "float32", DTYPES))

    return convert


def _fill_like(value: float) -> Converter:
    return lambda op: op.filled(value, op.sizes(), op.dtype())


def _arange_values(start: float, step: float, count: int, repeat: int, dtype: str) -> Any:
    # As in MXNet, each element is computed from its index, in the dtype of the result.
    steps = np.arange(count).astype(dtype) * np.dtype(dtype).type(step)
    return np.repeat(np.dtype(dtype).type(start) + steps, repeat).astype(dtype)


def _arange(op: Op) -> Value:
    """Convert `arange`: without `stop`, from 0 to `start`; each value `repeat` times."""
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
    return op.graph.constant(_arange_values(start, step, count, repeat, dtype))


def _arange_like(op: Op) -> Value:
    """Convert `contrib.arange_like`: as many values as the data, or one of its axes, has elements."""
    axis, repeat = op.optional_integer("axis"), op.integer("repeat", 1)
    shape = op.sizes() if axis is None else (op.sizes()[op.axis(axis)],)
    total = math.prod(shape)
    if is_dynamic(total) and repeat == 1 and op.dtype() == "float32":
        ends = [op.graph.reshape(op.graph.integers([n]), ()) for n in (0, total, 1)]
        indices = op.graph.cast(op.add("Range", *ends), op.dtype())
        values = op.add("Mul", indices, op.number("step", 1.0))
        return op.graph.reshape(op.add("Add", values, op.number("start", 0.0)), shape)
    shape = op.fixed(shape)
    total = math.prod(shape)
    op.check_constant(max(total, repeat))
    values = _arange_values(
        op.number("start", 0.0), op.number("step", 1.0), -(-total // repeat), repeat, op.dtype()
    )
    return op.graph.constant(values[:total].reshape(shape))


def _eye(op: Op) -> Value:
    rows, offset = op.integer("N"), op.integer("k", 0)
    columns = op.integer("M", 0) or rows
    op.check_constant(rows * columns)
    dtype = op.choice("dtype", "float32", DTYPES)
    return op.graph.constant(np.eye(rows, columns, offset, dtype=dtype))


CONVERTERS: Final[dict[str, Converter]] = {
    "argsort": _argsort,
    "sort": _sort,
    "topk": _top_k,
    **dict.fromkeys(_COPIES, lambda op: op[0]),
    **dict.fromkeys(
        ("Concat", "concat", "_rnn_param_concat"),
        lambda op: op.add("Concat", *op.all_inputs(), axis=op.axis(op.integer("dim", 1))),
    ),
    **dict.fromkeys(
        ("Flatten", "flatten"),
        lambda op: op.graph.reshape(op[0], (op.sizes()[0], math.prod(op.sizes()[1:]))),
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
    "depth_to_space": _block_converter("DepthToSpace"),
    "expand_dims": _expand_dims,
    "repeat": _repeat,
    "reshape_like": _reshape_like,
    "space_to_depth": _block_converter("SpaceToDepth"),
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
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
    "shape_array": lambda op: op.graph.integers(op.shape()),
    "size_array": lambda op: op.graph.integers([math.prod(op.shape())]),
    "zeros_like": _fill_like(0.0),
}
