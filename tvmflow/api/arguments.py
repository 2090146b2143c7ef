"""Arguments of Python calls: what is wrong with one is said before anything runs."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable

from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import quoted


def check_recipes(recipes: Iterable[object], kind: type) -> None:
    """Check that each is a recipe (of the class `kind`), or names its file.

    Raises:
        UsageError: when one is something else, such as a list of them.
    """
    for recipe in recipes:
        if not isinstance(recipe, (kind, str, os.PathLike)):
            raise UsageError(
                f"a {type(recipe).__name__} is neither a recipe nor the path of one",
                fix="tvmflow.plan('A.yaml', 'B.yaml')",
            )


def check_names(**arguments: object) -> None:
    """Check that each argument is a sequence of names.

    Raises:
        UsageError: when one is a string, which is a sequence of letters, or something else.
    """
    for argument, names in arguments.items():
        if isinstance(names, str):
            raise UsageError(
                f"{argument}={quoted(names)} is a string, not a list of names",
                fix=f"{argument}=[{quoted(names)}]",
            )
        if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{argument}={names!r} is not a list of names")


def check_texts(**arguments: object) -> None:
    """Check that each argument is None, or a name or a path that is not empty.

    Raises:
        UsageError: when one is something else.
    """
    for argument, text in arguments.items():
        if text is not None and (not isinstance(text, str | os.PathLike) or not os.fspath(text)):
            raise UsageError(f"{argument}={text!r} is neither a name nor a path")


def check_limits(jobs: object, stage_timeout_s: object = None, stage_memory: object = None) -> None:
    """Check the limits of a run.

    Raises:
        UsageError: when one is not a number, or not in its range.
    """
    if not _is_integer_from(1, jobs):
        raise UsageError(f"jobs={jobs!r} is not a whole number from 1")
    if stage_timeout_s is not None and not (
        isinstance(stage_timeout_s, int | float) and 0 < stage_timeout_s < math.inf
    ):
        raise UsageError(f"stage_timeout_s={stage_timeout_s!r} is not a number of seconds above 0")
    if stage_memory is not None and not _is_integer_from(0, stage_memory):
        raise UsageError(
            f"stage_memory={stage_memory!r} is not a whole number of bytes",
            fix="stage_memory=4 << 30",
        )


def _is_integer_from(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
