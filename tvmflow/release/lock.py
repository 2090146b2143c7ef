"""The making of lock files: the inputs and outputs of a finished run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from tvmflow.core.canonical_json import canonical
from tvmflow.core.types import Artifact, Json, Plan, StageSpec, TensorSpec
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.enforce_lock import locked_settings
from tvmflow.planning.recipes import PlannedRecipe, Target, resolved_targets
from tvmflow.recipe.lock_file import (
    Lock,
    LockedKernel,
    LockedRecipe,
    LockedStage,
    LockedTarget,
    LockFile,
    Measurements,
)
from tvmflow.recipe.yaml_files import write_yaml
from tvmflow.stages import STAGES, export, extract_tasks, import_model, pick_best, verify
from tvmflow.stages.base import parse_facts
from tvmflow.stages.export import ExportFacts
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.verify.verdict import Latency, Verdict, largest
from tvmflow.store.local import LocalStore
from tvmflow.store.pins import add_pin
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.tuning.roofline import MeasuredKernel
from tvmflow.tuning.trials import trial_id

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_HEADER: Final = """\
# Inputs and outputs of a run, written by `tvmflow lock` and enforced by `tvmflow run --locked`.
# Compare two lock files with `tvmflow diff`. `measured` is informational, not enforced.
"""


def make_lock(
    recipes: Sequence[PlannedRecipe],
    plan: Plan,
    plan_state: PlanState,
    store: LocalStore,
    folder: Path,
    enforced: Lock | None = None,
) -> LockFile:
    """Return a lock file. The same results give the same one on every machine.

    All stages of the plan have results, and the paths of recipes are relative to `folder`. The lock file that the run
    enforced has the results of the search, which a locked run does not repeat.
    """
    entries = {}
    for planned in sorted(recipes, key=lambda planned: planned.recipe.name):
        name = planned.recipe.name
        specs = [spec for spec in plan.stages if spec.recipe == name]
        results = _RecipeResults(store, {s.label: plan_state.artifacts[s.id] for s in specs})
        previous = enforced.recipes.get(name) if enforced else None
        entries[name] = LockedRecipe(
            recipe=Path(os.path.relpath(planned.loaded.path, folder)).as_posix(),
            version=planned.recipe.version,
            **results.signature(),
            stages={
                spec.label: _lock_stage(spec, plan_state)
                for spec in sorted(specs, key=lambda spec: spec.label)
                if not spec.traits.searches
            },
            targets=dict(_lock_targets(planned, results, previous)),
        )
        _log.debug("locked %s: %d stages", name, len(specs))
    preimages = [plan_state.keys[spec.id].preimage for spec in plan.stages]
    tools = {name: version for image in preimages for name, version in image["tools"].items()}
    return LockFile(
        lock=1,
        machine=preimages[-1]["machine"] if preimages else "",
        tools=dict(sorted(tools.items())),
        recipes=entries,
    )


def lock_text(lock: LockFile) -> str:
    """Return the text of a lock file."""
    return _HEADER + write_yaml(lock.model_dump(exclude_defaults=True))


def pin_lock(store: LocalStore, path: Path, plan_state: PlanState) -> None:
    """Pin the results of a lock file. To be called while the run that made them holds its lease."""
    keys = [key.digest for key in plan_state.keys.values()]
    add_pin(store, f"lock:{path.absolute()}", keys, file=str(path.absolute()))


def _lock_stage(spec: StageSpec, plan_state: PlanState) -> LockedStage:
    inputs = plan_state.keys[spec.id].preimage["inputs"]
    outputs = plan_state.artifacts[spec.id].digests(()) if spec.traits.is_locked else {}
    return LockedStage(
        version=spec.version,
        settings=locked_settings(spec),
        inputs={role: digest for role, digest in sorted(inputs.items()) if _is_locked(role)},
        outputs=dict(sorted(outputs.items())),
    )


def _is_locked(role: str) -> bool:
    """Return whether an input is recorded: a file from outside, or of a stage whose outputs are locked."""
    stage = role.partition("/")[0]
    return stage not in STAGES or STAGES[stage].TRAITS.run.is_locked


def _lock_targets(
    planned: PlannedRecipe, results: _RecipeResults, previous: LockedRecipe | None
) -> Iterator[tuple[str, LockedTarget]]:
    for target in sorted(planned.targets, key=lambda target: target.name):
        for resolved in resolved_targets(target):
            enforced = previous.targets.get(resolved.name) if previous else None
            yield resolved.name, results.lock_target(resolved, target, enforced)


class _RecipeResults:
    """The results of a recipe, by the labels of their stages."""

    def __init__(self, store: LocalStore, artifacts: Mapping[str, Artifact]) -> None:
        self._store = store
        self._artifacts = artifacts

    def signature(self) -> dict[str, Json]:
        """Return the inputs, outputs and operators of the model."""
        # A model in parts has one import for each target that partitions it in a different way.
        labels = [
            label for label in self._artifacts if label.partition("/")[0] == import_model.NAME
        ]
        facts = self._facts(ImportFacts, min(labels, default="")) or ImportFacts()
        return {
            "inputs": {tensor.name: _format_shape(tensor) for tensor in facts.inputs},
            "outputs": {tensor.name: _format_shape(tensor) for tensor in facts.outputs},
            "operators": dict(facts.operators),
        }

    def lock_target(
        self, resolved: ResolvedTarget, target: Target, enforced: LockedTarget | None
    ) -> LockedTarget:
        """Return a target with its kernels and measurements.

        It may be the target of one part of the model, resolved from the one that the recipe names; `enforced` is its entry
        in the lock file that the run enforced.
        """
        coverage = enforced.measured.coverage if enforced else None
        return LockedTarget(
            tvm=json.loads(canonical(resolved.tvm)),
            cores=resolved.threads,
            features=list(resolved.features),
            toolchain=resolved.toolchain or None,
            measured=self._measurements(resolved.name, target.name, coverage),
            peak_gflops=enforced.peak_gflops if enforced else self._peak(resolved.name),
            kernels=(enforced and enforced.kernels) or self._kernels(resolved.name),
        )

    def _measurements(self, resolved: str, target: str, coverage: float | None) -> Measurements:
        verdict = self._facts(Verdict, f"{verify.NAME}/{target}")
        chosen = self._facts(PickBestFacts, f"{pick_best.NAME}/{resolved}")
        exported = self._facts(ExportFacts, f"{export.NAME}/{resolved}")
        outputs = verdict.get("outputs", {}).values() if verdict else ()
        latency = verdict.get("latency", {}).get("library") if verdict else None
        compared = verdict.get("compared", {}).values() if verdict else ()
        if coverage is None:
            coverage = (chosen and chosen.coverage) or None
        return Measurements(
            accuracy=verdict.get("accuracy") if verdict else None,
            max_abs_error=largest(output["max_abs_error"] for output in outputs),
            latency_us=_microseconds(latency) if latency else None,
            compared_us={
                runtime["name"]: _microseconds(runtime["latency"])
                for runtime in compared
                if "latency" in runtime
            },
            coverage=coverage,
            bytes=dict(exported.files) if exported else {},
        )

    def _peak(self, target: str) -> float | None:
        chosen = self._facts(PickBestFacts, f"{pick_best.NAME}/{target}")
        return chosen and chosen.peak_gflops

    def _kernels(self, target: str) -> dict[str, LockedKernel]:
        """Return every kernel by the key of its workload, with the chosen schedule if there is one."""
        tasks = self._read_json(f"{extract_tasks.NAME}/{target}", extract_tasks.TASKS) or []
        traces = self._read_json(f"{pick_best.NAME}/{target}", pick_best.CHOSEN) or {}
        chosen = self._facts(PickBestFacts, f"{pick_best.NAME}/{target}")
        times = {kernel.name: kernel for kernel in chosen.kernels} if chosen else {}
        return {
            task["key"]: _lock_kernel(task, times.get(task["names"][0]), traces.get(task["key"]))
            for task in sorted(tasks, key=lambda task: str(task["key"]))
        }

    def _facts(self, kind: type[_T], label: str) -> _T | None:
        artifact = self._artifacts.get(label)
        return parse_facts(kind, artifact.facts) if artifact else None

    def _read_json(self, label: str, name: str) -> Json:
        artifact = self._artifacts.get(label)
        if artifact is None:
            return None
        digest = artifact.digests((name,))[name]
        return json.loads(Path(self._store.blobs.verified_path(digest)).read_text())


def _microseconds(latency: Latency) -> float:
    return round(latency["median"] * 1e6, 3)


def _lock_kernel(task: Json, measured: MeasuredKernel | None, trace: Json) -> LockedKernel:
    return LockedKernel(
        names=task["names"],
        calls=task["weight"],
        untuned_us=measured and measured.untuned_us,
        tuned_us=measured and measured.tuned_us,
        flops=(measured and measured.flops) or None,
        trial=trial_id(trace) if trace else "",
        trace=canonical(trace).decode() if trace else "",
    )


def _format_shape(tensor: TensorSpec) -> str:
    sizes = list(map(str, tensor.sizes or tensor.shape))
    if tensor.bounded_axis is not None:
        sizes[tensor.bounded_axis] = f"≤{sizes[tensor.bounded_axis]}"
    return f"{tensor.dtype}[{'×'.join(sizes)}]"
