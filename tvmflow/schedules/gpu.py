"""Schedules for GPU kernels that nothing was searched for: TVM's DLight rules."""

from __future__ import annotations

from typing import Final

import tvm
from tvm.s_tir import dlight

from tvmflow.schedules import NO_ROAD, copied
from tvmflow.schedules.intrinsics import load_intrinsics

# Of the rules that fit a kernel the first is taken.
_RULES: Final = {
    "matmul": dlight.gpu.Matmul,
    "gemv": dlight.gpu.GEMV,
    "reduction": dlight.gpu.Reduction,
    "general_reduction": dlight.gpu.GeneralReduction,
    "fallback": dlight.gpu.Fallback,
}


def schedule_gpu(
    lowered: tvm.IRModule, target: tvm.target.Target
) -> tuple[tvm.IRModule, dict[str, str]]:
    """A lowered module with a schedule for each kernel, and the rule that gave it: without threads no kernel runs on a GPU."""
    # the rule for matrix products looks for them, also where it does not use them
    load_intrinsics(target.export())
    roads: dict[str, str] = {}
    module = copied(lowered)
    for name, rule in _RULES.items():
        waiting = [var.name_hint for var in _unscheduled(module)]
        with target:
            module = dlight.ApplyDefaultSchedule(rule())(module)
        left = {var.name_hint for var in _unscheduled(module)}
        roads.update({str(each): name for each in waiting if each not in left})
    roads.update({str(var.name_hint): NO_ROAD for var in _unscheduled(module)})
    return module, roads


def _unscheduled(module: tvm.IRModule) -> list[tvm.ir.GlobalVar]:
    return [
        var
        for var, function in module.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
        and not function.attrs.get("tirx.is_scheduled", False)
    ]
