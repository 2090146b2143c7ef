"""Matmuls of two computed matrices, as loops with accumulators in registers.

A register tile is `rows` rows times `vectors` vectors of columns. The right matrix is packed first, so that the
columns of a tile are contiguous in memory. The functions emit TIR; they must be called within an `IRBuilder`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.machine import BATCHES_PER_CORE, PACKED_FLOATS
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, is_dynamic

Element = Callable[[Any, Any], Any]
"""Row and column -> the expression that loads the element."""

FLOAT: Final = "float32"
LAST_LANES: Final = "tvmflow.last_lanes"
"""The annotation of a loop over the elements of a tail vector; its value is the number of lanes."""


def positive(size: IrSize) -> IrSize:
    """Return a size to divide by: TVM takes some dynamic sizes for 0 (apache-tvm 0.27)."""
    return tirx.max(size, 1) if is_dynamic(size) else size


def allocate(*shape: IrSize, dtype: str = FLOAT) -> Any:
    """Emit the allocation of a buffer."""
    buffer = T.alloc_buffer(shape, dtype)
    if any(map(is_dynamic, shape)):
        # declared again: TVM replaces the size of an allocated buffer by a formula of all accesses (apache-tvm 0.27)
        buffer = T.decl_buffer(shape, dtype, data=buffer.data)
    return T.buffer_proxy(buffer)


def allocate_registers(*shape: int, dtype: str = FLOAT) -> Any:
    """Emit the allocation of a buffer that LLVM holds in registers."""
    return T.buffer_proxy(T.alloc_buffer(shape, dtype, scope="local"))


def reduce_lanes(vector: Any, function: Callable[[Any, Any], Any], lanes: int) -> None:
    """Emit a pairwise reduction of a vector into its first lane; `lanes` is a power of two."""
    while lanes > 1:
        lanes //= 2
        with T.vectorized(lanes) as lane:
            vector[lane] = function(vector[lane], vector[lane + lanes])


class Columns(NamedTuple):
    """The columns of a packed matrix, in tiles of `vectors` vectors; the tail tile may have fewer."""

    size: IrSize
    lanes: int
    vectors: int

    @property
    def padded(self) -> IrSize:
        """The number of columns, rounded up to whole vectors."""
        return divide_up(self.size, self.lanes) * self.lanes

    def iterate(self) -> Iterator[tuple[Any, IrSize]]:
        """Emit the loop over all tiles; yield the first column and the number of columns of each."""
        return iterate_pieces(self.size, self.vectors * self.lanes)

    def iterate_tiles(self) -> Iterator[tuple[Any, int]]:
        """Emit the loop over all tiles; yield the first column and the number of vectors of each.

        If the number of columns is dynamic, a tail tile is emitted for each number of vectors it may have.
        """
        if not is_dynamic(self.size):
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

    The last piece may be shorter; the last piece of a dynamic range may be empty.
    """
    if is_dynamic(length):
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

    The last vector may be shorter; in a dynamic range, a loop over its elements computes it.
    """
    for start, count in iterate_pieces(length, lanes):
        with iterate_last(count, lanes) if is_dynamic(count) else T.vectorized(count) as lane:
            yield start + lane


@contextlib.contextmanager
def iterate_row(count: int, lanes: int) -> Iterator[Any]:
    """Emit a loop over a row, in vectors if they divide it, else over its elements; yield the index."""
    if count % lanes:
        with T.serial(count) as index:
            yield index
    else:
        with T.serial(count // lanes) as vector, T.vectorized(lanes) as lane:
            yield vector * lanes + lane


def iterate_last(count: IrSize, lanes: int) -> AbstractContextManager[Any]:
    """Emit the loop over the elements of a tail vector; CPUs with masks compute it as one vector."""
    loop: AbstractContextManager[Any] = T.serial(count, annotations={LAST_LANES: lanes})
    return loop


def pack(
    source: Element,
    is_contiguous: bool,
    depth: IrSize,
    columns: Columns,
    packed: Any,
    base: Any,
) -> None:
    """Emit the packing of a matrix (depth, columns) into tiles, padded with zeros to whole vectors.

    The first tile is written at `base`. If `is_contiguous`, the elements of a row are adjacent in memory.
    """
    for start, count in columns.iterate():
        width = divide_up(count, columns.lanes) * columns.lanes
        tile = base + start * depth
        if is_dynamic(count):
            # zero the last vector of each row; the last elements overwrite some of its lanes
            lanes = T.vectorized(columns.lanes)
            with T.If(count > 0), T.Then(), T.serial(depth) as k, lanes as lane:
                packed[tile + k * width + (width - columns.lanes) + lane] = T.float32(0)
        if is_contiguous:
            with T.serial(depth) as k:
                for column in iterate_vectors(count, columns.lanes):
                    packed[tile + k * width + column] = source(k, start + column)
        else:
            # Read in memory order: rows may lie a multiple of the cache's sets apart and evict each other.
            with T.serial(count) as column, T.serial(depth) as k:
                packed[tile + k * width + column] = source(k, start + column)
        if not is_dynamic(count) and width > count:
            with T.serial(depth) as k, T.vectorized(width - count) as lane:
                packed[tile + k * width + count + lane] = T.float32(0)


class Product(NamedTuple):
    """A matmul of some rows with a packed matrix.

    Attributes:
        rows: The number of rows, a multiple of `tile_rows`.
        depth: The length of the reduction, which may be dynamic.
        columns: The columns of the packed matrix and of the result. A row of the result has `columns.padded` elements.
        tile_rows: The number of rows in a tile.
        factors: The number of terms whose left multiplicands are lanes of one vector; 1 if each is loaded separately.
        stride: The distance between rows of the result, in elements; None if they are contiguous.
        packed_depth: The length of the packed columns; None if the matmul reads all of their terms.
        packed_start: The first term that the matmul reads.
    """

    rows: IrSize
    depth: IrSize
    columns: Columns
    tile_rows: int
    factors: int = 1
    stride: IrSize | None = None
    packed_depth: IrSize | None = None
    packed_start: IrSize = 0

    def emit(self, left: Element, packed: Any, base: Any, result: Any) -> None:
        """Emit the matmul with the matrix that `pack` has written at `base`."""
        for start, vectors in self.columns.iterate_tiles():
            for terms in self._iterate_terms(vectors * self.columns.lanes):
                with T.serial(self.rows // self.tile_rows) as group:
                    corner = group * self.tile_rows, start
                    self._emit_tile(left, packed, base, result, vectors, corner, terms)

    def _iterate_terms(self, width: int) -> Iterator[tuple[Any, IrSize]]:
        """Emit the loop over blocks of terms that fit the cache; yield the first term and the count of each."""
        if is_dynamic(self.depth):
            size = max(PACKED_FLOATS // width, 1)
            # at least one block, which writes the zeros of an empty reduction
            with T.serial(tirx.max(divide_up(self.depth, size), 1)) as piece:
                yield piece * size, tirx.min(self.depth - piece * size, size)
            return
        blocks = divide_up(self.depth * width, PACKED_FLOATS)
        size = divide_up(divide_up(self.depth, blocks), self.factors) * self.factors
        yield from iterate_pieces(self.depth, size)

    @contextlib.contextmanager
    def _iterate_factors(self, count: IrSize) -> Iterator[Any]:
        """Emit the loop over reduced terms, unrolled where multiplicands are lanes; yield the term."""
        if self.factors == 1 or is_dynamic(count) or count % self.factors:
            with T.serial(count) as k:
                yield k
        else:
            with T.serial(count // self.factors) as group, T.unroll(self.factors) as lane:
                yield group * self.factors + lane

    def _emit_tile(
        self,
        left: Element,
        packed: Any,
        base: Any,
        result: Any,
        vectors: int,
        corner: tuple[Any, Any],
        terms: tuple[Any, IrSize],
    ) -> None:
        """Add some terms to the accumulators of one tile; `corner` is its first row and column."""
        (row, start), (first, count) = corner, terms
        stride = self.columns.padded if self.stride is None else self.stride

        def offset_of(tile_row: Any, column: Any) -> Any:
            return (row + tile_row) * stride + start + column

        length = self.depth if self.packed_depth is None else self.packed_depth
        tile, width = base + start * length, vectors * self.columns.lanes
        sums = Accumulators.allocate(self.tile_rows, vectors, self.columns.lanes)
        for index, tile_row, column in sums.iterate():
            initial = T.float32(0)
            if is_dynamic(self.depth) or count < self.depth:
                zero = tirx.const(0, first.ty.dtype) if is_dynamic(first) else 0
                initial = tirx.Select(
                    tirx.EQ(first, zero), initial, result[offset_of(tile_row, column)]
                )
            sums.buffer[index] = initial
        with self._iterate_factors(count) as k:
            sums.add(
                lambda tile_row: left(row + tile_row, first + k),
                lambda column: packed[tile + (self.packed_start + first + k) * width + column],
            )
        for index, tile_row, column in sums.iterate():
            result[offset_of(tile_row, column)] = sums.buffer[index]


class Accumulators(NamedTuple):
    """The accumulators of a register tile: (rows, vectors, lanes)."""

    buffer: Any
    rows: int
    vectors: int
    lanes: int

    @classmethod
    def allocate(cls, *shape: int) -> Accumulators:
        """Emit the allocation of accumulators of a shape (rows, vectors, lanes)."""
        return cls(allocate_registers(*shape), *shape)

    def iterate(self) -> Iterator[tuple[list[Any], Any, Any]]:
        """Emit loops over all accumulators; yield the index, row and column of each."""
        with T.unroll(self.rows) as p, T.unroll(self.vectors) as v, T.vectorized(self.lanes) as c:
            yield [p, v, c], p, v * self.lanes + c

    def add(self, left: Callable[[Any], Any], right: Callable[[Any], Any]) -> None:
        """Emit the multiply-adds of each row's `left` and each column's `right`."""
        for index, row, column in self.iterate():
            self.buffer[index] = self.buffer[index] + left(row) * right(column)


def count_rows(rows: IrSize, first: Any, together: int, tile_rows: int) -> IrSize:
    """Return the number of rows to compute in a block of `together`: whole tiles if it is dynamic."""
    if not is_dynamic(rows):
        return together
    return tirx.min(divide_up(rows - first, tile_rows) * tile_rows, together)


class Batches(NamedTuple):
    """Left matrices with `blocks` blocks of rows; `shared` consecutive ones share packed matrices.

    `typical` is the number of matrices, or its tuning size if the number is dynamic.
    """

    matrices: IrSize
    shared: int
    blocks: IrSize
    typical: int


def emit_batches(
    batches: Batches,
    sizes: Sequence[IrSize],
    cores: int,
    pack: Callable[[Any, Sequence[Any], Any], None],
    compute: Callable[[Any, Any, Sequence[Any], Any], None],
) -> None:
    """Emit the loops over the parts of a kernel's work.

    Args:
        batches: The parts.
        sizes: The sizes of the packed matrices of a group, in elements.
        cores: The cores that the work is divided between.
        pack: Emits the packing for a group, into a slot of buffers.
        compute: Emits a block of rows of a matrix, with the packed matrices in a slot of buffers.
    """
    groups, is_parallel = batches.matrices // batches.shared, cores > 1
    if not is_parallel or batches.typical // batches.shared >= BATCHES_PER_CORE * cores:
        with loop_over(groups, is_parallel) as group:
            packed = [allocate(size) for size in sizes]
            pack(group, packed, 0)
            with T.serial(batches.shared) as member, T.serial(batches.blocks) as block:
                compute(group * batches.shared + member, block, packed, 0)
        return
    packed = [allocate(groups * size) for size in sizes]
    with loop_over(groups, is_parallel) as group:
        pack(group, packed, group)
    with loop_over(batches.matrices * batches.blocks, is_parallel) as part:
        blocks = positive(batches.blocks)
        matrix = part // blocks
        compute(matrix, part % blocks, packed, matrix // batches.shared)


def loop_over(extent: IrSize, is_parallel: bool) -> AbstractContextManager[Any]:
    """Emit a parallel or serial loop; yield the index."""
    loop: AbstractContextManager[Any] = (T.parallel if is_parallel else T.serial)(extent)
    return loop
