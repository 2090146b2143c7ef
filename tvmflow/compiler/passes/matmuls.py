"""Matmuls on CPUs: packed weights, block-quantized weights, computed matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.context import LoweringContext, TargetRewriter
from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Arithmetic, Contraction, multiply_add
from tvmflow.compiler.contraction.machine import (
    DOT_INSTRUCTIONS,
    FLOAT_BYTES,
    MIN_PARALLEL_PRODUCTS,
    list_features,
)
from tvmflow.compiler.contraction.packed import (
    FLOAT,
    Batches,
    Columns,
    Product,
    allocate,
    count_rows,
    emit_batches,
    iterate_vectors,
    pack,
)
from tvmflow.compiler.passes import quantization
from tvmflow.compiler.passes.strided_views import MatrixView, find_view
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.block_quantized import (
    WORD_BITS,
    BlockQuantizedMatmul,
    Machine,
    make_kernel,
    make_row_kernel,
)
from tvmflow.compiler.tir_kernels.blocked import BFLOAT16
from tvmflow.compiler.tir_kernels.blocked import ROWS as MATRIX_ROWS
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel, when
from tvmflow.compiler.tir_kernels.strides import contiguous
from tvmflow.core.choices import COLUMNS, ROWS, Choice
from tvmflow.graph import bfloat16, ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    count_elements,
    divide_up,
    is_dynamic,
    known_sizes,
    sizes_of,
)
from tvmflow.graph.ir_operators import BlockQuantizedOperands, BlockQuantizedWeights
from tvmflow.graph.marks import read_marks

# ---------------------------------------------------------------- packed weights

# With fewer rows, each weight is used too few times for matrix instructions to be faster.
_MIN_MATRIX_ROWS: Final = 4
# A search measures at most this many paddings of a matmul, with estimates within this factor of the least one.
_MAX_MEASURED: Final = 4
_MAX_MEASURED_RATIO: Final = 1.15


class MatmulPacker(TargetRewriter):
    """Packs the weights (k, n) of floating-point matmuls as (⌈n/b⌉, k, b)."""

    OPERATORS = ("relax.matmul",)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        if not self._is_supported(call):
            return None
        product = self._multiply_integers(call)
        if product is not None:
            return product
        data, weights = rewritten.args
        depth, columns = ir.known_shape(weights)
        is_wide = columns >= self._context.lanes and depth % BFLOAT16.terms == 0
        if is_wide and self._context.uses_bfloat16():
            return self._multiply_bfloat16(data, weights)
        dtype = (
            quantization.integer_weight_dtype(self.flow, call.args[1]) or self._context.weight_dtype
        )
        rows, padded = self._pad_product(call, weights)
        packed = self._pack(weights, padded, dtype)
        return self.kernel(blocked.dense, "dense_pack", data, packed, columns, rows)

    def _multiply_integers(self, call: Any) -> Any:
        """Emit the matmul of quantized data and int8 weights, without the weights' scale; None for others."""
        data = quantization.find_quantized_data(self.flow, call.args[0])
        weights, zeros = quantization.split_zero_point(self.flow, call.args[1])
        source = quantization.find_integer_weights(self.flow, weights)
        depth, columns = ir.known_shape(call.args[1])
        block, products = self._choose_block(columns), self._context.integers
        if data is None or source is None or block is None:
            return None
        rows = self._count_matrix_rows(call.args[0], columns)
        products = MATRIX_ROWS if rows else products
        data = quantization.to_dot_data(self, data.visit(self), self._context.dot_dtype)
        integers = data.integers
        if not rows:
            # padded data do not change results, because the weights beyond the depth are zeros
            outer = [1] * (len(known_sizes(integers)) - 1)
            integers = self.pad_to_multiples(integers, [*outer, products.terms])
        weights = self.visit_expr(source.call.args[0])
        if not source.is_transposed:
            weights = self.emit(relax.op.permute_dims(weights))
        padded = self.pad_to_multiples(weights, [block, products.terms])
        split = [-(-columns // block), block, -(-depth // products.terms), products.terms]
        packed = self.rearrange(padded, split, [0, 2, 1, 3])
        multiply = functools.partial(blocked.dot_dense, products, results=columns, rows=rows)
        sums = self.kernel(multiply, "quantized_dense_pack", integers, packed)
        if zeros is not None:
            # corrects for the zero point of the weights, one for all columns or one for each
            totals = self.emit(relax.op.sum(self.cast(data.integers, "int32"), -1, keepdims=True))
            zero_point = data.emit_zero_point(self)
            offset = self.emit(relax.op.multiply(zero_point, relax.const(depth, "int32")))
            totals = self.emit(relax.op.subtract(totals, offset))
            offset = self.emit(relax.op.multiply(totals, relax.const(zeros)))
            sums = self.emit(relax.op.subtract(sums, offset))
        return quantization.scale_accumulators(self, sums, weights, [-1], data)

    def _count_matrix_rows(self, data: Any, columns: int) -> int:
        """Return the padded number of rows for matrix instructions; 0 if dot products compute each row.

        ISA levels that share weights need one layout, so they use no matrix instructions.
        """
        cpu, sizes = self._cpu, sizes_of(data)
        if not cpu.has_matrices or self._context.options.shares_weights or columns < cpu.lanes:
            return 0
        if sizes is None or is_dynamic(sizes[-2]) or sizes[-2] < _MIN_MATRIX_ROWS:
            return 0
        vectors, depth = -(-columns // cpu.lanes), ir.known_shape(data)[-1]
        problem = Contraction(int(sizes[-2]), vectors, depth, Arithmetic.BYTE_MATRICES)
        return candidates.pad_rows(problem, cpu)

    def _multiply_bfloat16(self, data: Any, weights: Any) -> Any:
        columns, block = ir.known_shape(weights)[1], self._context.lanes
        packed = self.split_terms(self._pack(weights, block, "float32"), BFLOAT16.terms)
        multiply = functools.partial(blocked.dot_dense, BFLOAT16, results=columns)
        operands = self.round_data(data), self.round_weights(packed)
        return self.kernel(multiply, "bfloat16_dense_pack", *operands)

    def _choose_block(self, columns: int) -> int | None:
        """Return how many accumulators an instruction computes: a vector, or fewer for few columns.

        None if there is no instruction, or no width divides the columns.
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
            len(self.tuning_sizes.shape(data) or ()) >= 2
            and len(ir.shape_of(weights) or ()) == 2
            and all(map(self.is_float, (data, weights, call)))
            and self.flow.is_weight(weights)
            and not self.flow.is_weight(data)
        )

    def _pad_product(self, call: Any, weights: Any) -> tuple[int | None, int]:
        """Return the numbers of rows (None if dynamic) and columns, padded so that tiles divide them."""
        data = call.args[0]
        (depth, columns), shape = ir.known_shape(weights), self.tuning_sizes.shape(data)
        assert shape is not None, "the product is supported"
        cpu = self._cpu
        vectors = -(-columns // cpu.lanes)
        problem = Contraction(shape[-2], vectors, depth, multiply_add(cpu), spreads_columns=False)
        sizes = sizes_of(data)
        if sizes is None or is_dynamic(sizes[-2]):
            return None, candidates.pad_product(problem, cpu)[1] * cpu.lanes
        # rounded results must not depend on measurements
        ratio = _MAX_MEASURED_RATIO if self._context.has_full_precision() else 1.0
        paddings = candidates.rank_paddings(problem, cpu, ratio)[:_MAX_MEASURED]
        choices: list[tuple[Choice, int]] = [
            ({ROWS: rows, COLUMNS: vectors * cpu.lanes}, depth * vectors * cpu.lanes * FLOAT_BYTES)
            for rows, vectors in paddings
        ]
        text = f"matmul {'×'.join(map(str, shape))} by {depth}×{columns}"
        choice = self._context.choose(text, read_marks(call), choices)
        return choice[ROWS], choice[COLUMNS]

    def _pack(self, weights: Any, padded_columns: int, dtype: str) -> Any:
        weights = self.pad_to_multiples(weights, [1, padded_columns])
        depth, columns = ir.known_shape(weights)
        cpu = self._cpu
        block = cpu.lanes if columns % cpu.packed_columns else cpu.packed_columns
        packed = self.rearrange(weights, [depth, columns // block, block], [1, 0, 2])
        return self.cast(packed, dtype)


# ---------------------------------------------------------------- block-quantized weights
# If the target has no kernel for a reader of block-quantized weights, these become float32 when the library is built.

_BYTE: Final = 8


class BlockQuantizedRewriter(TargetRewriter):
    """Lets matmuls and gathers read block-quantized weights directly, and dequantizes them elsewhere."""

    OPERATORS = (BlockQuantizedWeights.NAME, "relax.matmul", "relax.take")

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod, context)
        self._tiled = self.new_memo()

    def _replace(self, call: Any) -> Any:
        name = ir.operator_name(call)
        if name == "relax.matmul" and (source := self._find_source(call.args[1])) is not None:
            operator = BlockQuantizedWeights.read(source.call)
            if source.is_transposed and self._has_kernel(operator) and _is_float(call.args[0]):
                return self._multiply(call, source.call, operator)
        if name == "relax.take" and (source := self._find_source(call.args[0])) is not None:
            operator = BlockQuantizedWeights.read(source.call)
            is_of_rows = call.attrs.axis is not None and int(call.attrs.axis) == 0
            if not source.is_transposed and is_of_rows and self._has_kernel(operator):
                return self._look_up(call, source.call, operator)
        return None

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        is_source = ir.operator_name(call) == BlockQuantizedWeights.NAME
        return self._convert(rewritten, BlockQuantizedWeights.read(call)) if is_source else None

    def _has_kernel(self, operator: BlockQuantizedWeights) -> bool:
        """Return whether a kernel can read a group of weights as whole 32-bit words."""
        return self._context.packs_matmuls() and operator.group % (WORD_BITS // operator.bits) == 0

    def _find_source(self, expr: Any) -> quantization.WeightSource | None:
        """Return the block-quantized weights that an expression reshapes or transposes, or None."""
        is_transposed = False
        while True:
            value: Any = self.flow.values.get(self.flow.resolve(expr))
            name = ir.operator_name(value)
            if name == BlockQuantizedWeights.NAME:
                return quantization.WeightSource(value, is_transposed)
            if name == "relax.permute_dims" and len(ir.shape_of(value) or ()) == 2:
                axes = value.attrs.axes
                swaps = axes is None or [int(axis) for axis in axes] == [1, 0]
                is_transposed = is_transposed != swaps
            elif name != "relax.astype" or not _is_float(value):
                return None
            expr = value.args[0]

    def _multiply(self, call: Any, weights: Any, operator: BlockQuantizedWeights) -> Any:
        data = self.cast(self.visit_expr(call.args[0]), "float32")
        *outer, depth = known_sizes(data)
        rows: IrSize = count_elements(outer)
        operands = BlockQuantizedOperands(*weights.args)
        columns = ir.known_shape(operands.packed)[0]
        has_zeros = not isinstance(operands.zeros, relax.Tuple)
        product = BlockQuantizedMatmul(
            rows=rows,
            depth=depth,
            columns=columns,
            bits=operator.bits,
            group=operator.group,
            zero=None if has_zeros else operator.zero,
            scales_dtype=ir.dtype_of(operands.scales),
            zeros_dtype=ir.dtype_of(operands.zeros) if has_zeros else "uint8",
        )
        machine = Machine.of(self._cpu, list_features(self._context.target))
        kernel = make_kernel(product, machine, rounds_data=operator.rounds_data)
        is_matrix = len(outer) == 1
        matrix = data if is_matrix else self.reshape(data, [rows, depth])
        arguments = [matrix, *self._tile(weights, product)]
        result = self.call_function(kernel, "grouped_matmul", arguments, [rows, columns])
        result = result if is_matrix else self.reshape(result, [*outer, columns])
        return self.cast(result, ir.dtype_of(call))

    def _tile(self, weights: Any, product: BlockQuantizedMatmul) -> list[Any]:
        """Emit words, scales and zero points as (tiles, …, columns of a tile), once for all matmuls."""
        key = tuple(weights.args)
        if key not in self._tiled:
            packed, *parameters = self._visit_operands(weights)
            rows, groups, size = ir.known_shape(packed)
            flat = self.reshape(packed, [rows, groups * size])
            shape = relax.ShapeExpr([rows, groups * product.words])
            words = self.emit(relax.op.memory.view(flat, shape, "int32"))
            tiled = []
            for tensor in (words, *parameters):
                padded = self.pad_to_multiples(tensor, [product.width])
                tiles = [product.tiles, product.width, ir.known_shape(tensor)[1]]
                tiled.append(self.rearrange(padded, tiles, [0, 2, 1]))
            self._tiled[key] = tiled
        return list(self._tiled[key])

    def _look_up(self, call: Any, weights: Any, operator: BlockQuantizedWeights) -> Any:
        """Emit the kernel that looks up rows and converts only these."""
        indices = self.visit_expr(call.args[1])
        sizes = known_sizes(indices)
        count = count_elements(sizes)
        operands = self._visit_operands(weights)
        dtypes = [ir.dtype_of(operand) for operand in (*operands, indices)]
        rows = ir.known_shape(operands[0])[0]
        kernel = make_row_kernel(operator, rows, count, dtypes)
        arguments = [self.reshape(indices, [count]), *operands]
        result = self.call_function(kernel, "grouped_take", arguments, [count, operator.depth])
        return self.cast(self.reshape(result, [*sizes, operator.depth]), ir.dtype_of(call))

    def _visit_operands(self, weights: Any) -> list[Any]:
        """Return the operands of block-quantized weights, with parameters as (rows, groups)."""
        given = [operand for operand in weights.args if not isinstance(operand, relax.Tuple)]
        packed, *parameters = map(self.visit_expr, given)
        shape = ir.known_shape(packed)[:2]
        shaped = (t if ir.shape_of(t) == shape else self.reshape(t, shape) for t in parameters)
        return [packed, *shaped]

    def _convert(self, call: Any, operator: BlockQuantizedWeights) -> Any:
        op, operands = relax.op, BlockQuantizedOperands(*call.args)
        rows, groups, _ = ir.known_shape(operands.packed)
        integers = self.cast(operands.packed, "uint32")
        if operator.bits < _BYTE:
            low = self.emit(op.bitwise_and(integers, relax.const(15, "uint32")))
            high = self.emit(op.right_shift(integers, relax.const(4, "uint32")))
            halves = [self.emit(op.expand_dims(half, -1)) for half in (low, high)]
            integers = self.emit(op.concat(halves, -1))
        real = self.reshape(self.cast(integers, "float32"), [rows, groups, operator.group])
        zeros: Any = relax.const(float(operator.zero), "float32")
        if not isinstance(operands.zeros, relax.Tuple):
            zeros = self.reshape(self.cast(operands.zeros, "float32"), [rows, groups, 1])
        scales = operands.scales
        if ir.dtype_of(scales) == bfloat16.DTYPE:
            shift = relax.const(1 << bfloat16.BITS, "uint32")
            bits = self.emit(op.multiply(self.cast(scales, "uint32"), shift))
            scales = self.emit(op.memory.view(bits, dtype="float32"))
        scales = self.reshape(self.cast(scales, "float32"), [rows, groups, 1])
        real = self.emit(op.multiply(self.emit(op.subtract(real, zeros)), scales))
        real = self.reshape(real, [rows, groups * operator.group])
        if groups * operator.group == operator.depth:
            return real
        return self.emit(op.strided_slice(real, [1], [0], [operator.depth]))


def _is_float(expr: Any) -> bool:
    return isinstance(expr.ty, relax.TensorType) and ir.dtype_of(expr) in ("float32", "float16")


# ---------------------------------------------------------------- computed matrices


class BatchedMatmulPacker(TargetRewriter):
    """Packs the right matrix of float32 matmuls of activations whose columns may not fill vectors."""

    OPERATORS = ("relax.matmul",)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        shape = sizes_of(call) or ()
        if not self._is_ragged(call):
            return None
        views = [find_view(self.flow, argument, shape[:-2]) for argument in call.args]
        known = [view for view in views if view is not None]
        if len(known) < 2:
            return None
        left, right = (view.matrices for view in known)
        if shape[-1] == 1 and left.column == right.row == 1:
            # dot products of contiguous data are vectorized as reductions
            return None
        depth = (sizes_of(call.args[0]) or ())[-1]
        typical = (*(self.tuning_sizes.shape(call) or ()), self.tuning_sizes.size(depth))
        kernel = self._make_kernel(known, shape, depth, typical)
        arguments = [self.visit_expr(view.tensor) for view in known]
        return self.call_function(kernel, "batched_matmul", arguments, shape)

    def _is_ragged(self, call: Any) -> bool:
        """Return whether the columns of a matmul of two activations may not fill whole vectors."""
        tensors = (*call.args, call)
        shapes = map(self.tuning_sizes.shape, tensors)
        if not all(shape is not None and len(shape) >= 2 and 0 not in shape for shape in shapes):
            return False
        columns = (sizes_of(call) or ())[-1]
        fills_vectors = not is_dynamic(columns) and columns % self._cpu.lanes == 0
        is_product_of_data = not any(map(self.flow.is_weight, call.args))
        return all(map(ir.is_float32, tensors)) and not fills_vectors and is_product_of_data

    def _make_kernel(
        self, views: Sequence[MatrixView], shape: Any, depth: IrSize, typical: Sequence[int]
    ) -> tirx.PrimFunc:
        """Return the kernel; its parameters are the left and the right tensor and the result.

        The left matrices are (rows, depth), the right ones (depth, columns); `typical` is the shape of the result,
        and the depth, with tuning sizes in place of dynamic ones.
        """
        cpu, (rows, width) = self._cpu, shape[-2:]
        *outer, typical_rows, typical_width, typical_depth = typical
        count = -(-typical_width // cpu.lanes)
        together, ((tile_rows, vectors),) = candidates.choose_row_block(
            typical_rows, (count,), candidates.MAX_ROWS, candidates.most_tile_rows(rows), cpu
        )
        columns = Columns(width, cpu.lanes, vectors)
        left, right = (view.matrices for view in views)
        out = contiguous(shape, range(len(shape)))

        def pack_right(group: Any, packed: Sequence[Any], slot: Any) -> None:
            def source(row: Any, column: Any) -> Any:
                return factors[right.offset_of(group * right.repeats, row, column)]

            base = slot * depth * columns.padded
            pack(source, right.column == 1, depth, columns, packed[0], base)

        def multiply(matrix: Any, block: Any, packed: Sequence[Any], slot: Any) -> None:
            first = block * together

            def source(row: Any, k: Any) -> Any:
                existing = first + row
                if is_dynamic(rows) or rows % together:
                    existing = tirx.min(existing, rows - 1)
                return data[left.offset_of(matrix, existing, k)]

            result = allocate(together * columns.padded)
            product = Product(
                rows=count_rows(rows, first, together, tile_rows),
                depth=depth,
                columns=columns,
                tile_rows=tile_rows,
                factors=max(1, cpu.multiplicand_lanes),
            )
            product.emit(source, packed[0], slot * depth * columns.padded, result)
            with T.serial(together) as row, when(first + row < rows):
                for column in iterate_vectors(width, cpu.lanes):
                    value = result[row * columns.padded + column]
                    products[out.offset_of(matrix, first + row, column)] = value

        batches = Batches(
            matrices=count_elements(shape[:-2]),
            shared=right.repeats,
            blocks=divide_up(rows, together),
            typical=math.prod(outer),
        )
        work = batches.typical * typical_rows * typical_width * typical_depth
        cores = cpu.cores if work >= MIN_PARALLEL_PRODUCTS else 1
        shapes = [known_sizes(view.tensor) for view in views]
        parameters = {
            "left": (shapes[0], FLOAT),
            "right": (shapes[1], FLOAT),
            "out": (shape, FLOAT),
        }
        with define_flat_kernel("batched_matmul", parameters, has_root=False) as (builder, buffers):
            data, factors, products = buffers
            emit_batches(batches, (depth * columns.padded,), cores, pack_right, multiply)
        return builder.get()
