"""Output of commands: lines of text and lines of JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from tvmflow.core.formatting import printable
from tvmflow.core.types import Json


def print_lines(*lines: str) -> None:
    """Print lines at once, with the control characters escaped that text from elsewhere may hold."""
    for line in lines:
        sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def print_result(value: Json, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result as one line of JSON, or as lines of text."""
    if as_json:
        print_json(value)
    else:
        print_lines(*lines)


def print_json(value: Json) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
