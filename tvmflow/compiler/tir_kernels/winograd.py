"""Winograd convolutions of 3×3, F(2×2, 3×3) and F(4×4, 3×3), on blocked data.

The result is split into tiles. Data and weights of a tile are transformed, multiplied
elementwise (a matrix product over channels for each element of the tile), and the product is
transformed back. Algorithm and matrices: Lavin and Gray, "Fast Algorithms for Convolutional
Neural Networks", 2015, arXiv:1509.09308. A tile of 2×2 takes 16 multiplications instead of
36, one of 4×4 36 instead of 144.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import te, tirx

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.open_sizes import IrSize, divide_up, plain, simplify
from tvmflow.compiler.tir_kernels import blocked, tiles

DATA: Final = "winograd_data"
"""The name of the block that transforms data."""
PRODUCT: Final = "winograd_product"
"""The name of the block that multiplies transformed data and weights."""
IMAGE: Final = "winograd_image"
"""The name of the block that transforms the product into tiles of the result."""

_KERNEL: Final = 3


class Transforms(NamedTuple):
    """The matrices by which data, weights and product of a tile are multiplied from both sides.

    These are Bᵀ, G and Aᵀ.
    """

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
# By this factor columns that are added must make the product faster.
_MIN_PADDING_GAIN: Final = 1.25


class Geometry(NamedTuple):
    """The sizes of a Winograd convolution over volumes; images are volumes with a depth of 1.

    Attributes:
        tile: The size of a tile of the result.
        shape: Images, depth, height and width of the result.
        padding: Front, top, left.
        taps: The depth of the kernel.
        stride: The stride down the depth.
        dilation: The dilation down the depth.
        tile_columns: Columns of tiles are computed up to a multiple of it (see `pad_columns`).
    """

    tile: int
    shape: tuple[IrSize, IrSize, IrSize, IrSize]
    padding: tuple[int, int, int]
    taps: int = 1
    stride: int = 1
    dilation: int = 1
    tile_columns: int = 1

    @property
    def edge(self) -> int:
        """The size of a tile of data."""
        return self.tile + _KERNEL - 1

    @property
    def tiles(self) -> tuple[IrSize, IrSize]:
        """The rows and columns of tiles in one slice of the result."""
        rows, columns = (simplify(divide_up(n, self.tile)) for n in self.shape[2:])
        return rows, blocked.pad_to_tiles(columns, self.tile_columns)

    @property
    def slices(self) -> IrSize:
        """The depth of the data that the result reads, with padding."""
        return (self.shape[1] - 1) * self.stride + (self.taps - 1) * self.dilation + 1


def is_profitable(geometry: Geometry, out: int, inner: int, lanes: int, terms: int = 1) -> bool:
    """Return whether a Winograd convolution is estimated to be faster than a direct one.

    The estimate assumes that weights come from memory and data from a cache.

    Args:
        geometry: The sizes of the convolution.
        out: The number of output channels.
        inner: The number of input channels.
        lanes: The number of float32 values in a vector register.
        terms: The products that an instruction of the direct convolution computes for each result.
    """
    n, depth, height, width = geometry.shape
    count = n * math.prod(geometry.tiles)
    inner_blocks, out_blocks = -(-inner // lanes), -(-out // lanes)
    weights, memory_cost = geometry.taps * inner_blocks * lanes * out_blocks, _MEMORY_COST * lanes
    direct = _KERNEL**2 * weights * max(n * depth * height * width, memory_cost)
    product = geometry.edge**2 * weights * max(depth * count, memory_cost)
    transformed = geometry.slices * inner_blocks + depth * out_blocks
    transforms = _TRANSFORM_COST[geometry.tile] * lanes * count * transformed
    return bool(direct > terms * _MIN_GAIN * (product + transforms))


def pad_columns(geometry: Geometry, out_blocks: int, inner: int, cpu: CpuModel) -> Geometry:
    """Return a convolution with columns of tiles added where no register tile divides those that it has.

    Args:
        geometry: The sizes of the convolution.
        out_blocks: The number of blocks of output channels.
        inner: The number of input channels.
        cpu: The CPU.
    """
    columns = geometry.tiles[1]
    # all of a row are one register tile
    if cpu.holds_operands(1, columns):
        return geometry
    padded = tiles.pad_rows(columns, out_blocks, inner, cpu, _MIN_PADDING_GAIN)
    return geometry._replace(tile_columns=padded if padded > columns else 1)


def conv(x: Any, w: Any, geometry: Geometry) -> Any:
    """Return a convolution of blocked data with a 3×3 kernel and stride 1 in height and width.

    A kernel over volumes may have any depth.

    Args:
        x: Data (n, i, h, w, b) or (n, i, d, h, w, b).
        w: Transformed weights (t, t, o, depth, i, b of i, b of o), where t = tile + 2.
        geometry: The sizes of the convolution.

    Returns:
        The result (n, o, h, w, b) or (n, o, d, h, w, b).
    """
    product = _multiply(_transform_data(x, geometry), w, geometry)
    return _transform_product(product, geometry, len(x.shape) == 6)


def _transform_data(x: Any, geometry: Geometry) -> Any:
    """Return data as transformed tiles (t, t, i, n, slices, tiles, b)."""
    n, blocks, *_, lanes = map(plain, x.shape)
    (rows, columns), edge, tile = geometry.tiles, geometry.edge, geometry.tile
    extents = [1, *map(plain, x.shape[2:-1])][-3:]

    def padded(i: Any, c: Any, *point: Any) -> Any:
        *positions, lane = point
        offset = [
            position - before for position, before in zip(positions, geometry.padding, strict=True)
        ]
        inside = [
            tirx.all(position >= 0, position < extent)
            for position, extent in zip(offset, extents, strict=True)
        ]
        value = x(i, c, *offset[6 - len(x.shape) :], lane)
        return tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, x.dtype))

    size = (geometry.slices, rows * tile + edge - tile, columns * tile + edge - tile)
    data = te.compute((n, blocks, *size, lanes), padded, name="pad")
    row, column = te.reduce_axis((0, edge), "row"), te.reduce_axis((0, edge), "column")
    matrix = TRANSFORMS[tile].data

    def transformed(i: Any, j: Any, c: Any, image: Any, d: Any, p: Any, lane: Any) -> Any:
        y, z = p // columns * tile + row, p % columns * tile + column
        factor = _entry(matrix, i, row) * _entry(matrix, j, column)
        return te.sum(factor * data[image, c, d, y, z, lane], axis=[row, column])

    shape = (edge, edge, blocks, n, geometry.slices, rows * columns, lanes)
    return te.compute(shape, transformed, name=DATA)


def _multiply(x: Any, w: Any, geometry: Geometry) -> Any:
    """Return the product (t, t, o, n, d, tiles, b) of transformed data and weights."""
    edge, _, out, taps, blocks, lanes, out_lanes = (int(extent) for extent in w.shape)
    tap, block = te.reduce_axis((0, taps), "kd"), te.reduce_axis((0, blocks), "ic")
    channel = te.reduce_axis((0, lanes), "ib")

    def element(i: Any, j: Any, o: Any, image: Any, d: Any, p: Any, inner: Any) -> Any:
        source = d * geometry.stride + tap * geometry.dilation
        weight = w[i, j, o, tap, block, channel, inner].astype(x.dtype)
        return te.sum(
            x[i, j, block, image, source, p, channel] * weight, axis=[tap, block, channel]
        )

    shape = (edge, edge, out, *geometry.shape[:2], math.prod(geometry.tiles), out_lanes)
    return te.compute(shape, element, name=PRODUCT)


def _transform_product(x: Any, geometry: Geometry, is_volume: bool) -> Any:
    """Return a product (t, t, o, n, d, tiles, b) as the result of the convolution."""
    n, depth, *size = geometry.shape
    edge, _, blocks, *_, lanes = map(plain, x.shape)
    (rows, columns), tile = geometry.tiles, geometry.tile
    row, column = te.reduce_axis((0, edge), "row"), te.reduce_axis((0, edge), "column")
    matrix = TRANSFORMS[tile].image

    def element(i: Any, o: Any, d: Any, y: Any, z: Any, p: Any, q: Any, lane: Any) -> Any:
        factor = _entry(matrix, p, row) * _entry(matrix, q, column)
        value = x[row, column, o, i, d, y * columns + z, lane]
        return te.sum(factor * value, axis=[row, column])

    shape = (n, blocks, depth, rows, columns, tile, tile, lanes)
    image = te.compute(shape, element, name=IMAGE)

    def cropped(i: Any, o: Any, *point: Any) -> Any:
        *d, y, z, lane = point
        return image(i, o, *(d or [0]), y // tile, z // tile, y % tile, z % tile, lane)

    result = (n, blocks, *([depth] if is_volume else []), *size, lanes)
    return te.compute(result, cropped, name="crop")


def _entry(matrix: np.ndarray[Any, Any], i: Any, j: Any) -> Any:
    """Return an entry of a constant matrix: a number, once the loops over `i` and `j` are unrolled."""
    entry = tirx.const(0.0, "float32")
    for (row, column), value in np.ndenumerate(matrix):
        if value:
            is_entry = tirx.all(i == row, j == column)
            entry = tirx.Select(is_entry, tirx.const(float(value), "float32"), entry)
    return entry
