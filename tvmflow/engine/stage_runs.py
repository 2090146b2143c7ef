"""The stages of a run as they end: what was to blame, what is reported, and what is noted for later."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from tvmflow.core.types import Plan, StageKey, StageSpec
from tvmflow.engine import faults
from tvmflow.engine.report import SKIPPED, STOPPED, SUCCEEDED, StageReport
from tvmflow.engine.stage_execution import ExecutedStage, RunContext, StageExecution, report_error
from tvmflow.planning.decisions import PlanState
from tvmflow.stages import STAGES
from tvmflow.stages.base import find_facts
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.store.blobs import DamagedBlob
from tvmflow.store.failures import Failure, forget_failure, remember_failure

_log = logging.getLogger(__name__)

_BEHIND_FAILURE: Final = "a stage before it did not succeed"
_NOT_REACHED: Final = "the run ended before it"


class StageRuns:
    """Runs stages one by one, and keeps how they ended. May be used by several threads.

    Attributes:
        context: What the stages share.
        verdicts: The digests of the verdicts on rejected libraries, by stage.
        damaged: The stages with a damaged file in their result, which must run again.
        retries: The stages that must choose again, because a schedule of theirs was banned.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.verdicts: dict[str, str] = {}
        self.damaged: set[str] = set()
        self.retries: set[str] = set()
        self._reports: dict[str, StageReport] = {}

    def run(
        self, spec: StageSpec, plan: Plan, state: PlanState, reason: str, *, again: bool = False
    ) -> str:
        """Run a stage, report how that ended, and return the reason when it failed.

        Afterwards, the state of the plan has the result; `again` runs the stage also if that is there.
        """
        try:
            key, artifacts = state.keys[spec.id], state.artifacts
            executed = StageExecution(
                context=self.context,
                spec=spec,
                key=key,
                reason=reason,
                artifacts=artifacts,
                again=again,
            ).execute()
        except DamagedBlob as damaged:
            self._forget_damaged(spec, state, damaged)
            return str(damaged)
        except Exception as error:
            return self.fail(spec, reason, error, state.keys)
        if executed.artifact is not None:
            state.artifacts[spec.id] = executed.artifact
            state.forced.pop(spec.id, None)
        elif executed.report.outcome == "rejected" and spec.traits.is_gate:
            executed = executed._replace(report=self._blame(spec, plan, state, executed.report))
        return self._finish(spec, executed, state.keys)

    def fail(
        self, spec: StageSpec, reason: str, error: Exception, keys: Mapping[str, StageKey]
    ) -> str:
        """Report an exception as the end of a stage, and return it as the reason of the failure."""
        report = report_error(spec, reason, error, self.context.store)
        return self._finish(spec, ExecutedStage(report), keys)

    def _finish(
        self, spec: StageSpec, executed: ExecutedStage, keys: Mapping[str, StageKey]
    ) -> str:
        self.verdicts.pop(spec.id, None)
        if executed.verdict:
            self.verdicts[spec.id] = executed.verdict
        self.report(executed.report, keys)
        return "" if executed.artifact is not None else executed.report.message or "failed"

    def _blame(
        self, spec: StageSpec, plan: Plan, state: PlanState, report: StageReport
    ) -> StageReport:
        """Return the report of a rejected library with what is to blame; a wrong schedule is banned."""
        is_searched = STAGES[spec.stage].TRAITS.find_faults and not self.context.executor.cancelled
        verdict = find_facts(Verdict, report.facts) if is_searched else None
        if verdict is None or not faults.has_wrong_outputs(verdict):
            return report
        causes = faults.find_faults(spec, plan, state, verdict)
        if tune := faults.ban_schedules(causes, spec, plan, state):
            self.retries.add(tune)
        fixes = [fault["fix"] for fault in causes if fault["fix"]]
        message = faults.add_faults(report.message, causes)
        return report._replace(message=message, fix="; ".join([*fixes, report.fix]))

    def _forget_damaged(self, spec: StageSpec, state: PlanState, damaged: DamagedBlob) -> None:
        """Forget the results that contain the damaged file, so that they are made again."""
        for need in spec.needs:
            artifact = state.artifacts.get(need.stage_id)
            if artifact and any(file.digest == damaged.digest for file in artifact.files):
                _log.debug("%s is damaged and runs again: %s", need.stage_id, damaged)
                self.damaged.add(need.stage_id)
                state.artifacts.pop(need.stage_id)

    # ------------------------------------------------------------ reports

    def report(self, report: StageReport, keys: Mapping[str, StageKey]) -> None:
        """Report the end of a stage; how it failed is noted, for `explain`, until it succeeds."""
        self._reports[report.stage_id] = report
        store, key = self.context.store, keys.get(report.stage_id)
        if report.outcome in SUCCEEDED:
            forget_failure(store, report.stage_id)
        elif report.outcome != STOPPED:
            failure = Failure(
                outcome=report.outcome,
                key=key.digest if key else "",
                time_s=time.time(),
                seconds=report.seconds,
                message=report.message,
                fix=report.fix,
                log=report.log,
            )
            remember_failure(store, report.stage_id, failure)
        self.context.on_event({"event": "stage_finished", **report._asdict()})

    def has_reported(self, stage_id: str, key: str) -> bool:
        """Return whether a stage was reported to have succeeded with the result of a key."""
        report = self._reports.get(stage_id)
        return report is not None and report.outcome in SUCCEEDED and report.key == key

    def list_reports(self, plan: Plan) -> tuple[StageReport, ...]:
        """Return the report of every stage in the plan's order; a stage that did not run was skipped."""
        missing: set[str] = set()
        reports = []
        for spec in plan.stages:
            report = self._reports.get(spec.id)
            if report is None:
                is_behind = any(need.stage_id in missing for need in spec.needs)
                reason = _BEHIND_FAILURE if is_behind else _NOT_REACHED
                report = StageReport(spec.id, SKIPPED, reason, seconds=0.0, facts={})
            if report.outcome not in SUCCEEDED:
                missing.add(spec.id)
            reports.append(report)
        return tuple(reports)
