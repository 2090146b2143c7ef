"""Every CPU that a recipe can name has code for every road."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from tests.support.kernels import FAST, weights_of
from tests.support.tuning import conv, model, relu
from tests.unit.passes.test_blocked_layouts import (
    biased,
    convolution,
    depthwise,
    pooled,
    transposed,
)
from tvmflow.passes import winograd
from tvmflow.stages import _lowering
from tvmflow.targets._presets import PRESETS

CPUS = {name: each.tvm for name, each in PRESETS.items() if each.tvm and each.tvm["kind"] == "llvm"}


def flattened(value: Any, _: Any) -> Any:
    return relax.op.reshape(value, (1, -1))


def dense(value: Any, weight: Any) -> Any:
    return relax.op.matmul(value, weight((int(value.ty.shape[1]), 24)))


def normed(value: Any, weight: Any) -> Any:
    return relax.op.nn.layer_norm(value, weight((24,)), weight((24,)), axes=[-1])


def gated(value: Any, _: Any) -> Any:
    return relax.op.nn.softmax(relax.op.nn.gelu(value))


@pytest.mark.slow
@pytest.mark.parametrize("preset", CPUS)
def test_every_road_becomes_code(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of convolutions, padded pooling, depthwise and transposed ones, products, rows, vector math."""
    monkeypatch.setattr(winograd, "pays", lambda *_: True)
    mod = model(
        convolution(16, (7, 7), strides=2, padding=3),
        biased,
        relu,
        pooled("max", pool_size=(3, 3), strides=(2, 2), padding=(1, 1)),
        conv(20),
        relu,
        depthwise((3, 3), padding=1),
        convolution(24, (3, 3), padding=1, strides=2),
        transposed(8, (2, 2), strides=2),
        pooled("avg", pool_size=(3, 3), padding=(1, 1)),
        flattened,
        dense,
        normed,
        gated,
        shape=(1, 3, 32, 32),
    )
    target = {**(CPUS[preset] or {}), "num-cores": 2}
    made = _lowering.compile_untuned(mod, weights_of(mod), target, FAST, 1)
    assert made.mod.imports
