"""The message of a foreign error is its last line."""

from __future__ import annotations

import pytest

from tvmflow.core.formatting import last_line


@pytest.mark.parametrize(
    ("text", "line"),
    [("stack\n  frame\nInternalError: no rule\n", "InternalError: no rule"), ("", "RuntimeError")],
)
def test_the_last_line_says_what_went_wrong(text: str, line: str) -> None:
    """An error without text is named by its type."""
    assert last_line(RuntimeError(text)) == line
