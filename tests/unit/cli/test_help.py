"""Help: it fits the terminal, and its examples are command lines that work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tvmflow.cli import commands as module
from tvmflow.cli import main
from tvmflow.cli.commands import COMMANDS, Command, load_all_commands
from tvmflow.cli.parser import CommandParser


@pytest.mark.parametrize("width", [50, 80])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but usage lines and commands of examples, which are to be copied."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main.main(["help", *command.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = ("usage:", "tvmflow ", "git ", "# yaml-language-server")
    assert [
        line for line in lines if len(line) > width and not line.strip().startswith(words)
    ] == []


def test_help_names_the_command_and_its_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    """`help cache gc` is what `cache gc --help` prints."""
    assert main.main(["help", "cache", "gc"]) == 0
    text = capsys.readouterr().out
    assert main.main(["cache", "gc", "--help"]) == 0
    assert capsys.readouterr().out == text
    assert text.startswith("usage: tvmflow cache gc [OPTIONS]\n")


def test_a_command_with_subcommands_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout if it was asked for, else on stderr with exit code 2."""
    assert main.main(["cache", "--help"]) == 0
    text = capsys.readouterr().out
    assert "  gc      Garbage-collect unused results" in text
    assert main.main(["cache"]) == 2
    assert capsys.readouterr().err == text


def list_examples(command: Command) -> list[str]:
    """Return the command lines of tvmflow in the examples of a command."""
    examples = (CommandParser(command).epilog or "").splitlines()
    lines = [line.strip().partition(" > ")[0] for line in examples]
    return [line for line in lines if line.startswith("tvmflow ")]


@pytest.mark.parametrize("command", load_all_commands(), ids=lambda command: command.name)
def test_every_command_has_examples_that_can_be_parsed(command: Command) -> None:
    """Each with an example of itself."""
    examples = list_examples(command)
    for line in examples:
        main.parse(shlex.split(line)[1:])
    assert any(line.startswith(f"tvmflow {command.name}") for line in examples)


def test_the_examples_of_the_overview_can_be_parsed(tmp_path: Path) -> None:
    lines = [line for line in module.overview().splitlines() if line.startswith("  tvmflow ")]
    for line in lines:
        main.parse(shlex.split(line)[1:])
    assert len(lines) == 5


def test_the_parts_of_a_docstring() -> None:
    """Only what is for users is in the help."""
    text = module.split_docstring(
        "Do it.\n\nSlowly,\nor fast.\n\nExamples:\n    # now\n    tvmflow do\n\nRaises:\n    Error: never."
    )
    assert text == ("Do it.", "Slowly, or fast.", "# now\ntvmflow do")


def test_only_comments_of_examples_are_wrapped() -> None:
    text = "examples:\n  # one two three\n  tvmflow run one-two-three"
    assert module.fill(text, 12).splitlines() == [
        *("examples:", "  # one two", "  # three", "  tvmflow run one-two-three"),
    ]
