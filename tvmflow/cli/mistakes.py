"""Errors for mistyped command lines, with suggestions."""

from __future__ import annotations

import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from tvmflow.cli.commands import COMMANDS, load_all_commands
from tvmflow.core import disk_errors
from tvmflow.core.errors import EXIT_BUG, EnvironmentProblem, TvmflowError, UsageError
from tvmflow.core.formatting import names_text, printable_lines
from tvmflow.core.generated_text import shell_word
from tvmflow.core.text import nearest

_RECIPE_SUFFIXES: Final = (".yaml", ".yml")
_COMMAND_SYNONYMS: Final = {
    "check": "doctor",
    "compile": "run",
    "gc": "cache gc",
    "info": "inspect",
    "install": "doctor",
    "ls": "cache stat",
    "make": "run",
    "status": "plan",
    "tune": "run",
    "validate": "plan",
    "why": "explain",
}
_OPTION_SYNONYMS: Final = {
    "-j": "--jobs",
    "-k": "--keep-going",
    "-n": "--dry-run",
    "-o": "--dist",
    "-t": "--target",
    "-y": "--yes",
    "--cache": "--store",
    "--cache-dir": "--store",
    "--debug": "--verbose",
    "--out": "--dist",
    "--output": "--dist",
    "--parallel": "--jobs",
    "--silent": "--quiet",
    "--stop-after": "--until",
    "--threads": "--jobs",
    "--timeout": "--stage-timeout",
}
"""The name in other tools -> tvmflow's name."""

_MAX_COMMANDS: Final = 3
_OVERVIEW_FIX: Final = "`tvmflow help` lists all commands"


def explain_command(word: str) -> UsageError:
    """Return the error for a first word that is not a command."""
    if word.startswith("-"):
        return UsageError(
            f"the option {word} has no command before it",
            fix=f"options come after the command: `tvmflow run {shell_word(word)} …`; {_OVERVIEW_FIX}",
        )
    if Path(word).suffix in _RECIPE_SUFFIXES:
        return UsageError(f"no command `{word}`; did you mean `run {word}`?", fix=_OVERVIEW_FIX)
    meant = _COMMAND_SYNONYMS.get(word) or next(iter(nearest(word, COMMANDS)), "")
    names = (
        [meant] if meant else [c.name for c in load_all_commands() if c.name.endswith(f" {word}")]
    )
    return _unknown("", word, names, _OVERVIEW_FIX)


def explain_subcommand(command: str, word: str, names: Sequence[str]) -> UsageError:
    """Return the error for an unknown subcommand of a command with the subcommands `names`."""
    fix = f"the commands of `{command}` are {', '.join(names)}"
    if word.startswith("-"):
        first = f"{command} {names[0]}"
        return UsageError(
            f"{command}: the option {word} has no command before it",
            fix=f"options come after it: `tvmflow {first} {word} …`; {fix}",
        )
    return _unknown(
        f"{command} ", word, [f"{command} {name}" for name in nearest(word, names)], fix
    )


def explain_option(
    command: str, word: str, known: Sequence[str], list_commands: Callable[[str], Sequence[str]]
) -> UsageError:
    """Return the error for an unknown argument; `list_commands` maps an option to commands that have it."""
    fix = f"`tvmflow help {command}` lists its options"
    option = word.partition("=")[0]
    if not option.startswith("-"):
        return UsageError(f"{command}: unexpected argument '{word}'", fix=fix)
    message = f"{command}: no option {option}"
    synonym = _OPTION_SYNONYMS.get(option, "")
    others = [] if synonym in known else list_commands(option)
    if others:
        names = names_text([f"`{name}`" for name in others], _MAX_COMMANDS)
        return UsageError(f"{message}; {names} {'have' if len(others) > 1 else 'has'} it", fix=fix)
    meant = synonym if synonym in known else next(iter(nearest(option, known)), "")
    hint = f"; did you mean {meant}?" if meant else ""
    return UsageError(message + hint, fix=fix)


def _unknown(prefix: str, word: str, meant: Iterable[str], fix: str) -> UsageError:
    names = " or ".join(f"`{name}`" for name in meant)
    return UsageError(
        f"no command `{prefix}{word}`{f'; did you mean {names}?' if names else ''}", fix=fix
    )


# Python's surrogates for bytes of file names that are not UTF-8.
_FOREIGN_BYTE: Final = re.compile("[\udc80-\udcff]")
_SHOWN: Final = 40


def explain(error: Exception) -> TvmflowError | None:
    """Return the environment problem behind an error; None when it is a bug."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        text, fix = "the current folder no longer exists", "change to another folder, and run again"
        return EnvironmentProblem(text, fix=fix)
    if isinstance(error, OSError):
        return disk_errors.explain(error, folder)
    if isinstance(error, UnicodeEncodeError) and _FOREIGN_BYTE.search(error.object):
        excerpt = error.object[max(0, error.start - _SHOWN) : error.end + _SHOWN]
        text = f"the name of a file or folder is not UTF-8: {excerpt!r}"
        return EnvironmentProblem(text, fix="rename it, or work in another folder")
    # Libraries report a full disk with their own error types.
    return disk_errors.find_disk_problem([folder], str(error))


def report(bug: Exception) -> int:
    """Report an unexpected exception, with the traceback in a file, and return the exit code."""
    details = "".join(traceback.format_exception(bug))
    try:
        # Another user could have placed a link at a predictable name.
        prefix = f"tvmflow-bug-{time.strftime('%Y%m%d-%H%M%S')}-"
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            prefix=prefix,
            suffix=".log",
            delete=False,
        ) as file:
            file.write(details)
        place = f"the details are in {file.name}"
    except OSError:
        place = f"the details could not be saved:\n{details}"
    text = f"a bug in tvmflow: {type(bug).__name__}: {bug}\n  {place}"
    sys.stderr.write(f"tvmflow: {printable_lines(text)}\n")
    return EXIT_BUG
