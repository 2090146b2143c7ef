"""Keeps operators on large tensors out of the kernels of small ones that they read."""

from __future__ import annotations

import math
from typing import Any, Final

import tvm

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import Representative
from tvmflow.compiler.passes.rewriter import TAKES_EPILOGUE

_PATTERN: Final = "op_pattern"
# TVM's kElemWise, kBroadcast and kInjective.
_FUSED_PATTERNS: Final = (0, 1, 2)


def limit_fusion(mod: tvm.IRModule) -> tvm.IRModule:
    """Begin a kernel with each operator that broadcasts the result of a convolution or a matrix product.

    Squeeze-and-excitation multiplies an image with a convolution of one pixel: as an epilogue,
    the image would take the schedule from the convolution. Runs after AnnotateTIROpPattern.
    """
    limited = ir.copy_module(mod)
    products: set[Any] = set()
    numbers = Representative(mod["main"])
    for var, value in ir.DataFlow(mod["main"]).values.items():
        call = ir.as_call(value, "relax.call_tir")
        shape = numbers.shape(var)
        if call is None or shape is None:
            continue
        kernel = mod[call.args[0]]
        pattern = int(kernel.attrs.get(_PATTERN, -1))
        sources = [source for source in ir.list_variables(call.args[1]) if source in products]
        if pattern == TAKES_EPILOGUE[_PATTERN] or (pattern in _FUSED_PATTERNS and sources):
            products.add(var)
        sizes = [math.prod(numbers.shape(source) or ()) for source in sources]
        if pattern in _FUSED_PATTERNS and any(size < math.prod(shape) for size in sizes):
            limited[call.args[0]] = kernel.with_attrs(TAKES_EPILOGUE)
    return limited
