"""Operators of elements, in the order of axes that their operands have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from tvmflow.frontends.tflite._graph import Converter, Graph, Operation, Value, aligned, limit

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


def _squared_difference(graph: Graph, x: Value, y: Value) -> Value:
    return _square(graph, graph.add("Sub", x, y))


def _reciprocal_root(graph: Graph, x: Value) -> Value:
    return graph.add("Reciprocal", graph.add("Sqrt", x))


def _not_equal(graph: Graph, x: Value, y: Value) -> Value:
    return graph.add("Not", graph.add("Equal", x, y))


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


_FORMULAS: Final[Mapping[str, _Formula]] = {
    "ABS": _node("Abs"),
    "ADD": _node("Add"),
    "ADD_N": _node("Sum"),
    "CEIL": _node("Ceil"),
    "COS": _node("Cos"),
    "DIV": _node("Div"),
    "ELU": _node("Elu"),
    "EQUAL": _node("Equal"),
    "EXP": _node("Exp"),
    "FLOOR": _node("Floor"),
    "FLOOR_DIV": _floor_divide,
    "FLOOR_MOD": _floor_mod,
    "GREATER": _node("Greater"),
    "GREATER_EQUAL": _node("GreaterOrEqual"),
    "HARD_SWISH": _hard_swish,
    "LESS": _node("Less"),
    "LESS_EQUAL": _node("LessOrEqual"),
    "LOG": _node("Log"),
    "LOGICAL_AND": _node("And"),
    "LOGICAL_NOT": _node("Not"),
    "LOGICAL_OR": _node("Or"),
    "LOGISTIC": _node("Sigmoid"),
    "MAXIMUM": _node("Max"),
    "MINIMUM": _node("Min"),
    "MUL": _node("Mul"),
    "NEG": _node("Neg"),
    "NOT_EQUAL": _not_equal,
    "POW": _node("Pow"),
    "PRELU": _node("PRelu"),
    "QUANTIZE": lambda graph, x: x,
    "RELU": _node("Relu"),
    "RELU6": lambda graph, x: limit(graph, x, 0.0, 6.0),
    "RELU_0_TO_1": lambda graph, x: limit(graph, x, 0.0, 1.0),
    "RELU_N1_TO_1": lambda graph, x: limit(graph, x, -1.0, 1.0),
    "ROUND": _node("Round"),
    "RSQRT": _reciprocal_root,
    "SIGN": _node("Sign"),
    "SIN": _node("Sin"),
    "SQRT": _node("Sqrt"),
    "SQUARE": _square,
    "SQUARED_DIFFERENCE": _squared_difference,
    "SUB": _node("Sub"),
    "TANH": _node("Tanh"),
}

CONVERTERS: Final[Mapping[str, Converter]] = {
    **{name: functools.partial(_elementwise, formula=f) for name, f in _FORMULAS.items()},
    "CAST": _cast,
    "DEQUANTIZE": _dequantize,
    "GELU": _gelu,
    "LEAKY_RELU": _leaky_relu,
    "SELECT": _select,
    "SELECT_V2": _select,
}
