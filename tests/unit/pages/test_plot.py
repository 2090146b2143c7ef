"""Plots: round ticks, marks at their values, and labels that cover nothing."""

from __future__ import annotations

import re

import pytest

from tvmflow.pages.plot import (
    HEIGHT,
    WIDTH,
    Axis,
    Mark,
    Scale,
    draw_line,
    draw_marks,
    make_frame,
    place_labels,
    plot,
)


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10, 0, 100), [0, 2, 4, 6, 8, 10]),
        (Scale(0.9, 1.1, 0, 100), [0.9, 0.95, 1.0, 1.05, 1.1]),
        (Scale(1, 1000, 0, 100, is_log=True), [1, 3, 10, 30, 100, 300, 1000]),
        (Scale(4, 60, 0, 100, is_log=True), [5, 10, 20, 50]),
        (Scale(1.1, 1.4, 0, 100, is_log=True), [1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4]),
        (
            Scale(1e-12, 1e12, 0, 100, is_log=True),
            [1e-12, 1e-8, 1e-4, 1.0, 1e4, 1e8, 1e12],
        ),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("values", [(2.0,), (2.0, 2.0), (1e-9, 3e-9), (0.5, 4000.0)])
def test_an_axis_reaches_all_values(values: tuple[float, ...], is_log: bool) -> None:
    """Also where they are all the same."""
    scale = Axis("x", values, str, is_log=is_log).scale(10, 110)
    assert scale.low < min(values) <= max(values) < scale.high
    assert all(10 < scale.at(value) < 110 for value in values)
    assert scale.ticks()


def test_marks_are_where_their_values_are() -> None:
    x, y = Axis("x", (1.0, 2.0), str), Axis("y", (10.0, 20.0), str)
    frame = make_frame(x, y)
    svg = plot("A plot", x, y, draw_marks([Mark(1.0, 20.0, "<one>", "1")], frame))
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in svg
    assert svg.count('aria-label="&lt;one&gt;"') == 1 and 'tabindex="0"' in svg
    assert f"M{frame.x.at(1.0) - 6:.1f} {frame.y.at(20.0):.1f}a" in svg


def test_a_line_goes_in_steps() -> None:
    """What was best stays best until the next value."""
    x, y = Axis("x", (0.0, 2.0), str), Axis("y", (1.0, 3.0), str)
    frame = make_frame(x, y)
    path = re.findall(r' d="([^"]*)"', draw_line([(0, 3), (1, 1), (2, 1)], frame, 0))[0]
    x1, x2, y1 = frame.x.at(1), frame.x.at(2), frame.y.at(1)
    assert path == f"M{frame.x.at(0):.1f} {frame.y.at(3):.1f}H{x1:.1f}V{y1:.1f}H{x2:.1f}"


def test_series_beyond_the_colours_have_dashes() -> None:
    frame = make_frame(Axis("x", (0.0, 1.0), str), Axis("y", (0.0, 1.0), str))
    first, later = (draw_line([(0, 0), (1, 1)], frame, series) for series in (0, 8))
    assert 'class="line s0"' in first and 'class="line s0"' in later
    assert "stroke-dasharray" not in first and "stroke-dasharray" in later


def test_labels_cover_neither_points_nor_each_other() -> None:
    """Those for which there is no room are left out; tooltip and table have them."""
    points = [(200.0, 150.0), (215.0, 152.0), (205.0, 160.0), (400.0, 60.0)]
    labels = place_labels(points, ["a long first label", "second", "third", "alone"])
    boxes = []
    for label in labels:
        x, y, text = re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*>(.*)</text>', label)[0]
        boxes.append((float(x), float(y) - 11, float(x) + 7.3 * len(text), float(y) + 3))
    for index, box in enumerate(boxes):
        others = [(x - 7, y - 7, x + 7, y + 7) for x, y in points] + boxes[:index]
        for other in others:
            assert (
                box[0] >= other[2] or other[0] >= box[2] or box[1] >= other[3] or other[1] >= box[3]
            )
    assert any("alone" in label for label in labels)


def test_many_points_at_one_place_have_at_most_a_label_each() -> None:
    labels = place_labels([(300.0, 150.0)] * 30, ["a name"] * 30)
    assert 1 <= len(labels) < 30
