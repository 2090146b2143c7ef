"""Schedules of untuned kernels on GPUs: those of TVM's DLight rules."""

from __future__ import annotations

import logging
from typing import Final

import tvm
from tvm.s_tir import dlight

from tvmflow.compiler import ir
from tvmflow.compiler.schedules.intrinsics import load_intrinsics
from tvmflow.compiler.schedules.rules import NO_RULE, ScheduledModule, list_unscheduled

_log = logging.getLogger(__name__)

# The first rule that fits a kernel schedules it.
_RULES: Final = {
    "matmul": dlight.gpu.Matmul,
    "gemv": dlight.gpu.GEMV,
    "reduction": dlight.gpu.Reduction,
    "general_reduction": dlight.gpu.GeneralReduction,
    "fallback": dlight.gpu.Fallback,
}


def schedule_for_gpu(lowered: tvm.IRModule, target: tvm.target.Target) -> ScheduledModule:
    """Give each kernel without a schedule the one of a DLight rule.

    Without threads it cannot run on a GPU.
    """
    # The rule for matrix products looks tensor intrinsics up even where it does not use them.
    load_intrinsics(target.export())
    rules: dict[str, str] = {}
    mod = ir.copy_module(lowered)
    for name, rule in _RULES.items():
        before = _list_names(mod)
        with target:
            mod = dlight.ApplyDefaultSchedule(rule())(mod)
        after = set(_list_names(mod))
        rules.update({kernel: name for kernel in before if kernel not in after})
    rules.update(dict.fromkeys(_list_names(mod), NO_RULE))
    _log.debug("DLight rules of kernels: %s", rules)
    return ScheduledModule(mod, rules)


def _list_names(mod: tvm.IRModule) -> list[str]:
    return [str(var.name_hint) for var, _ in list_unscheduled(mod)]
