"""Evaluation of weights and constants with numpy gives the bits that TVM's kernels give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.kernels import FAST, host_level, weights_of
from tests.support.tuning import conv, dense, model, relu
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.passes.lift_weights import lift_weights, split_weights
from tvmflow.graph import evaluation
from tvmflow.targets.tvm_target import make_target

op = relax.op


def normed(value: Any, weight: Any) -> Any:
    """Return a batch norm, whose scale and shift become weights."""
    channels = (int(value.ty.shape[1]),)
    return op.nn.batch_norm(value, *(weight(channels) for _ in range(4)), axis=1)[0]


def scaled(value: Any, weight: Any) -> Any:
    """Return a norm made of elementwise operators."""
    along = (int(value.ty.shape[1]), 1, 1)
    scale = op.divide(weight((1, *along)), op.sqrt(weight((1, *along))))
    shift = op.subtract(op.negative(scale), weight(along))
    return op.add(op.multiply(value, scale), shift)


def transposed(value: Any, weight: Any) -> Any:
    return op.nn.conv2d_transpose(value, weight((int(value.ty.shape[1]), 8, 3, 3)), strides=2)


def shared(value: Any, weight: Any) -> Any:
    """Return data multiplied by one number for all channels."""
    return op.multiply(value, op.negative(weight(())))


def squashed(value: Any, weight: Any) -> Any:
    """Return a sum with weights of an operator that numpy rounds differently."""
    return op.add(value, op.tanh(weight((1, int(value.ty.shape[1]), 1, 1))))


def moved(value: Any, weight: Any) -> Any:
    """Return data plus weights that are sliced, taken, joined, compared and broadcast."""
    table, other = weight((5, 7)), weight((5, 7))
    indices = relax.const(np.array([[4, -1], [0, 2]], np.int64))
    taken = op.take(table, indices, axis=0, mode="wrap")
    part = op.strided_slice(other, [0, 1], [1, -6], [99, -1], [2, 1])
    bigger = op.where(op.greater(table, other), table, op.concat([other], axis=0))
    rows = op.take(bigger, relax.const(np.arange(2)), axis=0)
    gathered = op.gather_elements(rows, relax.const(np.array([[6, 1], [0, 2]])), axis=1)
    spread = op.broadcast_to(op.reshape(part, (2, 5, 1)), (2, 5, 3))
    size = op.astype(op.shape_to_tensor(op.shape_of(spread)), "float32")
    sizes = {28: taken, 10: part, 35: bigger, 4: gathered, 30: spread, 3: size}
    flat = [op.reshape(expr, (count,)) for count, expr in sizes.items()]
    return op.add(value, op.reshape(op.concat(flat, axis=0), (1, 110)))


def positive(mod: tvm.IRModule) -> dict[str, Any]:
    """Return random weights that all have a square root."""
    return {name: np.asarray(np.abs(array)) for name, array in weights_of(mod).items()}


def compute_weights(mod: tvm.IRModule, options: LoweringOptions) -> list[Any]:
    lowered = lowering.lower(mod, make_target(host_level()), options)
    return lowered.compute_weights(positive(mod))


@pytest.mark.parametrize("precision", ["model", "mixed"])
@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((1, 3, 10, 10), [conv(20), normed, relu, conv(12, 1), normed]),
        ((1, 20, 9, 9), [scaled, conv(20), scaled, shared]),
        ((1, 64, 24, 24), [conv(64)]),
        ((1, 16, 5, 5), [transposed]),
        ((3, 40), [dense(21)]),
        ((1, 110), [moved]),
    ],
    ids=["norms", "elementwise norms", "winograd", "transposed", "dense", "moved"],
)
def test_numpy_gives_the_bits_that_kernels_give(
    shape: tuple[int, ...],
    layers: list[Any],
    precision: Literal["model", "mixed"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library has the same bytes whichever of them computed its weights."""
    mod, options = model(*layers, shape=shape), replace(FAST, precision=precision)
    by_numpy: list[Any] = []

    def collect(function: relax.Function, weights: Sequence[Any]) -> None:
        by_numpy.extend(evaluation.evaluate_function(function, weights) or [])

    monkeypatch.setattr(lowering, "evaluate_function", collect)
    by_kernels = compute_weights(mod, options)
    assert len(by_numpy) == len(by_kernels)
    for actual, expected in zip(by_numpy, by_kernels, strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()


def test_weights_that_stay_the_same_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a changed one is part of has the bits that it has where all are computed."""
    mod = model(conv(16), normed, relu, conv(24, 1), shape=(1, 3, 10, 10))
    lowered = lowering.lower(mod, make_target(host_level()), FAST)
    before = positive(mod)
    computed = lowered.compute_weights(before)
    name = min(name for name, array in before.items() if array.shape == (16,))
    after = {**before, name: before[name] + 1}
    expected = lowered.compute_weights(after)
    apply_rule, calls = evaluation._apply_rule, list[Any]()

    def count(call: Any, arrays: Sequence[Any]) -> Any:
        calls.append(call)
        return apply_rule(call, arrays)

    monkeypatch.setattr(evaluation, "_apply_rule", count)
    again = lowered.recompute_weights(after, before)
    assert lowered.recompute_weights(before, before) == {}
    assert 0 < len(again) < len(computed)
    used = len(calls)
    lowered.compute_weights(after)
    assert used < len(calls) - used
    for place, weights in enumerate(expected):
        assert again.get(place, computed[place]).tobytes() == weights.tobytes()


def added(value: Any, weight: Any) -> Any:
    return op.add(value, weight((5,)))


def test_weights_that_are_all_used_unchanged_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TVM would need a C compiler of the machine to link a function without kernels."""
    mod = model(added, added, shape=(2, 5))
    params = positive(mod)

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(tvm, "compile", refuse)
    lowered = lowering.lower(mod, make_target(host_level()), FAST)
    assert lowered.weight_mod is not None
    computed = lowered.compute_weights(params)
    assert [array.tobytes() for array in computed] == [array.tobytes() for array in params.values()]
    second = lowered.weight_names[1]
    changed = {**params, second: params[second] + 1}
    [(place, array)] = lowered.recompute_weights(changed, params).items()
    assert place == 1 and array.tobytes() == changed[second].tobytes()


def test_operators_that_numpy_rounds_differently_are_left_to_kernels() -> None:
    """All weights of such a model are computed by one compiled function."""
    mod = model(squashed, shape=(1, 16, 5, 5))
    weights = split_weights(lift_weights(mod))
    assert weights is not None
    assert evaluation.evaluate_function(weights["main"], list(positive(mod).values())) is None
    [weight] = positive(mod).values()
    assert np.allclose(compute_weights(mod, FAST)[0].ravel(), np.tanh(weight).ravel(), atol=1e-6)


def test_constants_are_folded_into_one() -> None:
    """Calls that depend on data or have no rule stay."""
    table = np.arange(6, dtype=np.int64).reshape(2, 3)

    def shifted(value: Any, _: Any) -> Any:
        moved = op.permute_dims(op.reshape(relax.const(table, "int64"), (3, 2)))
        return op.add(value, op.multiply(op.astype(moved, "float32"), relax.const(0.5)))

    mod = model(shifted, shape=(2, 3))
    bindings = evaluation.evaluate_constants(mod)["main"].body.blocks[0].bindings
    [call] = [binding.value for binding in bindings if isinstance(binding.value, relax.Call)]
    assert call.op.name == "relax.add"
    assert np.array_equal(call.args[1].value.numpy(), table.reshape(3, 2).T * 0.5)


@pytest.mark.parametrize(
    ("shape", "axis", "scales"),
    [((), 0, ()), ((4,), 0, ()), ((1,), 0, (1,)), ((3, 4), 0, (3,)), ((3, 4), -1, (4,))],
)
def test_the_axis_of_one_scale_need_not_exist(
    shape: tuple[int, ...], axis: int, scales: tuple[int, ...]
) -> None:
    """ONNX quantizes a number like a tensor whose axis has one scale."""
    random = np.random.default_rng(0)
    data = np.asarray(random.integers(-128, 128, shape), np.int8)
    scale = np.asarray(random.random(scales), np.float32)
    parameters = (relax.const(scale), relax.const(np.ones(scales, np.int8)))

    def dequantized(value: Any, _: Any) -> Any:
        return op.add(value, op.dequantize(relax.const(data), *parameters, axis=axis))

    mod = evaluation.evaluate_constants(model(dequantized, shape=(3, 4)))
    bindings = mod["main"].body.blocks[0].bindings
    [call] = [binding.value for binding in bindings if isinstance(binding.value, relax.Call)]
    along = scale.reshape(-1, 1) if scales == (3,) else scale
    expected = np.multiply(data.astype(np.float32) - np.float32(1), along)
    assert np.array_equal(call.args[1].value.numpy(), expected)
