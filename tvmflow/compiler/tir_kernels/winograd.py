"""The kernels of Winograd convolutions of 3×3 (`contraction.winograd`) on blocked data.

The result is split into tiles. Data and weights of a tile are transformed and multiplied elementwise (a matmul over
channels for each element of the tile), and the product is transformed back. Algorithm and matrices: Lavin and
Gray, arXiv:1509.09308.

With stride 2, the first and last kernel position of an axis read data at even positions. They form a convolution of
kernel size 2 with stride 1, F(2, 2) or F(4, 2). The middle one reads data at odd positions, and multiplies directly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.packed import (
    FLOAT,
    allocate,
    allocate_registers,
    loop_over,
    positive,
)
from tvmflow.compiler.contraction.winograd import KERNEL, DynamicBlocks, Geometry
from tvmflow.compiler.tir_kernels.definitions import if_else, when
from tvmflow.core.choices import tile_size
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, plain
from tvmflow.graph.ir import WINOGRAD_COLUMNS

_Array = np.ndarray[Any, Any]

# The names of blocks. If transforms are separate, columns are transformed first.
DATA: Final = "winograd_data"
PRODUCT: Final = "winograd_product"
IMAGE: Final = "winograd_image"
DATA_COLUMNS, IMAGE_COLUMNS = WINOGRAD_COLUMNS


class Transforms(NamedTuple):
    """The matrices Bᵀ, G and Aᵀ that transform data, weights and product along one axis of a tile.

    Terms of a group are added first (see `_sum_row`). Elements of data beyond the rows of G use the weights of its last
    row.
    """

    data: _Array
    weights: _Array
    image: _Array
    data_groups: Sequence[Sequence[int]]
    image_groups: Sequence[Sequence[int]]


def _make_transforms(data: _Array, weights: _Array, image: _Array) -> Transforms:
    edge = len(data)
    # groups begin with the same value in both rows of a pair that differs only in signs
    data_groups = [range(edge - 2, -1, -2), range(edge - 1, 0, -2)]
    image_groups = [(0,), *((at, at + 1) for at in range(1, edge - 1, 2)), (edge - 1,)]
    return Transforms(data, weights, image, data_groups=data_groups, image_groups=image_groups)


def _make_strided_transforms(data: _Array, weights: _Array, image: _Array) -> Transforms:
    """Return the transforms of a convolution with stride 2.

    The arguments are the transforms for kernel size 2 with stride 1, of data at even positions and of the first and
    last weights.
    """
    tile, even = image.shape
    edge = even + tile
    all_data, all_weights = np.zeros((edge, edge)), np.zeros((even + 1, KERNEL))
    all_data[:even, ::2], all_data[even:, 1::2] = data, np.eye(tile)
    all_weights[:even, ::2], all_weights[even, 1] = weights, 1
    return Transforms(
        all_data,
        all_weights,
        np.concatenate([image, np.eye(tile)], 1),
        data_groups=[range(2, edge, 4), range(0, edge, 4), *((at,) for at in range(1, edge, 2))],
        image_groups=[(0,), (1, 2), *((at,) for at in range(3, edge))],
    )


TRANSFORMS: Final[Mapping[int, Transforms]] = {
    2: _make_transforms(
        np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
        np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]),
        np.array([[1, 1, 1, 0], [0, 1, -1, -1]]),
    ),
    4: _make_transforms(
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
"""The transforms of convolutions with stride 1, by the size of a tile along an axis."""
_STRIDED_TRANSFORMS: Final[Mapping[int, Transforms]] = {
    2: _make_strided_transforms(
        np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1]]),
        np.array([[1, 0], [1, 1], [0, 1]]),
        np.array([[1, 1, 0], [0, 1, 1]]),
    ),
    # interpolation points 0, 1, -1, 2 and infinity
    4: _make_strided_transforms(
        np.array(
            [
                [2, -1, -2, 1, 0],
                [0, -2, -1, 1, 0],
                [0, 2, -3, 1, 0],
                [0, -1, 0, 1, 0],
                [0, 2, -1, -2, 1],
            ]
        ),
        np.array([[3, 0], [-3, -3], [-1, 1], [1, 2], [0, 6]]) / 6,
        np.array([[1, 1, 1, 1, 0], [0, 1, -1, 2, 0], [0, 1, 1, 4, 0], [0, 1, -1, 8, 1]]),
    ),
}


def transforms_of(geometry: Geometry) -> tuple[Transforms, Transforms]:
    """Return the transforms of a tile: along its columns, and along its rows."""
    by_size = TRANSFORMS if geometry.step == 1 else _STRIDED_TRANSFORMS
    rows, columns = (by_size[size] for size in tile_size(geometry.tile))
    return rows, columns


def conv(x: Any, w: Any, geometry: Geometry) -> Any:
    """Return a convolution (n, o, h, w, b) or (n, o, d, h, w, b) with a 3×3 kernel of any depth.

    Data are (n, i, h, w, b) or (n, i, d, h, w, b). Transformed weights are (s, t, o, depth, i of a group, b of i, b of
    o); s and t are the rows and columns of a tile plus 2. Groups have equal numbers of blocks. With a stride of 2, the
    rows and columns at odd positions are last.
    """
    product = _multiply(_transform_data(x, geometry), w, geometry)
    return _transform_product(product, geometry, len(x.shape) == 6)


def _transform_data(x: Any, geometry: Geometry) -> Any:
    """Return data as transformed tiles (s, t, i, n, slices, tiles, b)."""
    n, blocks, *_, lanes = map(plain, x.shape)
    (rows, columns), (height, width) = geometry.tiles, geometry.edges
    extents = [1, *map(plain, x.shape[2:-1])][-3:]

    def padded(i: Any, c: Any, *tile_row: Any) -> Any:
        *positions, lane = tile_row
        offset = [at - before for at, before in zip(positions, geometry.padding, strict=True)]
        inside = [tirx.all(at >= 0, at < n) for at, n in zip(offset, extents, strict=True)]
        value = x(i, c, *offset[6 - len(x.shape) :], lane)
        return tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, x.dtype))

    down_step, step = (size * geometry.step for size in tile_size(geometry.tile))
    size = (rows * down_step + height - down_step, columns * step + width - step)
    data = te.compute((n, blocks, geometry.slices, *size, lanes), padded, name="pad")
    of_columns, of_rows = transforms_of(geometry)
    shape = (height, width, blocks, n, geometry.slices, rows * columns, lanes)
    if geometry.is_separate:

        def down(i: Any, z: Any, c: Any, image: Any, d: Any, p: Any, lane: Any) -> Any:
            y, z = p // columns * down_step, p % columns * step + z
            column = [data(image, c, d, y + row, z, lane) for row in range(height)]
            return _select_row(of_columns.data, of_columns.data_groups, column, i)

        half = te.compute(shape, down, name=DATA_COLUMNS)

        def across(i: Any, j: Any, *coordinates: Any) -> Any:
            row = [half(i, z, *coordinates) for z in range(width)]
            return _select_row(of_rows.data, of_rows.data_groups, row, j)

        return te.compute(shape, across, name=DATA)
    row, column = te.reduce_axis((0, height), "row"), te.reduce_axis((0, width), "column")

    def transformed(i: Any, j: Any, c: Any, image: Any, d: Any, p: Any, lane: Any) -> Any:
        y, z = p // columns * down_step + row, p % columns * step + column
        factor = _entry(of_columns.data, i, row, x.dtype) * _entry(of_rows.data, j, column, x.dtype)
        return te.sum(factor * data[image, c, d, y, z, lane], axis=[row, column])

    return te.compute(shape, transformed, name=DATA)


def _multiply(x: Any, w: Any, geometry: Geometry) -> Any:
    """Return the matmuls (s, t, o, n, d, tiles, b) of transformed data and weights."""
    *last, out, kernel_depth, blocks, lanes, out_lanes = (int(extent) for extent in w.shape)
    sizes = {"kd": kernel_depth, "ic": blocks, "ib": lanes}
    depth_step, block, channel = (te.reduce_axis((0, n), name) for name, n in sizes.items())
    groups = int(x.shape[2]) // blocks

    def element(i: Any, j: Any, o: Any, image: Any, d: Any, p: Any, inner: Any) -> Any:
        source = d * geometry.stride + depth_step * geometry.dilation
        coordinates = [
            at if edge == size else tirx.min(at, size - 1)
            for at, edge, size in zip((i, j), geometry.edges, last, strict=True)
        ]
        weight = w(*coordinates, o, depth_step, block, channel, inner).astype(x.dtype)
        own = o // (out // groups) * blocks + block if groups > 1 else block
        product = x[i, j, own, image, source, p, channel] * weight
        return te.sum(product, axis=[depth_step, block, channel])

    shape = (*geometry.edges, out, *geometry.shape[:2], math.prod(geometry.tiles), out_lanes)
    return te.compute(shape, element, name=PRODUCT)


def _transform_product(x: Any, geometry: Geometry, is_volume: bool) -> Any:
    """Return the convolution's result, from the matmuls' results (s, t, o, n, d, tiles, b)."""
    n, depth, *size = geometry.shape
    height, width, blocks, *_, lanes = map(plain, x.shape)
    (rows, columns), (tile_rows, tile_columns) = geometry.tiles, tile_size(geometry.tile)
    row, column = te.reduce_axis((0, height), "row"), te.reduce_axis((0, width), "column")
    of_columns, of_rows = transforms_of(geometry)

    def down(p: Any, z: Any, *coordinates: Any) -> Any:
        values = [x(y, z, *coordinates) for y in range(height)]
        return _select_row(of_columns.image, of_columns.image_groups, values, p)

    def across(i: Any, o: Any, d: Any, y: Any, z: Any, p: Any, q: Any, lane: Any) -> Any:
        values = [half(p, step, o, i, d, y * columns + z, lane) for step in range(width)]
        return _select_row(of_rows.image, of_rows.image_groups, values, q)

    def element(i: Any, o: Any, d: Any, y: Any, z: Any, p: Any, q: Any, lane: Any) -> Any:
        left, right = (of_columns.image, p, row), (of_rows.image, q, column)
        factor = _entry(*left, x.dtype) * _entry(*right, x.dtype)
        value = x[row, column, o, i, d, y * columns + z, lane]
        return te.sum(factor * value, axis=[row, column])

    shape = (n, blocks, depth, rows, columns, tile_rows, tile_columns, lanes)
    if geometry.is_separate:
        half = te.compute((tile_rows, *map(plain, x.shape[1:])), down, name=IMAGE_COLUMNS)
    image = te.compute(shape, across if geometry.is_separate else element, name=IMAGE)

    def cropped(i: Any, o: Any, *tile_row: Any) -> Any:
        *d, y, z, lane = tile_row
        tile = (y // tile_rows, z // tile_columns, y % tile_rows, z % tile_columns)
        return image(i, o, *(d or [0]), *tile, lane)

    result = (n, blocks, *([depth] if is_volume else []), *size, lanes)
    return te.compute(result, cropped, name="crop")


def _entry(matrix: _Array, i: Any, j: Any, dtype: str) -> Any:
    """Return an entry of a constant matrix, which unrolled loops over `i` and `j` make a constant."""
    entry = tirx.const(0.0, dtype)
    for (row, column), value in np.ndenumerate(matrix):
        if value:
            is_entry = tirx.all(i == row, j == column)
            entry = tirx.Select(is_entry, tirx.const(float(value), dtype), entry)
    return entry


def _select_row(
    matrix: _Array, groups: Sequence[Sequence[int]], values: Sequence[Any], i: Any
) -> Any:
    """Return the dot product of row `i` and `values`; an unrolled loop over `i` selects one sum."""
    *others, last = (_sum_row(row, groups, values) for row in matrix)
    for number, product in reversed(list(enumerate(others))):
        last = tirx.Select(tirx.EQ(i, number), product, last)
    return last


def _sum_row(row: Sequence[Any], groups: Sequence[Sequence[int]], values: Sequence[Any]) -> Any:
    """Return the dot product of a row of a matrix and some values, added up in groups.

    Rows that differ only in the coefficient of a group share the group's sum, which LLVM computes once. A group
    begins with a value without a coefficient, so that each other value takes one addition or FMA.
    """
    parts = []
    for group in groups:
        used = [index for index in group if row[index]]
        if used:
            base = min(used, key=lambda index: abs(row[index]))
            scaled = [(float(row[index] / row[base]), values[index]) for index in used]
            parts.append((float(row[base]), sorted(scaled, key=lambda term: term[0] != 1)))
    parts.sort(key=lambda part: part[0] != 1)
    if parts[0][0] < 0:
        (factor, terms), *others = parts
        negative = sorted(((-scale, value) for scale, value in terms), key=lambda t: t[0] != 1)
        parts = [(-factor, negative), *others]
    return _sum_terms([(factor, _sum_terms(terms)) for factor, terms in parts])


def _sum_terms(terms: Sequence[tuple[float, Any]]) -> Any:
    total: Any = None
    for factor, value in terms:
        total = _add(total, factor, value)
    return total


# ---------------------------------------------------------------- dynamic images
# The loops of a convolution with a dynamic number of tiles. The tiles of all images are numbered consecutively and
# computed in blocks, in buffers of a fixed size; the last block has the remaining tiles. Data and product of a tile are
# transformed along one axis and then along the other, which takes fewer additions than the tensor expression.


class DynamicConvolution(NamedTuple):
    """A convolution of images with a dynamic number of tiles.

    Attributes:
        data: The buffer of data (n, i, h, w, b).
        weights: The buffer of transformed weights (t, t, o, 1, i, b of i, b of o).
        tile: The size of a tile of the result.
        size: Height and width of the result.
        padding: The rows of padding above the data and the columns to their left.
        store: Emits the store of a result, from its indices (n, o, y, z, lane) and the value.
    """

    data: Any
    weights: Any
    tile: int
    size: tuple[IrSize, IrSize]
    padding: tuple[int, int]
    store: Callable[[Sequence[Any], Any], None]


class DynamicLoops:
    """The loops of a convolution."""

    def __init__(self, convolution: DynamicConvolution, blocks: DynamicBlocks) -> None:
        self._own, self._blocks = convolution, blocks
        self._edge = convolution.tile + KERNEL - 1
        self._inner, self._lanes = (int(convolution.data.shape[axis]) for axis in (1, 4))
        # an odd number of vectors, so that not all elements of a tile map to the same cache set
        self._data_step = (self._inner * blocks.limit | 1) * self._lanes
        self._product_step = (blocks.tile.vectors * blocks.limit | 1) * self._lanes
        self._count: Any = None
        self._coordinates: Any = None

    def emit(self) -> None:
        """Emit the loops; must be called within an `IRBuilder`."""
        own, blocks = self._own, self._blocks
        rows, columns = (T.Bind(divide_up(size, own.tile)) for size in own.size)
        total = T.Bind(own.data.shape[0] * rows * columns)
        parts = blocks.parts if blocks.in_blocks else positive(divide_up(total, blocks.limit))
        pieces = divide_up(divide_up(total, parts), blocks.tile.rows)
        size = T.Bind(tirx.min(pieces * blocks.tile.rows, blocks.limit))
        with self._loop(divide_up(total, positive(size)), blocks.in_blocks) as block:
            first = T.Bind(block * size)
            self._count = T.Bind(tirx.min(size, total - first))
            self._find_coordinates(first, rows, columns)
            data = allocate(self._edge**2 * self._data_step)
            with (
                self._loop(_int64(self._inner), not blocks.in_blocks) as channel,
                T.serial(self._count) as t,
            ):
                self._transform_data(data, channel, t)
            groups = int(own.weights.shape[2]) // blocks.tile.vectors
            with self._loop(_int64(groups), not blocks.in_blocks) as group:
                product = allocate(self._edge**2 * self._product_step)
                self._multiply(data, product, group)
                with T.serial(self._count) as t, T.serial(_int64(blocks.tile.vectors)) as vector:
                    self._transform_product(product, group, vector, t)

    def _loop(self, extent: Any, is_parallel: bool) -> Any:
        return loop_over(extent, is_parallel and self._blocks.is_parallel)

    def _find_coordinates(self, first: Any, rows: Any, columns: Any) -> None:
        """Emit the coordinates of each tile of a block: image, and first row and column of the result."""
        self._coordinates = allocate(3 * self._blocks.limit, dtype="int64")
        with T.serial(self._count) as t:
            row, column = (f(first + t, positive(columns)) for f in (tirx.floordiv, tirx.floormod))
            image, row = (f(row, positive(rows)) for f in (tirx.floordiv, tirx.floormod))
            for axis, pixel in enumerate((image, row * self._own.tile, column * self._own.tile)):
                self._coordinates[t * 3 + axis] = pixel

    def _read_coordinates(self, t: Any) -> list[Any]:
        return [T.Bind(self._coordinates[t * 3 + axis]) for axis in range(3)]

    def _transform_data(self, data: Any, channel: Any, t: Any) -> None:
        own, edge = self._own, self._edge
        image, *corner = self._read_coordinates(t)
        # `dynamic_tiles` assumes that variables are not negative
        axes = list(zip(corner, own.padding, own.data.shape[2:4], strict=True))
        base = (channel * self._blocks.limit + t) * self._lanes

        def load(*at: Any) -> Any:
            steps = zip(axes, at[:2], strict=True)
            pixel = [first + step - before for (first, before, _), step in steps]
            return tirx.BufferLoad(own.data, [image, channel, *pixel, at[2]])

        def is_inside(count: int, *at: Any) -> Any:
            conditions = []
            for (first, before, extent), step in zip(axes, at, strict=True):
                conditions += [first + step >= before, first + step + count <= extent + before]
            return tirx.all(*conditions)

        def store(i: Any, j: Any, lane: Any, value: Any) -> None:
            data[(i * edge + j) * self._data_step + base + lane] = value

        transforms = TRANSFORMS[own.tile]
        matrix, groups = transforms.data, transforms.data_groups

        def transform_patch() -> None:
            patch = allocate_registers(edge, edge, self._lanes)
            with _unroll(edge, edge, lanes=self._lanes) as at:
                patch[at] = tirx.if_then_else(is_inside(1, *at[:2]), load(*at), T.float32(0))
            self._transform(matrix, groups, lambda *at: patch[at], store)

        transform_image = functools.partial(self._transform, matrix, groups, load, store)
        if_else(is_inside(edge, 0, 0), transform_image, transform_patch)

    def _multiply(self, data: Any, product: Any, group: Any) -> None:
        tile_rows = self._blocks.tile.rows
        with T.serial(_int64(self._edge)) as i, T.serial(_int64(self._edge)) as j:
            with T.serial(self._count // tile_rows) as piece:
                self._multiply_tiles(data, product, group, (i, j), piece * tile_rows, tile_rows)
            rest = self._count % tile_rows
            for size in range(1, tile_rows):
                with when(tirx.EQ(rest, _int64(size))):
                    self._multiply_tiles(data, product, group, (i, j), self._count - size, size)

    def _multiply_tiles(
        self, data: Any, product: Any, group: Any, element: Any, first: Any, tile_rows: int
    ) -> None:
        """Emit the matmul for `tile_rows` tiles, with accumulators in registers."""
        (i, j), limit, vectors = element, self._blocks.limit, self._blocks.tile.vectors
        number = i * self._edge + j
        sums = allocate_registers(tile_rows, vectors, self._lanes)
        with _unroll(tile_rows, vectors, lanes=self._lanes) as at:
            sums[at] = T.float32(0)
        with (
            T.serial(_int64(self._inner)) as block,
            T.serial(_int64(self._lanes)) as channel,
            _unroll(tile_rows, vectors, lanes=self._lanes) as at,
        ):
            tile_row, vector, lane = at
            start = number * self._data_step + (block * limit + first + tile_row) * self._lanes
            index = [i, j, group * vectors + vector, _int64(0), block, channel, lane]
            weight = tirx.BufferLoad(self._own.weights, index).astype(FLOAT)
            sums[at] = sums[at] + data[start + channel] * weight
        with _unroll(tile_rows, vectors, lanes=self._lanes) as at:
            tile_row, vector, lane = at
            start = number * self._product_step + (vector * limit + first + tile_row) * self._lanes
            product[start + lane] = sums[at]

    def _transform_product(self, product: Any, group: Any, vector: Any, t: Any) -> None:
        own, edge, tile = self._own, self._edge, self._own.tile
        image, row, column = self._read_coordinates(t)
        base = (vector * self._blocks.limit + t) * self._lanes
        result, transforms = allocate_registers(tile, tile, self._lanes), TRANSFORMS[tile]

        def load(i: Any, j: Any, lane: Any) -> Any:
            return product[(i * edge + j) * self._product_step + base + lane]

        def keep(i: Any, j: Any, lane: Any, value: Any) -> None:
            result[i, j, lane] = value

        self._transform(transforms.image, transforms.image_groups, load, keep)

        def store(y: Any, z: Any) -> None:
            block = group * self._blocks.tile.vectors + vector
            with T.vectorized(_int64(self._lanes)) as lane:
                pixel = [image, block, row + y, column + z, lane]
                own.store(pixel, result[y, z, lane])

        def store_all() -> None:
            with _unroll(tile, tile) as at:
                store(*at)

        def store_existing() -> None:
            with (
                _unroll(tile, tile) as (y, z),
                when(tirx.all(row + y < height, column + z < width)),
            ):
                store(y, z)

        height, width = own.size
        is_whole = tirx.all(row + tile <= height, column + tile <= width)
        if_else(is_whole, store_all, store_existing)

    def _transform(
        self, matrix: _Array, groups: Any, load: Callable[..., Any], store: Callable[..., None]
    ) -> None:
        """Emit the product of a matrix, a tile, and the transpose of the matrix.

        `load` takes a row, column and lane of the tile; `store` takes a row, column and lane of the product, and the
        value.
        """
        rows, edge = matrix.shape
        half = allocate_registers(rows, edge, self._lanes)
        with _unroll(edge, lanes=self._lanes) as (z, lane):
            values = [load(_int64(y), z, lane) for y in range(edge)]
            for i in range(rows):
                half[i, z, lane] = _sum_row(list(matrix[i]), groups, values)
        with _unroll(rows, lanes=self._lanes) as (i, lane):
            values = [half[i, z, lane] for z in range(edge)]
            for j in range(rows):
                store(i, _int64(j), lane, _sum_row(list(matrix[j]), groups, values))


def _add(total: Any, factor: float, value: Any) -> Any:
    """Return `total` plus a value times a factor; `total` may be None."""
    dtype = str(value.ty.dtype)
    term = value if abs(factor) == 1 else value * tirx.const(abs(factor), dtype)
    if total is None:
        return term if factor > 0 else tirx.const(0, dtype) - term
    return total + term if factor > 0 else total - term


@contextmanager
def _unroll(*extents: int, lanes: int = 0) -> Iterator[list[Any]]:
    """Emit unrolled loops, and the loop over the lanes of a vector if there are any."""
    with ExitStack() as stack:
        loops = [T.unroll(_int64(extent)) for extent in extents]
        loops += [T.vectorized(_int64(lanes))] if lanes else []
        yield [stack.enter_context(loop) for loop in loops]


def _int64(number: int) -> Any:
    return tirx.const(number, "int64")
