"""The schedule rules for GPUs, in the order in which they are tried."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Final

import tvm
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.gpu_tiles import Device
from tvmflow.compiler.schedules.blocks import attempt, list_all_blocks
from tvmflow.compiler.schedules.gpu import maps, products, reductions, tensor_cores
from tvmflow.compiler.schedules.gpu.accesses import has_fixed_sizes
from tvmflow.compiler.schedules.intrinsics import load_intrinsics
from tvmflow.compiler.schedules.rules import (
    ScheduleChoice,
    ScheduledModule,
    list_unscheduled,
    schedule_each,
)

_log = logging.getLogger(__name__)

GpuRule = Callable[[Schedule, Device], Schedule | None]
"""A function that schedules a kernel (`main` of a module); None for kernels that it does not fit."""

GPU_RULES: Final[Mapping[str, GpuRule]] = {
    "tensor_cores": tensor_cores.apply,
    "tiled_products": products.apply,
    "windows": reductions.apply_windows,
    "block_reductions": reductions.apply,
    "transposes": maps.transpose,
    "elementwise": maps.elementwise,
}

# The rules of DLight, for other kernels: the first that fits a kernel schedules it.
_DLIGHT_RULES: Final = {
    "matmul": "Matmul",
    "gemv": "GEMV",
    "reduction": "Reduction",
    "general_reduction": "GeneralReduction",
    "fallback": "Fallback",
}


def schedule_for_gpu(
    lowered: tvm.IRModule,
    target: tvm.target.Target,
    rules: Mapping[str, GpuRule] = GPU_RULES,
) -> ScheduledModule:
    """Apply a schedule rule to each kernel, since a GPU cannot run kernels without thread bindings."""
    device = Device.from_target(target)

    def choose(kernel: tvm.IRModule) -> ScheduleChoice | None:
        for name, rule in rules.items():
            schedule = Schedule(kernel, seed=1)
            handles = list_all_blocks(schedule)
            if not handles or not has_fixed_sizes(schedule, handles):
                return None
            applied = attempt(functools.partial(rule, schedule, device), None)
            if applied is not None:
                return ScheduleChoice(name, None, applied)
        return None

    scheduled = _schedule_by_dlight(*schedule_each(lowered, choose), target)
    _log.debug("rules of kernels: %s", scheduled.rules)
    return scheduled


def _schedule_by_dlight(
    mod: tvm.IRModule, rules: dict[str, str], target: tvm.target.Target
) -> ScheduledModule:
    if list_unscheduled(mod):
        # The import of DLight takes a second.
        from tvm.s_tir import dlight

        # The rule for matmuls looks up tensor intrinsics even if it does not use them.
        load_intrinsics(target.export())
        for name, rule in _DLIGHT_RULES.items():
            before = _list_names(mod)
            with target:
                mod = dlight.ApplyDefaultSchedule(getattr(dlight.gpu, rule)())(mod)
            rules.update(dict.fromkeys(before - _list_names(mod), name))
    return ScheduledModule(mod, rules)


def _list_names(mod: tvm.IRModule) -> set[str]:
    return {str(var.name_hint) for var, _ in list_unscheduled(mod)}
