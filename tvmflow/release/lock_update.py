"""The schedules of a lock file used again, where no ledger has them.

After a change of the model or of tools, a lock file is updated and nothing is searched: new weights get
the schedules that it has. Kernels that it does not have, because the model has changed further, are
scheduled by rules and named.

A ledger is seeded with them, too. A lock file does not say on which machine its schedules were measured:
they enter the ledger as trials of another device, so that a search measures them here before all others
(see `tuning.proposals`), and no time from elsewhere is compared with one of this machine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import UsageError
from tvmflow.core.types import InputFile, Json, Need, Plan, StageSpec
from tvmflow.engine.report import RunReport
from tvmflow.planning.checks import chosen_file, chosen_text
from tvmflow.planning.decisions import PlanState
from tvmflow.recipe.lock_file import (
    Lock,
    LockedKernel,
    LockedRecipe,
    LockedTarget,
    Measurements,
    read_lock,
)
from tvmflow.stages import STAGES, choose, extract_tasks, lower
from tvmflow.store.local import LocalStore
from tvmflow.targets.backends import backend_for
from tvmflow.targets.tvm_target import split_threads, with_threads
from tvmflow.tuning.ledger import MachineClass, TargetDescription, WorkloadDescription
from tvmflow.tuning.packs import ImportedWorkload, ImportResult, Problems, import_trials
from tvmflow.tuning.replay import TraceCheck
from tvmflow.tuning.trials import Trial

_log = logging.getLogger(__name__)

_SEARCHES: Final = tuple(name for name, stage in STAGES.items() if stage.TRAITS.run.searches)


class UncoveredKernels(NamedTuple):
    """The kernels of a recipe for a target that a lock file does not have, by name."""

    recipe: str
    target: str
    kernels: tuple[str, ...]


class LockUpdate(NamedTuple):
    """The plan that builds with the schedules of a lock file.

    Attributes:
        plan: It searches nothing.
        lock: The lock file with the kernels that the models have now.
        uncovered: What it does not cover.
    """

    plan: Plan
    lock: Lock
    uncovered: tuple[UncoveredKernels, ...]


def select_task_stages(plan: Plan) -> Plan:
    """Return the stages that find the kernels of the models, and those that these need."""
    specs = {spec.id: spec for spec in plan.stages}
    needed = {spec.id for spec in plan.stages if spec.stage == extract_tasks.NAME}
    pending = list(needed)
    while pending:
        for need in specs[pending.pop()].needs:
            if need.stage_id not in needed:
                needed.add(need.stage_id)
                pending.append(need.stage_id)
    stages = tuple(spec for spec in plan.stages if spec.id in needed)
    return Plan(stages, (), plan.origins)


def update_plan(lock: Lock, plan: Plan, state: PlanState) -> LockUpdate:
    """Return a plan without its search, with the schedules of a lock file in its place.

    The state has the results of at least the stages of `select_task_stages`.
    """
    recipes = dict(lock.recipes)
    uncovered: list[UncoveredKernels] = []
    for spec in (spec for spec in plan.stages if spec.stage == extract_tasks.NAME):
        locked = recipes.get(spec.recipe)
        target = locked.targets.get(spec.target) if locked else None
        kernels, missing = _match_kernels(_read_tasks(spec, state), target)
        if missing:
            uncovered.append(UncoveredKernels(spec.recipe, spec.target, tuple(missing)))
        target = target or _describe_target(spec, plan)
        recipes[spec.recipe] = _with_kernels(locked, spec, target, kernels, complete=not missing)
        _log.debug("%s: %d kernels, %d not covered", spec.id, len(kernels), len(missing))
    updated = lock._replace(file=lock.file.model_copy(update={"recipes": recipes}))
    stages = tuple(
        _reuse_searched(updated, spec, state.store, _SEARCHES)
        for spec in plan.stages
        if not spec.traits.searches
    )
    ids = {spec.id for spec in stages}
    deliveries = tuple(delivery for delivery in plan.deliveries if delivery.stage_id in ids)
    return LockUpdate(Plan(stages, deliveries, plan.origins), updated, tuple(uncovered))


def run_update(
    lock: Lock, plan: Plan, store: LocalStore, run: Callable[[Plan], RunReport]
) -> LockUpdate | RunReport:
    """Find the kernels of the models, and return the plan that builds them; the report when that failed."""
    # kernels are those of the locked choices
    stages = (spec for spec in plan.stages if spec.stage != choose.NAME)
    plan = plan._replace(
        stages=tuple(_reuse_searched(lock, spec, store, (choose.NAME,)) for spec in stages)
    )
    report = run(select_task_stages(plan))
    if report.exit_code:
        return report
    state = PlanState(store)
    state.decide_all(select_task_stages(plan))
    return update_plan(lock, plan, state)


def _read_tasks(spec: StageSpec, state: PlanState) -> list[Json]:
    digest = state.artifacts[spec.id].digests((extract_tasks.TASKS,))[extract_tasks.TASKS]
    tasks: list[Json] = json.loads(Path(state.store.blobs.verified_path(digest)).read_bytes())
    return tasks


def _match_kernels(
    tasks: Sequence[Json], target: LockedTarget | None
) -> tuple[dict[str, LockedKernel], list[str]]:
    """Return the kernels of a model by workload, as locked where they are, and the names of the others."""
    locked: Mapping[str, LockedKernel] = target.kernels if target else {}
    kernels: dict[str, LockedKernel] = {}
    missing: list[str] = []
    for task in sorted(tasks, key=lambda task: str(task["key"])):
        fields = {"names": task["names"], "calls": task["weight"]}
        kernel = locked.get(task["key"])
        if kernel is None and task["tunable"]:
            missing += task["names"][:1]
        kernels[task["key"]] = (
            kernel.model_copy(update=fields) if kernel else LockedKernel(**fields)
        )
    return kernels, sorted(missing)


def _describe_target(spec: StageSpec, plan: Plan) -> LockedTarget:
    """Return a target that no lock file has, from what its model was lowered for."""
    needed = {need.stage_id for need in spec.needs}
    (lowered,) = (s for s in plan.stages if s.id in needed and s.stage == lower.NAME)
    return LockedTarget(tvm=lowered.settings["target"], cores=1)


def _with_kernels(
    recipe: LockedRecipe | None,
    spec: StageSpec,
    target: LockedTarget,
    kernels: dict[str, LockedKernel],
    *,
    complete: bool,
) -> LockedRecipe:
    """Return a locked recipe with the kernels of one target.

    Their share of the time is unknown if some are new.
    """
    measured = target.measured if complete else Measurements()
    entry = target.model_copy(update={"kernels": kernels, "measured": measured})
    if recipe is None:
        recipe = LockedRecipe(recipe="", version="", stages={}, targets={})
    return recipe.model_copy(update={"targets": {**recipe.targets, spec.target: entry}})


def _reuse_searched(
    lock: Lock, spec: StageSpec, store: LocalStore, makers: Collection[str]
) -> StageSpec:
    """Return a stage that reads what a lock file has in place of what some searches choose."""
    searched = [need for need in spec.needs if need.maker in makers]
    files = tuple(_write_searched(lock, spec, need, store) for need in searched)
    needs = tuple(need for need in spec.needs if need not in searched)
    return spec._replace(files=(*spec.files, *files), needs=needs)


def _write_searched(lock: Lock, spec: StageSpec, need: Need, store: LocalStore) -> InputFile:
    target_name = need.stage_id.partition("/")[2]
    recipe = lock.recipes.get(spec.recipe)
    target = recipe.targets.get(target_name) if recipe else None
    name = f"{spec.recipe}+{need.stage}+{target_name}"
    store.notes.write(chosen_text(need, target), "locked", name)
    role = f"{need.stage}/{chosen_file(need)}"
    return InputFile(role, str(Path(store.root, "locked", name)), str(lock.path))


# ---------------------------------------------------------------- a ledger with the schedules of a lock file


SUFFIXES: Final = (".yaml", ".yml")
"""The ends of the names of lock files: trial packs have others."""

_TVM: Final = "apache-tvm"
_DEVICE: Final = {"kind": "cpu", "class": "the machine of a lock file"}
_US: Final = 1e-6


def import_lock(
    path: Path, root: Path, machine_class: MachineClass, checker: TraceCheck | None = None
) -> ImportResult:
    """Add the schedules of a lock file to a ledger, as trials of another device.

    The `checker` applies each trace to its kernel first; without one, that is left to the tuning.

    Raises:
        RecipeError: when it is not a valid lock file.
        UsageError: when it has no schedules that could be used with this machine's TVM.
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
    """Yield the targets whose kernels run on a CPU: only there are other devices starting points."""
    for recipe in lock.recipes.values():
        for target in recipe.targets.values():
            if backend_for(target.tvm).RUNS_ON_HOST_CPU:
                yield target


def _describe(target: LockedTarget, tvm: str) -> TargetDescription:
    """Return the target as a search knows it: with the number of threads that kernels run on."""
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
                trial = _make_trial(kernel, kernel.tuned_us, tvm, when)
                yield ImportedWorkload(key, workload, description, records=[trial])


def _make_trial(kernel: LockedKernel, tuned_us: float, tvm: str, when: str) -> Trial:
    return Trial(
        id=kernel.trial,
        trace=json.loads(kernel.trace),
        run_secs=(tuned_us * _US,),
        failure=None,
        when=when,
        tvm=tvm,
        host={"model": _DEVICE["class"]},
        load=(),
        seed=0,
    )
