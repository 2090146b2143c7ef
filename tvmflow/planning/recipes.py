"""Loads recipes with their pipelines, and resolves what their plans depend on.

All mistakes of one are reported together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import RECIPE, find_mismatch
from tvmflow.core.named_files import is_file, is_folder, missing_file_text
from tvmflow.core.types import InputFile
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import InputProblem
from tvmflow.planning.pipelines import (
    Pipeline,
    PipelineFile,
    load_pipeline,
    missing_pipeline_text,
)
from tvmflow.recipe import Recipe
from tvmflow.recipe.validation import validate
from tvmflow.recipe.yaml_files import Document, Loc, Problem, read_yaml
from tvmflow.store.addresses import is_address
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

_log = logging.getLogger(__name__)


class LoadedRecipe(NamedTuple):
    """A recipe with its pipeline and positions.

    `where` returns `file:line:column` of a field: `where("targets", 0)`; `read` has the files that all of it is from.
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
    recipe, problems = validate(document, Recipe, PipelineFile, "a pipeline")
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
    """Check `verify.data` and `quantize.data` of the recipe, and of its variants and targets."""
    targets, variants = document.value_at("targets"), document.value_at("variants")
    count = len(targets) if isinstance(targets, list) else 0
    owners: list[Loc] = [(), *(("targets", index) for index in range(count))]
    owners += [("variants", name) for name in variants] if isinstance(variants, dict) else []
    for owner in owners:
        for section in ("verify", "quantize"):
            loc: Loc = (*owner, section, "data")
            data, base = document.value_at(*loc), document.path.parent
            is_named = isinstance(data, str) and data != ""
            if is_named and not (is_file(base / data) or is_folder(base / data)):
                is_url = is_address(data)
                text = "must be a file, not a URL" if is_url else missing_file_text(base / data)
                yield document.problem(text, *loc)


# ---------------------------------------------------------------- with all that a plan depends on


Target = ResolvedTarget | PartitionedTarget


class _Fields(NamedTuple):
    loaded: LoadedRecipe
    stages: tuple[str, ...]
    targets: tuple[Target, ...]
    model_files: tuple[InputFile, ...]
    variant: str = ""
    pipeline: str = ""
    operator_files: tuple[InputFile, ...] = ()
    images: Mapping[str, tuple[str, ...]] = {}


class PlannedRecipe(_Fields):
    """A recipe, or a variant of it, with all that its plan depends on.

    Attributes:
        loaded: The recipe with its positions.
        stages: The stages of its pipeline, in order.
        targets: Its resolved targets.
        variant: The name of the variant; empty for the recipe itself.
        pipeline: The file of the pipeline that takes the place of the recipe's own; empty for none.
        operator_files: The files of its own operators.
        images: The files of each `verify.data` that names images, by their paths in its folder.
    """

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe without per-target overrides."""
        recipe = self.loaded.recipe
        return recipe.for_variant(self.variant) if self.variant else recipe

    def input_loc(self, problem: InputProblem) -> tuple[str, ...]:
        """Return the path of an input that does not fit, in the variant where that sets the field."""
        if self.variant:
            inputs = self.loaded.recipe.variants[self.variant].inputs
            spec = inputs.get(problem.input)
            if spec and (not problem.field or problem.field in spec.model_fields_set):
                return ("variants", self.variant, *problem.loc)
        return problem.loc

    def setting_loc(self, section: str, field: str) -> tuple[str, ...]:
        """Return the path of a setting without per-target overrides, in the variant where that sets it."""
        if self.variant:
            overrides = getattr(self.loaded.recipe.variants[self.variant], section)
            if overrides is not None and field in overrides.model_fields_set:
                return ("variants", self.variant, section, field)
        return (section, field)

    @property
    def partitioned(self) -> tuple[PartitionedTarget, ...]:
        """The targets that have several parts."""
        return tuple(target for target in self.targets if isinstance(target, PartitionedTarget))

    def recipe_for(self, target: Target | None) -> Recipe:
        """Return the recipe with the overrides of a target, or of a part of one."""
        if target is None:
            return self.recipe
        if target.name not in self._recipes:
            self._recipes[target.name] = self.recipe.for_target(target.name)
        return self._recipes[target.name]

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        # Planning reads each many times, and making one takes as long as all else about a stage.
        return {}

    def where(self, target: Target, *loc: str | int) -> str:
        """Return `file:line:column` of a target in the recipe, of a part of one, or of a field in it."""
        return self.loaded.where("targets", *self._positions.get(target.name, ()), *loc)

    def data_position(self, target: Target | None) -> str:
        """Return `file:line:column` of the `verify.data` that a target has."""
        if target and self.recipe_for(target).verify.data != self.recipe.verify.data:
            return self.where(target, "verify", "data")
        return self.loaded.where(*self.setting_loc("verify", "data"))

    @cached_property
    def _positions(self) -> dict[str, tuple[str | int, ...]]:
        """The position of each target, and of each part, in the list of targets."""
        positions: dict[str, tuple[str | int, ...]] = {}
        for index, spec in enumerate(self.loaded.recipe.targets):
            for part_index, name in enumerate(spec.build_targets()):
                part = ("parts", part_index) if spec.parts else ()
                positions.setdefault(name, (index, *part))
            positions[spec.name] = (index,)
        return positions


def resolved_targets(target: Target) -> tuple[ResolvedTarget, ...]:
    """Return the targets that code is built for: the target itself, or its parts."""
    return target.parts if isinstance(target, PartitionedTarget) else (target,)
