"""The clock of a tuning: it stands while the tuning waits for another run, and while its process is stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from tvmflow.core.waiting_time import WaitingTime

_TICK_S: Final = 1.0
# A process that has not looked at the ticking clock for so long, and that used less than this share of
# a CPU meanwhile, did not run; one that computes may have had no time to look.
_MAX_SILENT_S: Final = 5.0
_MIN_BUSY: Final = 0.1


class WorkClock:
    """Counts seconds of work.

    Those do not count in which at least one thread waited for another run, nor, while the clock ticks,
    those in which the process was stopped (Ctrl-Z, SIGSTOP, a machine that sleeps).

    Args:
        clock: Returns the current time in seconds.
        cpu_clock: Returns the CPU seconds of this process.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._waits = WaitingTime(clock)
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._is_ticking = False
        self._stopped_s = 0.0
        self._last_s, self._last_cpu_s = self._read_s(), cpu_clock()

    def now(self) -> float:
        """Return the time in seconds since some moment."""
        with self._lock:
            now_s, cpu_s = self._read_s(), self._cpu_clock()
            silent_s, busy_s = now_s - self._last_s, cpu_s - self._last_cpu_s
            if self._is_ticking and silent_s > _MAX_SILENT_S and busy_s < _MIN_BUSY * silent_s:
                self._stopped_s += silent_s - _TICK_S
            self._last_s, self._last_cpu_s = now_s, cpu_s
            return now_s - self._stopped_s

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Stop the clock while the block waits for a lock that another run may hold."""
        return self._waits.waiting()

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Look at the clock each second while the block runs, so that it is known when the process was stopped."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(_TICK_S):
                self.now()

        thread = threading.Thread(target=tick, name="work-clock", daemon=True)
        self.now()
        self._is_ticking = True
        thread.start()
        try:
            yield
        finally:
            self.now()
            self._is_ticking = False
            ended.set()
            thread.join()

    def _read_s(self) -> float:
        now_s, waited_s = self._waits.read()
        return now_s - waited_s
