"""The document of a page: its head, the switch of colours, the sections, and the style.

A section without content is left out.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Final

from tvmflow.core.formatting import count_text, size_text
from tvmflow.core.generated_text import Child, Markup, element, join, lines
from tvmflow.core.statistics import NOISE_TEXTS
from tvmflow.core.version import VERSION
from tvmflow.engine.builds import Peer, SizeResult, Speedup
from tvmflow.pages.content import Change, Gate, KernelChange, Library, Page
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
from tvmflow.pages.summary import (
    describe_lead,
    draw_graph,
    draw_tiles,
    draw_times,
    format_change,
    format_latency_of,
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
    """Return the HTML of a page: one file that loads nothing, and shows everything without JavaScript.

    The same content gives the same text. The kind stands above the title, the lead below it, `facts` after
    that; the contents are id, title and content of each section.
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
        # without an address of its own, a browser asks the server for one
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
    """Return the policy that forbids every request, and every script but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _switch() -> Markup:
    """Return the choice of colours, which works without JavaScript."""
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

# Of more libraries than this, the kernels are left to a page about one of them.
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
    times = draw_times(page.stages)
    yield "time", "Time", times
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
    runtimes = list(
        dict.fromkeys(peer.name for library in page.libraries for peer in library.build.peers)
    )
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
    marks = ["Pareto-optimal"] if build.is_pareto_optimal else []
    return {
        "library": Cell(library.label, library.label, ", ".join(marks)),
        "state": Cell(state, library.state, _describe_verdict(library)),
        "latency": Cell(
            format_latency_of(build.latency_s) if previous or build.latency_s else UNKNOWN,
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
        "largest error": Cell(
            error(build.error),
            build.error,
            _describe_error(previous.error if previous else None, build.error),
        ),
        "accuracy": Cell(
            accuracy(build.accuracy),
            build.accuracy,
            _describe_accuracy(previous.accuracy if previous else None, build.accuracy),
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
    """Return how many times as fast the library is as the one above; colored if that is not noise."""
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


def _describe_error(previous: float | None, current: float | None) -> Child:
    """Return the earlier error and the change; it has no colour, because `verify` has judged it."""
    part = change(previous, current)
    if part is None or error(previous) == error(current):
        return None
    return f"was {error(previous)} ({part:+.0%})"


def _describe_accuracy(previous: float | None, current: float | None) -> Child:
    if previous is None or current is None or accuracy(previous) == accuracy(current):
        return None
    sign, style = ("▲", "good") if current > previous else ("▼", "bad")
    points = f"{sign} {100 * (current - previous):+.2f} points"
    return join(element("span", points, class_=style), f" was {accuracy(previous)}")


def _list_sizes(page: Page) -> list[Child]:
    """Return a row for each size at which a library with dimensions was verified."""
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
    """Return a row for each library, and a column for each gate with its limit."""
    limits: dict[str, set[str]] = {}
    for gate in page.gates:
        limits.setdefault(gate.gate, set()).add(gate.limit)
    # where targets have limits of their own, each is beside its figure
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
    files = [
        (library, name, size)
        for library in page.libraries
        for name, size in sorted(library.files.items())
    ]
    if not files:
        return None
    content = table("Delivered files", (_file_row(*file) for file in files))
    total = size_text(sum(size for _, _, size in files))
    summary = element("summary", f"{count_text(len(files), 'file')}, {total}")
    return element("details", summary, content, open=len(files) <= _FEW_FILES)


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
# Changes since the baseline of a page: kernels, inputs, settings and packages.

_MAX_ROWS: Final = 100
_FEW_ROWS: Final = 20
_EXPLANATION: Final = (
    "The time of a kernel in one call of the library: its share of the latency. Kernels that are on one "
    "side only are new or gone, perhaps because others were fused. Times are compared where the latency "
    "of the library has changed beyond the noise, and from 10 % of the kernel and 1 % of the library."
)


def list_changes(page: Page) -> Iterator[Markup]:
    """Yield the kernels that changed, and everything else that did."""
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
