"""Every CPU preset compiles kernels of all kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tvm import relax

from tests.support.kernels import FAST, weights_of
from tests.support.onnx_models import load
from tests.support.tuning import conv, model, relu
from tests.unit.compiler.networks import (
    CPUS,
    attention,
    biased,
    convolution,
    depthwise,
    pooled,
    transposed,
)
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction import winograd
from tvmflow.targets.tvm_target import make_target


def as_volume(value: Any, _: Any) -> Any:
    n, channels, height, width = (int(extent) for extent in value.ty.shape)
    return relax.op.reshape(value, (n, channels // 2, 2, height, width))


def flattened(value: Any, _: Any) -> Any:
    return relax.op.reshape(value, (1, -1))


def dense(value: Any, weight: Any) -> Any:
    return relax.op.matmul(value, weight((int(value.ty.shape[1]), 24)))


def normed(value: Any, weight: Any) -> Any:
    return relax.op.nn.layer_norm(value, weight((24,)), weight((24,)), axes=[-1])


def gated(value: Any, _: Any) -> Any:
    return relax.op.nn.softmax(relax.op.nn.gelu(value))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["model", "float16", "bfloat16"])
@pytest.mark.parametrize("preset", CPUS)
def test_kernels_of_all_kinds_compile(
    preset: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Winograd, padded pooling, depthwise and transposed convolutions, products, row reductions, vectorized math."""
    monkeypatch.setattr(winograd.Convolution, "rank_tiles", lambda _, tiles, *costs: tiles[::-1])
    mod = model(
        convolution(16, (7, 7), strides=2, padding=3),
        biased,
        relu,
        pooled("max", pool_size=(3, 3), strides=(2, 2), padding=(1, 1)),
        conv(20),
        relu,
        convolution(20, (3, 3), groups=5, padding=12, dilation=12),
        depthwise((3, 3), padding=1),
        convolution(24, (3, 3), padding=1, strides=2),
        transposed(8, (2, 2), strides=2),
        pooled("avg", pool_size=(3, 3), padding=(1, 1)),
        as_volume,
        convolution(16, (3, 3, 3), padding=1),
        relu,
        transposed(8, (2, 2, 2), strides=2),
        flattened,
        dense,
        normed,
        gated,
        shape=(1, 3, 32, 32),
    )
    target = {**(CPUS[preset] or {}), "num-cores": 2}
    options = replace(FAST, precision=precision)
    library = (
        lowering.lower(mod, make_target(target), options)
        .schedule_untuned(weights_of(mod), target, 1)
        .compile()
    )
    assert library.mod.imports


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("preset", CPUS)
def test_attention_compiles(preset: str, tmp_path: Path) -> None:
    target = {**(CPUS[preset] or {}), "num-cores": 2}
    for seed in range(4):
        loaded = load(attention(seed)[0], tmp_path)
        library = (
            lowering.lower(loaded.mod, make_target(target), FAST)
            .schedule_untuned(loaded.params, target, 1)
            .compile()
        )
        assert library.mod.imports
