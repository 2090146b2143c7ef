"""The request of a command line, and the recipes and pipelines that it names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tvmflow.core.errors import RecipeError, UsageError, merge_recipe_errors
from tvmflow.core.schema import ClosedModel, first_field_error
from tvmflow.core.text import nearest
from tvmflow.planning.pipelines import Pipeline, is_pipeline, load_pipeline
from tvmflow.planning.recipes import LoadedRecipe, load_recipe
from tvmflow.recipe import BuildTarget, Recipe, TargetSpec
from tvmflow.recipe.tune import TuneOverrides
from tvmflow.stages import pipeline_stages

_log = logging.getLogger(__name__)


class RunRequest(NamedTuple):
    """The request of a command line.

    Attributes:
        recipes: The paths of recipes, or of one pipeline that names recipes.
        pipeline: Another pipeline than the recipes name.
        targets: Only these targets; empty for all.
        until: The last stage to run.
        variants: Only these variants; empty for all.
        lock: The lock file of a locked run.
        updates_lock: The lock file names targets and schedules, and is not enforced: it is written again.
        minutes: How long each target is searched, in place of the budgets in the recipes; 0 for no search.
        force: The names of stages that run also if they are up to date.
    """

    recipes: tuple[str, ...]
    pipeline: str | None = None
    targets: tuple[str, ...] = ()
    until: str | None = None
    variants: tuple[str, ...] = ()
    lock: str | None = None
    updates_lock: bool = False
    minutes: float | None = None
    force: tuple[str, ...] = ()


def load_request(request: RunRequest) -> tuple[list[LoadedRecipe], Pipeline | None]:
    """Return all recipes of a request, and the pipeline that it names in place of recipes.

    Raises:
        RecipeError: with all mistakes in all recipes and pipelines.
        UsageError: when the request names something that does not exist.
    """
    if request.minutes is not None and request.lock and not request.updates_lock:
        raise UsageError(
            "--minutes cannot be combined with --locked: a locked run searches nothing",
            fix="leave out one of them",
        )
    pipeline = _find_pipeline(request)
    recipes = _load_recipes(map(str, pipeline.recipes) if pipeline else request.recipes)
    if pipeline:
        recipes = [_with_pipeline(entry, pipeline) for entry in recipes]
    if request.minutes is not None:
        recipes = [_with_minutes(entry, request.minutes) for entry in recipes]
    _check_names(request, recipes)
    _log.debug("loaded %s", ", ".join(str(entry.path) for entry in recipes))
    return recipes, pipeline


def _find_pipeline(request: RunRequest) -> Pipeline | None:
    """Return the pipeline that the request names in place of recipes."""
    paths = [path for path in request.recipes if is_pipeline(Path(path))]
    if not paths:
        return None
    if len(request.recipes) > 1 or request.pipeline:
        raise UsageError(
            f"{paths[0]} is a pipeline and cannot be combined with recipes or --pipeline",
            fix="run it alone, or give its name with --pipeline",
        )
    pipeline = load_pipeline(paths[0])
    if not pipeline.recipes:
        raise UsageError(
            f"{paths[0]}: this pipeline names no recipes",
            fix=f"give a recipe, and --pipeline {paths[0]}",
        )
    return pipeline


def _load_recipes(paths: Iterable[str]) -> list[LoadedRecipe]:
    loaded, errors = [], []
    # a file that is named twice, whatever the way to its folder, is one recipe
    named: dict[Path, Path] = {}
    for path in map(Path, paths):
        named.setdefault(Path(os.path.realpath(path.parent), path.name), path)
    for path in named.values():
        try:
            loaded.append(load_recipe(path))
        except RecipeError as error:
            errors.append(error)
    if errors:
        raise merge_recipe_errors(errors)
    return loaded


def _with_pipeline(entry: LoadedRecipe, pipeline: Pipeline) -> LoadedRecipe:
    """Return a recipe with the stages of a pipeline, and with its targets where it has some."""
    entry = entry._replace(pipeline=pipeline, read=(*entry.read, pipeline.path))
    return _with_targets(entry, pipeline) if pipeline.targets else entry


def _with_targets(entry: LoadedRecipe, pipeline: Pipeline) -> LoadedRecipe:
    def where(*loc: str | int) -> str:
        find = pipeline.where if loc[:1] == ("targets",) and pipeline.where else entry.where
        return find(*loc)

    fields = {name: getattr(entry.recipe, name) for name in entry.recipe.model_fields_set}
    try:
        recipe = Recipe.model_validate({**fields, "targets": pipeline.targets})
    except ValidationError as error:
        text = first_field_error(error)[0]
        raise RecipeError(
            f"{where('targets')}: targets: with these targets, {entry.path} is not valid: {text}"
        ) from None
    return entry._replace(recipe=recipe, where=where)


def _with_minutes(entry: LoadedRecipe, minutes: float) -> LoadedRecipe:
    """Return a recipe whose search has another budget, for all of its targets and their parts."""
    budget = {"minutes": minutes} if minutes else {"trials": 0}
    fields = {name: getattr(entry.recipe, name) for name in entry.recipe.model_fields_set}
    fields["tune"] = {**_list_other_fields(entry.recipe.tune), **budget}
    fields["targets"] = tuple(map(_without_budget, entry.recipe.targets))
    try:
        return entry._replace(recipe=Recipe.model_validate(fields))
    except ValidationError as error:
        text = first_field_error(error)[0]
        raise UsageError(
            f"--minutes {minutes:g}: with this budget, {entry.path} is not valid: {text}"
        ) from None


def _list_other_fields(tune: ClosedModel) -> dict[str, Any]:
    """Return the fields of `tune`, or of overrides of it, that are set and no budget."""
    return {name: getattr(tune, name) for name in tune.model_fields_set - {"trials", "minutes"}}


def _without_budget(target: BuildTarget) -> BuildTarget:
    """Return a target, or a part, that has the budget of its recipe."""
    changes: dict[str, Any] = {}
    if target.tune is not None:
        overrides = _list_other_fields(target.tune)
        changes["tune"] = TuneOverrides.model_validate(overrides) if overrides else None
    if isinstance(target, TargetSpec) and target.parts:
        changes["parts"] = tuple(map(_without_budget, target.parts))
    return target.model_copy(update=changes)


def _check_names(request: RunRequest, recipes: Sequence[LoadedRecipe]) -> None:
    """Check that the stage, the targets and the variants of a request exist."""
    targets = {target.name for entry in recipes for target in entry.recipe.targets}
    variants = {variant for entry in recipes for variant in entry.recipe.variants}
    until = () if request.until is None else (request.until,)
    for option, names, valid in (
        ("--until", until, pipeline_stages()),
        ("--target", request.targets, targets),
        ("--variant", request.variants, variants),
    ):
        for name in names:
            if name not in valid:
                candidates = nearest(name, valid)
                hint = f"did you mean '{candidates[0]}'? " if candidates else ""
                known = f"there are: {', '.join(sorted(valid))}" if valid else "there are none"
                raise UsageError(f"{option} {name}: there is no such name", fix=hint + known)
