"""Lowers weights of 4 or 8 bits in groups: products and lookups read them as they are.

Where the target has no kernel for what reads them, they become float32 when the library is built.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import list_features
from tvmflow.compiler.ir_operators import GroupedOperands, GroupedWeights
from tvmflow.compiler.open_sizes import IrSize, count_elements, known_sizes
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels.bfloat16 import BITS as BFLOAT16_BITS
from tvmflow.compiler.tir_kernels.bfloat16 import DTYPE as BFLOAT16
from tvmflow.compiler.tir_kernels.grouped_products import (
    WORD_BITS,
    GroupedProduct,
    Machine,
    make_kernel,
    make_row_kernel,
)

_BYTE: Final = 8


def lower_grouped_weights(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Lower the grouped weights of a model for the target."""
    if not ir.calls_operator(mod, GroupedWeights.NAME):
        return mod
    return rewrite_main(mod, _GroupedWeightRewriter, context)


class _Source(NamedTuple):
    """The call that weights come from, and whether they are transposed after it."""

    call: Any
    is_transposed: bool


class _GroupedWeightRewriter(TargetRewriter):
    """Rewrites what reads grouped weights, and converts them for everything else."""

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod, context)
        self._tiled = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        name = ir.operator_name(call)
        if name == "relax.matmul" and (source := self._find_source(call.args[1])) is not None:
            operator = GroupedWeights.read(source.call)
            if source.is_transposed and self._has_kernel(operator) and _is_float(call.args[0]):
                return self._multiply(call, source.call, operator)
        if name == "relax.take" and (source := self._find_source(call.args[0])) is not None:
            operator = GroupedWeights.read(source.call)
            is_of_rows = call.attrs.axis is not None and int(call.attrs.axis) == 0
            if not source.is_transposed and is_of_rows and self._has_kernel(operator):
                return self._look_up(call, source.call, operator)
        rewritten = super().visit_call_(call)
        if name == GroupedWeights.NAME:
            return self._convert(rewritten, GroupedWeights.read(call))
        return rewritten

    def _has_kernel(self, operator: GroupedWeights) -> bool:
        """Return whether a kernel can read weights in words."""
        is_plain = self._context.is_plain("matmul") or not self._context.has_packed_weights()
        return not is_plain and operator.group % (WORD_BITS // operator.bits) == 0

    def _find_source(self, expr: Any) -> _Source | None:
        """Return the grouped weights of which an expression is another form; None for others."""
        is_transposed = False
        while True:
            value: Any = self.flow.values.get(ir.resolve_alias(expr, self.flow.values.get))
            name = ir.operator_name(value)
            if name == GroupedWeights.NAME:
                return _Source(value, is_transposed)
            if name == "relax.permute_dims" and len(ir.shape_of(value) or ()) == 2:
                axes = value.attrs.axes
                swaps = axes is None or [int(axis) for axis in axes] == [1, 0]
                is_transposed = is_transposed != swaps
            elif name != "relax.astype" or not _is_float(value):
                return None
            expr = value.args[0]

    # ------------------------------------------------------------ products

    def _multiply(self, call: Any, weights: Any, operator: GroupedWeights) -> Any:
        """Emit the kernel of a matrix product."""
        cpu = self._context.cpu
        assert cpu is not None, "weights are packed for a CPU model"
        data = self.cast(self.visit_expr(call.args[0]), "float32")
        *outer, depth = known_sizes(data)
        rows: IrSize = count_elements(outer)
        operands = GroupedOperands(*weights.args)
        columns = ir.known_shape(operands.packed)[0]
        has_zeros = not isinstance(operands.zeros, relax.Tuple)
        product = GroupedProduct(
            rows=rows,
            depth=depth,
            columns=columns,
            bits=operator.bits,
            group=operator.group,
            zero=None if has_zeros else operator.zero,
            scales_dtype=ir.dtype_of(operands.scales),
            zeros_dtype=ir.dtype_of(operands.zeros) if has_zeros else "uint8",
        )
        machine = Machine.of(cpu, list_features(self._context.target))
        kernel = make_kernel(product, machine, rounds_data=operator.rounds_data)
        is_matrix = len(outer) == 1
        matrix = data if is_matrix else self.reshape(data, [rows, depth])
        arguments = [matrix, *self._tile(weights, product)]
        result = self.call_function(kernel, "grouped_matmul", arguments, [rows, columns])
        result = result if is_matrix else self.reshape(result, [*outer, columns])
        return self.cast(result, ir.dtype_of(call))

    def _tile(self, weights: Any, product: GroupedProduct) -> list[Any]:
        """Emit words, scales and zero points in tiles of columns, once for all products."""
        # calls with the same operands share them
        key = tuple(weights.args)
        if key not in self._tiled:
            packed, *parameters = self._visit_operands(weights)
            rows, groups, size = ir.known_shape(packed)
            flat = self.reshape(packed, [rows, groups * size])
            shape = relax.ShapeExpr([rows, groups * product.words])
            words = self.emit(relax.op.memory.view(flat, shape, "int32"))
            self._tiled[key] = [
                self._tile_columns(tensor, product) for tensor in (words, *parameters)
            ]
        return list(self._tiled[key])

    def _tile_columns(self, tensor: Any, product: GroupedProduct) -> Any:
        """Emit a tensor (columns, numbers) as (tiles, numbers, columns of a tile)."""
        padded = self.pad_to_multiples(tensor, [product.width])
        numbers = ir.known_shape(tensor)[1]
        return self.rearrange(padded, [product.tiles, product.width, numbers], [0, 2, 1])

    # ------------------------------------------------------------ lookups and other readers

    def _look_up(self, call: Any, weights: Any, operator: GroupedWeights) -> Any:
        """Emit the kernel that converts the rows that are looked up."""
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
        """Return the operands of grouped weights, parameters of groups as (rows, groups)."""
        packed, *parameters = (
            self.visit_expr(operand)
            for operand in weights.args
            if not isinstance(operand, relax.Tuple)
        )
        shape = ir.known_shape(packed)[:2]
        return [
            packed,
            *(t if ir.shape_of(t) == shape else self.reshape(t, shape) for t in parameters),
        ]

    def _convert(self, call: Any, operator: GroupedWeights) -> Any:
        """Emit weights as float32."""
        op, operands = relax.op, GroupedOperands(*call.args)
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
        if ir.dtype_of(scales) == BFLOAT16:
            shift = relax.const(1 << BFLOAT16_BITS, "uint32")
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
