"""Lines on a terminal that are replaced in place, of styled text; and whether colour is wanted."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TextIO

_CODES: Final = {"": "", "bold": "1", "dim": "2", "red": "1;31", "green": "32", "cyan": "36"}
# A terminal that knows these shows everything between them at once.
_BEGIN_FRAME: Final = "\x1b[?2026h"
_END_FRAME: Final = "\x1b[?2026l"


class Span(NamedTuple):
    """Printable text in one style: bold, dim, red, green, cyan, or none."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
"""A line of styled text."""


def wants_color(stream: TextIO) -> bool:
    """Return whether text for a stream may have colours: `$NO_COLOR`, `$FORCE_COLOR`, or else a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if force := os.environ.get("FORCE_COLOR"):
        return force != "0"
    return is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    """Return whether lines of a stream can be replaced."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def display_width(text: str) -> int:
    """Return the number of columns that a terminal needs for printable text."""
    if text.isascii():
        return len(text)
    return sum(map(_character_width, text))


def _character_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int) -> str:
    """Return text that needs at most `width` columns: what is cut off ends in `…`."""
    if display_width(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += _character_width(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""


def pad(text: str, width: int) -> str:
    """Return text with spaces up to `width` columns."""
    return text + " " * (width - display_width(text))


def fit_line(line: Line, width: int) -> Line:
    """Return a line that needs at most `width` columns."""
    spans: list[Span] = []
    for span in line:
        needed = display_width(span.text)
        if needed > width:
            spans.append(span._replace(text=fit(span.text, width)))
            break
        spans.append(span)
        width -= needed
    return tuple(spans)


def render_line(line: Line, *, color: bool) -> str:
    """Return a line as it is written to a stream."""
    if not color:
        return "".join(span.text for span in line)
    return "".join(
        f"\x1b[{_CODES[span.style]}m{span.text}\x1b[0m" if span.style else span.text
        for span in line
    )


class LiveRegion:
    """The last lines on a terminal, which are replaced by others. The cursor stays visible at their end.

    The size of the terminal is read for each frame. No line may wrap, or it could not be replaced;
    those that a narrower terminal has wrapped since are counted.
    """

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self._stream = stream
        self._color = color
        self._widths: list[int] = []
        self._content = ""

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines that a frame may have."""
        size = shutil.get_terminal_size((80, 24))
        return os.terminal_size((max(size.columns - 1, 1), max(size.lines - 1, 1)))

    def draw(self, lines: Sequence[Line], above: str = "") -> None:
        """Replace the lines, in one write.

        Lines that do not fit are left out; `above` them, complete lines of text stay.
        """
        columns, height = self.size
        fitted = [fit_line(line, columns) for line in lines[:height]]
        content = "\x1b[K\n".join(render_line(line, color=self._color) for line in fitted)
        if not above and content == self._content and self._widths:
            return
        start = self._start() + ("\x1b[J" if above else "")
        self._stream.write(f"{_BEGIN_FRAME}{start}{above}{content}\x1b[J{_END_FRAME}")
        self._stream.flush()
        self._content = content
        self._widths = [_line_width(line) for line in fitted]

    def clear(self) -> None:
        """Remove the lines; the cursor is then where the first of them began."""
        if self._widths:
            self._stream.write(f"{self._start()}\x1b[J")
            self._stream.flush()
        self._widths, self._content = [], ""

    def _start(self) -> str:
        """Return what moves the cursor to the first line."""
        columns = self.size.columns + 1
        rows = sum(max(-(-width // columns), 1) for width in self._widths)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")


def _line_width(line: Iterable[Span]) -> int:
    return sum(display_width(span.text) for span in line)
