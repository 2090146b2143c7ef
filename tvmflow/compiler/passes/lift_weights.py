"""Moves the computation of weights out of `main`, so that it is done once when the library is built."""

from __future__ import annotations

import logging
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

_log = logging.getLogger(__name__)

WEIGHTS_FUNCTION: Final = "main_transform_params"
"""The function that computes the weights, as TVM's pass names it."""


def hoist_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """Move what depends on weights alone out of branches, so that it can be lifted."""
    return rewrite_main(mod, _WeightHoister) if ir.has_branches(mod) else mod


class _WeightHoister(MainRewriter):
    """Emits the weights of both branches before an If."""

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
    """Move what depends on weights alone to a function of its own, such as a batch norm's `√(σ² + ε)`.

    The module stays as it is if the model has no weights, or returns some of them as they are:
    TVM's pass would lose those.
    """
    main = mod["main"]
    is_weight = ir.DataFlow(main).is_weight
    if not ir.list_weights(main) or any(map(is_weight, ir.list_outputs(main))):
        _log.debug("weights are used as they are")
        return mod
    return relax.transform.LiftTransformParams()(mod)


def split_weights(mod: tvm.IRModule) -> tvm.IRModule | None:
    """Return the module whose `main` computes the weights; None if they are used as they are."""
    return _extract_function(mod, WEIGHTS_FUNCTION) if _has_weight_function(mod) else None


def split_inference(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove the function that computes weights."""
    return _extract_function(mod, "main") if _has_weight_function(mod) else mod


def _has_weight_function(mod: tvm.IRModule) -> bool:
    return any(var.name_hint == WEIGHTS_FUNCTION for var in mod.get_global_vars())


def _extract_function(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """Return a module whose `main` is the function `name`, with the kernels that it calls and no others."""
    functions = dict(mod.functions_items())
    function = next(value for var, value in functions.items() if var.name_hint == name)
    kernels = {
        var: value for var, value in functions.items() if isinstance(value, tvm.tirx.PrimFunc)
    }
    main = tvm.ir.GlobalVar("main")
    extracted = tvm.IRModule({**kernels, main: function.with_attr("global_symbol", "main")})
    return relax.transform.DeadCodeElimination(["main"])(extracted)
