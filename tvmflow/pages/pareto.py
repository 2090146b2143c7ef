"""The Pareto chart: latency against size and error of a recipe's libraries, where there are several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from tvmflow.core.formatting import latency_text, size_text
from tvmflow.core.markup import Markup, element, join
from tvmflow.engine.builds import Build
from tvmflow.pages.content import Library
from tvmflow.pages.plot import Axis, Mark, draw_line, draw_marks, make_frame, plot, swatch
from tvmflow.pages.tables import Cell, Column, accuracy, error, latency, size, table

_FRONT_SERIES: Final = 7
_LOG_RATIO: Final = 4.0
_COLUMNS: Final = (
    Column("library"),
    Column("latency", is_number=True),
    Column("size", is_number=True),
    Column("largest error", is_number=True),
    Column("accuracy", is_number=True),
    Column("on a line"),
)


class _Cost(NamedTuple):
    """A cost besides latency: its name, how it is read and how it is written."""

    name: str
    read: Callable[[Build], float | None]
    format: Callable[[float], str]


_COSTS: Final = (
    _Cost("size of the library", lambda build: build.size_bytes, size_text),
    _Cost("largest error", lambda build: build.error, "{:.1e}".format),
)


def draw_pareto(libraries: Sequence[Library]) -> Iterator[Markup]:
    """Yield a figure for each recipe with at least two libraries that differ in latency and another cost."""
    ordered = sorted(libraries, key=lambda library: library.recipe)
    for recipe, group in groupby(ordered, key=lambda library: library.recipe):
        members = [library for library in group if _can_be_chosen(library)]
        series = _number(library.build.target for library in members)
        shapes = _number(library.build.variant for library in members)
        plots = [
            _draw(f"{recipe}: latency against {cost.name}", cost, points, series, shapes)
            for cost in _COSTS
            if len(points := _points(members, cost)) > 1 and _differ(points)
        ]
        if plots:
            yield element(
                "figure",
                element("figcaption", element("h3", recipe), element("p", _EXPLANATION)),
                element("div", plots, class_="plots"),
                _table(recipe, members, series, shapes),
            )


_EXPLANATION: Final = (
    "Colours are targets, shapes are variants. Lower and further left is better: no library is "
    "better in both than one on the line."
)

_Point = tuple[float, float, Library]


def _can_be_chosen(library: Library) -> bool:
    """Return whether a library was timed, and computes what it should."""
    return bool(library.build.latency_s) and library.build.verdict != "rejected"


def _points(libraries: Iterable[Library], cost: _Cost) -> list[_Point]:
    return [
        (library.build.latency_s, value, library)
        for library in libraries
        if library.build.latency_s and (value := cost.read(library.build)) is not None
    ]


def _differ(points: Sequence[_Point]) -> bool:
    """Return whether there is anything to choose."""
    return len({x for x, *_ in points}) > 1 and len({y for _, y, _ in points}) > 1


def _number(names: Iterable[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def find_pareto_optimal(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other one beats in both values, by the first value."""
    front: list[int] = []
    lowest = math.inf
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if points[index][1] < lowest:
            lowest = points[index][1]
            front.append(index)
    return front


def _draw(
    title: str,
    cost: _Cost,
    points: Sequence[_Point],
    series: Mapping[str, int],
    shapes: Mapping[str, int],
) -> Markup:
    x = _axis("latency", [point[0] for point in points], latency_text)
    y = _axis(cost.name, [point[1] for point in points], cost.format)
    front = find_pareto_optimal([point[:2] for point in points])
    frame = make_frame(x, y)
    marks = [
        Mark(
            *(latency_s, value),
            text=f"{library.label}: {latency_text(latency_s)}, {cost.name} {cost.format(value)}",
            label=f"{library.build.variant} {library.build.target}".strip(),
            series=series[library.build.target],
            shape=shapes[library.build.variant],
            is_hollow=index not in front,
        )
        for index, (latency_s, value, library) in enumerate(points)
    ]
    line = draw_line([points[index][:2] for index in front], frame, _FRONT_SERIES)
    return plot(title, x, y, element("g", line, class_="front"), draw_marks(marks, frame))


def _axis(label: str, values: Sequence[float], show: Callable[[float], str]) -> Axis:
    is_log = min(values) > 0 and max(values) / min(values) > _LOG_RATIO
    return Axis(label, tuple(values), show, is_log=is_log)


def _table(
    recipe: str,
    libraries: Sequence[Library],
    series: Mapping[str, int],
    shapes: Mapping[str, int],
) -> Markup:
    fronts: dict[str, list[str]] = {}
    for cost in _COSTS:
        points = _points(libraries, cost)
        for index in (
            find_pareto_optimal([point[:2] for point in points]) if _differ(points) else ()
        ):
            fronts.setdefault(points[index][2].label, []).append(cost.name)
    rows = []
    for library in libraries:
        build = library.build
        sample = swatch(series[build.target], shapes[build.variant])
        on_line = ", ".join(fronts.get(library.label, ()))
        rows.append(
            [
                Cell(join(sample, library.label), library.label),
                Cell(latency(build.latency_s), build.latency_s),
                Cell(size(build.size_bytes), build.size_bytes),
                Cell(error(build.error), build.error),
                Cell(accuracy(build.accuracy), build.accuracy),
                Cell(on_line, on_line),
            ]
        )
    return table(f"{recipe}: the libraries in the charts", _COLUMNS, rows)
