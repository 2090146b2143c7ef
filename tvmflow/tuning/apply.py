"""Applies the chosen schedules to a lowered module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.tuning.measure import apply_trace
from tvmflow.tuning.workloads import normalize, workload_key

if TYPE_CHECKING:
    import tvm

_log = logging.getLogger(__name__)


def apply_chosen(
    lowered: tvm.IRModule,
    chosen: Mapping[str, Json],
    workloads: Mapping[str, str],
    target: tvm.target.Target,
    *,
    must_fit: bool = True,
) -> tuple[tvm.IRModule, list[str]]:
    """Schedule every kernel of a module for which a schedule was chosen.

    TVM's own pass takes the first record of a database whose structure fits and is silent when
    none does. Here a choice that no longer applies is an error, and one that fits no kernel unless
    the module is allowed to lack some.

    Args:
        lowered: The lowered module.
        chosen: Traces by workload key.
        workloads: Saved modules by workload key.
        target: TVM's target.
        must_fit: Each must fit a kernel; otherwise the others are left out.

    Returns:
        The module, and the sorted names of the scheduled kernels.

    Raises:
        StageError: A schedule does not apply, or fits no kernel.
    """
    import tvm

    from tvmflow.compiler import ir
    from tvmflow.compiler.schedules.intrinsics import load_intrinsics
    from tvmflow.compiler.schedules.rules import with_original_attributes

    load_intrinsics(target.export())
    scheduled = {key: _schedule(key, workloads[key], chosen[key]) for key in sorted(chosen)}
    keys: dict[str, str] = {}
    module = ir.copy_module(lowered)
    for var, function in lowered.functions_items():
        if not isinstance(function, tvm.tirx.PrimFunc):
            continue
        key = workload_key(normalize(function))
        if key in scheduled:
            module[var] = with_original_attributes(scheduled[key], function)
            keys[str(var.name_hint)] = key
    unused = sorted(set(chosen) - set(keys.values()))
    if unused and must_fit:
        raise StageError(
            f"{len(unused)} of {len(chosen)} chosen schedules fit no kernel of this model "
            f"(the first: workload {unused[0][:12]})",
            fix="they were chosen for another model; please report this with the recipe",
        )
    _log.debug("%d kernels have a chosen schedule", len(keys))
    return module, sorted(keys)


def _schedule(key: str, workload: str, trace: Json) -> tvm.tirx.PrimFunc:
    import tvm

    try:
        return apply_trace(tvm.ir.load_json(workload), trace).mod["main"]
    except (RuntimeError, ValueError, TypeError) as error:
        raise StageError(
            f"the schedule chosen for workload {key[:12]} does not apply to it",
            fix="run with another tune.seed, or remove the workload's file from the ledger",
        ) from error
