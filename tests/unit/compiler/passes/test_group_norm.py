"""Group norms between convolutions compute what ONNX Runtime computes, on blocked data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.helper import make_node as node

from tests.support.kernels import host_level, kernels_of
from tests.support.onnx_models import agree, draw, model, value


def normed(batch: int, channels: int, groups: int, size: tuple[int, int]) -> Any:
    """Return a model with a group norm, as PyTorch exports it, between two convolutions."""
    weights = {
        "w": draw(channels, 8, 1, 1),
        "v": draw(16, channels, 1, 1, seed=1),
        "flat": np.array([batch, groups, -1], np.int64),
        "full": np.array([batch, channels, *size], np.int64),
        "scale": draw(groups, seed=2),
        "shift": draw(groups, seed=3),
        "gamma": draw(channels, 1, 1, seed=4),
        "beta": draw(channels, 1, 1, seed=5),
    }
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Reshape", ["a", "flat"], ["r"]),
        node("InstanceNormalization", ["r", "scale", "shift"], ["i"]),
        node("Reshape", ["i", "full"], ["f"]),
        node("Mul", ["f", "gamma"], ["m"]),
        node("Add", ["m", "beta"], ["g"]),
        node("Relu", ["g"], ["u"]),
        node("Conv", ["u", "v"], ["y"]),
    ]
    return model(nodes, [value("x", [batch, 8, *size])], [value("y", [batch, 16, *size])], weights)


def check(batch: int, channels: int, groups: int, size: tuple[int, int], folder: Path) -> None:
    made = normed(batch, channels, groups, size)
    loaded = agree(made, folder, {"x": draw(batch, 8, *size)})
    kernels = kernels_of(loaded.mod, host_level())
    # Only the means of channels, and the result.
    assert sum("unpack" in name for name in kernels) <= 3, kernels


@pytest.mark.parametrize(("channels", "groups"), [(32, 4), (21, 7)])
def test_groups_stay_blocked(channels: int, groups: int, tmp_path: Path) -> None:
    check(2, channels, groups, (5, 6), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "channels", "groups", "size"),
    [(1, 64, 1, (7, 7)), (3, 12, 12, (1, 9)), (1, 48, 6, (33, 20)), (2, 17, 1, (3, 1))],
)
def test_groups_of_any_shape(
    batch: int, channels: int, groups: int, size: tuple[int, int], tmp_path: Path
) -> None:
    check(batch, channels, groups, size, tmp_path)


def test_a_reshape_of_a_scaled_vector_is_left_alone(tmp_path: Path) -> None:
    """What is reshaped may have one axis, which is no batch of groups."""
    nodes = [
        node("Mul", ["x", "scale"], ["scaled"]),
        node("Reshape", ["scaled", "shape"], ["y"]),
    ]
    weights = {"scale": draw(6), "shape": np.array([2, 3])}
    made = model(nodes, [value("x", [6])], [value("y", [2, 3])], weights)
    agree(made, tmp_path, {"x": draw(6)})
