"""3×3 convolutions in tiles: the same numbers, where they pay, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import kernels
from tests.support.kernels import (
    FAST,
    LEVELS_HERE,
    PLAIN,
    host_level,
    kernels_of,
    level,
)
from tests.support.tuning import conv, model, relu
from tests.unit.passes.test_blocked_layouts import biased, convolution, twice
from tvmflow import schedules
from tvmflow.passes import winograd
from tvmflow.stages import _lowering

# what each tile may cost in exactness, relative to the largest number
ERRORS = {2: 1e-5, 4: 5e-5}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes, which would not pay, are computed in tiles too."""
    monkeypatch.setattr(winograd, "pays", lambda *_: True)


def check(mod: Any, tile: int, target: dict[str, Any]) -> None:
    """Computes what the plain road does."""
    shape = [int(n) for n in mod["main"].params[0].ty.shape]
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ours = kernels.run(mod, target, {**FAST, "winograd": tile}, data)
    for fast, plain in zip(ours, kernels.run(mod, target, PLAIN, data), strict=True):
        largest = float(np.abs(plain).max())
        np.testing.assert_allclose(fast / largest, plain / largest, rtol=0, atol=ERRORS[tile])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("tile", winograd.TRANSFORMS)
@pytest.mark.parametrize(
    ("shape", "out", "padding"),
    [
        # whole tiles; rests in both directions; one row of tiles; channels that fill no vector; two images
        ((1, 16, 8, 8), 32, 1),
        ((2, 20, 13, 7), 24, [0, 1, 2, 1]),
        ((1, 17, 3, 30), 16, 0),
    ],
)
def test_tiles_compute_what_the_plain_convolution_does(
    tile: int, shape: tuple[int, ...], out: int, padding: Any
) -> None:
    """With any padding and size, a bias, a residual and activations behind it."""
    channels = shape[1]
    layers = [
        twice(convolution(channels, (3, 3), padding=1)),
        convolution(out, (3, 3), padding=padding),
        biased,
        relu,
        conv(5, 1),
    ]
    mod = model(*layers, shape=shape)
    names = kernels_of(mod, host_level(), {**FAST, "winograd": tile})
    assert sum(winograd.PRODUCT in name for name in names) >= 1
    check(mod, tile, host_level())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_every_level_has_a_schedule_for_every_part(mcpu: str) -> None:
    """Transforms by their own rule, the product as matrix products have it."""
    mod, target = model(conv(32), biased, relu, shape=(1, 32, 16, 16)), level(mcpu)
    lowered = _lowering.lower(mod, _lowering.make_target(target), FAST)
    _, roads = schedules.schedule_rest(lowered, schedules.machine_of(target, 1))
    assert {name: road for name, road in roads.items() if "winograd" in name} == {
        "winograd_data_NCHWc": "transform",
        "winograd_product_NCHWc": "tiled",
        "fused_winograd_image_NCHWc_add_relu": "transform",
    }
    check(mod, 2, target)


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "options", "in_tiles"),
    [
        ((128, 128), 28, 3, {"padding": 1}, True),
        # weights that would have to be fetched twice over for a few pixels
        ((512, 512), 7, 3, {"padding": 1}, False),
        # few channels: more transforms than products
        ((16, 64), 56, 3, {"padding": 1}, False),
        ((128, 128), 28, 3, {"padding": 1, "strides": 2}, False),
        ((128, 128), 28, 3, {"padding": 2, "dilation": 2}, False),
        ((128, 128), 28, 3, {"padding": 1, "groups": 2}, False),
        ((128, 128), 28, 5, {"padding": 2}, False),
    ],
)
def test_tiles_are_used_where_they_pay(
    channels: tuple[int, int], size: int, kernel: int, options: dict[str, Any], in_tiles: bool
) -> None:
    """And the recipe can do without."""
    inner, out = channels
    mod = model(convolution(out, (kernel, kernel), **options), shape=(1, inner, size, size))
    target = level("x86-64-v3")
    used = [
        any("winograd" in name for name in kernels_of(mod, target, made))
        for made in (FAST, {**FAST, "winograd": 0})
    ]
    assert used == [in_tiles, False]
