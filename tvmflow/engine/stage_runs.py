"""The stages of a run: each claims its key, checks again for a result, runs, and is reported.

When `verify` rejects a library, the fault is localized and a wrong schedule is banned; then the next best schedule is
built and verified. A library passes only if `verify` succeeds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.disk_errors import disk_errors, explain, find_disk_problem
from tvmflow.core.errors import EnvironmentProblem, Interrupted, TvmflowError, outcome_for
from tvmflow.core.files import write_atomically
from tvmflow.core.fork_server import WITH_TVM, ForkServer
from tvmflow.core.types import (
    Artifact,
    InputFile,
    Json,
    Plan,
    StageCall,
    StageKey,
    StageResult,
    StageSpec,
)
from tvmflow.engine.report import SKIPPED, STOPPED, SUCCEEDED, StageReport
from tvmflow.executors import Executor, OnEvent
from tvmflow.frontends import FRONTENDS
from tvmflow.planning.decisions import PlanState, check_pinned, input_digests
from tvmflow.stages import STAGES, build, import_model, quantize, tune
from tvmflow.stages.base import find_facts, parse_settings
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.verify.verdict import PartVerdict, Verdict, list_compared
from tvmflow.store.addresses import without_secrets
from tvmflow.store.disk import Claim
from tvmflow.store.downloads import DownloadProgress
from tvmflow.store.file_digests import stamp
from tvmflow.store.local import (
    DamagedBlob,
    Failure,
    LocalStore,
    existing_log,
    forget_failure,
    remember_failure,
)
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.source_files import SourceFiles, fetch_file
from tvmflow.targets import devices
from tvmflow.tuning.remote_ledger import LedgerSync
from tvmflow.tuning.trials import Ban, timestamp


class RunContext(NamedTuple):
    """What all stages of a run share. Events come from several threads.

    `timeout_s` and `memory_bytes` limit each stage; with None, each stage's own limits apply.
    """

    store: LocalStore
    executor: Executor
    on_event: OnEvent
    timeout_s: float | None = None
    remote_client: RemoteCacheClient | None = None
    ledger_sync: LedgerSync | None = None
    memory_bytes: int | None = None


class ExecutedStage(NamedTuple):
    """The result of an execution: an artifact, or the digest of the verdict that rejected the library."""

    report: StageReport
    artifact: Artifact | None = None
    verdict: str = ""


@dataclass(frozen=True)
class StageExecution:
    """The execution of one stage, in any thread; with `again`, an existing result is replaced."""

    context: RunContext
    spec: StageSpec
    state: PlanState
    reason: str
    again: bool

    @property
    def key(self) -> StageKey:
        """The key of the stage."""
        return self.state.keys[self.spec.id]

    def execute(self) -> ExecutedStage:
        """Run the stage, or fetch its result.

        Raises:
            DamagedBlob: when a stored input is damaged, so the stage that made it must run again.
            TvmflowError: when the stage cannot be run.
        """
        spec, store, client = self.spec, self.context.store, self.context.remote_client
        with disk_errors(store.root):
            with store.claim(self.key.digest) as claim:
                # Another process may have made the result while this one waited for the claim.
                executed = None if self.again else self._find_result()
                if executed is not None:
                    store.release(claim)
                else:
                    executed = self._run(claim)
            if executed.report.outcome == "ran" and client:
                client.uploader.offer(self.key.digest)
            if executed.artifact is not None:
                check_pinned(spec, executed.artifact)
                store.remember(spec.recipe, spec.label, self.key.digest)
            return executed

    def _find_result(self) -> ExecutedStage | None:
        artifact, outcome, reason = self.context.store.find(self.key.digest), "hit", self.reason
        if artifact is None and self.context.remote_client:
            fetched = self.context.remote_client.reader.fetch(self.key)
            if fetched is not None:
                artifact, outcome, reason = fetched.artifact, "fetched", f"from {fetched.origin}"
        if artifact is None:
            return None
        _log.debug("%s: %s, found after claiming %s", self.spec.id, outcome, self.key.digest[:12])
        report = StageReport(self.spec.id, outcome, reason, facts=artifact.facts, key=artifact.key)
        return ExecutedStage(report, artifact)

    def _run(self, claim: Claim) -> ExecutedStage:
        spec, store = self.spec, self.context.store
        log = log_path(store, spec.recipe, spec.label)
        store.make_way(str(log))
        # Remove the log, so that nobody who follows it sees an earlier execution.
        log.unlink(missing_ok=True)
        started = {"event": "stage_started", "stage_id": spec.id, "reason": self.reason}
        self.context.on_event({**started, "log": str(log)})
        with self._sync_ledger():
            result = self._run_in_worker(claim, log)
        _log.debug("%s: %s after %.1f s", spec.id, result.outcome, result.seconds)
        facts = dict(result.facts)
        report = StageReport(
            stage_id=spec.id,
            outcome="ran" if result.outcome == "ok" else result.outcome,
            reason=self.reason,
            seconds=result.seconds,
            facts=facts,
            message=result.message,
            fix=result.fix,
            log=existing_log(result.log) if result.message else "",
            key=self.key.digest,
        )
        if report.outcome == "ran":
            artifact = store.publish(claim, self.key, facts, result.seconds, spec.id)
            return ExecutedStage(report, artifact)
        # The verdict on a rejected library is stored only as a blob, because it is not a result.
        verdict = Path(claim.out, "verdict.json")
        if report.outcome != "rejected" or not verdict.is_file():
            return ExecutedStage(report)
        report = report._replace(facts=json.loads(verdict.read_text()))
        return ExecutedStage(report, verdict=store.blobs.add(str(verdict)))

    @contextlib.contextmanager
    def _sync_ledger(self) -> Iterator[None]:
        """Fetch trials from the remote cache before tuning, and offer it the new ones afterwards."""
        ledger_sync = self.context.ledger_sync if self.spec.traits.uses_ledger else None
        if ledger_sync:
            with spans.span(f"pull trials for {self.spec.id}"):
                ledger_sync.pull(self.spec.settings)
        yield
        if ledger_sync:
            ledger_sync.offer(self.spec.settings)

    def _run_in_worker(self, claim: Claim, log: Path) -> StageResult:
        spec, store = self.spec, self.context.store
        started, limit_s = time.monotonic(), self.context.timeout_s
        memory_bytes = self.context.memory_bytes
        try:
            files = {file.role: self._find_file(file) for file in spec.files}
            self._check_named_files(files)
        except TimeoutError:
            text = f"its download took longer than {limit_s:g} s and was stopped; what has arrived is kept"
            return StageResult("timeout", text, seconds=time.monotonic() - started)
        stamps = {path: stamp(path) for path in files.values()}
        # Each file of another stage is read once to check its digest.
        artifact_files = {
            role: store.blobs.verified_path(digest)
            for role, digest in input_digests(spec, self.state.artifacts).items()
        }
        call = StageCall(
            stage=spec.stage,
            settings=spec.settings,
            inputs={**files, **artifact_files},
            out=claim.out,
            work=claim.work,
            ledger=store.ledger,
            locks=devices.device_locks_folder(),
            timeout_s=limit_s or spec.timeout_s,
            tools=self.key.preimage["tools"],
            traits=spec.traits,
            devices=spec.devices,
            memory_bytes=spec.memory_bytes if memory_bytes is None else memory_bytes,
        )
        result = self.context.executor.execute(
            call, log, lambda event: self.context.on_event({**event, "stage_id": spec.id})
        )
        edited = [path for path, before in stamps.items() if _stamp_or_none(path) != before]
        if edited and result.outcome == "ok":
            message = f"{edited[0]} was changed while the stage read it"
            return result._replace(outcome="failed", message=message, fix="run again")
        return result

    def _check_named_files(self, files: Mapping[str, str]) -> None:
        """Check that the recipe names all files of a model whose main file was just downloaded."""
        at_addresses = [file for file in self.spec.files if file.url]
        if all(file.path for file in at_addresses):
            return
        fetched = [file._replace(path=files[file.role]) for file in at_addresses]
        unnamed = FRONTENDS[self.spec.settings["model"]["kind"]].find_unnamed_files(fetched)
        SourceFiles(self.context.store, self._on_download).check_complete(fetched, unnamed)

    def _find_file(self, file: InputFile) -> str:
        limit_s, store = self.context.timeout_s or math.inf, self.context.store
        url = file.url and without_secrets(file.url)
        with spans.span(f"find {file.role} of {self.spec.id}", url=url):
            return fetch_file(file, store, on_progress=self._on_download, limit_s=limit_s)

    def _on_download(self, progress: DownloadProgress) -> None:
        if self.context.executor.cancelled:
            raise Interrupted("the download was stopped; the part that arrived is kept")
        event = {"event": "download", **progress._asdict(), "stage_id": self.spec.id}
        self.context.on_event(event)


def report_error(spec: StageSpec, reason: str, error: Exception, store: LocalStore) -> StageReport:
    """Return the report of a stage that ended with an exception."""
    if isinstance(error, OSError):
        error = explain(error, store.root) or EnvironmentProblem(str(error))
    elif not isinstance(error, TvmflowError):
        # A full disk can appear as errors of other types, in Python and in libraries.
        error = find_disk_problem([store.root], str(error)) or error
    if isinstance(error, TvmflowError):
        outcome = outcome_for(type(error))
        _log.debug("%s: %s: %s", spec.id, outcome, error.message)
        return StageReport(spec.id, outcome, message=error.message, fix=error.fix)
    log = log_path(store, spec.recipe, spec.label)
    details = "".join(traceback.format_exception(error))
    _log.debug("%s: %s", spec.id, details)
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(log, details)
    message = f"a bug in tvmflow: {type(error).__name__}: {error}"
    return StageReport(spec.id, "crashed", reason, message=message, log=existing_log(str(log)))


def log_path(store: LocalStore, recipe: str, label: str) -> Path:
    """Return the path of the log of a stage's last execution."""
    return Path(store.root, "logs", recipe, f"{label.replace('/', '+')}.log")


def _stamp_or_none(path: str) -> list[int] | None:
    try:
        return stamp(path)
    except OSError:
        return None


_log = logging.getLogger(__name__)

_BEHIND_FAILURE: Final = "a stage before it did not succeed"
_NOT_REACHED: Final = "the run ended before it"


class StageRuns:
    """Runs stages one by one, and keeps their outcomes. Thread-safe.

    `verdicts` maps stages to the digests of verdicts on rejected libraries. `damaged` stages run again because a file
    in their result is damaged. `retries` are stages that choose again because one of their schedules was banned.
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
        """Run a stage, with `again` even if it is up to date; return the reason of a failure, or nothing."""
        try:
            executed = StageExecution(self.context, spec, state, reason, again).execute()
        except DamagedBlob as damaged:
            self._forget_damaged(spec, state, damaged)
            return str(damaged)
        except Exception as error:
            return self.fail(spec, reason, error, state.keys)
        if executed.artifact is not None:
            state.artifacts[spec.id] = executed.artifact
            state.forced.pop(spec.id, None)
        elif executed.report.outcome == "rejected" and spec.traits.is_gate:
            report = self._localize_faults(spec, plan, state, executed.report)
            executed = executed._replace(report=report)
        return self._finish(spec, executed, state.keys)

    def fail(
        self, spec: StageSpec, reason: str, error: Exception, keys: Mapping[str, StageKey]
    ) -> str:
        """Report an exception as a stage's outcome; return the reason of the failure."""
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

    def _localize_faults(
        self, spec: StageSpec, plan: Plan, state: PlanState, report: StageReport
    ) -> StageReport:
        """Return a rejected library's report with its faults; a wrong schedule is banned."""
        is_searched = STAGES[spec.stage].TRAITS.find_faults and not self.context.executor.cancelled
        verdict = find_facts(Verdict, report.facts) if is_searched else None
        if verdict is None or not has_wrong_outputs(verdict):
            return report
        causes = find_faults(spec, plan, state, verdict)
        if tune := ban_schedules(causes, spec, plan, state):
            self.retries.add(tune)
        fixes = [fault["fix"] for fault in causes if fault["fix"]]
        message = "; ".join([report.message, *(fault["text"] for fault in causes)])
        return report._replace(message=message, fix="; ".join([*fixes, report.fix]))

    def _forget_damaged(self, spec: StageSpec, state: PlanState, damaged: DamagedBlob) -> None:
        """Forget the results that contain a damaged file, so that they are made again."""
        for need in spec.needs:
            artifact = state.artifacts.get(need.stage_id)
            if artifact and any(file.digest == damaged.digest for file in artifact.files):
                _log.debug("%s is damaged and runs again: %s", need.stage_id, damaged)
                self.damaged.add(need.stage_id)
                state.artifacts.pop(need.stage_id)

    def report(self, report: StageReport, keys: Mapping[str, StageKey]) -> None:
        """Report a stage's outcome; a failure is noted for `explain` until the stage succeeds."""
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
        """Return whether a stage was reported as successful with this key's result."""
        report = self._reports.get(stage_id)
        return report is not None and report.outcome in SUCCEEDED and report.key == key

    def list_reports(self, plan: Plan) -> tuple[StageReport, ...]:
        """Return the report of every stage in plan order; stages that did not run count as skipped."""
        missing: set[str] = set()
        reports = []
        for spec in plan.stages:
            report = self._reports.get(spec.id)
            if report is None:
                is_behind = any(need.stage_id in missing for need in spec.needs)
                reason = _BEHIND_FAILURE if is_behind else _NOT_REACHED
                report = StageReport(spec.id, SKIPPED, reason)
            if report.outcome not in SUCCEEDED:
                missing.add(spec.id)
            reports.append(report)
        return tuple(reports)


# ---------------------------------------------------------------- fault localization

_TIMEOUT_S: Final = 900.0


def has_wrong_outputs(verdict: Verdict) -> bool:
    """Return whether a library was rejected for wrong outputs, rather than only for speed or accuracy."""
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
    """Localize the fault of a rejected library, in another process; never raises."""
    search = STAGES[spec.stage].TRAITS.find_faults
    assert search is not None
    log = log_path(state.store, spec.recipe, f"{spec.label}-faults")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tvmflow-") as work,
            ForkServer.start(WITH_TVM) as fork_server,
        ):
            payload = make_payload(spec, plan, state, Path(work), find_wrong_sizes(verdict))
            outcome = fork_server.call(search, payload, timeout_s=_TIMEOUT_S, log=log)
    except (TvmflowError, OSError, KeyError) as error:
        _log.debug("%s: the fault cannot be localized", spec.id, exc_info=True)
        return [{"text": f"the fault cannot be localized: {error}", "fix": ""}]
    if outcome.kind == "ok":
        return list(outcome.value)
    return [{"text": f"the fault was not found: {outcome.message}", "fix": ""}]


def find_wrong_sizes(verdict: Verdict) -> dict[str, int] | None:
    """Return the first further sizes with wrong outputs; None if tuning sizes have wrong ones, or none do."""
    if any(not output.get("passed") for output in list_compared(verdict)):
        return None
    for entry in verdict.get("sizes", ()):
        if any(not output["passed"] for output in entry.get("outputs", {}).values()):
            return entry["sizes"]
    return None


def make_payload(
    spec: StageSpec, plan: Plan, state: PlanState, work: Path, at: dict[str, int] | None = None
) -> dict[str, Json]:
    """Return the input of fault localization: settings and files of stage and build, and wrong sizes."""
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
    # A quantized model's facts include those of the imported model.
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
    """Return a stage's direct and indirect producers by stage name; ambiguous names are left out."""
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
    """Ban faulty schedules, unless the run is locked; return the id of the stage that must choose again."""
    search = _find_makers(spec, plan).get(tune.NAME)
    culprits = [fault for fault in faults if fault.get("trial")]
    is_locked = any(stage.pinned for stage in plan.stages if stage.recipe == spec.recipe)
    if search is None or not culprits or is_locked:
        return ""
    ledger = parse_settings(tune.run, search.settings).open_ledger(Path(state.store.ledger))
    for fault in culprits:
        reason = f"{fault['text']} ({spec.recipe})"
        ledger.workload(fault["workload"]).add([Ban(fault["trial"], reason, timestamp())])
        fault["text"] += "; the schedule is banned"
    return search.id


def choose_again(search: str, plan: Plan, state: PlanState) -> None:
    """Make a `tune` stage and everything that depends on it run again."""
    state.forced[search] = "a schedule was banned"
    outdated = {search}
    for spec in plan.stages:
        if spec.id in outdated or any(need.stage_id in outdated for need in spec.needs):
            outdated.add(spec.id)
            state.artifacts.pop(spec.id, None)
