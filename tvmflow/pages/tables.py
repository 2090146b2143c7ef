"""Tables whose columns can be sorted: numbers carry the value that they are sorted by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tvmflow.pages.markup import UNKNOWN, Child, Markup, element


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

    Args:
        caption: What it shows, for screen readers.
        columns: Its columns; the first names the row.
        rows: Its rows.
        omits_empty: Leave out columns without any value.
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
