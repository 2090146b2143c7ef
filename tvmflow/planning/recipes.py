"""Loaders of recipe and pipeline files; all mistakes in a file are reported together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, field_validator, model_validator

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import PIPELINE, RECIPE, find_mismatch
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, is_folder, missing_file_text
from tvmflow.core.project import find_project, list_packaged_paths, shortest_path
from tvmflow.core.schema import (
    NAME_PATTERN,
    ClosedModel,
    FolderName,
    FormatVersion,
    YamlList,
    field_error,
    one_of,
    published_schema,
    schema_enum,
)
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import InputFile
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import InputProblem
from tvmflow.recipe import Recipe
from tvmflow.recipe.sections import Release, Retune
from tvmflow.recipe.targets import TargetSpec, TargetSpecs, add_presets, check_unique
from tvmflow.recipe.yaml_files import Document, Loc, Problem, read_yaml, validate
from tvmflow.stages import STAGES, export, pipeline_stages, required_stages, tune
from tvmflow.store.addresses import is_address
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

_log = logging.getLogger(__name__)

_UniqueNames = Annotated[YamlList[str], AfterValidator(check_unique)]
_StageName = Annotated[str, one_of(pipeline_stages(), "a stage"), schema_enum(pipeline_stages())]


class Pipeline(NamedTuple):
    """The stages of a run in order; a pipeline may also name recipes, and a release to make.

    `targets` replace the targets of its recipes. `where` returns `file:line:column` of a field.
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

    pipeline: FormatVersion = Field(examples=[1])
    """Version of the pipeline format: 1."""
    name: FolderName = Field(pattern=NAME_PATTERN, max_length=100, examples=["nightly"])
    """Name of the pipeline."""
    description: str = ""
    """Purpose of the pipeline."""
    stages: YamlList[_StageName] = Field(
        default=pipeline_stages(), min_length=1, examples=[["import", "build", "export"]]
    )
    """Stages to run, each after the stages that it needs. Default: all."""
    recipes: _UniqueNames = Field(default=(), examples=[["../digits.yaml"]])
    """Recipes that `tvmflow run PIPELINE` builds, by path relative to the pipeline's folder."""
    targets: TargetSpecs = Field(default=(), examples=[["host", "cortex-a72"]])
    """Targets of these recipes, instead of their own."""
    release: Release | None = Field(default=None, examples=[{"version": "1.2.0"}])
    """Make a [release](releases.md) of all deliveries."""
    retune: Retune | None = Field(default=None, examples=[{"minutes": 60}])
    """Distribute a [tuning budget](releases.md) over the recipes."""

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
                # The last missing stage is the closest in the order of stages.
                raise field_error(f"'{name}' needs '{missing[-1]}' before it", index)
        return value


def pipeline_schema() -> dict[str, Any]:
    """Return the JSON Schema of a pipeline, for editors."""
    schema = published_schema(PipelineFile, "pipeline")
    add_presets(schema["properties"]["targets"])
    return schema


def load_pipeline(name: str, base: Path = Path()) -> Pipeline:
    """Load a pipeline by its name or path; RecipeError with all mistakes in its file."""
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
    """Return whether a file is a pipeline, which begins with the field `pipeline`."""
    if not is_file(path):
        return False
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        fields = (line for line in lines if line.strip() and not line.lstrip().startswith("#"))
        return next(fields, "").startswith("pipeline:")
    return False


def pipeline_candidates(name: str, base: Path = Path()) -> list[Path]:
    """Return the possible files of a pipeline in order of precedence; they may be missing."""
    if name.endswith((".yaml", ".yml")):
        return [base / name]
    return [folder / f"{name}.yaml" for folder in _pipeline_folders()]


def _find_pipelines(name: str, base: Path) -> list[Path]:
    """Return the existing candidates; a path is returned even if it does not exist."""
    paths = pipeline_candidates(name, base)
    return paths if paths == [base / name] else [path for path in paths if is_file(path)]


def _pipeline_folders() -> list[Path]:
    project = Path(shortest_path(find_project().root))
    packaged = map(Path, list_packaged_paths("pipelines"))
    return list(dict.fromkeys([Path("pipelines"), project / "pipelines", *packaged]))


def missing_pipeline_text(name: str, base: Path) -> str:
    """Return the problem if a pipeline does not exist, or an empty string."""
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


class LoadedRecipe(NamedTuple):
    """A recipe with its pipeline and the files that it was read from.

    `where` returns `file:line:column` of a field: `where("targets", 0)`.
    """

    recipe: Recipe
    path: Path
    where: Callable[..., str]
    read: tuple[Path, ...]
    pipeline: Pipeline


def load_recipe(path: Path) -> LoadedRecipe:
    """Load a recipe; RecipeError with all mistakes, each `file:line:column: field: problem`."""
    if mismatch := find_mismatch(path, RECIPE):
        raise RecipeError(mismatch.text, fix=mismatch.fix)
    document = read_yaml(path)
    recipe, problems = validate(document, Recipe, PipelineFile, "a pipeline")
    problems += _missing_files(document)
    if recipe is None or problems:
        raise document.error(problems)
    pipeline = load_pipeline(recipe.pipeline, path.parent)
    _log.debug("%s: model of kind %s, pipeline %s", path, recipe.model.kind, pipeline.path)
    read = (path, pipeline.path)
    return LoadedRecipe(recipe, path, document.where, read, pipeline=pipeline)


def _missing_files(document: Document) -> Iterator[Problem]:
    """Yield a problem for every missing file; the document may be an invalid recipe."""
    base = document.path.parent
    model = document.value_at("model")
    for frontend in FRONTENDS.values() if isinstance(model, dict) else ():
        for missing in frontend.find_missing_files(model, base):
            yield document.problem(missing.text, "model", *missing.field)
    operators = document.value_at("operators")
    for index in range(len(operators) if isinstance(operators, list) else 0):
        yield from _missing_file(document, "operators", index)
    for owner in _list_owners(document):
        for section in ("verify", "quantize"):
            yield from _missing_file(document, *owner, section, "data", is_valid=is_folder)
    labels = document.value_at("labels")
    if isinstance(labels, str) and labels and not is_file(base / labels):
        yield document.problem(missing_file_text(base / labels), "labels")
    pipeline = document.value_at("pipeline")
    text = missing_pipeline_text(pipeline, base) if isinstance(pipeline, str) and pipeline else ""
    if text:
        yield document.problem(text, "pipeline")


def _list_owners(document: Document) -> list[Loc]:
    """Return the paths of sections that may have overrides: the recipe, its targets and its variants."""
    targets, variants = document.value_at("targets"), document.value_at("variants")
    count = len(targets) if isinstance(targets, list) else 0
    names = variants if isinstance(variants, dict) else ()
    return [(), *(("targets", at) for at in range(count)), *(("variants", name) for name in names)]


def _missing_file(
    document: Document, *loc: str | int, is_valid: Callable[[Path], bool] = is_file
) -> Iterator[Problem]:
    """Yield a problem if the path at `loc` is neither a file nor accepted by `is_valid`."""
    name = document.value_at(*loc)
    path = document.path.parent / name if isinstance(name, str) and name else None
    if path and not (is_file(path) or is_valid(path)):
        text = "must be a file, not a URL" if is_address(name) else missing_file_text(path)
        yield document.problem(text, *loc)


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
    """A recipe, or a `variant` of it, with all values that its plan depends on.

    `pipeline` is the file that replaces the recipe's pipeline, or empty. `images` maps each `verify.data` and
    `quantize.data` to the paths of its images inside the data's folder.
    """

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe without per-target overrides."""
        recipe = self.loaded.recipe
        return recipe.for_variant(self.variant) if self.variant else recipe

    def input_loc(self, problem: InputProblem) -> tuple[str, ...]:
        """Return the path of an input with a problem: in the variant if that sets the field."""
        if self.variant:
            inputs = self.loaded.recipe.variants[self.variant].inputs
            spec = inputs.get(problem.input)
            if spec and (not problem.field or problem.field in spec.model_fields_set):
                return ("variants", self.variant, *problem.loc)
        return problem.loc

    def setting_loc(self, section: str, field: str) -> tuple[str, ...]:
        """Return the path of a setting, ignoring targets: in the variant if that sets it."""
        if self.variant:
            overrides = getattr(self.loaded.recipe.variants[self.variant], section)
            if overrides is not None and field in overrides.model_fields_set:
                return ("variants", self.variant, section, field)
        return (section, field)

    @property
    def partitioned(self) -> tuple[PartitionedTarget, ...]:
        """The partitioned targets."""
        return tuple(target for target in self.targets if isinstance(target, PartitionedTarget))

    def recipe_for(self, target: Target | None) -> Recipe:
        """Return the recipe with the overrides of a target or part."""
        if target is None:
            return self.recipe
        if target.name not in self._recipes:
            self._recipes[target.name] = self.recipe.for_target(target.name)
        return self._recipes[target.name]

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        # Cached, because applying overrides takes as long as all other planning of a stage.
        return {}

    def where(self, target: Target, *loc: str | int) -> str:
        """Return `file:line:column` of a target, a part, or one of its fields."""
        return self.loaded.where("targets", *self._positions.get(target.name, ()), *loc)

    def setting_position(
        self, target: Target | None, section: str, field: str, *loc: str | int
    ) -> str:
        """Return `file:line:column` of a target's setting: its own, or the recipe's or variant's."""
        if target is not None:
            forms = (self.recipe_for(target), self.recipe)
            own, general = (getattr(getattr(form, section), field) for form in forms)
            if own != general:
                return self.where(target, section, field, *loc)
        return self.loaded.where(*self.setting_loc(section, field), *loc)

    @cached_property
    def _positions(self) -> dict[str, tuple[str | int, ...]]:
        """The path of each target and part below `targets`."""
        positions: dict[str, tuple[str | int, ...]] = {}
        for index, spec in enumerate(self.loaded.recipe.targets):
            for part_index, name in enumerate(spec.build_targets()):
                part = ("parts", part_index) if spec.parts else ()
                positions.setdefault(name, (index, *part))
            positions[spec.name] = (index,)
        return positions


def resolved_targets(target: Target) -> tuple[ResolvedTarget, ...]:
    """Return the targets to build for: the target itself, or its parts."""
    return target.parts if isinstance(target, PartitionedTarget) else (target,)
