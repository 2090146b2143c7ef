"""What changed since what a page is compared with: kernels, inputs, settings and packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tvmflow.core.formatting import count_text
from tvmflow.pages.content import KernelChange, OtherChange, Page
from tvmflow.pages.format import change, latency
from tvmflow.pages.markup import Markup, element
from tvmflow.pages.tables import Cell, Column, table

_MAX_ROWS: Final = 100
_FEW_ROWS: Final = 20
_KERNEL_COLUMNS: Final = (
    Column("kernel"),
    Column("change"),
    Column("before", is_number=True),
    Column("now", is_number=True),
)
_OTHER_COLUMNS: Final = (Column("where"), Column("what"), Column("change"))
_EXPLANATION: Final = (
    "The time of a kernel in one call of the library: its share of the latency. Kernels that are on one "
    "side only are new or gone, perhaps because others were fused. Times are compared where the latency "
    "of the library has changed beyond the noise, and from 10 % of the kernel and 1 % of the library."
)


def list_changes(page: Page) -> Iterator[Markup]:
    """Yield the kernels that changed, and everything else that did."""
    if page.kernel_changes:
        rows = map(_kernel_row, page.kernel_changes[:_MAX_ROWS])
        yield element(
            "div",
            element("h3", "Kernels"),
            element("p", _EXPLANATION),
            table("Kernels that changed", _KERNEL_COLUMNS, rows),
            _count_more(len(page.kernel_changes)),
            class_="facts",
        )
    if page.changes:
        number = len(page.changes)
        rows = map(_other_row, page.changes[:_MAX_ROWS])
        content = table("What else changed", _OTHER_COLUMNS, rows)
        summary = element("summary", count_text(number, "difference"))
        yield element(
            "div",
            element("h3", "Builds, inputs, settings, machines and packages"),
            element("details", summary, content, open=number <= _FEW_ROWS),
            _count_more(number),
            class_="facts",
        )


def _count_more(number: int) -> Markup | None:
    if number <= _MAX_ROWS:
        return None
    text = f"{count_text(number - _MAX_ROWS, 'more row')}: `tvmflow compare --json` has all."
    return element("p", text, class_="note")


def _kernel_row(row: KernelChange) -> list[Cell]:
    return [
        Cell(element("code", row.name), row.name, row.label),
        _describe_change(row),
        Cell(latency(row.before_s), row.before_s),
        Cell(latency(row.after_s), row.after_s),
    ]


def _describe_change(row: KernelChange) -> Cell:
    part = change(row.before_s, row.after_s)
    if row.before_s is None:
        return Cell(element("span", "+ new", class_="faint"), "new")
    if row.after_s is None:
        return Cell(element("span", "− gone", class_="faint"), "gone")
    if part is None:
        return Cell("")
    word, style = ("▲ slower", "bad") if part > 0 else ("▼ faster", "good")
    return Cell(element("span", f"{word}, {part:+.0%}", class_=style), part)


def _other_row(row: OtherChange) -> list[Cell]:
    return [
        Cell(row.place, row.place),
        Cell(row.what, row.what),
        Cell(row.text.replace("->", "→"), row.text),
    ]
