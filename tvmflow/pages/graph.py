"""The stages of a run: their graph with states, and the time that each kind spent and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.formatting import count_text, duration_text
from tvmflow.pages.content import StageEntry
from tvmflow.pages.markup import Markup, element
from tvmflow.pages.plot import shorten
from tvmflow.pages.tables import Cell, Column, table

_WIDTH: Final = 172
_HEIGHT: Final = 44
_GAP_X: Final = 24
_GAP_Y: Final = 12
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
_COLUMNS: Final = (
    Column("stage"),
    Column("state"),
    Column("spent", is_number=True),
    Column("saved", is_number=True),
    Column("reason"),
)


def describe_state(outcome: str) -> Markup:
    """Return the sign of an outcome with its words."""
    sign, words = STATES.get(outcome, ("?", outcome))
    return element("span", f"{sign} {words}", class_=f"state {_STYLES.get(outcome, 'bad')}")


# ---------------------------------------------------------------- time


def draw_times(stages: Sequence[StageEntry]) -> Markup | None:
    """Return bars with the time that the stages of each name spent and saved; None where there is none."""
    names = dict.fromkeys(stage.stage for stage in stages)
    spent = {name: sum(s.spent_s for s in stages if s.stage == name) for name in names}
    saved = {name: sum(s.saved_s for s in stages if s.stage == name) for name in names}
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


# ---------------------------------------------------------------- graph


class _Place(NamedTuple):
    x: float
    y: float


def draw_graph(stages: Sequence[StageEntry]) -> Iterator[Markup]:
    """Yield the drawing of the graph, unless it is too large for one, and the table of the stages."""
    lanes = _list_lanes(stages)
    if len(lanes) <= _MAX_LANES:
        yield _draw(stages, lanes)
    else:
        yield element(
            "p",
            f"The graph of {count_text(len(stages), 'stage')} is too large to be drawn.",
            class_="note",
        )
    rows = [
        [
            Cell(stage.id, stage.id),
            Cell(describe_state(stage.outcome), stage.outcome),
            Cell(duration_text(stage.spent_s) if stage.spent_s else "", stage.spent_s),
            Cell(duration_text(stage.saved_s) if stage.saved_s else "", stage.saved_s),
            Cell(stage.reason, stage.reason),
        ]
        for stage in stages
    ]
    content = table("The stages in the order of the plan", _COLUMNS, rows)
    yield element("details", element("summary", f"All {len(stages)} stages as a table"), content)


def _list_lanes(stages: Sequence[StageEntry]) -> list[tuple[str, str]]:
    """Return recipe and target of each row of the drawing, all of a recipe together."""
    targets: dict[str, dict[str, None]] = {}
    for stage in stages:
        targets.setdefault(stage.recipe, {}).update({stage.target: None} if stage.target else {})
    return [(recipe, target) for recipe, named in targets.items() for target in named or ("",)]


def _draw(stages: Sequence[StageEntry], lanes: Sequence[tuple[str, str]]) -> Markup:
    depths = _measure_depths(stages)
    places = {stage.id: _place(stage, depths[stage.id], lanes) for stage in stages}
    width = (max(depths.values()) + 1) * (_WIDTH + _GAP_X) - _GAP_X + 4
    height = len(lanes) * (_HEIGHT + _GAP_Y) + 4
    reach = _reach(stages)
    edges = [
        _draw_edge(places[need], places[stage.id])
        for stage in stages
        for need in stage.needs
        # an edge that a longer way stands for only clutters
        if not any(need in reach[other] for other in stage.needs if other != need)
    ]
    svg = element(
        "svg",
        element("path", d="".join(edges), class_="edge"),
        (_draw_stage(stage, places[stage.id]) for stage in stages),
        viewBox=f"0 0 {width} {height}",
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


def _measure_depths(stages: Sequence[StageEntry]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for stage in stages:
        depths[stage.id] = 1 + max((depths.get(need, -1) for need in stage.needs), default=-1)
    return depths


def _reach(stages: Sequence[StageEntry]) -> dict[str, set[str]]:
    """Return all stages that each stage depends on."""
    reach: dict[str, set[str]] = {}
    for stage in stages:
        reach[stage.id] = {
            *stage.needs,
            *(far for need in stage.needs for far in reach.get(need, ())),
        }
    return reach


def _place(stage: StageEntry, depth: int, lanes: Sequence[tuple[str, str]]) -> _Place:
    """Return where a stage is drawn: one without a target in the middle of the lanes of its recipe."""
    own = [
        index
        for index, (recipe, target) in enumerate(lanes)
        if recipe == stage.recipe and (target == stage.target or not stage.target)
    ]
    lane = (own[0] + own[-1]) / 2 if own else 0.0
    return _Place(2 + depth * (_WIDTH + _GAP_X), 2 + lane * (_HEIGHT + _GAP_Y))


def _draw_edge(start: _Place, end: _Place) -> str:
    x, y = start.x + _WIDTH, start.y + _HEIGHT / 2
    bend = _GAP_X / 2
    # the curve bends right before its end, where nothing is drawn
    turn = end.x - _GAP_X
    return (
        f"M{x:.0f} {y:.0f}H{turn:.0f}C{turn + bend:.0f} {y:.0f} {turn + bend:.0f} "
        f"{end.y + _HEIGHT / 2:.0f} {end.x:.0f} {end.y + _HEIGHT / 2:.0f}"
    )


def _draw_stage(stage: StageEntry, place: _Place) -> Markup:
    sign, words = STATES.get(stage.outcome, ("?", stage.outcome))
    seconds = stage.spent_s or stage.saved_s
    time = duration_text(seconds) if seconds else ""
    took = f", {time} {'spent' if stage.spent_s else 'saved'}" if time else ""
    text = f"{stage.id}: {words}{took}"
    where = stage.target or stage.recipe
    return element(
        "g",
        element("title", text),
        element("rect", width=_WIDTH, height=_HEIGHT, rx=7),
        element("text", f"{sign} {stage.stage}", x=10, y=18, class_="label"),
        element("text", shorten(where, _MAX_NAME - len(time) - bool(time)), x=10, y=35),
        element("text", time, x=_WIDTH - 9, y=35, text_anchor="end"),
        class_=f"node {_STYLES.get(stage.outcome, 'bad')}",
        transform=f"translate({place.x:.0f} {place.y:.0f})",
        tabindex=0,
        role="img",
        aria_label=text,
    )
