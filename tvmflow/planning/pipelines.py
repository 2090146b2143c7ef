"""Pipelines: YAML files that list stages in order, and, for a release, recipes and gates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import PIPELINE, find_mismatch
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.project import find_project, list_packaged_paths, shortest_path
from tvmflow.core.schema import (
    NAME_PATTERN,
    ClosedModel,
    FolderName,
    FormatVersion,
    field_error,
    one_of,
    published_schema,
    schema_enum,
    to_tuple,
)
from tvmflow.core.text import did_you_mean
from tvmflow.recipe import Recipe
from tvmflow.recipe.release import Release, Retune
from tvmflow.recipe.targets import TargetSpec, add_presets, check_unique, expand_preset
from tvmflow.recipe.validation import validate
from tvmflow.recipe.yaml_files import read_yaml
from tvmflow.stages import STAGES, export, pipeline_stages, required_stages, tune

_log = logging.getLogger(__name__)

_UniqueNames = Annotated[tuple[str, ...], BeforeValidator(to_tuple), AfterValidator(check_unique)]
_StageName = Annotated[str, one_of(pipeline_stages(), "a stage"), schema_enum(pipeline_stages())]


class Pipeline(NamedTuple):
    """The stages of a run in order; a pipeline that is run by itself also names recipes, and what follows.

    Attributes:
        name: Its name, for people.
        stages: Its stages, each after those that it needs.
        path: Its file.
        recipes: The recipes that it runs.
        targets: What they are built for in place of their own targets; none to keep those.
        release: The release that it makes.
        retune: The tuning budget that it spreads over the recipes.
        where: Returns `file:line:column` of a field.
    """

    name: str
    stages: tuple[str, ...]
    path: Path
    recipes: tuple[Path, ...] = ()
    targets: tuple[TargetSpec, ...] = ()
    release: Release | None = None
    retune: Retune | None = None
    where: Callable[..., str] | None = None


class PipelineFile(ClosedModel):
    """The stages of a run, in order."""

    pipeline: FormatVersion = Field(examples=[1], description="Version of the format: 1.")
    name: FolderName = Field(
        pattern=NAME_PATTERN,
        max_length=100,
        examples=["nightly"],
        description="Name of the pipeline.",
    )
    description: str = Field(default="", description="Purpose of the pipeline.")
    stages: Annotated[tuple[_StageName, ...], BeforeValidator(to_tuple)] = Field(
        default=pipeline_stages(),
        min_length=1,
        examples=[["import", "build", "export"]],
        description="Stages to run, each after the stages that it needs. Default: all, as in the pipeline `tune`.",
    )
    recipes: _UniqueNames = Field(
        default=(),
        examples=[["../digits.yaml"]],
        description="Recipes for `tvmflow run PIPELINE`, from the folder of this file.",
    )
    targets: Annotated[
        tuple[Annotated[TargetSpec, BeforeValidator(expand_preset)], ...], BeforeValidator(to_tuple)
    ] = Field(
        default=(),
        examples=[["host", "cortex-a72"]],
        description="Targets of all of these recipes, instead of their own.",
    )
    release: Release | None = Field(
        default=None,
        examples=[{"version": "1.2.0"}],
        description="Make a release of all deliveries: see [releases.md](releases.md).",
    )
    retune: Retune | None = Field(
        default=None,
        examples=[{"minutes": 60}],
        description="Distribute a tuning budget over the recipes: see [releases.md](releases.md).",
    )

    @model_validator(mode="after")
    def _check_alone(self) -> PipelineFile:
        for name in ("targets", "release", "retune"):
            if getattr(self, name) and not self.recipes:
                raise field_error("is for pipelines that name their recipes", name)
        if self.retune and tune.NAME not in self.stages:
            raise field_error(f"needs the stage '{tune.NAME}'", "retune")
        if self.release and export.NAME not in self.stages:
            raise field_error(f"needs the stage '{export.NAME}'", "release")
        return self

    @field_validator("stages")
    @classmethod
    def _check_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise field_error(f"'{name}' is listed twice", index)
            earlier, optional = value[:index], STAGES[name].TRAITS.optional_needs
            missing = [need for need in required_stages(name) if need not in earlier]
            missing += [need for need in optional if need in value and need not in earlier]
            if missing:
                # Its last need is the one closest to it.
                raise field_error(f"'{name}' needs '{missing[-1]}' before it", index)
        return value


def pipeline_schema() -> dict[str, Any]:
    """Return the JSON Schema of a pipeline, for editors. A target may also be the name of a preset."""
    schema = published_schema(PipelineFile, "pipeline")
    add_presets(schema["properties"]["targets"])
    return schema


def load_pipeline(name: str, base: Path = Path()) -> Pipeline:
    """Return a pipeline by its name, or from a file.

    Raises:
        RecipeError: when there is no such pipeline, or with all of its mistakes.
    """
    path = next(iter(_find_pipelines(name, base)), base / name)
    if mismatch := find_mismatch(path, PIPELINE):
        raise RecipeError(mismatch.text, fix=mismatch.fix)
    if problem := missing_pipeline_text(name, base):
        raise RecipeError(problem)
    document = read_yaml(path, fix="start with the line `pipeline: 1`")
    pipeline, problems = validate(document, PipelineFile, Recipe, "a recipe")
    if pipeline is None:
        raise document.error(problems)
    recipes = tuple(path.parent / recipe for recipe in pipeline.recipes)
    missing = [
        document.problem(missing_file_text(recipe), "recipes", index)
        for index, recipe in enumerate(recipes)
        if not is_file(recipe)
    ]
    if missing:
        raise document.error(missing)
    _log.debug("%s: stages %s", path, ", ".join(pipeline.stages))
    return Pipeline(
        name=pipeline.name,
        stages=pipeline.stages,
        path=path,
        recipes=recipes,
        targets=pipeline.targets,
        release=pipeline.release,
        retune=pipeline.retune,
        where=document.where,
    )


def is_pipeline(path: Path) -> bool:
    """Return whether a file is a pipeline and not a recipe, by the field that it begins with."""
    if not is_file(path):
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            fields = (line for line in lines if line.strip() and not line.lstrip().startswith("#"))
            return next(fields, "").startswith("pipeline:")
    except OSError:
        return False


def pipeline_candidates(name: str, base: Path = Path()) -> list[Path]:
    """Return the files that a pipeline may be read from, in order of precedence; not all of them exist."""
    if name.endswith((".yaml", ".yml")):
        return [base / name]
    return [folder / f"{name}.yaml" for folder in _pipeline_folders()]


def _find_pipelines(name: str, base: Path) -> list[Path]:
    """Return the candidates that exist; a file that is named by its path, whether it exists or not."""
    paths = pipeline_candidates(name, base)
    return paths if paths == [base / name] else [path for path in paths if is_file(path)]


def _pipeline_folders() -> list[Path]:
    """Return the folders of named pipelines.

    They are those of the current folder, the project, the installed package and the checkout.
    """
    project = Path(shortest_path(find_project().root))
    packaged = map(Path, list_packaged_paths("pipelines"))
    return list(dict.fromkeys([Path("pipelines"), project / "pipelines", *packaged]))


def missing_pipeline_text(name: str, base: Path) -> str:
    """Return what is wrong if there is no such pipeline, or an empty string."""
    paths = _find_pipelines(name, base)
    if paths and is_file(paths[0]):
        return ""
    stem = Path(name).stem
    if paths and _find_pipelines(stem, base):
        return f"{missing_file_text(paths[0], suggest=False)}; did you mean the pipeline {quoted(stem)}?"
    if paths:
        return missing_file_text(paths[0])
    names = sorted({path.stem for folder in _pipeline_folders() for path in folder.glob("*.yaml")})
    hint = did_you_mean(name, names)
    return f"there is no pipeline {quoted(name)}{hint} (there are {', '.join(names)})"
