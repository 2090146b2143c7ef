"""Elementwise operators, reductions, and moves of data, over values of any rank."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.support.random_networks.network import Network, Operator

# None with a step, which makes a large error of a rounding error.
_UNARY: Final = (
    "Relu LeakyRelu Sigmoid Tanh Elu Selu HardSigmoid HardSwish Softplus Softsign Erf Abs Neg Sin Cos "
    "Identity Celu"
).split()


def unary(net: Network, x: str) -> str | None:
    """Add an activation."""
    return net.add(net.choice(_UNARY), x)


def composed(net: Network, x: str) -> str | None:
    """Add an activation of several nodes."""
    half, one = net.constant(0.5, "float32"), net.constant(1.0, "float32")
    kind = net.choice(("silu", "gelu", "clip", "exp", "log", "root", "divide", "prelu", "where"))
    if kind == "silu":
        return net.add("Mul", x, net.add("Sigmoid", x))
    if kind == "gelu":
        inner = net.add("Erf", net.add("Div", x, net.constant(1.4142135, "float32")))
        return net.add("Mul", net.add("Mul", x, net.add("Add", inner, one)), half)
    if kind == "clip":
        return net.add("Clip", x, net.constant(-0.5, "float32"), net.constant(1.5, "float32"))
    if kind == "exp":
        return net.add("Exp", net.add("Tanh", x))
    if kind == "prelu":
        return net.add("PRelu", x, _operand(net, net.shape(x)))
    if kind == "where":
        mask = net.constant(np.arange(net.shape(x)[-1]) % 3 == 0, "bool")
        return net.add("Where", mask, *net.choice(((x, half), (one, x))))
    positive = net.add("Add", net.add("Abs", x), half)
    if kind == "divide":
        return net.add("Div", *net.choice(((x, positive), (one, positive))))
    return net.add({"log": "Log", "root": "Sqrt"}[kind], positive)


def _operand(net: Network, shape: list[int]) -> str:
    """Return weights that broadcast to a shape along some of its axes."""
    kept = [n if net.chance(0.4) else 1 for n in shape]
    start = net.integer(0, len(shape))
    return net.weight(*kept[start:])


def binary(net: Network, x: str) -> str | None:
    """Add an operator with weights as an operand, or with a function of the data."""
    name = net.choice(("Add", "Sub", "Mul", "Max", "Min"))
    if net.chance(0.6):
        other = _operand(net, net.shape(x))
    elif net.chance(0.5):
        other = net.add(net.choice(("Tanh", "Sigmoid", "Neg")), x)
    else:
        axis = net.integer(0, len(net.shape(x)) - 1)
        other = net.add("ReduceMean", x, axes=[axis], keepdims=1)
    return net.add(name, *net.choice(((x, other), (other, x))))


def reduce(net: Network, x: str) -> str | None:
    """Add a reduction over some axes."""
    rank = len(net.shape(x))
    if rank < 2:
        return None
    axes = sorted(net.permutation(rank)[: net.integer(1, max(1, rank - 1))])
    keep = int(net.chance(0.6))
    name = net.choice(("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSum"))
    if name == "ReduceSum":
        total = net.add(name, x, net.constant(axes), keepdims=keep)
        return net.add("Mul", total, net.constant(net.size(total) / net.size(x), "float32"))
    return net.add(name, x, axes=axes, keepdims=keep)


def softmax(net: Network, x: str) -> str | None:
    """Add a softmax along any axis."""
    rank = len(net.shape(x))
    return net.add(
        net.choice(("Softmax", "Softmax", "LogSoftmax")), x, axis=net.integer(-rank, rank - 1)
    )


def transpose(net: Network, x: str) -> str | None:
    """Add another order of the axes."""
    return net.add("Transpose", x, perm=net.permutation(len(net.shape(x))))


def reshape(net: Network, x: str) -> str | None:
    """Add a merge of two axes, or a split of one."""
    shape = net.shape(x)
    axis = net.integer(0, len(shape) - 1)
    if net.chance(0.5) and axis + 1 < len(shape):
        return net.add("Reshape", x, net.constant([*shape[:axis], -1, *shape[axis + 2 :]]))
    if len(shape) > 4:
        return None
    factor = net.choice([f for f in range(1, shape[axis] + 1) if shape[axis] % f == 0])
    split = [*shape[:axis], factor, shape[axis] // factor, *shape[axis + 1 :]]
    return net.add("Reshape", x, net.constant(split))


def slice_(net: Network, x: str) -> str | None:
    """Add a slice of one or two axes, with any step."""
    rank = len(net.shape(x))
    axes = net.permutation(rank)[: net.choice((1, 2))]
    starts, ends, steps = [], [], []
    for axis in axes:
        extent, step = net.shape(x)[axis], net.choice((1, 1, 2, 3, -1, -2))
        low = net.integer(0, extent // 3)
        high = net.integer(extent - extent // 3, extent)
        starts.append(low if step > 0 else high - 1)
        ends.append(high if step > 0 else (low - 1 if low else -extent - 1))
        steps.append(step)
    return net.add("Slice", x, *map(net.constant, (starts, ends, axes, steps)))


def split(net: Network, x: str) -> str | None:
    """Add a split of an axis, whose parts are joined in another order, one of them changed."""
    axis = net.integer(0, len(net.shape(x)) - 1)
    extent = net.shape(x)[axis]
    if extent < 3:
        return None
    first = net.integer(1, extent - 2)
    second = net.integer(1, extent - first - 1)
    sizes = net.constant([first, second, extent - first - second])
    parts = net.add_many("Split", 3, x, sizes, axis=axis)
    if net.chance(0.4):
        return net.choice(parts)
    parts[1] = net.add(net.choice(("Relu", "Tanh", "Neg")), parts[1])
    return net.add("Concat", *(parts[n] for n in net.permutation(3)), axis=axis)


def pad(net: Network, x: str) -> str | None:
    """Add padding with a number, or with the data's own."""
    shape = net.shape(x)
    if len(shape) < 3:
        return None
    mode = net.choice(("constant", "constant", "reflect", "edge"))
    first = 1 if mode == "constant" and net.chance(0.3) else 2
    widths = [0 if n % len(shape) < first else net.integer(0, 2) for n in range(2 * len(shape))]
    if mode == "reflect" and min(shape[2:]) < 3:
        return None
    arguments = [net.constant(widths)]
    if mode == "constant":
        arguments.append(net.constant(net.choice((0.0, 0.5)), "float32"))
    return net.add("Pad", x, *arguments, mode=mode)


def concat(net: Network, x: str) -> str | None:
    """Add a concatenation of the data, functions of them, and weights."""
    axis = net.integer(0, len(net.shape(x)) - 1)
    parts = [x, net.add(net.choice(("Sigmoid", "Relu", "Neg")), x)]
    if net.chance(0.4):
        shape = net.shape(x)
        shape[axis] = net.integer(1, 9)
        parts.append(net.weight(*shape))
    return net.add("Concat", *(parts[n] for n in net.permutation(len(parts))), axis=axis)


def gather(net: Network, x: str) -> str | None:
    """Add a choice of slices, with repetitions and from the end."""
    axis = net.integer(0, len(net.shape(x)) - 1)
    extent = net.shape(x)[axis]
    indices = [net.integer(-extent, extent - 1) for _ in range(net.integer(1, extent))]
    return net.add("Gather", x, net.constant(net.choice((indices, indices, indices[0]))), axis=axis)


def broadcast(net: Network, x: str) -> str | None:
    """Add repetitions of the data along a new axis or an old one."""
    shape = net.shape(x)
    axis = net.integer(0, len(shape) - 1)
    if net.chance(0.5) and len(shape) < 5:
        wide = net.add("Unsqueeze", x, net.constant([axis]))
        return net.add("Expand", wide, net.constant([*shape[:axis], 3, *shape[axis:]]))
    repeats = [2 if n == axis else 1 for n in range(len(shape))]
    return net.add("Tile", x, net.constant(repeats))


OPERATORS: Final[tuple[Operator, ...]] = (
    *(unary,) * 4,
    *(composed,) * 3,
    *(binary,) * 4,
    *(reduce,) * 2,
    softmax,
    transpose,
    reshape,
    *(slice_,) * 2,
    split,
    pad,
    concat,
    gather,
    broadcast,
)
"""Each operator as often as it is likely."""
