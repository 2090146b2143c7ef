"""Choices between alternative implementations of an operator, made by a rule or by measurement.

A choice is a small JSON object such as `{"winograd": 4}` or `{"rows": 258, "columns": 512}`. Ledgers, packs and lock
files may come from anybody, so only known choices are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.types import Json

WINOGRAD: Final = "winograd"
"""The output tile of a Winograd convolution (see `tile_size`); 0 for a direct convolution."""

DIRECT: Final = 0

ROWS: Final = "rows"
COLUMNS: Final = "columns"
"""The padded rows and columns of a matmul, multiples of the register tile."""

_MAX_OPERATOR: Final = 400
# A two-digit tile has its rows and columns as digits: 42 is 4×2. A one-digit tile is square.
_TWO_DIGITS: Final = 10

WINOGRAD_ERRORS: Final[Mapping[int, float]] = {DIRECT: 1e-6, 2: 1e-6, 42: 4e-6, 4: 8e-6}
"""Winograd tile -> largest error of a float32 convolution, relative to its largest result.

Measured with 256 channels of random values and sequential summation.
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
"""`Operator.text` -> the choice for this operator."""


class Operator(NamedTuple):
    """An operator of a model that lowering can implement in several ways.

    Attributes:
        text: Description, which equal operators of all models share.
        nodes: Indices of the operator's bindings in the imported `main`.
        by_rule: Choice with the lowest estimated cost.
        alternatives: All possible choices, including `by_rule`, ranked by estimated cost.
        weight_bytes: Size of the weights for each alternative.
    """

    text: str
    nodes: frozenset[int]
    by_rule: Choice
    alternatives: tuple[Choice, ...]
    weight_bytes: tuple[int, ...]

    def count_added_bytes(self, choice: Choice) -> int:
        """Return how many bytes a choice adds to the weights, compared with the rule's choice."""
        sizes = dict(zip(map(choice_text, self.alternatives), self.weight_bytes, strict=True))
        return max(sizes[choice_text(choice)] - sizes[choice_text(self.by_rule)], 0)


def tile_size(tile: int) -> tuple[int, int]:
    """Return the rows and columns of a Winograd tile.

    >>> tile_size(4), tile_size(42)
    ((4, 4), (4, 2))
    """
    return (tile, tile) if tile < _TWO_DIGITS else divmod(tile, _TWO_DIGITS)


def choice_text(choice: Choice) -> str:
    """Return a choice as canonical JSON.

    >>> choice_text({"winograd": 4})
    '{"winograd":4}'
    """
    return canonical(dict(choice)).decode()


def choice_key(operator: str) -> str:
    """Return the ledger key of an operator's measured choices."""
    return digest_of({"operator": operator})


def find_problem(choice: Json) -> str:
    """Return why a value is not a valid choice, or an empty string.

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
    """Return why a value is not a mapping of operators to choices, or an empty string."""
    if not isinstance(choices, dict):
        return "it is not a mapping of operators to choices"
    for operator, choice in choices.items():
        if not isinstance(operator, str) or len(operator) > _MAX_OPERATOR:
            return "an operator is not described in one line"
        if problem := find_problem(choice):
            return problem
    return ""


def is_within_tolerance(choice: Choice, rtol: float | None) -> bool:
    """Return whether the error of a choice is at most a tenth of `rtol`; True without `rtol`."""
    return rtol is None or 10 * WINOGRAD_ERRORS[choice.get(WINOGRAD, DIRECT)] <= rtol


def describe_choice(choice: Choice) -> str:
    """Return a choice as text for reports."""
    if ROWS in choice:
        return f"computed as {choice[ROWS]}×{choice[COLUMNS]}"
    rows, columns = tile_size(choice[WINOGRAD])
    return f"Winograd with tiles of {rows}×{columns}" if rows else "direct"
