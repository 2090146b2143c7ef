"""Shows a run while it runs: one line a stage, a moving line while a stage reports progress, or JSON events."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Final, TextIO

from tvmflow.report import seconds_text

_WORDS: Final = {
    "hit": "up to date",
    "ran": "done",
    "rejected": "REJECTED",
    "failed": "FAILED",
    "blocked": "BLOCKED",
    "crashed": "CRASHED",
    "timeout": "TIMED OUT",
    "cancelled": "stopped",
}
# Without a terminal, progress becomes whole lines, and then not more often than this.
_PLAIN_SECONDS: Final = 10.0
_LIVE_SECONDS: Final = 0.1


class Printer:
    """Prints a run's events to a stream; safe to call from several threads."""

    def __init__(self, stream: TextIO, *, as_json: bool, many: bool) -> None:
        self._stream = stream
        self._as_json = as_json
        self._many = many
        self._live = stream.isatty() and not as_json
        # a signal may find this thread in the middle of a line
        self._lock = threading.RLock()
        self._moving = False
        self._last_progress = 0.0

    def event(self, event: dict[str, Any]) -> None:
        """Show one event."""
        with self._lock:
            if self._as_json:
                self._stream.write(json.dumps({"time": time.time(), **event}) + "\n")
                self._stream.flush()
                return
            show = getattr(self, f"_{event['event']}", None)
            if show is not None:
                show(event)

    def interrupted(self) -> None:
        """Say that a stop was asked for."""
        if not self._as_json:
            with self._lock:
                self._line(
                    "stopping; what is finished is kept, and the same command goes on from here"
                )

    def end(self) -> None:
        """Leave the terminal on a fresh line."""
        with self._lock:
            self._clear()

    def _stage_started(self, event: dict[str, Any]) -> None:
        if self._live:
            self._move(f"{self._name(event)}: {event['reason']}")

    def _stage_finished(self, event: dict[str, Any]) -> None:
        if event["outcome"] == "hit":
            self._line(f"{self._name(event):<28} up to date")
            return
        took = seconds_text(event["seconds"])
        self._line(
            f"{self._name(event):<28} {_WORDS[event['outcome']]:<11}{took:>12}   {event['reason']}"
        )

    def _progress(self, event: dict[str, Any]) -> None:
        best = f", best {event['best_us']:.1f} µs" if event.get("best_us") else ""
        failed = f", {event['failed']} failed" if event.get("failed") else ""
        text = f"{event['unit']} {event['done']}/{event['total']}  {event.get('workload', '')}{best}{failed}"
        self._step(event, text)

    def _download(self, event: dict[str, Any]) -> None:
        total = f" of {event['total'] / 1e6:.1f}" if event.get("total") else ""
        self._step(event, f"downloading {event['done'] / 1e6:.1f}{total} MB  {event['url']}")

    def _step(self, event: dict[str, Any], text: str) -> None:
        now = time.monotonic()
        finished = event.get("done") == event.get("total")
        if not finished and now - self._last_progress < (
            _LIVE_SECONDS if self._live else _PLAIN_SECONDS
        ):
            return
        self._last_progress = now
        (self._move if self._live else self._line)(f"{self._name(event)}: {text}")

    def _name(self, event: dict[str, Any]) -> str:
        name = str(event["stage_id"])
        return name if self._many else name.partition(":")[2]

    def _move(self, text: str) -> None:
        self._clear()
        self._stream.write(text[:110])
        self._stream.flush()
        self._moving = True

    def _line(self, text: str) -> None:
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._moving:
            self._stream.write("\r\x1b[K")
            self._moving = False
