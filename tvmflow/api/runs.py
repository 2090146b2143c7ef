"""Runs and their results, as Python has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tvmflow.api.plans import Plan, Recipe, check_limits, check_texts, plan
from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import names_text
from tvmflow.core.project import find_project
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.driver import Driver, DriverSettings, check_settings
from tvmflow.engine.remote_access import RemoteSettings
from tvmflow.engine.report import RunReport
from tvmflow.engine.run_records import record_run
from tvmflow.engine.session import SessionOptions
from tvmflow.engine.summary import summary
from tvmflow.runtime.loading import load
from tvmflow.runtime.module import Module

OnEvent = Callable[[dict[str, Any]], None]

_BUNDLE: Final = ".tvmflow"


class Result:
    """The end of a run.

    Attributes:
        report: What each stage did.
        builds: A row for each recipe and target: verdict, errors, latencies, sizes.
        delivered: The paths of the files that were delivered.
        exit_code: That of the same run on the command line: 0 when everything that was asked for is there.
    """

    def __init__(self, report: RunReport) -> None:
        self.report = report
        self.builds: tuple[Build, ...] = list_builds(report)
        self.delivered: tuple[str, ...] = report.delivered
        self.exit_code: int = report.exit_code

    @property
    def is_complete(self) -> bool:
        """True if everything that was asked for is there."""
        return self.exit_code == 0

    def load(self, recipe: str = "", target: str = "", **options: Any) -> Module:
        """Load a delivered bundle, ready to run.

        Recipe (or variant) and target are needed where there are several; options are those of `tvmflow.load`.

        Raises:
            UsageError: when no bundle, or more than one, fits.
        """
        bundles = [
            path
            for path in self.delivered
            if path.endswith(_BUNDLE) and _fits(Path(path), recipe, target)
        ]
        if len(bundles) != 1:
            problem = "several bundles fit" if bundles else "no such bundle was delivered"
            raise UsageError(problem, fix=self._advise())
        return load(bundles[0], **options)

    def _advise(self) -> str:
        """Return what helps where not exactly one bundle fits."""
        listed = [path for path in self.delivered if path.endswith(_BUNDLE)]
        if listed:
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

    A stage that fails is no exception: see `Result.exit_code` and `Result.builds`. After
    KeyboardInterrupt, finished stages are kept, and the same call continues from there.

    Args:
        planned: What `plan` returned; or a recipe, or its file, to be planned as a whole.
        on_event: Called with every progress event, from several threads; docs/cli.md lists them.
        jobs: Stages at a time; measurements stay exclusive.
        keep_going: After a failure, continue with stages that do not depend on it.
        dist: The folder for delivered files; by default that of the project.
        stage_timeout_s: Stop any stage that takes longer, in seconds.
        stage_memory: Stop any stage that takes more memory, in bytes; 0 for no limit.
        remote: The remote cache, a URL or a folder; by default `$TVMFLOW_REMOTE`, and `""` for none.
        remote_mode: `read`, `write`, `both` or `off`; by default `$TVMFLOW_REMOTE_MODE`, or `read`.

    Raises:
        TvmflowError: for a problem of the whole run, such as a mistake in a recipe or a full disk.
    """
    check_limits(jobs, stage_timeout_s, stage_memory)
    check_texts(dist=dist, remote=remote or None, remote_mode=remote_mode)
    if not isinstance(planned, Plan):
        planned = plan(planned)
    store = planned.store
    # a plan is also made where the store cannot be written
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
        with Driver(planned.prepared, store, settings, _Listener(on_event)) as driver:
            report = driver.run(planned.prepared.plan)
        recording.report, recording.exit_code = report, report.exit_code
    return Result(report)


class _Listener:
    """An observer that passes events on to a function."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self.event: OnEvent = on_event or (lambda _: None)

    def interrupted(self) -> str:
        """Return nothing: the program says itself what an interruption leaves."""
        return ""


def _fits(bundle: Path, recipe: str, target: str) -> bool:
    """Return whether a bundle, `RECIPE/TARGET/NAME.tvmflow`, is of a recipe and a target."""
    return recipe in ("", bundle.parts[-3]) and target in ("", bundle.parts[-2])
