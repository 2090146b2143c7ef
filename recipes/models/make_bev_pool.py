"""Writes models/bev_pool.onnx: camera features become a bird's-eye view, as in Lift, Splat, Shoot.

Two convolutions make features and a distribution over depths of each pixel of six cameras; their
product is pooled into a grid by BevPool, an operator that neither ONNX nor TVM has; a convolution
reads the grid. The weights are random. The cells that the points of the cameras' frustums fall
into come from the cameras' calibration, and are an input: see `place_points`.

Usage: python make_bev_pool.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CAMERAS, DEPTHS, CHANNELS = 6, 24, 32
ROWS, COLUMNS = 8, 22
GRID = (96, 96)


def place_points(seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return the cell of each point, [cameras, depths, rows, columns]; -1 for points beyond the grid.

    The cameras look in six directions from the middle of the grid, with a small random error.
    """
    rng = np.random.default_rng(seed)
    camera, depth, _, column = np.meshgrid(
        np.arange(CAMERAS), np.arange(DEPTHS), np.arange(ROWS), np.arange(COLUMNS), indexing="ij"
    )
    angle = 2 * np.pi * camera / CAMERAS + (column / (COLUMNS - 1) - 0.5) * np.pi / 2.5
    distance = 4.0 + 2.2 * depth + rng.uniform(-0.5, 0.5, depth.shape)
    y = np.floor(GRID[0] / 2 + distance * np.sin(angle)).astype(np.int32)
    x = np.floor(GRID[1] / 2 + distance * np.cos(angle)).astype(np.int32)
    is_inside = (y >= 0) & (y < GRID[0]) & (x >= 0) & (x < GRID[1])
    return np.where(is_inside, y * GRID[1] + x, -1).astype(np.int32)


def make_model() -> onnx.ModelProto:
    """Return the model."""
    rng = np.random.default_rng(1)
    weights = {
        "feature_weight": rng.normal(0, 0.2, (CHANNELS, 16, 1, 1)),
        "depth_weight": rng.normal(0, 0.5, (DEPTHS, 16, 1, 1)),
        "head_weight": rng.normal(0, 0.05, (8, CHANNELS, 3, 3)),
    }
    nodes = [
        helper.make_node("Conv", ["image", "feature_weight"], ["features"]),
        helper.make_node("Conv", ["image", "depth_weight"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["depths"], axis=1),
        helper.make_node(
            "BevPool",
            ["features", "depths", "cells"],
            ["grid"],
            name="pool",
            domain="com.example.bev",
            height=GRID[0],
            width=GRID[1],
        ),
        helper.make_node("Conv", ["grid", "head_weight"], ["map"], pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "bev_pool",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, [CAMERAS, 16, ROWS, COLUMNS]),
            helper.make_tensor_value_info(
                "cells", TensorProto.INT32, [CAMERAS, DEPTHS, ROWS, COLUMNS]
            ),
        ],
        [helper.make_tensor_value_info("map", TensorProto.FLOAT, [1, 8, *GRID])],
        [numpy_helper.from_array(v.astype(np.float32), name) for name, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example.bev", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 8
    return model


def main() -> None:
    """Write the model, and samples for `verify`."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    onnx.save(make_model(), folder / "bev_pool.onnx")
    images = np.random.default_rng(2).normal(size=(2, CAMERAS, 16, ROWS, COLUMNS))
    cells = np.stack([place_points(seed) for seed in (3, 4)])
    np.savez_compressed(
        folder / "bev_pool.npz",
        image=images.astype(np.float32).reshape(-1, 16, ROWS, COLUMNS),
        cells=cells.reshape(-1, *cells.shape[2:]),
    )


if __name__ == "__main__":
    main()
