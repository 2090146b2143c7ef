"""Locked runs: a plan that searches nothing, and must reproduce the outputs in a lock file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.canonical_json import canonical
from tvmflow.core.errors import RecipeError
from tvmflow.core.files import hash_file
from tvmflow.core.keys import list_changes, stage_key
from tvmflow.core.types import Delivery, InputFile, Json, Need, Plan, StageSpec
from tvmflow.planning.decisions import PlanState
from tvmflow.recipe.lock_file import Lock, LockedRecipe, LockedStage
from tvmflow.stages import STAGES, extract_tasks, pick_best
from tvmflow.store.local import LocalStore
from tvmflow.tuning.roofline import render_roofline

LOCKED: Final = "locked"
"""The folder of a store with the schedules that lock files choose, each file named by its digest."""

_log = logging.getLogger(__name__)

_FIX = "write the lock file again with `tvmflow lock`, or restore what it records"


def locked_settings(spec: StageSpec) -> dict[str, Json]:
    """Return the settings of a stage that a lock file records, as plain values in a stable order."""
    locked = {
        name: value
        for name, value in spec.settings.items()
        if name not in spec.traits.unlocked_settings
    }
    plain: dict[str, Json] = json.loads(canonical(locked))
    return plain


def enforce_lock(lock: Lock, plan: Plan, state: PlanState, store: LocalStore) -> Plan:
    """Return the plan without its search, each stage pinned to the outputs in the lock file.

    The chosen schedules in the lock file are written into the store, where `build` reads them.

    The chosen schedules are written into the store.

    Raises:
        RecipeError: with every difference in settings, sources, packages and platform.
    """
    specs = [spec for spec in plan.stages if not spec.traits.searches]
    problems = _find_problems(lock, specs, state)
    if problems:
        raise RecipeError(problems, fix=_FIX)
    stages = tuple(_pin(lock, spec, store) for spec in specs)
    _log.debug("%s: %d of %d stages are pinned", lock.path, len(stages), len(plan.stages))
    ids = {spec.id for spec in stages}
    kept = (d if d.stage_id in ids else _pin_delivery(lock, d, store) for d in plan.deliveries)
    deliveries = tuple(delivery for delivery in kept if delivery is not None)
    origins = tuple(origin._replace(locked=True) for origin in plan.origins)
    return Plan(stages, deliveries, origins)


def _find_problems(lock: Lock, specs: list[StageSpec], state: PlanState) -> list[str]:
    missing = [spec for spec in specs if _find_locked(lock, spec) is None]
    problems = [f"{lock.path}: {spec.id} is not in this lock file" for spec in missing]
    reported: set[str] = set()
    for spec in specs:
        locked = _find_locked(lock, spec)
        for cause in _list_differences(lock, locked, spec, state) if locked else ():
            # Another version of a package changes every stage and is reported once.
            if cause not in reported:
                where = lock.where("recipes", spec.recipe, "stages", spec.label)
                problems.append(f"{where}: {spec.id} is not what was locked: {cause}")
            reported.add(cause)
    return problems


def _find_locked(lock: Lock, spec: StageSpec) -> LockedStage | None:
    recipe = lock.recipes.get(spec.recipe)
    return recipe.stages.get(spec.label) if recipe else None


def _list_differences(
    lock: Lock, locked: LockedStage, spec: StageSpec, state: PlanState
) -> list[str]:
    """Return how a stage differs from the locked one, and where the lock file contradicts itself."""
    before: dict[str, Json] = {
        "stage": spec.stage,
        "version": locked.version,
        "settings": locked.settings,
        "inputs": locked.inputs,
        "tools": {name: lock.file.tools.get(name, "(not in the lock file)") for name in spec.tools},
        "machine": lock.file.machine,
    }
    plain = spec._replace(settings=locked_settings(spec))
    inputs = {**state.digest_files(spec), **_locked_inputs(lock.recipes[spec.recipe], spec)}
    after = stage_key(plain, inputs, state.tool_identities(spec), state.machine).preimage
    return list_changes(before, after)


def _locked_inputs(recipe: LockedRecipe, spec: StageSpec) -> dict[str, str]:
    """Return the digests of the outputs of other stages that a stage reads, as the lock file has them."""
    inputs: dict[str, str] = {}
    for need in spec.needs:
        traits = STAGES[need.maker].TRAITS.run
        if traits.searches:
            # A lock file has the schedules that the search chose, and no outputs of the search.
            name = f"{need.stage}/{pick_best.CHOSEN}"
            inputs[name] = recipe.stages[spec.label].inputs.get(name, "")
        elif traits.is_locked:
            locked = recipe.stages.get(need.stage_id.partition(":")[2])
            outputs: Mapping[str, str] = locked.outputs if locked else {}
            names = need.files or tuple(outputs)
            # a stage has those of the files that it needs which the other one made
            inputs.update(
                {f"{need.stage}/{name}": outputs[name] for name in names if name in outputs}
            )
    return inputs


def _pin(lock: Lock, spec: StageSpec, store: LocalStore) -> StageSpec:
    """Return a stage with its locked outputs, and with the locked schedules in place of a search."""
    locked = lock.recipes[spec.recipe].stages[spec.label]
    searched = [need for need in spec.needs if STAGES[need.maker].TRAITS.run.searches]
    schedules = tuple(_write_schedules(lock, spec, need, locked, store) for need in searched)
    return spec._replace(
        files=(*spec.files, *schedules),
        needs=tuple(need for need in spec.needs if need not in searched),
        pinned=tuple(locked.outputs.items()),
    )


def _pin_delivery(lock: Lock, delivery: Delivery, store: LocalStore) -> Delivery | None:
    """Return the delivery of a chart that a search made, drawn from the figures in the lock file.

    Return None when the lock file has no such figures, as those of earlier versions.
    """
    target_name = delivery.stage_id.partition("/")[2]
    target = lock.recipes[delivery.recipe].targets.get(target_name)
    kernels = target.measured_kernels if target else []
    if target is None or not any(kernel.flops for kernel in kernels):
        return None
    path = store.blobs.temporary_path()
    Path(path).write_text(render_roofline(kernels, target.peak_gflops), encoding="utf-8")
    digest = store.blobs.add(path)
    # Whatever is tuned has had its workloads extracted.
    return delivery._replace(
        stage_id=f"{delivery.recipe}:{extract_tasks.NAME}/{target_name}",
        known_digests=((pick_best.ROOFLINE, digest),),
    )


def _write_schedules(
    lock: Lock, spec: StageSpec, need: Need, locked: LockedStage, store: LocalStore
) -> InputFile:
    """Write the file of chosen schedules as `pick_best` wrote it when the lock file was made."""
    role = f"{need.stage}/{pick_best.CHOSEN}"
    target_name = need.stage_id.partition("/")[2]
    target = lock.recipes[spec.recipe].targets.get(target_name)
    digest = locked.inputs[role]
    store.notes.write(pick_best.choice_text(target.choice if target else {}), LOCKED, digest)
    path = Path(store.root, LOCKED, digest)
    where = lock.where("recipes", spec.recipe, "targets", target_name, "kernels")
    if hash_file(str(path)) != digest:
        raise RecipeError(
            f"{where}: the schedules of {spec.recipe} for {target_name} are not those that "
            f"{spec.id} was built with",
            fix="take one side of the merge completely, or write the lock file again with `tvmflow lock`",
        )
    return InputFile(role, str(path), where)
