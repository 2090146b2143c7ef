"""Tables of text for terminals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_GAP = "  "


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Return one line for each row, its cells padded to the width of their columns.

    Args:
        rows: Cells; every row has the same number of them.
        right: The indices of the columns that are aligned to the right, as numbers are.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(
    rows: Sequence[Mapping[str, str]],
    *,
    right: Collection[str] = (),
    expendable: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Return a table with headings as lines of text; columns that are empty in all rows are left out.

    Args:
        rows: Cells by heading; every row has the same headings.
        right: The headings of the columns that are aligned to the right.
        expendable: The headings of the columns that are left out until the table fits, the first of them first.
        width: How wide it may be; None for any width.
    """
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    for heading in expendable:
        if width is None or _width_of(rows, headings) <= width:
            break
        headings = [name for name in headings if name != heading]
    cells = [headings, *([row[heading] for heading in headings] for row in rows)]
    indices = frozenset(index for index, heading in enumerate(headings) if heading in right)
    return columns(cells, right=indices)


def _width_of(rows: Sequence[Mapping[str, str]], headings: Sequence[str]) -> int:
    widths = [max(len(heading), *(len(row[heading]) for row in rows)) for heading in headings]
    return sum(widths) + len(_GAP) * (len(widths) - 1)
