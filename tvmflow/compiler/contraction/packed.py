"""Products of two matrices that the model computes, as loops with their accumulators in registers.

A register tile is `vectors` of columns times `rows`. The right matrix is packed first, so that the columns of a tile
are one contiguous piece of memory. The functions emit TIR; they must be called within an `IRBuilder`.
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
    """Return a size as a divisor: TVM takes some dynamic ones for 0 (apache-tvm 0.27)."""
    return tirx.max(size, 1) if is_dynamic(size) else size


def allocate(size: IrSize, dtype: str = FLOAT) -> Any:
    """Emit the allocation of a buffer of one axis."""
    buffer = T.alloc_buffer((size,), dtype)
    if is_dynamic(size):
        # by another name, or TVM would replace the size by a formula of all accesses (apache-tvm 0.27)
        buffer = T.decl_buffer((size,), dtype, data=buffer.data)
    return T.buffer_proxy(buffer)


def allocate_registers(*shape: int, dtype: str = FLOAT) -> Any:
    """Emit the allocation of a buffer that LLVM holds in registers."""
    return T.buffer_proxy(T.alloc_buffer(shape, dtype, scope="local"))


def reduce_lanes(vector: Any, function: Callable[[Any, Any], Any], lanes: int) -> None:
    """Emit the reduction of the lanes of a vector, a power of two, to its first one, by halves."""
    while lanes > 1:
        lanes //= 2
        with T.vectorized(lanes) as lane:
            vector[lane] = function(vector[lane], vector[lane + lanes])


class Columns(NamedTuple):
    """The columns of a packed matrix, in tiles of vectors of this many lanes; the last may have fewer."""

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

        Where the number of columns is dynamic, the tail tile is one of several that are emitted.
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

    The last piece may be shorter; that of a dynamic range may have no elements.
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

    The last vector may be shorter; that of a dynamic range is a loop over its values.
    """
    for start, count in iterate_pieces(length, lanes):
        with iterate_last(count, lanes) if is_dynamic(count) else T.vectorized(count) as lane:
            yield start + lane


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

    The first tile is written at `base`. Elements of a row are next to each other in memory if it `is_contiguous`.
    """
    for start, count in columns.iterate():
        width = divide_up(count, columns.lanes) * columns.lanes
        tile = base + start * depth
        if is_dynamic(count):
            # whole vectors of zeros, over which the last values are written
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
        if not is_dynamic(count) and width > count:
            with T.serial(depth) as k, T.vectorized(width - count) as lane:
                packed[tile + k * width + count + lane] = T.float32(0)


class Product(NamedTuple):
    """A product of some rows and a packed matrix.

    Attributes:
        rows: The number of rows, a multiple of `tile_rows`.
        depth: The length of the reduction, which may be dynamic.
        columns: The columns of the packed matrix and of the result, whose rows are `columns.padded` long.
        tile_rows: The rows of a tile.
        factors: The rows of the right matrix whose factors are lanes of one vector; 1 if each is loaded.
        stride: The distance of the rows of the result; None if there is nothing between them.
    """

    rows: IrSize
    depth: IrSize
    columns: Columns
    tile_rows: int
    factors: int = 1
    stride: IrSize | None = None

    def emit(self, left: Element, packed: Any, base: Any, result: Any) -> None:
        """Emit the product of rows and the matrix that `pack` has written at a base."""
        for start, vectors in self.columns.iterate_tiles():
            for terms in self._iterate_terms(vectors * self.columns.lanes):
                with T.serial(self.rows // self.tile_rows) as group:
                    corner = group * self.tile_rows, start
                    self._emit_tile(left, packed, base, result, vectors, corner, terms)

    def _iterate_terms(self, width: int) -> Iterator[tuple[Any, IrSize]]:
        """Emit the loop over terms whose part of a tile stays in the cache; yield the first, and their number."""
        if is_dynamic(self.depth):
            size = max(PACKED_FLOATS // width, 1)
            # empty reductions are 0
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

        tile, width = base + start * self.depth, vectors * self.columns.lanes
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
                lambda column: packed[tile + (first + k) * width + column],
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
        """Emit an allocation."""
        return cls(allocate_registers(*shape), *shape)

    def iterate(self) -> Iterator[tuple[list[Any], Any, Any]]:
        """Emit loops over all accumulators; yield the index of one, its row and its column."""
        with T.unroll(self.rows) as p, T.unroll(self.vectors) as v, T.vectorized(self.lanes) as c:
            yield [p, v, c], p, v * self.lanes + c

    def add(self, left: Callable[[Any], Any], right: Callable[[Any], Any]) -> None:
        """Emit the addition of a product of the values of a row and of a column."""
        for index, row, column in self.iterate():
            self.buffer[index] = self.buffer[index] + left(row) * right(column)


def count_rows(rows: IrSize, first: Any, together: int, tile_rows: int) -> IrSize:
    """Return how many rows of a block of `together` are computed: whole tiles of a dynamic number of rows."""
    if not is_dynamic(rows):
        return together
    return tirx.min(divide_up(rows - first, tile_rows) * tile_rows, together)


class Batches(NamedTuple):
    """The blocks of rows of matrices; `shared` consecutive ones of these share packed ones.

    There are `typical` matrices where their number is dynamic.
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
        sizes: The sizes of the packed matrices of a group that shares them.
        cores: The cores that the work is divided for.
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
    """Emit a loop, whose iterations cores divide if it is parallel; yield the index."""
    loop: AbstractContextManager[Any] = (T.parallel if is_parallel else T.serial)(extent)
    return loop
