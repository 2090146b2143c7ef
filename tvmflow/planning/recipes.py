"""Loads recipes with their pipelines, and reports all mistakes of one together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import RECIPE, find_mismatch
from tvmflow.core.named_files import is_file, is_folder, missing_file_text
from tvmflow.frontends import FRONTENDS
from tvmflow.planning.pipelines import Pipeline, load_pipeline, missing_pipeline_text
from tvmflow.recipe import Recipe
from tvmflow.recipe.validation import validate
from tvmflow.recipe.yaml_reader import Document, Loc, Problem, read_yaml
from tvmflow.store.addresses import is_address

_log = logging.getLogger(__name__)


class LoadedRecipe(NamedTuple):
    """A recipe with its pipeline and positions.

    Attributes:
        recipe: The recipe.
        path: Its file.
        where: Returns `file:line:column` of a field: `where("targets", 0)`.
        read: The files that all of this was read from.
        pipeline: The pipeline that the recipe names.
    """

    recipe: Recipe
    path: Path
    where: Callable[..., str]
    read: tuple[Path, ...]
    pipeline: Pipeline


def load_recipe(path: Path) -> LoadedRecipe:
    """Return the recipe in a file.

    Raises:
        RecipeError: with all of its mistakes, each `file:line:column: field: problem`.
    """
    if mismatch := find_mismatch(path, RECIPE):
        raise RecipeError(mismatch.text, fix=mismatch.fix)
    document = read_yaml(path)
    recipe, problems = validate(document, Recipe)
    problems += _missing_files(document)
    if recipe is None or problems:
        raise document.error(problems)
    pipeline = load_pipeline(recipe.pipeline, path.parent)
    _log.debug("%s: model of kind %s, pipeline %s", path, recipe.model.kind, pipeline.path)
    return LoadedRecipe(
        recipe=recipe,
        path=path,
        where=document.where,
        read=(path, pipeline.path),
        pipeline=pipeline,
    )


def _missing_files(document: Document) -> Iterator[Problem]:
    """Give a problem for every file that the recipe names and that does not exist.

    Reads the document, which need not be a valid recipe, so that missing files are reported
    together with other mistakes.
    """
    base = document.path.parent
    model = document.value_at("model")
    for frontend in FRONTENDS.values() if isinstance(model, dict) else ():
        for missing in frontend.find_missing_files(model, base):
            yield document.problem(missing.text, "model", *missing.field)
    operators = document.value_at("operators")
    for index, name in enumerate(operators if isinstance(operators, list) else ()):
        if isinstance(name, str) and name and not is_file(base / name):
            is_url = "://" in name
            text = "must be a file, not a URL" if is_url else missing_file_text(base / name)
            yield document.problem(text, "operators", index)
    yield from _missing_data(document)
    labels = document.value_at("labels")
    if isinstance(labels, str) and labels and not is_file(base / labels):
        yield document.problem(missing_file_text(base / labels), "labels")
    pipeline = document.value_at("pipeline")
    text = missing_pipeline_text(pipeline, base) if isinstance(pipeline, str) and pipeline else ""
    if text:
        yield document.problem(text, "pipeline")


def _missing_data(document: Document) -> Iterator[Problem]:
    """Check `verify.data` of the recipe, and of its variants and targets."""
    targets, variants = document.value_at("targets"), document.value_at("variants")
    count = len(targets) if isinstance(targets, list) else 0
    owners: list[Loc] = [(), *(("targets", index) for index in range(count))]
    owners += [("variants", name) for name in variants] if isinstance(variants, dict) else []
    for owner in owners:
        loc: Loc = (*owner, "verify", "data")
        data, base = document.value_at(*loc), document.path.parent
        if isinstance(data, str) and data and not (is_file(base / data) or is_folder(base / data)):
            is_url = is_address(data)
            text = "must be a file, not a URL" if is_url else missing_file_text(base / data)
            yield document.problem(text, *loc)
