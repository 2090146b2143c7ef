"""Packs the weights of matrix products into columns of vectors, when the library is built."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.choices import COLUMNS, ROWS, Choice
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Arithmetic, Contraction, multiply_add
from tvmflow.compiler.contraction.machine import DOT_INSTRUCTIONS, FLOAT_BYTES
from tvmflow.compiler.marks import read_marks
from tvmflow.compiler.open_sizes import is_open, known_sizes, sizes_of
from tvmflow.compiler.passes.quantization import (
    QuantizedData,
    find_integer_weights,
    find_quantized_data,
    integer_weight_dtype,
    scale_sums,
    split_zero_point,
    to_dot_data,
)
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels import blocked, dot_products
from tvmflow.compiler.tir_kernels.dot_products import BFLOAT16
from tvmflow.compiler.tir_kernels.dot_products import ROWS as MATRIX_ROWS

# Fewer rows read each weight too few times for another instruction to matter.
_MIN_MATRIX_ROWS: Final = 4
# How many paddings of a product a search measures, and how far from the least their estimated times are.
_MAX_MEASURED: Final = 4
_MAX_MEASURED_RATIO: Final = 1.15


def pack_matmuls(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Pack the weights (k, n) of matrix products as (⌈n/b⌉, k, b)."""
    if context.is_plain("matmul"):
        return mod
    return rewrite_main(mod, _MatmulPacker, context)


class _MatmulPacker(TargetRewriter):
    """Rewrites matrix products of float32 data and weights."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.as_call(call, "relax.matmul") is None or not self._is_supported(call):
            return rewritten
        product = self._multiply_integers(call)
        if product is not None:
            return product
        data, weights = rewritten.args
        depth, columns = ir.known_shape(weights)
        is_wide = columns >= self._context.lanes and depth % BFLOAT16.terms == 0
        if is_wide and self._context.uses_bfloat16():
            return self._multiply_bfloat16(data, weights)
        dtype = integer_weight_dtype(self.flow, call.args[1]) or self._context.weight_dtype
        rows, padded = self._pad_product(call, weights)
        packed = self._pack(weights, padded, dtype)
        return self.kernel(blocked.dense, "dense_pack", data, packed, columns, rows)

    def _multiply_integers(self, call: relax.Call) -> Any:
        """Emit the product of quantized data and int8 weights, without the scale of the weights.

        None for others.
        """
        data = find_quantized_data(self.flow, call.args[0])
        weights, zeros = split_zero_point(self.flow, call.args[1])
        source = find_integer_weights(self.flow, weights)
        depth, columns = ir.known_shape(call.args[1])
        block, products = self._choose_block(columns), self._context.integers
        if data is None or source is None or block is None:
            return None
        rows = self._count_matrix_rows(call.args[0], columns)
        products = MATRIX_ROWS if rows else products
        data = to_dot_data(self, data.visit(self), self._context.dot_dtype)
        integers = data.integers
        if not rows:
            # whatever stands beyond the depth is multiplied by zeros
            outer = [1] * (len(known_sizes(integers)) - 1)
            integers = self.pad_to_multiples(integers, [*outer, products.terms])
        weights = self.visit_expr(source.call.args[0])
        if not source.is_transposed:
            weights = self.emit(relax.op.permute_dims(weights))
        padded = self.pad_to_multiples(weights, [block, products.terms])
        split = [-(-columns // block), block, -(-depth // products.terms), products.terms]
        packed = self.rearrange(padded, split, [0, 2, 1, 3])
        multiply = functools.partial(dot_products.dense, products, results=columns, rows=rows)
        sums = self.kernel(multiply, "quantized_dense_pack", integers, packed)
        if zeros is not None:
            sums = self._subtract_zeros(sums, data, zeros, depth)
        return scale_sums(self, sums, weights, [-1], data)

    def _count_matrix_rows(self, data: Any, columns: int) -> int:
        """Return how many rows instructions multiply as matrices; 0 if they multiply each by itself.

        Levels of CPUs that share weights have one layout of them.
        """
        cpu, sizes = self._context.cpu, sizes_of(data)
        if (
            cpu is None
            or not cpu.has_matrices
            or self._context.options.shares_weights
            or sizes is None
            or is_open(sizes[-2])
            or sizes[-2] < _MIN_MATRIX_ROWS
            or columns < cpu.lanes
        ):
            return 0
        vectors, depth = -(-columns // cpu.lanes), ir.known_shape(data)[-1]
        problem = Contraction(int(sizes[-2]), vectors, depth, Arithmetic.BYTE_MATRICES)
        return candidates.pad_rows(problem, cpu)

    def _subtract_zeros(
        self, sums: Any, data: QuantizedData, zeros: np.ndarray[Any, Any], depth: int
    ) -> Any:
        """Emit the sums of products with weights minus a zero point, of all or of each column."""
        totals = self.emit(relax.op.sum(self.cast(data.integers, "int32"), -1, keepdims=True))
        zero_point = data.emit_zero_point(self)
        offset = self.emit(relax.op.multiply(zero_point, relax.const(depth, "int32")))
        totals = self.emit(relax.op.subtract(totals, offset))
        offset = self.emit(relax.op.multiply(totals, relax.const(zeros)))
        return self.emit(relax.op.subtract(sums, offset))

    def _multiply_bfloat16(self, data: Any, weights: Any) -> Any:
        """Emit the product of data and weights that are rounded to bfloat16."""
        columns, block = ir.known_shape(weights)[1], self._context.lanes
        packed = self.split_terms(self._pack(weights, block, "float32"), BFLOAT16.terms)
        return self.kernel(
            functools.partial(dot_products.dense, BFLOAT16),
            "bfloat16_dense_pack",
            self.round_data(data),
            self.round_weights(packed),
            columns,
        )

    def _choose_block(self, columns: int) -> int | None:
        """Return how many sums one instruction computes: all of a vector, or fewer for fewer columns.

        None if no instruction divides the columns, or there is none.
        """
        lanes, dtype = self._context.lanes, self._context.dot_dtype
        if dtype is not None and columns > lanes:
            return lanes
        widths = [lanes >> shift for shift in range(3)]
        instructions = [width for width in widths if (dtype, width) in DOT_INSTRUCTIONS]
        return next((width for width in instructions if columns % width == 0), None)

    def _is_supported(self, call: Any) -> bool:
        data, weights = call.args
        return (
            len(self.numbers.shape(data) or ()) >= 2
            and len(ir.shape_of(weights) or ()) == 2
            and all(self._is_float(expr) for expr in (data, weights, call))
            and self.flow.is_weight(weights)
            and not self.flow.is_weight(data)
        )

    def _is_float(self, expr: Any) -> bool:
        is_tensor = isinstance(expr.ty, relax.TensorType)
        return is_tensor and ir.dtype_of(expr) in self._context.data_dtypes

    def _pad_product(self, call: relax.Call, weights: Any) -> tuple[int | None, int]:
        """Return how many rows and columns are computed, so that tiles divide them.

        A dynamic number of rows, for which None stands, is not padded.
        """
        data = call.args[0]
        assert self._context.cpu is not None, "weights are packed for a CPU model"
        (depth, columns), shape = ir.known_shape(weights), self.numbers.shape(data)
        assert shape is not None, "the product is supported"
        cpu = self._context.cpu
        vectors = -(-columns // cpu.lanes)
        problem = Contraction(shape[-2], vectors, depth, multiply_add(cpu), spreads_columns=False)
        sizes = sizes_of(data)
        if sizes is None or is_open(sizes[-2]):
            return None, candidates.pad_product(problem, cpu)[1] * cpu.lanes
        # results that are rounded depend on nothing that is measured
        ratio = _MAX_MEASURED_RATIO if self._context.has_full_precision() else 1.0
        paddings = candidates.rank_paddings(problem, cpu, ratio)[:_MAX_MEASURED]
        choices: list[tuple[Choice, int]] = [
            ({ROWS: rows, COLUMNS: vectors * cpu.lanes}, depth * vectors * cpu.lanes * FLOAT_BYTES)
            for rows, vectors in paddings
        ]
        text = f"matmul {'×'.join(map(str, shape))} by {depth}×{columns}"
        choice = self._context.choose(text, read_marks(call), choices)
        return choice[ROWS], choice[COLUMNS]

    def _choose_packed_columns(self, columns: int) -> int:
        cpu = self._context.cpu
        assert cpu is not None, "weights are packed for a CPU model"
        return cpu.lanes if columns % cpu.packed_columns else cpu.packed_columns

    def _pack(self, weights: Any, padded_columns: int, dtype: str) -> Any:
        weights = self.pad_to_multiples(weights, [1, padded_columns])
        depth, columns = ir.known_shape(weights)
        block = self._choose_packed_columns(columns)
        packed = self.rearrange(weights, [depth, columns // block, block], [1, 0, 2])
        return self.cast(packed, dtype)
