"""Block-quantized weights lose little, less with calibration data, and are the same bits on any machine."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import DynamicNetwork, Input, make_network
from tests.support.kernels import DOT_TARGETS, LEVELS_HERE, dot_target, level
from tvmflow.core.types import Dimension
from tvmflow.stages.quantize.insertion import Quantization, insert, read_weights
from tvmflow.stages.quantize.points import FloatModel, Integers, list_layers
from tvmflow.stages.quantize.weights import (
    BlockQuantizedIntegers,
    Groups,
    InputProducts,
    error_of,
    round_groups,
)

KINDS = {
    "4 bits": Groups(),
    "large groups": Groups(size=128),
    "8 bits": Groups(bits=8),
}


def draw_layer(depth: int = 256, columns: int = 48) -> tuple[Any, Any]:
    """Return weights (columns, depth), and data whose inputs depend on each other."""
    random = np.random.default_rng(2)
    mix = random.standard_normal((depth, depth)) / 16 + np.eye(depth)
    data = random.standard_normal((400, depth)) @ mix
    return random.standard_normal((columns, depth)) / 20, data.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_data_lower_the_error_of_results(kind: str) -> None:
    weights, data = draw_layer()
    products = InputProducts(256, KINDS[kind].size)
    for rows in np.split(data, 4):
        products.add(rows)
    nearest, calibrated = (round_groups(weights, KINDS[kind], known) for known in (None, products))
    exact = data @ weights.T
    errors = [
        float(np.square(data @ rounded.to_float().T - exact).mean() / np.square(exact).mean())
        for rounded in (nearest, calibrated)
    ]
    assert error_of(weights, nearest) < (0.11 if KINDS[kind].bits == 4 else 0.007)
    assert errors[1] < errors[0] * 0.6


def test_bits_are_those_of_any_machine() -> None:
    """No result may depend on the order in which a library adds up."""
    weights, data = draw_layer()
    products = InputProducts(256, 32)
    products.add(np.rint(data * 64) / 64)
    rounded = round_groups(np.rint(weights * 1024) / 1024, Groups(), products)
    content = b"".join(array.tobytes() for array in rounded.pack().values())
    assert hashlib.sha256(content).hexdigest()[:16] == "ebf345556cc611af"


def test_candidates_that_cannot_be_the_best_may_be_skipped() -> None:
    """The scales are the same ones as if each candidate were compared, also of rows with an outlier."""
    weights = np.rint(draw_layer()[0] * 1024) / 1024
    weights[::3, 7] *= 40
    weights[5] = 0
    rounded = round_groups(weights, KINDS["8 bits"])
    content = b"".join(array.tobytes() for array in rounded.pack().values())
    assert hashlib.sha256(content).hexdigest()[:16] == "ee5e0e4bfb8b42bf"


@pytest.mark.parametrize("fill", [0.0, 1e-42, -7.0, 3e38, np.nan])
def test_rows_of_one_number_stay_finite(fill: float) -> None:
    weights = np.full((3, 40), fill, np.float32)
    for groups in KINDS.values():
        real = round_groups(weights, groups).to_float()
        expected = np.where(np.isnan(weights) | (np.abs(weights) < 1e-38), 0, weights)
        np.testing.assert_allclose(real, expected, rtol=0.01)


def test_data_that_are_not_finite_are_left_out() -> None:
    products, clean = InputProducts(8, 8), InputProducts(8, 8)
    data = np.arange(16, dtype=np.float32).reshape(2, 8)
    clean.add(data)
    products.add(np.concatenate([data, np.full((1, 8), np.nan), np.full((1, 8), np.inf)]))
    np.testing.assert_array_equal(products.blocks[0], clean.blocks[0])


# ---------------------------------------------------------------- kernels


def make_product(rounded: BlockQuantizedIntegers, *, rounds_data: bool = False) -> DynamicNetwork:
    """Return a product of a dynamic number of rows with block-quantized weights."""
    operator = replace(rounded.operator, rounds_data=rounds_data)

    def body(emit: Any, x: Any, **operands: Any) -> Any:
        weights = emit(operator.call(*operands.values()))
        return emit(relax.op.matmul(x, emit(relax.op.permute_dims(weights))))

    inputs = {"x": Input(("rows", rounded.depth))}
    return make_network((Dimension("rows", 1, 64),), inputs, rounded.pack(), body)


TARGETS: dict[str, Any] = {
    **{flag: lambda flag=flag: dot_target(flag) for flag in DOT_TARGETS},
    **{mcpu: lambda mcpu=mcpu: level(mcpu) for mcpu in LEVELS_HERE},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_take_any_number_of_rows(kind: str, target: str) -> None:
    """Scales of bfloat16, a last group that is not whole, and columns that fill no tile."""
    weights, _ = draw_layer(200, 72)
    network = make_product(round_groups(weights, KINDS[kind]))
    assert any("grouped_matmul" in name for name in network.list_kernels(TARGETS[target]()))
    real = round_groups(weights, KINDS[kind]).to_float().T
    sizes = [{"rows": rows} for rows in (1, 2, 4, 7, 13)]
    network.agrees(lambda x, **_: x @ real, sizes, TARGETS[target]())


def test_models_get_weights_in_groups() -> None:
    """A product of float weights reads them in 4.5 bits each, with the error that rounding has."""
    weights, _ = draw_layer(64, 48)
    params = {"w": np.ascontiguousarray(weights.T, np.float32)}
    inputs = {"x": Input((3, 64))}
    network = make_network((), inputs, params, lambda emit, x, w: emit(relax.op.matmul(x, w)))
    model = FloatModel(network.mod, params, ())
    [layer] = list_layers(model)
    rounded = round_groups(read_weights(model, [layer])[layer.var].T)
    quantization = Quantization(Integers("uint8"), {layer.var: rounded}, {})
    made = insert(model, [layer], quantization)
    assert sum(array.nbytes for array in made.params.values()) == 64 * 48 * 4.5 / 8
    quantized = DynamicNetwork(made.mod, inputs, made.params)
    assert quantized.list_kernels() == ["grouped_matmul"]
    real = rounded.to_float().T
    quantized.agrees(lambda x, **_: x @ real, [{}])


@pytest.mark.parametrize("target", TARGETS)
def test_rounded_data_cost_little(target: str) -> None:
    weights, _ = draw_layer(200, 72)
    rounded = round_groups(weights)
    network = make_product(rounded, rounds_data=True)
    real = rounded.to_float().T
    network.agrees(lambda x, **_: x @ real, [{"rows": 1}, {"rows": 5}], TARGETS[target](), 2e-2)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e36, 1e-40, 0.0])
@pytest.mark.parametrize("target", TARGETS)
def test_extreme_data_give_what_floats_give(value: float, target: str) -> None:
    """A NaN or an infinity reaches all results, which float32 would make NaN or infinite as well."""
    weights, _ = draw_layer(64, 16)
    rounded = round_groups(weights)
    run = make_product(rounded).compile(TARGETS[target]())
    data = np.ones((1, 64), np.float32) if not np.isfinite(value) else np.zeros((1, 64), np.float32)
    data[0, 5] = value
    [actual] = run(x=data)
    if np.isfinite(value):
        expected = data @ rounded.to_float().T
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-38)
    else:
        assert not np.isfinite(actual).any()
