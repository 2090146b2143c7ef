"""Delivered targets: the files that one recipe delivers for one target, and the stages behind them."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from tvmflow.core.types import STATEMENT_SUFFIX, Artifact, Delivery, Plan, RecipeOrigin, StageSpec

BOM_SUFFIX = ".cdx.json"
MEASUREMENTS_SUFFIX = ".measurements" + STATEMENT_SUFFIX

README = "README.md"

MEASURED_FILES = ("measurements.json",)
"""Delivered files with figures that differ whenever they are measured; all other files are reproducible."""


class SidecarPaths(NamedTuple):
    """The paths of the sidecar files of a target: two statements, the bill of materials, and the README."""

    statement: str
    bom: str
    measurements: str
    readme: str


class DeliveredTarget(NamedTuple):
    """The delivered files of one recipe for one target, and every stage behind them.

    `files` are names in the folder with their sha256, `stages` are in the order of the plan,
    `artifacts` has their results by stage id, and `origin` says where the recipe is.
    """

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    stages: tuple[StageSpec, ...]
    artifacts: Mapping[str, Artifact]
    origin: RecipeOrigin | None = None

    def sidecar_paths(self, dist: str) -> SidecarPaths:
        """Return the paths of the sidecar files."""
        folder = os.path.join(dist, self.recipe, self.target)
        base = os.path.join(folder, self.recipe)
        return SidecarPaths(
            base + STATEMENT_SUFFIX,
            base + BOM_SUFFIX,
            base + MEASUREMENTS_SUFFIX,
            os.path.join(folder, README),
        )

    @property
    def reproducible_files(self) -> tuple[tuple[str, str], ...]:
        """The files that every run with the same lock file gives."""
        return tuple(file for file in self.files if file[0] not in MEASURED_FILES)

    @property
    def measured_files(self) -> tuple[tuple[str, str], ...]:
        """The files with figures that differ whenever they are measured."""
        return tuple(file for file in self.files if file[0] in MEASURED_FILES)


def list_delivered_targets(plan: Plan, artifacts: Mapping[str, Artifact]) -> list[DeliveredTarget]:
    """Return the targets of every recipe whose deliveries are all present and, if required, verified."""
    groups: dict[tuple[str, str], list[Delivery]] = {}
    for delivery in plan.deliveries:
        groups.setdefault((delivery.recipe, delivery.target), []).append(delivery)
    positions = {spec.id: index for index, spec in enumerate(plan.stages)}
    origins = {origin.recipe: origin for origin in plan.origins}
    targets: list[DeliveredTarget] = []
    for (recipe, target), deliveries in groups.items():
        makers = {delivery.stage_id for delivery in deliveries}
        gates = {delivery.verified_by for delivery in deliveries if delivery.verified_by}
        if not makers | gates <= artifacts.keys():
            continue
        files: list[tuple[str, str]] = []
        for delivery in deliveries:
            digests = delivery.digests(artifacts)
            files += [(delivered, digests[stored]) for stored, delivered in delivery.files]
        if files:
            stages = _with_needs(makers | gates, plan.stages, positions)
            origin = origins.get(recipe)
            targets.append(
                DeliveredTarget(
                    recipe=recipe,
                    target=target,
                    files=tuple(sorted(files)),
                    stages=stages,
                    artifacts=artifacts,
                    origin=origin,
                )
            )
    return targets


def _with_needs(
    ids: set[str], stages: tuple[StageSpec, ...], positions: Mapping[str, int]
) -> tuple[StageSpec, ...]:
    """Return the stages with these ids and all that they need, directly or not, in the order of the plan."""
    needed: set[int] = set()
    pending = list(ids)
    # Scanning the whole plan for every target would take quadratic time.
    while pending:
        position = positions[pending.pop()]
        if position not in needed:
            needed.add(position)
            pending += [need.stage_id for need in stages[position].needs]
    return tuple(stages[position] for position in sorted(needed))
