"""Convolutions of 3×3 with fewer multiplications: F(2×2, 3×3) and F(4×4, 3×3) on blocked data.

The result is cut into tiles. Data and weights of a tile are transformed, multiplied place by
place, which is a matrix product over channels for each place, and transformed back. This is the
algorithm of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015, arXiv:1509.09308,
whose matrices these are. A tile of 2×2 takes 16 multiplications instead of 36, one of 4×4 36 instead of 144.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import te, tirx

DATA: Final = "winograd_data"
PRODUCT: Final = "winograd_product"
IMAGE: Final = "winograd_image"

_KERNEL: Final = 3


class Transforms(NamedTuple):
    """The matrices that data (Bᵀ), weights (G) and results (Aᵀ) of a tile are multiplied with from both sides."""

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


# What a byte costs in multiplications of vectors of 8, where it comes from a cache and where from memory;
# and by how much the estimate must be ahead of the plain convolution's.
_CACHED: Final = 3.5
_FROM_MEMORY: Final = 7.0
_AHEAD: Final = 1.15


def pays(tile: int, out: int, inner: int, shape: Sequence[int], lanes: int) -> bool:
    """Whether tiles are worth their transforms and their larger weights, for a result of `shape` (n, height, width).

    Both sides are estimated for weights that have to be fetched and data that are near.
    """
    n, height, width = shape
    places, count = (tile + _KERNEL - 1) ** 2, n * -(-height // tile) * -(-width // tile)
    cached, fetched = (cost * lanes / 8 for cost in (_CACHED, _FROM_MEMORY))
    plain = _KERNEL**2 * inner * out * (n * height * width + 4 * fetched)
    # what is transformed is written once and read once
    moved = 8 * places * count * (inner + out)
    return plain > _AHEAD * (places * inner * out * (count + 4 * fetched) + cached * moved)


def transformed_data(x: Any, tile: int, padding: Sequence[int]) -> Any:
    """Data (n, c, h, w, b) as (t, t, c, tiles of all images, b), where t = tile + 2. `padding` is top, left, bottom, right."""
    n, blocks, height, width, lanes = (int(extent) for extent in x.shape)
    down, across = tiles(x.shape, tile, padding)
    top, left = padding[0], padding[1]
    size = tile + _KERNEL - 1

    def at(i: Any, c: Any, y: Any, z: Any, lane: Any) -> Any:
        inside = tirx.all(y >= top, y < height + top, z >= left, z < width + left)
        value = x[i, c, y - top, z - left, lane]
        return tirx.if_then_else(inside, value, tirx.const(0, x.dtype))

    shape = (n, blocks, down * tile + size - tile, across * tile + size - tile, lanes)
    filled = te.compute(shape, at, name="pad")
    row, column = te.reduce_axis((0, size), "row"), te.reduce_axis((0, size), "column")
    matrix = TRANSFORMS[tile].data

    def transformed(i: Any, j: Any, c: Any, p: Any, lane: Any) -> Any:
        image, y, z = p // (down * across), p // across % down, p % across
        value = filled[image, c, y * tile + row, z * tile + column, lane]
        return te.sum(_at(matrix, i, row) * _at(matrix, j, column) * value, axis=[row, column])

    return te.compute((size, size, blocks, n * down * across, lanes), transformed, name=DATA)


def product(x: Any, w: Any) -> Any:
    """Transformed data (t, t, i, tiles, b) and weights (t, t, o, i, b of i, b of o) as (t, t, o, tiles, b)."""
    size, _, blocks, lanes, out = (int(w.shape[axis]) for axis in (0, 1, 3, 4, 5))
    block, lane = te.reduce_axis((0, blocks), "ic"), te.reduce_axis((0, lanes), "ib")

    def at(i: Any, j: Any, o: Any, p: Any, inner: Any) -> Any:
        weight = w[i, j, o, block, lane, inner].astype(x.dtype)
        return te.sum(x[i, j, block, p, lane] * weight, axis=[block, lane])

    return te.compute((size, size, int(w.shape[2]), int(x.shape[3]), out), at, name=PRODUCT)


def image(x: Any, tile: int, shape: Sequence[int]) -> Any:
    """Products (t, t, o, tiles, b) as the result (n, o, h, w, b), whose n, h and w `shape` has."""
    n, height, width = shape
    size, _, blocks, _, lanes = (int(extent) for extent in x.shape)
    down, across = -(-height // tile), -(-width // tile)
    row, column = te.reduce_axis((0, size), "row"), te.reduce_axis((0, size), "column")
    matrix = TRANSFORMS[tile].image

    def at(i: Any, o: Any, y: Any, z: Any, p: Any, q: Any, lane: Any) -> Any:
        value = x[row, column, o, (i * down + y) * across + z, lane]
        return te.sum(_at(matrix, p, row) * _at(matrix, q, column) * value, axis=[row, column])

    whole = te.compute((n, blocks, down, across, tile, tile, lanes), at, name=IMAGE)
    return te.compute(
        (n, blocks, height, width, lanes),
        lambda i, o, y, z, lane: whole[i, o, y // tile, z // tile, y % tile, z % tile, lane],
        name="crop",
    )


def tiles(shape: Sequence[Any], tile: int, padding: Sequence[int]) -> tuple[int, int]:
    """How many tiles the result has, down and across, for blocked data of a shape."""
    height, width = int(shape[2]), int(shape[3])
    top, left, bottom, right = padding
    rows, columns = height + top + bottom - _KERNEL + 1, width + left + right - _KERNEL + 1
    return -(-rows // tile), -(-columns // tile)


def _at(matrix: np.ndarray[Any, Any], i: Any, j: Any) -> Any:
    """An entry of a constant matrix: what is left of it where the loops over `i` and `j` are unrolled is a number."""
    found = tirx.const(0.0, "float32")
    for place, value in np.ndenumerate(matrix):
        if value:
            here = tirx.all(i == place[0], j == place[1])
            found = tirx.Select(here, tirx.const(float(value), "float32"), found)
    return found
