"""The output of a run while it lasts: a line for each stage, a live display on a terminal, or JSON events."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

from tvmflow.core import live_region
from tvmflow.core.formatting import count_text, duration_text, names_text, printable_lines
from tvmflow.core.live_region import Line, Span
from tvmflow.engine.report import MAX_SHOWN
from tvmflow.engine.run_display import (
    describe_failures,
    describe_gain,
    describe_position,
    draw_run,
)
from tvmflow.engine.run_progress import RunProgress, StageProgress
from tvmflow.executors._base import Event

_OUTCOMES: Final = {
    "hit": ("up to date", "dim"),
    "ran": ("done", "green"),
    "fetched": ("fetched", "green"),
    "rejected": ("REJECTED", "red"),
    "failed": ("FAILED", "red"),
    "blocked": ("BLOCKED", "red"),
    "crashed": ("CRASHED", "red"),
    "timeout": ("TIMED OUT", "red"),
    "cancelled": ("stopped", ""),
}
# Without a terminal, a stage that runs for long says so at this interval.
_PLAIN_INTERVAL_S: Final = 120.0
_FRAME_INTERVAL_S: Final = 0.25
# The least and the most room for the name of a stage.
_NAME_WIDTHS: Final = (28, 60)


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
        is_logged: bool = False,
        on_lost_reader: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a printer.

        Args:
            stream: Where to print; a terminal shows a live display.
            as_json: Print every event as one line of JSON instead.
            many: Several recipes run: stages are shown with the names of their recipes.
            stages: The number of stages of the run.
            quiet: Print only problems; JSON has all events.
            is_logged: Log messages appear on the same terminal, which a live display would mix with.
            on_lost_reader: Called when nobody reads the stream any more.
        """
        self._stream = stream
        self._as_json = as_json
        self._on_lost_reader = on_lost_reader
        self._many = many
        self._hides_hits = stages > MAX_SHOWN
        self._quiet = quiet
        self._color = live_region.wants_color(stream)
        is_live = live_region.is_terminal(stream) and not (as_json or quiet or is_logged)
        self._region = live_region.LiveRegion(stream, color=self._color) if is_live else None
        # A signal handler may print while this thread is printing.
        self._lock = threading.RLock()
        self._progress = RunProgress()
        self._name_width = _NAME_WIDTHS[0]
        self._last_lines: dict[str, float] = {}
        self._ticker: threading.Thread | None = None
        self._ended = threading.Event()
        self._show: dict[str, Callable[[Event], None]] = {
            "run_started": self._align_names,
            "stage_finished": self._show_end,
            "remote": self._show_remote,
            "cluster": self._show_cluster,
        }
        if not quiet:
            self._show |= {
                "progress": self._show_progress,
                "download": self._show_download,
                "waiting": self._show_waiting,
                "delivered": self._show_delivered,
            }

    def event(self, event: Event) -> None:
        """Show one event; a kind that is not known here is only for programs."""
        with self._lock:
            try:
                if self._as_json:
                    self._stream.write(json.dumps({"time": time.time(), **event}) + "\n")
                    self._stream.flush()
                    return
                self._progress.apply(event, time.monotonic())
                if event["event"] in self._show:
                    self._show[event["event"]](event)
                self._draw()
            except OSError as error:
                self._lose_reader(error)
        if event["event"] == "stage_started":
            self._start_ticker()

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
        """Remove the live display from the terminal; it does not appear again."""
        self._ended.set()
        with self._lock:
            if self._region:
                self._region.clear()

    # ---------------------------------------------------------------- events

    def _align_names(self, event: Event) -> None:
        """Give the names of stages the room that the longest of them needs."""
        longest = max((len(self._stage_name(stage)) for stage in event["stages"]), default=0)
        least, most = _NAME_WIDTHS
        self._name_width = min(max(least, longest), most)

    def _show_end(self, event: Event) -> None:
        name, outcome = self._stage_name(event), event["outcome"]
        self._last_lines.pop(event["stage_id"], None)
        if self._quiet and outcome in ("hit", "ran", "fetched"):
            return
        text, style = _OUTCOMES[outcome]
        if outcome == "hit":
            if not self._hides_hits:
                self._print_line(f"{name:<{self._name_width}} {text}", style)
            return
        duration = "" if outcome == "fetched" else duration_text(event["seconds"])
        rest = f"{duration:>12}   {event['reason']}".rstrip()
        self._print_spans(f"{name:<{self._name_width}} ", Span(f"{text:<11}", style), rest)

    def _show_remote(self, event: Event) -> None:
        self._print_line(f"remote cache: {event['message']}")

    def _show_cluster(self, event: Event) -> None:
        subject = self._stage_name(event) if "stage_id" in event else "cluster"
        self._print_line(f"{subject}: {event['message']}")

    def _show_waiting(self, event: Event) -> None:
        stage = self._find_stage(event)
        if stage is None:
            self._print_line(event["message"])
            return
        stage.note = event["message"]
        # A stage may wait many times for the same lock.
        if not self._region and self._is_due(event, at_once=True):
            self._print_line(f"{self._stage_name(event)}: {event['message']}")

    def _show_delivered(self, event: Event) -> None:
        self._print_line(f"delivered: {interim_text(event)}")

    def _show_progress(self, event: Event) -> None:
        if not self._region and self._is_due(event):
            gain = describe_gain(event)
            text = f"{describe_position(event)}{describe_failures(event)}"
            self._print_line(f"{self._stage_name(event)}: {text}{'; ' if gain else ''}{gain}")

    def _show_download(self, event: Event) -> None:
        text = download_text(event["done"], event.get("total", 0), event["url"])
        stage = self._find_stage(event)
        if stage is not None:
            stage.note = text
        if not self._region and self._is_due(event):
            self._print_line(f"{self._stage_name(event)}: {text}")

    def _find_stage(self, event: Event) -> StageProgress | None:
        return self._progress.stages.get(event.get("stage_id", ""))

    def _is_due(self, event: Event, *, at_once: bool = False) -> bool:
        """Return whether a line about a stage is printed now: the first one after an interval, or at once."""
        now, stage_id = time.monotonic(), event["stage_id"]
        stage = self._find_stage(event)
        began = stage.started if stage and stage.started else now
        last = self._last_lines.setdefault(stage_id, float("-inf") if at_once else began)
        if now - last < _PLAIN_INTERVAL_S:
            return False
        self._last_lines[stage_id] = now
        return True

    def _stage_name(self, event: Event) -> str:
        name = str(event["stage_id"])
        return name if self._many else name.partition(":")[2]

    # ---------------------------------------------------------------- the stream

    def _print_line(self, text: str, style: str = "") -> None:
        self._print_spans(Span(text, style))

    def _print_spans(self, *spans: Span | str) -> None:
        """Print a complete line, above the live display."""
        line: Line = tuple(
            Span(printable_lines(span))
            if isinstance(span, str)
            else span._replace(text=printable_lines(span.text))
            for span in spans
        )
        text = live_region.render_line(line, color=self._color) + "\n"
        if self._region:
            self._draw(text)
            return
        self._stream.write(text)
        self._stream.flush()

    def _draw(self, above: str = "") -> None:
        """Show the present state of the run, below lines that stay."""
        if self._region is None:
            return
        lines: list[Line] = []
        if self._progress.running and not self._ended.is_set():
            columns, height = self._region.size
            lines = draw_run(self._progress, columns, height, time.monotonic())
        if lines or above:
            self._region.draw(lines, above)
        else:
            self._region.clear()

    def _start_ticker(self) -> None:
        """Redraw the live display while stages run, also when nothing is reported."""
        if self._region is None or self._ticker is not None:
            return
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._ticker.start()

    def _tick(self) -> None:
        while not self._ended.wait(_FRAME_INTERVAL_S):
            with self._lock:
                try:
                    self._draw()
                except OSError as error:
                    self._lose_reader(error)
                    return

    def _lose_reader(self, error: OSError) -> None:
        """End the run when the reader has closed the pipe, or the terminal is gone; raise other errors."""
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        self._ended.set()
        self._on_lost_reader()


def interim_text(event: Event) -> str:
    """Return what was delivered while a search goes on, and where."""
    trials = event["trials"]
    kind = f"the best of {count_text(trials, 'trial')} so far" if trials else "untuned so far"
    return f"{names_text(event['folders'])} ({kind})"


def download_text(done: int, total: int, url: str) -> str:
    """Return how much of a file has arrived: `downloading 1.5 of 3.0 MB  https://…`."""
    of_total = f" of {total / 1e6:.1f}" if total else ""
    return f"downloading {done / 1e6:.1f}{of_total} MB  {url}"
