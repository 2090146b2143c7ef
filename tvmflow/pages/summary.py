"""The head of a page: a sentence with the result, and the most important figures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Final, NamedTuple

from tvmflow.core.formatting import count_text, duration_text, latency_text, shorten
from tvmflow.core.generated_text import Markup, element
from tvmflow.core.statistics import NOISE_TEXTS, Judgement
from tvmflow.engine.builds import Build
from tvmflow.engine.report import group_by_target
from tvmflow.engine.stage_graph import Node, draw_stages, list_edges
from tvmflow.pages.content import Library, Page, StageEntry
from tvmflow.pages.plot import Cell, Row, accuracy, change, error, latency, ratio, size, table

_FEW_RUNTIMES: Final = 2
_PROBLEMS: Final = ("failed", "crashed", "timeout", "blocked", "cancelled")
# The states of libraries that nobody may use yet, the worst first.
_BAD: Final = ("rejected", "failed", "skipped", "stopped")
_MIN_CHANGE: Final = 0.005
_UNCHANGED: Final = "Latency unchanged within the noise"
_DIGITS: Final = "0123456789."
_UNITS: Final = "×% kMGBnµms"
_MAX_COLUMNS: Final = 5


class _Tile(NamedTuple):
    label: str
    value: str
    note: str = ""
    state: str = ""


def describe_lead(page: Page) -> str:
    """Return the headline: the libraries, their states, and their speed."""
    failed = sum(gate.state == "failed" for gate in page.gates)
    sentences = (
        *_describe_libraries(page.libraries),
        *_describe_problems(page.stages),
        *(["All measured gates passed."] if page.gates and not failed else []),
        *([f"{count_text(failed, 'gate')} failed."] if failed else []),
        *_compare(page),
    )
    return " ".join(sentences)


def _describe_libraries(libraries: Sequence[Library]) -> Iterator[str]:
    """Yield how many libraries there are, and how many in each state that matters."""
    if not libraries:
        return
    number = len(libraries)
    states = [library.state for library in libraries]
    good = states.count("verified")
    targets = len({library.build.target for library in libraries})
    where = f" for {count_text(targets, 'target')}" if targets > 1 else ""
    count = count_text(number, "library", "libraries")
    verdicts = [f"{good} verified"] if any(states) else []
    if good == number:
        verdicts = ["verified" if number == 1 else "all verified"]
    verdicts += [f"{bad} {state}" for state in _BAD if (bad := states.count(state))]
    yield f"{', '.join([f'{count}{where}', *verdicts])}."


def _describe_problems(stages: Sequence[StageEntry]) -> Iterator[str]:
    """Yield the first stage that did not succeed, and how many more did not."""
    broken = [stage for stage in stages if stage.report.outcome in _PROBLEMS]
    if broken:
        words = STATES[broken[0].report.outcome][1]
        more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        yield f"{broken[0].report.stage_id}: {words}{more}."


def _compare(page: Page) -> Iterator[str]:
    compared = [library for library in page.libraries if library.previous]
    if not page.previous or not compared:
        return
    changes = _list_changes([library for library in compared if not library.is_same])
    if changes:
        yield f"{_describe_changes(changes)} since {page.previous}."
    elif all(library.is_same for library in compared):
        yield f"No latency was measured again since {page.previous}."


def _describe_changes(changes: Sequence[tuple[float, Judgement | None]]) -> str:
    """Return the mean of changes; a mean of noise is noise."""
    mean = geometric_mean([1 + part for part, _ in changes]) - 1
    if abs(mean) < _MIN_CHANGE:
        return "Latency unchanged"
    judgements = [judgement for _, judgement in changes]
    if all(judgement in NOISE_TEXTS for judgement in judgements):
        is_unclear = "unclear" in judgements
        return "The machine was too noisy to compare the latency" if is_unclear else _UNCHANGED
    return f"Latency {mean:+.1%}{' in the mean' if len(changes) > 1 else ''}"


def _list_changes(libraries: Sequence[Library]) -> list[tuple[float, Judgement | None]]:
    changes = (
        (change(library.previous.latency_s, library.build.latency_s), library.judgement)
        for library in libraries
        if library.previous
    )
    return [(part, judgement) for part, judgement in changes if part is not None]


def draw_tiles(page: Page) -> Markup | None:
    """Return the most important figures; None if nothing was measured."""
    tiles = list(_list_tiles(page))
    drawn = [
        element(
            "div",
            element("dt", tile.label),
            element("dd", tile.value, element("small", tile.note) if tile.note else None),
            class_=f"tile {tile.state}".strip(),
        )
        for tile in tiles
    ]
    if not tiles:
        return None
    # as many in each row, as far as that goes
    columns = math.ceil(len(tiles) / math.ceil(len(tiles) / _MAX_COLUMNS))
    return element("dl", drawn, class_="tiles", style=f"--columns:{columns}")


def _list_tiles(page: Page) -> Iterator[_Tile]:
    builds = [library.build for library in page.libraries]
    # the speed of a wrong library does not count
    sound = [build for build in builds if build.verdict != "rejected"]
    yield from _count_verified(page.libraries)
    yield from _find_fastest([build for build in sound if build.latency_s])
    yield from _summarize_tuning(sound)
    yield from _list_runtimes(sound)
    yield from _summarize_errors(builds)
    sizes = [build.size_bytes for build in builds if build.size_bytes]
    if sizes:
        yield _Tile("library", _spread(sizes, size))
    yield from _sum_times(page.stages)


def _count_verified(libraries: Sequence[Library]) -> Iterator[_Tile]:
    if any(library.state for library in libraries):
        good = sum(library.state == "verified" for library in libraries)
        named = (library.build.reference for library in libraries)
        references = ", ".join(dict.fromkeys(filter(None, named)))
        note = f"against {references}" if references else ""
        state = "good" if good == len(libraries) else "bad"
        yield _Tile("verified", f"{good} of {len(libraries)}", note, state)


def _find_fastest(timed: Sequence[Build]) -> Iterator[_Tile]:
    if len(timed) == 1:
        yield _Tile("latency", latency(timed[0].latency_s), timed[0].target)
    elif timed:
        fastest = min(timed, key=lambda build: build.latency_s or 0.0)
        yield _Tile("fastest library", latency(fastest.latency_s), fastest.name)


def _summarize_tuning(builds: Sequence[Build]) -> Iterator[_Tile]:
    speedups = [build.tuning_speedup for build in builds if build.tuning_speedup]
    clear = [speedup.median for speedup in speedups if speedup.judgement != "unclear"]
    if clear:
        yield _Tile("speedup by tuning", _spread(clear, ratio), "the same model untuned")


def _summarize_errors(builds: Sequence[Build]) -> Iterator[_Tile]:
    """Yield the accuracy, or else the largest error, and the cost of quantization."""
    accuracies = [build.accuracy for build in builds if build.accuracy is not None]
    errors = [build.error for build in builds if build.error is not None]
    if accuracies:
        before = [b.reference_accuracy for b in builds if b.reference_accuracy is not None]
        note = f"the reference has {_spread(before, accuracy)}" if before else ""
        yield _Tile("accuracy", _spread(accuracies, accuracy), note)
    elif errors:
        quantized = any(build.quantization_error is not None for build in builds)
        note = "of any output, relative to the quantized model" if quantized else "of any output"
        yield _Tile("largest error", error(max(errors)), note)
    costs = [b.quantization_error for b in builds if b.quantization_error is not None]
    if costs:
        note = "root mean square, relative to the float model"
        yield _Tile("error by quantizing", f"{max(costs):.2%}", note)


def _sum_times(stages: Sequence[StageEntry]) -> Iterator[_Tile]:
    spent = sum(stage.report.seconds for stage in stages)
    saved = sum(stage.saved_s for stage in stages)
    if spent:
        note = f"{duration_text(saved)} saved by the cache" if saved else ""
        yield _Tile("time of stages", duration_text(spent), note)
    elif saved:
        yield _Tile("saved by the cache", duration_text(saved))


def _list_runtimes(builds: Sequence[Build]) -> Iterator[_Tile]:
    """Yield how much faster the libraries are than each other runtime."""
    speedups: dict[str, list[float]] = {}
    for build in builds:
        for peer in build.peers:
            if not peer.speedup or peer.speedup.judgement == "unclear":
                continue
            if not peer.differs:
                speedups.setdefault(peer.name, []).append(peer.speedup.median)
    for name, values in list(speedups.items())[:_FEW_RUNTIMES]:
        yield _Tile("speedup", _spread(values, ratio), f"over {name}")


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return a value, or the smallest and the largest where their texts differ."""
    low, high = show(min(values)), show(max(values))
    if low == high:
        return low
    number, low_unit, high_unit = low.rstrip(_UNITS), low.lstrip(_DIGITS), high.lstrip(_DIGITS)
    return f"{number if low_unit == high_unit else low}–{high}"


def format_change(
    previous: float | None, current: float | None, judgement: Judgement | None = None
) -> Markup | None:
    """Return the change of a value for which less is better, with words; None if it is not known."""
    part = change(previous, current)
    if part is None:
        return None
    if abs(part) < _MIN_CHANGE:
        return element("span", "unchanged", class_="faint")
    if judgement is not None and judgement in NOISE_TEXTS:
        return element("span", f"{part:+.1%}, {NOISE_TEXTS[judgement]}", class_="faint")
    sign = "▲" if part > 0 else "▼"
    return element("span", f"{sign} {part:+.1%}", class_="bad" if part > 0 else "good")


def format_latency_of(build_latency: float | None) -> str:
    """Return a latency, or that it was not timed."""
    return "not timed" if build_latency is None else latency_text(build_latency)


_WIDTH: Final = 172
# A graph with more lanes than this is a table only.
_MAX_LANES: Final = 24
_MAX_NAME: Final = 21

STATES: Final[Mapping[str, tuple[str, str]]] = {
    "ran": ("●", "ran"),
    "hit": ("✓", "up to date"),
    "fetched": ("↓", "fetched from the remote cache"),
    "rejected": ("✗", "rejected"),
    "failed": ("✗", "failed"),
    "crashed": ("✗", "crashed"),
    "timeout": ("✗", "took too long"),
    "blocked": ("✗", "blocked by the state of the machine"),
    "cancelled": ("■", "stopped"),
    "skipped": ("○", "skipped"),
}
"""The sign and the words for each outcome."""

_STYLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("hit", "fetched"), "reused"),
    "ran": "ran",
    **dict.fromkeys(("cancelled", "skipped"), "idle"),
}


def describe_state(outcome: str) -> Markup:
    """Return the sign of an outcome with its words."""
    sign, words = STATES.get(outcome, ("?", outcome))
    return element("span", f"{sign} {words}", class_=f"state {_STYLES.get(outcome, 'bad')}")


def draw_times(stages: Sequence[StageEntry]) -> Markup | None:
    """Return bars of the time that the stages of each name spent and saved; None without time."""
    spent, saved = defaultdict[str, float](float), defaultdict[str, float](float)
    for stage in stages:
        spent[stage.report.stage] += stage.report.seconds
        saved[stage.report.stage] += stage.saved_s
    names = list(spent)
    longest = max((spent[name] + saved[name] for name in names), default=0.0)
    if not longest:
        return None
    rows = (
        element(
            "li",
            element("span", name, class_="name"),
            element(
                "span",
                _bar("spent", spent[name] / longest),
                _bar("saved", saved[name] / longest),
                class_="bar",
                aria_hidden="true",
            ),
            element("span", _describe_times(spent[name], saved[name]), class_="value"),
        )
        for name in names
    )
    key = element(
        "p",
        element("span", element("i", class_="bar-key spent"), "spent in this run"),
        element(
            "span",
            element("i", class_="bar-key saved"),
            "saved: what the results took that are used again",
        ),
        class_="key",
    )
    return element("div", key, element("ul", rows, class_="bars"))


def _bar(kind: str, part: float) -> Markup | None:
    return element("i", class_=kind, style=f"width:{part:.2%}") if part else None


def _describe_times(spent: float, saved: float) -> str:
    texts = [duration_text(spent)] if spent else []
    texts += [f"{duration_text(saved)} saved"] if saved else []
    return ", ".join(texts) or "–"


def draw_graph(stages: Sequence[StageEntry]) -> Iterator[Markup]:
    """Yield the drawing of the graph, unless it is too large, and the table of the stages."""
    if len(group_by_target(stage.report for stage in stages)) <= _MAX_LANES:
        yield _draw(stages)
    else:
        text = f"The graph of {count_text(len(stages), 'stage')} is too large to be drawn."
        yield element("p", text, class_="note")
    content = table("The stages in the order of the plan", map(_stage_row, stages))
    yield element("details", element("summary", f"All {len(stages)} stages as a table"), content)


def _stage_row(stage: StageEntry) -> Row:
    report, saved_s = stage.report, stage.saved_s
    reason = report.message or report.reason
    return {
        "stage": Cell(report.stage_id, report.stage_id),
        "state": Cell(describe_state(report.outcome), report.outcome),
        "spent": Cell(duration_text(report.seconds) if report.seconds else "", report.seconds),
        "saved": Cell(duration_text(saved_s) if saved_s else "", saved_s),
        "reason": Cell(reason, reason),
    }


def _draw(stages: Sequence[StageEntry]) -> Markup:
    edges = list(list_edges({stage.report.stage_id: stage.needs for stage in stages}))
    drawing = draw_stages([_make_node(stage) for stage in stages], edges, _WIDTH)
    width = drawing.width
    svg = element(
        "svg",
        drawing.content,
        viewBox=f"0 0 {width} {drawing.height}",
        style=f"min-width:{width * 0.7:.0f}px;max-width:{width}px",
        role="group",
        aria_label="The stages and what each of them needs",
    )
    return element(
        "div",
        svg,
        class_="scroll graph",
        tabindex=0,
        role="group",
        aria_label="Graph of the stages",
    )


def _make_node(stage: StageEntry) -> Node:
    report = stage.report
    sign, words = STATES.get(report.outcome, ("?", report.outcome))
    seconds = report.seconds or stage.saved_s
    time = duration_text(seconds) if seconds else ""
    took = f", {time} {'spent' if report.seconds else 'saved'}" if time else ""
    return Node(
        stage_id=report.stage_id,
        recipe=report.recipe,
        target=report.target,
        label=f"{sign} {report.stage}",
        detail=shorten(report.target or report.recipe, _MAX_NAME - len(time) - bool(time)),
        note=time,
        style=_STYLES.get(report.outcome, "bad"),
        reason=f"{words}{took}",
    )
