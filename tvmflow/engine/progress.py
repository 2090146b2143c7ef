"""The progress display of a run: a line for each stage, a live table while one tunes, or JSON events."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TextIO

from tvmflow.core.formatting import duration_text, latency_text, printable, printable_lines
from tvmflow.engine.report import MAX_SHOWN
from tvmflow.executors._base import Event

_OUTCOMES: Final = {
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
# The shortest time between two lines of progress where there is no terminal, and on a terminal.
_PLAIN_INTERVAL_S: Final = 10.0
_LIVE_INTERVAL_S: Final = 0.1
_TABLE_ROWS: Final = 8
_BAR_WIDTH: Final = 20


class Printer:
    """Prints the events of a run to a stream. Safe to call from several threads.

    Of more than MAX_SHOWN stages, those that are up to date are only counted, in the summary.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        as_json: bool,
        many: bool,
        stages: int = 0,
        quiet: bool = False,
        on_lost_reader: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a printer.

        Args:
            stream: Where to print; a terminal shows live progress.
            as_json: Print every event as one line of JSON instead.
            many: Several recipes run: stages are shown with the names of their recipes.
            stages: The number of stages of the run.
            quiet: Print only problems; JSON has all events.
            on_lost_reader: Called when nobody reads the stream any more.
        """
        self._stream = stream
        self._as_json = as_json
        self._on_lost_reader = on_lost_reader
        self._many = many
        self._hides_hits = stages > MAX_SHOWN
        self._is_live = stream.isatty() and not as_json
        # A signal handler may print while this thread is printing.
        self._lock = threading.RLock()
        self._live_lines = 0
        self._last_progress = 0.0
        self._workloads: dict[str, dict[str, Event]] = {}
        self._show: dict[str, Callable[[Event], None]] = {
            "stage_finished": self._show_end,
            "remote": self._show_remote,
            "cluster": self._show_cluster,
            "waiting": self._show_waiting,
        }
        self._quiet = quiet
        if not quiet:
            self._show |= {
                "stage_started": self._show_start,
                "progress": self._show_progress,
                "download": self._show_download,
            }

    def event(self, event: Event) -> None:
        """Show one event; a kind that is not known here is only for programs."""
        with self._lock:
            try:
                if self._as_json:
                    self._stream.write(json.dumps({"time": time.time(), **event}) + "\n")
                    self._stream.flush()
                elif event["event"] in self._show:
                    self._show[event["event"]](event)
            except OSError as error:
                # the reader has closed the pipe, or the terminal is gone
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self._on_lost_reader()

    def remote(self, message: str) -> None:
        """Show a problem with the remote cache."""
        self.event({"event": "remote", "message": message})

    def cluster(self, message: str) -> None:
        """Show a message about the cluster."""
        self.event({"event": "cluster", "message": message})

    def waiting(self, message: str) -> None:
        """Show for whom this run waits."""
        self.event({"event": "waiting", "message": message})

    def end(self) -> None:
        """Remove the live lines from the terminal."""
        with self._lock:
            self._clear()

    def _show_start(self, event: Event) -> None:
        if self._is_live:
            self._print_live([f"{self._stage_name(event)}: {event['reason']}"])

    def _show_end(self, event: Event) -> None:
        name, outcome = self._stage_name(event), event["outcome"]
        if self._quiet and outcome in ("hit", "ran", "fetched"):
            return
        if outcome == "hit":
            if not self._hides_hits:
                self._print_line(f"{name:<28} {_OUTCOMES[outcome]}")
            return
        duration = "" if outcome == "fetched" else duration_text(event["seconds"])
        self._print_line(
            f"{name:<28} {_OUTCOMES[outcome]:<11}{duration:>12}   {event['reason']}".rstrip()
        )

    def _show_remote(self, event: Event) -> None:
        self._print_line(f"remote cache: {event['message']}")

    def _show_cluster(self, event: Event) -> None:
        subject = self._stage_name(event) if "stage_id" in event else "cluster"
        self._print_line(f"{subject}: {event['message']}")

    def _show_waiting(self, event: Event) -> None:
        subject = f"{self._stage_name(event)}: " if "stage_id" in event else ""
        self._print_line(f"{subject}{event['message']}")

    def _show_progress(self, event: Event) -> None:
        workloads = self._workloads.setdefault(event["stage_id"], {})
        workloads[event["workload"]] = event
        if not self._is_due(event):
            return
        if self._is_live and "trials" in event:
            head = (
                f"{_bar(_done_share(event))} {_describe_position(event)}{_describe_failures(event)}"
            )
            table = _format_workloads(list(workloads.values()))
            self._print_live([f"{self._stage_name(event)}: {head}", *table])
            return
        best = f", best {latency_text(event['best_us'] / 1e6)}" if event["best_us"] else ""
        failures = _describe_failures(event)
        self._print_step(event, f"{_describe_position(event)}  {event['workload']}{best}{failures}")

    def _show_download(self, event: Event) -> None:
        if self._is_due(event):
            text = download_text(event["done"], event.get("total", 0), event["url"])
            self._print_step(event, text)

    def _is_due(self, event: Event) -> bool:
        """Tell whether progress is shown now: the last step always is, others now and then."""
        now = time.monotonic()
        interval = _LIVE_INTERVAL_S if self._is_live else _PLAIN_INTERVAL_S
        if event["done"] != event.get("total") and now - self._last_progress < interval:
            return False
        self._last_progress = now
        return True

    def _print_step(self, event: Event, text: str) -> None:
        line = f"{self._stage_name(event)}: {text}"
        if self._is_live:
            self._print_live([line])
        else:
            self._print_line(line)

    def _stage_name(self, event: Event) -> str:
        name = str(event["stage_id"])
        return name if self._many else name.partition(":")[2]

    def _print_live(self, lines: Sequence[str]) -> None:
        """Print lines that the next output replaces. They must not wrap, or they could not be removed."""
        self._clear()
        size = shutil.get_terminal_size((110, 24))
        shown = [printable(line)[: size.columns - 1] for line in lines[: size.lines - 1]]
        self._stream.write("\n".join(shown))
        self._stream.flush()
        self._live_lines = len(shown)

    def _print_line(self, text: str) -> None:
        self._clear()
        self._stream.write(printable_lines(text) + "\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._live_lines:
            self._stream.write("\r\x1b[K" + "\x1b[1A\x1b[K" * (self._live_lines - 1))
            self._live_lines = 0


def download_text(done: int, total: int, url: str) -> str:
    """Return how much of a file has arrived: `downloading 1.5 of 3.0 MB  https://…`."""
    of_total = f" of {total / 1e6:.1f}" if total else ""
    return f"downloading {done / 1e6:.1f}{of_total} MB  {url}"


def _describe_position(event: Mapping[str, Any]) -> str:
    """Return how far a stage is: `trial 3/20, 1 min 01 s left`."""
    left = event.get("seconds_left")
    remaining = f", {duration_text(left)} left" if left else ""
    if event["total"] is None:
        limit = duration_text(event["limit_s"])
        return f"{event['unit']} {event['done']} of as many as fit in {limit}{remaining}"
    return f"{event['unit']} {event['done']}/{event['total']}{remaining}"


def _describe_failures(event: Mapping[str, Any]) -> str:
    return f", {event['failed']} failed" if event["failed"] else ""


def _done_share(event: Mapping[str, Any]) -> float:
    """Return the part that is done, from 0 to 1: of the trials, or else of the time."""
    if event["total"] is None:
        return 1.0 - float(event["seconds_left"]) / float(event["limit_s"])
    return float(event["done"]) / max(float(event["total"]), 1.0)


def _bar(share: float) -> str:
    filled = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def _format_workloads(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the workloads that take longest, from the last event of each."""
    timed = [event for event in events if event["best_us"]]
    timed.sort(key=lambda event: -event["calls"] * event["best_us"])
    lines = [f"  {'':<44} {'trials':>6} {'best':>9} {'gain':>6} {'spread':>6} {'GFLOPS':>7}"]
    for event in timed[:_TABLE_ROWS]:
        gain = f"{event['untuned_us'] / event['best_us']:.1f}×" if event["untuned_us"] else "–"
        lines.append(
            f"  {event['workload'][:44]:<44} {event['trials']:>6} "
            f"{latency_text(event['best_us'] / 1e6):>9} {gain:>6} {event['spread']:>6.0%} "
            f"{event['gflops']:>7.1f}"
        )
    return lines
