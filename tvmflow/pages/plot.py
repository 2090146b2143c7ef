"""Sortable tables, and SVG plots without overlapping labels, accessible by keyboard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple, TypeVar

from tvmflow.core.formatting import latency_text, shorten, size_text
from tvmflow.core.generated_text import Child, Markup, element, join
from tvmflow.engine.builds import Build
from tvmflow.pages.content import Library

UNKNOWN: Final = "–"
_Value = TypeVar("_Value", int, float)


class Cell(NamedTuple):
    """A table cell: content, sort value, and small text below the content."""

    content: Child
    value: float | str | None = None
    note: Child = None

    @property
    def is_empty(self) -> bool:
        """True if the content is empty or unknown."""
        return self.content in (UNKNOWN, "")


Row = Mapping[str, Cell]
"""Column heading -> cell."""

_EMPTY: Final = Cell("")


def table(caption: str, rows: Iterable[Row], *, omits_empty: bool = True) -> Markup:
    """Return a table that scrolls sideways if it is too wide; empty without rows.

    The caption is for screen readers, and the first column is the row heading. The first row must have all headings.
    `omits_empty` leaves out columns without values.
    """
    body = list(rows)
    if not body:
        return Markup("")
    columns = {heading: [row.get(heading, _EMPTY) for row in body] for heading in body[0]}
    shown = {
        heading: _style(cells)
        for index, (heading, cells) in enumerate(columns.items())
        if not omits_empty or index == 0 or not all(cell.is_empty for cell in cells)
    }
    head = (element("th", heading, scope="col", class_=style) for heading, style in shown.items())
    content = element(
        "table",
        element("caption", caption, class_="hidden"),
        element("thead", element("tr", head)),
        element("tbody", (_draw_row(row, shown) for row in body)),
    )
    return element("div", content, class_="scroll", tabindex=0, role="group", aria_label=caption)


def _draw_row(row: Row, shown: Mapping[str, str | None]) -> Markup:
    cells = ((row.get(heading, _EMPTY), style) for heading, style in shown.items())
    return element(
        "tr",
        (
            element(
                "td" if index else "th",
                cell.content,
                element("small", cell.note) if cell.note else None,
                class_=style,
                scope=None if index else "row",
                data_value=cell.value,
            )
            for index, (cell, style) in enumerate(cells)
        ),
    )


def _style(cells: Sequence[Cell]) -> str | None:
    """Return the style `number` for a column whose sort values are numbers, or None."""
    values = [cell.value for cell in cells if cell.value is not None]
    return "number" if values and not any(isinstance(value, str) for value in values) else None


def pairs(rows: Iterable[tuple[str, Child]]) -> Markup:
    """Return a definition list of names and values."""
    return element(
        "dl", (element("div", element("dt", name), element("dd", value)) for name, value in rows)
    )


def format_known(value: _Value | None, show: Callable[[_Value], str]) -> str:
    """Return a value as text, or a dash if it is unknown."""
    return UNKNOWN if value is None else show(value)


def _shown(show: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: format_known(value, show)


latency: Final = _shown(latency_text)
size: Final = _shown(size_text)
error: Final = _shown("{:.2g}".format)
share: Final = _shown("{:.0%}".format)
accuracy: Final = _shown("{:.2%}".format)


def ratio(value: float | None) -> str:
    """Return a ratio with three significant digits: 1.23×, 15.5×, 120×."""
    if value is None:
        return UNKNOWN
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 2)}f}×"


def plain(value: float) -> str:
    """Return a number with at most three significant digits, or as an integer from 1000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def change(previous: float | None, current: float | None) -> float | None:
    """Return the relative change of a value, or None if either value is unknown."""
    return current / previous - 1 if previous and current is not None else None


# ---------------------------------------------------------------- plots

# The size of a plot and its margins, in pixels.
WIDTH: Final = 560
HEIGHT: Final = 330
_LEFT: Final = 80
_RIGHT: Final = 16
_TOP: Final = 12
_BOTTOM: Final = 46

_FONT_HEIGHT: Final = 14
_FONT_WIDTH: Final = 7.3
_MAX_LABEL: Final = 30
_MANY_TICKS: Final = 7
_FEW_TICKS: Final = 3
_MARK_RADIUS: Final = 6.0

SERIES: Final = 8
"""Number of series colours in the style sheet."""

_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3")


class Scale(NamedTuple):
    """A mapping from values to pixels: `low` is at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values; on a logarithmic scale 1, 2 and 5 of each power of ten, or only powers."""
        if not self.is_log:
            return _linear_ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            ticks = [digit * 10.0**power for power in powers for digit in digits]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= _MANY_TICKS:
                break
        else:
            ticks = ticks[:: math.ceil(len(ticks) / _MANY_TICKS)]
        return ticks if len(ticks) >= _FEW_TICKS else _linear_ticks(self.low, self.high)


class Axis(NamedTuple):
    """An axis: label, values to cover, and the format of ticks."""

    label: str
    values: tuple[float, ...]
    format: Callable[[float], str]
    is_log: bool = False
    starts_at_zero: bool = False

    def scale(self, start: float, end: float) -> Scale:
        """Return the scale with a margin around the values."""
        low, high = min(self.values), max(self.values)
        if self.is_log:
            room = max((high / low) ** 0.08, 1.15)
            return Scale(low / room, high * room, start, end, is_log=True)
        room = (high - low) * 0.08 or abs(high) * 0.2 or 1.0
        return Scale(0.0 if self.starts_at_zero else low - room, high + room, start, end)


class Mark(NamedTuple):
    """A point of a plot; `text` is its tooltip, and the label is shown if there is room."""

    x: float
    y: float
    text: str
    label: str = ""
    series: int = 0
    shape: int = 0
    is_hollow: bool = False


class Frame(NamedTuple):
    """The scales of a plot."""

    x: Scale
    y: Scale


def make_frame(x: Axis, y: Axis) -> Frame:
    """Return the scales of a plot with these axes."""
    return Frame(x.scale(_LEFT, WIDTH - _RIGHT), y.scale(HEIGHT - _BOTTOM, _TOP))


def plot(title: str, x: Axis, y: Axis, *content: Child) -> Markup:
    """Return a plot with axes, which scrolls sideways on a narrow screen.

    Content must be drawn for `make_frame(x, y)`. The title is for screen readers.
    """
    svg = element(
        "svg",
        _draw_axes(x, y, make_frame(x, y)),
        content,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="group",
        aria_label=title,
    )
    return element("div", svg, class_="scroll plot", tabindex=0, role="region", aria_label=title)


def _draw_axes(x: Axis, y: Axis, frame: Frame) -> Markup:
    bottom, right, middle = HEIGHT - _BOTTOM, WIDTH - _RIGHT, (HEIGHT - _BOTTOM + _TOP) / 2
    across = [(frame.x.at(value), x.format(value)) for value in frame.x.ticks()]
    up = [(frame.y.at(value), y.format(value)) for value in frame.y.ticks()]
    grid = [
        *(f"M{px:.1f} {_TOP}V{bottom}" for px, _ in across),
        *(f"M{_LEFT} {py:.1f}H{right}" for py in (py for py, _ in up)),
    ]
    return element(
        "g",
        element("path", d="".join(grid), class_="grid"),
        element("path", d=f"M{_LEFT} {_TOP}V{bottom}H{right}", class_="axis"),
        (
            element("text", text, x=round(px, 1), y=bottom + 17, text_anchor="middle")
            for px, text in across
        ),
        (
            element("text", text, x=_LEFT - 7, y=round(py + 4, 1), text_anchor="end")
            for py, text in up
        ),
        element(
            "text",
            x.label,
            x=(_LEFT + right) / 2,
            y=HEIGHT - 7,
            text_anchor="middle",
            class_="title",
        ),
        element(
            "text",
            y.label,
            transform=f"translate(12 {middle:.0f}) rotate(-90)",
            text_anchor="middle",
            class_="title",
        ),
        class_="axes",
        aria_hidden="true",
    )


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / (_MANY_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def draw_line(points: Sequence[tuple[float, float]], frame: Frame, series: int) -> Markup:
    """Return a step line through (x, y) values."""
    pixels = [(frame.x.at(x), frame.y.at(y)) for x, y in points]
    path = f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"
    for before, after in pairwise(pixels):
        path += f"H{after[0]:.1f}" + (f"V{after[1]:.1f}" if after[1] != before[1] else "")
    return _draw_path(path, series)


def _draw_path(path: str, series: int) -> Markup:
    dashes = _DASHES[series // SERIES % len(_DASHES)]
    return element(
        "path", d=path, class_=f"line s{series % SERIES}", stroke_dasharray=dashes or None
    )


def draw_marks(marks: Sequence[Mark], frame: Frame) -> Markup:
    """Return points with tooltips, and labels where there is room."""
    places = [(frame.x.at(mark.x), frame.y.at(mark.y)) for mark in marks]
    labels = place_labels(places, [mark.label for mark in marks])
    drawn = [
        element(
            "g",
            element("title", mark.text),
            draw_shape(mark.shape, *place),
            class_=f"mark s{mark.series % SERIES}{' hollow' if mark.is_hollow else ''}",
            tabindex=0,
            role="img",
            aria_label=mark.text,
        )
        for mark, place in zip(marks, places, strict=True)
    ]
    return element("g", (*drawn, *labels))


def draw_shape(number: int, x: float, y: float, radius: float = _MARK_RADIUS) -> Markup:
    """Return shape `number`: circle, square, diamond, or triangle pointing up or down."""
    r = radius
    paths = (
        f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        f"M{x - r * 0.87:.1f} {y - r * 0.87:.1f}h{r * 1.74:.2f}v{r * 1.74:.2f}h{-r * 1.74:.2f}z",
        f"M{x:.1f} {y - r * 1.2:.1f}l{r * 1.2} {r * 1.2}l{-r * 1.2} {r * 1.2}l{-r * 1.2} {-r * 1.2}z",
        f"M{x:.1f} {y - r * 1.15:.1f}l{r * 1.15} {r * 2}h{-r * 2.3}z",
        f"M{x:.1f} {y + r * 1.15:.1f}l{r * 1.15} {-r * 2}h{-r * 2.3}z",
    )
    return element("path", d=paths[number % len(paths)])


def swatch(series: int, shape: int | None = None) -> Markup:
    """Return the legend symbol of a series for a table: its line, or its mark."""
    content = (
        _draw_path("M1 6H17", series)
        if shape is None
        else element("g", draw_shape(shape, 9, 6, 5), class_=f"mark s{series % SERIES}")
    )
    return element("svg", content, class_="swatch", viewBox="0 0 18 12", aria_hidden="true")


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def place_labels(places: Sequence[tuple[float, float]], labels: Sequence[str]) -> list[Markup]:
    """Return those labels of points (in pixels) that fit without covering anything."""
    r = _MARK_RADIUS + 1
    taken = [_Box(x - r, y - r, x + r, y + r) for x, y in places]
    inside = _Box(_LEFT, _TOP, WIDTH - 2, HEIGHT - _BOTTOM)
    drawn = []
    for (x, y), label in zip(places, labels, strict=True):
        text = shorten(label, _MAX_LABEL)
        for box in _label_boxes(x, y, len(text) * _FONT_WIDTH) if text else ():
            is_inside = inside.left <= box.left and box.right <= inside.right
            is_inside &= inside.top <= box.top and box.bottom <= inside.bottom
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                px, py = round(box.left, 1), round(box.bottom - 3, 1)
                drawn.append(element("text", text, x=px, y=py, class_="label", aria_hidden="true"))
                break
    return drawn


def _label_boxes(x: float, y: float, width: float) -> Iterable[_Box]:
    """Yield candidate boxes of a label: right, left, above and below its point, then diagonally."""
    gap, half = _MARK_RADIUS + 3, _FONT_HEIGHT / 2
    corners = [
        (x + gap, y - half),
        (x - gap - width, y - half),
        (x - width / 2, y - gap - _FONT_HEIGHT),
        (x - width / 2, y + gap),
        *((x + gap, y - half + shift) for shift in (-_FONT_HEIGHT, _FONT_HEIGHT)),
        *((x - gap - width, y - half + shift) for shift in (-_FONT_HEIGHT, _FONT_HEIGHT)),
    ]
    for left, top in corners:
        yield _Box(left, top, left + width, top + _FONT_HEIGHT)


_FRONT_SERIES: Final = 7
_LOG_RATIO: Final = 4.0


class _Cost(NamedTuple):
    name: str
    read: Callable[[Build], float | None]
    format: Callable[[float], str]


_COSTS: Final = (
    _Cost("size of the library", lambda build: build.size_bytes, size_text),
    _Cost("largest error", lambda build: build.error, "{:.1e}".format),
)


def draw_pareto(libraries: Sequence[Library]) -> Iterator[Markup]:
    """Yield a figure for each recipe with two or more libraries that differ in latency and another cost."""
    ordered = sorted(libraries, key=lambda library: library.recipe)
    for recipe, group in groupby(ordered, key=lambda library: library.recipe):
        members = [one for one in group if one.build.latency_s and one.build.verdict != "rejected"]
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


def _points(libraries: Iterable[Library], cost: _Cost) -> list[_Point]:
    return [
        (library.build.latency_s, value, library)
        for library in libraries
        if library.build.latency_s and (value := cost.read(library.build)) is not None
    ]


def _differ(points: Sequence[_Point]) -> bool:
    return len({x for x, *_ in points}) > 1 and len({y for _, y, _ in points}) > 1


def _number(names: Iterable[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def find_pareto_optimal(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of Pareto-optimal points (both values small), sorted by the first value."""
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
    recipe: str, libraries: Sequence[Library], series: Mapping[str, int], shapes: Mapping[str, int]
) -> Markup:
    fronts: dict[str, list[str]] = {}
    for cost in _COSTS:
        points = _points(libraries, cost)
        front = find_pareto_optimal([point[:2] for point in points]) if _differ(points) else []
        for index in front:
            fronts.setdefault(points[index][2].label, []).append(cost.name)
    rows = []
    for library in libraries:
        build = library.build
        sample = swatch(series[build.target], shapes[build.variant])
        on_line = ", ".join(fronts.get(library.label, ()))
        rows.append(
            {
                "library": Cell(join(sample, library.label), library.label),
                "latency": Cell(latency(build.latency_s), build.latency_s),
                "size": Cell(size(build.size_bytes), build.size_bytes),
                "largest error": Cell(error(build.error), build.error),
                "accuracy": Cell(accuracy(build.accuracy), build.accuracy),
                "on a line": Cell(on_line, on_line),
            }
        )
    return table(f"{recipe}: the libraries in the charts", rows)
