"""Pooling of plain data: strides, padding and rows of any size, compared with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import helper
from tvm import tirx

from tests.support.kernels import FAST, LEVELS_HERE, level, outputs
from tests.support.onnx_models import draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering, schedules
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target

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


def lower_pool(
    folder: Path, kind: str, shape: list[int], size: int, stride: int, pads: int
) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Return one pooling operator, lowered for the highest level of this machine, and the target."""
    rank = len(shape) - 2
    windows = {"kernel_shape": [size] * rank, "strides": [stride] * rank, "pads": [pads] * 2 * rank}
    node = helper.make_node(kind, ["x"], ["y"], **windows)
    made = model([node], [value("x", shape)], [value("y", [None] * len(shape))], {})
    target = level(LEVELS_HERE[-1])
    lowered = lowering.lower(load(made, folder).mod, make_target(target), FAST)
    return lowered.mod, target


@pytest.mark.parametrize("pads", [0, 1])
@pytest.mark.parametrize("stride", [2, 3])
def test_strided_pools_have_their_results_in_registers(
    stride: int, pads: int, tmp_path: Path
) -> None:
    """No vector loads its numbers one by one, and no condition divides the rows that are padded."""
    mod, target = lower_pool(tmp_path, "MaxPool", [1, 4, 15, 33, 97], 3, stride, pads)
    scheduled = schedules.schedule_untuned(mod, target, 1)
    assert scheduled.rules == {"max_pool3d": "register_tiles"}
    assert "if_then_else" not in scheduled.mod.script()


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("size", "stride", "pads"), [(3, 1, 1), (3, 2, 0), (5, 2, 2), (3, 3, 1)])
def test_windows_of_images_are_reduced_along_columns_and_then_along_rows(
    size: int, stride: int, pads: int, kind: str, tmp_path: Path
) -> None:
    """A row of the data is read once for each row of the result that it belongs to."""
    mod, target = lower_pool(tmp_path, kind, [1, 8, 97, 97], size, stride, pads)
    assert schedules.schedule_untuned(mod, target, 1).rules == {}
    (kernel,) = (each for _, each in mod.functions_items() if isinstance(each, tirx.PrimFunc))
    loads = ir.find_nodes(kernel.body, tvm.ir.TensorLoad)
    loads = [load for load in loads if list(load.source.shape) == [8 * 97 * 97]]
    # in rows that reach beyond the image: the first row, and the others in vectors and a last number
    whole, part = size, 3 if pads else 0
    assert len(loads) == whole + part


@pytest.mark.parametrize("size", [2, 3, 7])
def test_windows_that_do_not_overlap_have_no_kernel_of_their_own(size: int, tmp_path: Path) -> None:
    """What follows them can be part of their kernel, and all of an image is one window."""
    mod, target = lower_pool(tmp_path, "AveragePool", [1, 8, 7 * 16, 7 * 16], size, size, 0)
    assert len(schedules.schedule_untuned(mod, target, 1).rules) == 1
    mod, target = lower_pool(tmp_path, "AveragePool", [1, 64, 7, 7], 7, 1, 0)
    assert len(schedules.schedule_untuned(mod, target, 1).rules) == 1
