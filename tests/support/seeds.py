"""Cases of tests, divided among the suites."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(default: int, slow: int, fuzz: int) -> list[Any]:
    """Return seeds to parametrize a test with.

    Args:
        default: The number of seeds of the default tests, which are the first.
        slow: The seed before which those of slow tests end.
        fuzz: The seed before which those of `make test-fuzz` end.
    """
    return [
        *range(default),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(default, slow)),
        *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in range(slow, fuzz)),
    ]


def one_of_many(case: Any, is_kept: bool) -> Any:
    """Return a case of a long test: one that is not kept is for the night."""
    return case if is_kept else pytest.param(case, marks=pytest.mark.nightly)
