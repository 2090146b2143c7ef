"""BevPool as a function of C, in bev_pool.c."""

from __future__ import annotations

from typing import Any

from bev_reference import pool

from tvmflow.custom_operators import Node, Tensor, operator


@operator("BevPool", domain="com.example.bev", reference=pool)
def bev_pool(node: Node, features: Any, depths: Any, cells: Any) -> Any:
    """Return the sums of the features in each cell of the grid."""
    cameras, channels, rows, columns = node.inputs[0].shape
    bins = node.inputs[1].shape[1]
    height, width = node.attributes["height"], node.attributes["width"]
    return node.c(
        "bev_pool.c",
        "bev_pool",
        features,
        depths,
        cells,
        outputs=[Tensor((1, channels, height, width), "float32")],
        arguments=[cameras, channels, bins, rows * columns, height * width],
        tasks=channels,
    )
