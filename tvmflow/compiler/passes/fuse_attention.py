"""Computes attention in one kernel: queries times keys, softmax, and the product with values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.candidates import choose_row_block, most_tile_rows
from tvmflow.compiler.contraction.gpu_tiles import Device
from tvmflow.compiler.contraction.machine import (
    FUNCTION_VECTORS,
    LINE_FLOATS,
    MIN_PARALLEL_PRODUCTS,
    CpuModel,
)
from tvmflow.compiler.contraction.packed import (
    FLOAT,
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
    pack,
    reduce_lanes,
)
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.passes.strided_views import MatrixView, find_view, is_scalar
from tvmflow.compiler.passes.vector_math import exp_of_negative
from tvmflow.compiler.tir_kernels.attention import (
    Attention,
    ScoreStep,
    Typical,
    make_gpu_kernel,
)
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.compiler.tir_kernels.strides import Operand, StridedMatrices, contiguous
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    count_elements,
    divide_up,
    is_dynamic,
    same_size,
    same_sizes,
    sizes_of,
)

_log = logging.getLogger(__name__)

_STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    "relax.add": tirx.Add,
    "relax.subtract": tirx.Sub,
    "relax.multiply": tirx.Mul,
    "relax.divide": tirx.Div,
    "relax.where": tirx.Select,
}
"""The operators on scores -> the same on their elements."""


def fuse_attention(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace softmax(q·kᵀ)·v, with masks and scales, by one kernel.

    It keeps the scores in the cache of a CPU, or in the registers of a GPU.
    """
    if context.is_plain("attention"):
        return mod
    if context.cpu is not None:
        exponential = exp_of_negative if context.has_vector_math() else tirx.exp
        return rewrite_main(mod, _AttentionFuser, _Processor(context.cpu, exponential))
    return rewrite_main(mod, _AttentionFuser, Device.from_target(context.target))


class _Processor(NamedTuple):
    """A CPU, and the function that computes exponentials of negative numbers on it."""

    model: CpuModel
    exponential: Callable[[Any], Any]


class _Step(NamedTuple):
    """An operation on the scores: its operands, None for the scores, and the shape of its result."""

    name: str
    operands: tuple[Any, ...]
    shape: tuple[IrSize, ...]


_Scores = tuple[Any, list[_Step]]
"""The product that scores begin with, and the operations on them, in order."""


class _AttentionFuser(MainRewriter):
    """Rewrites the last product of attention, or the transpose behind it."""

    OPERATORS = ir.operators("matmul permute_dims")

    def __init__(self, mod: tvm.IRModule, machine: _Processor | Device) -> None:
        super().__init__(mod)
        self._machine = machine
        self._transposed = [
            self.flow.find_call_used_once(value.args[0], "relax.matmul")
            for value in self.flow.values.values()
            if ir.operator_name(value) == "relax.permute_dims"
        ]

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        if ir.operator_name(call) == "relax.matmul":
            is_transposed = any(p is not None and call.same_as(p) for p in self._transposed)
            return None if is_transposed else self._fuse(call, range(len(sizes_of(call) or ())))
        product = self.flow.find_call_used_once(call.args[0], "relax.matmul")
        if product is None or call.attrs.axes is None:
            return None
        return self._fuse(product, [int(axis) for axis in call.attrs.axes])

    def _fuse(self, call: Any, order: Sequence[int]) -> Any:
        """Return the call of a kernel for attention with axes in an order; None for other products."""
        scores, replacement = _match(self.flow, call) or (None, None)
        fused = None if scores is None else self._make_kernel(scores, replacement, call, order)
        if fused is None:
            return None
        kernel, views = fused
        function: tvm.tirx.PrimFunc | None
        if isinstance(self._machine, _Processor):
            function = _Emitter(kernel, *self._machine).emit()
        else:
            function = make_gpu_kernel(kernel, self._machine)
        if function is None:
            return None
        _log.debug("attention of %s with %d operands", sizes_of(call), len(views))
        arguments = [self.visit_expr(view.tensor) for view in views]
        return self.call_function(function, "attention", arguments, kernel.out_shape)

    def _make_kernel(
        self, scores: _Scores, replacement: Any, result: Any, order: Sequence[int]
    ) -> tuple[Attention, list[MatrixView]] | None:
        product, steps = scores
        *batch, queries, keys = sizes_of(product) or ()
        shape = sizes_of(result) or ()
        depth = (sizes_of(product.args[0]) or ())[-1]
        if is_dynamic(depth) or is_dynamic(shape[-1]):
            return None
        views = [
            find_view(self.flow, product.args[0], batch, with_factors=True),
            find_view(self.flow, product.args[1], batch, with_factors=True),
            find_view(self.flow, result.args[1], shape[:-2]),
        ]
        factors = [factor for view in views[:2] if view is not None for factor in view.factors]
        while steps and (factor := _as_factor(steps[0])) is not None:
            factors.append(factor)
            steps = steps[1:]
        scalar = StridedMatrices(0, (), 0, 0)
        views += [MatrixView(tensor, scalar) for tensor, _ in factors]
        place = None if replacement is None else len(views)
        if replacement is not None:
            views.append(MatrixView(replacement, scalar))
        score_steps = []
        for step in steps:
            positions: list[int | None] = []
            for operand in step.operands:
                positions.append(None if operand is None else len(views))
                if operand is not None:
                    views.append(self._find_mask(operand, step.shape, (queries, keys)))
            score_steps.append(ScoreStep(_STEPS[step.name], tuple(positions)))
        if any(view is None for view in views):
            return None
        known = [view for view in views if view is not None]
        kernel = Attention(
            batch=count_elements(batch),
            queries=queries,
            keys=keys,
            typical=Typical(
                batch=self.numbers.size(count_elements(batch)),
                queries=self.numbers.size(queries),
                keys=self.numbers.size(keys),
            ),
            depth=depth,
            values=shape[-1],
            operands=tuple(
                Operand(sizes_of(view.tensor) or (), ir.dtype_of(view.tensor), view.matrices)
                for view in known
            ),
            factors=tuple((3 + index, divides) for index, (_, divides) in enumerate(factors)),
            steps=tuple(score_steps),
            replacement=place,
            out_shape=tuple(shape[axis] for axis in order),
            out=contiguous(shape, order),
        )
        return kernel, known

    def _find_mask(
        self, operand: Any, shape: Sequence[IrSize], matrix: tuple[IrSize, IrSize]
    ) -> MatrixView | None:
        """Return the view of an operand of scores of a shape; None if it is no batch of matrices."""
        extents = sizes_of(operand)
        is_matrix = same_sizes(shape[-2:], matrix)
        if extents is None or not is_matrix or len(extents) > len(shape):
            return None
        if len(extents) >= 2:
            return find_view(self.flow, operand, shape[:-2])
        column = 1 if extents and not same_size(extents[0], 1) else 0
        return MatrixView(operand, StridedMatrices(0, (), 0, column))


def _as_factor(step: _Step) -> tuple[Any, bool] | None:
    """Return the scalar that scores are multiplied with or divided by; None for other operations."""
    if step.name not in ("relax.multiply", "relax.divide"):
        return None
    left, right = step.operands
    factor = left if right is None else right
    is_one = same_size(count_elements(sizes_of(factor) or ()), 1)
    if not is_one or (step.name == "relax.divide" and right is None):
        return None
    return factor, step.name == "relax.divide"


def _match(flow: ir.DataFlow, call: Any) -> tuple[_Scores, Any] | None:
    """Return the scores of attention that ends with a product, and what replaces NaN weights or None."""
    weights, values = call.args
    shape = sizes_of(call)
    if shape is None or not all(map(ir.is_float32, (weights, values, call))):
        return None
    value = _skip_reshapes(flow, weights)
    weights, replacement = _match_nan_guard(flow, value)
    if replacement is not None:
        value = flow.value_if_used(weights, 2)
    softmax = ir.as_call(value, "relax.nn.softmax")
    rows = sizes_of(call.args[0])
    scored = sizes_of(softmax)
    if softmax is None or rows is None or scored is None:
        return None
    if int(softmax.attrs.axis) % len(scored) != len(scored) - 1:
        return None
    scores = _match_scores(flow, softmax.args[0], scored[-1])
    if scores is None:
        return None
    product = sizes_of(scores[0]) or ()
    matrix = (shape[-2], product[-1])
    is_plain = same_sizes(product[-2:], rows[-2:]) and same_sizes(rows[-2:], matrix)
    if not is_plain or len(rows) < 2 or any(same_size(size, 0) for size in shape):
        return None
    batches = [count_elements(sizes[:-2]) for sizes in (product, rows, shape)]
    if not all(same_size(batch, batches[-1]) for batch in batches):
        return None
    return scores, replacement


def _skip_reshapes(flow: ir.DataFlow, expr: Any) -> Any:
    """Return the value of a variable that is used once, before reshapes that keep its rows."""
    value = flow.value_if_used_once(expr)
    while ir.operator_name(value) == "relax.reshape":
        shapes = [sizes_of(tensor) or () for tensor in (value, value.args[0])]
        if not all(shapes) or not same_size(shapes[0][-1], shapes[1][-1]):
            break
        value = flow.value_if_used_once(value.args[0])
    return value


def _match_nan_guard(flow: ir.DataFlow, value: Any) -> tuple[Any, Any]:
    """Return p and the scalar s of `where(isnan(p), s, p)`; None for another value."""
    if ir.operator_name(value) == "relax.where":
        condition, replacement, weights = value.args
        test = flow.value_if_used_once(condition)
        if ir.operator_name(test) == "relax.isnan" and test.args[0].same_as(weights):
            return weights, replacement if is_scalar(replacement) else None
    return None, None


def _match_scores(flow: ir.DataFlow, expr: Any, keys: IrSize) -> _Scores | None:
    """Return the product of matrices and the operations that give the scores; None for others."""
    value = flow.value_if_used_once(expr)
    shape = None if value is None else sizes_of(value)
    if not shape or not same_size(shape[-1], keys) or not ir.is_float32(value):
        return None
    name = ir.operator_name(value)
    if name == "relax.matmul":
        known = all(ir.is_float32(arg) and len(sizes_of(arg) or ()) >= 2 for arg in value.args)
        return (value, []) if known and not any(map(flow.is_weight, value.args)) else None
    if name == "relax.reshape":
        return _match_scores(flow, value.args[0], keys)
    if name not in _STEPS:
        return None
    for position, argument in enumerate(value.args):
        sizes = sizes_of(argument)
        if sizes is None or not same_sizes(sizes, shape):
            continue
        scores = _match_scores(flow, argument, keys)
        if scores is not None:
            operands = list(value.args)
            operands[position] = None
            return scores[0], [*scores[1], _Step(name, tuple(operands), shape)]
    return None


# ---------------------------------------------------------------- attention
# Attention as one kernel: softmax(q·kᵀ)·v for some queries at a time, whose scores stay in the
# cache.
#
# Keys and values are packed for register tiles (`contraction.packed`). All keys of a row are scored
# before their softmax, so nothing must be rescaled: at lengths of a few thousand this is faster
# than an online softmax over blocks of keys.


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
        points = most_tile_rows(attention.queries)
        counts = tuple(-(-size // cpu.lanes) for size in (typical.keys, attention.values))
        self._rows, ((self._key_points, key_vectors), (self._value_points, value_vectors)) = (
            choose_row_block(typical.queries, counts, max_rows, points, cpu)
        )
        self._keys = Columns(attention.keys, cpu.lanes, key_vectors)
        # Rows a power of two apart would evict each other from the cache, of which the second product reads many at once.
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
        with define_flat_kernel("attention", a.parameters, has_root=False) as (builder, buffers):
            *self._inputs, self._out = map(T.buffer_proxy, buffers)
            emit_batches(batches, sizes, cores, self._pack, self._attend)
        return builder.get()

    def _load(self, position: int, matrix: Any) -> Callable[[Any, Any], Any]:
        buffer, matrices = self._inputs[position], self._attention.operands[position].matrices
        return lambda row, column: buffer[matrices.place(matrix, row, column)]

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
        scored = count_rows(a.queries, first, rows, self._key_points)
        Product(
            rows=scored,
            depth=a.depth,
            columns=self._keys,
            points=self._key_points,
            factors=factors,
            stride=self._score_stride,
        ).emit(lambda row, k: queries[row * a.depth + k], keys, slot * self._key_size, scores)
        mixed = count_rows(a.queries, first, rows, self._value_points)

        def end_rows(rest: IrSize) -> None:
            with T.serial(mixed) as row:
                self._end_row(matrix, self._clamp(first + row), row, rest, scores)

        # Ahead of all rows, so that no vector is read shortly after a part of it was written.
        self._emit_rest(end_rows)
        with T.serial(mixed) as row:
            self._softmax(matrix, self._clamp(first + row), row, scores, totals)
        Product(
            rows=mixed,
            depth=a.keys,
            columns=self._values,
            points=self._value_points,
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
                self._out[a.out.place(matrix, first + row, column)] = value

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
                place = base + start + lane
                scores[place] = self._exponential(scores[place] - largest[0])
                total[lane] = total[lane] + scores[place]
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
        """Return how many scores of a row have their exponentials computed side by side."""
        keys = self._attention.keys
        wide = self._lanes * FUNCTION_VECTORS
        return self._lanes if is_dynamic(keys) or keys < wide else wide

    def _iterate_vectors(self, length: IrSize, wide: int) -> Iterator[tuple[Any, int]]:
        """Emit loops over whole vectors, many at once while so many are left; yield start and length."""
        if is_dynamic(length):
            with T.serial(length // wide) as piece:
                yield piece * wide, wide
            return
        for start, count in iterate_pieces(length, wide):
            for inner, lanes in iterate_pieces(count, wide if count == wide else self._lanes):
                yield start + inner, lanes

    def _emit_rest(self, emit: Callable[[IrSize], None]) -> None:
        """Emit what is to be done if some keys fill no vector; their number is passed."""
        rest = self._attention.keys % self._lanes
        if is_dynamic(rest):
            with T.If(rest > 0), T.Then():
                emit(rest)
        elif rest:
            emit(rest)

    def _end_row(self, matrix: Any, query: Any, row: Any, rest: IrSize, scores: Any) -> None:
        """Emit the steps on the scores of keys that fill no vector, and -∞ for the lanes behind them."""
        a, key = self._attention, self._attention.keys - rest
        place = row * self._score_stride + key
        if a.steps:
            # they read masks, of which there are no more numbers
            with (
                iterate_last(rest, self._lanes) if is_dynamic(rest) else T.vectorized(rest) as lane
            ):
                score = self._apply_steps(matrix, query, key + lane, scores[place + lane])
                scores[place + lane] = score
        lowest = tirx.min_value(FLOAT)
        with T.vectorized(self._lanes) as lane:
            score = scores[place + lane]
            # The sum is -∞, which TVM writes as C that compilers reject if it can compute it.
            other = tirx.min(score, lowest) + lowest
            scores[place + lane] = tirx.Select(lane < rest, score, other)

    def _find_largest(self, matrix: Any, query: Any, row: Any, scores: Any, largest: Any) -> None:
        """Emit the steps on whole vectors of a row of scores, and the largest score of each lane."""
        a, base = self._attention, row * self._score_stride
        whole = a.keys // self._lanes * self._lanes

        def keep(lane: Any, score: Any) -> None:
            largest[lane] = tirx.max(largest[lane], score)

        def keep_rest(_: IrSize) -> None:
            with T.vectorized(self._lanes) as lane:
                keep(lane, scores[base + whole + lane])

        for start, count in self._iterate_vectors(whole, self._count_side_by_side()):
            with T.vectorized(count) as lane:
                place = base + start + lane
                if a.steps:
                    scores[place] = self._apply_steps(matrix, query, start + lane, scores[place])
                keep(lane, scores[place])
        self._emit_rest(keep_rest)

    def _apply_steps(self, matrix: Any, query: Any, key: Any, value: Any) -> Any:
        for step in self._attention.steps:
            operands = [
                value if position is None else self._load(position, matrix)(query, key)
                for position in step.operands
            ]
            value = step.function(*operands)
        return value
