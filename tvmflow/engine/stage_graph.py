"""Graphs of stages: a plan as Mermaid, Graphviz DOT or SVG, and the drawing in reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.generated_text import Markup, dot_string, element, mermaid_text
from tvmflow.core.types import Decision, Plan
from tvmflow.engine.plan_text import KINDS

_COLORS: Final = {
    "hit": ("#e6f4ea", "#34a853"),
    "run": ("#fef1d8", "#e8910c"),
    "wait": ("#f1f3f4", "#80868b"),
}
"""Fill and line color of a node, by the kind of its decision."""


class Node(NamedTuple):
    """A stage in a graph: a label, a detail below it, and a note at the right.

    `target` is empty for a stage shared by several targets; `style` is a class of the style sheet. The reason appears
    in tooltips, and is read by screen readers.
    """

    stage_id: str
    recipe: str
    target: str
    label: str
    detail: str
    note: str
    style: str
    reason: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The text of the node."""
        return tuple(filter(None, (self.label, self.detail, self.note)))


class PlanGraph(NamedTuple):
    """The stages of a plan in topological order, and an edge from each stage to the stages that need it.

    The edges are a transitive reduction: an edge that a longer path implies is left out.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]


def make_graph(plan: Plan, decisions: Mapping[str, Decision]) -> PlanGraph:
    """Return the graph of a plan."""
    nodes = tuple(
        Node(
            stage_id=spec.id,
            recipe=spec.recipe,
            target=spec.target,
            label=spec.stage,
            detail=spec.target,
            note=KINDS[decisions[spec.id].kind],
            style=decisions[spec.id].kind,
            reason=decisions[spec.id].reason,
        )
        for spec in plan.stages
    )
    needs = {spec.id: [need.stage_id for need in spec.needs] for spec in plan.stages}
    return PlanGraph(nodes, tuple(list_edges(needs)))


def list_edges(needs: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yield the edges from stages to their dependents, except those implied by a longer path."""
    ancestors: dict[str, set[str]] = {}
    for stage_id, needed in needs.items():
        befores = list(dict.fromkeys(needed))
        implied = {far for need in befores for far in ancestors.get(need, ())}
        ancestors[stage_id] = implied.union(befores)
        yield from ((need, stage_id) for need in befores if need not in implied)


def to_mermaid(graph: PlanGraph) -> str:
    """Return the graph as a Mermaid flowchart, which GitHub and GitLab render in Markdown."""
    names = {node.stage_id: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for index, (recipe, nodes) in enumerate(_by_recipe(graph.nodes).items()):
        lines.append(f'  subgraph r{index}["{mermaid_text(recipe)}"]')
        for node in nodes:
            text = "<br/>".join(map(mermaid_text, node.lines))
            lines.append(f'    {names[node.stage_id]}["{text}"]:::{node.style}')
        lines.append("  end")
    lines += [f"  {names[before]} --> {names[after]}" for before, after in graph.edges]
    lines += [
        f"  classDef {kind} fill:{fill},stroke:{line},color:#202124"
        for kind, (fill, line) in _COLORS.items()
    ]
    return "\n".join(lines) + "\n"


def to_dot(graph: PlanGraph) -> str:
    """Return the graph in Graphviz's DOT language."""
    lines = [
        "digraph plan {",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fontname="sans-serif"];',
    ]
    for index, (recipe, nodes) in enumerate(_by_recipe(graph.nodes).items()):
        lines += [f"  subgraph cluster_{index} {{", f"    label={dot_string(recipe)};"]
        for node in nodes:
            fill, line = _COLORS[node.style]
            lines.append(
                f"    {dot_string(node.stage_id)} [label={dot_string(*node.lines)}, "
                f'fillcolor="{fill}", color="{line}", tooltip={dot_string(node.reason)}];'
            )
        lines.append("  }")
    lines += [f"  {dot_string(before)} -> {dot_string(after)};" for before, after in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _by_recipe(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.recipe, []).append(node)
    return groups


# ---------------------------------------------------------------- drawing
# SVG without Graphviz: a column for each step, rows for each target.

NODE_HEIGHT: Final = 44
NODE_GAP: Final = 24
_ROW: Final = 56
_MARGIN: Final = 2
_PADDING: Final = 10
_HEADING: Final = 30

# For image files: the border, and a character's width per font size in the widest common fonts.
_BORDER: Final = 14
_LABEL_CHAR: Final = 7.8
_DETAIL_CHAR: Final = 6.6
_STYLE: Final = (
    """
  svg { background: #fff; font: 13px system-ui, sans-serif; }
  .node text { fill: #5f6368; font-size: 11px; }
  .node .label { fill: #202124; font-size: 13px; font-weight: 600; }
  .heading { fill: #202124; font-size: 15px; font-weight: 600; }
  .edge { fill: none; stroke: #80868b; stroke-width: 1.4; }
"""
    + "".join(
        f"  .{kind} rect {{ fill: {fill}; stroke: {line}; stroke-width: 1.5; }}\n"
        for kind, (fill, line) in _COLORS.items()
    )
    + """\
  .wait rect { stroke-dasharray: 5 3; }
  @media (prefers-color-scheme: dark) {
    svg { background: #202124; } .node text { fill: #bdc1c6; }
    .node .label, .heading { fill: #e8eaed; }
    .hit rect { fill: #16341f; } .run rect { fill: #3d2e10; } .wait rect { fill: #303134; }
  }
"""
)


class Drawing(NamedTuple):
    """The SVG elements of a graph, and its size in pixels."""

    content: tuple[Markup, ...]
    width: int
    height: int


def to_svg(graph: PlanGraph) -> str:
    """Return the graph as an SVG image, for light and dark pages."""
    labels = (len(node.label) * _LABEL_CHAR for node in graph.nodes)
    details = (len(f"{node.detail}  {node.note}") * _DETAIL_CHAR for node in graph.nodes)
    width = round(max((*labels, *details), default=0)) + 2 * _PADDING
    drawing = draw_stages(graph.nodes, graph.edges, width, heading=_HEADING)
    across, down = drawing.width + 2 * _BORDER, drawing.height + 2 * _BORDER
    image = element(
        "svg",
        element("title", "stages and their states"),
        element("style", Markup(_STYLE)),
        drawing.content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-_BORDER} {-_BORDER} {across} {down}",
        width=across,
        height=down,
        role="group",
    )
    return f"{image}\n"


def draw_stages(
    nodes: Sequence[Node], edges: Sequence[tuple[str, str]], width: int, heading: int = 0
) -> Drawing:
    """Return the drawing of a graph in topological order; `heading` is the height of recipes' names."""
    columns = _find_columns(nodes, edges)
    rows, headings, bottom = _find_rows(nodes, columns, heading)
    places = {
        stage_id: (_MARGIN + column * (width + NODE_GAP), rows[stage_id])
        for stage_id, column in columns.items()
    }
    path = "".join(_draw_edge(places[before], places[after], width) for before, after in edges)
    content = (
        *(
            element("text", recipe, x=_MARGIN, y=round(y), class_="heading")
            for recipe, y in headings.items()
        ),
        element("path", d=path, class_="edge"),
        *(_draw_node(node, places[node.stage_id], width) for node in nodes),
    )
    last = max(columns.values(), default=0)
    return Drawing(content, (last + 1) * (width + NODE_GAP) - NODE_GAP + 2 * _MARGIN, bottom)


def _find_columns(nodes: Sequence[Node], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return each node's column: the number of edges on the longest path to it."""
    befores: dict[str, list[str]] = {}
    for before, after in edges:
        befores.setdefault(after, []).append(before)
    columns: dict[str, int] = {}
    for node in nodes:
        before_columns = [columns[before] for before in befores.get(node.stage_id, ())]
        columns[node.stage_id] = 1 + max(before_columns, default=-1)
    return columns


def _find_rows(
    nodes: Sequence[Node], columns: Mapping[str, int], heading: int
) -> tuple[dict[str, float], dict[str, float], int]:
    """Return each node's top, the baseline of each recipe's heading, and the total height."""
    rows: dict[str, float] = {}
    headings: dict[str, float] = {}
    top = _MARGIN
    for recipe, own in _by_recipe(nodes).items():
        if heading:
            headings[recipe] = top + heading * 0.6
            top += heading
        first = top
        for target in dict.fromkeys(node.target for node in own if node.target):
            lane = [node.stage_id for node in own if node.target == target]
            taken: Counter[int] = Counter()
            for stage_id in lane:
                rows[stage_id] = top + _ROW * taken[columns[stage_id]]
                taken[columns[stage_id]] += 1
            top += _ROW * max(taken.values())
        shared = [node.stage_id for node in own if not node.target]
        counts = Counter(columns[stage_id] for stage_id in shared)
        top = max(top, first + _ROW * max(counts.values(), default=1))
        left = dict(counts)
        for stage_id in shared:
            column = columns[stage_id]
            above = (top - first - _ROW * counts[column]) / 2
            rows[stage_id] = first + above + _ROW * (counts[column] - left[column])
            left[column] -= 1
    return rows, headings, top + _MARGIN


def _draw_edge(start: tuple[float, float], end: tuple[float, float], width: int) -> str:
    x, y, right, last = (
        start[0] + width,
        start[1] + NODE_HEIGHT / 2,
        end[0],
        end[1] + NODE_HEIGHT / 2,
    )
    # The curve bends just before its end, where no node is drawn.
    turn, bend = right - NODE_GAP, right - NODE_GAP / 2
    return f"M{x:.0f} {y:.0f}H{turn:.0f}C{bend:.0f} {y:.0f} {bend:.0f} {last:.0f} {right:.0f} {last:.0f}"


def _draw_node(node: Node, place: tuple[float, float], width: int) -> Markup:
    text = f"{node.stage_id}: {node.reason}"
    return element(
        "g",
        element("title", text),
        element("rect", width=width, height=NODE_HEIGHT, rx=7),
        element("text", node.label, x=_PADDING, y=18, class_="label"),
        element("text", node.detail, x=_PADDING, y=35),
        element("text", node.note, x=width - _PADDING + 1, y=35, text_anchor="end"),
        class_=f"node {node.style}",
        transform="translate({:.0f} {:.0f})".format(*place),
        tabindex=0,
        role="img",
        aria_label=text,
    )
