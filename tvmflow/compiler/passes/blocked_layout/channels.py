"""Concatenations, slices, splits and shuffles of channels, on blocked layouts.

Each of them only moves channels. Where they follow each other, the last one reads the tensors
that the first one read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.machine import CACHED_LINES, MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    count_elements,
    divide_up,
    is_dynamic,
    known_sizes,
    same_in_ranges,
    same_sizes,
    sizes_of,
)
from tvmflow.graph.evaluation import list_positions, read_slice, read_split
from tvmflow.graph.rewriter import INJECTIVE

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Selection(NamedTuple):
    """Channels of blocked tensors.

    Attributes:
        tensors: The tensors.
        positions: The position of the tensor of each channel.
        channels: The channel in that tensor.
    """

    tensors: tuple[Any, ...]
    positions: Indices
    channels: Indices

    def first_block(self, block: int) -> int | None:
        """Return the first block of a tensor whose whole blocks are the channels, or None."""
        start, count = int(self.channels[0]), len(self.channels)
        is_range = np.array_equal(self.channels, np.arange(start, start + count))
        is_whole = is_range and start % block == 0 and count % block == 0
        return start // block if is_whole and len(set(self.positions)) == 1 else None


def rewrite_concat(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite a concatenation of channels, with a blocked tensor."""
    fields = rewriter.list_fields(data)
    axis = int(call.attrs.axis) % len(known_sizes(call))
    forms = [rewriter.blocked_form(field) for field in fields]
    if axis != 1 or all(form is None for form in forms):
        return None
    channels = [known_sizes(field)[1] for field in fields]
    if any(map(is_dynamic, channels)):
        return None
    is_ragged = any(count % rewriter.block for count in channels[:-1])
    is_mixed = any(form is None for form in forms)
    if (is_mixed or is_ragged) and not rewriter.is_read_blocked(call):
        return None
    if is_ragged and not all(map(ir.is_float32, fields)):
        return None
    tensors = [rewriter.to_blocked(field) for field in fields]
    parts = [
        _selection_of(rewriter, tensor, count)
        for tensor, count in zip(tensors, channels, strict=True)
    ]
    selection = _join(parts)
    if is_ragged:
        return _emit(rewriter, selection)
    result = rewriter.emit(relax.op.concat(relax.Tuple(tensors), axis=1))
    rewriter.selections[result] = selection
    return result


def rewrite_slice(rewriter: LayoutRewriter, call: relax.Call, data: Any, *_: Any) -> Any:
    """Rewrite a slice of channels."""
    if rewriter.blocked_form(data) is None:
        return None
    shape, sizes = rewriter.numbers.shape(call.args[0]), known_sizes(call.args[0])
    if shape is None or is_dynamic(sizes[1]):
        return None
    # a reversed axis of one number looks like one that is not reversed
    shape = tuple(
        max(n, 2) if is_dynamic(size) else n for n, size in zip(shape, sizes, strict=True)
    )
    if not all(_keeps_order(call, shape, axis) for axis in range(len(shape)) if axis != 1):
        return None
    channels = list_positions(functools.partial(read_slice, call), shape, 1)
    return None if channels is None else _select(rewriter, call, call.args[0], data, channels)


def rewrite_split(rewriter: LayoutRewriter, item: relax.TupleGetItem) -> relax.Expr | None:
    """Rewrite one output of a split along the channel axis."""
    split = rewriter.flow.find_call(item.tuple_value, "relax.split")
    shape = None if split is None else rewriter.numbers.shape(split.args[0])
    if split is None or shape is None:
        return None
    data = rewriter.resolve(rewriter.visit_expr(split.args[0]))
    if rewriter.blocked_form(data) is None:
        return None
    read = functools.partial(read_split, split, index=item.index)
    channels = list_positions(read, shape, 1)
    return None if channels is None else _select(rewriter, item, split.args[0], data, channels)


def rewrite_reshape(rewriter: LayoutRewriter, call: relax.Call, data: Any, _: Any) -> Any:
    """Rewrite a reshape to the same shape, or one that ends a shuffle of channels."""
    before, after = known_sizes(data), known_sizes(call)
    has_dynamic = any(map(is_dynamic, after)) and len(before) > 2
    if has_dynamic and set(before[2:]) == {1} and same_sizes(before[:2], after):
        # images of one pixel: TVM fuses no reshape of dynamic shape
        return rewriter.emit(relax.op.squeeze(data, list(range(2, len(before)))))
    blocked_data = rewriter.blocked_form(data)
    if same_sizes(before, after):
        return blocked_data
    if len(before) > 2 and same_in_ranges(before, after, rewriter.dimensions):
        # the same sizes in other words: a copy in order, which neighbours compute along
        source, shape = data, list(after)
        if blocked_data is not None:
            source, blocks = blocked_data, known_sizes(blocked_data)
            shape = [*blocks[:2], *after[2:], blocks[-1]]
        return rewriter.kernel(blocked.with_sizes, "with_sizes", source, shape, pattern=INJECTIVE)
    return _rewrite_shuffle(rewriter, call)


def _rewrite_shuffle(rewriter: LayoutRewriter, call: relax.Call) -> relax.Expr | None:
    """Rewrite the reshape that ends a shuffle of channels.

    Channels are reshaped to a matrix, which is transposed, and back.
    """
    flow = rewriter.flow
    transposed = flow.find_call(call.args[0], "relax.permute_dims")
    split = None if transposed is None else flow.find_call(transposed.args[0], "relax.reshape")
    shape = known_sizes(call)
    before = None if split is None else sizes_of(split.args[0])
    if split is None or before is None or not same_sizes(before, shape):
        return None
    inner = sizes_of(split)
    spatial, axes = len(shape) - 2, transposed.attrs.axes
    if inner is None or axes is None or spatial < 1:
        return None
    last, order = len(inner) - spatial, [int(axis) for axis in axes]
    kept = [0, *range(last, len(inner))]
    keeps_images = [order[axis] for axis in kept] == kept
    if (
        not keeps_images
        or not same_sizes((inner[0], *inner[last:]), (shape[0], *shape[2:]))
        or any(map(is_dynamic, (shape[1], *inner[1:last])))
    ):
        return None
    channels = np.arange(shape[1]).reshape(inner[1:last])
    channels = channels.transpose([axis - 1 for axis in order[1:last]]).ravel()
    data = rewriter.resolve(rewriter.visit_expr(split.args[0]))
    return _select(rewriter, call, split.args[0], data, channels)


def _keeps_order(call: relax.Call, shape: tuple[int, ...], axis: int) -> bool:
    """Return whether a slice of a tensor of a shape does not reverse an axis, which a step of -1 does."""
    positions = list_positions(functools.partial(read_slice, call), shape, axis)
    return positions is not None and bool((np.diff(positions) > 0).all())


def _select(
    rewriter: LayoutRewriter, value: Any, original: Any, data: Any, channels: Any
) -> relax.Expr | None:
    """Emit some channels of a blocked tensor; None if there is none, or no reader takes blocked data.

    `value` and `original` are the original expression and tensor.
    """
    tensor, before, after = rewriter.blocked_form(data), sizes_of(original), sizes_of(value)
    if tensor is None or before is None or after is None or not ir.is_float32(original):
        return None
    is_image = same_sizes((before[0], *before[2:]), (after[0], *after[2:]))
    if not is_image or is_dynamic(before[1]) or not rewriter.is_read_blocked(value):
        return None
    selection = _selection_of(rewriter, tensor, before[1])
    positions, own = selection.positions[channels], selection.channels[channels]
    return _emit(rewriter, Selection(selection.tensors, positions, own))


def _selection_of(rewriter: LayoutRewriter, tensor: Any, channels: int) -> Selection:
    """Return the source channels of a blocked tensor; its own channels if it is not a copy."""
    known: Selection | None = rewriter.selections.get(tensor)
    return known or Selection((tensor,), np.zeros(channels, np.int64), np.arange(channels))


def _join(parts: list[Selection]) -> Selection:
    tensors: list[Any] = []
    for part in parts:
        tensors += [tensor for tensor in part.tensors if tensor not in tensors]
    positions = [
        np.array([tensors.index(tensor) for tensor in part.tensors])[part.positions]
        for part in parts
    ]
    channels = np.concatenate([part.channels for part in parts])
    return Selection(tuple(tensors), np.concatenate(positions), channels)


def _emit(rewriter: LayoutRewriter, selection: Selection) -> Any:
    used = sorted({int(position) for position in selection.positions})
    tensors = tuple(selection.tensors[position] for position in used)
    positions = np.searchsorted(used, selection.positions)
    selection, block = Selection(tensors, positions, selection.channels), rewriter.block
    first = selection.first_block(block)
    if first is not None:
        end = first + len(selection.channels) // block
        result = rewriter.emit(relax.op.strided_slice(tensors[0], [1], [first], [end]))
    else:
        kernel, table, shape = copy_channels(selection, rewriter.cpu)
        arguments = [*tensors, relax.const(table)]
        result = rewriter.call_function(kernel, "copy_channels", arguments, shape)
    rewriter.selections[result] = selection
    return result


# ---------------------------------------------------------------- kernel
# Copies channels of blocked tensors to other positions.

_FLOAT: Final = "float32"
_TABLE: Final = "int32"
# The pixels of a part of the work: their blocks stay in the cache while each group of lanes is copied.
_PIXELS: Final = CACHED_LINES


def copy_channels(selection: Selection, cpu: CpuModel) -> Any:
    """Return a kernel that copies channels of blocked tensors, its table, and the shape of its result.

    The tensors are (n, c/b, …, b). The parameters of the kernel are the tensors, the table and the result. The
    table (groups of lanes of the result, 2) has the position of a group's tensor, or -1 for zeros, and the position
    of its first element in an image of the tensor, or in one pixel of it where images have dynamic shapes.
    """
    shapes = [known_sizes(tensor) for tensor in selection.tensors]
    n, _, *size, block = shapes[0]
    result = (n, -(-len(selection.channels) // block), *size, block)
    pixels = count_elements(size)
    lanes = _list_lanes(selection, 1 if is_dynamic(pixels) else pixels, block)
    width = _find_width(lanes, block)
    table = lanes[::width].astype(_TABLE)
    parameters = {f"x{position}": (shape, _FLOAT) for position, shape in enumerate(shapes)}
    parameters |= {"table": (table.shape, _TABLE), "out": (result, _FLOAT)}
    with define_flat_kernel("copy_channels", parameters, has_root=False) as (builder, buffers):
        _emit_kernel(buffers, [math.prod(shape[1:]) for shape in shapes], result, width, cpu)
    return builder.get(), table, result


def _list_lanes(selection: Selection, pixels: int, block: int) -> Any:
    """Return the tensor of each lane of the result blocks, and the index of its first pixel: (lanes, 2)."""
    lanes = np.full((-(-len(selection.channels) // block) * block, 2), -1, np.int64)
    outer, lane = np.divmod(selection.channels, block)
    lanes[: len(outer)] = np.stack([selection.positions, outer * pixels * block + lane], axis=1)
    return lanes


def _find_width(lanes: Any, block: int) -> int:
    """Return how many lanes of the result come from as many lanes next to each other, everywhere."""
    width = block
    while width > 1:
        groups = lanes.reshape(-1, width, 2)
        expected = groups[:, :1, :] + np.stack([np.zeros(width), np.arange(width)], axis=1)
        is_zero = np.all(groups[:, :, 0] == -1, axis=1)
        is_run = np.all(groups == expected, axis=(1, 2)) & (groups[:, 0, 0] >= 0)
        # lanes of one block
        is_run &= groups[:, 0, 1] % block + width <= block
        if np.all(is_zero | is_run):
            break
        width //= 2
    return width


def _emit_kernel(
    buffers: Sequence[Any],
    sizes: Sequence[IrSize],
    result: Sequence[IrSize],
    width: int,
    cpu: CpuModel,
) -> None:
    """Emit the loops of the kernel; `sizes` are those of an image of each tensor."""
    *tensors, table, out = map(T.buffer_proxy, buffers)
    n, blocks, *size, block = result
    pixels, groups = count_elements(size), block // width
    parts = divide_up(pixels, _PIXELS)

    def copy(tensor: Any, first: Any, target: Any, count: Any) -> None:
        with T.serial(count) as pixel, T.vectorized(width) as lane:
            offset = pixel * block + lane
            out[target + offset] = T.float32(0) if tensor is None else tensor[first + offset]

    elements = count_elements(result)
    is_large = is_dynamic(elements) or elements >= MIN_PARALLEL_ELEMENTS
    loop = T.parallel if is_large and cpu.cores > 1 else T.serial
    with loop(n * blocks * parts) as part, T.serial(groups) as group:
        first = part % parts * _PIXELS
        is_ragged = is_dynamic(pixels) or pixels % _PIXELS
        count = tirx.min(_PIXELS, pixels - first) if is_ragged else min(_PIXELS, pixels)
        entry = (part // parts % blocks * groups + group) * 2
        target = (part // parts * pixels + first) * block + group * width
        source, element = table[entry], table[entry + 1]
        if is_dynamic(pixels):
            element = element // block * pixels * block + element % block
        element += first * block
        for position, tensor in enumerate([*tensors, None]):
            with T.If(source == (position if tensor is not None else -1)), T.Then():
                image = 0 if tensor is None else part // (parts * blocks) * sizes[position]
                copy(tensor, image + element, target, count)
