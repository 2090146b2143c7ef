"""The output of a running command: a line for each stage, a live display, or JSON events."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TextIO

from tvmflow.core.formatting import (
    count_text,
    duration_text,
    latency_text,
    names_text,
    printable,
    printable_lines,
    size_text,
)
from tvmflow.core.logs import can_show_status, show_status
from tvmflow.engine.plan_text import range_text, rounded_text
from tvmflow.engine.report import MAX_SHOWN, group_by_target
from tvmflow.executors import Event
from tvmflow.store.downloads import DownloadProgress

# ---------------------------------------------------------------- lines on a terminal

_CODES: Final = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "cyan": "36"}
# A terminal that supports these sequences shows everything between them as one update, without flicker.
_BEGIN_FRAME: Final = "\x1b[?2026h"
_END_FRAME: Final = "\x1b[?2026l"


class Span(NamedTuple):
    """Printable text in one style: bold, dim, red, green, cyan, or none."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
"""A line of styled text."""


def wants_color(stream: TextIO) -> bool:
    """Return whether to color a stream's output: by `$NO_COLOR`, `$FORCE_COLOR`, or if it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if force := os.environ.get("FORCE_COLOR"):
        return force != "0"
    return is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    """Return whether lines written to a stream can be replaced."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def display_width(text: str) -> int:
    """Return how many terminal columns a printable text occupies."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def _character_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int) -> str:
    """Return text cut to at most `width` columns; cut text ends in `…`."""
    if display_width(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += _character_width(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""


def pad(text: str, width: int) -> str:
    """Return text filled with spaces to `width` columns."""
    return text + " " * (width - display_width(text))


def fit_line(line: Line, width: int) -> Line:
    """Return a line cut to at most `width` columns."""
    spans: list[Span] = []
    for span in line:
        needed = display_width(span.text)
        if needed > width:
            spans.append(span._replace(text=fit(span.text, width)))
            break
        spans.append(span)
        width -= needed
    return tuple(spans)


def render_line(line: Line, *, color: bool) -> str:
    """Return a line as text, with ANSI escape codes if `color` is set."""
    return "".join(
        f"\x1b[{_CODES[span.style]}m{span.text}\x1b[0m" if color and span.style else span.text
        for span in line
    )


class LiveRegion:
    """The last lines on a terminal, which are redrawn in place; the cursor stays visible at their end.

    The size of the terminal is read for each frame, because a wrapped line could not be replaced. Lines that have
    wrapped since, because the terminal became narrower, are counted.
    """

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self._stream = stream
        self._color = color
        self._widths: list[int] = []
        self._content = ""

    @property
    def size(self) -> os.terminal_size:
        """The columns and lines available for a frame."""
        size = shutil.get_terminal_size((80, 24))
        return os.terminal_size((max(size.columns - 1, 1), max(size.lines - 1, 1)))

    def draw(self, lines: Sequence[Line], above: str = "") -> None:
        """Replace the lines, in one write, with as many as fit; the text `above` stays above them for good."""
        columns, height = self.size
        fitted = [fit_line(line, columns) for line in lines[:height]]
        content = "\x1b[K\n".join(render_line(line, color=self._color) for line in fitted)
        if not above and content == self._content and self._widths:
            return
        start = self._start() + ("\x1b[J" if above else "")
        self._stream.write(f"{_BEGIN_FRAME}{start}{above}{content}\x1b[J{_END_FRAME}")
        self._stream.flush()
        self._content = content
        self._widths = [sum(display_width(span.text) for span in line) for line in fitted]

    def clear(self) -> None:
        """Remove the lines, and move the cursor to the beginning of the first one."""
        if self._widths:
            self._stream.write(f"{self._start()}\x1b[J")
            self._stream.flush()
        self._widths, self._content = [], ""

    def _start(self) -> str:
        columns = self.size.columns + 1
        rows = sum(max(-(-width // columns), 1) for width in self._widths)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")


_log = logging.getLogger(__name__)

RUNNING: Final = "running"
PENDING: Final = "pending"


class StageProgress:
    """One stage of a run; its state is `pending`, `running`, or its outcome.

    `latest` is its last progress event, and `workloads` the last one of each workload. `note` says what it waits for or
    downloads.
    """

    def __init__(self, stage_id: str) -> None:
        self.stage_id = stage_id
        self.recipe, _, self.label = stage_id.partition(":")
        self.stage, _, self.target = self.label.partition("/")
        self.state = PENDING
        self.started = self.seconds = 0.0
        self.latest: Event = {}
        self.workloads: dict[str, Event] = {}
        self.note = ""

    @property
    def has_ended(self) -> bool:
        """True if it has an outcome."""
        return self.state not in (PENDING, RUNNING)


class RunProgress:
    """All stages of a run, in the plan's order. Times are from a clock of the caller's choice."""

    def __init__(self) -> None:
        self.stages: dict[str, StageProgress] = {}
        self.started = 0.0
        self._estimates: Mapping[str, Sequence[float] | None] = {}

    @property
    def running(self) -> list[StageProgress]:
        """The stages that run now, in the order in which they began."""
        running = [stage for stage in self.stages.values() if stage.state == RUNNING]
        return sorted(running, key=lambda stage: stage.started)

    @property
    def finished(self) -> int:
        """The number of stages that have ended."""
        return sum(stage.has_ended for stage in self.stages.values())

    def apply(self, event: Event, now: float) -> None:
        """Take an event of the run into account."""
        kind, stage_id = event["event"], event.get("stage_id")
        if kind == "run_started":
            self._estimates = {entry["stage_id"]: entry["seconds"] for entry in event["stages"]}
            self.stages = {name: StageProgress(name) for name in self._estimates}
            self.started = now
        if not isinstance(stage_id, str):
            return
        stage = self.stages.setdefault(stage_id, StageProgress(stage_id))
        if kind == "stage_started":
            stage.state, stage.started = RUNNING, now
        elif kind == "stage_finished":
            stage.state, stage.seconds, stage.note = event["outcome"], event["seconds"], ""
        elif kind == "progress":
            stage.latest, stage.note = event, ""
            stage.workloads[event["workload"]] = event

    def seconds_left(self, now: float) -> tuple[float, float] | None:
        """Return the probable minimum and maximum of the remaining seconds; None if any stage's are unknown."""
        left = [self._left(stage, now) for stage in self.stages.values() if not stage.has_ended]
        known = [times for times in left if times is not None]
        least, most = sum(times[0] for times in known), sum(times[1] for times in known)
        return (least, most) if most and len(known) == len(left) else None

    def _left(self, stage: StageProgress, now: float) -> tuple[float, float] | None:
        reported = stage.latest.get("seconds_left")
        if stage.state == RUNNING and reported is not None:
            return reported, reported
        estimate = self._estimates.get(stage.stage_id)
        elapsed = now - stage.started if stage.state == RUNNING else 0.0
        # A stage that already takes longer than its estimate has no usable estimate.
        if estimate is None or elapsed > estimate[1]:
            return None
        return max(estimate[0] - elapsed, 0.0), estimate[1] - elapsed


def done_share(event: Mapping[str, Any]) -> float:
    """Return the finished fraction (0 to 1) of the trials; without trials, of the time."""
    if event["total"] is None:
        return 1.0 - float(event["seconds_left"]) / float(event["limit_s"])
    return float(event["done"]) / max(float(event["total"]), 1.0)


# ---------------------------------------------------------------- display

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
# Without a live display, a long-running stage prints a line at this interval.
_PLAIN_INTERVAL_S: Final = 120.0
_FRAME_INTERVAL_S: Final = 0.25
# The minimum and maximum number of columns for the name of a stage.
_KEPT: Final = "; finished results are kept, and the same command continues from here"
_NAME_WIDTHS: Final = (28, 60)


class Printer:
    """Prints the events of a run to a stream. Thread-safe.

    On a terminal it draws a live display, unless log messages appear there (`is_logged`). With `many` recipes, each
    stage is shown with its recipe. With more than MAX_SHOWN stages, up-to-date stages appear only as a count in the
    summary. `quiet` prints only problems; `as_json` prints each event as a line of JSON. `on_lost_reader` is called
    when the stream's reader is gone. `best_so_far` is the command that delivers the best of the trials so far.
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
        best_so_far: str = "",
    ) -> None:
        self._stream = stream
        self._as_json = as_json
        self._on_lost_reader = on_lost_reader
        self._best_so_far = best_so_far
        self._delivered = ""
        self._has_trials = False
        self._many = many
        self._hides_hits = stages > MAX_SHOWN
        self._quiet = quiet
        self._color = wants_color(stream)
        is_live = is_terminal(stream) and not (as_json or quiet or is_logged)
        self._region = LiveRegion(stream, color=self._color) if is_live else None
        # A signal handler may print while this same thread holds the lock.
        self._lock = threading.RLock()
        self._progress = RunProgress()
        self._name_width = _NAME_WIDTHS[0]
        self._last_lines: dict[str, float] = {}
        self._ticker: threading.Thread | None = None
        self._ended = threading.Event()
        self._show: dict[str, Callable[[Event], None]] = {
            "run_started": self._align_names,
            "stage_finished": self._show_end,
            "remote": lambda event: self._print_line(f"remote cache: {event['message']}"),
            "cluster": self._show_cluster,
        }
        if not quiet:
            self._show |= {
                "progress": self._show_progress,
                "download": self._show_download,
                "step": lambda event: self._show_note(
                    event, event["message"], always=event["is_long"]
                ),
                "waiting": self._show_waiting,
                "delivered": lambda event: self._print_line(f"delivered: {interim_text(event)}"),
            }

    def event(self, event: Event) -> None:
        """Show one event; kinds that are unknown here are only for programs."""
        if event["event"] == "delivered":
            self._delivered, self._has_trials = interim_text(event), False
        self._has_trials |= event.get("unit") == "trial"
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

    def interrupted(self) -> str:
        """End the display; return what is kept and how to continue. A signal handler calls it."""
        self.end()
        delivered = f"; delivered: {self._delivered}" if self._delivered else ""
        if not self._has_trials or not self._best_so_far:
            return f"{delivered}{_KEPT}"
        return f"{delivered}{_KEPT}; `{self._best_so_far}` delivers the best of the trials so far"

    def end(self) -> None:
        """Remove the live display from the terminal, and never draw it again."""
        self._ended.set()
        with self._lock:
            if self._region:
                self._region.clear()

    def _align_names(self, event: Event) -> None:
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
        first = Span(f"{name:<{self._name_width}} ")
        self._print_spans(first, Span(f"{text:<11}", style), Span(rest))

    def _show_cluster(self, event: Event) -> None:
        subject = self._stage_name(event) if "stage_id" in event else "cluster"
        self._print_line(f"{subject}: {event['message']}")

    def _show_waiting(self, event: Event) -> None:
        if self._find_stage(event):
            # A stage may wait for the same lock many times.
            self._show_note(event, event["message"], at_once=True)
        else:
            self._print_line(event["message"])

    def _show_progress(self, event: Event) -> None:
        if not self._region and self._is_due(event):
            gain = describe_gain(event)
            text = f"{describe_position(event)}{describe_failures(event)}"
            self._print_line(f"{self._stage_name(event)}: {text}{'; ' if gain else ''}{gain}")

    def _show_download(self, event: Event) -> None:
        self._show_note(event, download_text(event["done"], event.get("total", 0), event["url"]))

    def _show_note(
        self, event: Event, text: str, *, at_once: bool = False, always: bool = False
    ) -> None:
        """Show a step of a stage; without a live display, only if a line is due."""
        if stage := self._find_stage(event):
            stage.note = text
        if not self._region and (always or self._is_due(event, at_once=at_once)):
            self._print_line(f"{self._stage_name(event)}: {text}")

    def _find_stage(self, event: Event) -> StageProgress | None:
        return self._progress.stages.get(event.get("stage_id", ""))

    def _is_due(self, event: Event, *, at_once: bool = False) -> bool:
        """Return whether a line about a stage is due: one per interval; with `at_once`, the first one now."""
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

    def _print_line(self, text: str, style: str = "") -> None:
        self._print_spans(Span(text, style))

    def _print_spans(self, *spans: Span) -> None:
        line = tuple(span._replace(text=printable_lines(span.text)) for span in spans)
        text = render_line(line, color=self._color) + "\n"
        if self._region:
            self._draw(text)
            return
        self._stream.write(text)
        self._stream.flush()

    def _draw(self, above: str = "") -> None:
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
        """Redraw the live display while stages run, even if no event arrives."""
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
        """Stop the run if the pipe's reader or the terminal is gone; raise other errors."""
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        self._ended.set()
        self._on_lost_reader()


def interim_text(event: Event) -> str:
    """Return a text about the interim deliveries of a search, with their paths."""
    trials = event["trials"]
    kind = f"the best of {count_text(trials, 'trial')} so far" if trials else "untuned so far"
    return f"{names_text(event['folders'])} ({kind})"


def download_text(done: int, total: int, url: str) -> str:
    """Return how much of a file was downloaded: `downloading 1.5 of 3.0 MB  https://…`."""
    of_total = f" of {total / 1e6:.1f}" if total else ""
    return f"downloading {done / 1e6:.1f}{of_total} MB  {url}"


# ---------------------------------------------------------------- run display
# The live display of a run: a table of targets and stages, and the running stages below it. Pure functions.

_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAMES_PER_SECOND: Final = 4.0
_SYMBOLS: Final = {PENDING: ("·", "dim"), "skipped": ("-", "dim"), "hit": ("✓", "dim")}
_SYMBOLS_OF_SUCCESS: Final = {"ran": ("✓", "green"), "fetched": ("↓", "green")}
_FAILURE: Final = ("✗", "red")
_BAR_WIDTH: Final = 20
_NAME_WIDTH: Final = 24
_NARROW: Final = 60
_KERNEL_ROWS: Final = 8
_KERNEL_WIDTH: Final = 44
# A range of the remaining time whose ends differ by more than this factor is not shown.
_WIDEST_RANGE: Final = 2.5


def draw_run(progress: RunProgress, columns: int, height: int, now: float) -> list[Line]:
    """Return at most `height` lines with the most important parts of a run."""
    details = [_draw_running(stage, columns, now) for stage in progress.running]
    head = _draw_head(progress, columns, now)
    room = height - 1 - sum(map(len, details))
    table = _draw_table(progress, columns, max(room - 1, 0), now)
    lines = [head, *table]
    if table and details:
        lines.append(())
    lines += [line for block in details for line in block]
    kernels = [_draw_kernels(stage, columns) for stage in progress.running]
    for block in kernels:
        lines += block[: max(height - len(lines), 0)] if height - len(lines) > 1 else []
    return lines[:height]


def _draw_head(progress: RunProgress, columns: int, now: float) -> Line:
    count = f"{progress.finished} of {len(progress.stages)}"
    count += " stages" if columns >= _NARROW else ""
    elapsed = rounded_text(now - progress.started)
    left = progress.seconds_left(now)
    text = f"{count}, {elapsed}"
    if left and left[1] <= _WIDEST_RANGE * max(left[0], 5.0):
        text += f", {range_text(left)} left"
    recipes = list(dict.fromkeys(stage.recipe for stage in progress.stages.values()))
    name = recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"
    gap = columns - display_width(text) - 2
    return (Span(pad(fit(printable(name), max(gap, 0)), max(gap, 0)) + "  ", "bold"), Span(text))


def _draw_table(progress: RunProgress, columns: int, height: int, now: float) -> list[Line]:
    """Return a row of stages per target; if they do not all fit, the most important ones."""
    rows = group_by_target(progress.stages.values())
    names = list(dict.fromkeys(stage.stage for stage in progress.stages.values()))
    several = len({stage.recipe for stage in progress.stages.values()}) > 1
    labels = [
        printable(f"{recipe}/{target}" if several and target else target or recipe)
        for recipe, target in rows
    ]
    left = min(max(map(display_width, labels), default=0), _NAME_WIDTH)

    def draw_cells(*, short: bool) -> list[list[Span]]:
        return [[_draw_cell(row.get(n), now, short=short) for n in names] for row in rows.values()]

    cells = draw_cells(short=False)
    widths = [
        max([len(name), *(display_width(row[index].text) for row in cells)])
        for index, name in enumerate(names)
    ]
    has_heads = left + sum(widths) + 2 * len(widths) <= columns
    if not has_heads:
        cells, widths = draw_cells(short=True), [1] * len(names)
    gap = "  " if has_heads else " "
    lines: list[Line] = []
    for label, row, stages in zip(labels, cells, rows.values(), strict=True):
        spans = [Span(pad(fit(label, left), left))]
        for cell, width in zip(row, widths, strict=True):
            spans += [Span(gap), cell, Span(" " * (width - display_width(cell.text)))]
        running = [stage.stage for stage in stages.values() if stage.state == RUNNING]
        if running and not has_heads:
            spans.append(Span(f"  {', '.join(running)}", "cyan"))
        lines.append(tuple(spans))
    heads = "".join(f"  {name:<{width}}" for name, width in zip(names, widths, strict=True))
    first: list[Line] = [(Span(" " * left + heads.rstrip(), "dim"),)] if has_heads else []
    return [*first, *_choose_rows(lines, list(rows.values()), height - len(first))]


def _choose_rows(
    lines: Sequence[Line], rows: Sequence[Mapping[str, StageProgress]], height: int
) -> list[Line]:
    """Return at most `height` lines: rows with running or failed stages first, then pending ones."""
    if len(lines) <= height:
        return list(lines)
    room = max(height - 1, 0)
    order = sorted(range(len(lines)), key=lambda index: (_row_rank(rows[index]), index))
    chosen = [lines[index] for index in sorted(order[:room])]
    return [*chosen, (Span(f"… and {len(lines) - room} more", "dim"),)][:height]


def _row_rank(row: Mapping[str, StageProgress]) -> int:
    states = {stage.state for stage in row.values()}
    if RUNNING in states:
        return 0
    if states - {PENDING, "skipped", "hit", *_SYMBOLS_OF_SUCCESS}:
        return 1
    return 2 if PENDING in states else 3


def _draw_cell(stage: StageProgress | None, now: float, *, short: bool) -> Span:
    """Return the state of a stage: a symbol, and how long it has taken."""
    if stage is None:
        return Span("")
    if stage.state == RUNNING:
        symbol = _SPINNER[int(now * _FRAMES_PER_SECOND) % len(_SPINNER)]
        return Span(symbol if short else f"{symbol} {rounded_text(now - stage.started)}", "cyan")
    symbol, style = (_SYMBOLS | _SYMBOLS_OF_SUCCESS).get(stage.state, _FAILURE)
    has_time = stage.state == "ran" and not short
    return Span(f"{symbol} {duration_text(stage.seconds)}" if has_time else symbol, style)


def _draw_running(stage: StageProgress, columns: int, now: float) -> list[Line]:
    name = Span(f"{printable(stage.label)}  ", "bold")
    if stage.note:
        return [(name, Span(printable(stage.note)))]
    if not stage.latest:
        return [(name, Span(f"runs for {rounded_text(now - stage.started)}", "dim"))]
    text = describe_position(stage.latest) + describe_failures(stage.latest)
    bar_width = min(_BAR_WIDTH, columns - len(name.text) - len(text) - 2)
    bar: Line = ()
    if bar_width >= _BAR_WIDTH // 2:
        share = round(min(max(done_share(stage.latest), 0.0), 1.0) * bar_width)
        bar = (Span("━" * share, "cyan"), Span("─" * (bar_width - share) + "  ", "dim"))
    gain = describe_gain(stage.latest)
    return [(name, *bar, Span(text)), *([(Span(f"  {gain}"),)] if gain else [])]


def _draw_kernels(stage: StageProgress, columns: int) -> list[Line]:
    """Return a table of the slowest kernels, from the last event of each."""
    events = [event for event in stage.workloads.values() if "trials" in event and event["best_us"]]
    if not events:
        return []
    events.sort(key=lambda event: -event["calls"] * event["best_us"])
    width = min(_KERNEL_WIDTH, max(columns - 36, 8))
    lines: list[Line] = [
        (Span(f"  {'':<{width}} {'trials':>6} {'best':>9} {'gain':>6} {'GFLOPS':>7}", "dim"),)
    ]
    for event in events[:_KERNEL_ROWS]:
        speedup = (event["untuned_us"] or 0.0) / event["best_us"]
        # A schedule slower than the untuned kernel is not used, so there is no gain.
        gain = f"{speedup:.1f}×" if speedup > 1 else "–"
        name = pad(fit(printable(event["workload"]), width), width)
        best = latency_text(event["best_us"] / 1e6)
        lines.append(
            (Span(f"  {name} {event['trials']:>6} {best:>9} {gain:>6} {event['gflops']:>7.1f}"),)
        )
    return lines


def describe_position(event: Mapping[str, Any]) -> str:
    """Return how far a stage is: `trial 3 of 20, about 1 min left`."""
    left = event.get("seconds_left")
    remaining = f", about {rounded_text(left)} left" if left else ""
    total = event["total"]
    if total is None:
        total = f"as many as fit in {rounded_text(event['limit_s'])}"
    return f"{event['unit']} {event['done']} of {total}{remaining}"


def describe_failures(event: Mapping[str, Any]) -> str:
    """Return how many trials failed: `, 2 failed`, or nothing."""
    return f", {event['failed']} failed" if event["failed"] else ""


def describe_gain(event: Mapping[str, Any]) -> str:
    """Return the gain of a search so far, or nothing: `estimated latency 19 ms → 12 ms, 1.6× faster`."""
    untuned_us, best_us = event.get("untuned_latency_us"), event.get("best_latency_us")
    if not untuned_us or not best_us:
        return ""
    change = f"{latency_text(untuned_us / 1e6)} → {latency_text(best_us / 1e6)}"
    speedup = untuned_us / best_us
    return f"estimated latency {change}" + (f", {speedup:.2f}× faster" if speedup > 1.005 else "")


class DownloadLine:
    """Shows the progress of downloads on one line of stderr, and removes this line at the end.

    If stderr is a file, only the end is shown; with `-q`, nothing.
    """

    def __init__(self) -> None:
        self._complete = ""

    def __call__(self, progress: DownloadProgress) -> None:
        """Show the progress of a download; its end may be reported more than once."""
        is_complete = progress.done == progress.total
        if can_show_status():
            text = printable(download_text(progress.done, progress.total, progress.url))
            show_status("" if is_complete else text)
        elif is_complete and progress.url != self._complete and _log.isEnabledFor(logging.WARNING):
            self._complete = progress.url
            text = printable(f"downloaded {progress.url} ({size_text(progress.total)})")
            sys.stderr.write(f"tvmflow: {text}\n")
