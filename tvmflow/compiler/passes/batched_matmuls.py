"""Gives products of matrices that the model computes kernels of whole vectors, where their columns fill none."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators import batched_matmul
from tvmflow.compiler.operators.batched_matmul import BatchedProduct
from tvmflow.compiler.operators.batches import Operand
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.passes.strided_views import find_view


def pack_batched_matmuls(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace products of ragged matrices by kernels that pack the right one into vectors."""
    if context.cpu is None or context.is_plain("matmul"):
        return mod
    return rewrite_main(mod, _BatchedMatmulPacker, context.cpu)


class _BatchedMatmulPacker(MainRewriter):
    """Rewrites matrix products of float32 without constant weights on the right."""

    def __init__(self, mod: tvm.IRModule, cpu: CpuModel) -> None:
        super().__init__(mod)
        self._cpu = cpu

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.operator_name(call) != "relax.matmul" or not self._is_ragged(call):
            return rewritten
        shape = ir.known_shape(call)
        views = [find_view(self.flow, argument, shape[:-2]) for argument in call.args]
        operands = [
            Operand(ir.known_shape(view.tensor), "float32", view.matrices)
            for view in views
            if view is not None
        ]
        if len(operands) < 2:
            return rewritten
        left, right = operands
        depth = ir.known_shape(call.args[0])[-1]
        product = BatchedProduct(math.prod(shape[:-2]), depth, left, right, shape)
        arguments = [self.visit_expr(view.tensor) for view in views if view is not None]
        kernel = batched_matmul.make_kernel(product, self._cpu)
        return self.call_function(kernel, "batched_matmul", arguments, shape)

    def _is_ragged(self, call: Any) -> bool:
        """Return whether a product has columns that are no multiple of a vector, and is none with weights."""
        shapes = [ir.shape_of(expr) for expr in (*call.args, call)]
        return (
            all(shape is not None and len(shape) >= 2 and 0 not in shape for shape in shapes)
            and all(ir.is_float32(expr) for expr in (*call.args, call))
            and ir.known_shape(call)[-1] % self._cpu.lanes != 0
            and not any(map(self.flow.is_weight, call.args))
        )
