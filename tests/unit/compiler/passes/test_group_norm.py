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


def check_instance_norm(batch: int, channels: int, size: tuple[int, ...], folder: Path) -> None:
    rank = len(size)
    weights = {
        "w": draw(channels, 8, *[1] * rank),
        "v": draw(16, channels, *[1] * rank, seed=1),
        "scale": draw(channels, seed=2),
        "shift": draw(channels, seed=3),
        "same": np.array([batch, channels, *size], np.int64),
    }
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Reshape", ["a", "same"], ["r"]),
        node("InstanceNormalization", ["r", "scale", "shift"], ["i"]),
        node("Relu", ["i"], ["u"]),
        node("Conv", ["u", "v"], ["y"]),
    ]
    inputs, outputs = value("x", [batch, 8, *size]), value("y", [batch, 16, *size])
    loaded = agree(model(nodes, [inputs], [outputs], weights), folder, {"x": draw(batch, 8, *size)})
    kernels = kernels_of(loaded.mod, host_level())
    # The result, and where channels fill no vectors, the variances.
    assert sum("unpack" in name for name in kernels) <= 2, kernels


@pytest.mark.parametrize(("channels", "size"), [(32, (37,)), (21, (5, 6))])
def test_instance_norms_stay_blocked(channels: int, size: tuple[int, ...], tmp_path: Path) -> None:
    """As wav2vec2 has one behind its first convolution, with a reshape that changes nothing."""
    check_instance_norm(2, channels, size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "channels", "size"),
    [(1, 5, (1,)), (3, 48, (101,)), (1, 16, (7, 1)), (2, 33, (3, 4, 5)), (1, 1, (9,))],
)
def test_instance_norms_of_any_shape(
    batch: int, channels: int, size: tuple[int, ...], tmp_path: Path
) -> None:
    check_instance_norm(batch, channels, size, tmp_path)


@pytest.mark.parametrize("groups", [1, 4])
def test_groups_of_sequences(groups: int, tmp_path: Path) -> None:
    """Conv-TasNet's global layer norm is a norm of one group of a sequence's channels."""
    weights = {
        "w": draw(24, 8, 1),
        "flat": np.array([2, groups, -1], np.int64),
        "full": np.array([2, 24, 19], np.int64),
        "scale": draw(groups, seed=2),
        "shift": draw(groups, seed=3),
    }
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Reshape", ["a", "flat"], ["r"]),
        node("InstanceNormalization", ["r", "scale", "shift"], ["i"]),
        node("Reshape", ["i", "full"], ["y"]),
    ]
    made = model(nodes, [value("x", [2, 8, 19])], [value("y", [2, 24, 19])], weights)
    agree(made, tmp_path, {"x": draw(2, 8, 19)})
