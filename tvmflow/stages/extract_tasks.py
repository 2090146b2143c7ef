"""`extract_tasks`: the lowered kernels of the model, how often each runs, and which can be tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from tvmflow.stages import _kernels
from tvmflow.stages._base import StageContext

VERSION: Final = 1
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"import": ("model.json",)}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0

TASKS: Final = "tasks.json"
WORKLOADS: Final = "workloads.json"


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """What the kernels are for; how many cores there are changes only how they are scheduled."""
    return {"target": target.codegen, "lowering": _kernels.lowering(recipe)}


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Lower the model as `build` will, and write its workloads under their durable keys."""
    from tvmflow.stages import _lowering
    from tvmflow.tuning.workloads import workloads_of

    mod = _lowering.load_ir(ctx.inputs["import/model.json"])
    target = _lowering.make_target(settings["target"])
    lowered = _lowering.lower(mod, target, settings["lowering"])
    found = workloads_of(lowered)
    tasks = [
        {
            "key": workload.key,
            "names": list(workload.names),
            "weight": workload.weight,
            "flops": workload.flops,
            "tunable": not workload.reason,
            "reason": workload.reason,
        }
        for workload in found
    ]
    modules = {workload.key: workload.mod for workload in found if workload.mod}
    (ctx.out / TASKS).write_text(json.dumps(tasks, indent=1))
    (ctx.out / WORKLOADS).write_text(json.dumps(modules, indent=1, sort_keys=True))
    return {
        "workloads": len(found),
        "tunable": sum(1 for workload in found if not workload.reason),
        "gflops": round(sum(each.weight * each.flops for each in found) / 1e9, 6),
        "not_tunable": {name: each.reason for each in found if each.reason for name in each.names},
    }
