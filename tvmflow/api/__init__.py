"""The Python API: load, plan and run recipes, and load their libraries.

```python
import tvmflow

recipe = tvmflow.Recipe.load("recipes/digits.yaml")
plan = tvmflow.plan(recipe, targets=["host"])
result = tvmflow.run(plan, on_event=print)
module = result.load()
scores = module.run(image)
```

Stages, keys, results and records are the same as on the command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import RecipeError, UsageError
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.generated_text import shell_word
from tvmflow.core.project import find_project, shortest_path, store_root
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.driver import Driver, DriverSettings, check_settings
from tvmflow.engine.remote_access import RemoteSettings
from tvmflow.engine.report import RunReport
from tvmflow.engine.run_records import record_run
from tvmflow.engine.session import SessionOptions
from tvmflow.engine.summary import summary
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.prepare import PreparedRun, RunRequest, prepare_run
from tvmflow.planning.recipes import LoadedRecipe, load_recipe
from tvmflow.recipe import Recipe as RecipeFields
from tvmflow.runtime.loading import load
from tvmflow.runtime.module import Module
from tvmflow.store.local import LocalStore

__all__ = ["Plan", "PlannedStage", "Recipe", "Result", "plan", "run"]


class Recipe:
    """A recipe in a file."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self.path: Path = loaded.path
        self.fields: RecipeFields = loaded.recipe

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Load a recipe from a file.

        Raises:
            RecipeError: with all mistakes, each `file:line:column: field: problem`.
        """
        return cls(load_recipe(Path(path)))

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.fields.name

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the targets."""
        return tuple(target.name for target in self.fields.targets)

    def __repr__(self) -> str:
        return f"<tvmflow.Recipe {self.name} for {names_text(self.targets)}, {self.path}>"


class PlannedStage(NamedTuple):
    """A stage of a plan.

    Attributes:
        id: The name, `RECIPE:STAGE/TARGET`.
        kind: `hit` if the result is up to date, `run` if the stage must run, `wait` if that depends on others.
        reason: The reason for `kind`, in one line.
    """

    id: str
    kind: str
    reason: str


class Plan:
    """The stages of recipes in order of execution, with decisions; stages in `forced` always run."""

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
        pipeline: A pipeline (name or file) that replaces the recipes' pipelines.
        targets: Only these targets.
        variants: Only these variants.
        until: The last stage to run.
        lock: A lock file to enforce: every file must have its recorded digest.
        force: Stages to run even if they are up to date: `STAGE`, `STAGE/TARGET`, `RECIPE:STAGE`.
        store: The folder of the store; by default the project's.

    Raises:
        RecipeError: with all mistakes in all recipes.
        UsageError: if a name does not exist, or an argument has a wrong type.
        DownloadError: if the address of a model cannot be looked up.
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
    """Check that each argument is a recipe (an instance of `kind`) or a path."""
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
    """Check that each argument is None or a nonempty name or path."""
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
        fix = "stage_memory=4 << 30"
        raise UsageError(f"stage_memory={stage_memory!r} is not a whole number of bytes", fix=fix)


def _is_integer_from(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


OnEvent = Callable[[dict[str, Any]], None]

_BUNDLE: Final = ".tvmflow"


class Result:
    """The result of a run.

    Attributes:
        report: The outcome of each stage.
        builds: Verdict, errors, latencies and sizes for each recipe and target.
        delivered: The paths of the delivered files.
        exit_code: The exit code of the same run on the command line: 0 if all requested results are complete.
    """

    def __init__(self, report: RunReport) -> None:
        self.report = report
        self.builds: tuple[Build, ...] = list_builds(report)
        self.delivered: tuple[str, ...] = report.delivered
        self.exit_code: int = report.exit_code

    @property
    def is_complete(self) -> bool:
        """True if all requested results are complete."""
        return self.exit_code == 0

    def load(self, recipe: str = "", target: str = "", **options: Any) -> Module:
        """Load a delivered bundle.

        Recipe (or variant) and target are required if the run has several; `options` are passed to `tvmflow.load`.

        Raises:
            UsageError: if no bundle, or more than one, matches.
        """
        bundles = [
            path
            for path in self.delivered
            if path.endswith(_BUNDLE)
            and recipe in ("", Path(path).parts[-3])
            and target in ("", Path(path).parts[-2])
        ]
        if len(bundles) != 1:
            problem = "several bundles fit" if bundles else "no such bundle was delivered"
            raise UsageError(problem, fix=self._advise())
        return load(bundles[0], **options)

    def _advise(self) -> str:
        if listed := [path for path in self.delivered if path.endswith(_BUNDLE)]:
            return f"name recipe and target; there are {names_text(listed)}"
        if not self.is_complete:
            return "the run did not succeed: print the result"
        return "add `bundle` to the recipe's outputs"

    def __repr__(self) -> str:
        return summary(self.report)


def run(
    planned: Plan | Recipe | str | os.PathLike[str],
    *,
    on_event: OnEvent | None = None,
    jobs: int = 1,
    keep_going: bool = False,
    dist: str | os.PathLike[str] | None = None,
    stage_timeout_s: float | None = None,
    stage_memory: int | None = None,
    remote: str | os.PathLike[str] | None = None,
    remote_mode: str | None = None,
) -> Result:
    """Bring a plan up to date and deliver its libraries, as `tvmflow run` does.

    A failed stage raises no exception: see `Result.exit_code` and `Result.builds`. After KeyboardInterrupt, finished
    stages are kept, and the same call continues from there.

    Args:
        planned: The result of `plan`, or a recipe or its file, which is then planned without filters.
        on_event: Called with every progress event, from several threads; docs/cli.md lists them.
        jobs: Number of stages to run in parallel; measurements stay exclusive.
        keep_going: After a failure, continue with stages that do not depend on it.
        dist: The folder for delivered files; by default the project's.
        stage_timeout_s: Stop any stage that takes longer, in seconds.
        stage_memory: Stop any stage that takes more memory, in bytes; 0 for no limit.
        remote: The remote cache, a URL or a folder; by default `$TVMFLOW_REMOTE`; `""` for none.
        remote_mode: `read`, `write`, `both` or `off`; by default `$TVMFLOW_REMOTE_MODE` or `read`.

    Raises:
        TvmflowError: for a problem of the whole run, such as a mistake in a recipe or a full disk.
    """
    check_limits(jobs, stage_timeout_s, stage_memory)
    check_texts(dist=dist, remote=remote or None, remote_mode=remote_mode)
    if not isinstance(planned, Plan):
        planned = plan(planned)
    store = planned.store
    # Planning works without a writable store, so the store may be missing here.
    store.create()
    folder = str(Path(find_project().dist if dist is None else dist).absolute())
    settings = DriverSettings(
        SessionOptions(
            jobs=jobs,
            keep_going=keep_going,
            dist=folder,
            stage_timeout_s=stage_timeout_s,
            stage_memory=stage_memory,
        ),
        RemoteSettings(None if remote is None else os.fspath(remote), remote_mode),
    )
    check_settings(settings)
    with record_run(store, ["python"]) as recording:
        listener = _Listener(on_event)
        with Driver(planned.prepared, store, settings, listener, recording.note_progress) as driver:
            report = driver.run(planned.prepared.plan)
        recording.report, recording.exit_code = report, report.exit_code
    return Result(report)


class _Listener:
    """An observer that passes events to a function."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self.event: OnEvent = on_event or (lambda _: None)

    def interrupted(self) -> str:
        """Return an empty note, because the calling program reports interruptions itself."""
        return ""
