"""Recurrent layers whose weights are int8, beside numpy: with a state of floats, and with one of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import Array, Input, make_network
from tests.support.kernels import dot_target, host_level, level
from tvmflow.compiler import lowering
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.core.types import Dimension
from tvmflow.graph import ir
from tvmflow.graph.ir_operators import NOTHING, STATE_STEPS, Activation, Recurrent
from tvmflow.targets.tvm_target import make_target

SIGMOID, TANH = Activation("sigmoid"), Activation("tanh")
FUNCTIONS = {"LSTM": (SIGMOID, TANH, TANH), "GRU": (SIGMOID, TANH), "RNN": (TANH,)}
STEPS, WIDTH = 7, 12


class Layer(NamedTuple):
    """A layer, of which everything that ONNX lets out is given or nothing.

    Attributes:
        kind: Its operator.
        hidden: Its units.
        directions: Its directions.
        has_all: Whether biases, lengths, initial states, peepholes and a clip are given.
        resets_product: Whether a GRU resets the product.
        bits: The bits of its weights.
        is_rounded: Whether its state is rounded.
    """

    kind: str
    hidden: int = 37
    directions: int = 2
    has_all: bool = True
    resets_product: bool = False
    bits: int = 8
    is_rounded: bool = True

    @property
    def operator(self) -> Recurrent:
        return Recurrent(
            kind=self.kind,
            is_reversed=(False, True)[: self.directions],
            activations=(FUNCTIONS[self.kind],) * self.directions,
            clip=1.5 if self.has_all else None,
            has_coupled_gates=False,
            resets_product=self.resets_product,
            is_batch_first=False,
        )

    def draw(self) -> dict[str, Array]:
        """Return its weights and biases by name."""
        rng = np.random.default_rng(0)
        gates, most = self.operator.gates, {8: 127, 7: 64}[self.bits]
        rows = self.directions * gates * self.hidden
        arrays = {
            "w": rng.uniform(-1, 1, (WIDTH, rows)) / 3,
            "scales": rng.uniform(1, 2, rows) / most * 1.7 / self.hidden**0.5,
            "b": rng.uniform(-0.5, 0.5, (self.directions, 2 * gates * self.hidden)),
            "p": rng.uniform(-0.5, 0.5, (self.directions, 3 * self.hidden)),
        }
        floats = {name: array.astype(np.float32) for name, array in arrays.items()}
        integers = rng.integers(-most, most + 1, (rows, self.hidden)).astype(np.int8)
        # sums of pairs are as large as they can be
        integers[0] = most
        return {**floats, "r": integers}


def make(layer: Layer, steps: Any, batch: Any, dimensions: Sequence[Dimension] = ()) -> Any:
    """Return the network of a layer, with random weights."""
    arrays = layer.draw()
    scales = arrays.pop("scales")
    sizes = (layer.directions, batch, layer.hidden)
    inputs = {"x": Input((steps, batch, WIDTH))}
    if layer.has_all:
        inputs |= {"h": Input(sizes), "c": Input(sizes), "lengths": Input((batch,), "int32")}

    def body(
        emit: Any, x: Any, w: Any, b: Any, p: Any, r: Any, h: Any = NOTHING, **given: Any
    ) -> Any:
        product = emit(relax.op.matmul(x, w))
        zeros = relax.const(np.zeros(scales.shape, np.int8))
        real = emit(relax.op.dequantize(r, relax.const(scales), zeros, axis=0))
        others = [b, given["lengths"], h, given["c"], p] if layer.has_all else [NOTHING] * 5
        if layer.kind != "LSTM":
            others[3:] = [NOTHING] * 2
        rounding = relax.const(np.array([0, 1], np.float32)) if layer.is_rounded else NOTHING
        results = emit(layer.operator.call(product, NOTHING, real, *others, rounding))
        return [emit(relax.TupleGetItem(results, n)) for n in range(2 + (layer.kind == "LSTM"))]

    network = make_network(dimensions, inputs, arrays, body)
    if layer.bits < 8:
        main = network.mod["main"].with_attr(ir.SEVEN_BIT_WEIGHTS, True)
        network.mod.update_func(network.mod.get_global_var("main"), main)
    return network, {**arrays, "scales": scales}


def sigmoid(x: Array) -> Array:
    value: Array = 1 / (1 + np.exp(-x))
    return value


def compute(
    layer: Layer, feed: Mapping[str, Array], arrays: Mapping[str, Array], actual: Array
) -> list[Array]:
    """Return all states and the last ones, by the equations of ONNX.

    Each step begins with the actual state before it: one that is a bit off could be rounded to another integer.
    """
    exact = {name: array.astype(np.float64) for name, array in {**arrays, **feed}.items()}
    count, batch, hidden = layer.operator.gates, feed["x"].shape[1], layer.hidden
    shape = (layer.directions, count, hidden)
    products = (exact["x"] @ exact["w"]).reshape(-1, batch, *shape)
    weights = (exact["r"] * exact["scales"][:, None]).reshape(*shape, hidden)
    bias = exact["b"].reshape(layer.directions, 2, count, hidden) * layer.has_all
    peepholes = exact["p"].reshape(layer.directions, 3, hidden) * layer.has_all
    zeros = np.zeros((layer.directions, batch, hidden))
    steps = len(products)
    lengths = feed.get("lengths", np.full(batch, steps))
    states = np.zeros((steps, layer.directions, batch, hidden))
    h, c = exact.get("h", zeros).copy(), exact.get("c", zeros).copy()
    limit = 1.5 if layer.has_all else np.inf

    def clip(x: Array) -> Array:
        return np.clip(x, -limit, limit)

    def multiply(state: Array, matrix: Array) -> Array:
        if layer.is_rounded:
            # one instruction multiplies and rounds
            number = np.clip(state.astype(np.float32), -1, 1).astype(np.float64)
            state = np.rint(number * STATE_STEPS) / STATE_STEPS
        return state @ matrix.T

    for d in range(layer.directions):
        for n in range(batch):
            for t in range(lengths[n]):
                place = lengths[n] - 1 - t if d else t
                of_input = products[place, n, d] + bias[d, 0]
                own, cell, peek = h[d, n], c[d, n], peepholes[d]
                product = [multiply(own, matrix) for matrix in weights[d]]
                gates = [of_input[g] + bias[d, 1, g] + product[g] for g in range(count)]
                if layer.kind == "LSTM":
                    entry = sigmoid(clip(gates[0] + peek[0] * cell))
                    forget = sigmoid(clip(gates[2] + peek[2] * cell))
                    c[d, n] = forget * cell + entry * np.tanh(clip(gates[3]))
                    h[d, n] = sigmoid(clip(gates[1] + peek[1] * c[d, n])) * np.tanh(c[d, n])
                elif layer.kind == "RNN":
                    h[d, n] = np.tanh(clip(gates[0]))
                else:
                    update, reset = sigmoid(clip(gates[0])), sigmoid(clip(gates[1]))
                    if layer.resets_product:
                        new = of_input[2] + reset * (product[2] + bias[d, 1, 2])
                    else:
                        new = of_input[2] + bias[d, 1, 2] + multiply(reset * own, weights[d, 2])
                    h[d, n] = (1 - update) * np.tanh(clip(new)) + update * own
                states[place, d, n] = h[d, n]
                if t + 1 < lengths[n]:
                    h[d, n] = actual[place, d, n]
    return [states, h, c] if layer.kind == "LSTM" else [states, h]


def draw(layer: Layer, steps: int, batch: int) -> dict[str, Array]:
    """Return inputs; some of the initial states are larger than a rounded one can be."""
    rng = np.random.default_rng(1)
    feed: dict[str, Array] = {"x": rng.normal(size=(steps, batch, WIDTH)).astype(np.float32)}
    if layer.has_all:
        shape = (layer.directions, batch, layer.hidden)
        feed |= {name: rng.uniform(-1.2, 1.2, shape).astype(np.float32) for name in "hc"}
        feed["lengths"] = rng.integers(1, steps + 1, batch).astype(np.int32)
    return feed


def compare(network: Any, target: Any, layer: Layer, *sizes: tuple[int, int]) -> None:
    """Check that a network computes what numpy does."""
    made, arrays = network
    run = made.compile(target)
    for steps, batch in sizes:
        feed = draw(layer, steps, batch)
        results = run(**feed)
        expected = compute(layer, feed, arrays, results[0])
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5, err_msg=str(sizes))


LAYERS = [
    Layer("LSTM"),
    # threads share its units
    Layer("LSTM", hidden=224, directions=1, has_all=False),
    Layer("GRU"),
    Layer("GRU", resets_product=True),
    Layer("RNN", hidden=20),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_dot_products_of_bytes(layer: Layer, batch: int) -> None:
    """With VNNI, the state becomes bytes at each step; sums of bytes are exact."""
    network = make(layer, STEPS, batch)
    compare(network, dot_target("avx512_vnni"), layer, (STEPS, batch))


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[3]], ids=repr)
def test_pairs_of_bytes(layer: Layer) -> None:
    """Without VNNI, weights have 7 bits, of which no sum of two products overflows."""
    layer = layer._replace(bits=7)
    compare(make(layer, STEPS, 3), level("x86-64-v3"), layer, (STEPS, 3))


@pytest.mark.parametrize("mcpu", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_a_state_of_floats(mcpu: str) -> None:
    """Any CPU makes floats of weights in registers; weights of 8 bits are too large for pairs of bytes."""
    layer = LAYERS[0]._replace(is_rounded=False)
    compare(make(layer, STEPS, 3), level(mcpu), layer, (STEPS, 3))
    rounded = LAYERS[2]
    compare(make(rounded, STEPS, 1), level(mcpu), rounded, (STEPS, 1))


@pytest.mark.parametrize("is_rounded", [True, False])
def test_dynamic_shapes(is_rounded: bool) -> None:
    """One library computes any number of steps and sequences."""
    layer = LAYERS[0]._replace(is_rounded=is_rounded)
    dimensions = (Dimension("steps", 1, 50), Dimension("batch", 1, 9))
    network = make(layer, "steps", "batch", dimensions)
    target = dot_target("avx512_vnni") if is_rounded else host_level()
    compare(network, target, layer, (1, 1), (6, 4), (11, 7))


@pytest.mark.parametrize(
    ("mcpu", "instruction"), [("neoverse-n1", "sdot"), ("cortex-a72", "sadalp")]
)
def test_arm(mcpu: str, instruction: str) -> None:
    """64-bit Arm multiplies signed bytes: four products an instruction, or pairs of them."""
    network, _ = make(LAYERS[0], STEPS, 3)
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 1}
    library = (
        lowering.lower(network.mod, make_target(target), LoweringOptions())
        .schedule_untuned(network.weights, target, SCHEDULES_VERSION)
        .compile()
    )
    assert instruction in library.mod.imports[0].inspect_source("asm")
