"""Runs each stage in an isolated worker on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tvmflow import errors
from tvmflow.executors.nursery import Nursery, Outcome
from tvmflow.targets import devices
from tvmflow.values import StageCall, StageResult

# Stages that measure hold their device alone; all others share it, so that none disturbs a measurement.
_MEASURING: Final = frozenset({"tune", "pick_best", "verify"})
_PRELOAD: Final = ("numpy", "tvm", "tvm.s_tir.meta_schedule", "tvmflow.executors.worker")


class ProcessExecutor:
    """One freshly forked process a stage, from a server that has TVM loaded; the server starts when first needed."""

    slots = 1

    def __init__(self) -> None:
        self._nursery: Nursery | None = None
        self.cancelled = False

    def start(self) -> None:
        """Start the server: it loads TVM while the caller goes on."""
        if self._nursery is None:
            self._nursery = Nursery.start(_PRELOAD)

    def execute(
        self, call: StageCall, log: Path, on_event: Callable[[dict[str, Any]], None]
    ) -> StageResult:
        """Run a stage to its end, whatever that is: a crash is a result, not an exception."""
        self.start()
        assert self._nursery is not None
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with _undisturbing(call):
            outcome = self._nursery.call(
                "tvmflow.executors.worker:run_stage",
                call._asdict(),
                timeout_s=call.timeout_s,
                log=log,
                emit=on_event,
            )
        return _result(outcome, log)

    def cancel(self) -> None:
        """Stop every stage that runs, and let none start."""
        self.cancelled = True
        if self._nursery is not None:
            self._nursery.cancel()

    def close(self) -> None:
        """End the server."""
        if self._nursery is not None:
            self._nursery.close()


@contextlib.contextmanager
def _undisturbing(call: StageCall) -> Iterator[None]:
    """While something is measured on this machine's CPU, let no other stage start."""
    if call.stage in _MEASURING:
        yield
        return
    with devices.shared(Path(call.locks), {"kind": "cpu"}):
        yield


def _result(outcome: Outcome, log: Path) -> StageResult:
    kind: Any = outcome.kind
    if kind == "error":
        kind = errors.outcome_of(getattr(errors, outcome.error, errors.StageError))
    facts = outcome.value if outcome.kind == "ok" else {}
    return StageResult(kind, outcome.message, outcome.fix, facts, outcome.seconds, str(log))
