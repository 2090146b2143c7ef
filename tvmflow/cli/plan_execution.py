"""The execution of plans with one executor and one progress display."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import Final

from tvmflow.cli import remote_cache
from tvmflow.cli.arguments import ExecutionOptions, OutputOptions
from tvmflow.cli.executors import open_executor
from tvmflow.core import file_locks
from tvmflow.core.termination import Cancelling
from tvmflow.core.types import Plan
from tvmflow.engine.progress import Printer, interim_text
from tvmflow.engine.report import RunReport
from tvmflow.engine.session import SessionOptions, run_plan
from tvmflow.engine.stage_logs import WorkerLogs
from tvmflow.engine.summary import render
from tvmflow.executors import Event
from tvmflow.planning.prepare import PreparedRun
from tvmflow.store.local import LocalStore

_KEPT: Final = "; finished results are kept, and the same command continues from here"


class PlanExecution:
    """Runs plans one after the other on the same executor and shows their progress."""

    def __init__(
        self,
        prepared: PreparedRun,
        execution: ExecutionOptions,
        output: OutputOptions,
        store: LocalStore,
        forced: Collection[str] = (),
        *,
        delivers_interim: bool = True,
        best_so_far: str = "",
    ) -> None:
        """Prepare the execution.

        Args:
            prepared: What to run.
            execution: How stages are run.
            output: How the progress is shown.
            store: The store with the results.
            forced: The ids of stages that run once also if they are up to date.
            delivers_interim: Whether long searches are interrupted to deliver what they have found so far.
            best_so_far: The command that delivers the best of the trials so far; empty if there is none.
        """
        self._forced = frozenset(forced)
        self._remote = execution.remote
        self._store = store
        self._printer = Printer(
            sys.stdout,
            as_json=output.json,
            many=len({spec.recipe for spec in prepared.plan.stages}) > 1,
            stages=len(prepared.plan.stages),
            quiet=output.quiet,
            is_logged=logging.getLogger("tvmflow").isEnabledFor(logging.INFO),
            on_lost_reader=lambda: self._executor.cancel(),
        )
        file_locks.report_waits(self._printer.waiting)
        self._logs = WorkerLogs(sys.stderr) if output.verbosity > 1 else None
        self._executor = open_executor(execution, store, self._printer)
        self._options = SessionOptions(
            execution.jobs,
            execution.keep_going,
            execution.dist.locate(),
            execution.stage_timeout_s,
            execution.stage_memory,
            delivers_interim=delivers_interim,
        )
        self._best_so_far = best_so_far
        self._delivered = ""
        self._has_trials = False

    def __enter__(self) -> PlanExecution:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()
        if self._logs:
            self._logs.close()
        self._printer.end()

    @property
    def interrupted(self) -> bool:
        """True after the user has asked to stop."""
        return self._executor.cancelled

    def run(self, plan: Plan) -> RunReport:
        """Bring a plan up to date; a stage that is forced runs the first time alone."""
        client = remote_cache.open_run_client(
            self._remote, self._store, self._printer.remote, lambda: self._executor.cancelled
        )
        options = self._options._replace(forced=self._forced)
        with Cancelling(self._cancel, self._describe_kept):
            report = run_plan(plan, self._store, self._executor, self._show, options, client)
        self._forced -= {stage.stage_id for stage in report.stages if stage.outcome == "ran"}
        return report

    def _show(self, event: Event) -> None:
        if self._logs:
            self._logs.event(event)
        if event["event"] == "delivered":
            self._delivered, self._has_trials = interim_text(event), False
        self._has_trials |= event.get("unit") == "trial"
        self._printer.event(event)

    def _describe_kept(self) -> str:
        """Return what a signal leaves, and the commands that go on from there. Called by a signal handler."""
        delivered = f"; delivered: {self._delivered}" if self._delivered else ""
        if not self._has_trials or not self._best_so_far:
            return f"{delivered}{_KEPT}"
        return f"{delivered}{_KEPT}; `{self._best_so_far}` delivers the best of the trials so far"

    def _cancel(self) -> None:
        """Stop what runs. Called by a signal handler."""
        self._executor.cancel()
        self._printer.end()


def show_report(report: RunReport, output: OutputOptions) -> None:
    """Print the end of a run's output; with `-v`, also what each stage says of its result."""
    is_verbose = output.verbosity > 0
    sys.stdout.write(render(report, as_json=output.json, quiet=output.quiet, verbose=is_verbose))
