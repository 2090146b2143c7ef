"""Resizes compute what ONNX Runtime computes, in all modes, on plain and on blocked data."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.helper import make_node as node

from tests.support.kernels import host_level, kernels_of
from tests.support.onnx_models import agree, draw, model, value

COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
NEAREST = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
MODES: list[dict[str, Any]] = [
    *(
        {"mode": "nearest", "coordinate_transformation_mode": mode, "nearest_mode": rounding}
        for mode, rounding in itertools.product(COORDINATES, NEAREST)
    ),
    *({"mode": "linear", "coordinate_transformation_mode": mode} for mode in COORDINATES),
    *(
        {"mode": "cubic", "coordinate_transformation_mode": mode, "exclude_outside": outside}
        for mode, outside in itertools.product(COORDINATES[:3], (0, 1))
    ),
]
SIZES = [((7, 10), (14, 20)), ((9, 7), (4, 23)), ((1, 5), (3, 1)), ((12, 16), (12, 5))]


def resized(
    source: tuple[int, ...], target: tuple[int, ...], mode: dict[str, Any], channels: int = 3
) -> Any:
    """Return a model that resizes an image of some channels."""
    weights = {"sizes": np.array([2, channels, *target], np.int64)}
    return model(
        [node("Resize", ["x", "", "", "sizes"], ["y"], **mode)],
        [value("x", [2, channels, *source])],
        [value("y", [2, channels, *target])],
        weights,
    )


def check(
    source: tuple[int, ...], target: tuple[int, ...], mode: dict[str, Any], folder: Path
) -> None:
    agree(resized(source, target, mode), folder, {"x": draw(2, 3, *source)}, rtol=1e-5)


@pytest.mark.parametrize("mode", [MODES[2], MODES[16], MODES[-1]], ids=str)
def test_images_are_resized(mode: dict[str, Any], tmp_path: Path) -> None:
    """One mode of each method, wider and lower."""
    check((9, 7), (4, 23), mode, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("source", "target"), SIZES, ids=str)
def test_images_are_resized_in_all_modes(
    mode: dict[str, Any], source: tuple[int, int], target: tuple[int, int], tmp_path: Path
) -> None:
    check(source, target, mode, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [MODES[2], MODES[16]], ids=str)
def test_volumes_are_resized(mode: dict[str, Any], tmp_path: Path) -> None:
    check((3, 4, 5), (5, 8, 4), mode, tmp_path)


def between_convolutions(mode: dict[str, Any], channels: int, target: tuple[int, int]) -> Any:
    """Return a model that resizes an image between two convolutions."""
    weights = {
        "sizes": np.array([1, channels, *target], np.int64),
        "w": draw(channels, 8, 1, 1),
        "v": draw(16, channels, 1, 1, seed=1),
    }
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Resize", ["a", "", "", "sizes"], ["b"], **mode),
        node("Relu", ["b"], ["r"]),
        node("Conv", ["r", "v"], ["y"]),
    ]
    return model(nodes, [value("x", [1, 8, 6, 7])], [value("y", [1, 16, *target])], weights)


@pytest.mark.parametrize("channels", [16, 21])
def test_images_stay_blocked_between_convolutions(channels: int, tmp_path: Path) -> None:
    """The resize is one kernel, with the operator that follows it, and nothing is unpacked before it."""
    made = between_convolutions(MODES[16], channels, (12, 9))
    loaded = agree(made, tmp_path, {"x": draw(1, 8, 6, 7)})
    kernels = kernels_of(loaded.mod, host_level())
    assert "fused_resize_relu" in kernels
    assert sum("unpack" in name for name in kernels) == 1
