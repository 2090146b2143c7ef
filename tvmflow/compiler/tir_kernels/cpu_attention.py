"""Emits fused attention for CPUs: softmax(q·kᵀ)·v of a few queries at a time.

Their scores stay in the cache. Keys and values are packed for register tiles (`contraction.packed`), which pays for
itself where many queries read them. A few queries, as in a step of a decoder, read keys and values where they are,
once for all heads that share them. All keys of a row are scored before their softmax, so nothing must be rescaled: at
lengths of a few thousand this is faster than an online softmax over blocks of keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import choose_row_block, most_tile_rows
from tvmflow.compiler.contraction.machine import (
    FUNCTION_VECTORS,
    LINE_FLOATS,
    MIN_PARALLEL_PRODUCTS,
    CpuModel,
)
from tvmflow.compiler.contraction.packed import (
    FLOAT,
    Accumulators,
    Batches,
    Columns,
    Product,
    allocate,
    allocate_registers,
    count_rows,
    emit_batches,
    iterate_last,
    iterate_pieces,
    iterate_vectors,
    loop_over,
    pack,
    positive,
    reduce_lanes,
)
from tvmflow.compiler.tir_kernels.attention import Attention
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, is_dynamic

_MAX_DIRECT_QUERIES: Final = 4
"""This many queries read keys and values where they are: packing costs about as much as reading them three times."""

_MAX_DIRECT_ROWS: Final = 8
"""The heads that share keys and values, at most, whose scores are computed together in registers."""

_KEYS_PER_PART: Final = 128
"""This many keys are scored by one core at a time where keys are divided among cores."""


def make_cpu_kernel(
    attention: Attention, cpu: CpuModel, exponential: Callable[[Any], Any]
) -> tvm.tirx.PrimFunc:
    """Return the kernel for a CPU, whose parameters are the operands and the result.

    `exponential` computes exponentials of negative values.
    """
    return _Emitter(attention, cpu, exponential).emit()


class _Emitter:
    def __init__(
        self, attention: Attention, cpu: CpuModel, exponential: Callable[[Any], Any]
    ) -> None:
        self._attention = attention
        self._cpu = cpu
        self._exponential = exponential
        self._lanes = cpu.lanes
        typical = attention.typical
        padded_keys = -(-typical.keys // cpu.lanes) * cpu.lanes
        max_rows = max(4, cpu.cached_data_bytes // 4 // padded_keys)
        tile_rows = most_tile_rows(attention.queries)
        counts = tuple(-(-size // cpu.lanes) for size in (typical.keys, attention.values))
        self._rows, ((self._key_rows, key_vectors), (self._value_rows, value_vectors)) = (
            choose_row_block(typical.queries, counts, max_rows, tile_rows, cpu)
        )
        self._keys = Columns(attention.keys, cpu.lanes, key_vectors)
        # Rows a power of two apart would evict each other from the cache; the second product reads many at once.
        self._score_stride = (divide_up(self._keys.padded, LINE_FLOATS) // 2 * 2 + 1) * LINE_FLOATS
        self._values = Columns(attention.values, cpu.lanes, value_vectors)
        self._key_size = attention.depth * self._keys.padded
        self._value_size = attention.keys * self._values.padded
        repeats = [operand.matrices.repeats for operand in attention.operands[1:3]]
        # Groups of queries that share keys and values.
        self._shared = min(repeats) if max(repeats) % min(repeats) == 0 else 1

    def emit(self) -> tvm.tirx.PrimFunc:
        a = self._attention
        work = math.prod(a.typical) * (a.depth + a.values)
        cores = self._cpu.cores if work >= MIN_PARALLEL_PRODUCTS else 1
        blocks = divide_up(a.queries, self._rows)
        batches = Batches(a.batch, self._shared, blocks, a.typical.batch)
        sizes = (self._key_size, self._value_size)

        def emit_packed() -> None:
            emit_batches(batches, sizes, cores, self._pack, self._attend)

        with define_flat_kernel("attention", a.parameters, has_root=False) as (builder, buffers):
            *self._inputs, self._out = map(T.buffer_proxy, buffers)
            if not self._can_be_direct:
                emit_packed()
            elif not is_dynamic(a.queries):
                self._emit_direct(cores)
            else:
                with T.If(a.queries <= _MAX_DIRECT_QUERIES):
                    with T.Then():
                        self._emit_direct(cores)
                    with T.Else():
                        emit_packed()
        return builder.get()

    def _load(self, position: int, matrix: Any) -> Callable[[Any, Any], Any]:
        buffer, matrices = self._inputs[position], self._attention.operands[position].matrices
        return lambda row, column: buffer[matrices.offset_of(matrix, row, column)]

    def _pack(self, group: Any, packed: Sequence[Any], slot: Any) -> None:
        keys, values = packed
        a, matrix = self._attention, group * self._shared
        for position, depth, columns, target, size in (
            (1, a.depth, self._keys, keys, self._key_size),
            (2, a.keys, self._values, values, self._value_size),
        ):
            is_contiguous = a.operands[position].matrices.column == 1
            source = self._load(position, matrix)
            pack(source, is_contiguous, depth, columns, target, slot * size)

    def _attend(self, matrix: Any, block: Any, packed: Sequence[Any], slot: Any) -> None:
        a, rows = self._attention, self._rows
        keys, values = packed
        factors = max(1, self._cpu.multiplicand_lanes)
        first = block * rows
        queries = allocate(rows * a.depth)
        scores = allocate(rows * self._score_stride)
        totals = allocate(rows)
        result = allocate(rows * self._values.padded)
        self._copy_queries(matrix, first, queries)
        scored = count_rows(a.queries, first, rows, self._key_rows)
        Product(
            rows=scored,
            depth=a.depth,
            columns=self._keys,
            tile_rows=self._key_rows,
            factors=factors,
            stride=self._score_stride,
        ).emit(lambda row, k: queries[row * a.depth + k], keys, slot * self._key_size, scores)
        mixed = count_rows(a.queries, first, rows, self._value_rows)

        def end_rows(tail: IrSize) -> None:
            with T.serial(mixed) as row:
                self._end_row(matrix, self._clamp(first + row), row, tail, scores)

        # Ahead of all rows, so that no vector is read shortly after a part of it was written.
        self._emit_tail(end_rows)
        with T.serial(mixed) as row:
            self._softmax(matrix, self._clamp(first + row), row, scores, totals)
        Product(
            rows=mixed,
            depth=a.keys,
            columns=self._values,
            tile_rows=self._value_rows,
            factors=factors,
        ).emit(
            lambda row, k: scores[row * self._score_stride + k],
            *(values, slot * self._value_size, result),
        )
        with T.serial(rows) as row, ExitStack() as guard:
            if not self._is_whole:
                guard.enter_context(T.If(first + row < a.queries))
                guard.enter_context(T.Then())
            for column in iterate_vectors(a.values, self._lanes if a.out.column == 1 else 1):
                value = result[row * self._values.padded + column] / totals[row]
                self._out[a.out.offset_of(matrix, first + row, column)] = value

    @property
    def _is_whole(self) -> bool:
        """True if blocks divide the queries."""
        queries = self._attention.queries
        return not is_dynamic(queries) and queries % self._rows == 0

    def _clamp(self, row: Any) -> Any:
        """Return a row that exists: those beyond the end are computed, but not written."""
        return row if self._is_whole else tirx.min(row, self._attention.queries - 1)

    def _copy_queries(self, matrix: Any, first: Any, queries: Any) -> None:
        """Emit the copy of a block of queries, multiplied with the factors of the scores."""
        a = self._attention
        source, is_vector = self._load(0, matrix), a.operands[0].matrices.column == 1
        with T.serial(self._rows) as row:
            for column in iterate_vectors(a.depth, self._lanes if is_vector else 1):
                value = source(self._clamp(first + row), column)
                for position, divides in a.factors:
                    factor = self._load(position, 0)(0, 0)
                    value = value / factor if divides else value * factor
                queries[row * a.depth + column] = value

    def _softmax(self, matrix: Any, query: Any, row: Any, scores: Any, totals: Any) -> None:
        """Emit the exponentials of a row of scores and their sum."""
        a, base = self._attention, row * self._score_stride
        lanes = self._count_side_by_side()
        largest, total = allocate_registers(lanes), allocate_registers(lanes)
        with T.vectorized(lanes) as lane:
            largest[lane] = tirx.min_value(FLOAT)
            total[lane] = T.float32(0)
        self._find_largest(matrix, query, row, scores, largest)
        reduce_lanes(largest, tirx.max, lanes)
        for start, count in self._iterate_vectors(self._keys.padded, lanes):
            with T.vectorized(count) as lane:
                position = base + start + lane
                scores[position] = self._exponential(scores[position] - largest[0])
                total[lane] = total[lane] + scores[position]
        reduce_lanes(total, tirx.Add, lanes)
        totals[row] = total[0]
        if a.replacement is not None:
            # the sum is NaN, or 0 where all scores are -∞
            with T.If(tirx.Not(totals[row] > 0)), T.Then():
                for start, count in self._iterate_vectors(self._keys.padded, lanes):
                    with T.vectorized(count) as lane:
                        scores[base + start + lane] = self._load(a.replacement, 0)(0, 0)
                totals[row] = T.float32(1)

    def _count_side_by_side(self) -> int:
        """Return how many exponentials of a row's scores are computed at once."""
        keys = self._attention.keys
        wide = self._lanes * FUNCTION_VECTORS
        return self._lanes if is_dynamic(keys) or keys < wide else wide

    def _iterate_vectors(self, length: IrSize, wide: int) -> Iterator[tuple[Any, int]]:
        """Emit loops over whole vectors, several at once while possible; yield start and length."""
        if is_dynamic(length):
            with T.serial(length // wide) as piece:
                yield piece * wide, wide
            return
        for start, count in iterate_pieces(length, wide):
            for inner, lanes in iterate_pieces(count, wide if count == wide else self._lanes):
                yield start + inner, lanes

    def _emit_tail(self, emit: Callable[[IrSize], None]) -> None:
        """Emit what is to be done if some keys fill no vector; their number is passed."""
        tail = self._attention.keys % self._lanes
        if is_dynamic(tail):
            with T.If(tail > 0), T.Then():
                emit(tail)
        elif tail:
            emit(tail)

    def _end_row(self, matrix: Any, query: Any, row: Any, tail: IrSize, scores: Any) -> None:
        """Emit the steps on the scores of keys that fill no vector, and -∞ for the lanes behind them."""
        a, key = self._attention, self._attention.keys - tail
        position = row * self._score_stride + key
        if a.steps:
            # they read masks, which end there
            with (
                iterate_last(tail, self._lanes) if is_dynamic(tail) else T.vectorized(tail) as lane
            ):
                score = self._apply_steps(matrix, query, key + lane, scores[position + lane])
                scores[position + lane] = score
        lowest = tirx.min_value(FLOAT)
        with T.vectorized(self._lanes) as lane:
            score = scores[position + lane]
            # The sum is -∞, which TVM writes as C that compilers reject if it can compute it.
            other = tirx.min(score, lowest) + lowest
            scores[position + lane] = tirx.Select(lane < tail, score, other)

    def _find_largest(self, matrix: Any, query: Any, row: Any, scores: Any, largest: Any) -> None:
        """Emit the steps on whole vectors of a row of scores, and the largest score of each lane."""
        a, base = self._attention, row * self._score_stride
        whole = a.keys // self._lanes * self._lanes

        def keep(lane: Any, score: Any) -> None:
            largest[lane] = tirx.max(largest[lane], score)

        def keep_tail(_: IrSize) -> None:
            with T.vectorized(self._lanes) as lane:
                keep(lane, scores[base + whole + lane])

        for start, count in self._iterate_vectors(whole, self._count_side_by_side()):
            with T.vectorized(count) as lane:
                position = base + start + lane
                if a.steps:
                    scores[position] = self._apply_steps(
                        matrix, query, start + lane, scores[position]
                    )
                keep(lane, scores[position])
        self._emit_tail(keep_tail)

    def _apply_steps(self, matrix: Any, query: Any, key: Any, value: Any) -> Any:
        for step in self._attention.steps:
            operands = [
                value if position is None else self._load(position, matrix)(query, key)
                for position in step.operands
            ]
            value = step.function(*operands)
        return value

    # ---------------------------------------------------------------- few queries

    @property
    def _can_be_direct(self) -> bool:
        """True if a call may have few queries, and vectors along the depth are whole in memory."""
        a = self._attention
        query, key, value = (operand.matrices for operand in a.operands[:3])
        return (
            (is_dynamic(a.queries) or a.queries <= _MAX_DIRECT_QUERIES)
            and self._shared <= _MAX_DIRECT_ROWS
            and query.column == key.row == value.column == a.out.column == 1
            and a.depth % self._lanes == a.values % self._lanes == 0
        )

    def _emit_direct(self, cores: int) -> None:
        """Emit attention for a few queries, one after the other.

        Where fewer groups of heads than cores share keys, cores divide the keys for the scores, and then the columns
        of the values.
        """
        a, rows, vectors = self._attention, self._shared, self._count_mixed_vectors()
        groups, columns = a.batch // rows, a.values // (vectors * self._lanes)
        parts = divide_up(a.keys, _KEYS_PER_PART)
        with T.serial(a.queries) as query:
            if cores == 1 or a.typical.batch // rows >= cores:
                with loop_over(groups, is_parallel=cores > 1) as group:
                    scores, totals = allocate(rows * self._score_stride), allocate(rows)
                    here = functools.partial(_Rows, query=query, scores=scores, totals=totals)
                    rows_of_group = here(matrix=group * rows, first=0)
                    with T.serial(parts) as part:
                        self._score_part(rows_of_group, part)
                    with T.serial(rows) as row:
                        self._weigh(rows_of_group, row)
                    with T.serial(columns) as column:
                        self._mix(rows_of_group, column, vectors)
            else:
                scores, totals = allocate(a.batch * self._score_stride), allocate(a.batch)
                here = functools.partial(_Rows, query=query, scores=scores, totals=totals)
                with T.parallel(groups * parts) as piece:
                    first = piece // positive(parts) * rows
                    rows_of_group = here(matrix=first, first=first)
                    self._score_part(rows_of_group, piece % positive(parts))
                with T.parallel(a.batch) as row:
                    self._weigh(here(matrix=0, first=0), row)
                with T.parallel(groups * columns) as piece:
                    first = piece // columns * rows
                    self._mix(here(matrix=first, first=first), piece % columns, vectors)

    def _count_mixed_vectors(self) -> int:
        """Return the vectors of values whose accumulators, for all rows of a group, fit the registers."""
        rows, most = self._shared, self._attention.values // self._lanes
        fitting = [n for n in range(1, most + 1) if (rows + 1) * n < self._cpu.registers]
        return max((n for n in fitting if most % n == 0), default=1)

    def _score_part(self, rows: _Rows, part: Any) -> None:
        """Emit the scores of some keys, a few at once, so that accumulators do not wait for each other."""
        start = part * _KEYS_PER_PART
        count = tirx.min(self._attention.keys - start, _KEYS_PER_PART)
        together = max(1, _MAX_DIRECT_ROWS // self._shared)
        with T.serial(count // together) as piece:
            self._score_keys(rows, start + piece * together, together)
        if together > 1:
            with T.serial(count % together) as key:
                self._score_keys(rows, start + count // together * together + key, 1)

    def _score_keys(self, rows: _Rows, key: Any, together: int) -> None:
        a, lanes, shared = self._attention, self._lanes, self._shared
        keys, query = self._load(1, rows.matrix), rows.query
        sums = allocate_registers(together, shared, lanes)
        with T.unroll(together) as k, T.unroll(shared) as row, T.vectorized(lanes) as lane:
            sums[k, row, lane] = T.float32(0)
        with T.unroll(a.depth // lanes) as vector, T.unroll(together) as k, T.unroll(shared) as row:
            source = self._load(0, rows.matrix + row)
            with T.vectorized(lanes) as lane:
                column = vector * lanes + lane
                term = source(query, column) * keys(column, key + k)
                sums[k, row, lane] = sums[k, row, lane] + term
        width = lanes
        while width > 1:
            width //= 2
            with T.unroll(together) as k, T.unroll(shared) as row, T.vectorized(width) as lane:
                sums[k, row, lane] = sums[k, row, lane] + sums[k, row, lane + width]
        with T.unroll(together) as k, T.unroll(shared) as row:
            score = sums[k, row, 0]
            for position, divides in a.factors:
                factor = self._load(position, 0)(0, 0)
                score = score / factor if divides else score * factor
            rows.scores[(rows.first + row) * self._score_stride + key + k] = score

    def _weigh(self, rows: _Rows, row: Any) -> None:
        """Emit the weights of a row of scores, and their sum."""
        matrix, position = rows.matrix + row, rows.first + row
        self._emit_tail(lambda tail: self._end_row(matrix, rows.query, position, tail, rows.scores))
        self._softmax(matrix, rows.query, position, rows.scores, rows.totals)

    def _mix(self, rows: _Rows, part: Any, vectors: int) -> None:
        """Emit some columns of the sums of weighted values."""
        a, start = self._attention, part * (vectors * self._lanes)
        values = self._load(2, rows.matrix)
        sums = Accumulators.allocate(self._shared, vectors, self._lanes)
        for index, _, _ in sums.iterate():
            sums.buffer[index] = T.float32(0)
        with T.serial(a.keys) as key:
            sums.add(
                lambda row: rows.scores[(rows.first + row) * self._score_stride + key],
                lambda column: values(key, start + column),
            )
        for index, row, column in sums.iterate():
            value = sums.buffer[index] / rows.totals[rows.first + row]
            self._out[a.out.offset_of(rows.matrix + row, rows.query, start + column)] = value


class _Rows(NamedTuple):
    """The heads of a query that share keys and values.

    Attributes:
        matrix: The number of the first head in the batch.
        first: The position of its row in `scores` and `totals`.
        query: The number of the query.
        scores: Rows of scores, and then of weights.
        totals: The sums of weights.
    """

    matrix: Any
    first: Any
    query: Any
    scores: Any
    totals: Any
