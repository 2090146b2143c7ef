"""Spans: named intervals of the work of this process, for the timeline of a run.

As long as nobody takes them, a span costs hardly anything.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

EVENT: Final = "span"
"""The kind of their events."""

_SHORTEST_S: Final = 0.0005
# An event is one write to a pipe, which several threads may have.
_MAX_NAME: Final = 300

_report: Callable[[dict[str, Any]], None] | None = None


def report_spans(
    report: Callable[[dict[str, Any]], None] | None,
) -> Callable[[dict[str, Any]], None] | None:
    """Have `report` called with the event of each span of this process; return what was called before.

    It is called in the thread of the span, at its end.
    """
    global _report
    before, _report = _report, report
    return before


def add_span(name: str, began_s: float, ended_s: float, **arguments: Any) -> None:
    """Report what this thread did between two times in seconds since 1970; leave out what took no time."""
    if _report is not None and ended_s - began_s >= _SHORTEST_S:
        _report(describe_span(name, began_s, ended_s, **arguments))


def describe_span(name: str, began_s: float, ended_s: float, **arguments: Any) -> dict[str, Any]:
    """Return the event of what this thread did between two times in seconds since 1970."""
    return {
        "event": EVENT,
        "name": name[:_MAX_NAME],
        "began_s": began_s,
        "seconds": ended_s - began_s,
        "process": os.getpid(),
        "thread": threading.current_thread().name,
        "arguments": arguments,
    }


@contextlib.contextmanager
def span(name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Report the time that the block takes; give its arguments, to which the block may add."""
    began_s = time.time()
    try:
        yield arguments
    finally:
        add_span(name, began_s, time.time(), **arguments)
