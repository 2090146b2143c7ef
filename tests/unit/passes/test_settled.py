"""Arithmetic on weights and constants with numpy gives the bits that TVM's kernels give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.kernels import FAST, host_level, weights_of
from tests.support.tuning import conv, dense, model, relu
from tvmflow.passes import settled
from tvmflow.stages import _lowering

op = relax.op


def normed(value: Any, weight: Any) -> Any:
    """A batch norm, whose scale and shift become weights."""
    channels = (int(value.ty.shape[1]),)
    return op.nn.batch_norm(value, *(weight(channels) for _ in range(4)), axis=1)[0]


def scaled(value: Any, weight: Any) -> Any:
    """A norm by hand."""
    along = (int(value.ty.shape[1]), 1, 1)
    scale = op.divide(weight((1, *along)), op.sqrt(weight((1, *along))))
    shift = op.subtract(op.negative(scale), weight(along))
    return op.add(op.multiply(value, scale), shift)


def transposed(value: Any, weight: Any) -> Any:
    return op.nn.conv2d_transpose(value, weight((int(value.ty.shape[1]), 8, 3, 3)), strides=2)


def shared(value: Any, weight: Any) -> Any:
    """One number for all channels."""
    return op.multiply(value, op.negative(weight(())))


def squashed(value: Any, weight: Any) -> Any:
    """Weights go through an operator that numpy rounds in its own way."""
    return op.add(value, op.tanh(weight((1, int(value.ty.shape[1]), 1, 1))))


def positive(mod: tvm.IRModule) -> dict[str, Any]:
    """Random weights of which each has a root."""
    return {name: np.asarray(np.abs(array)) for name, array in weights_of(mod).items()}


def folded(mod: tvm.IRModule, kernels: dict[str, Any]) -> list[Any]:
    made = _lowering.make_target(host_level())
    return [each.numpy() for each in _lowering.fold_weights(mod, positive(mod), made, kernels)]


@pytest.mark.parametrize("precision", ["model", "mixed"])
@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((1, 3, 10, 10), [conv(20), normed, relu, conv(12, 1), normed]),
        ((1, 20, 9, 9), [scaled, conv(20), scaled, shared]),
        ((1, 64, 24, 24), [conv(64)]),
        ((1, 16, 5, 5), [transposed]),
        ((3, 40), [dense(21)]),
    ],
    ids=["norms", "by hand", "tiles", "transposed", "dense"],
)
def test_numpy_gives_the_bits_that_kernels_give(
    shape: tuple[int, ...], layers: list[Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does not matter for a library's bytes which of them computed its weights."""
    mod, kernels = model(*layers, shape=shape), {**FAST, "precision": precision}
    found: list[Any] = []

    def kept(function: relax.Function, weights: Sequence[Any]) -> None:
        found.extend(settled.settled(function, weights) or [])

    monkeypatch.setattr(_lowering, "settled", kept)
    by_kernels = folded(mod, kernels)
    assert [each.dtype for each in found] == [each.dtype for each in by_kernels]
    assert [each.shape for each in found] == [each.shape for each in by_kernels]
    assert [each.tobytes() for each in found] == [each.tobytes() for each in by_kernels]


def test_what_numpy_rounds_in_its_own_way_is_left_to_kernels() -> None:
    """All weights of such a model are computed as one function."""
    mod = model(squashed, shape=(1, 16, 5, 5))
    _, weights = _lowering._split(mod)
    assert weights is not None
    assert settled.settled(weights["main"], list(positive(mod).values())) is None
    [weight] = positive(mod).values()
    assert np.allclose(folded(mod, FAST)[0].ravel(), np.tanh(weight).ravel(), atol=1e-6)


def test_constants_become_one_constant() -> None:
    """What they hold is moved and rounded; what depends on data or has no rule stays."""
    table = np.arange(6, dtype=np.int64).reshape(2, 3)

    def shifted(value: Any, _: Any) -> Any:
        moved = op.permute_dims(op.reshape(relax.const(table, "int64"), (3, 2)))
        return op.add(value, op.multiply(op.astype(moved, "float32"), relax.const(0.5)))

    mod = model(shifted, shape=(2, 3))
    bindings = settled.settle_constants(mod)["main"].body.blocks[0].bindings
    [call] = [each.value for each in bindings if isinstance(each.value, relax.Call)]
    assert call.op.name == "relax.add"
    assert np.array_equal(call.args[1].value.numpy(), table.reshape(3, 2).T * 0.5)
