"""The Pareto chart: only where there is something to choose, with the line of what no library is better than."""

from __future__ import annotations

import pytest

from tvmflow.engine.builds import Build
from tvmflow.pages.content import Library
from tvmflow.pages.plot import draw_pareto, find_pareto_optimal


def library(target: str, latency_s: float | None, size: int | None, **fields: object) -> Library:
    build = Build("net", target, latency_s=latency_s, size_bytes=size)
    return Library(build._replace(**fields), "net")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1, 1)], [0]),
        ([(1, 3), (2, 2), (3, 1), (3, 3)], [0, 1, 2]),
        ([(2, 1), (1, 1)], [1]),
        ([(1, 2), (1, 1), (2, 2)], [1]),
    ],
)
def test_the_front(points: list[tuple[float, float]], front: list[int]) -> None:
    assert find_pareto_optimal(points) == front


def test_a_chart_needs_two_libraries_that_differ() -> None:
    one, same = library("a", 1e-3, 100), library("b", 1e-3, 100)
    assert list(draw_pareto([])) == []
    assert list(draw_pareto([one])) == []
    assert list(draw_pareto([one, same])) == []
    assert list(draw_pareto([one, library("b", None, 50)])) == []
    assert len(list(draw_pareto([one, library("b", 2e-3, 50)]))) == 1


def test_the_chart_names_every_library_and_its_costs() -> None:
    """Those on the line are filled, and the table says which cost that is for."""
    fast, small = library("fast", 1e-3, 2_000_000), library("small", 2e-3, 1_000_000)
    poor = library("poor", 3e-3, 3_000_000)
    (figure,) = draw_pareto([fast, small, poor])
    assert 'aria-label="net/fast: 1 ms, size of the library 2.0 MB"' in figure
    assert figure.count('class="mark s2 hollow"') == 1 == figure.count("hollow")
    assert figure.count("<td") and figure.count(">size of the library</td>") == 2
    # errors are known of none
    assert "largest error" not in figure


def test_only_what_can_be_chosen_is_in_the_chart_and_its_table() -> None:
    """Neither what computes wrong numbers nor what was not timed."""
    wrong, untimed = library("wrong", 1e-4, 10, verdict="rejected"), library("untimed", None, 10)
    (figure,) = draw_pareto([library("a", 1e-3, 100), wrong, untimed, library("b", 2e-3, 50)])
    assert "net/a" in figure and "net/b" in figure
    assert "wrong" not in figure and "untimed" not in figure


def test_recipes_have_a_chart_each() -> None:
    others = [entry._replace(recipe="other") for entry in (library("a", 1, 2), library("b", 2, 1))]
    assert len(list(draw_pareto([library("a", 1, 2), library("b", 2, 1), *others]))) == 2
