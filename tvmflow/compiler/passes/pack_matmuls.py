"""Packs the weights of matrix products into columns of vectors, when the library is built."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.operators import blocked
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.passes.quantization import integer_weight_dtype


def pack_matmuls(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Pack the weights (k, n) of matrix products as (⌈n/b⌉, k, b)."""
    if context.is_plain("matmul"):
        return mod
    return rewrite_main(mod, _MatmulPacker, context)


class _MatmulPacker(MainRewriter):
    """Rewrites matrix products of float32 data and weights."""

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod)
        self._context = context

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.as_call(call, "relax.matmul") is None or not self._is_supported(call):
            return rewritten
        data, weights = rewritten.args
        dtype = integer_weight_dtype(self.flow, call.args[1]) or self._context.weight_dtype
        columns = ir.known_shape(weights)[1]
        return self.kernel(blocked.dense, "dense_pack", data, self._pack(weights, dtype), columns)

    def _is_supported(self, call: Any) -> bool:
        data, weights = call.args
        return (
            len(ir.shape_of(data) or ()) >= 2
            and len(ir.shape_of(weights) or ()) == 2
            and all(ir.is_float32(expr) for expr in (data, weights, call))
            and self.flow.is_weight(weights)
            and not self.flow.is_weight(data)
        )

    def _pack(self, weights: Any, dtype: str) -> Any:
        block = self._context.lanes
        weights = self.pad_to_multiples(weights, [1, block])
        depth, columns = ir.known_shape(weights)
        packed = self.rearrange(weights, [depth, columns // block, block], [1, 0, 2])
        return self.cast(packed, dtype)
