"""Products of two matrices that the model computes, as loops with their sums in registers.

A tile is `vectors` of columns times `points`, which are rows (see `schedules.register_tiles`). The
right matrix is packed first, so that the columns of a tile are one contiguous piece of memory.
The functions emit TIR; they must be called within an `IRBuilder`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import MAX_ROWS
from tvmflow.compiler.contraction.machine import PACKED_FLOATS
from tvmflow.compiler.last_vectors import LAST_LANES
from tvmflow.compiler.open_sizes import IrSize, divide_up, is_open

Element = Callable[[Any, Any], Any]
"""Row and column -> the expression that loads the element."""

FLOAT: Final = "float32"

# The most rows of a tile where their number is open.
_MAX_OPEN_POINTS: Final = 4


class Columns(NamedTuple):
    """The columns of a packed matrix, in tiles of vectors.

    Attributes:
        size: The number of columns, which may be open.
        lanes: The columns of a vector.
        vectors: The vectors of a tile; the last tile may have fewer.
    """

    size: IrSize
    lanes: int
    vectors: int

    @property
    def padded(self) -> IrSize:
        """The number of columns in whole vectors."""
        return divide_up(self.size, self.lanes) * self.lanes

    def iterate(self) -> Iterator[tuple[Any, IrSize]]:
        """Emit the loop over all tiles; yield the first column of a tile and how many it has."""
        return iterate_pieces(self.size, self.vectors * self.lanes)

    def iterate_tiles(self) -> Iterator[tuple[Any, int]]:
        """Emit the loop over all tiles; yield the first column of a tile and how many vectors it has.

        Where the number of columns is open, the last tile is one of several that are emitted.
        """
        if not is_open(self.size):
            for start, count in self.iterate():
                yield start, divide_up(count, self.lanes)
            return
        size = self.vectors * self.lanes
        whole, rest = self.size // size, divide_up(self.size % size, self.lanes)
        with T.serial(whole) as tile:
            yield tile * size, self.vectors
        for vectors in range(1, self.vectors + 1):
            with T.If(tirx.EQ(rest, tirx.const(vectors, rest.ty.dtype))), T.Then():
                yield whole * size, vectors


def iterate_pieces(length: IrSize, size: int) -> Iterator[tuple[Any, IrSize]]:
    """Emit the loop over pieces of a range; yield the start and the length of each.

    The last piece may be shorter; that of an open range may have no elements.
    """
    if is_open(length):
        with T.serial(length // size) as piece:
            yield piece * size, size
        yield length // size * size, length % size
        return
    whole = length // size
    if whole > 1:
        with T.serial(whole) as piece:
            yield piece * size, size
    elif whole:
        yield 0, size
    if length % size:
        yield whole * size, length % size


def iterate_vectors(length: IrSize, lanes: int) -> Iterator[Any]:
    """Emit vector loops over a range; yield the index.

    The last vector may be shorter; that of an open range is a loop over its numbers.
    """
    for start, count in iterate_pieces(length, lanes):
        with iterate_last(count, lanes) if is_open(count) else T.vectorized(count) as lane:
            yield start + lane


def iterate_last(count: IrSize, lanes: int) -> AbstractContextManager[Any]:
    """Emit the loop over the numbers of a last vector, which become one where a CPU has masks."""
    loop: AbstractContextManager[Any] = T.serial(count, annotations={LAST_LANES: lanes})
    return loop


class Workspace(NamedTuple):
    """A flat buffer, of which matrices are used."""

    buffer: Any

    @classmethod
    def allocate(cls, size: IrSize) -> Workspace:
        """Emit an allocation."""
        buffer = T.alloc_buffer((size,), FLOAT)
        if is_open(size):
            # by another name, or TVM would replace the size by a formula of all accesses (apache-tvm 0.27)
            buffer = T.decl_buffer((size,), FLOAT, data=buffer.data)
        return cls(buffer)

    def __getitem__(self, index: Any) -> Any:
        return tirx.BufferLoad(self.buffer, [index])

    def __setitem__(self, index: Any, value: Any) -> None:
        T.buffer_store(self.buffer, value, [index])


def pack(
    source: Element,
    is_contiguous: bool,
    depth: IrSize,
    columns: Columns,
    packed: Workspace,
    base: Any,
) -> None:
    """Emit the packing of a matrix (depth, columns) into tiles, padded with zeros to whole vectors.

    Args:
        source: The matrix.
        is_contiguous: True if the elements of a row are next to each other.
        depth: The number of rows.
        columns: The tiles of columns.
        packed: Where to write it.
        base: The place of its first tile.
    """
    for start, count in columns.iterate():
        width = divide_up(count, columns.lanes) * columns.lanes
        tile = base + start * depth
        if is_open(count):
            # whole vectors of zeros, over which the last numbers are written
            lanes = T.vectorized(columns.lanes)
            with T.If(count > 0), T.Then(), T.serial(depth) as k, lanes as lane:
                packed[tile + k * width + (width - columns.lanes) + lane] = T.float32(0)
        if is_contiguous:
            with T.serial(depth) as k:
                for column in iterate_vectors(count, columns.lanes):
                    packed[tile + k * width + column] = source(k, start + column)
        else:
            # reads along the memory: rows of data may be apart by a multiple of the cache's sets
            with T.serial(count) as column, T.serial(depth) as k:
                packed[tile + k * width + column] = source(k, start + column)
        if not is_open(count) and width > count:
            with T.serial(depth) as k, T.vectorized(width - count) as lane:
                packed[tile + k * width + count + lane] = T.float32(0)


class Product(NamedTuple):
    """A product of some rows and a packed matrix.

    Attributes:
        rows: The number of rows, a multiple of `points`.
        depth: The length of a sum, which may be open.
        columns: The columns of the packed matrix and of the result, whose rows are `columns.padded` long.
        points: The rows of a tile.
        factors: The rows of the right matrix whose factors are lanes of one vector; 1 if each is loaded.
        stride: The distance of the rows of the result; None if there is nothing between them.
    """

    rows: IrSize
    depth: IrSize
    columns: Columns
    points: int
    factors: int = 1
    stride: IrSize | None = None

    def emit(self, left: Element, packed: Workspace, base: Any, result: Workspace) -> None:
        """Emit the product.

        Args:
            left: The rows.
            packed: The right matrix, as `pack` writes it.
            base: The place of its first tile.
            result: Where to write the product.
        """
        for start, vectors in self.columns.iterate_tiles():
            for terms in self._iterate_terms(vectors * self.columns.lanes):
                with T.serial(self.rows // self.points) as group:
                    sums = Sums.allocate(self.points, vectors, self.columns.lanes)
                    corner = group * self.points, start
                    self._emit_tile(left, packed, base, result, sums, corner, terms)

    def _iterate_terms(self, width: int) -> Iterator[tuple[Any, IrSize]]:
        """Emit the loop over terms whose part of a tile stays in the cache; yield the first, and their number."""
        if is_open(self.depth):
            size = max(PACKED_FLOATS // width, 1)
            # sums of no terms are 0
            with T.serial(tirx.max(divide_up(self.depth, size), 1)) as piece:
                yield piece * size, tirx.min(self.depth - piece * size, size)
            return
        blocks = divide_up(self.depth * width, PACKED_FLOATS)
        size = divide_up(divide_up(self.depth, blocks), self.factors) * self.factors
        yield from iterate_pieces(self.depth, size)

    @contextlib.contextmanager
    def _iterate_factors(self, count: IrSize) -> Iterator[Any]:
        """Emit the loop over the terms of sums, unrolled where factors are lanes; yield the term."""
        if self.factors == 1 or is_open(count) or count % self.factors:
            with T.serial(count) as k:
                yield k
        else:
            with T.serial(count // self.factors) as group, T.unroll(self.factors) as lane:
                yield group * self.factors + lane

    def _emit_tile(
        self,
        left: Element,
        packed: Workspace,
        base: Any,
        result: Workspace,
        sums: Sums,
        corner: tuple[Any, Any],
        terms: tuple[Any, IrSize],
    ) -> None:
        """Add some terms of the sums of one tile; `corner` is its first row and column."""
        (row, start), (first, count) = corner, terms
        stride = self.columns.padded if self.stride is None else self.stride

        def place(point: Any, column: Any) -> Any:
            return (row + point) * stride + start + column

        for index, point, column in sums.iterate():
            initial = T.float32(0)
            if is_open(self.depth) or count < self.depth:
                zero = tirx.const(0, first.ty.dtype) if is_open(first) else 0
                initial = tirx.Select(tirx.EQ(first, zero), initial, result[place(point, column)])
            sums.store(index, initial)
        tile, width = base + start * self.depth, sums.vectors * sums.lanes
        with self._iterate_factors(count) as k:
            for index, point, column in sums.iterate():
                term = left(row + point, first + k) * packed[tile + (first + k) * width + column]
                sums.store(index, sums.load(index) + term)
        for index, point, column in sums.iterate():
            result[place(point, column)] = sums.load(index)


class Sums(NamedTuple):
    """The sums of a tile; LLVM holds them in registers."""

    buffer: Any
    points: int
    vectors: int
    lanes: int

    @classmethod
    def allocate(cls, points: int, vectors: int, lanes: int) -> Sums:
        """Emit an allocation."""
        shape = (points, vectors, lanes)
        return cls(T.alloc_buffer(shape, FLOAT, scope="local"), *shape)

    def iterate(self) -> Iterator[tuple[list[Any], Any, Any]]:
        """Emit loops over all sums; yield the index of a sum, its point and its column."""
        with T.unroll(self.points) as p, T.unroll(self.vectors) as v, T.vectorized(self.lanes) as c:
            yield [p, v, c], p, v * self.lanes + c

    def load(self, index: list[Any]) -> Any:
        """Return the expression that loads a sum."""
        return tirx.BufferLoad(self.buffer, index)

    def store(self, index: list[Any], value: Any) -> None:
        """Emit the store of a sum."""
        T.buffer_store(self.buffer, value, index)


def max_points_of(rows: IrSize) -> int:
    """Return the most rows of a tile: of an open number, the last tile should compute few others."""
    return _MAX_OPEN_POINTS if is_open(rows) else MAX_ROWS


def count_rows(rows: IrSize, first: Any, together: int, points: int) -> IrSize:
    """Return how many rows of a block are computed: whole tiles, where the number of rows is open.

    Args:
        rows: The number of rows.
        first: The first row of the block.
        together: The rows of a block.
        points: The rows of a tile.
    """
    if not is_open(rows):
        return together
    return tirx.min(divide_up(rows - first, points) * points, together)
