"""The message of a foreign error is its last line."""

from __future__ import annotations

import pytest

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import last_line


@pytest.mark.parametrize(
    ("text", "line"),
    [("stack\n  frame\nInternalError: no rule\n", "InternalError: no rule"), ("", "RuntimeError")],
)
def test_the_last_line_says_what_went_wrong(text: str, line: str) -> None:
    """An error without text is named by its type."""
    assert last_line(RuntimeError(text)) == line


def test_a_thousand_mistakes_are_not_all_printed() -> None:
    """The message has the first fifty and says how many there are; the error keeps all of them."""
    error = RecipeError([f"r.yaml:{line}:1: wrong" for line in range(1000)])
    lines = str(error).splitlines()
    assert (len(error.problems), len(lines)) == (1000, 51)
    assert lines[-1] == "… and 950 more"
