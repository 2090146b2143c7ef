"""Matrix products with weights are right for any number of rows and columns, and have a tiled schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax

from tests.support.kernels import FAST, LEVELS_HERE, kernels_of, level, outputs
from tests.support.onnx_models import draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering, schedules
from tvmflow.targets.tvm_target import make_target

_ROWS = (1, 2, 3, 7, 13, 17, 19, 29, 49, 50, 197, 257)
_COLUMNS = (1, 2, 3, 6, 7, 10, 15, 16, 17, 24, 29, 31, 33, 92, 100, 257)
_DEPTHS = (1, 2, 5, 16, 33, 64, 100)


def check(seed: int, folder: Path) -> None:
    """Compare a dense layer of a random shape, and what follows it, with numpy."""
    rng = random.Random(seed)
    rows, columns, depth = rng.choice(_ROWS), rng.choice(_COLUMNS), rng.choice(_DEPTHS)
    outer = rng.choice(((), (1,), (2,), (2, 3)))
    x, weights = draw(*outer, rows, depth, seed=seed), draw(depth, columns, seed=seed + 1)
    bias, other = draw(columns, seed=seed + 2), draw(*outer, rows, columns, seed=seed + 3)
    expected, result = x @ weights, "y"
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if rng.random() < 0.7:
        nodes.append(helper.make_node("Add", [result, "b"], ["biased"]))
        expected, result = expected + bias, "biased"
    if rng.random() < 0.5:
        nodes.append(helper.make_node("Add", ["r", result], ["sum"]))
        expected, result = other + expected, "sum"
    if rng.random() < 0.5:
        nodes.append(helper.make_node("Relu", [result], ["z"]))
        expected, result = np.maximum(expected, 0), "z"
    feed: dict[str, Any] = {"x": x, "r": other}
    made = model(
        nodes,
        [value(name, array.shape) for name, array in feed.items()],
        [value(result, expected.shape)],
        {"w": weights, "b": bias},
    )
    loaded = load(made, folder, feed)
    target = level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    lowered = lowering.lower(loaded.mod, make_target(target), FAST)
    scheduled = schedules.schedule_untuned(lowered.mod, target, 1)
    assert set(scheduled.rules.values()) == {"register_tiles"}, (rows, depth, columns)
    weight_arrays = lowered.compute_weights(loaded.params)
    library = lowering.ScheduledModel(scheduled.mod, weight_arrays, make_target(target)).compile()
    arguments = [tvm.runtime.tensor(feed[spec.name]) for spec in loaded.inputs]
    actual = relax.VirtualMachine(library, tvm.cpu())["main"](*arguments)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", seeds(6, 15, 120))
def test_products_of_any_shape_agree(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


def check_batched(seed: int, folder: Path) -> None:
    """Compare a product of two inputs with numpy; either may be transposed or broadcast."""
    rng = random.Random(seed)
    rows, columns, depth = rng.choice(_ROWS), rng.choice(_COLUMNS), rng.choice(_DEPTHS)
    left_batch, right_batch = rng.choice(
        (((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((5,), (1,)))
    )
    transposed = rng.random() < 0.5
    left = draw(*left_batch, rows, depth, seed=seed)
    right = draw(
        *right_batch, *((columns, depth) if transposed else (depth, columns)), seed=seed + 1
    )
    order = [*range(len(right_batch)), len(right_batch) + 1, len(right_batch)]
    nodes = [
        *([helper.make_node("Transpose", ["b"], ["t"], perm=order)] if transposed else []),
        helper.make_node("MatMul", ["a", "t" if transposed else "b"], ["y"]),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    feed = {"a": left, "b": right}
    expected = np.maximum(left @ (right.swapaxes(-1, -2) if transposed else right), 0)
    made = model(
        nodes,
        [value(name, array.shape) for name, array in feed.items()],
        [value("z", expected.shape)],
    )
    loaded = load(made, folder, feed)
    target = level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    (actual,) = outputs(loaded, feed, target)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", seeds(4, 10, 80))
def test_batched_products_of_any_shape_agree(seed: int, tmp_path: Path) -> None:
    check_batched(seed, tmp_path)


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize(
    ("left", "right", "is_packed"),
    [
        ((77, 1, 100), (77, 100, 1), False),
        ((5, 30, 33), (5, 33, 1), False),
        ((1, 3), (3, 1), False),
        ((5, 30, 33), (5, 33, 2), True),
    ],
)
def test_sums_of_products_of_data_are_not_packed(
    left: tuple[int, ...], right: tuple[int, ...], is_packed: bool, mcpu: str, tmp_path: Path
) -> None:
    """A matrix of one column fills one lane of a vector; rows of both are multiplied instead."""
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [value("x", left), value("w", right)],
        [value("y", [*left[:-1], right[-1]])],
    )
    feed = {"x": draw(*left, seed=1), "w": draw(*right, seed=2)}
    loaded = load(made, tmp_path)
    assert ("batched_matmul" in kernels_of(loaded.mod, level(mcpu))) == is_packed
    (actual,) = outputs(loaded, feed, level(mcpu))
    np.testing.assert_allclose(actual, feed["x"] @ feed["w"], rtol=1e-4, atol=1e-4)


def test_sums_of_products_across_rows_are_packed(tmp_path: Path) -> None:
    """The factors of a transposed matrix lie apart."""
    made = model(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["t", "w"], ["y"]),
        ],
        [value("x", (5, 33, 30)), value("w", (5, 33, 1))],
        [value("y", (5, 30, 1))],
    )
    feed = {"x": draw(5, 33, 30, seed=1), "w": draw(5, 33, 1, seed=2)}
    loaded = load(made, tmp_path)
    assert "batched_matmul" in kernels_of(loaded.mod, level(LEVELS_HERE[-1]))
    (actual,) = outputs(loaded, feed)
    np.testing.assert_allclose(actual, feed["x"].swapaxes(1, 2) @ feed["w"], rtol=1e-4, atol=1e-4)
