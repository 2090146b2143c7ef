"""The clock of a tuning: it stands while the tuning waits for another run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from tvmflow.core.waiting_time import WaitingTime


class WorkClock:
    """Counts seconds, without those in which at least one thread waited for another run.

    Args:
        clock: Returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._waits = WaitingTime(clock)

    def now(self) -> float:
        """Return the time in seconds since some moment."""
        now, waited_s = self._waits.read()
        return now - waited_s

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Stop the clock while the block waits for a lock that another run may hold."""
        return self._waits.waiting()
