"""Random small networks: many kinds of operators in any order, on random shapes, from a seed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx

from tests.support.random_networks import conditions, elementwise, images, sequences
from tests.support.random_networks.network import Network, Operator

Feed = dict[str, np.ndarray[Any, Any]]

OPERATORS: Final[tuple[Operator, ...]] = (
    *images.OPERATORS,
    *sequences.OPERATORS,
    *elementwise.OPERATORS,
)
_MAX_ELEMENTS: Final = 60_000


def draw_network(seed: int) -> tuple[onnx.ModelProto, Feed]:
    """Return a network of 5 to 15 operators, many of them blocks of several nodes, and its inputs."""
    return _draw(Network(seed), OPERATORS)


def draw_network_of_conditions(seed: int) -> tuple[onnx.ModelProto, Feed]:
    """Return a network, half of whose operators are about conditions and integers, and its inputs."""
    others = elementwise.OPERATORS
    repeats = -(-len(others) // len(conditions.OPERATORS))
    return _draw(Network(seed), (*others, *conditions.OPERATORS * repeats))


def _draw(net: Network, operators: tuple[Operator, ...]) -> tuple[onnx.ModelProto, Feed]:
    """Return a network of some of these operators, and its inputs."""
    values = [_draw_input(net)]
    if net.chance(0.2):
        values.append(_draw_input(net))
    count = net.integer(5, 15)
    for _ in range(20 * count):
        # Mostly the newest value, so that networks are deep; others then have several readers.
        value = values[-1] if net.chance(0.7) else net.choice(values)
        made = net.choice(operators)(net, value)
        if made and net.size(made) <= _MAX_ELEMENTS:
            values.append(made)
            count -= 1
        if count == 0:
            break
    return net.model([value for value in values if value not in net.read or net.chance(0.15)])


def _draw_input(net: Network) -> str:
    """Add an input: mostly an image, a sequence or a volume, else tokens."""
    batch = net.choice((1, 1, 2, 3))
    if net.chance(0.25):
        return net.input(batch, net.choice((1, 7, 16, 19, 33)), net.choice((8, 17, 24, 48, 64)))
    rank = net.choice((1, 2, 2, 2, 3))
    longest = {1: 70, 2: 34, 3: 11}[rank]
    return net.input(batch, net.channels(), *(net.integer(3, longest) for _ in range(rank)))
