"""Converts arithmetic of TFLite, element by element and in reductions, to ONNX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from tvmflow.frontends.tflite._graph import (
    Converter,
    Graph,
    Operation,
    Value,
    aligned,
    axis_in,
    first_axes,
    limit,
)


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

_REDUCTIONS: Final[Mapping[str, Converter]] = {
    **{name: functools.partial(_reduce, name=node) for name, node in _NODES.items()},
    "ARG_MAX": functools.partial(_arg, name="ArgMax"),
    "ARG_MIN": functools.partial(_arg, name="ArgMin"),
    "CUMSUM": _cumsum,
    "REDUCE_ALL": functools.partial(_reduce_bool, name="ReduceMin"),
    "REDUCE_ANY": functools.partial(_reduce_bool, name="ReduceMax"),
    "TOPK_V2": _top_k,
}


_Formula = Callable[..., Value]


def _elementwise(operation: Operation, formula: _Formula) -> None:
    """Write what a formula gives for the operands."""
    values, first = aligned(operation, range(len(operation.inputs)))
    operation.write(formula(operation.graph, *values), first=first)


def _node(name: str, **attributes: Any) -> _Formula:
    def formula(graph: Graph, *values: Value) -> Value:
        return graph.add(name, *values, **attributes)

    return formula


def _number(graph: Graph, number: float, like: Value) -> Value:
    return graph.constant(number, like.dtype)


def _square(graph: Graph, x: Value) -> Value:
    return graph.add("Mul", x, x)


def _floor_mod(graph: Graph, x: Value, y: Value) -> Value:
    if np.dtype(x.dtype).kind in "iu":
        return graph.add("Mod", x, y)
    return graph.add("Sub", x, graph.add("Mul", _floor_divide(graph, x, y), y))


def _floor_divide(graph: Graph, x: Value, y: Value) -> Value:
    if np.dtype(x.dtype).kind in "iu":
        # What is left divides without a remainder, so that rounding to zero changes nothing.
        return graph.add("Div", graph.add("Sub", x, graph.add("Mod", x, y)), y)
    return graph.add("Floor", graph.add("Div", x, y))


def _leaky_relu(operation: Operation) -> None:
    _elementwise(operation, _node("LeakyRelu", alpha=operation.options["alpha"]))


def _gelu(operation: Operation) -> None:
    approximation = "tanh" if operation.options["approximate"] else "none"
    _elementwise(operation, _node("Gelu", approximate=approximation))


def _hard_swish(graph: Graph, x: Value) -> Value:
    gate = limit(graph, graph.add("Add", x, _number(graph, 3.0, x)), 0.0, 6.0)
    return graph.add("Mul", x, graph.add("Mul", gate, _number(graph, 1 / 6, x)))


def _cast(operation: Operation) -> None:
    first = operation.is_first()
    value = operation.tensors.stored(operation.number(0), first=first)
    dtype = operation.output_dtype()
    if dtype not in ("float32", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"):
        raise operation.refusal(f"to dtype {dtype}")
    operation.write(operation.graph.cast(value, dtype), first=first)


def _dequantize(operation: Operation) -> None:
    first = operation.is_first()
    value = operation.real(first=first)
    operation.write(operation.graph.cast(value, "float32"), first=first)


def _select(operation: Operation) -> None:
    """Convert SELECT, whose condition may stand for whole entries of the first axis."""
    condition, x = operation.tensors.stored(operation.number(0)), operation.real(1)
    if condition.rank == 1 and x.rank > 1 and operation.name == "SELECT":
        rows = [*condition.shape, *[1] * (x.rank - 1)]
        condition = operation.graph.reshape(condition, rows)
        operation.write(operation.graph.add("Where", condition, x, operation.real(2)))
    else:
        _elementwise(operation, _node("Where"))


_SAME_NAMES: Final = (
    "Abs Add Ceil Cos Div Elu Equal Exp Floor Greater Less Log Mul Neg Pow PRelu Relu Round Sign Sin "
    "Sqrt Sub Tanh"
).split()
_FORMULAS: Final[Mapping[str, _Formula]] = {
    **{name.upper(): _node(name) for name in _SAME_NAMES},
    "ADD_N": _node("Sum"),
    "FLOOR_DIV": _floor_divide,
    "FLOOR_MOD": _floor_mod,
    "GREATER_EQUAL": _node("GreaterOrEqual"),
    "HARD_SWISH": _hard_swish,
    "LESS_EQUAL": _node("LessOrEqual"),
    "LOGICAL_AND": _node("And"),
    "LOGICAL_NOT": _node("Not"),
    "LOGICAL_OR": _node("Or"),
    "LOGISTIC": _node("Sigmoid"),
    "MAXIMUM": _node("Max"),
    "MINIMUM": _node("Min"),
    "NOT_EQUAL": lambda graph, x, y: graph.add("Not", graph.add("Equal", x, y)),
    "QUANTIZE": lambda graph, x: x,
    "RELU6": lambda graph, x: limit(graph, x, 0.0, 6.0),
    "RELU_0_TO_1": lambda graph, x: limit(graph, x, 0.0, 1.0),
    "RELU_N1_TO_1": lambda graph, x: limit(graph, x, -1.0, 1.0),
    "RSQRT": lambda graph, x: graph.add("Reciprocal", graph.add("Sqrt", x)),
    "SQUARE": _square,
    "SQUARED_DIFFERENCE": lambda graph, x, y: _square(graph, graph.add("Sub", x, y)),
}

CONVERTERS: Final[Mapping[str, Converter]] = {
    **_REDUCTIONS,
    **{name: functools.partial(_elementwise, formula=f) for name, f in _FORMULAS.items()},
    "CAST": _cast,
    "DEQUANTIZE": _dequantize,
    "GELU": _gelu,
    "LEAKY_RELU": _leaky_relu,
    "SELECT": _select,
    "SELECT_V2": _select,
}
