"""Concatenations, slices, splits and shuffles of channels, on blocked layouts.

A chain of these operators becomes one copy: the last operator reads the operands of the first one.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.machine import CACHED_LINES, MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.contraction.packed import loop_over
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
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
    """Channels of blocked tensors: for each, the index of its tensor, and its index in this tensor."""

    tensors: tuple[Any, ...]
    positions: Indices
    channels: Indices


def rewrite_concat(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite a concatenation of channels in which at least one tensor is blocked."""
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
    pairs = zip(tensors, channels, strict=True)
    selection = _join([_selection_of(rewriter, *pair) for pair in pairs])
    if is_ragged:
        return _emit(rewriter, selection)
    result = rewriter.emit(relax.op.concat(relax.Tuple(tensors), axis=1))
    rewriter.selections[result] = selection
    return result


def rewrite_slice(rewriter: LayoutRewriter, call: relax.Call, data: Any, *_: Any) -> Any:
    """Rewrite a slice of channels."""
    if rewriter.blocked_form(data) is None:
        return None
    shape, sizes = rewriter.tuning_sizes.shape(call.args[0]), known_sizes(call.args[0])
    if shape is None or is_dynamic(sizes[1]):
        return None
    # at least two elements for a dynamic axis, because a reversal of one element cannot be detected
    pairs = zip(shape, sizes, strict=True)
    shape = tuple(max(n, 2) if is_dynamic(size) else n for n, size in pairs)
    channels, *others = (
        list_positions(functools.partial(read_slice, call), shape, axis)
        for axis in (1, 0, *range(2, len(shape)))
    )
    # the positions along other axes must increase: a step of -1 reverses an axis
    if any(other is None or (np.diff(other) <= 0).any() for other in others):
        return None
    return _select(rewriter, call, call.args[0], data, channels)


def rewrite_split(rewriter: LayoutRewriter, item: relax.TupleGetItem) -> relax.Expr | None:
    """Rewrite one output of a split along the channel axis."""
    split = rewriter.flow.find_call(item.tuple_value, "relax.split")
    shape = None if split is None else rewriter.tuning_sizes.shape(split.args[0])
    if split is None or shape is None:
        return None
    data = rewriter.resolve(rewriter.visit_expr(split.args[0]))
    if rewriter.blocked_form(data) is None:
        return None
    read = functools.partial(read_split, split, index=item.index)
    return _select(rewriter, item, split.args[0], data, list_positions(read, shape, 1))


def rewrite_reshape(rewriter: LayoutRewriter, call: relax.Call, data: Any, _: Any) -> Any:
    """Rewrite a reshape to the same shape, or one that ends a shuffle of channels."""
    before, after = known_sizes(data), known_sizes(call)
    has_dynamic = any(map(is_dynamic, after)) and len(before) > 2
    if has_dynamic and set(before[2:]) == {1} and same_sizes(before[:2], after):
        # images of one pixel: squeezed, because TVM does not fuse reshapes with dynamic shapes
        return rewriter.emit(relax.op.squeeze(data, list(range(2, len(before)))))
    blocked_data = rewriter.blocked_form(data)
    if same_sizes(before, after):
        return blocked_data
    if len(before) > 2 and same_in_ranges(before, after, rewriter.dimensions):
        # the sizes are equal but written differently: copy elementwise; the copy is fused with its neighbors
        source, shape = data, list(after)
        if blocked_data is not None:
            source, blocks = blocked_data, known_sizes(blocked_data)
            shape = [*blocks[:2], *after[2:], blocks[-1]]
        return rewriter.kernel(blocked.with_sizes, "with_sizes", source, shape, pattern=INJECTIVE)
    return _rewrite_shuffle(rewriter, call)


def _rewrite_shuffle(rewriter: LayoutRewriter, call: relax.Call) -> relax.Expr | None:
    """Rewrite the last reshape of a channel shuffle (reshape to a matrix, transpose, reshape back)."""
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


def _select(
    rewriter: LayoutRewriter, value: Any, original: Any, data: Any, channels: Indices | None
) -> relax.Expr | None:
    """Emit a selection of channels of a blocked tensor; None if no reader takes blocked data.

    Also None if the channels are unknown or the tensor is not blocked. `value` is the expression before the rewrite
    that selects channels, and `original` the tensor that it reads.
    """
    tensor, before, after = rewriter.blocked_form(data), sizes_of(original), sizes_of(value)
    if (
        channels is None
        or tensor is None
        or before is None
        or after is None
        or not ir.is_float32(original)
        or not same_sizes((before[0], *before[2:]), (after[0], *after[2:]))
        or is_dynamic(before[1])
        or not rewriter.is_read_blocked(value)
    ):
        return None
    selection = _selection_of(rewriter, tensor, before[1])
    positions, own = selection.positions[channels], selection.channels[channels]
    return _emit(rewriter, Selection(selection.tensors, positions, own))


def _selection_of(rewriter: LayoutRewriter, tensor: Any, channels: int) -> Selection:
    """Return the source channels of a blocked tensor; its own channels if it is not a copy."""
    known: Selection | None = rewriter.selections.get(tensor)
    return known or Selection((tensor,), np.zeros(channels, np.int64), np.arange(channels))


def _join(parts: list[Selection]) -> Selection:
    tensors = list(dict.fromkeys(tensor for part in parts for tensor in part.tensors))
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
    first, count = int(selection.channels[0]), len(selection.channels)
    is_range = np.array_equal(selection.channels, np.arange(first, first + count))
    if is_range and len(tensors) == 1 and first % block == count % block == 0:
        end = (first + count) // block
        result = rewriter.emit(relax.op.strided_slice(tensors[0], [1], [first // block], [end]))
    else:
        kernel, table, shape = _copy_channels(selection, rewriter.cpu)
        arguments = [*tensors, relax.const(table)]
        result = rewriter.call_function(kernel, "copy_channels", arguments, shape)
    rewriter.selections[result] = selection
    return result


# Pixels that are copied together: their blocks stay in the cache while one group of lanes after another is copied.
_PIXELS: Final = CACHED_LINES


def _copy_channels(selection: Selection, cpu: CpuModel) -> Any:
    """Return a kernel that copies channels of blocked tensors, its table, and the shape of its result.

    The parameters of the kernel are the tensors (n, c/b, …, b), the table and the result. The table has a row for each
    group of lanes of the result: the position of its source tensor (-1 for zeros), and the offset of its first element
    in an image of this tensor. For images with dynamic shapes, it is the offset in an image of one pixel.
    """
    shapes = [known_sizes(tensor) for tensor in selection.tensors]
    n, _, *size, block = shapes[0]
    blocks, pixels = -(-len(selection.channels) // block), count_elements(size)
    lanes = np.full((blocks * block, 2), -1, np.int64)
    outer, lane = np.divmod(selection.channels, block)
    image = 1 if is_dynamic(pixels) else pixels
    lanes[: len(outer)] = np.stack([selection.positions, outer * image * block + lane], axis=1)
    width = _find_width(lanes, block)
    groups, parts = block // width, divide_up(pixels, _PIXELS)
    table = lanes[::width].astype("int32")
    shape = (n, blocks, *size, block)
    parameters = {f"x{position}": (shape, "float32") for position, shape in enumerate(shapes)}
    parameters |= {"table": (table.shape, "int32"), "out": (shape, "float32")}
    elements = count_elements(shape)
    is_large = is_dynamic(elements) or elements >= MIN_PARALLEL_ELEMENTS
    with (
        define_flat_kernel("copy_channels", parameters, has_root=False) as (builder, buffers),
        loop_over(n * blocks * parts, is_large and cpu.cores > 1) as part,
        T.serial(groups) as group,
    ):
        *tensors, entries, out = buffers
        first = part % parts * _PIXELS
        is_ragged = is_dynamic(pixels) or pixels % _PIXELS
        count = tirx.min(_PIXELS, pixels - first) if is_ragged else min(_PIXELS, pixels)
        entry = (part // parts % blocks * groups + group) * 2
        target = (part // parts * pixels + first) * block + group * width
        source, element = entries[entry], entries[entry + 1]
        if is_dynamic(pixels):
            element = element // block * pixels * block + element % block
        element += first * block
        for position, tensor in enumerate([*tensors, None]):
            is_source = source == (-1 if tensor is None else position)
            loops = T.serial(count), T.vectorized(width)
            with T.If(is_source), T.Then(), loops[0] as pixel, loops[1] as lane:
                offset, value = pixel * block + lane, T.float32(0)
                if tensor is not None:
                    start = part // (parts * blocks) * math.prod(shapes[position][1:])
                    value = tensor[start + element + offset]
                out[target + offset] = value
    return builder.get(), table, shape


def _find_width(lanes: Any, block: int) -> int:
    """Return the largest width for which every group of lanes is zero or contiguous in its source."""
    width = block
    while width > 1:
        groups = lanes.reshape(-1, width, 2)
        expected = groups[:, :1, :] + np.stack([np.zeros(width), np.arange(width)], axis=1)
        is_zero = np.all(groups[:, :, 0] == -1, axis=1)
        is_run = np.all(groups == expected, axis=(1, 2)) & (groups[:, 0, 0] >= 0)
        # a group must not cross a block of its source
        is_run &= groups[:, 0, 1] % block + width <= block
        if np.all(is_zero | is_run):
            break
        width //= 2
    return width
