"""Holders of file locks, as those who wait see them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvmflow.core.file_locks import describe_holders, format_command, held


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["/x/bin/python", "-m", "tvmflow", "run", "a.yaml"], "tvmflow run a.yaml"),
        (["/x/bin/python3.11", "/x/bin/tvmflow", "run", "a.yaml"], "tvmflow run a.yaml"),
        (["/usr/bin/flock", "cpu.lock"], "flock cpu.lock"),
        ([], "which has ended"),
        (["tvmflow", "--remote", "https://ann:secret@host/x"], "tvmflow --remote https://host/x"),
        (["tvmflow", "\x1b[2Jx"], "tvmflow [2Jx"),
    ],
)
def test_a_command_is_shown_as_it_was_typed(words: list[str], text: str) -> None:
    """Without the interpreter, without passwords, and without control characters."""
    assert format_command(words) == text


def test_a_long_command_is_cut() -> None:
    """A hundred recipes are not for one line."""
    assert len(format_command(["tvmflow", "run", *("recipe.yaml",) * 100])) == 101


def test_a_command_does_not_wait_for_itself(tmp_path: Path) -> None:
    """Its own stages share its locks, and nobody is to be told."""
    with held(tmp_path / "lock") as descriptor:
        assert describe_holders(os.fstat(descriptor)) is None
