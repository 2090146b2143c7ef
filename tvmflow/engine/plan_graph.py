"""The graph of a plan: its stages with their states, as Mermaid, as Graphviz's DOT, and for drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tvmflow.core.generated_text import dot_string, html_text, mermaid_text
from tvmflow.core.types import Decision, Plan
from tvmflow.engine.plan_text import KINDS

_COLORS: Final = {
    "hit": ("#e6f4ea", "#34a853"),
    "run": ("#fef1d8", "#e8910c"),
    "wait": ("#f1f3f4", "#80868b"),
}
"""The fill and the line of a node, by the kind of its decision."""


class GraphNode(NamedTuple):
    """A stage in the graph: its names, the kind of its decision, and the reason."""

    stage_id: str
    recipe: str
    stage: str
    target: str
    kind: str
    reason: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The text of the node: stage, target, and state."""
        return tuple(filter(None, (self.stage, self.target, KINDS[self.kind])))


class PlanGraph(NamedTuple):
    """The stages of a plan in topological order, and the edges from a stage to one that needs it.

    An edge that other edges imply is left out: `import` before `tune` before `build` says
    already that `import` is before `build`.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[str, str], ...]


def make_graph(plan: Plan, decisions: Mapping[str, Decision]) -> PlanGraph:
    """Return the graph of a plan."""
    nodes = tuple(
        GraphNode(
            spec.id,
            spec.recipe,
            spec.stage,
            spec.target,
            decisions[spec.id].kind,
            decisions[spec.id].reason,
        )
        for spec in plan.stages
    )
    return PlanGraph(nodes, tuple(_list_edges(plan)))


def _list_edges(plan: Plan) -> Iterator[tuple[str, str]]:
    ancestors: dict[str, set[str]] = {}
    for spec in plan.stages:
        needs = list(dict.fromkeys(need.stage_id for need in spec.needs))
        implied = {other for need in needs for other in ancestors[need]}
        ancestors[spec.id] = implied | set(needs)
        yield from ((need, spec.id) for need in needs if need not in implied)


def to_mermaid(graph: PlanGraph) -> str:
    """Return the graph as a flowchart of Mermaid, which GitHub and GitLab draw in Markdown."""
    names = {node.stage_id: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for index, (recipe, nodes) in enumerate(_by_recipe(graph).items()):
        lines.append(f'  subgraph r{index}["{mermaid_text(recipe)}"]')
        for node in nodes:
            text = "<br/>".join(map(mermaid_text, node.lines))
            lines.append(f'    {names[node.stage_id]}["{text}"]:::{node.kind}')
        lines.append("  end")
    lines += [f"  {names[before]} --> {names[after]}" for before, after in graph.edges]
    lines += [
        f"  classDef {kind} fill:{fill},stroke:{line},color:#202124"
        for kind, (fill, line) in _COLORS.items()
    ]
    return "\n".join(lines) + "\n"


def to_dot(graph: PlanGraph) -> str:
    """Return the graph in the language of Graphviz."""
    lines = [
        "digraph plan {",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fontname="sans-serif"];',
    ]
    for index, (recipe, nodes) in enumerate(_by_recipe(graph).items()):
        lines += [f"  subgraph cluster_{index} {{", f"    label={dot_string(recipe)};"]
        for node in nodes:
            fill, line = _COLORS[node.kind]
            lines.append(
                f"    {dot_string(node.stage_id)} [label={dot_string(*node.lines)}, "
                f'fillcolor="{fill}", color="{line}", tooltip={dot_string(node.reason)}];'
            )
        lines.append("  }")
    lines += [f"  {dot_string(before)} -> {dot_string(after)};" for before, after in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _by_recipe(graph: PlanGraph) -> dict[str, list[GraphNode]]:
    groups: dict[str, list[GraphNode]] = {}
    for node in graph.nodes:
        groups.setdefault(node.recipe, []).append(node)
    return groups


# ---------------------------------------------------------------- plan graph svg
# The drawing of a plan's graph as SVG, without Graphviz: a column for each step, a row for each
# target.


# Sizes in pixels; the width of a character is that of the widest common fonts.
_CHAR: Final = 7.6
_PADDING: Final = 14.0
_HEIGHT: Final = 56.0
_LINE: Final = 15.0
_COLUMN_GAP: Final = 44.0
_ROW: Final = 76.0
_MARGIN: Final = 20.0
_HEAD: Final = 30.0

_STYLE: Final = """\
  svg { background: #fff; font: 13px system-ui, sans-serif; }
  text { fill: #202124; text-anchor: middle; }
  .name { font-weight: 600; } .small { font-size: 11px; fill: #5f6368; }
  .recipe { text-anchor: start; font-weight: 600; font-size: 15px; }
  .edge { fill: none; stroke: #80868b; stroke-width: 1.4; }
  .tip { fill: #80868b; }
  rect { rx: 8px; stroke-width: 1.5; }
  .hit rect { fill: #e6f4ea; stroke: #34a853; }
  .run rect { fill: #fef1d8; stroke: #e8910c; }
  .wait rect { fill: #f1f3f4; stroke: #80868b; stroke-dasharray: 5 3; }
  @media (prefers-color-scheme: dark) {
    svg { background: #202124; } text { fill: #e8eaed; } .small { fill: #bdc1c6; }
    .hit rect { fill: #16341f; } .run rect { fill: #3d2e10; } .wait rect { fill: #303134; }
  }
"""


class _Box(NamedTuple):
    """The place of a node: its center, and its width."""

    x: float
    y: float
    width: float


def to_svg(graph: PlanGraph) -> str:
    """Return the graph as an SVG image, for light and dark pages."""
    boxes, heads, height = _place(graph)
    width = max((box.x + box.width / 2 for box in boxes.values()), default=0.0) + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img">',
        "<title>stages and their states</title>",
        f"<style>\n{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
        *(
            f'<text class="recipe" x="{_MARGIN:.0f}" y="{y:.0f}">{html_text(recipe)}</text>'
            for recipe, y in heads.items()
        ),
        *(_draw_edge(boxes[before], boxes[after]) for before, after in graph.edges),
        *(line for node in graph.nodes for line in _draw_node(node, boxes[node.stage_id])),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _place(graph: PlanGraph) -> tuple[dict[str, _Box], dict[str, float], float]:
    """Return the place of each node, the height of each recipe's heading, and that of the image."""
    columns = _find_columns(graph)
    widths: dict[int, float] = {}
    for node in graph.nodes:
        needed = max(map(len, node.lines)) * _CHAR + 2 * _PADDING
        column = columns[node.stage_id]
        widths[column] = max(widths.get(column, 0.0), needed)
    lefts, left = {}, _MARGIN
    for column in sorted(widths):
        lefts[column] = left
        left += widths[column] + _COLUMN_GAP
    rows, heads, bottom = _find_rows(graph, columns)
    boxes = {
        node.stage_id: _Box(
            lefts[columns[node.stage_id]] + widths[columns[node.stage_id]] / 2,
            rows[node.stage_id],
            widths[columns[node.stage_id]],
        )
        for node in graph.nodes
    }
    return boxes, heads, bottom + _MARGIN


def _find_columns(graph: PlanGraph) -> dict[str, int]:
    """Return the longest way to each node, in edges."""
    columns = {node.stage_id: 0 for node in graph.nodes}
    befores: dict[str, list[str]] = {}
    for before, after in graph.edges:
        befores.setdefault(after, []).append(before)
    for node in graph.nodes:
        columns[node.stage_id] = max(
            (columns[before] + 1 for before in befores.get(node.stage_id, ())), default=0
        )
    return columns


def _find_rows(
    graph: PlanGraph, columns: Mapping[str, int]
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the height of each node, that of each recipe's heading, and the end of the last row.

    Each target has rows of its own; what its recipe's targets share is in their middle.
    """
    recipes = list(dict.fromkeys(node.recipe for node in graph.nodes))
    rows: dict[str, float] = {}
    heads: dict[str, float] = {}
    top = _MARGIN
    for recipe in recipes:
        own = [node for node in graph.nodes if node.recipe == recipe]
        heads[recipe] = top + _HEAD / 2
        top += _HEAD
        first = top
        for target in dict.fromkeys(node.target for node in own if node.target):
            taken: dict[int, int] = {}
            for node in own:
                if node.target == target:
                    column = columns[node.stage_id]
                    rows[node.stage_id] = top + _HEIGHT / 2 + _ROW * taken.get(column, 0)
                    taken[column] = taken.get(column, 0) + 1
            top += _ROW * max(taken.values())
        top = max(top, first + _ROW)
        for node in own:
            if not node.target:
                rows[node.stage_id] = (first + top - (_ROW - _HEIGHT)) / 2
    return rows, heads, top - (_ROW - _HEIGHT)


def _draw_edge(before: _Box, after: _Box) -> str:
    x1, x2 = before.x + before.width / 2, after.x - after.width / 2
    bend = max((x2 - x1) / 2, _COLUMN_GAP / 2)
    return (
        f'<path class="edge" marker-end="url(#tip)" d="M{x1:.1f} {before.y:.1f}'
        f'C{x1 + bend:.1f} {before.y:.1f} {x2 - bend:.1f} {after.y:.1f} {x2:.1f} {after.y:.1f}"/>'
    )


def _draw_node(node: GraphNode, box: _Box) -> Iterator[str]:
    yield f'<g class="{node.kind}"><title>{html_text(f"{node.stage_id}: {node.reason}")}</title>'
    yield (
        f'<rect x="{box.x - box.width / 2:.1f}" y="{box.y - _HEIGHT / 2:.1f}" '
        f'width="{box.width:.1f}" height="{_HEIGHT:.0f}"/>'
    )
    first = box.y - _LINE * (len(node.lines) - 1) / 2 + 4.5
    for index, text in enumerate(node.lines):
        kind = "name" if index == 0 else "small"
        y = first + index * _LINE
        yield f'<text class="{kind}" x="{box.x:.1f}" y="{y:.1f}">{html_text(text)}</text>'
    yield "</g>"
