"""The table of a project: `tvmflow.toml`, or `[tool.tvmflow]` in `pyproject.toml`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.text import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The end of messages of the TOML parser.
_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read_table(
    path: str, content: bytes, prefix: tuple[str, ...], defaults: Mapping[str, str]
) -> dict[str, str] | None:
    """Return the settings in the table at `prefix`, or None; `defaults` lists valid settings."""
    try:
        text = content.decode()
        table: Any = tomllib.loads(text)
    except UnicodeDecodeError:
        raise RecipeError(f"{path}:1:1: is not UTF-8 text; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from None
    for name in prefix:
        table = table.get(name) if isinstance(table, dict) else None
    if table is None:
        return None
    problems = [
        f"{path}:{line}:1: {problem}" for line, problem in _check(text, prefix, table, defaults)
    ]
    if problems:
        names = ", ".join(f'{name} = "{default}"' for name, default in defaults.items())
        raise RecipeError(problems, fix=f"the settings, and their defaults, are: {names}")
    return dict(table)


def _syntax_error(path: str, text: str, message: str) -> RecipeError:
    lines = text.splitlines() or [""]
    line, column = len(lines), len(lines[-1]) + 1
    if (match := _PLACE.search(message)) and match[1]:
        line, column = int(match[1]), int(match[2])
    reason = excerpt(_PLACE.sub("", message))
    return RecipeError(
        f"{path}:{line}:{column}: this is not TOML: {reason}",
        fix='a setting is a name, `=`, and a string in quotes, such as `store = "cache"`',
    )


def _check(
    text: str, prefix: tuple[str, ...], table: object, defaults: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    if not isinstance(table, dict):
        yield _find_line(text, prefix), f"{'.'.join(prefix)} must be a table"
        return
    for name, value in table.items():
        line, field = _find_line(text, (*prefix, name)), excerpt(".".join((*prefix, name)))
        if name not in defaults:
            yield line, f"{field}: there is no such setting{did_you_mean(name, defaults)}"
        elif not isinstance(value, str):
            shown_value = excerpt(repr(value))
            yield line, f"{field}: must be a string, the path of a folder, not {shown_value}"
        elif not value or "\0" in value:
            yield line, f"{field}: {quoted(value)} is not the path of a folder"


def _find_line(text: str, path: tuple[str, ...]) -> int:
    """Return the line number that sets the value at a path; 1 for unusual TOML syntax."""
    current: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.translate(str.maketrans("", "", " \t\"'"))
        if bare.startswith("["):
            current = bare.strip("[").partition("]")[0].split(".")
            if current == [*path]:
                return number
        elif "=" in bare:
            name = [*current, *bare.partition("=")[0].split(".")]
            if name[: len(path)] == [*path]:
                return number
    return 1
