"""Replay recorded schedules: apply each to its kernel again, and find failing ones.

Only `apply_traces` and `read_kernel` import TVM. They run in forked children, because an imported schedule or kernel
may crash the compiler, which must end only a child.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.types import Json
from tvmflow.store.local import DamagedBlob, LocalStore
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.tuning_job import summarize_error

_TIMEOUT_S: Final = 60.0
_MAX_REASON: Final = 200
_PRELOADED: Final = ("tvmflow.compiler:load_intrinsics", "tvmflow.tuning.measure")
_log = logging.getLogger(__name__)


class ReplayResult(NamedTuple):
    """The outcome of a replay.

    Attributes:
        unknown: How many workloads were not replayed, because their kernels are unknown.
    """

    workloads: int
    trials: int
    unknown: int
    findings: list[str]
    quarantined: int


def find_kernels(store: LocalStore) -> dict[str, str]:
    """Return the saved kernels, by workload key, from the store's results of `extract_tasks`."""
    kernels: dict[str, str] = {}
    for note in sorted(Path(store.root, "last").glob("*/extract_tasks*")):
        artifact = store.find(note.read_text())
        for file in artifact.files if artifact else ():
            if file.name == "workloads.json":
                # A damaged result is skipped; the next run makes it again.
                with contextlib.suppress(DamagedBlob):
                    path = Path(store.blobs.verified_path(file.digest))
                    kernels.update(json.loads(path.read_bytes()))
    return kernels


def replay_ledger(
    root: Path, kernels: Mapping[str, str], targets: Sequence[str] = ()
) -> ReplayResult:
    """Apply every trace of workloads with a known kernel, and quarantine failing trials."""
    workloads = trials = unknown = quarantined = 0
    findings: list[str] = []
    with ForkServer.start(_PRELOADED) as fork_server:
        for folder in list_target_folders(root, targets):
            for key, _ in folder.workload_files():
                mod = folder.ledger.kernel(key) or kernels.get(key, "")
                problem = find_kernel_problem(fork_server, key, mod) if mod else ""
                if problem:
                    findings.append(f"workload {key[:12]}: its kernel cannot be used: {problem}")
                if problem or not mod or folder.description is None:
                    unknown += 1
                    continue
                ledger = folder.ledger.workload(key)
                applied, failed = quarantine_inapplicable(
                    fork_server, mod, folder.description.target, ledger
                )
                workloads += 1
                trials += applied
                quarantined += failed
                findings += ledger.repairs
    return ReplayResult(
        workloads=workloads,
        trials=trials,
        unknown=unknown,
        findings=findings,
        quarantined=quarantined,
    )


# ---------------------------------------------------------------- kernels


def find_kernel_problem(fork_server: ForkServer, key: str, mod: str) -> str:
    """Return why a saved kernel is unreadable or does not belong to a workload's key; empty if it does.

    Raises:
        StageError: TVM cannot be loaded.
    """
    outcome = fork_server.call(read_kernel, {"mod": mod}, timeout_s=_TIMEOUT_S)
    if outcome.kind in ("error", "cancelled"):
        raise _cannot_apply(outcome.message)
    if outcome.kind != "ok":
        return outcome.message
    problem, actual_key = outcome.value
    if not problem and actual_key != key:
        return f"it is that of workload {actual_key[:12]}"
    return str(problem)


def read_kernel(payload: Json, emit: Emit) -> list[str]:
    """Load the saved kernel `mod`: the entry point of the child.

    Returns:
        The reason why the kernel cannot be read, or an empty string; and its workload key.
    """
    import tvm

    from tvmflow.tuning.workloads import workload_key

    del emit
    try:
        mod = tvm.ir.load_json(payload["mod"])
        return ["", workload_key(mod)]
    # Whatever TVM raises here means that this kernel cannot be read.
    except Exception as error:
        return [summarize_error(error)[:_MAX_REASON], ""]


# ---------------------------------------------------------------- traces from elsewhere


class TraceVerdict(NamedTuple):
    """The outcome of applying the trials of a workload.

    Attributes:
        problem: The reason why no trial can be applied, a problem with the kernel; otherwise empty.
        reasons: Why single trials cannot be applied, by id.
    """

    problem: str
    reasons: Mapping[str, str]


class TraceCheck:
    """Applies traces to their kernels before a ledger imports them."""

    def __init__(self, fork_server: ForkServer, kernels: Mapping[str, str]) -> None:
        self._fork_server = fork_server
        self._kernels = kernels

    @classmethod
    @contextlib.contextmanager
    def start(cls, store: LocalStore) -> Iterator[TraceCheck]:
        """Yield a checker that knows the kernels of a store."""
        with ForkServer.start(_PRELOADED) as fork_server:
            yield cls(fork_server, find_kernels(store))

    def check(
        self, key: str, kernel: str, target: Mapping[str, Json], trials: Sequence[Trial]
    ) -> TraceVerdict:
        """Apply the trials of a workload to its kernel.

        Raises:
            StageError: TVM cannot be loaded.
        """
        mod = kernel or self._kernels.get(key, "")
        if not mod:
            return TraceVerdict("its kernel is not known, so that no trace can be applied", {})
        problem = find_kernel_problem(self._fork_server, key, mod)
        if problem:
            return TraceVerdict(f"its kernel cannot be used: {problem}", {})
        return TraceVerdict("", _find_inapplicable(self._fork_server, mod, target, trials)[1])


def quarantine_inapplicable(
    fork_server: ForkServer, mod: str, target: Mapping[str, Json], ledger: WorkloadLedger
) -> tuple[int, int]:
    """Quarantine the trials of a workload whose traces do not apply to it.

    Returns:
        How many trials were applied, and how many were quarantined.
    """
    applied, reasons = _find_inapplicable(fork_server, mod, target, ledger.trials.values())
    for trial_id, reason in reasons.items():
        ledger.quarantine([trial_id], reason)
    return applied, len(reasons)


def _find_inapplicable(
    fork_server: ForkServer, mod: str, target: Mapping[str, Json], trials: Iterable[Trial]
) -> tuple[int, dict[str, str]]:
    """Return how many trials were applied, and why some failed, by id."""
    # Trials that already failed to apply when they were measured stay in the ledger as failures.
    chosen = [trial for trial in trials if not (trial.failure and trial.failure.phase == "apply")]
    reasons = _failure_reasons(fork_server, mod, dict(target), chosen) if chosen else {}
    return len(chosen), {
        trial_id: f"its trace does not apply: {reason}" for trial_id, reason in reasons.items()
    }


def _cannot_apply(message: str) -> StageError:
    return StageError(
        f"schedules cannot be applied on this machine: {message}", fix="run `tvmflow doctor`"
    )


def _failure_reasons(
    fork_server: ForkServer, mod: str, target: Json, trials: Sequence[Trial]
) -> dict[str, str]:
    payload = {"mod": mod, "target": target, "traces": [trial.trace for trial in trials]}
    outcome = fork_server.call(apply_traces, payload, timeout_s=_TIMEOUT_S + len(trials))
    if outcome.kind == "ok":
        pairs = zip(trials, outcome.value, strict=True)
        return {trial.id: reason for trial, reason in pairs if reason}
    if outcome.kind in ("error", "cancelled") or not trials:
        raise _cannot_apply(outcome.message)
    if len(trials) == 1:
        _failure_reasons(fork_server, mod, target, [])
        return {trials[0].id: outcome.message}
    _log.debug("one of %d traces crashes or hangs the compiler: bisecting", len(trials))
    half = len(trials) // 2
    return {
        **_failure_reasons(fork_server, mod, target, trials[:half]),
        **_failure_reasons(fork_server, mod, target, trials[half:]),
    }


def apply_traces(payload: Json, emit: Emit) -> list[str]:
    """Apply `traces` to the saved workload `mod` for a `target`: the entry point of the child.

    Returns:
        For each trace, the reason why it does not apply; empty if it applies.
    """
    import tvm

    from tvmflow.compiler import load_intrinsics
    from tvmflow.tuning.measure import apply_trace

    del emit
    load_intrinsics(payload["target"])
    mod = tvm.ir.load_json(payload["mod"])
    reasons = []
    for trace in payload["traces"]:
        try:
            apply_trace(mod, trace)
        # Whatever TVM raises here means that this trace does not apply.
        except Exception as error:
            reasons.append(summarize_error(error)[:_MAX_REASON])
        else:
            reasons.append("")
    return reasons
