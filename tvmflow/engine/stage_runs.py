"""The stages of a run as they end: what was to blame, what is reported, and what is noted for later.

After `verify` has rejected a library, what is to blame is searched, and a wrong schedule banned: it is never
chosen again, so that the next best one is built and verified. Nothing here lets a library pass: only a
`verify` that succeeds does.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core import packages
from tvmflow.core.errors import TvmflowError
from tvmflow.core.fork_server import WITH_TVM, ForkServer
from tvmflow.core.types import Json, Plan, StageKey, StageSpec
from tvmflow.engine.report import SKIPPED, STOPPED, SUCCEEDED, StageReport
from tvmflow.engine.stage_execution import (
    ExecutedStage,
    RunContext,
    StageExecution,
    log_path,
    report_error,
)
from tvmflow.planning.decisions import PlanState, input_digests
from tvmflow.stages import STAGES, build, import_model, quantize, tune
from tvmflow.stages.base import find_facts, parse_settings
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.verify.verdict import PartVerdict, Verdict, list_compared
from tvmflow.store.failures import Failure, forget_failure, remember_failure
from tvmflow.store.local import DamagedBlob
from tvmflow.store.source_files import fetch_file
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.trials import Ban, timestamp

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
        if verdict is None or not has_wrong_outputs(verdict):
            return report
        causes = find_faults(spec, plan, state, verdict)
        if tune := ban_schedules(causes, spec, plan, state):
            self.retries.add(tune)
        fixes = [fault["fix"] for fault in causes if fault["fix"]]
        message = add_faults(report.message, causes)
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


# ---------------------------------------------------------------- what is to blame


_TIMEOUT_S: Final = 900.0


def has_wrong_outputs(verdict: Verdict) -> bool:
    """Return whether a verdict rejects a library for its outputs, and not for its speed or accuracy alone."""
    libraries = [*verdict.get("parts", {}).values(), verdict.get("vm", PartVerdict())]
    if find_wrong_sizes(verdict):
        return True
    inner = [output for library in libraries for output in library.get("outputs", {}).values()]
    return not verdict.get("layers", {}).get("passed", True) or any(
        not comparison.get("passed") and "incomparable" not in comparison
        for comparison in (*list_compared(verdict), *inner)
    )


def find_faults(
    spec: StageSpec, plan: Plan, state: PlanState, verdict: Verdict
) -> list[dict[str, Json]]:
    """Return what is to blame for a library that a stage rejected, in a process of its own; never raises."""
    try:
        return _search(spec, plan, state, find_wrong_sizes(verdict))
    except (TvmflowError, OSError, KeyError) as error:
        _log.debug("%s: what is to blame cannot be searched", spec.id, exc_info=True)
        return [{"text": f"what is to blame cannot be searched: {error}", "fix": ""}]


def find_wrong_sizes(verdict: Verdict) -> dict[str, int] | None:
    """Return the first sizes at which outputs are wrong; None where they are also at those of the verdict."""
    if any(not output.get("passed") for output in list_compared(verdict)):
        return None
    wrong = (
        entry["sizes"]
        for entry in verdict.get("sizes", ())
        if any(not output["passed"] for output in entry.get("outputs", {}).values())
    )
    return next(wrong, None)


def _search(
    spec: StageSpec, plan: Plan, state: PlanState, at: dict[str, int] | None
) -> list[dict[str, Json]]:
    search = STAGES[spec.stage].TRAITS.find_faults
    assert search is not None
    with (
        tempfile.TemporaryDirectory(prefix="tvmflow-") as work,
        ForkServer.start(WITH_TVM) as fork_server,
    ):
        outcome = fork_server.call(
            search,
            make_payload(spec, plan, state, Path(work), at),
            timeout_s=_TIMEOUT_S,
            log=log_path(state.store, spec.recipe, f"{spec.label}-faults"),
        )
    if outcome.kind == "ok":
        return list(outcome.value)
    return [{"text": f"what is to blame was not found: {outcome.message}", "fix": ""}]


def make_payload(
    spec: StageSpec, plan: Plan, state: PlanState, work: Path, at: dict[str, int] | None = None
) -> dict[str, Json]:
    """Return what the search takes: settings and files of a stage and of its build, and wrong sizes."""
    makers = _find_makers(spec, plan)
    built = makers.get(build.NAME)
    files = {file.role: fetch_file(file, state.store) for file in spec.files}
    digests = {
        role: digest
        for stage in (*([built] if built else []), spec)
        for role, digest in input_digests(stage, state.artifacts).items()
    }
    inputs = {role: state.store.blobs.verified_path(digest) for role, digest in digests.items()}
    model = makers.get(quantize.NAME) or makers[import_model.NAME]
    # the facts of a quantized model have those of an imported one
    imported = find_facts(ImportFacts, state.artifacts[model.id].facts)
    return {
        "verify": spec.settings,
        "build": built.settings if built else None,
        "inputs": {**files, **inputs},
        "nodes": imported.nodes if imported else (),
        "work": str(work),
        "at": at,
    }


def _find_makers(spec: StageSpec, plan: Plan) -> dict[str, StageSpec]:
    """Return the stages that lead to one, by stage; none of those that several parts have."""
    specs = {stage.id: stage for stage in plan.stages}
    makers: dict[str, dict[str, StageSpec]] = {}
    pending = [spec]
    while pending:
        for need in pending.pop().needs:
            maker = specs.get(need.stage_id)
            if maker is not None and maker.id not in makers.setdefault(maker.stage, {}):
                makers[maker.stage][maker.id] = maker
                pending.append(maker)
    return {stage: next(iter(by_id.values())) for stage, by_id in makers.items() if len(by_id) == 1}


def ban_schedules(
    faults: list[dict[str, Json]], spec: StageSpec, plan: Plan, state: PlanState
) -> str:
    """Ban the schedules that are to blame; return the stage that must choose again, or nothing.

    A locked run bans nothing: its schedules are those of the lock file.
    """
    search = _find_makers(spec, plan).get(tune.NAME)
    culprits = [fault for fault in faults if fault.get("trial")]
    is_locked = any(stage.pinned for stage in plan.stages if stage.recipe == spec.recipe)
    if search is None or not culprits or is_locked:
        return ""
    settings = parse_settings(tune.run, search.settings)
    tvm = packages.identity("apache-tvm")
    ledger = Ledger.open(Path(state.store.ledger), settings.measured_target, tvm, settings.device)
    for fault in culprits:
        reason = f"{fault['text']} ({spec.recipe})"
        ledger.workload(fault["workload"]).add([Ban(fault["trial"], reason, timestamp())])
        fault["text"] += "; the schedule is banned"
    return search.id


def choose_again(search: str, plan: Plan, state: PlanState) -> None:
    """Let a `tune` stage run again, and all that depends on it."""
    state.forced[search] = "a schedule was banned"
    outdated = {search}
    for spec in plan.stages:
        if spec.id in outdated or any(need.stage_id in outdated for need in spec.needs):
            outdated.add(spec.id)
            state.artifacts.pop(spec.id, None)


def add_faults(message: str, faults: list[dict[str, Json]]) -> str:
    """Return a message with what is to blame."""
    return "; ".join([message, *(fault["text"] for fault in faults)])
