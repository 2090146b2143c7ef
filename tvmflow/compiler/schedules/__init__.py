"""Schedules of untuned kernels, chosen only from shape and target, without measurements.

A rule for CPUs is a module of this folder and a line in `rules.CPU_RULES`, one for GPUs a module of `gpu/` and a line in
`gpu.GPU_RULES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, Final

import tvm
import tvm_ffi
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.machine import cpu_model_for
from tvmflow.compiler.schedules.gpu import schedule_for_gpu as schedule_for_gpu
from tvmflow.compiler.schedules.rules import (
    ScheduleChoice,
    ScheduledModule,
    generate_for_cpu,
    schedule_for_cpu,
)
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for, has_host_kernels
from tvmflow.targets.tvm_target import cpu_target

_HAS_FEATURE: Final = "target.target_has_feature"
# The feature for which TVM's vectorizer emits scalable (masked) vectors.
_SCALABLE_VECTORS: Final = "v"


def _use_fixed_length_vectors() -> None:
    """Keep the vector lengths of schedules on RISC-V; to be called before anything is compiled.

    With scalable vectors, each multiplication loads and stores its accumulator (apache-tvm 0.27), and TVM fails on
    buffers that are also filled lane by lane. LLVM lowers fixed vectors to RVV instructions.
    """
    query = tvm_ffi.get_global_func(_HAS_FEATURE)

    def has_feature(feature: str, target: Any = None) -> bool:
        return feature != _SCALABLE_VECTORS and bool(query(feature, target))

    tvm_ffi.register_global_func(_HAS_FEATURE, has_feature, override=True)


_use_fixed_length_vectors()
# TVM's type checks of arguments take a third of the time of scheduling
for _name, _method in list(vars(Schedule).items()):
    if isinstance(_method, FunctionType) and hasattr(_method, "__wrapped__"):
        setattr(Schedule, _name, _method.__wrapped__)


def generate_schedules(
    mod: tvm.IRModule, target: Mapping[str, Json], rules_version: int
) -> Iterator[ScheduleChoice]:
    """Yield the schedules of the rule that fits a kernel (`main`), the default first; none for GPUs."""
    cpu = cpu_model_for(target, rules_version)
    return generate_for_cpu(mod, cpu) if cpu is not None else iter(())


def schedule_untuned(
    lowered: tvm.IRModule, target: Mapping[str, Json], rules_version: int
) -> ScheduledModule:
    """Apply the target's default schedule to each unscheduled kernel; also return the rules used.

    With a `rules_version` of 0, kernels of CPUs are not scheduled.
    """
    if backend_for(target).RUNS_ON_HOST_CPU:
        return schedule_for_cpu(lowered, cpu_model_for(target, rules_version))
    scheduled, rules = schedule_for_gpu(lowered, tvm.target.Target(dict(target)))
    if not has_host_kernels(target):
        return ScheduledModule(scheduled, rules)
    # kernels without threads run on the host
    on_host = schedule_for_cpu(scheduled, cpu_model_for(cpu_target(target), rules_version))
    return ScheduledModule(on_host.mod, {**rules, **on_host.rules})
