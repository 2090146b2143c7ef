"""How long a remote is waited for: it is asked again a little, and then no more in this run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from tvmflow.stores.remote._base import Forbidden, Unreachable

T = TypeVar("T")

_ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_MOST_FAILURES: Final = 3


class Breaker:
    """Every question to a remote goes through here.

    After a failure that will not pass, after `_MOST_FAILURES` others in a row, or when they
    have cost `patience_s` seconds, it is not asked again: `open`. That is told once, with what happens `then`.
    """

    def __init__(
        self, place: str, tell: Callable[[str], None], *, then: str, patience_s: float
    ) -> None:
        self._place = place
        self._tell = tell
        self._then = then
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._failures = 0
        self._lost_s = 0.0
        self.open = False

    def ask(self, question: Callable[[], T]) -> T:
        """What the remote answers. Raises Unreachable when it does not, or is no longer asked; Forbidden."""
        for attempt in range(_ATTEMPTS):
            if self.open:
                break
            started = time.monotonic()
            try:
                answer = question()
            except Unreachable as problem:
                self._failed(problem, time.monotonic() - started)
                if attempt == _ATTEMPTS - 1 or not problem.again:
                    raise
                time.sleep(_FIRST_PAUSE_S * 4**attempt)
            except Forbidden as problem:
                self.give_up(str(problem))
                raise
            else:
                with self._lock:
                    self._failures = 0
                return answer
        raise Unreachable("it is not asked any more")

    def _failed(self, problem: Unreachable, seconds: float) -> None:
        with self._lock:
            self._failures += 1
            self._lost_s += seconds
            lost = self._failures >= _MOST_FAILURES or self._lost_s >= self._patience_s
            # what is not better in a moment, such as a name that nobody knows, is not tried again
            enough = lost or not problem.again
        if enough:
            self.give_up(str(problem))

    def give_up(self, why: str) -> None:
        """Ask no more."""
        with self._lock:
            first, self.open = not self.open, True
        if first:
            self._tell(f"{self._place}: {why}; {self._then}")
