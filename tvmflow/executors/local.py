"""The executor that runs each stage in a process of its own on this machine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tvmflow.core import errors
from tvmflow.core.disk_errors import find_disk_problem
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.core.types import StageCall, StageResult
from tvmflow.executors._base import OnEvent
from tvmflow.executors.stage_worker import list_written_folders
from tvmflow.targets import devices

_log: Final = logging.getLogger(__name__)

_RUN_STAGE: Final = "tvmflow.executors.stage_worker:run_stage"
PRELOADED: Final = ("numpy", "tvm", "tvm.s_tir.meta_schedule", "tvmflow.executors.stage_worker")
"""Modules that the fork server imports once for all stages."""


class ProcessExecutor:
    """Runs each stage in a freshly forked process of a fork server that has TVM loaded."""

    slots = 1

    def __init__(self) -> None:
        self._fork_server: ForkServer | None = None
        self.cancelled = False

    def start(self) -> None:
        """Start the fork server, which loads TVM while the caller goes on; does nothing if it has started."""
        if self._fork_server is None:
            self._fork_server = ForkServer.start(PRELOADED)

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage to its end; a failure or a crash is a result, not an exception."""
        self.start()
        assert self._fork_server is not None
        if self.cancelled:
            return _make_result(Outcome("cancelled", 0.0, "the run was cancelled"), log)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with _shared_cpu(call):
            outcome = self._fork_server.call(
                _RUN_STAGE, call.to_json(), timeout_s=call.timeout_s, log=log, emit=on_event
            )
        _log.debug("%s: %s after %.2f s", call.stage, outcome.kind, outcome.seconds)
        if outcome.kind == "crashed":
            # a library that writes to mapped memory is killed when the disk is full
            outcome = _explain_crash(outcome, call, log)
        return _make_result(outcome, log)

    def cancel(self) -> None:
        """Stop every running stage, and let none start."""
        self.cancelled = True
        if self._fork_server is not None:
            self._fork_server.cancel()

    def close(self) -> None:
        """End the fork server."""
        if self._fork_server is not None:
            self._fork_server.close()


@contextlib.contextmanager
def _shared_cpu(call: StageCall) -> Iterator[None]:
    """Share this machine's CPU with other stages, and wait while a stage measures on it.

    A stage that measures locks its device itself, only for as long as it measures.
    """
    if call.traits.measures:
        yield
        return
    with devices.shared(Path(call.locks), devices.CPU):
        yield


def _explain_crash(outcome: Outcome, call: StageCall, log: Path) -> Outcome:
    """Return the end of a stage with a full disk as its cause, if one is full."""
    problem = find_disk_problem([*list_written_folders(call), log])
    if problem is None:
        return outcome
    message = f"{problem.message}; the stage {outcome.message}"
    return outcome._replace(
        kind="error", message=message, fix=problem.fix, error=type(problem).__name__
    )


def _make_result(outcome: Outcome, log: Path) -> StageResult:
    kind: Any = outcome.kind
    if kind == "error":
        kind = errors.outcome_for(getattr(errors, outcome.error, errors.StageError))
    facts = outcome.value if outcome.kind == "ok" else {}
    return StageResult(kind, outcome.message, outcome.fix, facts, outcome.seconds, str(log))
