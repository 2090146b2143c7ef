"""The time that threads wait; threads that wait at once count once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class WaitingTime:
    """Counts the seconds in which at least one thread waits.

    Args:
        clock: Returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._threads = 0
        self._began = 0.0
        self._seconds = 0.0

    def read(self) -> tuple[float, float]:
        """Return the current time, and the seconds that were waited up to it."""
        with self._lock:
            now = self._clock()
            return now, self._seconds + (now - self._began if self._threads else 0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in which the block waits."""
        with self._lock:
            if not self._threads:
                self._began = self._clock()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._seconds += self._clock() - self._began
