"""Runs of plans: doit orders the stages, the store remembers their results, an executor runs them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from tvmflow.core import termination
from tvmflow.core.errors import TvmflowError
from tvmflow.core.types import Plan, StageSpec
from tvmflow.engine import delivery
from tvmflow.engine.completeness import check_complete
from tvmflow.engine.doit_adapter import EngineTask, run_tasks
from tvmflow.engine.library_comparison import compare_libraries
from tvmflow.engine.prefetch import estimate_work, prefetch
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.stage_execution import ExecutedStage, RunContext, StageExecution, report_error
from tvmflow.executors._base import Executor, OnEvent
from tvmflow.planning.decisions import PlanState
from tvmflow.provenance import sidecar
from tvmflow.store.blobs import DamagedBlob
from tvmflow.store.local import LocalStore
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.remote.result_reader import Fetched
from tvmflow.tuning.remote_ledger import LedgerSync

_log = logging.getLogger(__name__)

# How often a run starts again because a stored file turned out to be damaged.
_ROUNDS: Final = 3


class SessionOptions(NamedTuple):
    """The options of a run. None of them changes the results.

    `jobs` is the number of stages that run at a time: None for as many as the executor has slots.
    """

    jobs: int | None = 1
    keep_going: bool = False
    dist: str = "dist"
    stage_timeout_s: float | None = None
    stage_memory: int | None = None


def run_plan(
    plan: Plan,
    store: LocalStore,
    executor: Executor,
    on_event: OnEvent,
    options: SessionOptions,
    remote_client: RemoteCacheClient | None = None,
) -> RunReport:
    """Bring every stage of a plan up to date and deliver what its recipes request.

    A stored file that turns out to be damaged is set aside, and its stage runs again.

    Args:
        plan: What to run.
        store: Where results are kept.
        executor: What runs the stages.
        on_event: Called with every progress event, from several threads.
        options: How to run.
        remote_client: Fetches results before a stage runs, and uploads them afterwards.

    Returns:
        The report, with every failure of a stage.

    Raises:
        TvmflowError: for a problem of the whole run, such as a full disk.
        InternalError: when the run ended without a failure and without all results.
    """
    started = time.monotonic()
    # Before uploads start: earlier runs may have left trials to push.
    ledger_sync = LedgerSync(remote_client) if remote_client else None
    context = RunContext(
        store,
        executor,
        on_event,
        options.stage_timeout_s,
        remote_client,
        ledger_sync,
        options.stage_memory,
    )
    session = Session(plan, context, options)
    with store.running(), _uploading(remote_client, executor):
        delivered: list[str] = []
        for _ in range(_ROUNDS):
            session.update()
            with contextlib.suppress(DamagedBlob):
                delivered = session.deliver()
                if not session.damaged:
                    break
        delivered += delivery.deliver_verdicts(plan, session.verdicts, store, options.dist)
        artifacts = session.state.artifacts
        report = RunReport(session.list_reports(), tuple(delivered), tuple(store.damage), 0.0)
        check_complete(plan, report, artifacts, store, options.dist)
    traffic = remote_client.traffic() if remote_client else None
    return report._replace(
        seconds=time.monotonic() - started,
        remote=traffic,
        signal=termination.signal_number(),
        compared_libraries=compare_libraries(plan, artifacts),
    )


@contextlib.contextmanager
def _uploading(remote_client: RemoteCacheClient | None, executor: Executor) -> Iterator[None]:
    """Upload results in the background; at the end, wait a limited time for the last of them."""
    if remote_client is None:
        yield
        return
    started = time.monotonic()
    remote_client.start()
    try:
        yield
    except BaseException:
        remote_client.finish(is_cancelled=True)
        raise
    remote_client.finish(time.monotonic() - started, is_cancelled=executor.cancelled)


class Session:
    """One run of a plan: the state of its stages, and the tasks that bring them up to date."""

    def __init__(self, plan: Plan, context: RunContext, options: SessionOptions) -> None:
        self._plan = plan
        self._context = context
        self._options = options
        self._reports: dict[str, StageReport] = {}
        self.state = PlanState(context.store)
        self.damaged: set[str] = set()
        self.verdicts: dict[str, str] = {}

    def update(self) -> None:
        """Decide about every stage, fetch what a remote cache has, and run what is not up to date."""
        self.damaged.clear()
        self.state.decide_all(self._plan)
        for decision in self.state.decisions.values():
            _log.info("%s: %s: %s", decision.stage_id, decision.kind, decision.reason)
        client = self._context.remote_client
        missing = [
            spec for spec in self._plan.stages if self.state.decisions[spec.id].kind != "hit"
        ]
        if client is not None and missing:
            client.limit_time(estimate_work(missing, self._context.store))
            prefetch(self._plan, self.state, client, self._report_fetched)
        pending = [spec for spec in self._plan.stages if not self._report_hit(spec)]
        _log.debug("%d of %d stages are not up to date", len(pending), len(self._plan.stages))
        if not pending:
            return
        self._context.executor.start()
        names = {spec.id for spec in pending}
        run_tasks(
            [self._make_task(spec, names) for spec in pending],
            jobs=self._options.jobs or self._context.executor.slots,
            keep_going=self._options.keep_going,
        )

    def deliver(self) -> list[str]:
        """Deliver what is finished and verified, with its sidecar files, and return all paths.

        Raises:
            DamagedBlob: when a stored file does not have its digest.
        """
        artifacts, dist = self.state.artifacts, self._options.dist
        paths = delivery.deliver(self._plan, artifacts, self._context.store, dist)
        return paths + sidecar.write_sidecars(self._plan, artifacts, self._context.store, dist)

    def list_reports(self) -> tuple[StageReport, ...]:
        """Return the report of every stage in the plan's order; a stage that did not run was skipped."""
        reason = "a stage before it did not succeed"
        return tuple(
            self._reports.get(spec.id) or StageReport(spec.id, "skipped", reason, 0.0, {})
            for spec in self._plan.stages
        )

    def _make_task(self, spec: StageSpec, pending: set[str]) -> EngineTask:
        """Return the task of a stage; it depends on the stages that it needs and that are `pending`."""
        return EngineTask(
            spec.id,
            lambda: self._run(spec),
            lambda: self._is_up_to_date(spec),
            tuple(need.stage_id for need in spec.needs if need.stage_id in pending),
        )

    def _report_fetched(self, spec: StageSpec, fetched: Fetched) -> None:
        reason = f"from {fetched.origin}"
        self._report(StageReport(spec.id, "fetched", reason, 0.0, fetched.artifact.facts))

    def _report_hit(self, spec: StageSpec) -> bool:
        """Report a stage whose result is in the store, and tell whether it is."""
        decision = self.state.decisions[spec.id]
        if decision.kind != "hit":
            return False
        artifact = self.state.artifacts[spec.id]
        report = self._reports.get(spec.id)
        if report is None or report.outcome not in ("ran", "fetched"):
            self._report(StageReport(spec.id, "hit", decision.reason, 0.0, artifact.facts))
        self._context.store.remember(spec.recipe, spec.label, artifact.key)
        return True

    def _is_up_to_date(self, spec: StageSpec) -> bool:
        """Decide about a stage again, now that the stages that it needs are done."""
        try:
            self.state.decide(spec)
        except (TvmflowError, OSError):
            # `_run` meets the same problem again and reports it as the end of this stage.
            return False
        return self._report_hit(spec)

    def _run(self, spec: StageSpec) -> str:
        """Run a stage, report how that ended, and return the reason when it failed."""
        reason = ""
        try:
            reason = self.state.decide(spec).reason
            key, artifacts = self.state.keys[spec.id], self.state.artifacts
            executed = StageExecution(self._context, spec, key, reason, artifacts).execute()
        except DamagedBlob as damaged:
            self._forget_damaged(spec, damaged)
            return str(damaged)
        except Exception as error:
            executed = ExecutedStage(report_error(spec, reason, error, self._context.store))
        if executed.artifact is not None:
            self.state.artifacts[spec.id] = executed.artifact
        if executed.verdict:
            self.verdicts[spec.id] = executed.verdict
        else:
            self.verdicts.pop(spec.id, None)
        self._report(executed.report)
        return "" if executed.artifact is not None else executed.report.message or "failed"

    def _forget_damaged(self, spec: StageSpec, damaged: DamagedBlob) -> None:
        """Forget the results that contain the damaged file, so that the next round makes them again."""
        for need in spec.needs:
            artifact = self.state.artifacts.get(need.stage_id)
            if artifact and any(file.digest == damaged.digest for file in artifact.files):
                _log.debug("%s is damaged and runs again: %s", need.stage_id, damaged)
                self.damaged.add(need.stage_id)
                self.state.artifacts.pop(need.stage_id)

    def _report(self, report: StageReport) -> None:
        self._reports[report.stage_id] = report
        self._context.on_event({"event": "stage_finished", **report._asdict()})
