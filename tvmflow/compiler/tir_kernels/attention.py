"""Attention as a fused computation, and its kernels for CPUs and GPUs.

On a CPU, softmax(q·kᵀ)·v is computed for a few queries at a time, whose scores stay in the cache. Keys and values are
packed for register tiles (`contraction.packed`), which pays off if many queries read them. A few queries, as in a
step of a decoder, read keys and values in place, once for all heads that share them. All keys of a row are scored
before the softmax, so nothing must be rescaled. For a few thousand keys this is faster than an online softmax.

On a GPU, a block of threads computes some queries. It reads the keys tile by tile: keys, then their values, are in
shared memory, and scores and results in registers. Accumulators are rescaled when a larger score is found (online
softmax; Dao et al., FlashAttention, 2022), so that scores are never stored in GPU memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction import gpu_tiles
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
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel, if_else, when
from tvmflow.compiler.tir_kernels.packed_rows import read_scale
from tvmflow.compiler.tir_kernels.strides import Operand, StridedMatrices
from tvmflow.core.types import SCALE_BYTES
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, is_dynamic, same_size


class ScoreStep(NamedTuple):
    """An elementwise operation on scores, and its operands' positions; None stands for the scores."""

    function: Callable[..., Any]
    operands: tuple[int | None, ...]


class Typical(NamedTuple):
    """The sizes for which a kernel is tiled, with tuning sizes in place of dynamic ones."""

    batch: int
    queries: int
    keys: int


class Attention(NamedTuple):
    """The computation of an attention kernel.

    Attributes:
        batch: The number of pairs of query and key matrices, which may be dynamic.
        queries: The number of queries, N, which may be dynamic.
        keys: The number of keys, M, which may be dynamic.
        typical: Batch, queries and keys, with tuning sizes for dynamic ones.
        depth: The length of a query, D.
        values: The length of a value, E.
        operands: q (N, D), kᵀ (D, M), v (M, E), the factors of the scores, and the operands of `steps`.
        factors: The positions of scalar operands, and whether the scores are divided by each.
        steps: Operations on the scores before softmax.
        replacement: The position of the scalar that replaces NaN weights; None if they stay.
        out_shape: The shape of the result.
        out: The matrices (N, E) of the result.
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


class _Emitter:
    """Emits an attention kernel, whose parameters are the operands and the result."""

    _inputs: Sequence[Any]
    _out: Any

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def _load(
        self, position: int, matrix: Any, *, is_unscaled: bool = False
    ) -> Callable[[Any, Any], Any]:
        """Return a function (row, column) that loads an element of a matrix of an operand as float32.

        With `is_unscaled`, it loads the integers of quantized rows without their scales.
        """
        buffer, operand = self._inputs[position], self._attention.operands[position]

        def load(row: Any, column: Any) -> Any:
            value = buffer[operand.matrices.offset_of(matrix, row, column)]
            value = tirx.Cast(FLOAT, value) if operand.dtype in ("float16", "int8") else value
            return value if is_unscaled else self._scale_row(position, matrix, row, column, value)

        return load

    def _scale_row(self, position: int, matrix: Any, row: Any, column: Any, value: Any) -> Any:
        """Return a value multiplied by the scale of the quantized row that it was computed from."""
        buffer, operand = self._inputs[position], self._attention.operands[position]
        if operand.dtype != "int8":
            return value
        is_transposed = operand.matrices.row == 1
        length = operand.shape[-1] - SCALE_BYTES

        def byte_at(n: int) -> Any:
            indices = (length + n, column) if is_transposed else (row, length + n)
            return buffer[operand.matrices.offset_of(matrix, *indices)]

        return value * read_scale(byte_at)

    def _load_scalar(self, position: int) -> Any:
        return self._load(position, 0)(0, 0)

    def _scale(self, value: Any) -> Any:
        """Return a value multiplied or divided by the factors of the scores."""
        for position, divides in self._attention.factors:
            factor = self._load_scalar(position)
            value = value / factor if divides else value * factor
        return value

    def _apply_steps(self, matrix: Any, query: Any, key: Any, score: Any) -> Any:
        for step in self._attention.steps:
            operands = [
                score if position is None else self._load(position, matrix)(query, key)
                for position in step.operands
            ]
            score = step.function(*operands)
        return score


# ---------------------------------------------------------------- CPUs

# At most this many queries read keys and values in place: packing costs about as much as reading them three times.
_MAX_DIRECT_QUERIES: Final = 4
# The maximum number of heads with shared keys and values whose scores are computed together in registers.
_MAX_DIRECT_ROWS: Final = 8
# A key is masked out if its mask value is at most this: its weight is then 0. Masks use -∞ or about -3.4e38.
_HIDDEN: Final = -1e30
# The number of keys that a core scores at a time if keys are divided among cores.
_KEYS_PER_PART: Final = 128


def make_cpu_kernel(
    attention: Attention, cpu: CpuModel, exponential: Callable[[Any], Any]
) -> tvm.tirx.PrimFunc:
    """Return the kernel for a CPU; `exponential` computes exponentials of negative values."""
    return _CpuEmitter(attention, cpu, exponential).emit()


class _Keys(NamedTuple):
    """The range of keys that some queries see; scores are stored from its start on."""

    start: IrSize
    count: IrSize


class _CpuEmitter(_Emitter):
    def __init__(
        self, attention: Attention, cpu: CpuModel, exponential: Callable[[Any], Any]
    ) -> None:
        super().__init__(attention)
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
        # rows a power of two apart would evict each other from the cache; the second matmul reads many at once
        self._score_stride = (divide_up(self._keys.padded, LINE_FLOATS) // 2 * 2 + 1) * LINE_FLOATS
        self._values = Columns(attention.values, cpu.lanes, value_vectors)
        self._key_size = attention.depth * self._keys.padded
        self._value_size = attention.keys * self._values.padded
        # groups of queries share keys and values
        repeats = [operand.matrices.repeats for operand in attention.operands[1:3]]
        self._shared = min(repeats) if max(repeats) % min(repeats) == 0 else 1
        self._mask = self._find_mask() if is_dynamic(attention.keys) else None

    def _find_mask(self) -> int | None:
        """Return the position of a mask that is added to the scores, with an element for each query and key."""
        a = self._attention
        operands = a.steps[-1].operands if a.steps and a.steps[-1].function is tirx.Add else ()
        position = next((operand for operand in operands if operand is not None), None)
        if position is None:
            return None
        matrices = a.operands[position].matrices
        has_rows = same_size(a.queries, 1) or not same_size(matrices.row, 0)
        return position if matrices.column == 1 and has_rows else None

    @property
    def _has_one_mask(self) -> bool:
        """True if all heads have the same mask."""
        matrices = None if self._mask is None else self._attention.operands[self._mask].matrices
        return matrices is not None and all(same_size(stride, 0) for _, stride in matrices.modes)

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
            *self._inputs, self._out = buffers
            emit_direct = functools.partial(self._emit_direct, cores)
            if self._can_be_direct and is_dynamic(a.queries):
                if_else(a.queries <= _MAX_DIRECT_QUERIES, emit_direct, emit_packed)
            else:
                (emit_direct if self._can_be_direct else emit_packed)()
        return builder.get()

    def _pack(self, group: Any, packed: Sequence[Any], slot: Any) -> None:
        a, (keys, values) = self._attention, packed
        for position, depth, columns, target, size in (
            (1, a.depth, self._keys, keys, self._key_size),
            (2, a.keys, self._values, values, self._value_size),
        ):
            is_contiguous = a.operands[position].matrices.column == 1
            source = self._load(position, group * self._shared)
            pack(source, is_contiguous, depth, columns, target, slot * size)

    def _attend(self, matrix: Any, block: Any, packed: Sequence[Any], slot: Any) -> None:
        first = block * self._rows
        keys = self._find_seen_keys(matrix, first, self._rows, self._keys.vectors * self._lanes)
        a, rows, stride = self._attention, self._rows, self._score_stride
        packed_keys, packed_values = packed
        sizes = (rows * a.depth, rows * stride, rows, rows * self._values.padded)
        queries, scores, totals, result = map(allocate, sizes)
        self._copy_queries(matrix, first, queries)

        def count(tile_rows: int) -> IrSize:
            return count_rows(a.queries, first, rows, tile_rows)

        product = Product(
            rows=count(self._key_rows),
            depth=a.depth,
            columns=self._keys._replace(size=keys.count),
            tile_rows=self._key_rows,
            factors=max(1, self._cpu.multiplicand_lanes),
            stride=stride,
        )
        base = slot * self._key_size + keys.start * a.depth
        product.emit(lambda row, k: queries[row * a.depth + k], packed_keys, base, scores)
        mixed = count(self._value_rows)

        def end_rows(tail: IrSize) -> None:
            with T.serial(mixed) as row:
                self._end_row(matrix, self._clamp(first + row), row, keys, tail, scores)

        # before all rows, since reading a vector shortly after a part of it was written is slow
        self._emit_tail(keys.count, end_rows)
        with T.serial(mixed) as row:
            self._softmax(matrix, self._clamp(first + row), row, keys, scores, totals)
        product = product._replace(
            rows=mixed,
            depth=keys.count,
            columns=self._values,
            tile_rows=self._value_rows,
            stride=None,
            packed_depth=a.keys,
            packed_start=keys.start,
        )
        base = slot * self._value_size
        product.emit(lambda row, k: scores[row * stride + k], packed_values, base, result)
        with T.serial(rows) as row, when(self._is_whole or first + row < a.queries):
            for column in iterate_vectors(a.values, self._lanes if a.out.column == 1 else 1):
                value = result[row * self._values.padded + column] / totals[row]
                self._out[a.out.offset_of(matrix, first + row, column)] = value

    def _find_seen_keys(self, matrix: Any, first: Any, rows: int, unit: int) -> _Keys:
        """Emit the search for the first and the last key that some queries see, in whole units of keys.

        The mask hides all others, so that their weights are 0. A query that sees no key has weights for all keys.
        """
        a, lanes = self._attention, self._lanes
        if self._mask is None:
            return _Keys(0, a.keys)
        mask, keys = self._load(self._mask, matrix), tirx.Cast("int32", a.keys)
        start, end = (allocate_registers(1, dtype="int32") for _ in range(2))
        lowest, highest = (allocate_registers(lanes, dtype="int32") for _ in range(2))
        start[0], end[0] = keys, T.int32(0)
        with T.serial(rows) as row:
            query = self._clamp(first + row)

            def note(key: Any, lane: Any) -> None:
                number = tirx.Cast("int32", key)
                is_hidden = mask(query, key) <= T.float32(_HIDDEN)
                lowest[lane] = tirx.min(lowest[lane], tirx.Select(is_hidden, keys, number))
                highest[lane] = tirx.Select(is_hidden, highest[lane], number + 1)

            with T.vectorized(lanes) as lane:
                lowest[lane] = keys
                highest[lane] = T.int32(0)
            with T.serial(a.keys // lanes) as piece, T.vectorized(lanes) as lane:
                note(piece * lanes + lane, lane)
            with T.serial(a.keys % lanes) as tail:
                note(a.keys // lanes * lanes + tail, 0)
            reduce_lanes(lowest, tirx.min, lanes)
            reduce_lanes(highest, tirx.max, lanes)
            sees_any = highest[0] > 0
            start[0] = tirx.min(start[0], tirx.Select(sees_any, lowest[0], T.int32(0)))
            end[0] = tirx.max(end[0], tirx.Select(sees_any, highest[0], keys))
        dtype = a.keys.ty.dtype
        begin = T.Bind(tirx.Cast(dtype, start[0] // unit * unit))
        stop = tirx.min(divide_up(end[0], unit) * unit, keys)
        return _Keys(begin, T.Bind(tirx.Cast(dtype, stop) - begin))

    @property
    def _is_whole(self) -> bool:
        """True if blocks divide the queries."""
        queries = self._attention.queries
        return not is_dynamic(queries) and queries % self._rows == 0

    def _clamp(self, row: Any) -> Any:
        """Clamp a row to the last one; rows beyond the end are computed but not written."""
        return row if self._is_whole else tirx.min(row, self._attention.queries - 1)

    def _copy_queries(self, matrix: Any, first: Any, queries: Any) -> None:
        """Emit the copy of a block of queries, scaled with the factors of the scores."""
        a = self._attention
        source, is_vector = self._load(0, matrix), a.operands[0].matrices.column == 1
        with T.serial(self._rows) as row:
            for column in iterate_vectors(a.depth, self._lanes if is_vector else 1):
                value = self._scale(source(self._clamp(first + row), column))
                queries[row * a.depth + column] = value

    def _softmax(
        self, matrix: Any, query: Any, row: Any, keys: _Keys, scores: Any, totals: Any
    ) -> None:
        """Emit the steps on whole vectors of a row of scores, the exponentials, and their total."""
        a, base = self._attention, row * self._score_stride
        # several vectors of exponentials are computed at once
        wide = self._lanes * FUNCTION_VECTORS
        lanes = self._lanes if is_dynamic(keys.count) or keys.count < wide else wide
        largest, total = allocate_registers(lanes), allocate_registers(lanes)
        with T.vectorized(lanes) as lane:
            largest[lane] = tirx.min_value(FLOAT)
            total[lane] = T.float32(0)
        whole = keys.count // self._lanes * self._lanes
        padded = self._keys._replace(size=keys.count).padded

        def keep_tail(_: IrSize) -> None:
            with T.vectorized(self._lanes) as lane:
                largest[lane] = tirx.max(largest[lane], scores[base + whole + lane])

        for start, count in self._iterate_vectors(whole, lanes):
            with T.vectorized(count) as lane:
                position = base + start + lane
                if a.steps:
                    key = keys.start + start + lane
                    score = self._apply_steps(matrix, query, key, scores[position])
                    scores[position] = score
                largest[lane] = tirx.max(largest[lane], scores[position])
        self._emit_tail(keys.count, keep_tail)
        reduce_lanes(largest, tirx.max, lanes)
        for start, count in self._iterate_vectors(padded, lanes):
            with T.vectorized(count) as lane:
                position = base + start + lane
                scores[position] = self._exponential(scores[position] - largest[0])
                total[lane] = total[lane] + scores[position]
        reduce_lanes(total, tirx.Add, lanes)
        totals[row] = total[0]
        if a.replacement is not None:
            # the total is NaN, or 0 where all scores are -∞
            with when(tirx.Not(totals[row] > 0)):
                for start, count in self._iterate_vectors(padded, lanes):
                    with T.vectorized(count) as lane:
                        scores[base + start + lane] = self._load_scalar(a.replacement)
                totals[row] = T.float32(1)

    def _iterate_vectors(self, length: IrSize, wide: int) -> Iterator[tuple[Any, int]]:
        """Emit loops over whole vectors, several at once while possible; yield start and length."""
        if is_dynamic(length):
            with T.serial(length // wide) as piece:
                yield piece * wide, wide
            return
        for start, count in iterate_pieces(length, wide):
            for inner, lanes in iterate_pieces(count, wide if count == wide else self._lanes):
                yield start + inner, lanes

    def _emit_tail(self, count: IrSize, emit: Callable[[IrSize], None]) -> None:
        """Emit the statements for the tail of some keys, if there is one; `emit` takes its length."""
        tail = count % self._lanes
        if is_dynamic(tail) or tail:
            with when(not is_dynamic(tail) or tail > 0):
                emit(tail)

    def _end_row(
        self, matrix: Any, query: Any, row: Any, keys: _Keys, tail: IrSize, scores: Any
    ) -> None:
        """Emit the steps on the scores of the tail, and -∞ for the remaining lanes of its vector."""
        a, whole = self._attention, keys.count - tail
        position, key = row * self._score_stride + whole, keys.start + whole
        if a.steps:
            # a mask has no elements beyond the last key, so a whole vector cannot be read
            last = iterate_last(tail, self._lanes) if is_dynamic(tail) else T.vectorized(tail)
            with last as lane:
                score = self._apply_steps(matrix, query, key + lane, scores[position + lane])
                scores[position + lane] = score
        lowest = tirx.min_value(FLOAT)
        with T.vectorized(self._lanes) as lane:
            score = scores[position + lane]
            # the sum is -∞, which TVM would write as a constant that C compilers reject
            other = tirx.min(score, lowest) + lowest
            scores[position + lane] = tirx.Select(lane < tail, score, other)

    # ---------------------------------------------------------------- few queries

    @property
    def _can_be_direct(self) -> bool:
        """True if a call may have few queries, and vectors along the depth are contiguous."""
        a = self._attention
        query, key, value = (operand.matrices for operand in a.operands[:3])
        return (
            (is_dynamic(a.queries) or a.queries <= _MAX_DIRECT_QUERIES)
            and self._shared <= _MAX_DIRECT_ROWS
            and query.column == key.row == value.column == a.out.column == 1
            and a.depth % self._lanes == a.values % self._lanes == 0
        )

    def _emit_direct(self, cores: int) -> None:
        """Emit attention for a few queries; with few groups of heads, cores divide keys and values."""
        a, rows, vectors = self._attention, self._shared, self._count_mixed_vectors()
        groups, columns = a.batch // rows, a.values // (vectors * self._lanes)
        with T.serial(a.queries) as query:
            keys = _Keys(0, a.keys)
            if self._has_one_mask:
                keys = self._find_seen_keys(0, query, 1, _KEYS_PER_PART)
            parts = divide_up(keys.count, _KEYS_PER_PART)
            if cores == 1 or a.typical.batch // rows >= cores:
                with loop_over(groups, is_parallel=cores > 1) as group:
                    scores, totals = allocate(rows * self._score_stride), allocate(rows)
                    here = functools.partial(
                        _Rows, query=query, keys=keys, scores=scores, totals=totals
                    )
                    rows_of_group = here(matrix=group * rows, first=0)
                    with T.serial(parts) as part:
                        self._score_part(rows_of_group, part)
                    with T.serial(rows) as row:
                        self._weigh(rows_of_group, row)
                    with T.serial(columns) as column:
                        self._mix(rows_of_group, column, vectors)
            else:
                scores, totals = allocate(a.batch * self._score_stride), allocate(a.batch)
                here = functools.partial(
                    _Rows, query=query, keys=keys, scores=scores, totals=totals
                )
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
        """Return how many vectors of values to compute at once, so that accumulators fit the registers."""
        rows, most = self._shared, self._attention.values // self._lanes
        fitting = [n for n in range(1, most + 1) if (rows + 1) * n < self._cpu.registers]
        return max((n for n in fitting if most % n == 0), default=1)

    def _score_part(self, rows: _Rows, part: Any) -> None:
        """Emit the scores of a part of the keys, a few at once for independent accumulators."""
        start = part * _KEYS_PER_PART
        count = tirx.min(rows.keys.count - start, _KEYS_PER_PART)
        together = max(1, _MAX_DIRECT_ROWS // self._shared)
        with T.serial(count // together) as piece:
            self._score_keys(rows, start + piece * together, together)
        if together > 1:
            with T.serial(count % together) as key:
                self._score_keys(rows, start + count // together * together + key, 1)

    def _score_keys(self, rows: _Rows, key: Any, together: int) -> None:
        a, lanes, shared = self._attention, self._lanes, self._shared
        keys, query = self._load(1, rows.matrix, is_unscaled=True), rows.query
        sums = allocate_registers(together, shared, lanes)
        with T.unroll(together) as k, T.unroll(shared) as row, T.vectorized(lanes) as lane:
            sums[k, row, lane] = T.float32(0)
        with T.unroll(a.depth // lanes) as vector, T.unroll(together) as k, T.unroll(shared) as row:
            source = self._load(0, rows.matrix + row)
            with T.vectorized(lanes) as lane:
                column = vector * lanes + lane
                term = source(query, column) * keys(column, rows.keys.start + key + k)
                sums[k, row, lane] = sums[k, row, lane] + term
        width = lanes
        while width > 1:
            width //= 2
            with T.unroll(together) as k, T.unroll(shared) as row, T.vectorized(width) as lane:
                sums[k, row, lane] = sums[k, row, lane] + sums[k, row, lane + width]
        with T.unroll(together) as k, T.unroll(shared) as row:
            position = rows.keys.start + key + k
            score = self._scale(self._scale_row(1, rows.matrix, 0, position, sums[k, row, 0]))
            rows.scores[(rows.first + row) * self._score_stride + key + k] = score

    def _weigh(self, rows: _Rows, row: Any) -> None:
        """Emit the softmax weights of a row of scores, and their total."""
        here = (rows.matrix + row, rows.query, rows.first + row, rows.keys)
        self._emit_tail(rows.keys.count, lambda tail: self._end_row(*here, tail, rows.scores))
        self._softmax(*here, rows.scores, rows.totals)

    def _mix(self, rows: _Rows, part: Any, vectors: int) -> None:
        """Emit some columns of the matmul of weights and values."""
        a, start = self._attention, part * (vectors * self._lanes)
        # whichever is less: the weights of a key are scaled, or the vectors of its value
        scales_weights = self._shared <= vectors
        values = self._load(2, rows.matrix, is_unscaled=scales_weights)

        def weight(row: Any, key: Any) -> Any:
            value = rows.scores[(rows.first + row) * self._score_stride + key]
            position = rows.keys.start + key
            return self._scale_row(2, rows.matrix, position, 0, value) if scales_weights else value

        sums = Accumulators.allocate(self._shared, vectors, self._lanes)
        for index, _, _ in sums.iterate():
            sums.buffer[index] = T.float32(0)
        with T.serial(rows.keys.count) as key:
            sums.add(
                lambda row: weight(row, key),
                lambda column: values(rows.keys.start + key, start + column),
            )
        for index, row, column in sums.iterate():
            value = sums.buffer[index] / rows.totals[rows.first + row]
            self._out[a.out.offset_of(rows.matrix + row, rows.query, start + column)] = value


class _Rows(NamedTuple):
    """The heads of a query that share keys and values.

    `matrix` is the index of the first head in the batch. `first` is its row in `scores`, which become weights, and its
    position in `totals`, the sums of the weights.
    """

    matrix: Any
    first: Any
    query: Any
    keys: _Keys
    scores: Any
    totals: Any


# ---------------------------------------------------------------- GPUs


def make_gpu_kernel(attention: Attention, device: gpu_tiles.Device) -> tvm.tirx.PrimFunc | None:
    """Return the kernel for a GPU; None with dynamic shapes or few queries, or if no tile fits."""
    sizes = (attention.batch, attention.queries, attention.keys)
    if any(map(is_dynamic, sizes)) or attention.queries < _MIN_QUERIES:
        return None
    own = gpu_tiles.AttentionSizes(*attention.typical, attention.depth, attention.values)
    tile = gpu_tiles.choose_attention_tile(own, device)
    return None if tile is None else _GpuEmitter(attention, tile).emit()


# With fewer queries, most of a tile would be empty.
_MIN_QUERIES: Final = 8
_UNROLLED: Final = 4


class _GpuEmitter(_Emitter):
    def __init__(self, attention: Attention, tile: gpu_tiles.AttentionTile) -> None:
        super().__init__(attention)
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
            self._queries, self._others, self._weights, self._parts = (
                T.buffer_proxy(T.alloc_buffer((size,), FLOAT, scope="shared"))
                for size in tile.shared_sizes(a.depth)
            )
            self._scores = allocate_registers(tile.rows * tile.columns)
            self._results = allocate_registers(tile.rows * tile.values)
            self._largest, self._totals, self._scales, self._left = (
                allocate_registers(tile.rows) for _ in range(4)
            )
            self._right = allocate_registers(max(tile.columns, tile.values))
            self._attend()
        return builder.get()

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

    def _copy(
        self, operand: int, rows: int, columns: int, store: Callable[[Any, Any], None]
    ) -> None:
        """Emit a copy of an operand by all threads; neighbors copy along the contiguous axis."""
        tile, count = self._tile, rows * columns
        with T.serial(-(-count // tile.threads)) as step:
            position = step * tile.threads + self._down * tile.across + self._across
            if count % tile.threads:
                # surplus threads copy the last element again, which needs no condition
                position = tirx.min(position, count - 1)
            if self._attention.operands[operand].matrices.row != 1:
                store(position // columns, position % columns)
            else:
                store(position % rows, position // rows)

    def _copy_queries(self) -> None:
        """Emit the copy of the block's queries, scaled with the factors of the scores."""
        tile, load = self._tile, self._load(0, self._matrix)

        def store(row: Any, column: Any) -> None:
            value = self._scale(load(self._clamp_query(self._first + row), column))
            self._queries[column * tile.query_stride + row] = value

        self._copy(0, tile.queries, self._attention.depth, store)

    def _copy_keys(self, first: Any) -> None:
        tile, load = self._tile, self._load(1, self._matrix)

        def store(position: Any, key: Any) -> None:
            value = load(position, self._clamp_key(first + key))
            self._others[position * tile.key_stride + key] = value

        self._copy(1, self._attention.depth, tile.keys, store)

    def _copy_values(self, first: Any) -> None:
        tile, load = self._tile, self._load(2, self._matrix)

        def store(key: Any, position: Any) -> None:
            value = load(self._clamp_key(first + key), position)
            self._others[key * tile.value_stride + position] = value

        self._copy(2, tile.keys, self._attention.values, store)

    def _clamp_query(self, query: Any) -> Any:
        """Clamp a query to the last one; queries beyond the end are computed but not written."""
        a, tile = self._attention, self._tile
        return tirx.min(query, a.queries - 1) if a.typical.queries % tile.queries else query

    def _clamp_key(self, key: Any) -> Any:
        """Clamp a key to the last one; keys beyond the end have a weight of 0."""
        a, tile = self._attention, self._tile
        return tirx.min(key, a.keys - 1) if a.typical.keys % tile.keys else key

    def _exists(self, key: Any, value: Any, other: Any) -> Any:
        """Return `value` if a key exists, `other` if it is beyond the end."""
        a, tile = self._attention, self._tile
        return tirx.Select(key < a.keys, value, other) if a.typical.keys % tile.keys else value

    def _key(self, first: Any, column: Any) -> Any:
        return first + self._across * self._tile.columns + column

    def _multiply(self, depth: int, left: Any, right: Any, sums: Any, columns: int) -> None:
        """Emit a matmul that adds to `sums`; `left` and `right` are (buffer, row stride) pairs."""
        (left_memory, left_stride), (right_memory, right_stride) = left, right
        rows, inner = self._tile.rows, _UNROLLED if depth % _UNROLLED == 0 else 1
        with T.serial(depth // inner) as outer, T.unroll(inner) as one:
            position = outer * inner + one
            _read(self._left, left_memory, position * left_stride + self._down * rows, rows)
            start = position * right_stride + self._across * columns
            _read(self._right, right_memory, start, columns)
            with T.unroll(rows) as row, T.unroll(columns) as column:
                result = row * columns + column
                sums[result] = sums[result] + self._left[row] * self._right[column]

    def _score(self, first: Any) -> None:
        """Emit the scores of a tile of keys, and this thread's largest score of each query."""
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
                self._scores[position] = self._apply_steps(
                    self._matrix, query, self._clamp_key(key), self._scores[position]
                )
            score = self._exists(key, self._scores[position], tirx.min_value(FLOAT))
            self._scales[row] = tirx.max(self._scales[row], score)

    def _weigh(self, first: Any) -> None:
        """Emit the weights of a tile of keys, and rescale the accumulators of earlier tiles."""
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
        """Return the value that thread `part` stored for a query in `_write_parts`."""
        tile = self._tile
        return self._parts[(self._down * tile.rows + row) * tile.across + part]

    def _write_parts(self, parts: Any) -> None:
        """Emit the stores of each thread's partial value for each of its queries to shared memory."""
        tile = self._tile
        with T.unroll(tile.rows) as row:
            position = (self._down * tile.rows + row) * tile.across + self._across
            self._parts[position] = parts[row]

    def _write(self) -> None:
        """Emit the results: the weighted values, divided by the totals of the weights."""
        a, tile = self._attention, self._tile
        with T.unroll(tile.rows) as row:
            self._totals[row] = T.float32(0)
            with T.serial(tile.across) as part:
                self._totals[row] = self._totals[row] + self._part(row, part)
            if a.replacement is not None:
                # the total is NaN, or 0 where all scores are -∞
                with when(tirx.Not(self._totals[row] > 0)):
                    self._replace_weights(self._load_scalar(a.replacement), row)
        with T.unroll(tile.rows) as row, T.unroll(tile.values) as position:
            query = self._first + self._down * tile.rows + row
            column = self._across * tile.values + position
            value = self._results[row * tile.values + position] / self._totals[row]
            with when(tirx.all(query < a.queries, column < a.values)):
                self._out[a.out.offset_of(self._matrix, query, column)] = value

    def _replace_weights(self, replacement: Any, row: Any) -> None:
        """Emit the result of a query if `replacement` replaces all its weights."""
        a, tile = self._attention, self._tile
        with T.unroll(tile.values) as position:
            result = row * tile.values + position
            column = tirx.min(self._across * tile.values + position, a.values - 1)
            self._results[result] = T.float32(0)
            with T.serial(a.keys) as key:
                value = self._load(2, self._matrix)(key, column)
                self._results[result] = self._results[result] + value
            self._results[result] = self._results[result] * replacement
        self._totals[row] = T.float32(1)


def _read(target: Any, source: Any, first: Any, count: int) -> None:
    """Emit vector loads of `count` adjacent elements."""
    lanes = min(count, gpu_tiles.VECTOR)
    for start in range(0, count, lanes):
        with T.vectorized(lanes) as lane:
            target[start + lane] = source[first + start + lane]
