"""Moves the computation of weights out of `main`, so that it is done once when the library is built."""

from __future__ import annotations

import logging
from typing import Final

import tvm
from tvm import relax

from tvmflow.compiler import ir

_log = logging.getLogger(__name__)

_WEIGHTS: Final = "main_transform_params"


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
    return _extract_function(mod, _WEIGHTS) if _has_weight_function(mod) else None


def split_inference(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove the function that computes weights."""
    return _extract_function(mod, "main") if _has_weight_function(mod) else mod


def _has_weight_function(mod: tvm.IRModule) -> bool:
    return any(var.name_hint == _WEIGHTS for var in mod.get_global_vars())


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
