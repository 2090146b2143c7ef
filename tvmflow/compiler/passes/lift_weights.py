"""Weight-only computations as a separate function, and constant folding of kernels."""

from __future__ import annotations

import logging
from typing import Any

import tvm
from tvm import relax

from tvmflow.graph import ir
from tvmflow.graph.c_calls import list_c_kernels
from tvmflow.graph.rewriter import MainRewriter, rewrite_main

_log = logging.getLogger(__name__)


def hoist_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """Hoist computations that depend only on weights out of branches, so that they can be lifted."""
    return rewrite_main(mod, _WeightHoister) if ir.has_branches(mod) else mod


class _WeightHoister(MainRewriter):
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._hoisted: set[Any] = set()

    def visit_if_(self, op: relax.If) -> Any:
        for branch in ir.branches_of(op):
            for binding in ir.list_bindings(branch):
                if binding.var not in self._hoisted and self.flow.is_weight(binding.var):
                    self._hoisted.add(binding.var)
                    self.set_var_remap(binding.var, self.emit(self.visit_expr(binding.value)))
        return super().visit_if_(op)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._hoisted:
            super().visit_var_binding_(binding)


def lift_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """Move weight-only computations, such as a batch norm's `√(σ² + ε)`, to a separate function.

    The module is unchanged if the model has no weights, or returns some directly, which TVM's pass would lose.
    """
    main = mod["main"]
    is_weight = ir.DataFlow(main).is_weight
    if not ir.list_weights(main) or any(map(is_weight, ir.list_outputs(main))):
        _log.debug("weights are used unchanged")
        return mod
    return relax.transform.LiftTransformParams()(mod)


def split_weights(mod: tvm.IRModule) -> tvm.IRModule | None:
    """Return the module whose `main` computes the weights; None if they are used unchanged."""
    return _extract_function(mod, ir.WEIGHTS_FUNCTION) if _has_weight_function(mod) else None


def split_inference(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove the function that computes weights."""
    return _extract_function(mod, "main") if _has_weight_function(mod) else mod


def _has_weight_function(mod: tvm.IRModule) -> bool:
    return any(var.name_hint == ir.WEIGHTS_FUNCTION for var in mod.get_global_vars())


def _extract_function(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """Return a module whose `main` is the function `name`, with the kernels that it calls and no others."""
    main, function = tvm.ir.GlobalVar("main"), mod[name].with_attr("global_symbol", "main")
    extracted = tvm.IRModule({**ir.kernels_of(mod), main: function})
    return relax.transform.DeadCodeElimination(["main"])(extracted)


def fold_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace calls of kernels on constants by their results, except kernels in C, which TVM cannot run."""
    kernels = [var for var, _ in list_c_kernels(mod)]
    hidden = ir.copy_module(mod)
    for var in kernels:
        # FoldConstant evaluates only functions of TIR
        hidden.update_func(var, relax.ExternFunc(var.name_hint))
    folded = relax.transform.FoldConstant()(hidden)
    for var in kernels:
        folded.update_func(var, mod[var])
    return folded
