"""Parts of tensors: slices and what indices select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tvmflow.frontends.tflite._graph import Value
from tvmflow.frontends.tflite._operation import MAX_COUNT, Converter, Operation, axis_in


def _sliced(operation: Operation, value: Value, slices: Mapping[int, slice]) -> Value:
    """Return part of a value along some axes; `slices` have only non-negative bounds, or None for an open end."""
    parts = {
        axis: part
        for axis, part in slices.items()
        if part.indices(value.shape[axis]) != (0, value.shape[axis], 1)
    }
    if not parts:
        return value
    lists: list[list[int]] = [[], [], [], []]
    for axis, part in sorted(parts.items()):
        start, stop, step = part.indices(value.shape[axis])
        # In ONNX, a negative end counts from the end: before the first entry is far below it.
        stop = stop if stop >= 0 else -value.shape[axis] - 1
        for numbers, number in zip(lists, (start, stop, axis, step), strict=True):
            numbers.append(number)
    return operation.graph.add("Slice", value, *map(operation.graph.integers, lists))


def _slice(operation: Operation) -> None:
    first, rank = operation.is_first(), operation.rank()
    value = operation.real(first=first)
    slices = {}
    for axis, (begin, size) in enumerate(
        zip(operation.integers(1), operation.integers(2), strict=True)
    ):
        slices[axis_in(axis, rank, first)] = slice(begin, None if size == -1 else begin + size)
    operation.write(_sliced(operation, value, slices), first=first)


def _strided_slice(operation: Operation) -> None:
    """Convert a slice in NumPy's sense, whose masks say which parts of it are left open, are new axes, or are an index."""
    value = operation.real()
    bounds = [operation.integers(position) for position in (1, 2, 3)]
    entries = _entries(operation, bounds, value.rank)
    slices: dict[int, slice] = {}
    shape: list[int | None] = []
    axis = 0
    for entry in entries:
        if entry is None:
            shape.append(1)
            continue
        if isinstance(entry, int):
            start = entry + value.shape[axis] if entry < 0 else entry
            if not 0 <= start < value.shape[axis]:
                raise operation.refusal(f"at index {entry} of {value.shape[axis]}")
            slices[axis] = slice(start, start + 1)
        else:
            slices[axis] = entry
            shape.append(len(range(*entry.indices(value.shape[axis]))))
        axis += 1
    result = _sliced(operation, value, slices)
    operation.write(operation.graph.reshape(result, [size or 0 for size in shape]))


def _entries(operation: Operation, bounds: list[list[int]], rank: int) -> list[slice | int | None]:
    """Return what selects entries along each axis: a slice or an index; None for a new axis."""
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
    """Convert ONE_HOT by comparison: an index out of range, also a negative one, selects nothing."""
    graph, [depth] = operation.graph, operation.integers(1)
    indices = operation.tensors.stored(operation.number(0))
    axis = operation.checked_axis(operation.options["axis"], indices.rank + 1)
    if not 0 <= depth <= MAX_COUNT:
        raise operation.refusal(f"of depth {depth:,}")
    places = graph.constant(range(depth), indices.dtype)
    places = graph.reshape(places, [depth] + [1] * (indices.rank - axis))
    shape = [*indices.shape[:axis], 1, *indices.shape[axis:]]
    is_selected = graph.add("Equal", graph.reshape(indices, shape), places)
    operation.write(graph.add("Where", is_selected, operation.real(2), operation.real(3)))


def _reverse(operation: Operation) -> None:
    value = operation.real()
    axes = (operation.checked_axis(axis, value.rank) for axis in operation.integers(1))
    operation.write(_sliced(operation, value, {axis: slice(None, None, -1) for axis in axes}))


CONVERTERS: Final[Mapping[str, Converter]] = {
    "EMBEDDING_LOOKUP": _embedding_lookup,
    "GATHER": _gather,
    "GATHER_ND": _gather_nd,
    "ONE_HOT": _one_hot,
    "REVERSE_V2": _reverse,
    "SLICE": _slice,
    "STRIDED_SLICE": _strided_slice,
}
