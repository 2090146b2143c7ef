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
from tvmflow.engine.progress import Printer
from tvmflow.engine.report import RunReport
from tvmflow.engine.session import SessionOptions, run_plan
from tvmflow.engine.summary import render
from tvmflow.engine.worker_logs import WorkerLogs
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
    ) -> None:
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
        )

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
        with Cancelling(self._cancel, _KEPT):
            report = run_plan(plan, self._store, self._executor, self._show, options, client)
        self._forced -= {stage.stage_id for stage in report.stages if stage.outcome == "ran"}
        return report

    def _show(self, event: Event) -> None:
        if self._logs:
            self._logs.event(event)
        self._printer.event(event)

    def _cancel(self) -> None:
        """Stop what runs. Called by a signal handler."""
        self._executor.cancel()
        self._printer.end()


def show_report(report: RunReport, output: OutputOptions) -> None:
    """Print the end of a run's output; with `-v`, also what each stage says of its result."""
    is_verbose = output.verbosity > 0
    sys.stdout.write(render(report, as_json=output.json, quiet=output.quiet, verbose=is_verbose))
