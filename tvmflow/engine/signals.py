"""Signals: Ctrl-C and SIGTERM cancel the running stages and let the run end in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from tvmflow.executors._base import Executor


@contextlib.contextmanager
def cancel_on_signal(executor: Executor, on_cancel: Callable[[], None]) -> Iterator[None]:
    """Cancel the executor at the first SIGINT or SIGTERM; the second one has its usual effect."""

    def cancel(number: int, frame: FrameType | None) -> None:
        # A second signal comes from somebody who does not want to wait.
        signal.signal(number, previous[number])
        executor.cancel()
        on_cancel()

    previous = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, cancel)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
