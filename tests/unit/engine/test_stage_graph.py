"""The graph of a plan: Mermaid, DOT and SVG."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

from tests.support.engine import COMPILE, joined_target, plan_of, planned, recipe, target
from tvmflow.core.types import Decision, Plan
from tvmflow.engine.stage_graph import PlanGraph, make_graph, to_dot, to_mermaid, to_svg

_SVG = "{http://www.w3.org/2000/svg}"


def graph_of(plan: Plan, **kinds: str) -> PlanGraph:
    """Return the graph of a plan whose stages are up to date, but for those of `kinds`."""
    decisions = {
        spec.id: Decision(spec.id, kinds.get(spec.stage, "hit"), 'a "reason" <&>')  # type: ignore[arg-type]
        for spec in plan.stages
    }
    return make_graph(plan, decisions)


CHAIN = plan_of(planned(recipe(), target("host"), target("edge"), stages=COMPILE))


def test_edges_that_others_imply_are_left_out() -> None:
    """`verify` needs the model, too, which `build` and `export` had before it."""
    edges = {
        (before.partition(":")[2], after.partition(":")[2])
        for before, after in graph_of(CHAIN).edges
    }
    assert edges == {
        (before, f"{after}/{name}")
        for name in ("host", "edge")
        for before, after in (
            ("import", "lower"),
            (f"lower/{name}", "build"),
            (f"build/{name}", "export"),
            (f"export/{name}", "verify"),
        )
    }


def test_mermaid_has_a_group_for_each_recipe_and_a_class_for_each_state() -> None:
    """As GitHub draws it in Markdown."""
    lines = to_mermaid(graph_of(CHAIN, build="run", export="wait")).splitlines()
    assert lines[:3] == [
        "flowchart LR",
        '  subgraph r0["net"]',
        '    n0["import<br/>up to date"]:::hit',
    ]
    assert '    n3["build<br/>host<br/>run"]:::run' in lines
    assert "  n0 --> n1" in lines
    assert sum(line.startswith("  classDef ") for line in lines) == 3


def test_dot_escapes_what_graphviz_would_read() -> None:
    """Quotes and lines."""
    text = to_dot(graph_of(CHAIN))
    assert '"net:build/host" [label="build\\nhost\\nup to date"' in text
    assert 'tooltip="a \\"reason\\" <&amp;>"' in text
    assert text.count(" -> ") == 8 and text.count("{") == text.count("}") == 2


def boxes(text: str) -> list[tuple[float, float, float, float]]:
    """Return the limits of all boxes in an image: left, top, right, bottom."""
    root = ElementTree.fromstring(text)
    placed = []
    for node in root.iter(f"{_SVG}g"):
        x, y = map(float, re.findall(r"[\d.]+", node.attrib["transform"]))
        (box,) = node.iter(f"{_SVG}rect")
        placed.append((x, y, x + float(box.attrib["width"]), y + float(box.attrib["height"])))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for x, y, right, bottom in placed:
        assert left <= x and top <= y and right <= left + width and bottom <= top + height
    return placed


def test_no_two_boxes_of_an_image_overlap() -> None:
    """Also with targets of several parts, and with several recipes."""
    split = planned(recipe("split"), joined_target())
    for plan in (CHAIN, plan_of(planned(recipe(), target("host"), target("edge")), split)):
        placed = boxes(to_svg(graph_of(plan)))
        assert len(placed) == len(plan.stages)
        for one, other in itertools.combinations(placed, 2):
            is_left_or_right = one[2] <= other[0] or other[2] <= one[0]
            assert is_left_or_right or one[3] <= other[1] or other[3] <= one[1]


def test_an_image_has_text_and_reasons() -> None:
    """State is said in words, not by colour alone; the reason is the tooltip."""
    text = to_svg(graph_of(CHAIN, build="run"))
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{_SVG}text")]
    assert words[0] == "net" and {"import", "build", "host", "edge", "run", "up to date"} <= set(
        words
    )
    titles = [element.text for element in root.iter(f"{_SVG}title")]
    assert 'net:build/host: a "reason" <&>' in titles
    (path,) = root.iter(f"{_SVG}path")
    edges = path.attrib["d"].split("M")[1:]
    assert path.attrib["class"] == "edge" and len(edges) == 8
    # every edge goes from left to right
    for edge in edges:
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", edge)]
        assert numbers[0] < numbers[-2]
