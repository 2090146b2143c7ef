"""Group norms between convolutions compute what ONNX Runtime computes, on blocked data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.helper import make_node as node
from tvm import relax

from tests.support import kernels, tuning
from tests.support.kernels import FAST, PLAIN, host_level, kernels_of, outputs
from tests.support.onnx_models import agree, draw, load, model, value


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
    """What is reshaped may have one axis, which is not a batch of groups."""
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


def norm_operator(channels: int, groups: int, size: tuple[int, ...], opset: int) -> Any:
    """Return a model with a norm of data whose mean is 300 times their deviation."""
    count = channels if opset > 20 else groups
    weights = {"scale": draw(count, seed=2), "shift": draw(count, seed=3)}
    nodes = [
        node("Add", ["x", "offset"], ["a"]),
        node("GroupNormalization", ["a", "scale", "shift"], ["y"], num_groups=groups),
    ]
    shape = [2, channels, *size]
    return model(
        nodes,
        [value("x", shape)],
        [value("y", shape)],
        {**weights, "offset": np.array(300, np.float32)},
        opset=opset,
    )


@pytest.mark.parametrize(
    ("channels", "groups", "size", "opset"),
    [(21, 7, (5, 9), 21), (16, 16, (37,), 18), (12, 1, (3, 4, 5), 21), (6, 3, (1,), 21)],
)
def test_the_operator_is_computed_with_differences(
    channels: int, groups: int, size: tuple[int, ...], opset: int, tmp_path: Path
) -> None:
    """A mean of squares less the square of a mean would have no digit left."""
    loaded = load(norm_operator(channels, groups, size, opset), tmp_path)
    x = draw(2, channels, *size)
    [actual] = outputs(loaded, {"x": x})
    data = (x + np.float32(300)).astype(np.float64).reshape(2, groups, -1)
    normal = (data - data.mean(-1, keepdims=True)) / np.sqrt(data.var(-1, keepdims=True) + 1e-5)
    scale, shift = (
        np.repeat(own, channels // len(own)).reshape(channels, *[1] * len(size))
        for own in (draw(channels if opset > 20 else groups, seed=seed) for seed in (2, 3))
    )
    expected = normal.reshape(x.shape) * scale + shift
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3)


def test_the_operator_stays_blocked(tmp_path: Path) -> None:
    """It reads its data three times, and stores them once."""
    weights = {
        "w": draw(32, 8, 1, 1),
        "v": draw(16, 32, 1, 1, seed=1),
        "scale": draw(32, seed=2),
        "shift": draw(32, seed=3),
    }
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("GroupNormalization", ["a", "scale", "shift"], ["g"], num_groups=4),
        node("Conv", ["g", "v"], ["y"]),
    ]
    made = model(nodes, [value("x", [2, 8, 5, 6])], [value("y", [2, 16, 5, 6])], weights, opset=21)
    kernels = kernels_of(agree(made, tmp_path, {"x": draw(2, 8, 5, 6)}).mod, host_level())
    on_images = [name for name in kernels if "sum" in name or "subtract" in name]
    assert len(on_images) == 3 and not any("group_norm" in name for name in kernels), kernels


@pytest.mark.parametrize("shape", [(1,), (8, 1, 1)])
def test_another_epsilon_than_a_number_is_added_as_it_is(shape: tuple[int, ...]) -> None:
    """It may be one for each channel."""

    def norm(data: Any, weight: Any) -> Any:
        means = [f(data, [2, 3], keepdims=True) for f in (relax.op.mean, relax.op.variance)]
        root = relax.op.sqrt(relax.op.add(means[1], relax.op.abs(weight(shape))))
        return relax.op.divide(relax.op.subtract(data, means[0]), root)

    mod = tuning.model(norm, shape=(2, 8, 9, 7))
    data = np.random.default_rng(1).standard_normal((2, 8, 9, 7), np.float32)
    fast, plain = (kernels.run(mod, host_level(), options, data) for options in (FAST, PLAIN))
    np.testing.assert_allclose(fast[0], plain[0], rtol=1e-4, atol=1e-5)
