"""Pooling of camera features into a bird's-eye grid, with numpy: what `verify` compares libraries with."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmflow.custom_operators import Node

Array = np.ndarray[Any, Any]


def pool(node: Node, features: Array, depths: Array, cells: Array) -> Array:
    """Return the sums of the features in each cell, [1, channels, height, width].

    Args:
        node: The node; its attributes are the height and width of the grid.
        features: The features of each pixel, [cameras, channels, rows, columns].
        depths: The share of each depth in a pixel, [cameras, depths, rows, columns].
        cells: The cell of each point, as `depths`; negative for points beyond the grid.
    """
    height, width = node.attributes["height"], node.attributes["width"]
    channels = features.shape[1]
    # [cameras, depths, rows, columns, channels]
    points = depths[..., None] * features.transpose(0, 2, 3, 1)[:, None]
    is_inside = cells >= 0
    grid = np.zeros((height * width, channels), features.dtype)
    np.add.at(grid, cells[is_inside], points[is_inside])
    return grid.T.reshape(1, channels, height, width)
