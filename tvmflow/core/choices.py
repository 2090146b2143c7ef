"""Choices: how an operator is computed where lowering has alternatives, by a rule or by measurement.

A choice is a small JSON object such as `{"winograd": 4}` or `{"rows": 258, "columns": 512}`. Ledgers, packs and lock
files of anybody may hold some, so that only the listed ones are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.types import Json

WINOGRAD: Final = "winograd"
"""The size of a tile of a Winograd convolution (see `tile_size`); 0 for a direct one."""

DIRECT: Final = 0

ROWS: Final = "rows"
COLUMNS: Final = "columns"
"""The rows and columns to which a matrix product is padded, so that register tiles divide it."""

_MAX_OPERATOR: Final = 400
# Tiles from this on have two digits, the rows and the columns: 42 is 4×2. Smaller ones are square.
_TWO_DIGITS: Final = 10

WINOGRAD_ERRORS: Final[Mapping[int, float]] = {DIRECT: 1e-6, 2: 1e-6, 42: 4e-6, 4: 8e-6}
"""The largest error of a float32 convolution, relative to its largest result, by the size of its tile.

They are those of 256 channels of random numbers, whose sums are added up one by one.
"""

_EXTENTS: Final = range(1, 1 << 31)
_KINDS: Final[Sequence[Mapping[str, Collection[int]]]] = (
    {WINOGRAD: WINOGRAD_ERRORS},
    {ROWS: _EXTENTS, COLUMNS: _EXTENTS},
)
"""The kinds of choices."""

Choice = Mapping[str, int]
"""The kind of choice -> the alternative."""

Choices = Mapping[str, Choice]
"""The operators of a model, as `Operator.text` describes them, and the choice for each."""


class Operator(NamedTuple):
    """An operator of a model that lowering has alternatives for.

    Attributes:
        text: Its description: the same for equal operators of all models.
        nodes: The bindings of the imported `main` that it came from, by index.
        by_rule: The choice that is estimated to be fastest.
        alternatives: All choices that are possible, that one included, ranked by estimated cost.
        weight_bytes: The size of the weights for each of the alternatives.
    """

    text: str
    nodes: frozenset[int]
    by_rule: Choice
    alternatives: tuple[Choice, ...]
    weight_bytes: tuple[int, ...]

    def count_added_bytes(self, choice: Choice) -> int:
        """Return by how much a choice makes the weights larger than they are by rule; 0 if it does not."""
        sizes = dict(zip(map(choice_text, self.alternatives), self.weight_bytes, strict=True))
        return max(sizes[choice_text(choice)] - sizes[choice_text(self.by_rule)], 0)


def tile_size(tile: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of a Winograd convolution.

    >>> tile_size(4), tile_size(42)
    ((4, 4), (4, 2))
    """
    return (tile, tile) if tile < _TWO_DIGITS else divmod(tile, _TWO_DIGITS)


def choice_text(choice: Choice) -> str:
    """Return the one spelling of a choice.

    >>> choice_text({"winograd": 4})
    '{"winograd":4}'
    """
    return canonical(dict(choice)).decode()


def choice_key(operator: str) -> str:
    """Return the key under which a ledger keeps the choices that were measured for an operator."""
    return digest_of({"operator": operator})


def find_problem(choice: Json) -> str:
    """Return why a value is not a choice that tvmflow makes; empty for one that is.

    >>> find_problem({"winograd": 4}), find_problem({"winograd": 5})
    ('', 'it is not a choice that this version of tvmflow makes')
    """
    for kind in _KINDS if isinstance(choice, dict) else ():
        if choice.keys() == kind.keys() and all(
            type(value) is int and value in kind[name] for name, value in choice.items()
        ):
            return ""
    return "it is not a choice that this version of tvmflow makes"


def find_problem_of_choices(choices: Json) -> str:
    """Return why a value is not a mapping of operators to choices; empty for one that is."""
    if not isinstance(choices, dict):
        return "it is not a mapping of operators to choices"
    for operator, choice in choices.items():
        if not isinstance(operator, str) or len(operator) > _MAX_OPERATOR:
            return "an operator is not described in one line"
        if problem := find_problem(choice):
            return problem
    return ""


def is_within_tolerance(choice: Choice, rtol: float | None) -> bool:
    """Return whether the error of a choice is well below the `rtol` of a recipe, if it has one."""
    return rtol is None or 10 * WINOGRAD_ERRORS[choice.get(WINOGRAD, DIRECT)] <= rtol


def describe_choice(choice: Choice) -> str:
    """Return a choice for people."""
    if ROWS in choice:
        return f"computed as {choice[ROWS]}×{choice[COLUMNS]}"
    rows, columns = tile_size(choice[WINOGRAD])
    return f"Winograd with tiles of {rows}×{columns}" if rows else "direct"
