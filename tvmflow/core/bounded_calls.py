"""Bounded calls: a time limit where there is none, as for looking up a host or reading a network disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from tvmflow.core import termination
from tvmflow.core.errors import Interrupted

T = TypeVar("T")

_POLL_S: Final = 0.1
# A longer step means that the process was stopped (SIGTSTP), and then nothing could be waited for.
_LONGEST_STEP_S: Final = 1.0


def call_within(
    limit_s: float, function: Callable[[], T], is_cancelled: Callable[[], bool] = lambda: False
) -> T:
    """Return what a function returns, which runs in a thread of its own.

    Args:
        limit_s: How long to wait for it, whatever it waits for itself. Then its thread is
            abandoned: what it does from then on must do no harm.
        function: The function. What it raises is raised here.
        is_cancelled: Tells whether to wait no longer.

    Raises:
        TimeoutError: when it takes longer.
        Interrupted: when it is cancelled, or a signal ends this process.
    """
    values: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="bounded-call", daemon=True).start()
    elapsed_s, now = 0.0, time.monotonic()
    while not done.wait(min(_POLL_S, max(limit_s - elapsed_s, 0.0))):
        before, now = now, time.monotonic()
        elapsed_s += min(now - before, _LONGEST_STEP_S)
        if is_cancelled() or termination.signal_number():
            raise Interrupted("stopped while waiting for an answer")
        if elapsed_s >= limit_s:
            raise TimeoutError(f"timed out after {limit_s:g} s")
    if errors:
        raise errors[0]
    return values[0]
