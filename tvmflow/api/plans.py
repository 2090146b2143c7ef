"""Recipes and plans, as Python has them, and the check of the arguments of Python calls."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import RecipeError, UsageError
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.generated_text import shell_word
from tvmflow.core.project import find_project, shortest_path
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.prepare import PreparedRun, prepare_run
from tvmflow.planning.recipes import LoadedRecipe, load_recipe
from tvmflow.planning.request import RunRequest
from tvmflow.recipe import Recipe as RecipeFields
from tvmflow.store.local import LocalStore
from tvmflow.store.location import store_root


class Recipe:
    """A recipe in a file."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self._loaded = loaded
        self.path: Path = loaded.path
        self.fields: RecipeFields = loaded.recipe

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Return the recipe in a file.

        Raises:
            RecipeError: with all of its mistakes, each `file:line:column: field: problem`.
        """
        return cls(load_recipe(Path(path)))

    @property
    def name(self) -> str:
        """Its name."""
        return self.fields.name

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of its targets."""
        return tuple(target.name for target in self.fields.targets)

    def __repr__(self) -> str:
        return f"<tvmflow.Recipe {self.name} for {names_text(self.targets)}, {self.path}>"


class PlannedStage(NamedTuple):
    """A stage of a plan.

    Attributes:
        id: Its name, `RECIPE:STAGE/TARGET`.
        kind: `hit` when its result is up to date, `run` when it must run, `wait` when that depends on others.
        reason: Why, in one line.
    """

    id: str
    kind: str
    reason: str


class Plan:
    """The stages of recipes, and what a run would do.

    Stages are in the order in which they run; those in `forced` run also if they are up to date.
    """

    def __init__(self, prepared: PreparedRun, store: LocalStore) -> None:
        decisions = evaluate_plan(prepared.plan, store, prepared.forced).decisions
        self.prepared = prepared
        self.store = store
        self.forced = prepared.forced
        self.stages: tuple[PlannedStage, ...] = tuple(
            PlannedStage(spec.id, decisions[spec.id].kind, decisions[spec.id].reason)
            for spec in prepared.plan.stages
        )

    @property
    def is_up_to_date(self) -> bool:
        """True if nothing would run."""
        return all(stage.kind == "hit" for stage in self.stages)

    def __repr__(self) -> str:
        width = max((len(stage.id) for stage in self.stages), default=0)
        lines = (f"{stage.id:<{width}}  {stage.kind:<4}  {stage.reason}" for stage in self.stages)
        return "\n".join(lines)


def plan(
    *recipes: Recipe | str | os.PathLike[str],
    pipeline: str | None = None,
    targets: Sequence[str] = (),
    variants: Sequence[str] = (),
    until: str | None = None,
    lock: str | os.PathLike[str] | None = None,
    force: Sequence[str] = (),
    store: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plan recipes, as `tvmflow plan` does.

    Args:
        recipes: Recipes, or their files.
        pipeline: Another pipeline than the recipes name: a name or a file.
        targets: Only these targets.
        variants: Only these variants.
        until: The last stage to run.
        lock: A lock file: exactly what it records is built.
        force: Stages that run also if they are up to date: `STAGE`, `STAGE/TARGET`, `RECIPE:STAGE`.
        store: The folder of the store; by default that of the project.

    Raises:
        RecipeError: with all mistakes in all recipes.
        UsageError: when something that is named does not exist, or an argument is of another type.
        DownloadError: when the address of a model has to be looked up, and cannot be.
    """
    if not recipes:
        raise UsageError("no recipe is given", fix="tvmflow.plan('RECIPE.yaml')")
    check_recipes(recipes, Recipe)
    check_names(targets=targets, variants=variants, force=force)
    check_texts(pipeline=pipeline, until=until, lock=lock, store=store)
    paths = [recipe.path if isinstance(recipe, Recipe) else recipe for recipe in recipes]
    words = [] if store is None else ["--store", os.fspath(store)]
    opened = LocalStore(store_root(words, find_project().store))
    opened.create_if_writable()
    request = RunRequest(
        recipes=tuple(str(path) for path in paths),
        pipeline=pipeline,
        targets=tuple(targets),
        until=until,
        variants=tuple(variants),
        lock=None if lock is None else os.fspath(lock),
        force=tuple(force),
    )
    prepared = prepare_run(request, opened)
    if prepared.pipeline and not prepared.is_plain:
        raise RecipeError(
            f"{prepared.pipeline.path}: releases are made, and recipes tuned again, on the command line",
            fix=f"tvmflow run {shell_word(shortest_path(str(prepared.pipeline.path)))}",
        )
    return Plan(prepared, opened)


# ---------------------------------------------------------------- arguments of Python calls


def check_recipes(recipes: Iterable[object], kind: type) -> None:
    """Check that each is a recipe (of the class `kind`), or names its file."""
    for recipe in recipes:
        if not isinstance(recipe, (kind, str, os.PathLike)):
            raise UsageError(
                f"a {type(recipe).__name__} is neither a recipe nor the path of one",
                fix="tvmflow.plan('A.yaml', 'B.yaml')",
            )


def check_names(**arguments: object) -> None:
    """Check that each argument is a sequence of names."""
    for argument, names in arguments.items():
        if isinstance(names, str):
            raise UsageError(
                f"{argument}={quoted(names)} is a string, not a list of names",
                fix=f"{argument}=[{quoted(names)}]",
            )
        if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{argument}={names!r} is not a list of names")


def check_texts(**arguments: object) -> None:
    """Check that each argument is None, or a name or a path that is not empty."""
    for argument, text in arguments.items():
        if text is not None and (not isinstance(text, str | os.PathLike) or not os.fspath(text)):
            raise UsageError(f"{argument}={text!r} is neither a name nor a path")


def check_limits(jobs: object, stage_timeout_s: object = None, stage_memory: object = None) -> None:
    """Check the limits of a run."""
    if not _is_integer_from(1, jobs):
        raise UsageError(f"jobs={jobs!r} is not a whole number from 1")
    if stage_timeout_s is not None and not (
        isinstance(stage_timeout_s, int | float) and 0 < stage_timeout_s < math.inf
    ):
        raise UsageError(f"stage_timeout_s={stage_timeout_s!r} is not a number of seconds above 0")
    if stage_memory is not None and not _is_integer_from(0, stage_memory):
        raise UsageError(
            f"stage_memory={stage_memory!r} is not a whole number of bytes",
            fix="stage_memory=4 << 30",
        )


def _is_integer_from(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
