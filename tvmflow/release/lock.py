"""The making of lock files: the inputs and outputs of a finished run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tvmflow.compiler.choices import choice_text
from tvmflow.core.canonical_json import canonical
from tvmflow.core.formatting import latency_text
from tvmflow.core.keys import list_changes
from tvmflow.core.types import Artifact, Json, Plan, StageSpec, TensorSpec
from tvmflow.planning.checks import locked_settings
from tvmflow.planning.decisions import PlanState
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
from tvmflow.stages import (
    STAGES,
    build,
    choose,
    export,
    extract_tasks,
    import_model,
    lower,
    pick_best,
    verify,
)
from tvmflow.stages.base import parse_facts
from tvmflow.stages.export import ExportFacts
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.verify.verdict import Latency, Verdict, largest
from tvmflow.store.inventory import add_pin
from tvmflow.store.local import LocalStore
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
            choices=enforced.choices
            if enforced
            else self._read_json(f"{choose.NAME}/{resolved.name}", choose.CHOICES) or {},
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


_SHOWN_KERNELS: Final = 8
_EVERYWHERE: Final = "everywhere"

# Settings that have lines of their own.
_REPORTED_SETTINGS: Final = ("target", "inputs", "version")
# Settings that several stages share, and the stage that they are reported for.
_SHARED_SETTINGS: Final = {"lowering": lower.NAME, "schedules": build.NAME}


class Change(NamedTuple):
    """One difference: `place` is a recipe or one of its targets, `what` the kind of the difference."""

    place: str
    what: str
    text: str


Differences = Iterator[tuple[str, str]]
"""Kinds and texts of differences in one place."""


def diff_locks(before: LockFile, after: LockFile) -> list[Change]:
    """Return all differences: packages and the machine, then recipe by recipe and target by target."""
    changes = [Change(_EVERYWHERE, "package", text) for text in _values(before.tools, after.tools)]
    if before.machine != after.machine:
        changes.append(Change(_EVERYWHERE, "machine", f"{before.machine} -> {after.machine}"))
    for name in sorted({*before.recipes, *after.recipes}):
        old, new = before.recipes.get(name), after.recipes.get(name)
        if old is None or new is None:
            changes.append(Change(name, "recipe", "added" if new else "removed"))
            continue
        changes += [Change(name, what, text) for what, text in _diff_recipes(old, new)]
        for target in sorted({*old.targets, *new.targets}):
            place = f"{name}/{target}"
            if target not in old.targets or target not in new.targets:
                state = "added" if target in new.targets else "removed"
                changes.append(Change(place, "target", state))
            else:
                differences = _diff_targets(old, new, target)
                changes += [Change(place, what, text) for what, text in differences]
    return changes


def _diff_recipes(old: LockedRecipe, new: LockedRecipe) -> Differences:
    """Yield what differs for all targets of a recipe."""
    if old.version != new.version:
        yield "version", f"{old.version} -> {new.version}"
    weights_changed, graph_changed = (
        _outputs(old, import_model.NAME).get(name) != _outputs(new, import_model.NAME).get(name)
        for name in ("params.safetensors", "model.json")
    )
    if weights_changed:
        yield "weights", "changed" + ("" if graph_changed else "; the operators are the same")
    if graph_changed:
        counts = ", ".join(_values(old.operators, new.operators))
        yield "operators", counts or "the same number of each, with other connections or attributes"
    yield from (("inputs", text) for text in _values(old.inputs, new.inputs))
    yield from (("outputs", text) for text in _values(old.outputs, new.outputs))
    for label in sorted({*old.stages} & {*new.stages}):
        for cause in list_changes(_settings_preimage(old, label), _settings_preimage(new, label)):
            yield "settings", cause


def _settings_preimage(recipe: LockedRecipe, label: str) -> dict[str, Json]:
    """Return the settings of a stage that have no lines of their own, as a pre-image with nothing else."""
    locked = recipe.stages[label]
    stage = label.partition("/")[0]
    others = (name for name, owner in _SHARED_SETTINGS.items() if stage != owner)
    hidden = (*_REPORTED_SETTINGS, *others)
    settings = {name: value for name, value in locked.settings.items() if name not in hidden}
    preimage = {"stage": stage, "version": locked.version, "settings": settings}
    return {**preimage, "inputs": {}, "tools": {}, "machine": ""}


def _diff_targets(old_recipe: LockedRecipe, new_recipe: LockedRecipe, name: str) -> Differences:
    """Yield what differs for one target of a recipe."""
    old, new = old_recipe.targets[name], new_recipe.targets[name]
    for text in _values(old.tvm, new.tvm):
        yield "target", text
    old_features, new_features = {*old.features}, {*new.features}
    if new_features - old_features:
        yield "target", f"{', '.join(sorted(new_features - old_features))} now used"
    if old_features - new_features:
        yield "target", f"{', '.join(sorted(old_features - new_features))} no longer used"
    choices = (
        {text: choice_text(choice) for text, choice in entry.choices.items()}
        for entry in (old, new)
    )
    yield from (("choice", text) for text in _values(*choices))
    yield from _diff_kernels(old.kernels, new.kernels)
    yield from _diff_files(old_recipe, new_recipe, name)
    yield from _diff_measurements(old.measured, new.measured)


def _diff_kernels(old: Mapping[str, LockedKernel], new: Mapping[str, LockedKernel]) -> Differences:
    common = [key for key in old if key in new]
    rows = {
        "with another schedule": [
            f"{_name(new[key])}: another schedule{_latencies(old[key], new[key])}"
            for key in common
            if old[key].trial != new[key].trial
        ],
        "added": [
            f"{_name(kernel)}: added, {'tuned' if kernel.trial else 'untuned'}"
            for key, kernel in new.items()
            if key not in old
        ],
        "removed": [f"{_name(kernel)}: removed" for key, kernel in old.items() if key not in new],
    }
    if any(rows.values()):
        unchanged = len(common) - len(rows["with another schedule"])
        counts = [f"{len(texts)} {verb}" for verb, texts in rows.items() if texts]
        yield "kernels", ", ".join([f"{unchanged} unchanged", *counts])
        yield from _limit_rows([text for texts in rows.values() for text in texts])


def _limit_rows(rows: Sequence[str]) -> Differences:
    """Yield the first rows, and how many more there are."""
    for row in rows[:_SHOWN_KERNELS]:
        yield "kernel", row
    if len(rows) > _SHOWN_KERNELS:
        yield "kernel", f"and {len(rows) - _SHOWN_KERNELS} more, which are in the lock files"


def _name(kernel: LockedKernel) -> str:
    return kernel.names[0] if kernel.names else "a kernel"


def _latencies(old: LockedKernel, new: LockedKernel) -> str:
    before, after = (kernel.tuned_us or kernel.untuned_us for kernel in (old, new))
    if not before or not after:
        return ""
    return f", {latency_text(before / 1e6)} -> {latency_text(after / 1e6)}"


def _diff_files(old_recipe: LockedRecipe, new_recipe: LockedRecipe, target: str) -> Differences:
    """Yield the delivered files that differ, with their sizes."""
    recipes = (old_recipe, new_recipe)
    old, new = (_outputs(recipe, f"{export.NAME}/{target}") for recipe in recipes)
    old_sizes, new_sizes = (recipe.targets[target].measured.bytes for recipe in recipes)
    for name in sorted({*old_sizes, *new_sizes}):
        before, after = old_sizes.get(name), new_sizes.get(name)
        if before is None or after is None:
            yield "file", f"{name} {'added' if before is None else 'removed'}"
        elif old.get(name) != new.get(name):
            size = f"{before:,} bytes"
            if before != after:
                size += f" -> {after:,} bytes ({after / before - 1:+.1%})"
            yield "file", f"{name} changed, {size}"


def _values(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"


def _outputs(recipe: LockedRecipe, label: str) -> Mapping[str, str]:
    stage = recipe.stages.get(label)
    return stage.outputs if stage else {}


# ---------------------------------------------------------------- measurements


class _Measurement(NamedTuple):
    """A measurement of a lock file, and its presentation.

    `relative` shows the change as a percentage, too.
    """

    what: str
    field: str
    show: Callable[[float], str]
    relative: bool = False


def _show_latency(us: float) -> str:
    return latency_text(us / 1e6)


_MEASUREMENTS: Final = (
    _Measurement("latency", "latency_us", _show_latency, relative=True),
    _Measurement("accuracy", "accuracy", "{:.2%}".format),
    _Measurement("coverage", "coverage", "{:.0%}".format),
    _Measurement("error", "max_abs_error", "{:.2g}".format),
)


def _diff_measurements(before: Measurements, after: Measurements) -> Differences:
    for what, field, show, relative in _MEASUREMENTS:
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            texts = ["unknown" if value is None else show(value) for value in (old, new)]
            change = f" ({new / old - 1:+.1%})" if relative and old and new is not None else ""
            yield what, f"{' -> '.join(texts)}{change}"
