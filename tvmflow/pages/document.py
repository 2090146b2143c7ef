"""HTML of a page: head, sections and style. Empty sections are left out."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import geometric_mean
from typing import Final, NamedTuple

from tvmflow.core.formatting import count_text, duration_text, shorten, size_text
from tvmflow.core.generated_text import Child, Markup, element, join, lines
from tvmflow.core.statistics import NOISE_TEXTS, Judgement
from tvmflow.core.version import VERSION
from tvmflow.engine.builds import Build, Peer, SizeResult, Speedup
from tvmflow.engine.report import group_by_target
from tvmflow.engine.stage_graph import Node, draw_stages, list_edges
from tvmflow.pages.content import Change, Gate, KernelChange, Library, Page, StageEntry
from tvmflow.pages.kernels import draw_kernels, draw_layers, draw_search
from tvmflow.pages.plot import (
    UNKNOWN,
    Cell,
    Row,
    accuracy,
    change,
    draw_pareto,
    error,
    latency,
    pairs,
    ratio,
    size,
    table,
)

_THEMES: Final = ("auto", "light", "dark")


def render_page(page: Page) -> str:
    """Return the HTML of a page about libraries."""
    facts = (draw_tiles(page), pairs(page.about))
    return render_document(
        page.title, f"{page.kind} report", describe_lead(page), list_sections(page), facts
    )


def render_document(
    title: str,
    kind: str,
    lead: str,
    contents: Iterable[tuple[str, str, Child]],
    facts: Child = None,
) -> str:
    """Return the reproducible HTML of a page, which loads nothing and works without JavaScript.

    `kind` is shown above the title, `lead` and `facts` below it. `contents` lists id, title and content of sections.
    """
    sections = [(name, heading, markup) for name, heading, it in contents if (markup := join(it))]
    style, script = _read("page.css"), _read("page.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"tvmflow {VERSION}"),
        # Without an icon address, browsers request one from the server.
        element("link", rel="icon", href="data:,"),
        element("title", f"{title} · {kind}"),
        element("style", Markup(style)),
    )
    links = (element("li", element("a", name, href=f"#{id_}")) for id_, name, _ in sections)
    main = (
        element(
            "section",
            element("h2", name, id=f"{id_}-title"),
            content,
            id=id_,
            aria_labelledby=f"{id_}-title",
        )
        for id_, name, content in sections
    )
    header = element(
        "header",
        element("div", element("p", kind, class_="kind"), _switch(), class_="top"),
        element("h1", title),
        element("p", lead, class_="lead"),
        facts,
        element("nav", element("ul", links), aria_label="Sections"),
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        header,
        element("main", *main, id="content", tabindex=-1),
        element("footer", element("p", f"Made by tvmflow {VERSION}.")),
        element("div", id="tooltip", role="tooltip", hidden=True),
        element("script", Markup(script)),
    )
    return f'<!doctype html>\n<html lang="en">\n{head}\n{body}\n</html>\n'


def _read(name: str) -> str:
    return files("tvmflow.pages").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return a content security policy that forbids all requests and all other scripts."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _switch() -> Markup:
    """Return the theme switch, which works without JavaScript."""
    choices = (
        join(
            element(
                "input",
                type="radio",
                name="theme",
                id=f"theme-{theme}",
                value=theme,
                checked=theme == "auto",
            ),
            element("label", theme.capitalize(), for_=f"theme-{theme}"),
        )
        for theme in _THEMES
    )
    legend = element("legend", "Colours", class_="hidden")
    return element("fieldset", legend, choices, class_="switch")


# ---------------------------------------------------------------- sections

# Kernels are shown for at most this many libraries.
_MAX_DETAILED: Final = 24
_GATE_STATES: Final = {"passed": ("✓", "good"), "failed": ("✗", "bad")}
_LIBRARY_STATES: Final = {
    "verified": ("✓", "good"),
    "rejected": ("✗", "bad"),
    "failed": ("✗", "bad"),
}
_FEW_FILES: Final = 20


def list_sections(page: Page) -> Iterator[tuple[str, str, Child]]:
    """Yield id, title and content of each section."""
    yield "libraries", "Libraries", _compare_libraries(page)
    yield "sizes", "Sizes", _list_sizes(page)
    yield "changes", "Changes", list(list_changes(page))
    yield "pareto", "Speed against size and error", list(draw_pareto(page.libraries))
    yield "gates", "Gates", _list_gates(page)
    yield "files", "Files", _list_files(page)
    yield "tuning", "Tuning", list(draw_search(page.kernels))
    yield "kernels", "Kernels", list(_list_kernels(page))
    quantized = list(page.quantized.items())[:_MAX_DETAILED]
    yield "layers", "Quantized layers", [list(draw_layers(*model)) for model in quantized]
    yield "time", "Time", draw_times(page.stages)
    yield "stages", "Stages", list(draw_graph(page.stages)) if page.stages else None
    yield "recipes", "Recipe" if len(page.recipes) == 1 else "Recipes", list(_list_recipes(page))
    yield (
        "provenance",
        "Provenance",
        [
            element("div", element("h3", title), pairs(rows), class_="facts")
            for title, rows in page.provenance
            if rows
        ],
    )


def _compare_libraries(page: Page) -> list[Child]:
    peers = (peer.name for library in page.libraries for peer in library.build.peers)
    runtimes = list(dict.fromkeys(peers))
    rows = [_library_row(library, runtimes) for library in page.libraries]
    about = f"Compared with {page.previous}." if page.previous else ""
    return [
        (element("p", element("a", text, href=address)) for text, address in page.links),
        element("p", about) if about and rows else None,
        *(element("p", note, class_="note") for note in page.notes),
        table("Libraries", rows),
    ]


def _library_row(library: Library, runtimes: list[str]) -> Row:
    build, previous = library.build, library.previous
    sign, style = _LIBRARY_STATES.get(library.state, ("○", "faint"))
    state = element("span", f"{sign} {library.state}", class_=style) if library.state else UNKNOWN
    peers = {peer.name: peer for peer in build.peers}
    tuned, kernels = build.tuned_kernels, build.kernels
    mark = "Pareto-optimal" if build.is_pareto_optimal else ""
    return {
        "library": Cell(library.label, library.label, mark),
        "state": Cell(state, library.state, _describe_verdict(library)),
        "latency": Cell(
            "not timed" if previous and build.latency_s is None else latency(build.latency_s),
            build.latency_s,
            _latency_note(library),
        ),
        "untuned": Cell(
            latency(build.untuned_latency_s),
            build.untuned_latency_s,
            _times_as_fast(build.tuning_speedup),
        ),
        **{name: _runtime_cell(peers.get(name)) for name in runtimes},
        "size": Cell(
            size(build.size_bytes),
            build.size_bytes,
            format_change(previous.size_bytes, build.size_bytes) if previous else None,
        ),
        "largest error": Cell(error(build.error), build.error, _describe_error(previous, build)),
        "accuracy": Cell(
            accuracy(build.accuracy), build.accuracy, _describe_accuracy(previous, build)
        ),
        "tuned kernels": Cell(UNKNOWN if tuned is None else f"{tuned} of {kernels}", tuned),
    }


def _latency_note(library: Library) -> Child:
    previous = library.previous
    changed = None
    if previous and not library.is_same:
        latencies = previous.latency_s, library.build.latency_s
        changed = format_change(*latencies, library.judgement)
    note = element("span", library.note, class_="how") if library.note else None
    return join(changed, note) if changed or note else None


def _runtime_cell(peer: Peer | None) -> Cell:
    if peer is None:
        return Cell(UNKNOWN)
    note = _times_as_fast(peer.speedup)
    if peer.differs:
        note = join(note, element("span", "its outputs differ", class_="bad"))
    return Cell(latency(peer.latency_s), peer.latency_s, note)


def _times_as_fast(speedup: Speedup | None) -> Child:
    """Return the speedup of the library, coloured if it is not noise."""
    if speedup is None:
        return None
    judgement = speedup.judgement
    if judgement == "unclear":
        limits = f"{ratio(speedup.low)} to {ratio(speedup.high)}"
        return element("span", f"{NOISE_TEXTS[judgement]}: {limits}", class_="faint")
    style = {"more": "good", "less": "bad", "equal": "faint"}[judgement]
    return element("span", f"{ratio(speedup.median)} as fast", class_=style)


def _describe_verdict(library: Library) -> Child:
    before = library.previous.verdict if library.previous else None
    if not before or not library.state or before == library.state:
        return None
    return f"was {before}"


def _describe_error(previous: Build | None, build: Build) -> Child:
    """Return the earlier error and the change, uncoloured, because `verify` judges errors."""
    before = previous and previous.error
    part = change(before, build.error)
    if part is None or error(before) == error(build.error):
        return None
    return f"was {error(before)} ({part:+.0%})"


def _describe_accuracy(previous: Build | None, build: Build) -> Child:
    before, current = previous and previous.accuracy, build.accuracy
    if before is None or current is None or accuracy(before) == accuracy(current):
        return None
    sign, style = ("▲", "good") if current > before else ("▼", "bad")
    points = f"{sign} {100 * (current - before):+.2f} points"
    return join(element("span", points, class_=style), f" was {accuracy(before)}")


def _list_sizes(page: Page) -> list[Child]:
    results = [(library, entry) for library in page.libraries for entry in library.build.sizes]
    rows = [_size_row(library, entry) for library, entry in results]
    if not rows:
        return []
    measured = {library.build.measured_at for library in page.libraries} - {""}
    about = f"All other figures are at {'; '.join(sorted(measured))}." if measured else ""
    return [element("p", about) if about else None, table("Sizes that each call chooses", rows)]


def _size_row(library: Library, entry: SizeResult) -> Row:
    sign, style, state = ("✓", "good", "right") if entry.passed else ("✗", "bad", "wrong")
    return {
        "library": Cell(library.label, library.label),
        "sizes": Cell(entry.sizes, entry.sizes),
        "state": Cell(element("span", f"{sign} {state}", class_=style), state),
        "largest error": Cell(error(entry.error), entry.error),
        "latency": Cell(latency(entry.latency_s), entry.latency_s),
        "reference": Cell(latency(entry.reference_latency_s), entry.reference_latency_s),
        "one size only": Cell(latency(entry.fixed_latency_s), entry.fixed_latency_s),
    }


def _list_gates(page: Page) -> Child:
    limits: dict[str, set[str]] = {}
    for gate in page.gates:
        limits.setdefault(gate.gate, set()).add(gate.limit)
    # If limits differ between targets, each cell shows its own limit.
    gates = {gate: " ".join(values) if len(values) == 1 else "" for gate, values in limits.items()}
    checked = {(gate.label, gate.gate): gate for gate in page.gates}
    rows = (
        {
            "library": Cell(label, label),
            **{
                f"{name} {limit}".rstrip(): _gate_cell(checked.get((label, name)), not limit)
                for name, limit in gates.items()
            },
        }
        for label in dict.fromkeys(gate.label for gate in page.gates)
    )
    return table("Gates", rows, omits_empty=False)


def _gate_cell(gate: Gate | None, has_own_limit: bool) -> Cell:
    if gate is None:
        return Cell(UNKNOWN)
    sign, style = _GATE_STATES.get(gate.state, ("○", "faint"))
    value = f"{sign} {gate.state}"
    note = f"{gate.value} of {gate.limit}" if has_own_limit else gate.value
    return Cell(element("span", value, class_=style), gate.state, note)


def _list_files(page: Page) -> Child:
    rows = [
        _file_row(library, name, size)
        for library in page.libraries
        for name, size in sorted(library.files.items())
    ]
    if not rows:
        return None
    content = table("Delivered files", rows)
    total = size_text(sum(sum(library.files.values()) for library in page.libraries))
    summary = element("summary", f"{count_text(len(rows), 'file')}, {total}")
    return element("details", summary, content, open=len(rows) <= _FEW_FILES)


def _file_row(library: Library, name: str, size: int) -> Row:
    return {
        "file": Cell(element("code", name), name),
        "library": Cell(library.label, library.label),
        "size": Cell(size_text(size), size, format_change(library.previous_files.get(name), size)),
        "machine": Cell(library.machine, library.machine),
    }


def _list_kernels(page: Page) -> Iterator[Markup]:
    for index, library in enumerate(page.kernels[:_MAX_DETAILED]):
        summary = f"{library.label}: {count_text(len(library.kernels), 'kernel')}"
        content = list(draw_kernels(library))
        yield element("details", element("summary", summary), content, open=index == 0)
    more = len(page.kernels) - _MAX_DETAILED
    if more > 0:
        libraries = count_text(more, "more library", "more libraries")
        yield element("p", f"{libraries}: make a report of one recipe.", class_="note")


def _list_recipes(page: Page) -> Iterator[Markup]:
    for index, recipe in enumerate(page.recipes):
        yield element(
            "details",
            element("summary", recipe.path),
            element("p", recipe.note, class_="note") if recipe.note else None,
            element("pre", element("code", lines(recipe.text)), tabindex=0),
            open=index == 0 and len(page.recipes) == 1,
        )


# ---------------------------------------------------------------- changes

_MAX_ROWS: Final = 100
_FEW_ROWS: Final = 20
_EXPLANATION: Final = (
    "The time of a kernel in one call of the library: its share of the latency. Kernels that are on one "
    "side only are new or gone, perhaps because others were fused. Times are compared where the latency "
    "of the library has changed beyond the noise, and from 10 % of the kernel and 1 % of the library."
)


def list_changes(page: Page) -> Iterator[Markup]:
    """Yield the changes since the baseline: of kernels, then all others."""
    if page.kernel_changes:
        rows = map(_kernel_row, page.kernel_changes[:_MAX_ROWS])
        yield element(
            "div",
            element("h3", "Kernels"),
            element("p", _EXPLANATION),
            table("Kernels that changed", rows),
            _count_more(len(page.kernel_changes)),
            class_="facts",
        )
    if page.changes:
        number = len(page.changes)
        rows = map(_other_row, page.changes[:_MAX_ROWS])
        content = table("What else changed", rows)
        summary = element("summary", count_text(number, "difference"))
        yield element(
            "div",
            element("h3", "Builds, inputs, settings, machines and packages"),
            element("details", summary, content, open=number <= _FEW_ROWS),
            _count_more(number),
            class_="facts",
        )


def _count_more(number: int) -> Markup | None:
    if number <= _MAX_ROWS:
        return None
    text = f"{count_text(number - _MAX_ROWS, 'more row')}: `tvmflow compare --json` has all."
    return element("p", text, class_="note")


def _kernel_row(row: KernelChange) -> Row:
    return {
        "kernel": Cell(element("code", row.name), row.name, row.label),
        "change": _describe_change(row),
        "before": Cell(latency(row.before_s), row.before_s),
        "now": Cell(latency(row.after_s), row.after_s),
    }


def _describe_change(row: KernelChange) -> Cell:
    part = change(row.before_s, row.after_s)
    if row.before_s is None:
        return Cell(element("span", "+ new", class_="faint"), "new")
    if row.after_s is None:
        return Cell(element("span", "− gone", class_="faint"), "gone")
    if part is None:
        return Cell("")
    word, style = ("▲ slower", "bad") if part > 0 else ("▼ faster", "good")
    return Cell(element("span", f"{word}, {part:+.0%}", class_=style), part)


def _other_row(row: Change) -> Row:
    return {
        "where": Cell(row.place, row.place),
        "what": Cell(row.what, row.what),
        "change": Cell(row.text.replace("->", "→"), row.text),
    }


# ---------------------------------------------------------------- lead, figures and stages

_FEW_RUNTIMES: Final = 2
_PROBLEMS: Final = ("failed", "crashed", "timeout", "blocked", "cancelled")
# States of libraries that must not be used yet, worst first.
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
    """Return the headline: libraries, their states, and their speed."""
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
    """Return the mean change as text; if all changes are noise, so is their mean."""
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
    """Return tiles with the most important figures, or None if nothing was measured."""
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
    # Balance the number of tiles in each row.
    columns = math.ceil(len(tiles) / math.ceil(len(tiles) / _MAX_COLUMNS))
    return element("dl", drawn, class_="tiles", style=f"--columns:{columns}")


def _list_tiles(page: Page) -> Iterator[_Tile]:
    builds = [library.build for library in page.libraries]
    # The speed of a rejected library does not count.
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
    """Return values as a range, or as a single value if both ends have the same text."""
    low, high = show(min(values)), show(max(values))
    if low == high:
        return low
    number, low_unit, high_unit = low.rstrip(_UNITS), low.lstrip(_DIGITS), high.lstrip(_DIGITS)
    return f"{number if low_unit == high_unit else low}–{high}"


def format_change(
    previous: float | None, current: float | None, judgement: Judgement | None = None
) -> Markup | None:
    """Return the change of a value for which less is better, or None if it is unknown."""
    part = change(previous, current)
    if part is None:
        return None
    if abs(part) < _MIN_CHANGE:
        return element("span", "unchanged", class_="faint")
    if judgement is not None and judgement in NOISE_TEXTS:
        return element("span", f"{part:+.1%}, {NOISE_TEXTS[judgement]}", class_="faint")
    sign = "▲" if part > 0 else "▼"
    return element("span", f"{sign} {part:+.1%}", class_="bad" if part > 0 else "good")


_WIDTH: Final = 172
# A graph with more lanes than this is not drawn, only listed as a table.
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
"""Outcome of a stage -> (sign, words)."""

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
    """Return bars of spent and saved time by stage name, or None if all times are 0."""
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
    """Yield the graph of stages, unless it is too large, and a table of them."""
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
