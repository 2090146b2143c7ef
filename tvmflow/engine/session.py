"""Runs of plans: doit orders the stages, the store remembers their results, an executor runs them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import termination
from tvmflow.core.errors import TvmflowError
from tvmflow.core.types import Decision, Plan, StageSpec
from tvmflow.engine import delivery, faults
from tvmflow.engine.completeness import check_complete
from tvmflow.engine.doit_adapter import EngineTask, run_tasks
from tvmflow.engine.estimates import estimate_stages
from tvmflow.engine.interim import run_parts
from tvmflow.engine.library_table import compare_libraries
from tvmflow.engine.prefetch import estimate_work, prefetch
from tvmflow.engine.report import SKIPPED, SUCCEEDED, RunReport, StageReport
from tvmflow.engine.stage_execution import ExecutedStage, RunContext, StageExecution, report_error
from tvmflow.executors.base import Executor, OnEvent
from tvmflow.planning.decisions import PlanState
from tvmflow.provenance import sidecar
from tvmflow.stages import STAGES
from tvmflow.store.blobs import DamagedBlob
from tvmflow.store.failures import Failure, forget_failure, remember_failure
from tvmflow.store.local import LocalStore
from tvmflow.store.pins import update_recipe_pins
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.remote.result_reader import Fetched
from tvmflow.tuning.remote_ledger import LedgerSync

_log = logging.getLogger(__name__)

# How often a run starts again, because a stored file turned out to be damaged or a schedule to be wrong.
_ROUNDS: Final = 4
_BEHIND_FAILURE: Final = "a stage before it did not succeed"
_NOT_REACHED: Final = "the run ended before it"
_DECISIONS: Final = {"hit": "up to date", "run": "runs", "wait": "decided"}


class SessionOptions(NamedTuple):
    """The options of a run. None of them changes the results.

    `jobs` is the number of stages that run at a time: None for as many as the executor has slots.
    `forced` are the ids of stages that run once also if their results are in the store.
    `delivers_interim` lets long searches be interrupted to deliver what they have found so far.
    """

    jobs: int | None = 1
    keep_going: bool = False
    dist: str = "dist"
    stage_timeout_s: float | None = None
    stage_memory: int | None = None
    forced: frozenset[str] = frozenset()
    delivers_interim: bool = True


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
        has_succeeded = not options.delivers_interim or run_parts(plan, session.run_part)
        session.begin(plan, options.forced)
        delivered = session.run() if has_succeeded else []
        update_recipe_pins(store, plan.origins)
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
        origins=plan.origins,
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
        self._logged: dict[str, Decision] = {}
        self.state = PlanState(context.store, options.forced)
        self.damaged: set[str] = set()
        self.retries: set[str] = set()
        self.verdicts: dict[str, str] = {}

    def begin(self, plan: Plan, forced: frozenset[str]) -> None:
        """Turn to a plan; what was reported of its stages so far stays the truth."""
        self._plan = plan
        self.state = PlanState(self._context.store, forced)

    def run_part(self, plan: Plan, forced: frozenset[str]) -> PlanState | None:
        """Run a plan that comes before the requested one; return its state, or None when it did not succeed."""
        self.begin(plan, forced)
        paths = self.run()
        if any(report.outcome not in SUCCEEDED for report in self.list_reports()):
            return None
        if paths:
            trials = sum(
                report.facts.get("measured", 0) + report.facts.get("reused", 0)
                for report in self.list_reports()
                if STAGES[report.stage].TRAITS.forecast
            )
            folders = sorted({str(Path(path).parent) for path in paths})
            self._context.on_event({"event": "delivered", "folders": folders, "trials": trials})
        return self.state

    def run(self) -> list[str]:
        """Bring the plan up to date, deliver what is finished and verified, and return all its paths."""
        delivered: list[str] = []
        for _ in range(_ROUNDS):
            self.update()
            with contextlib.suppress(DamagedBlob):
                delivered = self.deliver()
                if not self.damaged and not self.retries:
                    break
        return delivered

    def update(self) -> None:
        """Decide about every stage, fetch what a remote cache has, and run what is not up to date."""
        self.damaged.clear()
        for tune in self.retries:
            faults.choose_again(tune, self._plan, self.state)
        self.retries.clear()
        self.state.decide_all(self._plan)
        for decision in self.state.decisions.values():
            self._log_decision(decision)
        client = self._context.remote_client
        missing = [
            spec for spec in self._plan.stages if self.state.decisions[spec.id].kind != "hit"
        ]
        delivery.check_folders(self._plan, self._options.dist, {spec.id for spec in missing})
        if client is not None and missing:
            client.limit_time(estimate_work(missing, self._context.store))
            prefetch(self._plan, self.state, client, self._report_fetched)
        if missing:
            self._announce()
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

    def _announce(self) -> None:
        """Tell what will be run, and how long each stage will take as far as that is known."""
        estimates = estimate_stages(self._plan, self.state)
        stages = [
            {
                "stage_id": spec.id,
                "kind": self.state.decisions[spec.id].kind,
                "seconds": estimates[spec.id].seconds if spec.id in estimates else None,
            }
            for spec in self._plan.stages
        ]
        self._context.on_event({"event": "run_started", "stages": stages})

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
        missing: set[str] = set()
        reports = []
        for spec in self._plan.stages:
            report = self._reports.get(spec.id)
            if report is None:
                is_behind = any(need.stage_id in missing for need in spec.needs)
                reason = _BEHIND_FAILURE if is_behind else _NOT_REACHED
                report = StageReport(spec.id, SKIPPED, reason, 0.0, {})
            if report.outcome not in SUCCEEDED:
                missing.add(spec.id)
            reports.append(report)
        return tuple(reports)

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
        artifact = fetched.artifact
        self._report(StageReport(spec.id, "fetched", reason, 0.0, artifact.facts, key=artifact.key))

    def _log_decision(self, decision: Decision) -> None:
        """Log why a stage runs or not, once for each time that this changes."""
        if self._logged.get(decision.stage_id) != decision:
            self._logged[decision.stage_id] = decision
            text = _DECISIONS[decision.kind]
            _log.info("%s: %s: %s", decision.stage_id, text, decision.reason)

    def _report_hit(self, spec: StageSpec) -> bool:
        """Report a stage whose result is in the store, and tell whether it is."""
        decision = self.state.decisions[spec.id]
        if decision.kind != "hit":
            return False
        artifact = self.state.artifacts[spec.id]
        report = self._reports.get(spec.id)
        # a part of a search may have given another result
        if report is None or report.outcome not in SUCCEEDED or report.key != artifact.key:
            reason, key = decision.reason, artifact.key
            self._report(StageReport(spec.id, "hit", reason, 0.0, artifact.facts, key=key))
        self._context.store.remember(spec.recipe, spec.label, artifact.key)
        return True

    def _is_up_to_date(self, spec: StageSpec) -> bool:
        """Decide about a stage again, now that the stages that it needs are done."""
        try:
            self._log_decision(self.state.decide(spec))
        except (TvmflowError, OSError):
            # `_run` meets the same problem again and reports it as the end of this stage.
            return False
        return self._report_hit(spec)

    def _run(self, spec: StageSpec) -> str:
        """Run a stage, report how that ended, and return the reason when it failed."""
        reason = ""
        try:
            decision = self.state.decide(spec)
            self._log_decision(decision)
            reason = decision.reason
            key, artifacts = self.state.keys[spec.id], self.state.artifacts
            executed = StageExecution(
                self._context,
                spec,
                key,
                reason,
                artifacts,
                again=spec.id in self.state.forced,
            ).execute()
        except DamagedBlob as damaged:
            self._forget_damaged(spec, damaged)
            return str(damaged)
        except Exception as error:
            executed = ExecutedStage(report_error(spec, reason, error, self._context.store))
        if executed.artifact is not None:
            self.state.artifacts[spec.id] = executed.artifact
            self.state.forced.pop(spec.id, None)
        if executed.verdict:
            self.verdicts[spec.id] = executed.verdict
        else:
            self.verdicts.pop(spec.id, None)
        if executed.report.outcome == "rejected" and spec.traits.is_gate:
            executed = executed._replace(report=self._blame(spec, executed.report))
        self._report(executed.report)
        return "" if executed.artifact is not None else executed.report.message or "failed"

    def _blame(self, spec: StageSpec, report: StageReport) -> StageReport:
        """Return the report of a rejected library with what is to blame; a wrong schedule is banned."""
        is_searched = STAGES[spec.stage].TRAITS.find_faults and not self._context.executor.cancelled
        if not is_searched or not faults.has_wrong_outputs(report.facts):
            return report
        causes = faults.find_faults(spec, self._plan, self.state)
        if tune := faults.ban_schedules(causes, spec, self._plan, self.state):
            self.retries.add(tune)
        fixes = [fault["fix"] for fault in causes if fault["fix"]]
        message = faults.add_faults(report.message, causes)
        return report._replace(message=message, fix="; ".join([*fixes, report.fix]))

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
        self._note_failure(report)
        self._context.on_event({"event": "stage_finished", **report._asdict()})

    def _note_failure(self, report: StageReport) -> None:
        """Keep how a stage failed, for `explain`, until it succeeds."""
        store, stage_id = self._context.store, report.stage_id
        if report.outcome in SUCCEEDED:
            forget_failure(store, stage_id)
        elif report.outcome != "cancelled":
            key = self.state.keys.get(stage_id)
            remember_failure(
                store,
                stage_id,
                Failure(
                    report.outcome,
                    key.digest if key else "",
                    time.time(),
                    report.seconds,
                    report.message,
                    report.fix,
                    report.log,
                ),
            )
