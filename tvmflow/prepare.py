"""From the words of a command line to a plan: recipes and pipelines read, targets resolved, sources named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tvmflow.decide import Survey
from tvmflow.errors import RecipeError, UsageError
from tvmflow.frontends import FRONTENDS
from tvmflow.locks import Lock, keep_to, read_lock
from tvmflow.plan import make_plan
from tvmflow.planned import PlannedRecipe, Target
from tvmflow.recipe import (
    LoadedRecipe,
    Machine,
    Pipeline,
    Recipe,
    TargetSpec,
    is_pipeline,
    load_pipeline,
    load_recipe,
    pipeline_candidates,
)
from tvmflow.stages import STAGES
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.targets import toolchain
from tvmflow.targets.facts import facts_of
from tvmflow.targets.host import read_host
from tvmflow.targets.resolve import JoinedTarget, ResolvedTarget, resolve
from tvmflow.values import Json, Plan
from tvmflow.yaml_positions import dotted


class Asked(NamedTuple):
    """What a command line asks for."""

    recipes: tuple[str, ...]
    pipeline: str | None = None
    targets: tuple[str, ...] = ()
    until: str | None = None
    variants: tuple[str, ...] = ()
    lock: str | None = None


class Prepared(NamedTuple):
    """A plan, the recipes that it is for, and every file that was read to make it.

    `pipeline` is the one that was asked for by itself, with its recipes.
    """

    plan: Plan
    recipes: tuple[PlannedRecipe, ...]
    reads: tuple[str, ...]
    pipeline: Pipeline | None = None


def prepare(asked: Asked, store: LocalStore) -> Prepared:
    """Plan what is asked for. All mistakes in all recipes are reported together."""
    alone = _pipeline(asked)
    loaded = _of_pipeline(alone) if alone else _load_all(asked.recipes)
    _check_words(asked, loaded)
    lock = read_lock(Path(asked.lock)) if asked.lock else None
    reads = [lock.path] if lock else []
    planned = []
    problems: list[str] = []
    for entry in loaded:
        pipeline = load_pipeline(asked.pipeline) if asked.pipeline else entry.pipeline
        # a pipeline of that name may appear where it is looked for first
        named = asked.pipeline or entry.recipe.pipeline
        reads += [*entry.read, pipeline.path, *pipeline_candidates(named, entry.path.parent)]
        try:
            files = _model_files(entry)
            toolchains, looked_at = _toolchains(entry, asked.targets, store)
            reads += looked_at
            targets = _resolve_targets(entry, asked.targets, toolchains, store, lock)
        except RecipeError as error:
            problems += error.problems
            continue
        # which further files a model has is read from the model itself
        reads += [Path(file.path) for file in files if file.role == "model" and file.path]
        stages = _cut(pipeline.stages, asked.until)
        variants = [v for v in entry.recipe.variants if v in asked.variants or not asked.variants]
        planned += [PlannedRecipe(entry, stages, targets, files, each) for each in variants or [""]]
    if problems:
        raise RecipeError(problems)
    plan = make_plan(planned)
    if lock:
        plan = keep_to(lock, plan, Survey(store, FileDigests(store)), store)
    return Prepared(plan, tuple(planned), tuple(str(path.absolute()) for path in reads), alone)


def _pipeline(asked: Asked) -> Pipeline | None:
    """The pipeline that the command line names in place of recipes. Raises UsageError, RecipeError."""
    named = [path for path in asked.recipes if is_pipeline(Path(path))]
    if not named:
        return None
    if len(asked.recipes) > 1 or asked.pipeline:
        raise UsageError(
            f"{named[0]} is a pipeline, and stands with others",
            fix="run it by itself, or give its name with --pipeline",
        )
    pipeline = load_pipeline(named[0])
    if not pipeline.recipes:
        raise UsageError(
            f"{named[0]} is a pipeline that names no recipes",
            fix=f"give a recipe, and --pipeline {named[0]}",
        )
    return pipeline


def _of_pipeline(pipeline: Pipeline) -> list[LoadedRecipe]:
    """Its recipes, with its stages, and with its targets where it has some."""
    loaded = []
    for entry in _load_all([str(path) for path in pipeline.recipes]):
        read = (*entry.read, pipeline.path)
        entry = entry._replace(pipeline=pipeline, read=read)
        loaded.append(_with_targets(entry, pipeline) if pipeline.targets else entry)
    return loaded


def _with_targets(entry: LoadedRecipe, pipeline: Pipeline) -> LoadedRecipe:
    def where(*loc: str | int) -> str:
        place = pipeline.where if loc[:1] == ("targets",) and pipeline.where else entry.where
        return place(*loc)

    fields = {name: getattr(entry.recipe, name) for name in entry.recipe.model_fields_set}
    try:
        recipe = Recipe.model_validate({**fields, "targets": pipeline.targets})
    except ValidationError as error:
        text = error.errors()[0]["ctx"]["text"]
        raise RecipeError(
            f"{where('targets')}: targets: with these, {entry.path} is wrong: {text}"
        ) from None
    return entry._replace(recipe=recipe, where=where)


def _load_all(paths: Sequence[str]) -> list[LoadedRecipe]:
    loaded, problems = [], []
    for path in dict.fromkeys(paths):
        try:
            loaded.append(load_recipe(Path(path)))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return loaded


def _check_words(asked: Asked, loaded: Sequence[LoadedRecipe]) -> None:
    """Stages and targets that were named on the command line must exist."""
    if asked.until is not None:
        _require("--until", asked.until, STAGES)
    names = {target.name for entry in loaded for target in entry.recipe.targets}
    for name in asked.targets:
        _require("--target", name, names)
    variants = {variant for entry in loaded for variant in entry.recipe.variants}
    for name in asked.variants:
        _require("--variant", name, variants)


def _require(option: str, name: str, valid: Sequence[str] | set[str] | Mapping[str, Any]) -> None:
    if name in valid:
        return
    near = difflib.get_close_matches(name, list(valid), 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"{option} {name}: there is no such name",
        fix=f"{hint}there are: {', '.join(sorted(valid))}",
    )


def _cut(stages: tuple[str, ...], until: str | None) -> tuple[str, ...]:
    """The stages up to `until`, or all when the pipeline does not have it."""
    return stages[: stages.index(until) + 1] if until in stages else stages


def _model_files(entry: LoadedRecipe) -> Any:
    model = entry.recipe.model

    def where(*path: str | int) -> str:
        return entry.where("model", *path)

    base = Path(entry.path).parent.absolute()
    return FRONTENDS[model.kind].files(model, base, where)


# ---------------------------------------------------------------- targets


def _resolve_targets(
    entry: LoadedRecipe,
    only: tuple[str, ...],
    toolchains: Mapping[str, Json],
    store: LocalStore,
    lock: Lock | None,
) -> tuple[Target, ...]:
    """The recipe's targets (those in `only`, if any are named there) as machines.

    `host` is the machine that it was when it was locked, if there is a lock.
    """
    host = read_host()
    wanted = _wanted(entry, only)
    mappings = [
        machine.tvm_mapping() or _locked_host(lock, entry, name)
        for name, (machine, _) in wanted.items()
    ]
    answers = facts_of(store, mappings, host)
    problems = []
    resolved = {}
    for (name, (machine, loc)), mapping, fact in zip(
        wanted.items(), mappings, answers, strict=True
    ):
        if "error" in fact:
            problems.append(
                f"{entry.where(*loc)}: targets: {fact['error']}{_nearest(mapping, fact['near'])}"
            )
        else:
            remote = machine.remote and machine.remote.model_dump(mode="json", exclude_none=True)
            more = (remote, toolchains.get(name))
            resolved[name] = resolve(name, mapping, machine.num_cores, host, fact, *more)
    if problems:
        raise RecipeError(problems)
    return tuple(
        _joined(spec, resolved) if spec.parts else resolved[spec.name]
        for spec in entry.recipe.targets
        if not only or spec.name in only
    )


def _locked_host(lock: Lock | None, entry: LoadedRecipe, name: str) -> Mapping[str, Json] | None:
    if lock is None:
        return None
    recipe = entry.recipe
    # one machine for all variants
    names = [recipe.name, *(recipe.variant(each).name for each in recipe.variants)]
    locked = lock.target(names, name)
    return locked.tvm if locked else None


def _joined(spec: TargetSpec, resolved: Mapping[str, ResolvedTarget]) -> JoinedTarget:
    machines: list[ResolvedTarget] = []
    given: tuple[str, ...] = ()
    for name, part in zip(spec.machines(), spec.parts, strict=True):
        machines.append(resolved[name]._replace(whole=spec.name, given=given, until=part.until))
        given += part.until
    return JoinedTarget(spec.name, tuple(machines))


def _wanted(
    entry: LoadedRecipe, only: tuple[str, ...]
) -> dict[str, tuple[Machine, tuple[str | int, ...]]]:
    """Every machine that is built for, by name, and its place in the recipe."""
    found: dict[str, tuple[Machine, tuple[str | int, ...]]] = {}
    for index, spec in enumerate(entry.recipe.targets):
        if only and spec.name not in only:
            continue
        for at, (name, machine) in enumerate(spec.machines().items()):
            below = ("parts", at) if spec.parts else ()
            found[name] = (machine, ("targets", index, *below))
    return found


def _nearest(mapping: Mapping[str, Json] | None, names: list[str]) -> str:
    near = difflib.get_close_matches(str((mapping or {}).get("mcpu", "")), names, 1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _toolchains(
    entry: LoadedRecipe, only: tuple[str, ...], store: LocalStore
) -> tuple[dict[str, Json], list[Path]]:
    """The identity of each target's own linker, and every file by which another one would be found."""
    found: dict[str, Json] = {}
    looked_at: list[Path] = []
    problems = []
    for name, (machine, at) in _wanted(entry, only).items():
        if machine.toolchain is None:
            continue
        linker, loc = machine.toolchain.linker, (*at, "toolchain", "linker")
        try:
            program = toolchain.find(linker)
        except toolchain.Missing:
            problems.append(
                f"{entry.where(*loc)}: {dotted(loc)}: there is no program '{linker}' on PATH; "
                f"{toolchain.INSTALL}"
            )
            continue
        looked_at += [Path(place) for place in program.looked_at]
        found[name] = _identity(linker, machine.toolchain.flags, program.path, store)
    if problems:
        raise RecipeError(problems)
    return found, looked_at


def _identity(linker: str, flags: Sequence[str], path: str, store: LocalStore) -> Json:
    """Who a linker is; what it says of its version is asked once for each program."""
    digest = FileDigests(store).digest(path)
    note = store.read_note("facts", f"linker-{digest}")
    if note is None:
        note = toolchain.version(path)
        store.write_note(note, "facts", f"linker-{digest}")
    return toolchain.identity(linker, flags, digest, note)
