"""Reductions, in the order of axes that the data have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import numpy as np

from tvmflow.frontends.tflite._graph import Converter, Operation, Value, axis_in, first_axes


def _reduce(operation: Operation, name: str) -> None:
    first = operation.is_first()
    operation_value = operation.real(first=first)
    value, axes = _reduced(operation, name, operation_value, first)
    _write(operation, value, operation_value.rank, axes, first)


def _reduced(
    operation: Operation, name: str, value: Value, first: bool
) -> tuple[Value, frozenset[int]]:
    """Return a reduced value, and the axes over which it is, as the file counts them."""
    axes = frozenset(operation.checked_axis(axis, value.rank) for axis in operation.integers(1))
    moved = operation.graph.integers(sorted(axis_in(axis, value.rank, first) for axis in axes))
    keep = int(operation.options["keep_dims"])
    if not axes:
        return value, axes
    return operation.graph.add(name, value, moved, keepdims=keep), axes


def _write(
    operation: Operation, value: Value, rank: int, axes: frozenset[int], first: bool
) -> None:
    """Write a reduced value; where axes are gone, those that are left come in the file's order."""
    if first and axes and not operation.options["keep_dims"]:
        left = [axis for axis in first_axes(rank) if axis not in axes]
        value = operation.graph.transpose(value, [left.index(axis) for axis in sorted(left)])
        first = False
    operation.write(value, first=first)


def _reduce_bool(operation: Operation, name: str) -> None:
    value, axes = _reduced(operation, name, operation.graph.cast(operation.real(), "int32"), False)
    _write(operation, operation.graph.cast(value, "bool"), operation.rank(), axes, False)


def _arg(operation: Operation, name: str) -> None:
    value = operation.real()
    axis = operation.axis(1, value.rank)
    result = operation.graph.add(name, value, axis=axis, keepdims=0)
    operation.write(operation.graph.cast(result, operation.output_dtype()))


def _top_k(operation: Operation) -> None:
    count = operation.graph.integers(operation.integers(1))
    values, places = operation.graph.add_several("TopK", 2, operation.real(), count, axis=-1)
    operation.write(values)
    operation.write(operation.graph.cast(places, operation.output_dtype(1)), 1)


def _cumsum(operation: Operation) -> None:
    value = operation.real()
    axis = operation.graph.constant(np.int64(operation.axis(1, value.rank)))
    exclusive, reverse = (int(operation.options[name]) for name in ("exclusive", "reverse"))
    result = operation.graph.add("CumSum", value, axis, exclusive=exclusive, reverse=reverse)
    operation.write(result)


_NODES: Final[Mapping[str, str]] = {
    "MEAN": "ReduceMean",
    "REDUCE_MAX": "ReduceMax",
    "REDUCE_MIN": "ReduceMin",
    "REDUCE_PROD": "ReduceProd",
    "SUM": "ReduceSum",
}

CONVERTERS: Final[Mapping[str, Converter]] = {
    **{name: functools.partial(_reduce, name=node) for name, node in _NODES.items()},
    "ARG_MAX": functools.partial(_arg, name="ArgMax"),
    "ARG_MIN": functools.partial(_arg, name="ArgMin"),
    "CUMSUM": _cumsum,
    "REDUCE_ALL": functools.partial(_reduce_bool, name="ReduceMin"),
    "REDUCE_ANY": functools.partial(_reduce_bool, name="ReduceMax"),
    "TOPK_V2": _top_k,
}
