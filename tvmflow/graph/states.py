"""Attributes for states: which inputs of a model are states, and what a kernel does with a state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tvm import relax

_STATES: Final = "tvmflow.states"

ROLE: Final = "tvmflow.state_role"
"""The attribute of a kernel with its role, one of the constants below."""
ENTER: Final = "enter"
APPEND: Final = "append"
EXIT: Final = "exit"


class GrowingState(NamedTuple):
    """A state: the indices of its input and its output, and the axis along which it grows."""

    input: int
    output: int
    axis: int


def with_states(function: relax.Function, states: Iterable[GrowingState]) -> relax.Function:
    """Return `main` with its growing states as an attribute."""
    entries = [list(state) for state in states]
    return function.with_attr(_STATES, entries) if entries else function


def read_states(function: relax.Function) -> list[GrowingState]:
    """Return the growing states of `main`; empty for a model without any."""
    entries = (function.attrs or {}).get(_STATES, ())
    return [GrowingState(*map(int, entry)) for entry in entries]
