"""Suggestions: the valid names that are most like a name that is not valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 60


def nearest(
    name: str, valid: Iterable[object], *, count: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return up to `count` of the valid names that are most like `name`, the best first."""
    return difflib.get_close_matches(
        name[:_LONGEST], [str(other) for other in valid], n=count, cutoff=cutoff
    )


def did_you_mean(name: str, valid: Iterable[object], *, cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the valid name that is most like `name`, or nothing."""
    names = nearest(name, valid, cutoff=cutoff)
    return f"; did you mean '{names[0]}'?" if names else ""
