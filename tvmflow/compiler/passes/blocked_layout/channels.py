"""Concatenations, slices, splits and shuffles of channels, on blocked layouts.

Each of them only moves channels. Where they follow each other, the last one reads the tensors
that the first one read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.strided_views import read_slice, read_split
from tvmflow.compiler.tir_kernels.channels import Sources, copy_channels


class Selection(NamedTuple):
    """Channels of blocked tensors.

    Attributes:
        tensors: The tensors.
        sources: Where each channel comes from.
    """

    tensors: tuple[Any, ...]
    sources: Sources


def rewrite_concat(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite a concatenation of channels, with a blocked tensor."""
    fields = rewriter.list_fields(data)
    axis = int(call.attrs.axis) % len(ir.known_shape(call))
    forms = [rewriter.blocked_form(field) for field in fields]
    if axis != 1 or all(form is None for form in forms):
        return None
    is_ragged = any(ir.known_shape(field)[1] % rewriter.block for field in fields[:-1])
    is_mixed = any(form is None for form in forms)
    if (is_mixed or is_ragged) and not rewriter.is_read_blocked(call):
        return None
    if is_ragged and not all(map(ir.is_float32, fields)):
        return None
    tensors = [rewriter.to_blocked(field) for field in fields]
    parts = [
        _selection_of(rewriter, tensor, ir.known_shape(field)[1])
        for tensor, field in zip(tensors, fields, strict=True)
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
    shape = ir.known_shape(call.args[0])
    if not all(_keeps_order(call, shape, axis) for axis in range(len(shape)) if axis != 1):
        return None
    channels = read_slice(call, _name_channels(shape))
    return None if channels is None else _select(rewriter, call, call.args[0], data, channels)


def rewrite_split(rewriter: LayoutRewriter, item: relax.TupleGetItem) -> relax.Expr | None:
    """Rewrite a part of channels that are split."""
    split = ir.as_call(rewriter.flow.values.get(item.tuple_value), "relax.split")
    if split is None or ir.shape_of(split.args[0]) is None:
        return None
    data = ir.resolve_alias(rewriter.visit_expr(split.args[0]), rewriter.lookup_binding)
    if rewriter.blocked_form(data) is None:
        return None
    channels = read_split(split, _name_channels(ir.known_shape(split.args[0])), item.index)
    return _select(rewriter, item, split.args[0], data, channels)


def rewrite_reshape(rewriter: LayoutRewriter, call: relax.Call, data: Any, _: Any) -> Any:
    """Rewrite a reshape to the same shape, or one that ends a shuffle of channels."""
    is_same = ir.shape_of(data) == ir.shape_of(call)
    return rewriter.blocked_form(data) if is_same else _rewrite_shuffle(rewriter, call)


def _rewrite_shuffle(rewriter: LayoutRewriter, call: relax.Call) -> relax.Expr | None:
    """Rewrite the reshape that ends a shuffle: channels are reshaped to a matrix, which is transposed, and back."""
    flow = rewriter.flow
    transposed = ir.as_call(flow.values.get(call.args[0]), "relax.permute_dims")
    inner_value = None if transposed is None else flow.values.get(transposed.args[0])
    split = ir.as_call(inner_value, "relax.reshape")
    if split is None or ir.shape_of(split.args[0]) != ir.shape_of(call):
        return None
    shape, inner = ir.known_shape(call), ir.shape_of(split)
    spatial, axes = len(shape) - 2, transposed.attrs.axes
    if inner is None or axes is None or spatial < 1:
        return None
    last, order = len(inner) - spatial, [int(axis) for axis in axes]
    kept = [0, *range(last, len(inner))]
    keeps_images = [order[axis] for axis in kept] == kept
    if not keeps_images or (inner[0], *inner[last:]) != (shape[0], *shape[2:]):
        return None
    channels = np.arange(shape[1]).reshape(inner[1:last])
    channels = channels.transpose([axis - 1 for axis in order[1:last]]).ravel()
    data = ir.resolve_alias(rewriter.visit_expr(split.args[0]), rewriter.lookup_binding)
    return _select(rewriter, call, split.args[0], data, channels)


def _keeps_order(call: relax.Call, shape: tuple[int, ...], axis: int) -> bool:
    """Return whether a slice of a tensor of a shape does not reverse an axis, which a step of -1 does."""
    positions = read_slice(call, _name_positions(shape, axis))
    if positions is None or not positions.size:
        return False
    line = np.moveaxis(positions, axis, -1).reshape(-1, positions.shape[axis])[0]
    return bool((np.diff(line) > 0).all())


def _name_channels(shape: tuple[int, ...]) -> Any:
    """Return a tensor whose elements are the numbers of their channels."""
    return _name_positions(shape, 1)


def _name_positions(shape: tuple[int, ...], axis: int) -> Any:
    """Return a tensor whose elements are their positions along an axis."""
    extents = [extent if other == axis else 1 for other, extent in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[axis]).reshape(extents), shape)


def _select(
    rewriter: LayoutRewriter, value: Any, original: Any, data: Any, channels: Any
) -> relax.Expr | None:
    """Emit some channels of a blocked tensor; None if there is none, or no reader takes blocked data.

    Args:
        rewriter: The rewriter.
        value: The original expression.
        original: The original tensor.
        data: The tensor.
        channels: The channels, or the channel of each element of the result.
    """
    tensor, before, after = rewriter.blocked_form(data), ir.shape_of(original), ir.shape_of(value)
    if tensor is None or before is None or after is None or not ir.is_float32(original):
        return None
    if before[0] != after[0] or before[2:] != after[2:] or not rewriter.is_read_blocked(value):
        return None
    if channels.ndim > 1:
        channels = channels.reshape(*channels.shape[:2], -1)[0, :, 0]
    selection = _selection_of(rewriter, tensor, before[1])
    return _emit(rewriter, selection._replace(sources=selection.sources.select(channels)))


def _selection_of(rewriter: LayoutRewriter, tensor: Any, channels: int) -> Selection:
    """Return the channels that a blocked tensor is a copy of: its own, if it is none."""
    known: Selection | None = rewriter.selections.get(tensor)
    return known or Selection((tensor,), Sources.of_tensor(channels))


def _join(parts: list[Selection]) -> Selection:
    """Return the channels of several selections after each other."""
    tensors: list[Any] = []
    for part in parts:
        tensors += [tensor for tensor in part.tensors if tensor not in tensors]
    positions = [
        np.array([tensors.index(tensor) for tensor in part.tensors])[part.sources.tensors]
        for part in parts
    ]
    channels = np.concatenate([part.sources.channels for part in parts])
    return Selection(tuple(tensors), Sources(np.concatenate(positions), channels))


def _emit(rewriter: LayoutRewriter, selection: Selection) -> Any:
    """Emit the selected channels."""
    used = sorted({int(position) for position in selection.sources.tensors})
    tensors = tuple(selection.tensors[position] for position in used)
    sources = selection.sources._replace(tensors=np.searchsorted(used, selection.sources.tensors))
    first, block = sources.first_block(rewriter.block), rewriter.block
    if first is not None:
        end = first + len(sources.channels) // block
        result = rewriter.emit(relax.op.strided_slice(tensors[0], [1], [first], [end]))
    else:
        assert rewriter.context.cpu is not None, "only CPUs have blocked layouts"
        shapes = [ir.known_shape(tensor) for tensor in tensors]
        kernel, table, shape = copy_channels(shapes, sources, rewriter.context.cpu)
        arguments = [*tensors, relax.const(table)]
        result = rewriter.call_function(kernel, "copy_channels", arguments, shape)
    rewriter.selections[result] = Selection(tensors, sources)
    return result
