"""BevPool as a function of TIR: the pooling of Lift, Splat, Shoot (Philion and Fidler, 2020).

Each task has some channels to itself, so that no two threads write to one place.
"""

from __future__ import annotations

from typing import Any

from bev_reference import pool
from tvm.script import tirx as T

from tvmflow.custom_operators import Node, operator


@operator("BevPool", domain="com.example.bev", reference=pool)
def bev_pool(node: Node, features: Any, depths: Any, cells: Any) -> Any:
    """Return the sums of the features in each cell of the grid."""
    (cameras, channels, rows, columns), _ = node.inputs[0]
    bins = node.inputs[1].shape[1]
    height, width = node.attributes["height"], node.attributes["width"]

    @T.prim_func(s_tir=True)
    def kernel(
        features: T.Buffer((cameras, channels, rows, columns), "float32"),
        depths: T.Buffer((cameras, bins, rows, columns), "float32"),
        cells: T.Buffer((cameras, bins, rows, columns), "int32"),
        grid: T.Buffer((1, channels, height, width), "float32"),
    ):
        for channel in T.parallel(channels):
            for y, x in T.grid(height, width):
                grid[0, channel, y, x] = T.float32(0)
            for camera, depth, row, column in T.grid(cameras, bins, rows, columns):
                if cells[camera, depth, row, column] >= 0:
                    cell: T.int32 = cells[camera, depth, row, column]
                    grid[0, channel, cell // width, cell % width] += (
                        features[camera, channel, row, column] * depths[camera, depth, row, column]
                    )

    return node.tir(kernel, features, depths, cells)
