"""Conditions and integers, which are computed from the inputs: no rounding error moves them over a step."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from tests.support.random_networks.network import Network, Operator

_INTEGERS: Final = (TensorProto.INT32, TensorProto.INT64)


def _compare(net: Network, x: str) -> str:
    """Add a condition on an input."""
    kind = net.choice(("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Cast", "axis"))
    if kind == "Cast":
        return net.add("Cast", _round(net, x), to=TensorProto.BOOL)
    if kind == "Equal":
        return net.add(
            "Equal", _round(net, x, dtype=TensorProto.INT64), net.constant(net.integer(-2, 2))
        )
    if kind == "axis":
        extent = net.shape(x)[-1]
        less = net.constant([n < net.integer(0, extent) for n in range(extent)], "bool")
        return net.add("And", less, net.add("Less", x, net.constant(0.7, "float32")))
    threshold = net.constant(net.choice((-0.5, 0.1, 0.8)), "float32")
    return net.add(kind, *net.choice(((x, threshold), (threshold, x))))


def _round(net: Network, x: str, dtype: int | None = None) -> str:
    """Add integers between about -8 and 8."""
    scaled = net.add("Mul", x, net.constant(2.5, "float32"))
    return net.add("Cast", scaled, to=dtype or net.choice(_INTEGERS))


def _combine(net: Network, x: str) -> str:
    """Add a condition of some conditions."""
    condition = _compare(net, x)
    for _ in range(net.integer(0, 3)):
        kind = net.choice(("And", "Or", "Xor", "Not"))
        others = [] if kind == "Not" else [_compare(net, x)]
        condition = net.add(kind, condition, *others)
    return condition


def select(net: Network, _: str) -> str | None:
    """Add a choice between an input and a function of it."""
    x = net.choice(net.inputs)
    function = net.add(net.choice(("Tanh", "Neg", "Relu", "Exp")), x)
    other = net.choice((function, net.constant(-1.0, "float32")))
    return net.add("Where", _combine(net, x), *net.choice(((x, other), (other, x))))


def mask(net: Network, _: str) -> str | None:
    """Add the product of an input and a condition."""
    x = net.choice(net.inputs)
    return net.add("Mul", x, net.add("Cast", _combine(net, x), to=TensorProto.FLOAT))


def count(net: Network, _: str) -> str | None:
    """Add how often a condition holds, along an axis or up to each index."""
    x = net.choice(net.inputs)
    numbers = net.add("Cast", _combine(net, x), to=net.choice(_INTEGERS))
    axis = net.integer(0, len(net.shape(x)) - 1)
    if net.chance(0.3):
        total = net.add("CumSum", numbers, net.constant(axis))
    elif net.chance(0.5):
        total = net.add("ReduceMax", numbers, axes=[axis], keepdims=1)
    else:
        total = net.add("ReduceSum", numbers, net.constant([axis]), keepdims=1)
    scale = net.constant(1 / net.shape(x)[axis], "float32")
    return net.add("Mul", net.add("Cast", total, to=TensorProto.FLOAT), scale)


def integers(net: Network, _: str) -> str | None:
    """Add arithmetic on integers."""
    x = net.choice(net.inputs)
    dtype = net.choice(_INTEGERS)
    name = TensorProto.DataType.Name(dtype).lower()
    value = _round(net, x, dtype)
    for _step in range(net.integer(1, 4)):
        kind = net.choice(("Add", "Sub", "Mul", "Max", "Min", "Mod", "Div", "Abs", "Neg", "Where"))
        operand = net.constant(net.integer(1, 5), name)
        if kind == "Where":
            value = net.add("Where", _combine(net, x), value, operand)
        elif kind in ("Abs", "Neg"):
            value = net.add(kind, value)
        elif kind in ("Mod", "Div"):
            value = net.add(kind, value, operand)
        else:
            value = net.add(kind, value, net.choice((operand, _round(net, x, dtype))))
    scale = net.constant(0.1, "float32")
    return net.add("Mul", net.add("Cast", value, to=TensorProto.FLOAT), scale)


OPERATORS: Final[tuple[Operator, ...]] = (select, mask, count, integers)
