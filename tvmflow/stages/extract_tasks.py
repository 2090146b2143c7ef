"""`extract_tasks`: the lowered kernels of the model, how often each runs, and which can be tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.compiler.options import lowering_options
from tvmflow.core.codec import from_json, without_empty
from tvmflow.core.fork_server import Emit
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Json
from tvmflow.recipe import Recipe
from tvmflow.stages.base import (
    KnownFacts,
    Lowering,
    StageContext,
    StageSettings,
    StageTraits,
    name_some,
    no_files,
    parse_settings,
)
from tvmflow.stages.runtime_choice import (
    choose_runtime,
    describe_runtime,
    requires_c_library,
)
from tvmflow.targets.resolve import ResolvedTarget

if TYPE_CHECKING:
    # The planner imports this module and must not load TVM.
    from tvmflow.compiler.ir_dump import IRDump
    from tvmflow.compiler.lowering import LoweredModel

NAME: Final = "extract_tasks"


def dump_ir(payload: dict[str, Json], _: Emit) -> None:
    """Lower the model once more; takes `settings`, `inputs`, and the `folder` to write to."""
    from tvmflow.compiler.ir_dump import IRDump

    settings = parse_settings(run, payload["settings"])
    _lower(settings, Path(payload["inputs"]["import/model.json"]), IRDump(Path(payload["folder"])))


TRAITS: Final = StageTraits(
    version=3,
    scope="machine",
    needs={"import": ("model.json",)},
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    dump_ir=dump_ir,
)
deliveries = no_files

TASKS: Final = "tasks.json"
WORKLOADS: Final = "workloads.json"


class ExtractTasksSettings(StageSettings):
    """The target, how the model is lowered, the runtime, and whether there must be a C library."""

    target: dict[str, Json]
    lowering: Lowering
    runtime: str
    c_library: bool = False


def settings(recipe: Recipe, target: ResolvedTarget) -> ExtractTasksSettings:
    """Return what the kernels are lowered for."""
    return ExtractTasksSettings(
        target=target.tvm,
        lowering=lowering_options(recipe),
        runtime=choose_runtime(recipe, target),
        c_library=requires_c_library(recipe, target),
    )


class Vectors(NamedTuple):
    """The width of vectors in bits, and the estimate for each width; none where the recipe sets it."""

    bits: int
    costs: Mapping[int, float]


class ExtractTasksFacts(NamedTuple):
    """The facts of a lowered model.

    Attributes:
        workloads: How many workloads it has.
        tunable: How many of them can be tuned.
        not_tunable: The reason for each kernel that cannot.
        gflops: The arithmetic operations of one inference.
        runtime: What executes the library.
        needs_tvm_for: The operator that needs TVM's runtime; empty for none.
        vectors: The vectors of its kernels; None where the target has no choice.
    """

    workloads: int
    tunable: int
    not_tunable: Mapping[str, str]
    gflops: float = 0.0
    runtime: str = ""
    needs_tvm_for: str = ""
    vectors: Vectors | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the facts as plain JSON."""
        return without_empty(self._asdict(), ("needs_tvm_for", "vectors"))


def run(settings: ExtractTasksSettings, context: StageContext) -> ExtractTasksFacts:
    """Lower the model as `build` will, and write its workloads under their durable keys."""
    from tvmflow.compiler.c_program.program import check_program, find_runtime
    from tvmflow.tuning.workloads import extract_workloads

    model = _lower(settings, context.inputs["import/model.json"])
    if settings.c_library:
        # before hours of tuning, not after
        check_program(model.mod)
    runtime, reason = find_runtime(model.mod, settings.runtime)
    workloads = extract_workloads(model.mod)
    tasks = [
        {
            "key": workload.key,
            "names": list(workload.names),
            "weight": workload.weight,
            "flops": workload.flops,
            "tunable": not workload.untunable_reason,
            "reason": workload.untunable_reason,
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
        vectors=from_json(Vectors, model.width.to_json()) if model.width else None,
    )


def _lower(settings: ExtractTasksSettings, model: Path, dump: IRDump | None = None) -> LoweredModel:
    from tvmflow.compiler import lowering

    target = lowering.make_target(settings.target)
    return lowering.lower(lowering.load_ir(model), target, settings.lowering, dump)


def describe(facts: ExtractTasksFacts, inputs: KnownFacts) -> list[str]:
    """Return how many workloads can be tuned, and which cannot."""
    line = f"{count_text(facts.workloads, 'workload')}, {facts.tunable} tunable"
    if facts.not_tunable:
        reasons = [f"{name} ({reason})" for name, reason in facts.not_tunable.items()]
        line += f"; not tunable: {name_some(reasons)}"
    vectors = _describe_vectors(facts.vectors, always=False)
    return [line, *describe_runtime(facts.needs_tvm_for), *vectors]


def explain(facts: ExtractTasksFacts) -> list[str]:
    """Return the width of vectors, and the estimate that it was chosen by."""
    return _describe_vectors(facts.vectors, always=True)


def _describe_vectors(vectors: Vectors | None, *, always: bool) -> list[str]:
    """Return the width of vectors, with estimates; nothing of the widest unless asked for always."""
    if vectors is None:
        return []
    bits, costs = vectors
    if not costs:
        return [f"vectors of {bits} bits, as kernels.vector_bits says"]
    if not always and bits == max(costs):
        return []
    best = costs.get(bits) or 1.0
    others = ", ".join(
        f"{cost / best:.2f} times as many with {width}"
        for width, cost in sorted(costs.items(), reverse=True)
        if width != bits
    )
    line = f"vectors of {bits} bits by the channels of the model"
    return [f"{line}; weighted operations on vectors: {others}" if others else line]
