"""Gives scatters of rows kernels that combine them in vectors, and on several cores."""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators import scatter
from tvmflow.compiler.operators.scatter import Scatter
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main

_INDICES: Final = ("int32", "int64")


def vectorize_scatters(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace `scatter_nd`, for which TVM has no schedule on CPUs."""
    return mod if context.cpu is None else rewrite_main(mod, _ScatterRewriter, context.cpu)


class _ScatterRewriter(MainRewriter):
    """Rewrites scatters of static shapes."""

    def __init__(self, mod: tvm.IRModule, cpu: CpuModel) -> None:
        super().__init__(mod)
        self._cpu = cpu

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.operator_name(call) != "relax.scatter_nd" or all(map(self.flow.is_weight, call.args)):
            return rewritten
        data, indices, updates = call.args
        shape, index_shape = ir.shape_of(data), ir.shape_of(indices)
        if not shape or not index_shape or 0 in (*shape, *index_shape):
            return rewritten
        described = Scatter(
            shape, ir.dtype_of(data), index_shape, ir.dtype_of(indices), str(call.attrs.reduction)
        )
        is_supported = (
            described.index_dtype in _INDICES
            and described.reduction in scatter.FUNCTIONS
            and ir.dtype_of(updates) == described.dtype
            and ir.shape_of(updates) == described.update_shape
        )
        if not is_supported:
            return rewritten
        kernel = scatter.make_kernel(described, self._cpu)
        return self.call_function(kernel, "scatter", rewritten.args, shape, described.dtype)
