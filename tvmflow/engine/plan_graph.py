"""The graph of a plan: its stages with their states, as Mermaid, as Graphviz's DOT, and for drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tvmflow.core.generated_text import dot_string, mermaid_text
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
