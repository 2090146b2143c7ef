"""The time budget of a remote cache: how long a run waits for it in all, so that it never costs much more than it saves."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Final

from tvmflow.core.waiting_time import WaitingTime

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
