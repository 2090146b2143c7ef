"""Pipelines: which stages, in which order, and where the files are that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tvmflow.errors import RecipeError
from tvmflow.mistakes import check, wrong
from tvmflow.recipe._closed import NAME, Closed, Version, enum, member, tupled
from tvmflow.recipe._files import is_file, no_file
from tvmflow.recipe._release import Release, Retune
from tvmflow.recipe._targets import TargetSpec, named
from tvmflow.yaml_positions import Problem, nearest, quoted, read_yaml

STAGE_NAMES: Final = ("import", "extract_tasks", "tune", "pick_best", "build", "export", "verify")

# Each stage, and those that a pipeline must have before it.
REQUIRES: Final[Mapping[str, tuple[str, ...]]] = {
    "import": (),
    "extract_tasks": ("import",),
    "tune": ("extract_tasks",),
    "pick_best": ("tune",),
    "build": ("import",),
    "export": ("build",),
    "verify": ("export",),
}

_StageName = Annotated[str, member(STAGE_NAMES, "a stage"), enum(STAGE_NAMES)]


class Pipeline(NamedTuple):
    """The stages of a run, in order; and, of one that is run by itself, for which recipes and what comes after.

    `targets` are built for instead of those in the recipes, if there are any. `where` gives
    `file:line:column` of a path of fields.
    """

    name: str
    stages: tuple[str, ...]
    path: Path
    recipes: tuple[Path, ...] = ()
    targets: tuple[TargetSpec, ...] = ()
    release: Release | None = None
    retune: Retune | None = None
    where: Callable[..., str] | None = None


class PipelineFile(Closed):
    """The stages of a run, in order."""

    pipeline: Version = Field(examples=[1], description="Version of this language: 1.")
    name: str = Field(
        pattern=NAME,
        max_length=100,
        examples=["nightly"],
        description="Its name, for those who read it.",
    )
    description: str = Field(default="", description="What it is for.")
    stages: Annotated[tuple[_StageName, ...], BeforeValidator(tupled)] = Field(
        min_length=1,
        examples=[["import", "build", "export"]],
        description="Stages, each after those that it needs.",
    )

    recipes: Annotated[tuple[str, ...], BeforeValidator(tupled)] = Field(
        default=(),
        examples=[["../recipes/digits.yaml"]],
        description="Recipes to run, from this file's folder, for `tvmflow run PIPELINE`.",
    )
    targets: Annotated[
        tuple[Annotated[TargetSpec, BeforeValidator(named)], ...], BeforeValidator(tupled)
    ] = Field(
        default=(),
        examples=[["host", "cortex-a72"]],
        description="Machines to build all of these recipes for, instead of those that they name.",
    )
    release: Release | None = Field(
        default=None,
        examples=[{"version": "1.2.0"}],
        description="Make a release of what comes out: see [releases.md](releases.md).",
    )
    retune: Retune | None = Field(
        default=None,
        examples=[{"minutes": 60}],
        description="Spread a tuning budget over the recipes: see [releases.md](releases.md).",
    )

    @model_validator(mode="after")
    def _check_alone(self) -> PipelineFile:
        for name in ("targets", "release", "retune"):
            if getattr(self, name) and not self.recipes:
                raise wrong("is for pipelines that name their recipes", name)
        if self.retune and "tune" not in self.stages:
            raise wrong("needs the stage 'tune'", "retune")
        if self.release and "export" not in self.stages:
            raise wrong("needs the stage 'export'", "release")
        return self

    @field_validator("recipes")
    @classmethod
    def _check_recipes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise wrong(f"'{name}' stands twice", index)
        return value

    @field_validator("stages")
    @classmethod
    def _check_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise wrong(f"'{name}' stands twice", index)
            missing = [needed for needed in REQUIRES[name] if needed not in value[:index]]
            if missing:
                raise wrong(f"'{name}' needs '{missing[0]}' before it", index)
        return value


def load_pipeline(name: str, base: Path = Path()) -> Pipeline:
    """A pipeline by name, or from a file when it ends in `.yaml`, its path from `base`. Raises RecipeError."""
    sentence = no_pipeline(name, base)
    if sentence:
        raise RecipeError(sentence)
    path = _pipeline_paths(name, base)[0]
    document = read_yaml(path)
    found, problems = check(document, PipelineFile)
    if found is None:
        raise document.error(problems)
    recipes = [path.parent / name for name in found.recipes]
    missing = [
        Problem(*document.place("recipes", index), f"recipes.{index}: {no_file(recipe)}")
        for index, recipe in enumerate(recipes)
        if not is_file(recipe)
    ]
    if missing:
        raise document.error(missing)
    return Pipeline(
        found.name,
        found.stages,
        path,
        tuple(recipes),
        found.targets,
        found.release,
        found.retune,
        document.where,
    )


def is_pipeline(path: Path) -> bool:
    """Whether a file is a pipeline and not a recipe, by the word that it begins with."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            words = (line for line in lines if line.strip() and not line.lstrip().startswith("#"))
            return next(words, "").startswith("pipeline:")
    except OSError:
        return False


def pipeline_candidates(name: str, base: Path = Path()) -> list[Path]:
    """The files that this pipeline could be, the first before the others; not all of them are there."""
    if name.endswith((".yaml", ".yml")):
        return [base / name]
    return [folder / f"{name}.yaml" for folder in _pipeline_folders()]


def _pipeline_paths(name: str, base: Path) -> list[Path]:
    """Those of them that are there; a file that was named by its path, whether it is there or not."""
    paths = pipeline_candidates(name, base)
    return paths if paths == [base / name] else [path for path in paths if is_file(path)]


def _pipeline_folders() -> list[Path]:
    """Where named pipelines are: here, in the installed package, in the checkout."""
    package = Path(__file__).parent.parent
    return [Path("pipelines"), package / "pipelines", package.parent / "pipelines"]


def no_pipeline(name: str, base: Path) -> str:
    """What to say when there is no such pipeline; nothing when there is."""
    paths = _pipeline_paths(name, base)
    if paths:
        return "" if is_file(paths[0]) else no_file(paths[0])
    there = sorted({path.stem for folder in _pipeline_folders() for path in folder.glob("*.yaml")})
    near = nearest(name, there)
    return f"there is no pipeline {quoted(name)}{near} (there are {', '.join(there)})"
