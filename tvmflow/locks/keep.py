"""Holds a plan to a lock: nothing is searched, everything that differs is refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tvmflow.decide import Survey
from tvmflow.errors import RecipeError
from tvmflow.keys import difference, key_of
from tvmflow.locks._file import FOR_CHECKS, SEARCHING, Lock, LockedRecipe, LockedStage
from tvmflow.locks.make import settings_of
from tvmflow.stages import pick_best
from tvmflow.stores.local import LocalStore, hash_file
from tvmflow.values import InputFile, Json, Need, Plan, StageSpec

_FIX = "make the lock again with `tvmflow lock`, or go back to what it names"


def keep_to(lock: Lock, plan: Plan, survey: Survey, store: LocalStore) -> Plan:
    """The plan without its search, each stage pinned to what the lock says it gives.

    Raises RecipeError with everything in which the plan is not what was locked: settings, sources,
    packages, the machine; then nothing was run. The choice of schedules is written into the store.
    """
    kept = [spec for spec in plan.stages if spec.stage not in SEARCHING]
    known = [spec for spec in kept if _locked(lock, spec)]
    problems = [f"{lock.path}: {spec.id} is not in this lock" for spec in kept if spec not in known]
    told: set[str] = set()
    for spec in known:
        for cause in _causes(lock, spec, survey):
            # a package that is another one changes every stage
            if cause not in told:
                where = lock.where("recipes", spec.recipe, "stages", spec.label)
                problems.append(f"{where}: {spec.id} is not what was locked: {cause}")
            told.add(cause)
    if problems:
        raise RecipeError(problems, fix=_FIX)
    stages = tuple(_kept(lock, spec, store) for spec in kept)
    ids = {spec.id for spec in stages}
    return Plan(stages, tuple(each for each in plan.deliveries if each.stage_id in ids))


def _locked(lock: Lock, spec: StageSpec) -> LockedStage | None:
    recipe = lock.recipes.get(spec.recipe)
    return recipe.stages.get(spec.label) if recipe else None


def _causes(lock: Lock, spec: StageSpec, survey: Survey) -> Iterator[str]:
    """In what a stage is not the one that was locked, and where the lock contradicts itself."""
    recipe, locked = lock.recipes[spec.recipe], lock.recipes[spec.recipe].stages[spec.label]
    before: dict[str, Json] = {
        "stage": spec.stage,
        "version": locked.version,
        "settings": locked.settings,
        "inputs": locked.inputs,
        "tools": {name: lock.file.tools.get(name, "absent") for name in spec.tools},
        "machine": lock.file.machine,
    }
    plain = spec._replace(settings=settings_of(spec.stage, spec.settings))
    inputs = {**survey.outside(spec), **_given(recipe, spec)}
    after = key_of(plain, inputs, survey.tools(spec), survey.machine).preimage
    yield from difference(before, after)


def _given(recipe: LockedRecipe, spec: StageSpec) -> dict[str, str]:
    """What the stages before this one give, as the lock has it; `pick_best` is its choice of schedules."""
    found: dict[str, str] = {}
    for need in spec.needs:
        label = need.stage_id.partition(":")[2]
        if need.maker in FOR_CHECKS:
            continue
        if need.maker in SEARCHING:
            digest = recipe.stages[spec.label].inputs.get(f"{need.stage}/{pick_best.CHOSEN}", "")
            found[f"{need.stage}/{pick_best.CHOSEN}"] = digest
            continue
        stage = recipe.stages.get(label)
        outputs: Mapping[str, str] = stage.outputs if stage else {}
        names = need.files or tuple(outputs)
        found.update({f"{need.stage}/{name}": outputs.get(name, "") for name in names})
    return found


def _kept(lock: Lock, spec: StageSpec, store: LocalStore) -> StageSpec:
    """The stage with what it must give, and with the lock's schedules for those that a search would give."""
    locked = lock.recipes[spec.recipe].stages[spec.label]
    searched = [need for need in spec.needs if need.maker in SEARCHING]
    chosen = tuple(_choice(lock, spec, need, locked, store) for need in searched)
    return spec._replace(
        files=(*spec.files, *chosen),
        needs=tuple(need for need in spec.needs if need not in searched),
        pinned=tuple(locked.outputs.items()),
    )


def _choice(
    lock: Lock, spec: StageSpec, need: Need, locked: LockedStage, store: LocalStore
) -> InputFile:
    """The file that `pick_best` wrote when this was locked, written again. Raises RecipeError when it is another one."""
    role = f"{need.stage}/{pick_best.CHOSEN}"
    target = need.stage_id.partition("/")[2]
    where = lock.where("recipes", spec.recipe, "targets", target, "kernels")
    machine = lock.recipes[spec.recipe].targets.get(target)
    digest = locked.inputs[role]
    store.write_note(pick_best.choice_text(machine.choice if machine else {}), "locked", digest)
    path = Path(store.root, "locked", digest)
    if hash_file(str(path)) != digest:
        raise RecipeError(
            f"{where}: the schedules of {spec.recipe} for {target} are not those that {spec.id} was built with",
            fix="take one side of the merge as a whole, or make the lock again with `tvmflow lock`",
        )
    return InputFile(role, str(path), where)
