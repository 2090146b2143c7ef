"""The local executor: each stage runs in its own process on this machine."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tvmflow.core import errors
from tvmflow.core.codec import to_json
from tvmflow.core.disk_errors import find_disk_problem
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.core.formatting import excerpt
from tvmflow.core.memory import MemoryExcess, MemoryWatch
from tvmflow.core.types import Json, StageCall, StageResult
from tvmflow.executors import PLACE, OnEvent
from tvmflow.targets import devices
from tvmflow.targets.llvm_query import query_targets_in_children

_log: Final = logging.getLogger(__name__)

_RUN_STAGE: Final = "tvmflow.executors.stage_worker:run_stage"
_LOG_END_BYTES: Final = 4096
# Parts of out-of-memory messages from Python, C++ and the kernel.
_NO_MEMORY: Final = ("MemoryError", "bad_alloc", "memory ran out")
PRELOADED: Final = (
    *("numpy", "tvm", "tvm.s_tir.meta_schedule", "tvmflow.executors.stage_worker"),
    *("tvmflow.compiler:compile_form", "tvmflow.tuning.workloads"),
)
"""Modules that the fork server imports once for all stages."""


# A server started before its executor exists, which then takes it over.
_spare: ForkServer | None = None


def start_early() -> ForkServer:
    """Start and return the next executor's fork server, which loads TVM while the caller plans."""
    global _spare
    if _spare is None:
        _spare = ForkServer.start(PRELOADED)
    return _spare


def query_targets(targets: Sequence[Json]) -> list[Json]:
    """Query LLVM about targets in the next executor's fork server, so that TVM is loaded only once."""
    return query_targets_in_children(targets, start_early())


def _take_spare() -> ForkServer | None:
    global _spare
    spare, _spare = _spare, None
    return spare


def close_spare() -> None:
    """End the server that was started early, unless an executor has taken it over."""
    if (spare := _take_spare()) is not None:
        # The server may still be loading TVM.
        spare.cancel()
        spare.close()


class ProcessExecutor:
    """Runs each stage in a freshly forked process of a fork server that has TVM loaded."""

    slots = 1

    def __init__(self) -> None:
        self._fork_server: ForkServer | None = None
        self._starting = threading.Lock()
        self._memory = MemoryWatch()
        self.cancelled = False

    def start(self) -> None:
        """Start the fork server, which loads TVM in the background; does nothing if it is running."""
        self._running_server()

    def _running_server(self) -> ForkServer:
        with self._starting:
            if self._fork_server is not None and self._fork_server.is_gone:
                # The kernel may have killed the server when memory ran out; the remaining stages need another one.
                self._fork_server.close()
                self._fork_server = None
            if self._fork_server is None:
                self._fork_server = _take_spare() or ForkServer.start(PRELOADED)
            return self._fork_server

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage to its end; a failure or crash is returned as a result, not raised."""
        fork_server = self._running_server()
        if self.cancelled:
            return _make_result(Outcome("cancelled", 0.0, "the run was cancelled"), log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with _shared_cpu(call):
            outcome = self._call_watched(fork_server, call, log, on_event)
        _log.debug("%s: %s after %.2f s", call.stage, outcome.kind, outcome.seconds)
        if outcome.kind == "crashed":
            # A full disk kills a process that writes to a memory-mapped file, without an error message.
            outcome = _explain_crash(outcome, call, log)
        return _make_result(_add_fix(outcome), log)

    def _call_watched(
        self, fork_server: ForkServer, call: StageCall, log: Path, on_event: OnEvent
    ) -> Outcome:
        """Run a stage in a child process, which is stopped if it uses too much memory."""
        pids: list[int] = []
        excess: MemoryExcess | None = None

        def begin(pid: int) -> None:
            pids.append(pid)
            on_event({"event": PLACE, "pid": pid, "worker": ""})
            self._memory.add(pid, call.memory_bytes)

        try:
            outcome = fork_server.call(
                _RUN_STAGE,
                to_json(call),
                timeout_s=call.timeout_s,
                log=log,
                emit=on_event,
                on_start=begin,
            )
        finally:
            for pid in pids:
                excess = self._memory.remove(pid)
        return _explain_memory(outcome, excess, log)

    def cancel(self) -> None:
        """Stop every running stage, and let none start."""
        self.cancelled = True
        if self._fork_server is not None:
            self._fork_server.cancel()

    def close(self) -> None:
        """End the fork server."""
        close_spare()
        if self._fork_server is not None:
            self._fork_server.close()


@contextlib.contextmanager
def _shared_cpu(call: StageCall) -> Iterator[None]:
    """Share this machine's CPU with other stages; waits while a stage measures on it.

    A measuring stage does not wait here: it locks the CPU itself, only while it measures.
    """
    if call.traits.measures:
        yield
        return
    with devices.shared(Path(call.locks), devices.CPU):
        yield


def _explain_memory(outcome: Outcome, excess: MemoryExcess | None, log: Path) -> Outcome:
    """Return the outcome with its cause, excessive memory, if the stage failed for that reason."""
    is_exhausted = any(text in outcome.message for text in _NO_MEMORY)
    if outcome.kind not in ("error", "crashed") or not (excess or is_exhausted):
        return outcome
    if excess is None:
        message = outcome.message
    elif excess.is_stopped:
        message = excess.text
    else:
        message = f"{excess.text}; the stage failed: {outcome.message}"
    line = _last_line(log)
    message += f"; the last line of its log: {line}" if line else ""
    if excess is not None and not excess.is_shared:
        fix = "set a larger --stage-memory or stage_memory, or use a machine with more memory"
    else:
        # Memory ran out without a limit of the user's.
        fix = "run fewer stages at a time (--jobs 1), or use a machine with more memory"
    if excess is not None:
        outcome = outcome._replace(kind="error", error="StageError")
    return outcome._replace(message=message, fix=fix)


def read_end(log: Path, max_bytes: int) -> str:
    """Return the end of a log; empty if there is no log."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(log.stat().st_size - max_bytes, 0))
        return stream.read().decode(errors="replace")
    return ""


def _last_line(log: Path) -> str:
    lines = read_end(log, _LOG_END_BYTES).strip().splitlines()
    return excerpt(lines[-1].strip()) if lines else ""


def _explain_crash(outcome: Outcome, call: StageCall, log: Path) -> Outcome:
    # Imported here because it imports all stages, for which an early start must not wait.
    from tvmflow.executors.stage_worker import list_written_folders

    # LLVM aborts when the disk is full, after writing a line to the log.
    problem = find_disk_problem([*list_written_folders(call), log], _last_line(log))
    if problem is None:
        return outcome
    message = f"{problem.message}; the stage {outcome.message}"
    return outcome._replace(
        kind="error", message=message, fix=problem.fix, error=type(problem).__name__
    )


def _add_fix(outcome: Outcome) -> Outcome:
    if outcome.fix:
        return outcome
    if outcome.kind == "timeout":
        fix = "give each stage more time with --stage-timeout SECONDS, or run fewer stages at a time (--jobs)"
        return outcome._replace(fix=fix)
    killed = "run again: everything finished so far is kept"
    return outcome._replace(fix=killed) if outcome.is_killed else outcome


def _make_result(outcome: Outcome, log: Path) -> StageResult:
    kind: Any = outcome.kind
    if kind == "error":
        kind = errors.outcome_for(getattr(errors, outcome.error, errors.StageError))
    facts = outcome.value if outcome.kind == "ok" else {}
    return StageResult(
        outcome=kind,
        message=outcome.message,
        fix=outcome.fix,
        facts=facts,
        seconds=outcome.seconds,
        log=str(log),
    )
