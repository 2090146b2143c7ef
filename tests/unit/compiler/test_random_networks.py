"""Networks of operators in any order: what the rules for layouts, fusion and schedules make of them agrees with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.kernels import LEVELS_HERE, level, outputs
from tests.support.onnx_models import draw, load, model, value
from tests.support.random_networks import Feed, draw_network, draw_network_of_conditions
from tests.support.random_networks.judging import find_differences, run_reference
from tests.support.seeds import seeds


def check(made: onnx.ModelProto, feed: Feed, seed: int, folder: Path) -> None:
    """Compare a network with ONNX Runtime; the levels of this machine take turns."""
    target = level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    actual = outputs(load(made, folder, feed), feed, target)
    assert find_differences(made, feed, actual) == []


@pytest.mark.parametrize("seed", seeds(2, 15, 120))
def test_random_networks_agree_with_onnx_runtime(seed: int, tmp_path: Path) -> None:
    """The levels of this machine take turns."""
    check(*draw_network(seed), seed, tmp_path)


@pytest.mark.parametrize("seed", seeds(1, 10, 120))
def test_random_conditions_agree_with_onnx_runtime(seed: int, tmp_path: Path) -> None:
    """Masks that are inverted, combined, counted and multiplied, and arithmetic on integers."""
    check(*draw_network_of_conditions(seed), seed, tmp_path)


def test_tiny_outputs_do_not_agree_with_zeros() -> None:
    """Errors are relative to the largest value of an output."""
    tiny = {"w": np.array(1e-8, np.float32)}
    nodes = [onnx.helper.make_node("Mul", ["x", "w"], ["y"])]
    made = model(nodes, [value("x", [2, 3])], [value("y", [2, 3])], tiny)
    feed = {"x": draw(2, 3)}
    expected = run_reference(made, feed)
    assert find_differences(made, feed, expected) == []
    assert find_differences(made, feed, [np.zeros_like(expected[0])]) == [
        "y is off by 1 of 6.4e-09 (may be 2e-05)"
    ]
