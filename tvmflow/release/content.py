"""The content of a release by name: recipes, targets, outputs, checks, and what is new or gone.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from tvmflow.core.types import Json, Plan
from tvmflow.recipe.lock_file import LockFile
from tvmflow.stages import export, join, verify

StageSettings = tuple[str, str, Mapping[str, Json]]
"""The recipe, the label and the settings of a stage."""


class ContentChange(NamedTuple):
    """The names that only a release has, and those that only the one before it has.

    Names are `RECIPE`, `RECIPE/TARGET`, `RECIPE/TARGET/OUTPUT`, and `RECIPE/TARGET/verify` for a
    target that is verified against a reference. What is inside of one that is named is not.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def list_planned(plan: Plan) -> frozenset[str]:
    """Return the names of everything that a plan delivers."""
    return _list_content((spec.recipe, spec.label, spec.settings) for spec in plan.stages)


def list_locked(lock: LockFile) -> frozenset[str]:
    """Return the names of everything that the release of a lock file has."""
    return _list_content(
        (name, label, stage.settings)
        for name, recipe in lock.recipes.items()
        for label, stage in recipe.stages.items()
    )


def compare_content(current: Collection[str], previous: Collection[str]) -> ContentChange:
    """Return what is new and what is gone, without what is inside of it."""
    added = {name for name in current if name not in previous}
    removed = {name for name in previous if name not in current}
    return ContentChange(_outermost(added), _outermost(removed))


def list_missing(removed: Iterable[str], declared: Collection[str]) -> list[str]:
    """Return the names that are gone and that `release.drop` does not declare.

    It declares them by name, or by what they are in.
    """
    return [name for name in removed if not _is_within(name, declared)]


def _outermost(names: Collection[str]) -> tuple[str, ...]:
    return tuple(
        name for name in sorted(names) if not any(parent in names for parent in _parents(name))
    )


def _is_within(name: str, names: Collection[str]) -> bool:
    return name in names or any(parent in names for parent in _parents(name))


def _parents(name: str) -> Iterator[str]:
    """Yield what a name is in, such as `net/host` and `net` for `net/host/wheel`."""
    yield from (str(parent) for parent in PurePosixPath(name).parents)


def _list_content(stages: Iterable[StageSettings]) -> frozenset[str]:
    rows = [(recipe, *label.partition("/")[::2], settings) for recipe, label, settings in stages]
    joined = {(recipe, target) for recipe, stage, target, _ in rows if stage == join.NAME}
    names: set[str] = set()
    for recipe, stage, target, settings in rows:
        # A part of a model is delivered in the folder of the target that it is a part of.
        whole = target.rpartition(".")[0]
        place = f"{recipe}/{whole if (recipe, whole) in joined else target}"
        if stage in (export.NAME, join.NAME):
            names |= {recipe, place, *(f"{place}/{output}" for output in settings["outputs"])}
        elif stage == verify.NAME and settings["verify"]["against"] != "none":
            names.add(f"{place}/{verify.NAME}")
    return frozenset(names)
