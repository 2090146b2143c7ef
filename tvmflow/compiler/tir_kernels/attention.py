"""Attention: what a kernel for it computes, and the kernel for GPUs.

On a GPU, a block of threads computes some queries. It goes through the keys tile by tile: keys, then their values,
are in shared memory, and scores and results in registers. What was added up is scaled where a larger score is found
(online softmax; Dao et al., FlashAttention, 2022), so that no scores are in the memory of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.gpu_tiles import (
    VECTOR,
    AttentionSizes,
    AttentionTile,
    Device,
    choose_attention_tile,
)
from tvmflow.compiler.contraction.packed import FLOAT
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.compiler.tir_kernels.strides import Operand, StridedMatrices
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic


class ScoreStep(NamedTuple):
    """An elementwise operation on scores, and the positions of its operands; None for the scores."""

    function: Callable[..., Any]
    operands: tuple[int | None, ...]


class Typical(NamedTuple):
    """The sizes for which a kernel is divided, with tuning sizes in place of dynamic ones."""

    batch: int
    queries: int
    keys: int


class Attention(NamedTuple):
    """The computation of an attention kernel.

    Attributes:
        batch: The number of pairs of query and key matrices, which may be dynamic.
        queries: The number of queries, N, which may be dynamic.
        keys: The number of keys, M, which may be dynamic.
        typical: The same as tuning sizes.
        depth: The length of a query, D.
        values: The length of a value, E.
        operands: q (N, D), kᵀ (D, M), v (M, E), the factors of the scores, and the operands of `steps`.
        factors: The positions of factors, of one element each, and whether the scores are divided by it.
        steps: Operations on the scores before softmax.
        replacement: The position of the scalar that replaces weights that are NaN; None if they stay.
        out_shape: The shape of the result.
        out: Its matrices (N, E).
    """

    batch: IrSize
    queries: IrSize
    keys: IrSize
    typical: Typical
    depth: int
    values: int
    operands: tuple[Operand, ...]
    factors: tuple[tuple[int, bool], ...]
    steps: tuple[ScoreStep, ...]
    replacement: int | None
    out_shape: tuple[IrSize, ...]
    out: StridedMatrices

    @property
    def parameters(self) -> dict[str, tuple[tuple[IrSize, ...], str]]:
        """The shapes and dtypes of a kernel's parameters, by name: the operands and the result."""
        inputs = {f"x{n}": (kind.shape, kind.dtype) for n, kind in enumerate(self.operands)}
        return {**inputs, "out": (self.out_shape, FLOAT)}


def make_gpu_kernel(attention: Attention, device: Device) -> tvm.tirx.PrimFunc | None:
    """Return the kernel for a GPU, whose parameters are the operands and the result.

    None with dynamic shapes, queries are few, or no tile fits.
    """
    sizes = (attention.batch, attention.queries, attention.keys)
    if any(map(is_dynamic, sizes)) or attention.queries < _MIN_QUERIES:
        return None
    tile = choose_attention_tile(
        AttentionSizes(*attention.typical, attention.depth, attention.values), device
    )
    return None if tile is None else _Emitter(attention, tile).emit()


# With fewer, most of a tile is empty.
_MIN_QUERIES: Final = 8
_UNROLLED: Final = 4


class _Emitter:
    """Emits the launch of one kernel."""

    def __init__(self, attention: Attention, tile: AttentionTile) -> None:
        self._attention = attention
        self._tile = tile

    def emit(self) -> tvm.tirx.PrimFunc:
        a, tile = self._attention, self._tile
        blocks = -(-a.typical.queries // tile.queries)
        with (
            define_flat_kernel("attention", a.parameters, has_root=False) as (builder, buffers),
            T.thread_binding(a.typical.batch * blocks, thread="blockIdx.x") as block,
            T.thread_binding(tile.down, thread="threadIdx.y") as down,
            T.thread_binding(tile.across, thread="threadIdx.x") as across,
        ):
            *self._inputs, self._out = buffers
            self._matrix = block // blocks
            self._first = block % blocks * tile.queries
            self._down, self._across = down, across
            self._allocate()
            self._attend()
        return builder.get()

    def _allocate(self) -> None:
        tile = self._tile
        sizes = tile.shared_sizes(self._attention.depth)
        self._queries, self._others, self._weights, self._parts = (
            _allocate(size, "shared") for size in sizes
        )
        self._scores = _allocate(tile.rows * tile.columns, "local")
        self._results = _allocate(tile.rows * tile.values, "local")
        self._largest, self._totals, self._scales, self._left = (
            _allocate(tile.rows, "local") for _ in range(4)
        )
        self._right = _allocate(max(tile.columns, tile.values), "local")

    def _attend(self) -> None:
        a, tile = self._attention, self._tile
        for memory, size, first in (
            (self._results, tile.rows * tile.values, T.float32(0)),
            (self._largest, tile.rows, tirx.min_value(FLOAT)),
            (self._totals, tile.rows, T.float32(0)),
        ):
            with T.unroll(size) as position:
                memory[position] = first
        self._copy_queries()
        with T.serial(-(-a.typical.keys // tile.keys)) as step:
            first = step * tile.keys
            self._copy_keys(first)
            self._score(first)
            self._write_parts(self._scales)
            self._copy_values(first)
            self._weigh(first)
            weights = (self._weights, tile.query_stride)
            values = (self._others, tile.value_stride)
            self._multiply(tile.keys, weights, values, self._results, tile.values)
        self._write_parts(self._totals)
        self._write()

    def _load(self, position: int, row: Any, column: Any) -> Any:
        offset = self._attention.operands[position].matrices.offset_of(self._matrix, row, column)
        return tirx.BufferLoad(self._inputs[position], [offset])

    def _copy(
        self, lengths: tuple[int, int], slow_first: bool, store: Callable[[Any, Any], None]
    ) -> None:
        """Emit a copy by all threads: neighbors copy along the second axis, or along the first one."""
        tile, (rows, columns) = self._tile, lengths
        count = rows * columns
        with T.serial(-(-count // tile.threads)) as step:
            position = step * tile.threads + self._down * tile.across + self._across
            if count % tile.threads:
                # what is left is copied by several threads, so that none has to be left out
                position = tirx.min(position, count - 1)
            if slow_first:
                store(position // columns, position % columns)
            else:
                store(position % rows, position // rows)

    def _copy_queries(self) -> None:
        """Emit the copy of the queries of the block, multiplied with the factors of the scores."""
        a, tile = self._attention, self._tile

        def store(row: Any, column: Any) -> None:
            value = self._load(0, self._clamp_query(self._first + row), column)
            for position, divides in a.factors:
                factor = self._load(position, 0, 0)
                value = value / factor if divides else value * factor
            self._queries[column * tile.query_stride + row] = value

        self._copy((tile.queries, a.depth), a.operands[0].matrices.row != 1, store)

    def _copy_keys(self, first: Any) -> None:
        a, tile = self._attention, self._tile

        def store(position: Any, key: Any) -> None:
            value = self._load(1, position, self._clamp_key(first + key))
            self._others[position * tile.key_stride + key] = value

        self._copy((a.depth, tile.keys), a.operands[1].matrices.row != 1, store)

    def _copy_values(self, first: Any) -> None:
        a, tile = self._attention, self._tile

        def store(key: Any, position: Any) -> None:
            value = self._load(2, self._clamp_key(first + key), position)
            self._others[key * tile.value_stride + position] = value

        self._copy((tile.keys, a.values), a.operands[2].matrices.row != 1, store)

    def _clamp_query(self, query: Any) -> Any:
        """Return a query that exists: those beyond the end are computed, but not written."""
        a, tile = self._attention, self._tile
        return tirx.min(query, a.queries - 1) if a.typical.queries % tile.queries else query

    def _clamp_key(self, key: Any) -> Any:
        """Return a key that exists: the weights of those beyond the end are 0."""
        a, tile = self._attention, self._tile
        return tirx.min(key, a.keys - 1) if a.typical.keys % tile.keys else key

    def _exists(self, key: Any, value: Any, other: Any) -> Any:
        """Return a value for a key that exists, and another one for others."""
        a, tile = self._attention, self._tile
        return tirx.Select(key < a.keys, value, other) if a.typical.keys % tile.keys else value

    def _key(self, first: Any, column: Any) -> Any:
        return first + self._across * self._tile.columns + column

    def _multiply(
        self,
        depth: int,
        left: tuple[Any, int],
        right: tuple[Any, int],
        accumulators: Any,
        columns: int,
    ) -> None:
        """Emit the addition of a product of matrices, each with the distance of its rows."""
        tile = self._tile
        ((left_memory, left_stride), (right_memory, right_stride)) = left, right
        inner = _UNROLLED if depth % _UNROLLED == 0 else 1
        with T.serial(depth // inner) as outer, T.unroll(inner) as one:
            position = outer * inner + one
            first = position * left_stride + self._down * tile.rows
            _read(self._left, left_memory, first, tile.rows)
            _read(
                self._right, right_memory, position * right_stride + self._across * columns, columns
            )
            with T.unroll(tile.rows) as row, T.unroll(columns) as column:
                result = row * columns + column
                accumulators[result] = accumulators[result] + self._left[row] * self._right[column]

    def _score(self, first: Any) -> None:
        """Emit the scores of a tile of keys, and the largest of each query in this thread."""
        a, tile = self._attention, self._tile
        with T.unroll(tile.rows * tile.columns) as position:
            self._scores[position] = T.float32(0)
        keys = (self._others, tile.key_stride)
        queries = (self._queries, tile.query_stride)
        self._multiply(a.depth, queries, keys, self._scores, tile.columns)
        with T.unroll(tile.rows) as row:
            self._scales[row] = tirx.min_value(FLOAT)
        with T.unroll(tile.rows) as row, T.unroll(tile.columns) as column:
            position = row * tile.columns + column
            query = self._clamp_query(self._first + self._down * tile.rows + row)
            key = self._key(first, column)
            if a.steps:
                self._scores[position] = self._apply_steps(query, key, self._scores[position])
            score = self._exists(key, self._scores[position], tirx.min_value(FLOAT))
            self._scales[row] = tirx.max(self._scales[row], score)

    def _apply_steps(self, query: Any, key: Any, value: Any) -> Any:
        for step in self._attention.steps:
            operands = [
                value if position is None else self._load(position, query, self._clamp_key(key))
                for position in step.operands
            ]
            value = step.function(*operands)
        return value

    def _weigh(self, first: Any) -> None:
        """Emit the weights of a tile of keys, and scale what was added up for those before."""
        tile = self._tile
        with T.unroll(tile.rows) as row:
            self._scales[row] = self._largest[row]
            with T.serial(tile.across) as part:
                self._largest[row] = tirx.max(self._largest[row], self._part(row, part))
            self._scales[row] = tirx.exp(self._scales[row] - self._largest[row])
            self._totals[row] = self._totals[row] * self._scales[row]
            with T.unroll(tile.values) as position:
                result = row * tile.values + position
                self._results[result] = self._results[result] * self._scales[row]
        with T.unroll(tile.rows) as row, T.unroll(tile.columns) as column:
            score = self._scores[row * tile.columns + column] - self._largest[row]
            key = self._key(first, column)
            self._right[0] = self._exists(key, tirx.exp(score), T.float32(0))
            self._totals[row] = self._totals[row] + self._right[0]
            position = (self._across * tile.columns + column) * tile.query_stride
            self._weights[position + self._down * tile.rows + row] = self._right[0]

    def _part(self, row: Any, part: Any) -> Any:
        """Return what a thread wrote for a query."""
        tile = self._tile
        return self._parts[(self._down * tile.rows + row) * tile.across + part]

    def _write_parts(self, parts: Any) -> None:
        """Emit what each thread has for its queries."""
        tile = self._tile
        with T.unroll(tile.rows) as row:
            position = (self._down * tile.rows + row) * tile.across + self._across
            self._parts[position] = parts[row]

    def _write(self) -> None:
        """Emit the results: sums of weighted values, divided by the sums of the weights."""
        a, tile = self._attention, self._tile
        with T.unroll(tile.rows) as row:
            self._totals[row] = T.float32(0)
            with T.serial(tile.across) as part:
                self._totals[row] = self._totals[row] + self._part(row, part)
            if a.replacement is not None:
                # the sum is NaN, or 0 where all scores are -∞
                with T.If(tirx.Not(self._totals[row] > 0)), T.Then():
                    self._replace_weights(a.replacement, row)
        with T.unroll(tile.rows) as row, T.unroll(tile.values) as position:
            query = self._first + self._down * tile.rows + row
            column = self._across * tile.values + position
            value = self._results[row * tile.values + position] / self._totals[row]
            with T.If(tirx.all(query < a.queries, column < a.values)), T.Then():
                T.buffer_store(self._out, value, [a.out.offset_of(self._matrix, query, column)])

    def _replace_weights(self, replacement: int, row: Any) -> None:
        """Emit the result of a query all of whose weights are replaced."""
        a, tile = self._attention, self._tile
        with T.unroll(tile.values) as position:
            result = row * tile.values + position
            column = tirx.min(self._across * tile.values + position, a.values - 1)
            self._results[result] = T.float32(0)
            with T.serial(a.keys) as key:
                self._results[result] = self._results[result] + self._load(2, key, column)
            self._results[result] = self._results[result] * self._load(replacement, 0, 0)
        self._totals[row] = T.float32(1)


def _allocate(size: int, scope: str) -> Any:
    """Emit an allocation in registers, or in memory that a block of threads shares."""
    return T.buffer_proxy(T.alloc_buffer((size,), FLOAT, scope=scope))


def _read(target: Any, source: Any, first: Any, count: int) -> None:
    """Emit loads of neighbors, in vectors."""
    lanes = min(count, VECTOR)
    for start in range(0, count, lanes):
        with T.vectorized(lanes) as lane:
            target[start + lane] = source[first + start + lane]
