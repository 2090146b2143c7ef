"""Lock files: written for a finished run, compared, updated, and imported into a ledger.

An update after a change of the model or of tools keeps schedules and searches nothing. Kernels that are not in the
lock file are scheduled by rules and reported.

A lock file does not name the machine of its measurements. So its schedules enter a ledger as trials of another device:
a search measures them first (see `tuning.proposals`), and does not compare their times with those of this machine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tvmflow.core.canonical_json import canonical
from tvmflow.core.choices import choice_text
from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import latency_text, names_text
from tvmflow.core.keys import list_changes
from tvmflow.core.types import Artifact, Json, Plan, StageSpec, TensorSpec
from tvmflow.engine.report import RunReport
from tvmflow.engine.session import select_stages
from tvmflow.pages.content import Change
from tvmflow.planning.checks import SEARCHES, locked_settings, reuse_searched
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.planning.recipes import PlannedRecipe, Target, resolved_targets
from tvmflow.recipe.lock_file import (
    Lock,
    LockedKernel,
    LockedRecipe,
    LockedStage,
    LockedTarget,
    LockFile,
    Measurements,
    read_lock,
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
from tvmflow.targets.backends import backend_for
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.tvm_target import split_threads, with_threads
from tvmflow.tuning.ledger import MachineClass, TargetDescription, WorkloadDescription
from tvmflow.tuning.packs import ImportedWorkload, ImportResult, Problems, import_trials
from tvmflow.tuning.replay import TraceCheck
from tvmflow.tuning.roofline import MeasuredKernel
from tvmflow.tuning.trials import Trial, trial_id

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
    """Return a lock file, the same for the same results on every machine.

    All stages of the plan have results; paths of recipes become relative to `folder`. In a locked run, the
    results of the search come from `enforced`, the lock file that the run obeyed.
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
            targets={
                resolved.name: results.lock_target(
                    resolved, target, previous.targets.get(resolved.name) if previous else None
                )
                for target in sorted(planned.targets, key=lambda target: target.name)
                for resolved in resolved_targets(target)
            },
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
    """Pin the results of a lock file; the run that computed them must still hold its lease."""
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


class _RecipeResults:
    def __init__(self, store: LocalStore, artifacts: Mapping[str, Artifact]) -> None:
        self._store = store
        self._artifacts = artifacts

    def signature(self) -> dict[str, Json]:
        """Return the inputs, outputs and operators of the model."""
        # A model in parts has one import for each different partition.
        labels = (name for name in self._artifacts if name.partition("/")[0] == import_model.NAME)
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

        `resolved` is that of `target`, or of one of its parts; `enforced` is its entry in the enforced lock file.
        """
        name = resolved.name
        chosen = self._facts(PickBestFacts, f"{pick_best.NAME}/{name}")
        measured = self._measurements(name, target.name, chosen)
        if enforced:
            coverage = enforced.measured.coverage
            measured = (
                measured if coverage is None else measured.model_copy(update={"coverage": coverage})
            )
            peak, choices = enforced.peak_gflops, enforced.choices
        else:
            peak = chosen and chosen.peak_gflops
            choices = self._read_json(f"{choose.NAME}/{name}", choose.CHOICES) or {}
        return LockedTarget(
            tvm=json.loads(canonical(resolved.tvm)),
            cores=resolved.threads,
            features=list(resolved.features),
            toolchain=resolved.toolchain or None,
            measured=measured,
            peak_gflops=peak,
            kernels=(enforced and enforced.kernels) or self._kernels(name, chosen),
            choices=choices,
        )

    def _measurements(
        self, resolved: str, target: str, chosen: PickBestFacts | None
    ) -> Measurements:
        verdict: Mapping[str, Json] = self._facts(Verdict, f"{verify.NAME}/{target}") or {}
        exported = self._facts(ExportFacts, f"{export.NAME}/{resolved}")
        latency = verdict.get("latency", {}).get("library")
        return Measurements(
            accuracy=verdict.get("accuracy"),
            max_abs_error=largest(
                output["max_abs_error"] for output in verdict.get("outputs", {}).values()
            ),
            latency_us=_microseconds(latency) if latency else None,
            compared_us={
                runtime["name"]: _microseconds(runtime["latency"])
                for runtime in verdict.get("compared", {}).values()
                if "latency" in runtime
            },
            coverage=(chosen and chosen.coverage) or None,
            bytes=dict(exported.files) if exported else {},
        )

    def _kernels(self, target: str, chosen: PickBestFacts | None) -> dict[str, LockedKernel]:
        """Return every kernel by the key of its workload, with the chosen schedule if there is one."""
        tasks = self._read_json(f"{extract_tasks.NAME}/{target}", extract_tasks.TASKS) or []
        traces = self._read_json(f"{pick_best.NAME}/{target}", pick_best.CHOSEN) or {}
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
        return artifact and _read_json(artifact, name, self._store)


def _read_json(artifact: Artifact, name: str, store: LocalStore) -> Json:
    digest = artifact.digests((name,))[name]
    return json.loads(Path(store.blobs.verified_path(digest)).read_bytes())


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

# Settings that are reported in other lines.
_REPORTED_SETTINGS: Final = ("target", "inputs", "version")
# Settings of several stages, and the stage that they are reported for.
_SHARED_SETTINGS: Final = {"lowering": lower.NAME, "schedules": build.NAME}

# The kind and the text of each difference of a recipe or target.
_Differences = Iterator[tuple[str, str]]


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


def _diff_recipes(old: LockedRecipe, new: LockedRecipe) -> _Differences:
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
    """Return a pre-image with only those settings of a stage that are not reported in other lines."""
    locked = recipe.stages[label]
    stage = label.partition("/")[0]
    others = (name for name, owner in _SHARED_SETTINGS.items() if stage != owner)
    hidden = (*_REPORTED_SETTINGS, *others)
    settings = {name: value for name, value in locked.settings.items() if name not in hidden}
    preimage = {"stage": stage, "version": locked.version, "settings": settings}
    return {**preimage, "inputs": {}, "tools": {}, "machine": ""}


def _diff_targets(old_recipe: LockedRecipe, new_recipe: LockedRecipe, name: str) -> _Differences:
    old, new = old_recipe.targets[name], new_recipe.targets[name]
    for text in _values(old.tvm, new.tvm):
        yield "target", text
    old_features, new_features = {*old.features}, {*new.features}
    added, removed = sorted(new_features - old_features), sorted(old_features - new_features)
    if added:
        yield "target", f"{names_text(added, len(added))} now used"
    if removed:
        yield "target", f"{names_text(removed, len(removed))} no longer used"
    choices = (
        {text: choice_text(choice) for text, choice in entry.choices.items()}
        for entry in (old, new)
    )
    yield from (("choice", text) for text in _values(*choices))
    yield from _diff_kernels(old.kernels, new.kernels)
    yield from _diff_files(old_recipe, new_recipe, name)
    yield from _diff_measurements(old.measured, new.measured)


def _diff_kernels(old: Mapping[str, LockedKernel], new: Mapping[str, LockedKernel]) -> _Differences:
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
        lines = [text for texts in rows.values() for text in texts]
        yield from (("kernel", text) for text in lines[:_SHOWN_KERNELS])
        if len(lines) > _SHOWN_KERNELS:
            yield "kernel", f"and {len(lines) - _SHOWN_KERNELS} more, which are in the lock files"


def _name(kernel: LockedKernel) -> str:
    return kernel.names[0] if kernel.names else "a kernel"


def _latencies(old: LockedKernel, new: LockedKernel) -> str:
    before, after = (kernel.tuned_us or kernel.untuned_us for kernel in (old, new))
    if not before or not after:
        return ""
    return f", {latency_text(before / 1e6)} -> {latency_text(after / 1e6)}"


def _diff_files(old_recipe: LockedRecipe, new_recipe: LockedRecipe, target: str) -> _Differences:
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


_LATENCY: Final = "latency"
# A measurement -> its field, and its format.
_MEASUREMENTS: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    _LATENCY: ("latency_us", lambda us: latency_text(us / 1e6)),
    "accuracy": ("accuracy", "{:.2%}".format),
    "coverage": ("coverage", "{:.0%}".format),
    "error": ("max_abs_error", "{:.2g}".format),
}


def _diff_measurements(before: Measurements, after: Measurements) -> _Differences:
    for what, (field, show) in _MEASUREMENTS.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            texts = ["unknown" if value is None else show(value) for value in (old, new)]
            has_ratio = what == _LATENCY and old and new is not None
            change = f" ({new / old - 1:+.1%})" if has_ratio else ""
            yield what, f"{' -> '.join(texts)}{change}"


# ---------------------------------------------------------------- update


class UncoveredKernels(NamedTuple):
    """The kernels of a recipe for a target that a lock file does not have, by name."""

    recipe: str
    target: str
    kernels: tuple[str, ...]


class LockUpdate(NamedTuple):
    """The plan without a search, the lock file for its kernels, and kernels that it does not cover."""

    plan: Plan
    lock: Lock
    uncovered: tuple[UncoveredKernels, ...]


def update_plan(lock: Lock, plan: Plan, state: PlanState) -> LockUpdate:
    """Return a plan with the schedules of a lock file in place of the search.

    The state has at least the results of the stages that extract tasks.
    """
    recipes = dict(lock.recipes)
    uncovered: list[UncoveredKernels] = []
    for spec in (spec for spec in plan.stages if spec.stage == extract_tasks.NAME):
        locked = recipes.get(spec.recipe)
        target = locked.targets.get(spec.target) if locked else None
        tasks = _read_json(state.artifacts[spec.id], extract_tasks.TASKS, state.store)
        kernels, missing = _match_kernels(tasks, target)
        if missing:
            uncovered.append(UncoveredKernels(spec.recipe, spec.target, tuple(missing)))
        if target is None:
            needed = {need.stage_id for need in spec.needs}
            (lowered,) = (s for s in plan.stages if s.id in needed and s.stage == lower.NAME)
            target = LockedTarget(tvm=lowered.settings["target"], cores=1)
        # measurements are those of all kernels
        measured = Measurements() if missing else target.measured
        entry = target.model_copy(update={"kernels": kernels, "measured": measured})
        locked = locked or LockedRecipe(recipe="", version="", stages={}, targets={})
        targets = {**locked.targets, spec.target: entry}
        recipes[spec.recipe] = locked.model_copy(update={"targets": targets})
        _log.debug("%s: %d kernels, %d not covered", spec.id, len(kernels), len(missing))
    updated = lock._replace(file=lock.file.model_copy(update={"recipes": recipes}))
    stages = tuple(
        reuse_searched(updated, spec, SEARCHES, state.store)
        for spec in plan.stages
        if not spec.traits.searches
    )
    ids = {spec.id for spec in stages}
    deliveries = tuple(delivery for delivery in plan.deliveries if delivery.stage_id in ids)
    return LockUpdate(Plan(stages, deliveries, plan.origins), updated, tuple(uncovered))


def run_update(
    lock: Lock, plan: Plan, store: LocalStore, run: Callable[[Plan], RunReport]
) -> LockUpdate | RunReport:
    """Extract the kernels, and return the plan that builds them; the report when that failed."""
    # kernels depend on the locked choices
    stages = (spec for spec in plan.stages if spec.stage != choose.NAME)
    plan = plan._replace(
        stages=tuple(reuse_searched(lock, spec, (choose.NAME,), store) for spec in stages)
    )
    extracting = [spec.id for spec in plan.stages if spec.stage == extract_tasks.NAME]
    selected = select_stages(plan, extracting)
    report = run(selected)
    return report if report.exit_code else update_plan(lock, plan, evaluate_plan(selected, store))


def _match_kernels(
    tasks: Sequence[Json], target: LockedTarget | None
) -> tuple[dict[str, LockedKernel], list[str]]:
    """Return kernels by workload, locked ones with their schedules, and the names of the others."""
    locked: Mapping[str, LockedKernel] = target.kernels if target else {}
    kernels: dict[str, LockedKernel] = {}
    missing: list[str] = []
    for task in sorted(tasks, key=lambda task: str(task["key"])):
        fields = {"names": task["names"], "calls": task["weight"]}
        kernel = locked.get(task["key"])
        if kernel is None and task["tunable"]:
            missing += task["names"][:1]
        updated = kernel.model_copy(update=fields) if kernel else LockedKernel(**fields)
        kernels[task["key"]] = updated
    return kernels, sorted(missing)


# ---------------------------------------------------------------- a ledger with the schedules of a lock file

LOCK_SUFFIXES: Final = (".yaml", ".yml")
"""The suffixes of lock files; trial packs have others."""

_TVM: Final = "apache-tvm"
_DEVICE: Final = {"kind": "cpu", "class": "the machine of a lock file"}


def import_lock(
    path: Path, root: Path, machine_class: MachineClass, checker: TraceCheck | None = None
) -> ImportResult:
    """Add the schedules of a lock file to a ledger, as trials of another device.

    A `checker` applies each trace to its kernel first; without one, the next `tune` stage does so.

    Raises:
        RecipeError: when it is not a valid lock file.
        UsageError: when it has no schedules for this machine's TVM.
    """
    lock = read_lock(path)
    tvm = lock.file.tools.get(_TVM, "")
    if tvm != machine_class.tvm:
        raise UsageError(
            f"the schedules in {path} are for TVM {tvm or '(not named)'}, and this machine has TVM {machine_class.tvm}",
            fix="install that build of TVM, or tune without them",
        )
    workloads = [*_list_workloads(lock, tvm)]
    if not workloads:
        raise UsageError(
            f"{path} has no tuned schedules for a CPU",
            fix="give the lock file of a recipe that was tuned, written by `tvmflow lock`",
        )
    descriptions = {
        description.key: description
        for target in _list_targets(lock)
        if (description := _describe(target, tvm)).key in {entry.target for entry in workloads}
    }
    lock_class = MachineClass(tvm, _DEVICE)
    return import_trials(root, str(path), descriptions, workloads, lock_class, checker)


def _list_targets(lock: Lock) -> Iterator[LockedTarget]:
    for recipe in lock.recipes.values():
        for target in recipe.targets.values():
            if backend_for(target.tvm).RUNS_ON_HOST_CPU:
                yield target


def _describe(target: LockedTarget, tvm: str) -> TargetDescription:
    """Return the target of a search, with the number of threads of kernels."""
    code, _ = split_threads(target.tvm)
    return TargetDescription(with_threads(code, target.cores), tvm, _DEVICE)


def _list_workloads(lock: Lock, tvm: str) -> Iterator[ImportedWorkload]:
    when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    for target in _list_targets(lock):
        key = _describe(target, tvm).key
        for workload, kernel in target.kernels.items():
            if not kernel.trace:
                continue
            description = WorkloadDescription(name=next(iter(kernel.names), ""))
            if kernel.tuned_us is None:
                problem = f"{lock.path}: {description.name} has a schedule without a time"
                invalid = Problems([problem])
                yield ImportedWorkload(key, workload, description, invalid=invalid)
            else:
                trial = Trial(
                    id=kernel.trial,
                    trace=json.loads(kernel.trace),
                    run_secs=(kernel.tuned_us * 1e-6,),
                    failure=None,
                    when=when,
                    tvm=tvm,
                    host={"model": _DEVICE["class"]},
                    load=(),
                    seed=0,
                )
                yield ImportedWorkload(key, workload, description, records=[trial])
