"""Formatting of durations, latencies, ages, sizes, counts and untrusted text for messages.

A value that would round up to the next unit is shown in that unit. Imports almost nothing, for fast up-to-date runs.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_MAX_LINE = 4_000
_MAX_ERROR = 500


def duration_text(seconds: float) -> str:
    """Return a duration: 12 ms, 3.4 s, 2 min 05 s, 3 h 10 min."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def latency_text(seconds: float) -> str:
    """Return a latency: 31.2 µs, 4.56 ms, 1.23 s."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """Return an age in its largest unit: 5 s, 12 min, 3 h, 31 days."""
    seconds = max(seconds, 0.0)
    if days := int(seconds // 86400):
        return count_text(days, "day")
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def size_text(size: float) -> str:
    """Return a size in bytes: 1.2 GB, 12.3 MB, 4.5 kB, 678 B."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale * 0.99995:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 stage, 2 stages, 0 entries."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error, or its type; TVM puts a stack trace before the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return excerpt(lines[-1] if lines else type(error).__name__, _MAX_ERROR)


def printable(text: str) -> str:
    r"""Return untrusted text on one line: control characters, direction marks and surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Return a message for a terminal, with each line escaped and of limited length."""
    return "\n".join(_cut(printable(line), _MAX_LINE) for line in text.split("\n"))


def excerpt(text: str, limit: int = 120) -> str:
    """Return untrusted text for a message: escaped, on one line, and of limited length."""
    # Cut before and after escaping: the text may be huge, and escapes are longer than characters.
    short = printable(text[: limit + 1])
    return _cut(short, limit)


def shorten(text: str, limit: int) -> str:
    """Return text on one line, cut in the middle to `limit` characters, because a name's end says most."""
    short = printable(text)
    tail = 2 * limit // 3
    return short if len(short) <= limit else f"{short[: limit - tail - 1]}…{short[-tail:]}"


def quoted(text: str) -> str:
    """Return an excerpt of the text in quotes."""
    return f"'{excerpt(text)}'"


def names_text(names: "Collection[str]", limit: int = 20) -> str:
    """Return excerpts of up to `limit` names, and the number of the others: `a, b, c and 40 more`."""
    shown = ", ".join(excerpt(name) for name in [*names][:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


def limit_lines(lines: "Collection[str]", limit: int = 10) -> list[str]:
    """Return the first lines, and a line with the number of the others."""
    more = len(lines) - limit
    return [*lines][:limit] + ([f"and {more} more"] if more > 0 else [])


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def find_width() -> int | None:
    """Return the width of lines in characters: `$COLUMNS` or the terminal's, or None."""
    try:
        width = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        try:
            width = os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError, AttributeError):
            width = 0
    return width if width > 0 else None
