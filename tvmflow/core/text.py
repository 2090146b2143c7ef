"""Suggestions for mistyped names, quantities with units, and text tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from tvmflow.core.formatting import quoted

_LONGEST = 60


def nearest(name: str, valid: Iterable[object], *, cutoff: float = 0.6) -> list[str]:
    """Return the valid name that is most similar to `name`, ignoring case, as a list of at most one."""
    # Imported here because most command lines and recipes have no mistake.
    import difflib

    spellings = {str(other).lower(): str(other) for other in valid}
    matches = difflib.get_close_matches(name[:_LONGEST].lower(), spellings, n=1, cutoff=cutoff)
    return [spellings[match] for match in matches]


def did_you_mean(
    name: str,
    valid: Iterable[object],
    *,
    cutoff: float = 0.6,
    meant: Callable[[str], Sequence[str] | None] | None = None,
) -> str:
    """Return `; did you mean 'x'?` for the valid name that is most similar to `name`, or an empty string.

    `meant` maps a synonym, such as another tool's name, to valid names, and returns None for unknown names.
    """
    names = meant(name[:_LONGEST]) if meant else None
    if names is None:
        names = nearest(name, valid, cutoff=cutoff)
    choices = " or ".join(f"'{other}'" for other in names)
    return f"; did you mean {choices}?" if names else ""


_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_CALL_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES: Final = {
    **{"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
}


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `30d`, `12h`, `90min`, `2w`, or `0`; ValueError otherwise."""
    return _parse(text, _SECONDS, "an age such as 30d, 12h or 90min")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `20GB`, `1.5GiB`, or `0`."""
    return int(_parse(text, _BYTES, "a size such as 20GB or 500MB"))


def parse_latency(text: str) -> float:
    """Return the seconds of a latency such as `8 ms`, `250us` or `0.5 s`."""
    return _parse(text, _CALL_SECONDS, "a latency such as 8 ms or 0.5 s")


def _parse(text: str, units: Mapping[str, float], kind: str) -> float:
    # The Greek letter mu looks like the micro sign.
    spelling = text.replace("μ", "µ")
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?) ?([A-Za-zµ]*)", spelling, re.ASCII)
    number, unit = match.groups() if match else ("", "")
    if match and unit in units:
        return float(number) * units[unit]
    # A number without a unit is ambiguous, except 0.
    if match and not unit and float(number) == 0:
        return 0.0
    raise ValueError(f"{quoted(text)} is not {kind}; units are {', '.join(units)}")


_GAP = "  "


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Return a line for each row with padded columns; columns with an index in `right` are right-aligned."""
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
    """Return the lines of a table with headings, without columns that are empty in all rows.

    Each row maps the same headings to cells. `expendable` columns are left out in order until the table fits `width`.
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
