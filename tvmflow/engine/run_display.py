"""The live display of a run: a table of targets and stages, and below it what runs now. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tvmflow.core.formatting import duration_text, latency_text, printable
from tvmflow.core.live_region import Line, Span, display_width, fit, pad
from tvmflow.engine.plan_text import range_text, rounded_text
from tvmflow.engine.run_progress import PENDING, RUNNING, RunProgress, StageProgress, done_share

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
# A range of the time left that is wider than this says nothing.
_WIDEST_RANGE: Final = 2.5


def draw_run(progress: RunProgress, columns: int, height: int, now: float) -> list[Line]:
    """Return the lines that show a run.

    Args:
        progress: The state of the run.
        columns: The width of a line.
        height: The most lines; those that matter least are left out.
        now: The present time of the clock of `progress`.
    """
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
    """Return how many stages are done, for how long the run has lasted, and how long it will last."""
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


# ---------------------------------------------------------------- targets and stages


def _draw_table(progress: RunProgress, columns: int, height: int, now: float) -> list[Line]:
    """Return a row for each target, with its stages; of too many those where something happens."""
    rows = _group_by_target(progress)
    names = list(dict.fromkeys(stage.stage for stage in progress.stages.values()))
    several = len({stage.recipe for stage in progress.stages.values()}) > 1
    labels = [
        printable(f"{recipe}/{target}" if several and target else target or recipe)
        for recipe, target in rows
    ]
    left = min(max(map(display_width, labels), default=0), _NAME_WIDTH)
    cells = [
        [_draw_cell(row.get(name), now, short=False) for name in names] for row in rows.values()
    ]
    widths = [
        max([len(name), *(display_width(row[index].text) for row in cells)])
        for index, name in enumerate(names)
    ]
    has_heads = left + sum(widths) + 2 * len(widths) <= columns
    if not has_heads:
        cells = [
            [_draw_cell(row.get(name), now, short=True) for name in names] for row in rows.values()
        ]
        widths = [1] * len(names)
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


def _group_by_target(
    progress: RunProgress,
) -> dict[tuple[str, str], dict[str, StageProgress]]:
    """Return the stages of each recipe and target by name, with those that all its targets share."""
    shared: dict[str, dict[str, StageProgress]] = {}
    rows: dict[tuple[str, str], dict[str, StageProgress]] = {}
    for stage in progress.stages.values():
        if stage.target:
            rows.setdefault((stage.recipe, stage.target), {})[stage.stage] = stage
        else:
            shared.setdefault(stage.recipe, {})[stage.stage] = stage
    for recipe in shared:
        if not any(other == recipe for other, _ in rows):
            rows[recipe, ""] = {}
    return {
        (recipe, target): {**shared.get(recipe, {}), **row}
        for (recipe, target), row in rows.items()
    }


def _choose_rows(
    lines: Sequence[Line], rows: Sequence[Mapping[str, StageProgress]], height: int
) -> list[Line]:
    """Return at most `height` lines: rows where something runs or failed first, then those that are not done."""
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
    """Return the state of a stage: a symbol, and how long it runs or ran."""
    if stage is None:
        return Span("")
    if stage.state == RUNNING:
        symbol = _SPINNER[int(now * _FRAMES_PER_SECOND) % len(_SPINNER)]
        return Span(symbol if short else f"{symbol} {rounded_text(now - stage.started)}", "cyan")
    symbol, style = (_SYMBOLS | _SYMBOLS_OF_SUCCESS).get(stage.state, _FAILURE)
    has_time = stage.state == "ran" and not short
    return Span(f"{symbol} {duration_text(stage.seconds)}" if has_time else symbol, style)


# ---------------------------------------------------------------- what runs


def _draw_running(stage: StageProgress, columns: int, now: float) -> list[Line]:
    """Return how far a stage is, and what a search has gained."""
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
    """Return a table of the kernels that take longest, from the last event of each."""
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
        # What is slower than the untuned kernel is not used.
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
    """Return what a search has gained so far: `estimated latency 19 ms → 12 ms, 1.6× faster`, or nothing."""
    untuned_us, best_us = event.get("untuned_latency_us"), event.get("best_latency_us")
    if not untuned_us or not best_us:
        return ""
    change = f"{latency_text(untuned_us / 1e6)} → {latency_text(best_us / 1e6)}"
    speedup = untuned_us / best_us
    return f"estimated latency {change}" + (f", {speedup:.2f}× faster" if speedup > 1.005 else "")
