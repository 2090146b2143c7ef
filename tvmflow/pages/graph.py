"""The stages of a run: their graph with states, and the time that each kind spent and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tvmflow.core.formatting import count_text, duration_text
from tvmflow.core.markup import Markup, element
from tvmflow.engine.stage_graph import Node, draw_stages, list_edges
from tvmflow.pages.content import StageEntry
from tvmflow.pages.plot import shorten
from tvmflow.pages.tables import Cell, Column, table

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


def draw_graph(stages: Sequence[StageEntry]) -> Iterator[Markup]:
    """Yield the drawing of the graph, unless it is too large for one, and the table of the stages."""
    if _count_lanes(stages) <= _MAX_LANES:
        yield _draw(stages)
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


def _count_lanes(stages: Sequence[StageEntry]) -> int:
    """Return how many targets there are; a recipe whose stages have none counts as one."""
    targets: dict[str, set[str]] = {}
    for stage in stages:
        targets.setdefault(stage.recipe, set()).update({stage.target} - {""})
    return sum(len(named) or 1 for named in targets.values())


def _draw(stages: Sequence[StageEntry]) -> Markup:
    edges = list(list_edges({stage.id: stage.needs for stage in stages}))
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
    sign, words = STATES.get(stage.outcome, ("?", stage.outcome))
    seconds = stage.spent_s or stage.saved_s
    time = duration_text(seconds) if seconds else ""
    took = f", {time} {'spent' if stage.spent_s else 'saved'}" if time else ""
    where = shorten(stage.target or stage.recipe, _MAX_NAME - len(time) - bool(time))
    return Node(
        stage_id=stage.id,
        recipe=stage.recipe,
        target=stage.target,
        label=f"{sign} {stage.stage}",
        detail=where,
        note=time,
        style=_STYLES.get(stage.outcome, "bad"),
        text=f"{stage.id}: {words}{took}",
    )
