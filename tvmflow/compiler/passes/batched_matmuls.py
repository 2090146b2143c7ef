"""Gives products of two computed matrices kernels of whole vectors, where columns fill none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.candidates import MAX_ROWS, choose_row_block, most_tile_rows
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_PRODUCTS, CpuModel
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
from tvmflow.compiler.open_sizes import IrSize, count_elements, divide_up, is_open, sizes_of
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.passes.strided_views import find_view
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.compiler.tir_kernels.strides import Operand, contiguous


def pack_batched_matmuls(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace products of ragged matrices by kernels that pack the right one into vectors."""
    if context.cpu is None or context.is_plain("matmul"):
        return mod
    return rewrite_main(mod, _BatchedMatmulPacker, context)


class _BatchedMatmulPacker(TargetRewriter):
    """Rewrites matrix products of float32 without constant weights on the right."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.operator_name(call) != "relax.matmul" or not self._is_ragged(call):
            return rewritten
        shape = sizes_of(call) or ()
        views = [find_view(self.flow, argument, shape[:-2]) for argument in call.args]
        operands = [
            Operand(sizes_of(view.tensor) or (), "float32", view.matrices)
            for view in views
            if view is not None
        ]
        if len(operands) < 2:
            return rewritten
        left, right = operands
        if shape[-1] == 1 and left.matrices.column == right.matrices.row == 1:
            # sums of products along contiguous data, which have vectors of their own
            return rewritten
        depth = (sizes_of(call.args[0]) or ())[-1]
        product = BatchedProduct(
            batch=count_elements(shape[:-2]),
            depth=depth,
            left=left,
            right=right,
            shape=shape,
            typical=(*(self.numbers.shape(call) or ()), self.numbers.size(depth)),
        )
        arguments = [self.visit_expr(view.tensor) for view in views if view is not None]
        kernel = make_kernel(product, self._cpu)
        return self.call_function(kernel, "batched_matmul", arguments, shape)

    def _is_ragged(self, call: Any) -> bool:
        """Return whether a product has columns that may be no multiple of a vector, and is none with weights."""
        shapes = [self.numbers.shape(expr) for expr in (*call.args, call)]
        if not all(shape is not None and len(shape) >= 2 and 0 not in shape for shape in shapes):
            return False
        columns = (sizes_of(call) or ())[-1]
        return (
            all(ir.is_float32(expr) for expr in (*call.args, call))
            and (is_open(columns) or columns % self._cpu.lanes != 0)
            and not any(map(self.flow.is_weight, call.args))
        )


# ---------------------------------------------------------------- batched matmul
# Products of batches of matrices that the model computes, of any size, with packed right matrices.


class BatchedProduct(NamedTuple):
    """The computation of a kernel: matrices (rows, depth) times matrices (depth, columns).

    Attributes:
        batch: The number of products.
        depth: The length of a sum.
        left: The left matrices.
        right: The right matrices.
        shape: The shape of the result.
        typical: The same with numbers in place of open sizes, and then the depth.
    """

    batch: IrSize
    depth: IrSize
    left: Operand
    right: Operand
    shape: tuple[IrSize, ...]
    typical: tuple[int, ...]


def make_kernel(product: BatchedProduct, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the left and the right tensor and the result."""
    parameters = {
        "left": (product.left.shape, FLOAT),
        "right": (product.right.shape, FLOAT),
        "out": (product.shape, FLOAT),
    }
    with define_flat_kernel("batched_matmul", parameters, has_root=False) as (builder, buffers):
        _emit(product, buffers, cpu)
    return builder.get()


def _emit(product: BatchedProduct, buffers: Sequence[Any], cpu: CpuModel) -> None:
    rows, width = product.shape[-2:]
    *outer, typical_rows, typical_width, typical_depth = product.typical
    count = -(-typical_width // cpu.lanes)
    together, ((points, vectors),) = choose_row_block(
        typical_rows, (count,), MAX_ROWS, most_tile_rows(rows), cpu
    )
    columns = Columns(width, cpu.lanes, vectors)
    left, right = product.left.matrices, product.right.matrices
    out = contiguous(product.shape, range(len(product.shape)))

    def pack_right(group: Any, packed: Sequence[Any], slot: Any) -> None:
        def source(row: Any, column: Any) -> Any:
            place = right.place(group * right.repeats, row, column)
            return tirx.BufferLoad(buffers[1], [place])

        base = slot * product.depth * columns.padded
        pack(source, right.column == 1, product.depth, columns, packed[0], base)

    def multiply(matrix: Any, block: Any, packed: Sequence[Any], slot: Any) -> None:
        def source(row: Any, k: Any) -> Any:
            existing = block * together + row
            if is_open(rows) or rows % together:
                existing = tirx.min(existing, rows - 1)
            return tirx.BufferLoad(buffers[0], [left.place(matrix, existing, k)])

        result = allocate(together * columns.padded)
        base = slot * product.depth * columns.padded
        computed = count_rows(rows, block * together, together, points)
        factors = max(1, cpu.factor_lanes)
        Product(
            rows=computed, depth=product.depth, columns=columns, points=points, factors=factors
        ).emit(source, packed[0], base, result)
        with T.serial(together) as row, T.If(block * together + row < rows), T.Then():
            for column in iterate_vectors(width, cpu.lanes):
                place = out.place(matrix, block * together + row, column)
                T.buffer_store(buffers[2], result[row * columns.padded + column], [place])

    batches = Batches(
        matrices=product.batch,
        shared=right.repeats,
        blocks=divide_up(rows, together),
        typical=math.prod(outer),
    )
    work = batches.typical * typical_rows * typical_width * typical_depth
    emit_batches(
        batches,
        (product.depth * columns.padded,),
        cpu.cores if work >= MIN_PARALLEL_PRODUCTS else 1,
        pack_right,
        multiply,
    )
