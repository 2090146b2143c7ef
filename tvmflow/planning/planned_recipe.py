"""A recipe with all that its plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from tvmflow.core.types import InputFile
from tvmflow.frontends.base import InputProblem
from tvmflow.planning.recipes import LoadedRecipe
from tvmflow.recipe import Recipe
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

Target = ResolvedTarget | PartitionedTarget


class _Fields(NamedTuple):
    loaded: LoadedRecipe
    stages: tuple[str, ...]
    targets: tuple[Target, ...]
    model_files: tuple[InputFile, ...]
    variant: str = ""
    pipeline: str = ""
    operator_files: tuple[InputFile, ...] = ()
    images: Mapping[str, tuple[str, ...]] = {}


class PlannedRecipe(_Fields):
    """A recipe, or a variant of it, with all that its plan depends on.

    Attributes:
        loaded: The recipe with its positions.
        stages: The stages of its pipeline, in order.
        targets: Its resolved targets.
        model_files: The files of its model.
        variant: The name of the variant; empty for the recipe itself.
        pipeline: The file of the pipeline that takes the place of the recipe's own; empty for none.
        operator_files: The files of its own operators.
        images: The files of each `verify.data` that names images, by their paths in its folder.
    """

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe without per-target overrides."""
        recipe = self.loaded.recipe
        return recipe.for_variant(self.variant) if self.variant else recipe

    def input_loc(self, problem: InputProblem) -> tuple[str, ...]:
        """Return the path of an input that does not fit, in the variant where that sets the field."""
        if self.variant:
            inputs = self.loaded.recipe.variants[self.variant].inputs
            spec = inputs.get(problem.input)
            if spec and (not problem.field or problem.field in spec.model_fields_set):
                return ("variants", self.variant, *problem.loc)
        return problem.loc

    def setting_loc(self, section: str, field: str) -> tuple[str, ...]:
        """Return the path of a setting without per-target overrides, in the variant where that sets it."""
        if self.variant:
            overrides = getattr(self.loaded.recipe.variants[self.variant], section)
            if overrides is not None and field in overrides.model_fields_set:
                return ("variants", self.variant, section, field)
        return (section, field)

    @property
    def partitioned(self) -> tuple[PartitionedTarget, ...]:
        """The targets that have several parts."""
        return tuple(target for target in self.targets if isinstance(target, PartitionedTarget))

    def recipe_for(self, target: Target | None) -> Recipe:
        """Return the recipe with the overrides of a target, or of a part of one."""
        if target is None:
            return self.recipe
        if target.name not in self._recipes:
            self._recipes[target.name] = self.recipe.for_target(target.name)
        return self._recipes[target.name]

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        # Planning reads each many times, and making one takes as long as all else about a stage.
        return {}

    def where(self, target: Target, *loc: str | int) -> str:
        """Return `file:line:column` of a target in the recipe, of a part of one, or of a field in it."""
        return self.loaded.where("targets", *self._positions.get(target.name, ()), *loc)

    def data_position(self, target: Target | None) -> str:
        """Return `file:line:column` of the `verify.data` that a target has."""
        if target and self.recipe_for(target).verify.data != self.recipe.verify.data:
            return self.where(target, "verify", "data")
        return self.loaded.where(*self.setting_loc("verify", "data"))

    @cached_property
    def _positions(self) -> dict[str, tuple[str | int, ...]]:
        """The position of each target, and of each part, in the list of targets."""
        positions: dict[str, tuple[str | int, ...]] = {}
        for index, spec in enumerate(self.loaded.recipe.targets):
            for part_index, name in enumerate(spec.build_targets()):
                part = ("parts", part_index) if spec.parts else ()
                positions.setdefault(name, (index, *part))
            positions[spec.name] = (index,)
        return positions


def resolved_targets(target: Target) -> tuple[ResolvedTarget, ...]:
    """Return the targets that code is built for: the target itself, or its parts."""
    return target.parts if isinstance(target, PartitionedTarget) else (target,)
