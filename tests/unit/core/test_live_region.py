"""Lines that are replaced in place, on an emulated terminal; colours where they are wanted."""

from __future__ import annotations

import io
from typing import Any

import pytest

from tvmflow.engine.progress import (
    LiveRegion,
    Span,
    display_width,
    fit,
    fit_line,
    render_line,
    wants_color,
)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Emulator:
    """A terminal with a screen, whose size the tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int, lines: int = 10) -> None:
        pyte = pytest.importorskip(
            "pyte", reason="pyte is not installed: pip install 'tvmflow[test]'"
        )
        self._monkeypatch = monkeypatch
        self.screen: Any = pyte.HistoryScreen(columns, lines, history=100)
        # a line end moves to the first column, as the driver of a terminal makes it
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.Stream(self.screen)
        self.written = Terminal()
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        self._monkeypatch.setenv("COLUMNS", str(columns))
        self._monkeypatch.setenv("LINES", str(lines))

    def show(self) -> list[str]:
        self._stream.feed(self.written.getvalue())
        self.written.seek(0)
        self.written.truncate()
        lines = [line.rstrip() for line in self.screen.display]
        return lines[: max((i + 1 for i, line in enumerate(lines) if line), default=0)]


def lines(*texts: str) -> list[tuple[Span, ...]]:
    return [(Span(text),) for text in texts]


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_a_frame_replaces_the_one_before(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Shorter and fewer lines leave nothing of the old ones; what stays is above them."""
    terminal = Emulator(monkeypatch, columns)
    region = LiveRegion(terminal.written, color=True)
    region.draw(lines("x" * 200, "second", "third"))
    assert terminal.show() == ["x" * (columns - 2) + "…", "second", "third"]
    region.draw(lines("one", "two"), above=f"{'done ' * 3}\n")
    assert terminal.show() == ["done done done", "one", "two"]
    region.clear()
    assert terminal.show() == ["done done done"]
    assert not terminal.screen.cursor.hidden


def test_a_long_line_above_wraps_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is complete; only the display below it is cut."""
    terminal = Emulator(monkeypatch, 20)
    region = LiveRegion(terminal.written, color=False)
    region.draw(lines("a longer display line", "b"))
    region.draw(lines("c"), above="a message of more than twenty columns\n")
    assert terminal.show() == ["a message of more th", "an twenty columns", "c"]


def test_no_frame_is_higher_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its first lines could not be reached again."""
    terminal = Emulator(monkeypatch, 40, 5)
    region = LiveRegion(terminal.written, color=False)
    for number in range(3):
        region.draw(lines(*(f"{number} {index}" for index in range(9))))
    assert terminal.show() == ["2 0", "2 1", "2 2", "2 3"]


def test_a_terminal_that_became_narrower_has_wrapped_the_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next frame removes all rows that they take now."""
    terminal = Emulator(monkeypatch, 80)
    region = LiveRegion(terminal.written, color=False)
    region.draw(lines("x" * 70, "y"))
    terminal.resize(40, 10)
    terminal.written.truncate(0)
    region.draw(lines("z"))
    # 70 columns are two rows of 40, and one more below them: two rows up
    assert "\x1b[2A" in terminal.written.getvalue()


def test_an_unchanged_frame_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display that does not change does not flicker."""
    stream = Terminal()
    region = LiveRegion(stream, color=False)
    region.draw(lines("same"))
    before = stream.getvalue()
    region.draw(lines("same"))
    assert stream.getvalue() == before


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_the_environment_decides_about_colours(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    """Without a terminal there are none, unless they are forced."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_color(Terminal()) is expected
    assert wants_color(io.StringIO()) is (expected and "FORCE_COLOR" in variables)


def test_wide_characters_count_twice() -> None:
    """And combining ones not at all."""
    assert display_width("模型") == 4 and display_width("e\u0301") == 1
    assert fit("模型模型", 5) == "模型…" and fit("model", 5) == "model" and fit("model", 0) == ""
    assert fit_line((Span("ab", "red"), Span("cdef"), Span("g")), 4) == (
        Span("ab", "red"),
        Span("c…"),
    )


def test_styles_are_escapes_only_with_colour() -> None:
    """A style ends with its text."""
    line = (Span("a", "red"), Span("b"))
    assert render_line(line, color=False) == "ab"
    assert render_line(line, color=True) == "\x1b[1;31ma\x1b[0mb"
