"""Gives cumulative sums and products kernels that compute other axes than theirs in vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
from tvm import relax, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators import scan
from tvmflow.compiler.operators.scan import Scan
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main

_FUNCTIONS: Final[Mapping[str, tuple[Callable[[Any, Any], Any], int]]] = {
    "relax.cumsum": (tirx.Add, 0),
    "relax.cumprod": (tirx.Mul, 1),
}
"""The operator -> the operation on two elements, and its neutral element."""


def vectorize_scans(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace cumulative sums and products, for which TVM has no schedule on CPUs."""
    return mod if context.cpu is None else rewrite_main(mod, _ScanRewriter, context.cpu)


class _ScanRewriter(MainRewriter):
    """Rewrites cumulative operations of static shapes."""

    def __init__(self, mod: tvm.IRModule, cpu: CpuModel) -> None:
        super().__init__(mod)
        self._cpu = cpu

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten, shape = super().visit_call_(call), ir.shape_of(call)
        functions = _FUNCTIONS.get(ir.operator_name(call))
        if functions is None or not shape or 0 in shape or not self._is_supported(call):
            return rewritten
        axis, dtype = int(call.attrs.axis) % len(shape), ir.dtype_of(call)
        kernel = scan.make_kernel(
            Scan(shape, dtype, axis, *functions, bool(call.attrs.exclusive)), self._cpu
        )
        return self.call_function(kernel, "scan", [rewritten.args[0]], shape, dtype)

    def _is_supported(self, call: Any) -> bool:
        data = call.args[0]
        return (
            call.attrs.axis is not None
            and ir.dtype_of(data) == ir.dtype_of(call)
            and not self.flow.is_weight(data)
        )
