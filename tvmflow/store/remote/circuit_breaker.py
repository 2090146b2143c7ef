"""A circuit breaker: a remote cache that keeps failing is not used any more in this run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from tvmflow.store.remote._base import Forbidden, Unreachable

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_MAX_FAILURES: Final = 3


class CircuitBreaker:
    """A switch that every request to a remote cache goes through.

    It opens, and then no request is sent, after a failure that another attempt cannot mend, after
    `_MAX_FAILURES` others in a row, or when failures have cost `patience_s` seconds.

    Attributes:
        open: No request is sent any more.
    """

    def __init__(self, report: Callable[[str], None], patience_s: float) -> None:
        """Create a closed breaker; `report` gets the reason when it opens."""
        self.open = False
        self._report = report
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._failures = 0
        self._lost_s = 0.0

    def call(self, request: Callable[[], T]) -> T:
        """Return what a request returns, with a few attempts.

        Raises:
            Unreachable: when it fails, or the breaker is open.
            Forbidden: when access is refused.
        """
        for attempt in range(_ATTEMPTS):
            if self.open:
                break
            started = time.monotonic()
            try:
                answer = request()
            except Unreachable as problem:
                self._count_failure(problem, time.monotonic() - started)
                if attempt == _ATTEMPTS - 1 or not problem.retryable:
                    raise
                time.sleep(_FIRST_PAUSE_S * 4**attempt)
            except Forbidden as problem:
                self.trip(str(problem))
                raise
            else:
                with self._lock:
                    self._failures = 0
                return answer
        raise Unreachable("it is not used any more in this run")

    def _count_failure(self, problem: Unreachable, seconds: float) -> None:
        with self._lock:
            self._failures += 1
            self._lost_s += seconds
            exhausted = self._failures >= _MAX_FAILURES or self._lost_s >= self._patience_s
            _log.debug("failure %d: %s", self._failures, problem)
        if exhausted or not problem.retryable:
            self.trip(str(problem))

    def trip(self, reason: str) -> None:
        """Open the breaker, and report the reason once."""
        with self._lock:
            first, self.open = not self.open, True
        if first:
            self._report(reason)
