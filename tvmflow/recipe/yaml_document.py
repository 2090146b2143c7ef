"""A YAML document as plain values, with the position of each value and the problems found in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Json

Loc = tuple[str | int, ...]
"""The path of a value: field names and indices in lists, as pydantic has it."""

Position = tuple[int, int]
"""Line and column, counted from 1."""

UNREADABLE: Final[Any] = object()
"""The value in place of one that could not be read and has been reported."""


class Problem(NamedTuple):
    """A mistake in a document, with its position."""

    line: int
    column: int
    text: str


class Document(NamedTuple):
    """A YAML document: its value and the position of each part of it.

    Attributes:
        path: The file.
        value: Plain values; `UNREADABLE` where something could not be read.
        positions: Path of each value -> position.
        name_positions: Path of each field -> position of its name.
        scalars: Path of each scalar -> its text in the file.
        problems: Mistakes that have already been found.
        unreadable: Paths of the values and mappings that these mistakes leave in doubt.
    """

    path: Path
    value: Json
    positions: dict[Loc, Position]
    name_positions: dict[Loc, Position]
    scalars: dict[Loc, str]
    problems: tuple[Problem, ...] = ()
    unreadable: frozenset[Loc] = frozenset()

    def value_at(self, *loc: str | int) -> Json:
        """Return the value at a path, or None when there is none."""
        value = self.value
        for step in loc:
            if isinstance(value, list) and isinstance(step, int):
                value = value[step] if step < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def where(self, *loc: str | int) -> str:
        """Return `file:line:column` of a value, or of the nearest existing value around it."""
        line, column = self.position(*loc)
        return f"{self.path}:{line}:{column}"

    def position(self, *loc: str | int) -> Position:
        """Return the position of a value, or of the nearest existing value around it."""
        enclosing = (self.positions.get(loc[:length]) for length in range(len(loc), -1, -1))
        return next((position for position in enclosing if position is not None), (1, 1))

    def name_position(self, *loc: str | int) -> Position:
        """Return the position of a field's name."""
        return self.name_positions.get(loc) or self.position(*loc)

    def problem(self, text: str, *loc: str | int) -> Problem:
        """Return a problem with the value at a path: `field.path: text`."""
        return Problem(*self.position(*loc), f"{dotted(loc)}: {text}" if loc else text)

    def error(self, problems: Iterable[Problem], *, fix: str = "") -> RecipeError:
        """Return the error with all of these problems, in the order of their positions."""
        lines = [f"{self.path}:{p.line}:{p.column}: {p.text}" for p in sorted(set(problems))]
        return RecipeError(lines, fix=fix)


def dotted(loc: Loc) -> str:
    """Return a path as messages show it: `inputs.data.shape`."""
    return excerpt(".".join(str(step) for step in loc))
