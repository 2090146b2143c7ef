"""A circuit breaker: a remote cache that keeps failing is not used any more in this run."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from tvmflow.core.bounded_calls import call_within
from tvmflow.core.file_locks import WaitingTime
from tvmflow.core.formatting import count_text
from tvmflow.store.remote.base import Forbidden, Unreachable

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_MAX_FAILURES: Final = 3


class CircuitBreaker:
    """A switch that every request to a remote cache goes through.

    It opens, and then no request is sent, after a failure that another attempt cannot mend, after
    `_MAX_FAILURES` others in a row, when failures have cost `patience_s` seconds, or when the
    budget of the run is used up.

    Attributes:
        open: No request is sent any more.
        budget: How long the run waits for answers in all; by default without a limit.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        patience_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a closed breaker; `report` gets the reason when it opens."""
        self.open = False
        self.budget = TimeBudget()
        self._report = report
        self._patience_s = patience_s
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._failures = 0
        self._lost_s = 0.0

    def call(self, request: Callable[[], T], limit_s: float = math.inf) -> T:
        """Return what a request returns, with a few attempts.

        Args:
            request: The request.
            limit_s: The limit of an attempt as a whole, from the look-up of the host name on.

        Raises:
            Unreachable: when it fails, or the breaker is open.
            Forbidden: when access is refused.
            Interrupted: when the run was cancelled.
        """
        for attempt in range(_ATTEMPTS):
            if self.open:
                break
            started = time.monotonic()
            try:
                answer = self._call_within(limit_s, request)
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

    def _call_within(self, limit_s: float, request: Callable[[], T]) -> T:
        with self.budget.waiting():
            limit_s = min(limit_s, remaining_s := self.budget.remaining_s)
            try:
                answer = call_within(limit_s, request, self._is_cancelled)
            except TimeoutError:
                pass
            else:
                self.budget.answers += 1
                return answer
        if limit_s < remaining_s or not self.budget.answers:
            raise Unreachable(f"no answer within {limit_s:.2g} s")
        raise Unreachable(
            f"it is slow: {count_text(self.budget.requests, 'request')} took "
            f"{self.budget.spent_s:.1f} s, and all that it may save is not worth more"
        )

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


# ---------------------------------------------------------------- time budget
# The time budget of a remote cache: how long a run waits for it in all, so that it never costs
# much more than it saves.


# What a run waits for a remote cache in all, relative to the work that it may save …
_SHARE_OF_WORK: Final = 0.5
# … and at least.
_LEAST_S: Final = 1.0


class TimeBudget:
    """The time for which a run waits for its remote cache; threads that wait at once count once.

    Attributes:
        allowed_s: How long it may wait, in all.
        requests: The number of requests that it has waited for.
        answers: How many of them were answered.
    """

    def __init__(self) -> None:
        self.allowed_s = math.inf
        self.requests = 0
        self.answers = 0
        self._lock = threading.Lock()
        self._waits = WaitingTime()

    def limit(self, work_s: float | None, unknown_s: float) -> None:
        """Limit the budget to a part of the work that results from the remote cache may save.

        Args:
            work_s: How long the stages take that are not up to date; None when that is not known.
            unknown_s: The limit when it is not.
        """
        self.allowed_s = unknown_s if work_s is None else max(_SHARE_OF_WORK * work_s, _LEAST_S)

    def add_saved(self, seconds: float) -> None:
        """Let the run wait longer, after it has fetched a result that takes so long to make."""
        with self._lock:
            self.allowed_s += seconds

    @property
    def spent_s(self) -> float:
        """The time for which the run has waited."""
        return self._waits.read()[1]

    @property
    def remaining_s(self) -> float:
        """The time for which it may wait from now on; 0 when the budget is used up."""
        return max(self.allowed_s - self.spent_s, 0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in which the block waits for a request."""
        with self._lock:
            self.requests += 1
        with self._waits.waiting():
            yield
