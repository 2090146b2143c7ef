"""Winograd convolutions of 3×3, F(2×2, 3×3) and F(4×4, 3×3), on blocked data.

The result is split into tiles. Data and weights of a tile are transformed, multiplied
elementwise (a matrix product over channels for each element of the tile), and the product is
transformed back. Algorithm and matrices: Lavin and Gray, "Fast Algorithms for Convolutional
Neural Networks", 2015, arXiv:1509.09308. A tile of 2×2 takes 16 multiplications instead of
36, one of 4×4 36 instead of 144.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import te, tirx

DATA: Final = "winograd_data"
"""The name of the block that transforms data."""
PRODUCT: Final = "winograd_product"
"""The name of the block that multiplies transformed data and weights."""
IMAGE: Final = "winograd_image"
"""The name of the block that transforms the product into tiles of the result."""

_KERNEL: Final = 3


class Transforms(NamedTuple):
    """The matrices by which data (Bᵀ), weights (G) and product (Aᵀ) of a tile are multiplied from both sides."""

    data: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]
    image: np.ndarray[Any, Any]


TRANSFORMS: Final[Mapping[int, Transforms]] = {
    2: Transforms(
        np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
        np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]),
        np.array([[1, 1, 1, 0], [0, 1, -1, -1]]),
    ),
    4: Transforms(
        np.array(
            [
                [4, 0, -5, 0, 1, 0],
                [0, -4, -4, 1, 1, 0],
                [0, 4, -4, -1, 1, 0],
                [0, -2, -1, 2, 1, 0],
                [0, 2, -1, -2, 1, 0],
                [0, 4, 0, -5, 0, 1],
            ]
        ),
        np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24,
        np.array(
            [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
        ),
    ),
}


# Times for each lane of a vector, in multiplications of vectors: to transform the data, or the result, of
# a tile of one block of channels; and to read a vector of weights from memory.
_TRANSFORM_COST: Final[Mapping[int, int]] = {2: 9, 4: 22}
_MEMORY_COST: Final = 4
# By this factor the estimate must be better than that of the direct convolution.
_MIN_GAIN: Final = 1.1


def is_profitable(tile: int, out: int, inner: int, shape: Sequence[int], lanes: int) -> bool:
    """Return whether a Winograd convolution is estimated to be faster than a direct one.

    The estimate assumes that weights come from memory and data from a cache.

    Args:
        tile: The size of a tile of the result.
        out: The number of output channels.
        inner: The number of input channels.
        shape: Images, height and width of the result.
        lanes: The number of float32 values in a vector register.
    """
    n, height, width = shape
    elements, tiles = (tile + _KERNEL - 1) ** 2, n * -(-height // tile) * -(-width // tile)
    inner_blocks, out_blocks = -(-inner // lanes), -(-out // lanes)
    weights, memory_cost = inner_blocks * lanes * out_blocks, _MEMORY_COST * lanes
    direct = _KERNEL**2 * weights * max(n * height * width, memory_cost)
    product = elements * weights * max(tiles, memory_cost)
    transforms = _TRANSFORM_COST[tile] * lanes * tiles * (inner_blocks + out_blocks)
    return direct > _MIN_GAIN * (product + transforms)


def conv(x: Any, w: Any, tile: int, padding: Sequence[int], shape: Sequence[int]) -> Any:
    """Return a 3×3 convolution with stride 1 of blocked data.

    Args:
        x: Data (n, i, h, w, b).
        w: Transformed weights (t, t, o, i, b of i, b of o), where t = tile + 2.
        tile: The size of a tile of the result.
        padding: Top, left, bottom, right.
        shape: Images, height and width of the result.

    Returns:
        The result (n, o, h, w, b).
    """
    return transform_product(multiply(transform_data(x, tile, padding), w), tile, shape)


def transform_data(x: Any, tile: int, padding: Sequence[int]) -> Any:
    """Return data (n, c, h, w, b) as transformed tiles (t, t, c, tiles of all images, b), where t = tile + 2.

    Args:
        x: Blocked data.
        tile: The size of a tile of the result.
        padding: Top, left, bottom, right.
    """
    n, blocks, height, width, lanes = (int(extent) for extent in x.shape)
    tile_rows, tile_columns = count_tiles(x.shape, tile, padding)
    top, left = padding[0], padding[1]
    size = tile + _KERNEL - 1

    def padded(i: Any, c: Any, y: Any, z: Any, lane: Any) -> Any:
        is_inside = tirx.all(y >= top, y < height + top, z >= left, z < width + left)
        value = x[i, c, y - top, z - left, lane]
        return tirx.if_then_else(is_inside, value, tirx.const(0, x.dtype))

    shape = (n, blocks, tile_rows * tile + size - tile, tile_columns * tile + size - tile, lanes)
    data = te.compute(shape, padded, name="pad")
    row, column = te.reduce_axis((0, size), "row"), te.reduce_axis((0, size), "column")
    matrix = TRANSFORMS[tile].data

    def transformed(i: Any, j: Any, c: Any, p: Any, lane: Any) -> Any:
        image = p // (tile_rows * tile_columns)
        y, z = p // tile_columns % tile_rows, p % tile_columns
        value = data[image, c, y * tile + row, z * tile + column, lane]
        factor = _entry(matrix, i, row) * _entry(matrix, j, column)
        return te.sum(factor * value, axis=[row, column])

    tiles = n * tile_rows * tile_columns
    return te.compute((size, size, blocks, tiles, lanes), transformed, name=DATA)


def multiply(x: Any, w: Any) -> Any:
    """Return the product (t, t, o, tiles, b) of data and weights.

    Args:
        x: Transformed data (t, t, i, tiles, b).
        w: Transformed weights (t, t, o, i, b of i, b of o).
    """
    size, _, blocks, lanes, out = (int(w.shape[axis]) for axis in (0, 1, 3, 4, 5))
    block, lane = te.reduce_axis((0, blocks), "ic"), te.reduce_axis((0, lanes), "ib")

    def element(i: Any, j: Any, o: Any, p: Any, inner: Any) -> Any:
        weight = w[i, j, o, block, lane, inner].astype(x.dtype)
        return te.sum(x[i, j, block, p, lane] * weight, axis=[block, lane])

    shape = (size, size, int(w.shape[2]), int(x.shape[3]), out)
    return te.compute(shape, element, name=PRODUCT)


def transform_product(x: Any, tile: int, shape: Sequence[int]) -> Any:
    """Return products (t, t, o, tiles, b) as the result (n, o, h, w, b) of the convolution.

    Args:
        x: The product of data and weights.
        tile: The size of a tile of the result.
        shape: Images, height and width of the result.
    """
    n, height, width = shape
    size, _, blocks, _, lanes = (int(extent) for extent in x.shape)
    tile_rows, tile_columns = -(-height // tile), -(-width // tile)
    row, column = te.reduce_axis((0, size), "row"), te.reduce_axis((0, size), "column")
    matrix = TRANSFORMS[tile].image

    def element(i: Any, o: Any, y: Any, z: Any, p: Any, q: Any, lane: Any) -> Any:
        value = x[row, column, o, (i * tile_rows + y) * tile_columns + z, lane]
        factor = _entry(matrix, p, row) * _entry(matrix, q, column)
        return te.sum(factor * value, axis=[row, column])

    tiles = te.compute((n, blocks, tile_rows, tile_columns, tile, tile, lanes), element, name=IMAGE)
    return te.compute(
        (n, blocks, height, width, lanes),
        lambda i, o, y, z, lane: tiles[i, o, y // tile, z // tile, y % tile, z % tile, lane],
        name="crop",
    )


def count_tiles(shape: Sequence[Any], tile: int, padding: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of tiles in the result of a convolution of blocked data."""
    height, width = int(shape[2]), int(shape[3])
    top, left, bottom, right = padding
    rows, columns = height + top + bottom - _KERNEL + 1, width + left + right - _KERNEL + 1
    return -(-rows // tile), -(-columns // tile)


def _entry(matrix: np.ndarray[Any, Any], i: Any, j: Any) -> Any:
    """Return an entry of a constant matrix: a number, once the loops over `i` and `j` are unrolled."""
    entry = tirx.const(0.0, "float32")
    for (row, column), value in np.ndenumerate(matrix):
        if value:
            is_entry = tirx.all(i == row, j == column)
            entry = tirx.Select(is_entry, tirx.const(float(value), "float32"), entry)
    return entry
