"""Tables whose columns can be sorted: numbers carry the value that they are sorted by; values as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from tvmflow.core.formatting import latency_text, size_text
from tvmflow.core.generated_text import Child, Markup, element

UNKNOWN: Final = "–"
_Value = TypeVar("_Value", int, float)


class Cell(NamedTuple):
    """A cell: its content, the value that it is sorted by, and small text below it."""

    content: Child
    value: float | str | None = None
    note: Child = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is known."""
        return self.content in (UNKNOWN, "")


class Column(NamedTuple):
    """A column: its heading, and whether it has numbers."""

    heading: str
    is_number: bool = False


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    omits_empty: bool = True,
) -> Markup:
    """Return a table that scrolls sideways where it is too wide; nothing without rows.

    The caption is for screen readers, and the first column names the row; `omits_empty` leaves out columns
    without any value.
    """
    body = list(rows)
    if not body:
        return Markup("")
    shown = [
        index
        for index in range(len(columns))
        if not omits_empty or index == 0 or any(not row[index].is_empty for row in body)
    ]
    head = (
        element("th", columns[index].heading, scope="col", class_=_class(columns[index]))
        for index in shown
    )
    content = element(
        "table",
        element("caption", caption, class_="hidden"),
        element("thead", element("tr", head)),
        element("tbody", (_row([(columns[i], row[i]) for i in shown]) for row in body)),
    )
    return element("div", content, class_="scroll", tabindex=0, role="group", aria_label=caption)


def _row(cells: Sequence[tuple[Column, Cell]]) -> Markup:
    return element(
        "tr",
        (
            element(
                "td" if index else "th",
                cell.content,
                element("small", cell.note) if cell.note else None,
                class_=_class(column),
                scope=None if index else "row",
                data_value=cell.value,
            )
            for index, (column, cell) in enumerate(cells)
        ),
    )


def _class(column: Column) -> str | None:
    return "number" if column.is_number else None


def pairs(rows: Iterable[tuple[str, Child]]) -> Markup:
    """Return names with their values."""
    return element(
        "dl", (element("div", element("dt", name), element("dd", value)) for name, value in rows)
    )


# ---------------------------------------------------------------- values
# Values of pages as text, with what is not known as a dash.


def format_known(value: _Value | None, show: Callable[[_Value], str]) -> str:
    """Return a value as text, or a dash where it is not known."""
    return UNKNOWN if value is None else show(value)


def latency(value: float | None) -> str:
    """Return a latency."""
    return format_known(value, latency_text)


def size(value: float | None) -> str:
    """Return a size."""
    return format_known(value, size_text)


def error(value: float | None) -> str:
    """Return an error in two digits."""
    return format_known(value, "{:.2g}".format)


def share(value: float | None) -> str:
    """Return a share in percent."""
    return format_known(value, "{:.0%}".format)


def accuracy(value: float | None) -> str:
    """Return an accuracy in percent with two more digits."""
    return format_known(value, "{:.2%}".format)


def ratio(value: float | None) -> str:
    """Return a ratio in three digits: 1.23×, 15.5×, 120×."""
    if value is None:
        return UNKNOWN
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 2)}f}×"


def plain(value: float) -> str:
    """Return a number in at most three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def change(previous: float | None, current: float | None) -> float | None:
    """Return by which share a value has changed; None where one is not known."""
    return current / previous - 1 if previous and current is not None else None
