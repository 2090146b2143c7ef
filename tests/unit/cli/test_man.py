"""Man pages: one for each command, well formed, with the text of the help."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tvmflow.cli import main, man
from tvmflow.cli.commands import COMMANDS, load_all_commands
from tvmflow.cli.parser import CommandParser

REQUESTS = {".TH", ".nh", ".ad", ".SH", ".SS", ".PP", ".TP", ".EX", ".EE"}
PAGES = man.all_pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_known_requests_that_are_closed(name: str) -> None:
    """No text is taken for a request, and no font or example reaches beyond its end."""
    lines = PAGES[name].splitlines()
    requests = [line.split()[0] for line in lines if line.startswith((".", "'"))]
    assert set(requests) <= REQUESTS
    assert requests.count(".EX") == requests.count(".EE") <= 1
    fonts = re.findall(r"\\f(.)", PAGES[name])
    assert {*fonts[::2]} <= {"B", "I"} and {*fonts[1::2]} == {"R"}
    assert PAGES[name].isascii()


def test_every_command_has_a_page_with_all_options() -> None:
    """Subcommands have pages of their own, to which that of their command refers."""
    expected = {"tvmflow", *(f"tvmflow-{name}" for name in COMMANDS)}
    for command in load_all_commands():
        name = f"tvmflow-{command.name.replace(' ', '-')}"
        expected.add(name)
        for option in CommandParser(command)._option_string_actions:
            assert f"\\fB{option.replace('-', chr(92) + '-')}\\fR" in PAGES[f"{name}.1"]
    assert {name.removesuffix(".1") for name in PAGES} == expected
    assert "\\fBtvmflow\\-cache\\-gc\\fR(1)\nGarbage" in PAGES["tvmflow-cache.1"]


def test_text_is_not_taken_for_requests_and_escapes() -> None:
    r"""Dots and quotes at the beginning of lines, backslashes, and what is not ASCII."""
    assert man._text(".a \\n 'b' `c-d` …") == "\\&.a \\en \\(aqb\\(aq \\fBc\\-d\\fR \\[u2026]"


def test_help_prints_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that does not exist is answered as everywhere."""
    for words, name in [
        ((), "tvmflow.1"),
        (("run",), "tvmflow-run.1"),
        (("cache",), "tvmflow-cache.1"),
        (("cache", "gc"), "tvmflow-cache-gc.1"),
    ]:
        assert main.main(["help", "--man", *words]) == 0
        assert capsys.readouterr().out == PAGES[name]
    assert main.main(["help", "--man", "rum"]) == 2
    assert main.main(["help", "--man", "cache", "unpi"]) == 2
    error = capsys.readouterr().err
    assert "did you mean `run`?" in error and "did you mean `cache unpin`?" in error


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
def test_mandoc_has_nothing_to_say(tmp_path: Path) -> None:
    """The date apart: a page is of a version, and the same for whoever builds it."""
    for name, text in PAGES.items():
        tmp_path.joinpath(name).write_text(text)
    command = ["mandoc", "-Tlint", "-Wwarning", *PAGES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
