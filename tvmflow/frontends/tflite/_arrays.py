"""Converters of shape, concatenation, slicing and indexing operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem, shape_text
from tvmflow.frontends._onnx_graph import Value
from tvmflow.frontends.tflite._operation import (
    MAX_COUNT,
    Converter,
    Operation,
    aligned,
    axis_in,
    first_axes,
    last_axes,
)
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic

# ---------------------------------------------------------------- shapes


_REFLECT: Final = 0


def _reshape(operation: Operation) -> None:
    value = operation.real()
    shape: list[IrSize] = (
        operation.sizes(1) if operation.has(1) else list(operation.options["new_shape"])
    )
    if shape == [0] and not operation.has(1):
        # Old files have [0] for a scalar.
        shape = []
    ranges = operation.graph.ranges
    inferred = [axis for axis, size in enumerate(shape) if not is_dynamic(size) and size == -1]
    if inferred:
        known = ranges.simplify(-math.prod(shape))
        known = known if is_dynamic(known) else max(known, 1)
        shape[inferred[0]] = ranges.simplify(math.prod(value.shape) // known)
    if not ranges.is_equal(math.prod(shape), math.prod(value.shape)):
        raise operation.refusal(f"of shape {shape_text(value.shape)} to {shape_text(shape)}")
    operation.write(operation.graph.reshape(value, shape))


def _squeeze(operation: Operation) -> None:
    value = operation.real()
    axes = {operation.checked_axis(axis, value.rank) for axis in operation.options["axes"]}
    is_equal, is_certain = operation.graph.ranges.is_equal, operation.graph.ranges.is_certain
    if not axes:
        unsure = [n for n in value.shape if is_dynamic(n) and not is_certain(n != 1)]
        if unsure:
            raise DynamicShapeProblem(
                f"{unsure[0]} may be 1, and then the result has one axis less"
            )
        axes = {axis for axis, size in enumerate(value.shape) if is_equal(size, 1)}
    if not all(is_equal(value.shape[axis], 1) for axis in axes):
        raise operation.refusal(f"of shape {shape_text(value.shape)} at axes {sorted(axes)}")
    shape = [size for axis, size in enumerate(value.shape) if axis not in axes]
    operation.write(operation.graph.reshape(value, shape))


def _expand_dims(operation: Operation) -> None:
    value = operation.real()
    axis = operation.axis(1, value.rank + 1)
    operation.write(operation.graph.expand_dims(value, axis))


def _transpose(operation: Operation) -> None:
    """Convert a transposition; without nodes if the value exists in the requested axis order."""
    value, first = operation.in_its_order()
    axes = [operation.checked_axis(axis, value.rank) for axis in operation.integers(1)]
    order = first_axes(value.rank) if first else list(range(value.rank))
    operation.write(operation.graph.transpose(value, [order.index(axis) for axis in axes]))


def _concatenation(operation: Operation) -> None:
    values, first = aligned(operation, range(len(operation.inputs)))
    rank = values[0].rank
    axis = axis_in(operation.checked_axis(operation.options["axis"], rank), rank, first)
    operation.write(operation.graph.add("Concat", *values, axis=axis), first=first)


def _pack(operation: Operation) -> None:
    values = [operation.real(position) for position in range(len(operation.inputs))]
    axis = operation.checked_axis(operation.options["axis"], values[0].rank + 1)
    operation.write(operation.graph.stack(values, axis))


def _unpack(operation: Operation) -> None:
    value = operation.real()
    axis = operation.checked_axis(operation.options["axis"], value.rank)
    shape = [*value.shape[:axis], *value.shape[axis + 1 :]]
    [entries] = operation.fixed([value.shape[axis]])
    if entries != len(operation.outputs):
        raise operation.refusal(f"of {entries} entries to {len(operation.outputs)}")
    parts = operation.graph.split(value, axis, [1] * entries)
    for position, part in enumerate(parts):
        operation.write(operation.graph.reshape(part, shape), position)


def _split_evenly(operation: Operation) -> None:
    value, first = operation.in_its_order(1)
    axis = axis_in(operation.axis(0, value.rank), value.rank, first)
    size, count = value.shape[axis], len(operation.outputs)
    if not is_dynamic(size) and size % count:
        raise operation.refusal(f"of {size} entries to {count} outputs")
    if not operation.graph.ranges.is_equal(size // count * count, size):
        operation.fixed([size])
    _write_parts(operation, value, axis, [size // count] * count, first)


def _split_by_sizes(operation: Operation) -> None:
    lengths = operation.integers(1)
    sizes: list[IrSize] = list(lengths)
    value, first = operation.in_its_order()
    axis = axis_in(operation.axis(2, value.rank), value.rank, first)
    if -1 in lengths:
        sizes[lengths.index(-1)] = value.shape[axis] - sum(lengths) - 1
    _write_parts(operation, value, axis, sizes, first)


def _write_parts(
    operation: Operation, value: Value, axis: int, sizes: list[IrSize], first: bool
) -> None:
    for index, part in enumerate(operation.graph.split(value, axis, sizes)):
        operation.write(part, index, first=first)


def _pad(operation: Operation) -> None:
    fill = operation.real(2) if operation.has(2) else None
    _write_padded(operation, *((fill,) if fill else ()), mode="constant")
    rank = operation.rank()
    widths = operation.constant(1).reshape(rank, 2)
    is_around_image = rank > 3 and not widths[[0, -1]].any() and widths.min() >= 0
    if is_around_image and fill is None:
        around = widths[1:-1].T.ravel().tolist()
        operation.tensors.padded[operation.outputs[0]] = (operation.number(0), around)


def _mirror_pad(operation: Operation) -> None:
    if operation.options["mode"] != _REFLECT:
        raise operation.refusal("with mode SYMMETRIC")
    _write_padded(operation, mode="reflect")


def _write_padded(operation: Operation, *fill: Value, mode: str) -> None:
    value, first = operation.in_its_order()
    widths = operation.constant(1).reshape(value.rank, 2)
    if first:
        widths = widths[first_axes(value.rank)]
    amounts = operation.graph.integers(widths.T.ravel().tolist())
    operation.write(operation.graph.add("Pad", value, amounts, *fill, mode=mode), first=first)


def _repeat(operation: Operation, operator: str) -> None:
    sizes = operation.graph.integers(operation.sizes(1))
    operation.write(operation.graph.add(operator, operation.real(), sizes))


def _fill(operation: Operation) -> None:
    shape = operation.graph.integers(operation.sizes(0))
    operation.write(operation.graph.add("Expand", operation.real(1), shape))


def _shape_of(operation: Operation) -> tuple[IrSize, ...]:
    first = operation.is_first()
    value = operation.tensors.stored(operation.number(0), first=first)
    if not first:
        return value.shape
    return tuple(value.shape[axis] for axis in last_axes(value.rank))


def _write_constant(operation: Operation, values: Any) -> None:
    operation.write(operation.graph.constant(values, operation.output_dtype()))


def _shape(operation: Operation) -> None:
    shape = operation.graph.integers(_shape_of(operation))
    operation.write(operation.graph.cast(shape, operation.output_dtype()))


def _zeros_like(operation: Operation) -> None:
    zero = operation.graph.constant(0, operation.output_dtype())
    shape = operation.graph.integers(_shape_of(operation))
    operation.write(operation.graph.add("Expand", zero, shape))


def _range(operation: Operation) -> None:
    values = [operation.tensors.stored(operation.number(position)) for position in range(3)]
    if any(value.has_dynamic_elements for value in values):
        operation.write(operation.graph.add("Range", *values))
        return
    start, limit, step = (operation.constant(position).item() for position in range(3))
    if step == 0 or abs(limit - start) / abs(step) > MAX_COUNT:
        raise operation.refusal(f"from {start} to {limit} in steps of {step}")
    _write_constant(operation, np.arange(start, limit, step))


# ---------------------------------------------------------------- slices and lookups


def _slice(operation: Operation) -> None:
    value, first = operation.in_its_order()
    slices = {}
    for axis, (begin, size) in enumerate(zip(operation.sizes(1), operation.sizes(2), strict=True)):
        is_rest = not is_dynamic(size) and size == -1
        position = axis_in(axis, value.rank, first)
        extent = value.shape[position]
        if not any(map(is_dynamic, (begin, size, extent))) and not (
            0 <= begin <= extent and (is_rest or 0 <= size <= extent - begin)
        ):
            raise operation.refusal(f"of {size} entries from {begin} along an axis of {extent}")
        slices[position] = slice(begin, None if is_rest else begin + size)
    operation.write(operation.graph.cut(value, slices), first=first)


def _strided_slice(operation: Operation) -> None:
    """Convert a NumPy-like slice; masks mark open ends, new axes and indices."""
    value = operation.real()
    bounds = [operation.sizes(position) for position in (1, 2, 3)]
    entries = _entries(operation, bounds, value.rank)
    slices: dict[int, slice] = {}
    for axis, entry in enumerate(entry for entry in entries if entry is not None):
        slices[axis] = entry
        if not isinstance(entry, slice):
            size, is_certain = value.shape[axis], operation.graph.ranges.is_certain
            start = entry + size if is_certain(entry < 0) else entry
            if not (is_certain(start >= 0) and is_certain(start < size)):
                raise operation.refusal(f"at index {entry} of {size}")
            slices[axis] = slice(start, start + 1)
    result = operation.graph.cut(value, slices)
    sizes = iter(result.shape)
    kept = [(entry, 1 if entry is None else next(sizes)) for entry in entries]
    shape = [size for entry, size in kept if entry is None or isinstance(entry, slice)]
    operation.write(operation.graph.reshape(result, shape))


def _entries(operation: Operation, bounds: list[list[IrSize]], rank: int) -> list[Any]:
    """Return the selection along each axis: a slice, an index, or None for a new axis."""
    options = operation.options
    if options["offset"]:
        raise operation.refusal("with ends counted from the beginnings")
    count = len(bounds[0])

    def is_set(mask: str, index: int) -> bool:
        return bool(options[mask] >> index & 1)

    new_axes = sum(is_set("new_axis_mask", i) for i in range(count))
    entries: list[Any] = []
    for index, (begin, end, step) in enumerate(zip(*bounds, strict=True)):
        if is_set("ellipsis_mask", index):
            entries += [slice(None)] * (rank - (count - 1 - new_axes))
        elif is_set("new_axis_mask", index):
            entries.append(None)
        elif is_set("shrink_axis_mask", index):
            entries.append(begin)
        else:
            start = None if is_set("begin_mask", index) else begin
            stop = None if is_set("end_mask", index) else end
            entries.append(slice(start, stop, step))
    selected = sum(entry is not None for entry in entries)
    if selected > rank:
        raise operation.refusal(f"of {rank} axes with {selected} slices")
    return entries + [slice(None)] * (rank - selected)


def _gather(operation: Operation) -> None:
    value = operation.real()
    if operation.options["batch_dims"]:
        raise operation.refusal("with batch_dims")
    axis = operation.checked_axis(operation.options["axis"], value.rank)
    indices = operation.tensors.stored(operation.number(1))
    operation.write(operation.graph.add("Gather", value, indices, axis=axis))


def _gather_nd(operation: Operation) -> None:
    indices = operation.graph.cast(operation.tensors.stored(operation.number(1)), "int64")
    operation.write(operation.graph.add("GatherND", operation.real(), indices))


def _embedding_lookup(operation: Operation) -> None:
    indices, number = operation.tensors.stored(operation.number(0)), operation.number(1)
    quantization = operation.tensors.quantization(number)
    if quantization is None or len(quantization.scales) > 1:
        operation.write(operation.graph.add("Gather", operation.real(1), indices, axis=0))
        return
    rows = operation.graph.add("Gather", operation.tensors.stored(number), indices, axis=0)
    operation.write(operation.tensors.dequantize(rows, quantization, 0))


def _one_hot(operation: Operation) -> None:
    """Convert ONE_HOT by comparison, so that indices out of range, also negative ones, select nothing."""
    graph, [depth] = operation.graph, operation.integers(1)
    indices = operation.tensors.stored(operation.number(0))
    axis = operation.checked_axis(operation.options["axis"], indices.rank + 1)
    if not 0 <= depth <= MAX_COUNT:
        raise operation.refusal(f"of depth {depth:,}")
    classes = graph.constant(range(depth), indices.dtype)
    classes = graph.reshape(classes, [depth] + [1] * (indices.rank - axis))
    is_selected = graph.add("Equal", graph.expand_dims(indices, axis), classes)
    operation.write(graph.add("Where", is_selected, operation.real(2), operation.real(3)))


def _reverse(operation: Operation) -> None:
    value = operation.real()
    axes = (operation.checked_axis(axis, value.rank) for axis in operation.integers(1))
    operation.write(operation.graph.cut(value, {axis: slice(None, None, -1) for axis in axes}))


CONVERTERS: Final[Mapping[str, Converter]] = {
    "BROADCAST_TO": partial(_repeat, operator="Expand"),
    "CONCATENATION": _concatenation,
    "EXPAND_DIMS": _expand_dims,
    "FILL": _fill,
    "MIRROR_PAD": _mirror_pad,
    "PACK": _pack,
    "PAD": _pad,
    "PADV2": _pad,
    "RANGE": _range,
    "RANK": lambda operation: _write_constant(operation, len(_shape_of(operation))),
    "RESHAPE": _reshape,
    "SHAPE": _shape,
    "SPLIT": _split_evenly,
    "SPLIT_V": _split_by_sizes,
    "SQUEEZE": _squeeze,
    "TILE": partial(_repeat, operator="Tile"),
    "TRANSPOSE": _transpose,
    "UNPACK": _unpack,
    "ZEROS_LIKE": _zeros_like,
    "EMBEDDING_LOOKUP": _embedding_lookup,
    "GATHER": _gather,
    "GATHER_ND": _gather_nd,
    "ONE_HOT": _one_hot,
    "REVERSE_V2": _reverse,
    "SLICE": _slice,
    "STRIDED_SLICE": _strided_slice,
}
