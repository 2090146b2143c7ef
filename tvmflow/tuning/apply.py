"""Puts the chosen schedules into a lowered module, and says where each one went."""

from __future__ import annotations

from collections.abc import Mapping

import tvm

from tvmflow.errors import StageError
from tvmflow.schedules import copied, restored
from tvmflow.schedules.intrinsics import load_intrinsics
from tvmflow.tuning.measure import scheduled
from tvmflow.tuning.workloads import normalised, workload_key
from tvmflow.values import Json


def apply_chosen(
    lowered: tvm.IRModule,
    chosen: Mapping[str, Json],
    workloads: Mapping[str, str],
    target: tvm.target.Target,
) -> tuple[tvm.IRModule, list[str]]:
    """The module with every kernel scheduled for which `chosen` has a trace, and their names, sorted.

    `chosen` maps workload keys to traces, `workloads` the same keys to saved modules. TVM's own
    pass takes the first record of a database whose structure fits and is silent when none does;
    here a choice that fits no kernel, or no longer applies, is a StageError.
    """
    load_intrinsics(target.export())
    kernels: dict[str, tvm.tirx.PrimFunc] = {}
    for key, trace in sorted(chosen.items()):
        try:
            kernels[key] = scheduled(tvm.ir.load_json(workloads[key]), trace)["main"]
        except (RuntimeError, ValueError, TypeError) as refused:
            raise StageError(
                f"the schedule chosen for workload {key[:12]} does not apply to it",
                fix="run with another tune.seed, or remove the workload's file from the ledger",
            ) from refused
    tuned: dict[str, str] = {}
    module = copied(lowered)
    for var, function in lowered.functions_items():
        if not isinstance(function, tvm.tirx.PrimFunc):
            continue
        key = workload_key(normalised(function))
        if key in kernels:
            module[var] = restored(kernels[key], function)
            tuned[str(var.name_hint)] = key
    if unused := sorted(set(chosen) - set(tuned.values())):
        raise StageError(
            f"{len(unused)} of {len(chosen)} chosen schedules fit no kernel of this model "
            f"(the first: workload {unused[0][:12]})",
            fix="extract_tasks and build must lower alike; please report this with the recipe",
        )
    return module, sorted(tuned)
