"""Output of commands: text or JSON lines on stdout, and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from tvmflow.core.codec import to_json
from tvmflow.core.disk_errors import disk_errors, make_folder
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.files import write_output
from tvmflow.core.formatting import printable
from tvmflow.core.named_files import is_file, is_folder
from tvmflow.core.types import Json

_OTHER_FILE: Final = "name another file"


def print_lines(*lines: str) -> None:
    """Print lines with control characters escaped, and flush."""
    for line in lines:
        sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


class _HasJson(Protocol):
    @property
    def json(self) -> bool: ...


class _HasVerbosity(Protocol):
    @property
    def verbosity(self) -> int: ...


class _HasOutput(_HasJson, _HasVerbosity, Protocol): ...


def print_result(value: Json, lines: Iterable[str], options: _HasJson) -> int:
    """Print an answer as one line of JSON, or as lines of text, and return the exit code."""
    if options.json:
        print_json(value)
    else:
        print_lines(*lines)
    return EXIT_OK


def print_notes(options: _HasVerbosity, *lines: str) -> None:
    """Print notes about a command's work, unless `-q` is set."""
    if options.verbosity >= 0:
        print_lines(*lines)


def print_outcome(value: Json, lines: Iterable[str], exit_code: int, options: _HasOutput) -> int:
    """Print a command's results (with `-q`, only those of failures) and return the exit code."""
    if options.json or options.verbosity >= 0 or exit_code:
        print_result(value, lines, options)
    return exit_code


def check_output_file(path: Path | None, inputs: Iterable[str]) -> None:
    """Check that a command may write a file, before it starts long work.

    Raises:
        UsageError: if the path is a folder or one of the command's input files.
    """
    if path is None:
        return
    if is_folder(path):
        raise UsageError(f"{path} is a folder, so no file can be written there", fix=_OTHER_FILE)
    others = [Path(name) for name in inputs]
    if is_file(path) and any(is_file(other) and path.samefile(other) for other in others):
        raise UsageError(f"{path} is read by this command and would be lost", fix=_OTHER_FILE)


def write_file(path: Path, content: bytes | str) -> None:
    """Write an output file atomically, and create its folder.

    Raises:
        StoreError: if the disk is full or not writable.
    """
    make_folder(path.parent)
    with disk_errors(path):
        write_output(path, content)


def print_json(value: Json) -> None:
    """Print a value as one line of JSON; records become objects."""
    sys.stdout.write(json.dumps(to_json(value)) + "\n")
