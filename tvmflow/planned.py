"""A recipe with all that its plan depends on."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from tvmflow.recipe import LoadedRecipe, Recipe
from tvmflow.targets.resolve import JoinedTarget, ResolvedTarget
from tvmflow.values import InputFile

Target = ResolvedTarget | JoinedTarget


class _Fields(NamedTuple):
    loaded: LoadedRecipe
    stages: tuple[str, ...]
    targets: tuple[Target, ...]
    model_files: tuple[InputFile, ...]
    variant: str = ""


class PlannedRecipe(_Fields):
    """A recipe (or a variant of it) with all that its plan depends on: stages in order, targets resolved, source files named."""

    @cached_property
    def recipe(self) -> Recipe:
        """As it is for all targets."""
        written = self.loaded.recipe
        return written.variant(self.variant) if self.variant else written

    @property
    def joined(self) -> tuple[JoinedTarget, ...]:
        """The targets that are in parts."""
        return tuple(each for each in self.targets if isinstance(each, JoinedTarget))

    def of(self, target: Target | None) -> Recipe:
        """As it is for one target, or part of one: the one place where a stage's recipe comes from."""
        if target is None:
            return self.recipe
        if target.name not in self._of:
            self._of[target.name] = self.recipe.of(target.name)
        return self._of[target.name]

    @cached_property
    def _of(self) -> dict[str, Recipe]:
        # planning asks for each many times, and making one costs as much as all else about a stage
        return {}

    def where(self, target: Target, *loc: str | int) -> str:
        """`file:line:column` of a target in the recipe, or of a part of one, or of something in it."""
        return self.loaded.where("targets", *self._places.get(target.name, ()), *loc)

    @cached_property
    def _places(self) -> dict[str, tuple[str | int, ...]]:
        """Where each target, or part of one, stands among the targets."""
        places: dict[str, tuple[str | int, ...]] = {}
        for index, spec in enumerate(self.loaded.recipe.targets):
            for at, name in enumerate(spec.machines()):
                places.setdefault(name, (index, "parts", at) if spec.parts else (index,))
            places[spec.name] = (index,)
        return places


def machines_of(target: Target) -> tuple[ResolvedTarget, ...]:
    """What code is made for: the target, or those of its parts."""
    return target.machines if isinstance(target, JoinedTarget) else (target,)
