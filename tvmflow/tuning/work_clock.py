"""The clock of a tuning: it stands while the tuning waits for another run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class WorkClock:
    """Counts seconds, without those in which at least one thread waited for another run.

    Args:
        clock: Returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._waited_s = 0.0
        self._stopped_at = 0.0

    def now(self) -> float:
        """Return the time in seconds since some moment."""
        with self._lock:
            return (self._stopped_at if self._waiting else self._clock()) - self._waited_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock while the block waits for a lock that another run may hold."""
        with self._lock:
            if not self._waiting:
                self._stopped_at = self._clock()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._waited_s += self._clock() - self._stopped_at
