"""Spans: named time intervals of this process's work, for the timeline of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

EVENT: Final = "span"
"""The value of `event` in events about spans."""
_SHORTEST_S: Final = 0.0005
# Threads share the pipe, so each event must fit into one atomic write.
_MAX_NAME: Final = 300
_Report: TypeAlias = "Callable[[dict[str, Any]], None] | None"

_report: _Report = None


def report_spans(report: _Report) -> _Report:
    """Set the function that receives each span, called in the span's thread; return the previous function."""
    global _report
    before, _report = _report, report
    return before


def add_span(name: str, began_s: float, ended_s: float, **arguments: Any) -> None:
    """Report a span of this thread, between times in seconds since 1970, unless it is negligibly short."""
    if _report is not None and ended_s - began_s >= _SHORTEST_S:
        _report(describe_span(name, began_s, ended_s, **arguments))


def describe_span(name: str, began_s: float, ended_s: float, **arguments: Any) -> dict[str, Any]:
    """Return the event of a span of this thread."""
    times = {"began_s": began_s, "ended_s": ended_s}
    thread = threading.current_thread().name.partition(" (")[0]
    base = {"event": EVENT, "name": name[:_MAX_NAME], "thread": thread}
    return {**base, **times, "arguments": arguments}


@contextlib.contextmanager
def span(name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Report the block as a span; yield its arguments, to which the block may add."""
    began_s = time.time()
    try:
        yield arguments
    finally:
        add_span(name, began_s, time.time(), **arguments)
