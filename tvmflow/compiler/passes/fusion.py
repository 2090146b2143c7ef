"""Preparation of fusion: where a kernel begins, and functions for the branches of an If."""

from __future__ import annotations

import math
from typing import Any, Final

import tvm
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars
from tvm.s_tir import SBlock

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import TuningSizes, plain
from tvmflow.graph.rewriter import TAKES_EPILOGUE, MainRewriter, rewrite_main

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
    numbers = TuningSizes(mod["main"])
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


def give_empty_buffers_room(mod: tvm.IRModule) -> tvm.IRModule:
    """Enlarge empty tensors inside kernels to one element, which nothing reads.

    LLVM allocates no 0 bytes.
    """

    def rewrite(function: tirx.PrimFunc) -> tirx.PrimFunc:
        larger = {
            buffer: tirx.decl_buffer(
                [1 if size == 0 else size for size in map(plain, buffer.shape)],
                buffer.dtype,
                buffer.name,
                scope=buffer.scope(),
            )
            for block in ir.find_nodes(function.body, SBlock)
            for buffer in block.alloc_buffers
            if any(isinstance(size, int) and size == 0 for size in map(plain, buffer.shape))
        }
        if not larger:
            return function
        return function.with_body(ir.replace_variables(function.body, larger))

    return ir.rewrite_kernels(mod, rewrite)


def outline_branches(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace each branch of an If by a call of a private function, innermost branches first.

    TVM fuses the operators of functions and not those of branches, and would give memory that one
    branch has allocated to the other one, which then writes to an address that it never got.
    """
    return rewrite_main(mod, _Outliner) if ir.has_branches(mod) else mod


class _Outliner(MainRewriter):
    def visit_if_(self, op: relax.If) -> Any:
        rewritten = super().visit_if_(op)
        return relax.If(rewritten.cond, *map(self._outline, ir.branches_of(rewritten)))

    def _outline(self, branch: relax.SeqExpr) -> relax.SeqExpr:
        captured = [
            var for var in relax.analysis.free_vars(branch) if not isinstance(var, tvm.ir.GlobalVar)
        ]
        function = relax.Function(captured, branch, branch.ty)
        callee = self.builder_.add_func(copy_with_new_vars(function), "branch")
        result = relax.Var("result", branch.ty)
        block = relax.BindingBlock([relax.VarBinding(result, relax.Call(callee, captured))])
        return relax.SeqExpr([block], result)
