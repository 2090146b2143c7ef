"""Text for people: values, counts, tables and suggestions."""

from __future__ import annotations

import pytest

from tvmflow.core.formatting import (
    age_text,
    count_text,
    duration_text,
    excerpt,
    last_line,
    latency_text,
    names_text,
    printable,
    printable_lines,
    quoted,
    shorten,
    size_text,
)
from tvmflow.core.text import columns, did_you_mean, nearest, parse_latency


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0124, "12 ms"),
        (0.9996, "1.0 s"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (60, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (11_400, "3 h 10 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(31.24e-6, "31.2 µs"), (4.556e-3, "4.56 ms"), (0.9999, "1 s"), (1.234, "1.23 s")],
)
def test_latencies(seconds: float, text: str) -> None:
    assert latency_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (5, "5 s"),
        (720, "12 min"),
        (3 * 3600 + 5, "3 h"),
        (86_400, "1 day"),
        (31 * 86_400, "31 days"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (678, "678 B"),
        (4_500, "4.5 kB"),
        (999_960, "1.0 MB"),
        (12_340_000, "12.3 MB"),
        (1.2e9, "1.2 GB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


def test_counts_have_the_right_plural() -> None:
    assert [count_text(number, "stage") for number in (0, 1, 2)] == [
        "0 stages",
        "1 stage",
        "2 stages",
    ]
    assert count_text(1, "entry", "entries") == "1 entry"
    assert count_text(3, "entry", "entries") == "3 entries"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("µ \x1b[31mred\n", "µ \\x1b[31mred\\n"),
        ("a\rb\x00c\x9b2J", "a\\rb\\x00c\\x9b2J"),
        ("\u202eexe.\u2066png\u2028", "\\u202eexe.\\u2066png\\u2028"),
        ("lost \udcff", "lost \\udcff"),
        ("größe 模型 ✓", "größe 模型 ✓"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    """Text from elsewhere cannot write to the terminal, hide what follows, or fail to be printed."""
    assert printable(text) == shown


def test_a_message_keeps_its_lines_and_ends_in_time() -> None:
    """Only its own line breaks remain, and a line of any length is cut."""
    lines = printable_lines("a: \x1b[2J\n  fix: " + "b" * 9000).split("\n")
    assert lines == ["a: \\x1b[2J", "  fix: " + "b" * 3993 + "…"]


def test_excerpts_are_short_whatever_the_text() -> None:
    """An escape counts with all of its characters, and quotes stay pairs."""
    assert excerpt("\x1b" * 100_000, 10) == "\\x1b\\x1b\\x…"
    assert quoted("don't'") == "'don't''"
    assert names_text(["a", "b\n", "c"]) == "a, b\\n, c"
    assert names_text([str(n) for n in range(10**4)], 2) == "0, 1 and 9998 more"


def test_the_last_line_of_an_error_is_short() -> None:
    """TVM puts its stack trace before the message; a model's attribute may be in the message."""
    assert last_line(ValueError("trace\nmessage\n\n")) == "message"
    assert last_line(KeyError()) == "KeyError"
    assert len(last_line(ValueError("x" * 50_000))) <= 501


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    """Numbers are aligned to the right; lines have no spaces at their end."""
    rows = [("name", "size", ""), ("a", "1", "x"), ("long name", "10,000", "")]
    assert columns(rows, right=frozenset({1})) == [
        "name         size",
        "a               1  x",
        "long name  10,000",
    ]
    assert columns([]) == []


def test_the_nearest_name_is_found() -> None:
    """Names that are not alike are not suggested."""
    valid = ["cortex-a72", "cortex-a7", "znver4"]
    assert nearest("cortex-a7x", valid) == ["cortex-a7"]
    assert nearest("riscv", valid) == []


def test_a_suggestion_is_a_phrase_or_nothing() -> None:
    assert did_you_mean("tunne", ["tune", "build"]) == "; did you mean 'tune'?"
    assert did_you_mean("xyz", ["tune", "build"]) == ""


def test_a_very_long_name_is_compared_by_its_beginning() -> None:
    """The comparison takes time that grows with the square of the length."""
    assert nearest("tune" + "e" * 100_000, ["tune"]) == []


@pytest.mark.parametrize("unit", ["us", "\u00b5s", "\u03bcs"])
def test_microseconds_are_read_with_either_letter(unit: str) -> None:
    """The micro sign and the Greek letter look alike."""
    assert parse_latency(f"500 {unit}") == parse_latency(f"500{unit}") == pytest.approx(500e-6)


def test_a_long_name_keeps_both_ends() -> None:
    assert shorten("short", 10) == "short"
    assert shorten("fused_conv2d_add_relu17", 12) == "fus…d_relu17"
    assert shorten("a\nb", 10) == "a\\nb"
