"""`extract_tasks`: list the model's lowered kernels, their calls, and which can be tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, NamedTuple

from tvmflow.core.codec import omits_empty
from tvmflow.core.dimensions import list_tuning_sizes, sizes_text
from tvmflow.core.formatting import count_text
from tvmflow.recipe import Recipe
from tvmflow.stages.base import (
    KnownFacts,
    StageContext,
    StageSettings,
    StageTraits,
    name_some,
    no_files,
    no_lines,
)
from tvmflow.stages.lower import LOWERED, LOWERED_ROLE
from tvmflow.stages.runtime_choice import choose_runtime, describe_runtime, requires_c_library
from tvmflow.targets.resolve import ResolvedTarget

NAME: Final = "extract_tasks"
TRAITS: Final = StageTraits(
    version=4,
    scope="measured",
    needs={"lower": (LOWERED,)},
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
)
deliveries = no_files
explain = no_lines

TASKS: Final = "tasks.json"
WORKLOADS: Final = "workloads.json"


class ExtractTasksSettings(StageSettings):
    """The runtime, and whether a C library is required."""

    runtime: str
    c_library: bool = False


def settings(recipe: Recipe, target: ResolvedTarget) -> ExtractTasksSettings:
    """Return the runtime of the library, and whether a C library is required."""
    return ExtractTasksSettings(
        runtime=choose_runtime(recipe, target), c_library=requires_c_library(recipe, target)
    )


@omits_empty("needs_tvm_for")
class ExtractTasksFacts(NamedTuple):
    """The facts of a lowered model; `not_tunable` holds the reason for each kernel that cannot be tuned.

    `needs_tvm_for` is the operator that needs TVM's runtime, or empty.
    """

    workloads: int
    tunable: int
    not_tunable: Mapping[str, str]
    gflops: float = 0.0
    runtime: str = ""
    needs_tvm_for: str = ""


def run(settings: ExtractTasksSettings, context: StageContext) -> ExtractTasksFacts:
    """Write the workloads of the lowered model under their durable keys."""
    from tvmflow.compiler import LoweredModel, find_runtime
    from tvmflow.graph.dynamic_shapes import read_dimensions
    from tvmflow.tuning.workloads import extract_workloads

    mod = LoweredModel.read(context.inputs[LOWERED_ROLE]).mod
    # if a C library is required but impossible, fail before hours of tuning
    runtime, reason = find_runtime(mod, settings.runtime, requires_c=settings.c_library)
    workloads = extract_workloads(mod)
    dimensions = read_dimensions(mod["main"])
    sizes = [sizes_text(chosen) for chosen in list_tuning_sizes(dimensions)]
    tasks = [
        {
            "key": workload.key,
            "names": list(workload.names),
            "weight": workload.weight,
            "flops": workload.flops,
            "tunable": not workload.untunable_reason,
            "reason": workload.untunable_reason,
            **({"sizes": sizes} if workload.has_dynamic_shape else {}),
        }
        for workload in workloads
    ]
    modules = {workload.key: workload.mod for workload in workloads if workload.mod}
    (context.out / TASKS).write_text(json.dumps(tasks, indent=1))
    (context.out / WORKLOADS).write_text(json.dumps(modules, indent=1, sort_keys=True))
    return ExtractTasksFacts(
        workloads=len(workloads),
        tunable=sum(1 for workload in workloads if not workload.untunable_reason),
        not_tunable={
            name: workload.untunable_reason
            for workload in workloads
            if workload.untunable_reason
            for name in workload.names
        },
        gflops=round(sum(w.weight * w.flops for w in workloads) / 1e9, 6),
        runtime=runtime,
        needs_tvm_for=reason,
    )


def describe(facts: ExtractTasksFacts, inputs: KnownFacts) -> list[str]:
    """Return how many workloads can be tuned, and which cannot."""
    line = f"{count_text(facts.workloads, 'workload')}, {facts.tunable} tunable"
    if facts.not_tunable:
        reasons = [f"{name} ({reason})" for name, reason in facts.not_tunable.items()]
        line += f"; not tunable: {name_some(reasons)}"
    return [line, *describe_runtime(facts.needs_tvm_for)]
