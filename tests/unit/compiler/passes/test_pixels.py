"""Pointwise convolutions of fixed shapes over one axis of pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx.helper import make_node as node
from tvm import tirx

from tests.support.kernels import FAST, LEVELS_HERE, level, outputs
from tests.support.onnx_models import draw, load, model, open_session, value
from tvmflow.compiler import lowering
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target

AVX2 = "x86-64-v3"


def list_extents(mod: tvm.IRModule) -> set[int]:
    """Return the lengths of the loops of all kernels."""
    kernels = [
        function for _, function in mod.functions_items() if isinstance(function, tirx.PrimFunc)
    ]
    loops = [loop for kernel in kernels for loop in ir.find_nodes(kernel.body, tirx.For)]
    return {int(loop.extent) for loop in loops}


@pytest.mark.skipif(AVX2 not in LEVELS_HERE, reason="runs code for AVX2")
@pytest.mark.parametrize(("size", "is_merged"), [(7, True), (8, False)])
@pytest.mark.parametrize("adds", [False, True])
def test_a_pointwise_convolution_has_one_axis_of_pixels(
    adds: bool, size: int, is_merged: bool, tmp_path: Path
) -> None:
    """Where tiles of rows would be narrow, with a bias, another image that is added, and a limit."""
    shape = [1, 32, size, size]
    last = "s" if adds else "c"
    nodes = [
        node("Conv", ["x", "v"], ["w0"], kernel_shape=[3, 3], pads=[1] * 4),
        node("Conv", ["w0", "w", "b"], ["c"]),
        *([node("Add", ["c", "w0"], ["s"])] if adds else []),
        node("Relu", [last], ["r"]),
        node("Conv", ["r", "v"], ["y"], kernel_shape=[3, 3], pads=[1] * 4),
    ]
    constants = {
        "v": draw(32, 32, 3, 3) / 16,
        "w": draw(32, 32, 1, 1, seed=1) / 8,
        "b": draw(32, seed=2),
    }
    made = model(nodes, [value("x", shape)], [value("y", shape)], constants)
    loaded, feed = load(made, tmp_path), {"x": draw(*shape, seed=3)}
    lowered = lowering.lower(loaded.mod, make_target(level(AVX2)), FAST).mod
    assert (size * size in list_extents(lowered)) == is_merged
    [actual] = outputs(loaded, feed, level(AVX2))
    [expected] = open_session(made).run(None, feed)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
