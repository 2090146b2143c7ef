"""Suggestions: the valid names that are most like a name that is not valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_LONGEST = 60


def nearest(
    name: str, valid: Iterable[object], *, count: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return up to `count` of the valid names that are most like `name` in any case, the best first."""
    # most command lines and recipes have no mistake
    import difflib

    spellings = {str(other).lower(): str(other) for other in valid}
    matches = difflib.get_close_matches(name[:_LONGEST].lower(), spellings, n=count, cutoff=cutoff)
    return [spellings[match] for match in matches]


def did_you_mean(
    name: str,
    valid: Iterable[object],
    *,
    cutoff: float = 0.6,
    synonyms: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return `; did you mean 'x'?` for the valid name that is most like `name`, or nothing.

    `synonyms` are the valid names for what others call them, in lower case.
    """
    names = (synonyms or {}).get(name.lower()) or nearest(name, valid, cutoff=cutoff)
    quoted = " or ".join(f"'{other}'" for other in names)
    return f"; did you mean {quoted}?" if names else ""
