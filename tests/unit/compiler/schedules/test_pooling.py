"""Pooling of plain data: strides, padding and rows of any size, compared with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.support.kernels import FAST, LEVELS_HERE, level, outputs
from tests.support.onnx_models import draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering, schedules

SIZES = (1, 2, 7, 13, 16, 31, 33, 48, 97, 101)


def draw_pool(seed: int) -> tuple[onnx.ModelProto, list[int]]:
    """Return a network of one pooling operator, and the shape of its data."""
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 4))
    kernel = [int(n) for n in random.integers(1, 6, rank)]
    pads = [int(random.integers(0, size // 2 + 1)) for size in kernel * 2]
    largest = {1: 101, 2: 101, 3: 31}[rank]
    choices = [size for size in SIZES if size <= largest]
    sizes = [max(int(random.choice(choices)), size) for size in kernel]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": [int(n) for n in random.integers(1, 6, rank)],
        "pads": pads,
        "ceil_mode": int(random.integers(2)) if not any(pads) else 0,
    }
    if kind := int(random.integers(2)):
        attributes["count_include_pad"] = int(random.integers(2))
    shape = [int(random.integers(1, 3)), int(random.choice([1, 3, 5, 16])), *sizes]
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node(("MaxPool", "AveragePool")[kind], ["a"], ["y"], **attributes),
    ]
    open_shape = [None] * len(shape)
    return model(nodes, [value("x", shape)], [value("y", open_shape)], {}), shape


@pytest.mark.parametrize("seed", seeds(6, 15, 120))
def test_pools_of_any_shape_agree_with_onnx_runtime(seed: int, tmp_path: Path) -> None:
    """The levels of this machine take turns."""
    made, shape = draw_pool(seed)
    feed = {"x": draw(*shape)}
    session = onnxruntime.InferenceSession(made.SerializeToString())
    (expected,) = session.run(None, feed)
    (actual,) = outputs(
        load(made, tmp_path, feed), feed, level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pads", [0, 1])
@pytest.mark.parametrize("stride", [2, 3])
def test_strided_pools_have_their_results_in_registers(
    stride: int, pads: int, tmp_path: Path
) -> None:
    """No vector loads its numbers one by one, and no condition divides the rows that are padded."""
    node = helper.make_node(
        "MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[stride] * 2, pads=[pads] * 4
    )
    made = model([node], [value("x", [1, 8, 97, 97])], [value("y", [None] * 4)], {})
    loaded = load(made, tmp_path)
    target = level(LEVELS_HERE[-1])
    lowered = lowering.lower(loaded.mod, lowering.make_target(target), FAST)
    scheduled = schedules.schedule_untuned(lowered.mod, target, 1)
    assert scheduled.rules == {"max_pool2d": "register_tiles"}
    assert "if_then_else" not in scheduled.mod.script()
