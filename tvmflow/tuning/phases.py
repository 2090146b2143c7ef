"""Phases of the work in a child process: the child reports each, and its parent learns which one failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.fork_server import Emit, Outcome
from tvmflow.core.types import Json
from tvmflow.tuning.trials import Failure

_MAX_MESSAGE: Final = 500


# ---------------------------------------------------------------- in the child


class PhaseReporter:
    """Reports which phase a child is in, and keeps the seconds of each.

    Attributes:
        current: The phase that began last.
        seconds: The seconds of each finished phase.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._started = 0.0
        self.current = ""
        self.seconds: dict[str, float] = {}

    def phase(self, name: str, *, ask: bool = False) -> PhaseReporter:
        """Return a context manager for a phase; with `ask`, wait for permission first."""
        self.current = name
        self._emit({"event": "phase", "phase": name, "ask": ask})
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.current] = time.perf_counter() - self._started


def report_failure(
    emit: Emit,
    work: Callable[[PhaseReporter], Json],
    fatal: tuple[type[Exception], ...] = (TvmflowError,),
) -> Json:
    """Run a function that reports its phases; return its result, or the failure as JSON.

    Args:
        emit: Sends the event of each phase.
        work: The function; its result gets the field `phase_secs`.
        fatal: Exceptions that are raised: they are nobody's failure.
    """
    phases = PhaseReporter(emit)
    try:
        result = work(phases)
    except fatal:
        raise
    # Whatever TVM or the session raises. The parent decides whether candidate or device is to blame.
    except Exception as error:
        kind = "timeout" if "RPCSessionTimeoutError" in str(error) else "error"
        result = {"failure": Failure(phases.current, kind, summarize_error(error))._asdict()}
    return {**result, "phase_secs": phases.seconds}


def summarize_error(error: Exception) -> str:
    """Return one sentence for an error of TVM, which has it in the last line of a long text."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:_MAX_MESSAGE]


# ---------------------------------------------------------------- in its parent


def read_failure(outcome: Outcome, phases: Sequence[str]) -> Failure | None:
    """Return the failure of a call in a child; None when it succeeded.

    Args:
        outcome: The outcome of the call.
        phases: The phases that the child has reported.

    Raises:
        StageError: The candidate is not to blame for the outcome.
    """
    if outcome.kind == "cancelled":
        raise StageError("tuning was cancelled", fix="run it again to resume")
    if outcome.kind == "error" and outcome.error == StageError.__name__:
        raise StageError(outcome.message, fix=outcome.fix)
    if outcome.kind != "ok":
        if not phases or outcome.is_external:
            # The child had not touched the candidate yet, or another process ended it.
            raise StageError(
                f"trials cannot be run: {outcome.message}",
                fix="run `tvmflow doctor` to check the installation, then run it again to resume",
            )
        return Failure(phases[-1], outcome.kind, outcome.message)
    return Failure(**outcome.value["failure"]) if "failure" in outcome.value else None
