"""Recurrent layers over a dynamic number of steps, of a dynamic number of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import Array, Input, make_network, make_weights
from tvmflow.core.types import Dimension
from tvmflow.graph.ir_operators import NOTHING, Activation, Recurrent

STEPS = Dimension("steps", 1, 100)
BATCH = Dimension("batch", 1, 16)
HIDDEN, WIDTH = 21, 12
SIGMOID, TANH = Activation("sigmoid"), Activation("tanh")
FUNCTIONS = {"LSTM": (SIGMOID, TANH, TANH), "GRU": (SIGMOID, TANH), "RNN": (TANH,)}


def sigmoid(x: Array) -> Array:
    value: Array = 1 / (1 + np.exp(-x))
    return value


def lstm(gates: Array, c: Array) -> tuple[Array, Array]:
    entry, result, forget, new = np.split(gates, 4, -1)
    c = sigmoid(forget) * c + sigmoid(entry) * np.tanh(new)
    return sigmoid(result) * np.tanh(c), c


def rnn(gates: Array, c: Array) -> tuple[Array, Array]:
    return np.tanh(gates), c


def reference(kind: str, x: Array, w: Array, r: Array) -> list[Array]:
    """Return the states and the last ones of a layer of several directions, of which the second is reversed."""
    cell = lstm if kind == "LSTM" else rnn
    states, last, cells = [], [], []
    for direction in range(len(w)):
        h = np.zeros((x.shape[1], HIDDEN), np.float32)
        c, found = h, []
        for step in x[::-1] if direction else x:
            h, c = cell(step @ w[direction].T + h @ r[direction].T, c)
            found.append(h)
        states.append(np.stack(found[::-1] if direction else found))
        last.append(h)
        cells.append(c)
    results = [np.stack(states, 1), np.stack(last)]
    return [*results, np.stack(cells)] if kind == "LSTM" else results


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_any_number_of_steps_and_sequences(kind: str, directions: int) -> None:
    layer = Recurrent(
        kind=kind,
        is_reversed=(False, True)[:directions],
        activations=(FUNCTIONS[kind],) * directions,
        clip=None,
        has_coupled_gates=False,
        resets_product=False,
        is_batch_first=False,
    )
    rows = layer.gates * HIDDEN

    def body(emit: Any, x: Any, w: Any, r: Any) -> Any:
        results = emit(layer.call(x, w, r, *(NOTHING,) * 5))
        return [emit(relax.TupleGetItem(results, n)) for n in range(3 if kind == "LSTM" else 2)]

    weights = make_weights(w=[directions, rows, WIDTH], r=[directions, rows, HIDDEN])
    network = make_network((STEPS, BATCH), {"x": Input(("steps", "batch", WIDTH))}, weights, body)
    assert kind.lower() in network.list_kernels()
    network.agrees(
        lambda x, w, r: reference(kind, x, w, r),
        [{"steps": s, "batch": n} for s, n in ((1, 1), (7, 4), (37, 3), (5, 13), (100, 16))],
    )
