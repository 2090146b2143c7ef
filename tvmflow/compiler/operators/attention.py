"""Attention as one kernel: softmax(q·kᵀ)·v for some queries at a time, whose scores stay in the cache.

Keys and values are packed for the tiles of `operators.tiles`. All keys of a row are scored before
their softmax, so nothing must be rescaled: at lengths of a few thousand this is faster than an
online softmax over blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators.batches import (
    MIN_PARALLEL_WORK,
    Batches,
    Operand,
    emit_batches,
)
from tvmflow.compiler.operators.definitions import declare_buffer, define_kernel, flatten
from tvmflow.compiler.operators.strided import StridedMatrices
from tvmflow.compiler.operators.tiles import (
    FLOAT,
    Columns,
    Product,
    Workspace,
    choose_rows,
    iterate_pieces,
    iterate_vectors,
    pack,
)


class ScoreStep(NamedTuple):
    """An elementwise operation on the scores.

    Attributes:
        function: The operation.
        operands: The positions of its operands among the kernel's; None for the scores.
    """

    function: Callable[..., Any]
    operands: tuple[int | None, ...]


class Attention(NamedTuple):
    """The computation of an attention kernel.

    Attributes:
        batch: The number of pairs of query and key matrices.
        queries: The number of queries, N.
        keys: The number of keys, M.
        depth: The length of a query, D.
        values: The length of a value, E.
        operands: q (N, D), kᵀ (D, M), v (M, E), the factors of the scores, and the operands of `steps`.
        factors: The positions of factors, of one element each, and whether the scores are divided by it.
        steps: Operations on the scores before softmax.
        replacement: The position of the scalar that replaces weights that are NaN; None if they stay.
        out_shape: The shape of the result.
        out: Its matrices (N, E).
    """

    batch: int
    queries: int
    keys: int
    depth: int
    values: int
    operands: tuple[Operand, ...]
    factors: tuple[tuple[int, bool], ...]
    steps: tuple[ScoreStep, ...]
    replacement: int | None
    out_shape: tuple[int, ...]
    out: StridedMatrices


def make_kernel(attention: Attention, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the operands and the result."""
    return _Emitter(attention, cpu).emit()


class _Emitter:
    """Emits the loops of one kernel."""

    def __init__(self, attention: Attention, cpu: CpuModel) -> None:
        self._attention = attention
        self._cpu = cpu
        self._lanes = cpu.lanes
        padded_keys = -(-attention.keys // cpu.lanes) * cpu.lanes
        max_rows = max(4, cpu.l2_bytes // 8 // padded_keys)
        counts = (attention.keys, attention.values)
        self._rows, ((self._key_points, key_vectors), (self._value_points, value_vectors)) = (
            choose_rows(attention.queries, counts, max_rows, cpu, cpu.lanes)
        )
        self._keys = Columns(attention.keys, cpu.lanes, key_vectors)
        self._values = Columns(attention.values, cpu.lanes, value_vectors)
        self._key_size = attention.depth * self._keys.padded
        self._value_size = attention.keys * self._values.padded
        repeats = [operand.matrices.repeats for operand in attention.operands[1:3]]
        # Groups of queries that share keys and values.
        self._shared = min(repeats) if max(repeats) % min(repeats) == 0 else 1

    def emit(self) -> tvm.tirx.PrimFunc:
        a = self._attention
        with define_kernel("attention") as builder:
            buffers = [
                T.arg(f"x{position}", declare_buffer(operand.shape, operand.dtype))
                for position, operand in enumerate(a.operands)
            ]
            out = T.arg("out", declare_buffer(a.out_shape, FLOAT))
            self._inputs = [
                flatten(buffer, operand.shape, operand.dtype)
                for buffer, operand in zip(buffers, a.operands, strict=True)
            ]
            self._out = Workspace(flatten(out, a.out_shape, FLOAT))
            self._emit_batches()
        return builder.get()

    def _load(self, position: int, matrix: Any) -> Callable[[Any, Any], Any]:
        """Return the function that loads an element of an operand's matrix."""
        buffer, matrices = self._inputs[position], self._attention.operands[position].matrices
        return lambda row, column: tirx.BufferLoad(buffer, [matrices.place(matrix, row, column)])

    def _emit_batches(self) -> None:
        a = self._attention
        work = a.batch * a.queries * a.keys * (a.depth + a.values)
        emit_batches(
            Batches(a.batch, self._shared, -(-a.queries // self._rows)),
            (self._key_size, self._value_size),
            self._cpu.cores if work >= MIN_PARALLEL_WORK else 1,
            self._pack,
            self._attend,
        )

    def _pack(self, group: Any, packed: Sequence[Workspace], slot: Any) -> None:
        keys, values = packed
        a, matrix = self._attention, group * self._shared
        for position, depth, columns, target, size in (
            (1, a.depth, self._keys, keys, self._key_size),
            (2, a.keys, self._values, values, self._value_size),
        ):
            is_contiguous = a.operands[position].matrices.column == 1
            source = self._load(position, matrix)
            pack(source, is_contiguous, depth, columns, target, slot * size)

    def _attend(self, matrix: Any, block: Any, packed: Sequence[Workspace], slot: Any) -> None:
        """Emit the attention of a block of queries."""
        a, rows = self._attention, self._rows
        keys, values = packed
        first = block * rows
        queries = Workspace.allocate(rows * a.depth)
        scores = Workspace.allocate(rows * self._keys.padded)
        totals = Workspace.allocate(rows)
        result = Workspace.allocate(rows * self._values.padded)
        self._copy_queries(matrix, first, queries)
        Product(rows, a.depth, self._keys, self._key_points).emit(
            lambda row, k: queries[row * a.depth + k], keys, slot * self._key_size, scores
        )
        with T.serial(rows) as row:
            self._softmax(matrix, self._clamp(first + row), row, scores, totals)
        Product(rows, a.keys, self._values, self._value_points).emit(
            lambda row, k: scores[row * self._keys.padded + k],
            *(values, slot * self._value_size, result),
        )
        with T.serial(rows) as row:
            if a.queries % rows:
                with T.If(first + row < a.queries), T.Then():
                    self._write(matrix, first, row, result, totals)
            else:
                self._write(matrix, first, row, result, totals)

    def _clamp(self, row: Any) -> Any:
        """Return a row that exists: those beyond the end are computed, but not written."""
        queries = self._attention.queries
        return tirx.min(row, queries - 1) if queries % self._rows else row

    def _copy_queries(self, matrix: Any, first: Any, queries: Workspace) -> None:
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

    def _softmax(
        self, matrix: Any, query: Any, row: Any, scores: Workspace, totals: Workspace
    ) -> None:
        """Emit the exponentials of a row of scores and their sum."""
        a, lanes, base = self._attention, self._lanes, row * self._keys.padded
        largest, total = (T.alloc_buffer((lanes,), FLOAT, scope="local") for _ in range(2))
        with T.vectorized(lanes) as lane:
            T.buffer_store(largest, tirx.min_value(FLOAT), [lane])
            T.buffer_store(total, T.float32(0), [lane])
        if self._keys.padded > a.keys:
            # twice the lowest number is -∞, which TVM writes as C that compilers reject
            with T.vectorized(self._keys.padded - a.keys) as lane:
                lowest = tirx.BufferLoad(largest, [lane])
                scores[base + a.keys + lane] = lowest + lowest
        for start, count in iterate_pieces(a.keys, lanes):
            with T.vectorized(count) as lane:
                place = base + start + lane
                if a.steps:
                    scores[place] = self._apply_steps(matrix, query, start + lane, scores[place])
                value = tirx.max(tirx.BufferLoad(largest, [lane]), scores[place])
                T.buffer_store(largest, value, [lane])
        self._reduce(largest, tirx.max)
        with T.serial(self._keys.padded // lanes) as vector, T.vectorized(lanes) as lane:
            place = base + vector * lanes + lane
            scores[place] = tirx.exp(scores[place] - tirx.BufferLoad(largest, [0]))
            T.buffer_store(total, tirx.BufferLoad(total, [lane]) + scores[place], [lane])
        self._reduce(total, tirx.Add)
        totals[row] = tirx.BufferLoad(total, [0])
        if a.replacement is not None:
            # the sum is NaN, or 0 where all scores are -∞
            with T.If(tirx.Not(totals[row] > 0)), T.Then():
                with T.serial(self._keys.padded // lanes) as vector, T.vectorized(lanes) as lane:
                    scores[base + vector * lanes + lane] = self._load(a.replacement, 0)(0, 0)
                totals[row] = T.float32(1)

    def _apply_steps(self, matrix: Any, query: Any, key: Any, value: Any) -> Any:
        for step in self._attention.steps:
            operands = [
                value if position is None else self._load(position, matrix)(query, key)
                for position in step.operands
            ]
            value = step.function(*operands)
        return value

    def _reduce(self, vector: Any, function: Callable[[Any, Any], Any]) -> None:
        """Emit the reduction of a vector to its first lane, by halves."""
        width = self._lanes // 2
        while width:
            with T.vectorized(width) as lane:
                halves = (tirx.BufferLoad(vector, [lane + start]) for start in (0, width))
                T.buffer_store(vector, function(*halves), [lane])
            width //= 2

    def _write(
        self, matrix: Any, first: Any, row: Any, result: Workspace, totals: Workspace
    ) -> None:
        a = self._attention
        for column in iterate_vectors(a.values, self._lanes if a.out.column == 1 else 1):
            value = result[row * self._values.padded + column] / totals[row]
            self._out[a.out.place(matrix, first + row, column)] = value
