"""The execution of one stage: claim its key, look again for its result, run it, publish."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tvmflow.core import spans
from tvmflow.core.disk_errors import disk_errors, explain, find_disk_problem
from tvmflow.core.errors import EnvironmentProblem, Interrupted, TvmflowError, outcome_for
from tvmflow.core.files import write_atomically
from tvmflow.core.types import Artifact, InputFile, StageCall, StageKey, StageResult, StageSpec
from tvmflow.engine.report import StageReport
from tvmflow.executors.base import Executor, OnEvent
from tvmflow.frontends import FRONTENDS
from tvmflow.planning.decisions import check_pinned, input_digests
from tvmflow.store.addresses import without_secrets
from tvmflow.store.downloads import DownloadProgress
from tvmflow.store.failures import existing_log
from tvmflow.store.file_digests import stamp
from tvmflow.store.leases import Claim
from tvmflow.store.local import LocalStore
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.source_files import SourceFiles, fetch_file
from tvmflow.targets import devices
from tvmflow.tuning.remote_ledger import LedgerSync

_log = logging.getLogger(__name__)


class RunContext(NamedTuple):
    """The parts of a run that all of its stages use.

    Attributes:
        store: Where results are kept.
        executor: What runs the stages.
        on_event: Called with every progress event, from several threads.
        timeout_s: How long a stage may run; None for what each stage declares.
        remote_client: Fetches results before a stage runs, and uploads them afterwards.
        ledger_sync: Does so with the trials of tuning.
        memory_bytes: How much memory a stage may take (see `StageCall`); None for what its recipe says.
    """

    store: LocalStore
    executor: Executor
    on_event: OnEvent
    timeout_s: float | None = None
    remote_client: RemoteCacheClient | None = None
    ledger_sync: LedgerSync | None = None
    memory_bytes: int | None = None


class ExecutedStage(NamedTuple):
    """The end of an execution: its artifact, or the digest of the verdict that rejected the library."""

    report: StageReport
    artifact: Artifact | None = None
    verdict: str = ""


@dataclass(frozen=True)
class StageExecution:
    """The execution of one stage; those of a run may run in several threads.

    With `again`, the stage runs also if its result is there, which is replaced.
    """

    context: RunContext
    spec: StageSpec
    key: StageKey
    reason: str
    artifacts: Mapping[str, Artifact]
    again: bool = False

    def execute(self) -> ExecutedStage:
        """Bring about the result of the stage.

        Raises:
            DamagedBlob: when a stored input is damaged: its stage must run again.
            TvmflowError: when the stage cannot be run.
        """
        spec, store, client = self.spec, self.context.store, self.context.remote_client
        with disk_errors(store.root):
            with store.claim(self.key.digest) as claim:
                # Another process may have finished the stage while this one waited for the claim.
                executed = None if self.again else self._find_result()
                if executed is not None:
                    store.release(claim)
                else:
                    executed = self._run(claim)
            if executed.report.outcome == "ran" and client:
                client.offer(self.key.digest)
            if executed.artifact is not None:
                check_pinned(spec, executed.artifact)
                store.remember(spec.recipe, spec.label, self.key.digest)
            return executed

    def _find_result(self) -> ExecutedStage | None:
        artifact, outcome, reason = self.context.store.find(self.key.digest), "hit", self.reason
        if artifact is None and self.context.remote_client:
            fetched = self.context.remote_client.fetch(self.key)
            if fetched is not None:
                artifact, outcome, reason = fetched.artifact, "fetched", f"from {fetched.origin}"
        if artifact is None:
            return None
        _log.debug("%s: %s, found after claiming %s", self.spec.id, outcome, self.key.digest[:12])
        key = artifact.key
        report = StageReport.of_result(
            self.spec.id, artifact.facts, outcome=outcome, reason=reason, key=key
        )
        return ExecutedStage(report, artifact)

    def _run(self, claim: Claim) -> ExecutedStage:
        spec, store = self.spec, self.context.store
        log = log_path(store, spec.recipe, spec.label)
        store.make_way(str(log))
        # who follows the log sees nothing of an earlier execution
        log.unlink(missing_ok=True)
        started = {"event": "stage_started", "stage_id": spec.id, "reason": self.reason}
        self.context.on_event({**started, "log": str(log)})
        with self._sync_ledger():
            result = self._run_in_worker(claim, log)
        _log.debug("%s: %s after %.1f s", spec.id, result.outcome, result.seconds)
        outcome = "ran" if result.outcome == "ok" else result.outcome
        key = self.key.digest
        report = StageReport(
            stage_id=spec.id,
            outcome=outcome,
            reason=self.reason,
            seconds=result.seconds,
            facts=result.facts,
            key=key,
        )
        if outcome == "ran":
            artifact = store.publish(claim, self.key, result.facts, result.seconds, spec.id)
            return ExecutedStage(report, artifact)
        written = existing_log(result.log) if result.message else ""
        report = report._replace(message=result.message, fix=result.fix, log=written)
        # The verdict on a rejected library is no result, so it is stored as a blob only.
        verdict = Path(claim.out, "verdict.json")
        if outcome != "rejected" or not verdict.is_file():
            return ExecutedStage(report)
        report = report._replace(facts=json.loads(verdict.read_text()))
        return ExecutedStage(report, verdict=store.blobs.add(str(verdict)))

    @contextlib.contextmanager
    def _sync_ledger(self) -> Iterator[None]:
        """Before tuning, fetch trials from the remote cache; afterwards, offer it the new ones."""
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
            seconds = time.monotonic() - started
            return StageResult(
                outcome="timeout", message=text, fix="", facts={}, seconds=seconds, log=""
            )
        stamps = {path: stamp(path) for path in files.values()}
        # Each file of another stage is read once to check its digest.
        artifact_files = {
            role: store.blobs.verified_path(digest)
            for role, digest in input_digests(spec, self.artifacts).items()
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
        """Check that the recipe names all files of a model whose first one has just been downloaded."""
        at_addresses = [file for file in self.spec.files if file.url]
        if all(file.path for file in at_addresses):
            return
        fetched = [file._replace(path=files[file.role]) for file in at_addresses]
        unnamed = FRONTENDS[self.spec.settings["model"]["kind"]].find_unnamed_files(fetched)
        SourceFiles(self.context.store, self._on_download).check_complete(fetched, unnamed)

    def _find_file(self, file: InputFile) -> str:
        limit_s = self.context.timeout_s or math.inf
        with spans.span(
            f"find {file.role} of {self.spec.id}", url=file.url and without_secrets(file.url)
        ):
            return fetch_file(
                file, self.context.store, on_progress=self._on_download, limit_s=limit_s
            )

    def _on_download(self, progress: DownloadProgress) -> None:
        if self.context.executor.cancelled:
            raise Interrupted("the download was stopped; the part that arrived is kept")
        event = {"event": "download", **progress._asdict(), "stage_id": self.spec.id}
        self.context.on_event(event)


def report_error(spec: StageSpec, reason: str, error: Exception, store: LocalStore) -> StageReport:
    """Report an exception as the end of the stage: a failed stage must not look skipped."""
    if isinstance(error, OSError):
        error = explain(error, store.root) or EnvironmentProblem(str(error))
    elif not isinstance(error, TvmflowError):
        # Python and libraries have errors of their own where no thread can be started
        error = find_disk_problem([store.root], str(error)) or error
    if isinstance(error, TvmflowError):
        outcome = outcome_for(type(error))
        _log.debug("%s: %s: %s", spec.id, outcome, error.message)
        return StageReport(
            spec.id, outcome, reason="", seconds=0.0, facts={}, message=error.message, fix=error.fix
        )
    log = log_path(store, spec.recipe, spec.label)
    details = "".join(traceback.format_exception(error))
    _log.debug("%s: %s", spec.id, details)
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(log, details)
    message = f"a bug in tvmflow: {type(error).__name__}: {error}"
    written = existing_log(str(log))
    return StageReport(
        spec.id, "crashed", reason, seconds=0.0, facts={}, message=message, log=written
    )


def log_path(store: LocalStore, recipe: str, label: str) -> Path:
    """Return the path of the log of a stage's last execution, whether it exists or not."""
    return Path(store.root, "logs", recipe, f"{label.replace('/', '+')}.log")


def _stamp_or_none(path: str) -> list[int] | None:
    try:
        return stamp(path)
    except OSError:
        return None
