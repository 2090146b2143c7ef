"""Kernels of our own in place of those that TVM makes of operators: their numbers, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx.helper import make_node as node
from tvm import relax, tirx

from tests.support.kernels import FAST, LEVELS, kernels_of, level, outputs, run
from tests.support.onnx_models import load, model, open_session, value
from tvmflow.compiler import lowering, schedules
from tvmflow.graph.ir import find_nodes
from tvmflow.targets.tvm_target import make_target

ROWS = [
    *((64, 1), (1, 3), (50, 10), (3, 5, 16), (40, 49), (33, 97), (7, 128), (2, 3, 197), (100,)),
    (2, 1000),
]


def softmax_of(
    shape: tuple[int, ...], axis: int, operator: Any = relax.op.nn.softmax
) -> tvm.IRModule:
    """Return a model of one softmax, or of its logarithm."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x], {"num_input": 1}):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(operator(x, axis)))
        builder.emit_func_output(result)
    return builder.get()


def exact_softmax(data: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    """Return the softmax of numbers whose distances from the greatest are rounded to float32."""
    with np.errstate(invalid="ignore"):
        powers = np.exp((data - data.max(axis, keepdims=True)).astype(np.float64))
        return np.asarray(powers / powers.sum(axis, keepdims=True))


@pytest.mark.parametrize("mcpu", LEVELS)
@pytest.mark.parametrize("axis", [0, -1])
def test_a_softmax_is_within_a_few_units_in_the_last_place(axis: int, mcpu: str) -> None:
    """So it is of large numbers, and where numbers are masked; rows of NaN and infinity alone are NaN."""
    random = np.random.default_rng(2)
    for shape in ROWS:
        data = (random.standard_normal(shape) * random.choice([1, 30])).astype(np.float32)
        data[random.random(shape) < 0.2] = -np.inf
        data.reshape(-1)[0] = random.choice([0.5, np.nan, np.inf, 3e38])
        (actual,) = run(softmax_of(shape, axis), level(mcpu), FAST, data)
        expected = exact_softmax(data, axis)
        # what is below the least normal number is 0
        np.testing.assert_allclose(actual, expected, rtol=8e-7, atol=1.2e-38, err_msg=str(shape))


@pytest.mark.parametrize("axis", [1, 2])
def test_a_softmax_divides_once_for_each_row(axis: int) -> None:
    """All exponentials of a row are multiplied by the inverse of their sum."""
    target = level(LEVELS[-1])
    mod = lowering.lower(softmax_of((8, 64, 48), axis), make_target(target), FAST).mod
    blocks = find_nodes(mod["softmax"].body, tvm.s_tir.SBlock)
    ranks = [len(block.iter_vars) for block in blocks if find_nodes(block.body, tirx.Div)]
    # the last one is that of the block around all others
    assert ranks == [2, 0]


@pytest.mark.parametrize("mcpu", LEVELS)
def test_halves_of_the_partial_sums_of_a_row_are_added(mcpu: str) -> None:
    """Only two of them are added one after the other."""
    target = level(mcpu)
    mod = lowering.lower(softmax_of((64, 100), 1), make_target(target), FAST).mod
    scheduled = schedules.schedule_untuned(mod, target, 1)
    assert scheduled.rules == {"softmax": "row_reductions"}
    loops = find_nodes(scheduled.mod["softmax"].body, tirx.For)
    is_serial = [loop for loop in loops if int(loop.kind) == tirx.ForKind.SERIAL]
    assert sorted(int(loop.extent) for loop in is_serial)[:2] == [2, 2]
    assert min(int(loop.extent) for loop in is_serial if int(loop.extent) > 2) == -(
        -100 // lanes(mcpu)
    )


@pytest.mark.parametrize("mcpu", LEVELS)
@pytest.mark.parametrize("axis", [0, -1])
def test_the_logarithm_of_a_softmax(axis: int, mcpu: str) -> None:
    """It is finite where the softmax itself would vanish."""
    random = np.random.default_rng(3)
    for shape in ROWS:
        data = (random.standard_normal(shape) * random.choice([1, 300])).astype(np.float32)
        data.reshape(-1)[-1] = -np.inf if data.shape[axis] > 1 else 0.5
        mod = softmax_of(shape, axis, relax.op.nn.log_softmax)
        (actual,) = run(mod, level(mcpu), FAST, data)
        apart = data.astype(np.float64) - data.max(axis, keepdims=True)
        expected = apart - np.log(np.exp(apart).sum(axis, keepdims=True))
        np.testing.assert_allclose(actual, expected, rtol=3e-7, atol=4e-7, err_msg=str(shape))


@pytest.mark.parametrize("operator", [relax.op.nn.softmax, relax.op.nn.log_softmax])
def test_exponentials_are_added_in_the_loop_that_computes_them(operator: Any) -> None:
    """What is left of a row after the last whole vector is in a vector that overlaps it."""
    target = level(LEVELS[-1])
    mod = lowering.lower(softmax_of((64, 77), 1, operator), make_target(target), FAST).mod
    scheduled = schedules.schedule_untuned(mod, target, 1)
    (name,) = scheduled.rules
    loops = find_nodes(scheduled.mod[name].body, tirx.For)
    blocks = [
        [block.name_hint for block in find_nodes(loop.body, tvm.s_tir.SBlock)]
        for loop in loops
        if int(loop.kind) == tirx.ForKind.SERIAL
    ]
    assert [f"{name}_exp", f"{name}_total_rf"] in blocks


def test_cheap_numbers_are_computed_where_a_row_is_searched() -> None:
    """Stored first, they would be loaded across the stores of overlapping vectors."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((40, 53), "float32"))
    with builder.function("main", [x], {"num_input": 1}):
        with builder.dataflow():
            halves = builder.emit(relax.op.multiply(x, relax.const(0.5, "float32")))
            result = builder.emit_output(builder.emit(relax.op.max(halves, 1)))
        builder.emit_func_output(result)
    target = level(LEVELS[-1])
    mod = lowering.lower(builder.get(), make_target(target), FAST).mod
    scheduled = schedules.schedule_untuned(mod, target, 1)
    assert list(scheduled.rules.values()) == ["row_reductions"]
    (name,) = scheduled.rules
    names = {b.name_hint for b in find_nodes(scheduled.mod[name].body, tvm.s_tir.SBlock)}
    assert not any("multiply" in name for name in names)
    data = np.random.default_rng(0).standard_normal((40, 53)).astype(np.float32)
    (actual,) = run(builder.get(), target, FAST, data)
    np.testing.assert_array_equal(actual, data.max(1) / 2)


@pytest.mark.parametrize("mcpu", LEVELS)
@pytest.mark.parametrize("padding", ["border", "reflection"])
@pytest.mark.parametrize("aligns", [0, 1])
def test_samples_of_images_are_those_of_onnx_runtime(
    aligns: int, padding: str, mcpu: str, tmp_path: Path
) -> None:
    """Places are within images, at their edges and far beyond them; NaN and infinity are places within."""
    random = np.random.default_rng(aligns)
    for shape, size in (
        ((2, 3, 7, 19), (5, 37)),
        ((1, 2, 6, 1), (3, 17)),
        ((1, 1, 16, 33), (1, 4)),
    ):
        x = random.standard_normal(shape).astype(np.float32)
        grid = random.uniform(-4, 4, (shape[0], *size, 2)).astype(np.float32)
        grid.reshape(-1)[:6] = -1, 1, 0, -1, 1, 0.5
        made = model(
            [node("GridSample", ["x", "g"], ["y"], padding_mode=padding, align_corners=aligns)],
            [value("x", shape), value("g", grid.shape)],
            [value("y", [*shape[:2], *size])],
        )
        loaded, feed = load(made, tmp_path), {"x": x, "g": grid}
        assert "sample_grid" in kernels_of(loaded.mod, level(mcpu))
        (actual,) = outputs(loaded, feed, level(mcpu))
        (expected,) = open_session(made).run(None, feed)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4, err_msg=str(shape))
        grid.reshape(-1)[:6] = np.nan, np.inf, -np.inf, 1e30, -1e30, np.nan
        (actual,) = outputs(loaded, feed, level(mcpu))
        assert np.isfinite(actual).all()


def lanes(mcpu: str) -> int:
    return {"x86-64-v2": 4, "x86-64-v3": 8, "x86-64-v4": 16}[mcpu]
