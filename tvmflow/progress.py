"""Shows a run while it runs: one line a stage, a moving table while one tunes, or JSON events."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from tvmflow.report import MANY, latency_text, seconds_text

_WORDS: Final = {
    "hit": "up to date",
    "ran": "done",
    "fetched": "fetched",
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
_TABLE_ROWS: Final = 8
_BAR: Final = 20


class Printer:
    """Prints a run's events to a stream; safe to call from several threads.

    Of more than MANY stages, those that are up to date are left to the count at the end.
    """

    def __init__(self, stream: TextIO, *, as_json: bool, many: bool, stages: int = 0) -> None:
        self._stream = stream
        self._as_json = as_json
        self._many = many
        self._terse = stages > MANY
        self._live = stream.isatty() and not as_json
        # a signal may find this thread in the middle of a line
        self._lock = threading.RLock()
        self._moving = 0
        self._last_progress = 0.0
        self._rows: dict[str, dict[str, Mapping[str, Any]]] = {}

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

    def remote(self, message: str) -> None:
        """Say what is wrong with the remote, or with something in it."""
        self.event({"event": "remote", "message": message})

    def cluster(self, message: str) -> None:
        """Say something about the cluster as a whole."""
        self.event({"event": "cluster", "message": message})

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
            self._move([f"{self._name(event)}: {event['reason']}"])

    def _stage_finished(self, event: dict[str, Any]) -> None:
        if event["outcome"] == "hit" and self._terse:
            return
        if event["outcome"] == "hit":
            self._line(f"{self._name(event):<28} up to date")
            return
        took = "" if event["outcome"] == "fetched" else seconds_text(event["seconds"])
        self._line(
            f"{self._name(event):<28} {_WORDS[event['outcome']]:<11}{took:>12}   {event['reason']}"
        )

    def _remote(self, event: dict[str, Any]) -> None:
        self._line(f"remote: {event['message']}")

    def _cluster(self, event: dict[str, Any]) -> None:
        where = f"{self._name(event)}: " if "stage_id" in event else "cluster: "
        self._line(f"{where}{event['message']}")

    def _progress(self, event: dict[str, Any]) -> None:
        rows = self._rows.setdefault(event["stage_id"], {})
        rows[event["workload"]] = event
        best = f", best {latency_text(event['best_us'] / 1e6)}" if event["best_us"] else ""
        text = f"{_how_far(event)}  {event['workload']}{best}{_troubles(event)}"
        self._step(event, text, _table(list(rows.values())) if "trials" in event else ())

    def _download(self, event: dict[str, Any]) -> None:
        total = f" of {event['total'] / 1e6:.1f}" if event.get("total") else ""
        self._step(event, f"downloading {event['done'] / 1e6:.1f}{total} MB  {event['url']}")

    def _step(self, event: dict[str, Any], text: str, table: Sequence[str] = ()) -> None:
        now = time.monotonic()
        finished = event.get("done") == event.get("total")
        if not finished and now - self._last_progress < (
            _LIVE_SECONDS if self._live else _PLAIN_SECONDS
        ):
            return
        self._last_progress = now
        if not self._live:
            self._line(f"{self._name(event)}: {text}")
        elif table:
            bar = _bar(event["done"] / max(event["total"], 1))
            self._move([f"{self._name(event)}: {bar} {_how_far(event)}{_troubles(event)}", *table])
        else:
            self._move([f"{self._name(event)}: {text}"])

    def _name(self, event: dict[str, Any]) -> str:
        name = str(event["stage_id"])
        return name if self._many else name.partition(":")[2]

    def _move(self, lines: Sequence[str]) -> None:
        """Show lines that the next output takes away again."""
        self._clear()
        size = shutil.get_terminal_size((110, 24))
        shown = [line[: size.columns - 1] for line in lines[: size.lines - 1]]
        self._stream.write("\n".join(shown))
        self._stream.flush()
        self._moving = len(shown)

    def _line(self, text: str) -> None:
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._moving:
            self._stream.write("\r\x1b[K" + "\x1b[1A\x1b[K" * (self._moving - 1))
            self._moving = 0


def _how_far(event: Mapping[str, Any]) -> str:
    left = event.get("seconds_left")
    soon = f", {seconds_text(left)} left" if left else ""
    return f"{event['unit']} {event['done']}/{event['total']}{soon}"


def _troubles(event: Mapping[str, Any]) -> str:
    return f", {event['failed']} failed" if event["failed"] else ""


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The workloads that take longest, as they stand."""
    timed = [row for row in rows if row["best_us"]]
    timed.sort(key=lambda row: -row["calls"] * row["best_us"])
    lines = [f"  {'':<44} {'trials':>6} {'best':>9} {'gain':>6} {'spread':>6} {'GFLOPS':>7}"]
    for row in timed[:_TABLE_ROWS]:
        gain = f"{row['untuned_us'] / row['best_us']:.1f}×" if row["untuned_us"] else "–"
        lines.append(
            f"  {row['workload'][:44]:<44} {row['trials']:>6} "
            f"{latency_text(row['best_us'] / 1e6):>9} {gain:>6} {row['spread']:>6.0%} "
            f"{row['gflops']:>7.1f}"
        )
    return lines
