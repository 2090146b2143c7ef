"""The measured file of a release: all figures that differ whenever they are measured.

It holds the comparison with the previous release, too.

Every other file of a release is the same whenever it is made from the same lock file and recipes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from tvmflow.core.errors import RecipeError
from tvmflow.core.schema import ClosedModel, FormatVersion
from tvmflow.core.types import Artifact, Json, Plan
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.report import RunReport, StageReport, compare_libraries
from tvmflow.recipe import Gates
from tvmflow.recipe.lock_file import LockedTarget, LockFile, Measurements, read_lock
from tvmflow.release.gates import Comparison, ContentChange
from tvmflow.release.timing import LatencyPair
from tvmflow.stages import verify

LOCK: Final = "release.lock.yaml"
MEASUREMENTS: Final = "measurements.json"
MEASUREMENTS_PAGE: Final = "measurements.html"
MEASURED_FILES: Final = (MEASUREMENTS, MEASUREMENTS_PAGE)
"""The files of a release that differ whenever it is made; their statement is the only other one."""


class MeasuredTarget(ClosedModel):
    """The measurements of one target.

    Attributes:
        measured: What gates compare.
        previous: The same of the previous release.
        current_s: Latency in seconds, measured alternately with the previous library.
        previous_s: That of the previous library.
        not_timed_reason: Why they were not measured alternately, if they should have been.
        is_same_library: Whether both releases have the same library.
        library_bytes: Size of the library; of all its parts, for a partitioned target.
        is_pareto_optimal: Whether no library for the same machine and inputs is better in all respects.
    """

    measured: Measurements
    previous: Measurements
    current_s: float | None = None
    previous_s: float | None = None
    not_timed_reason: str = ""
    is_same_library: bool = False
    library_bytes: int | None = None
    is_pareto_optimal: bool = False


class MeasurementsFile(ClosedModel):
    """The content of the measured file.

    Attributes:
        measurements: Version of the format: 1.
        compared_with: Name of the previous release; empty if there is none.
        added: What is new since then.
        removed: What is gone since then.
        gates: The limits that every recipe and target had to meet.
        recipes: What was measured, by recipe and target.
        verification: Everything that `verify` measured, by recipe and target.
    """

    measurements: FormatVersion
    compared_with: str
    added: list[str]
    removed: list[str]
    gates: dict[str, float] = Field(default={})
    recipes: dict[str, dict[str, MeasuredTarget]]
    verification: dict[str, dict[str, Json]] = Field(default={})


def make_measurements(
    previous: str,
    comparisons: Sequence[Comparison],
    content: ContentChange,
    gates: Gates,
    plan: Plan,
    artifacts: Mapping[str, Artifact],
) -> MeasurementsFile:
    """Return the measured file of a release.

    `previous` is empty if there is no previous release.
    """
    sizes = {build.name: build.size_bytes for build in _list_builds(plan, artifacts)}
    libraries = compare_libraries(plan, artifacts)
    optimal = {f"{row.recipe}/{row.target}" for row in libraries if row.is_pareto_optimal}
    recipes: dict[str, dict[str, MeasuredTarget]] = {}
    for comparison in comparisons:
        latencies = comparison.latencies
        recipes.setdefault(comparison.recipe, {})[comparison.target] = MeasuredTarget(
            measured=comparison.current,
            previous=comparison.previous,
            current_s=latencies.current_s if latencies else None,
            previous_s=latencies.previous_s if latencies else None,
            not_timed_reason=comparison.not_timed_reason,
            is_same_library=comparison.is_same_library,
            library_bytes=sizes.get(comparison.label),
            is_pareto_optimal=comparison.label in optimal,
        )
    verification: dict[str, dict[str, Json]] = {}
    for spec in plan.stages:
        if spec.stage == verify.NAME and spec.id in artifacts:
            machine = {"machine": spec.settings["target"]}
            facts = {**machine, **artifacts[spec.id].facts}
            verification.setdefault(spec.recipe, {})[spec.target] = facts
    return MeasurementsFile(
        measurements=1,
        compared_with=previous,
        added=list(content.added),
        removed=list(content.removed),
        gates=gates.model_dump(exclude_none=True),
        recipes=recipes,
        verification=verification,
    )


def _list_builds(plan: Plan, artifacts: Mapping[str, Artifact]) -> tuple[Build, ...]:
    return list_builds(RunReport(list_results(plan, artifacts), origins=plan.origins))


def list_results(plan: Plan, artifacts: Mapping[str, Artifact]) -> tuple[StageReport, ...]:
    """Return the report of every stage with a result, as of a run that finds all of them."""
    return tuple(
        StageReport.of_result(spec.id, artifact.facts, reason="unchanged", key=artifact.key)
        for spec in plan.stages
        if (artifact := artifacts.get(spec.id)) is not None
    )


def read_comparisons(file: MeasurementsFile) -> list[Comparison]:
    """Return the comparisons with the previous release that a measured file has."""
    return [
        Comparison(
            recipe=recipe,
            target=name,
            current=target.measured,
            previous=target.previous,
            latencies=None
            if target.current_s is None or target.previous_s is None
            else LatencyPair(target.current_s, target.previous_s),
            not_timed_reason=target.not_timed_reason,
            is_same_library=target.is_same_library,
        )
        for recipe, targets in file.recipes.items()
        for name, target in targets.items()
    ]


def measurements_text(file: MeasurementsFile) -> str:
    """Return the JSON of the measured file."""
    return json.dumps(file.model_dump(), indent=1, sort_keys=True) + "\n"


def read_measurements(folder: Path) -> MeasurementsFile | None:
    """Return the measured file in the folder of a release; None where there is none, as in older releases.

    Raises:
        RecipeError: It cannot be read.
    """
    path = folder / MEASUREMENTS
    if not path.is_file():
        return None
    try:
        return MeasurementsFile.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"{path}: these are not measurements of a release: {reason}",
            fix="restore the folder of the release from a copy",
        ) from error


def without_measurements(lock: LockFile) -> LockFile:
    """Return the lock file of a release: without what `verify` measures in each run.

    The figures of the search stay, because they come with the schedules that it chose.
    """

    def keep_lasting(recipe: str, name: str, target: LockedTarget) -> Measurements:
        measured = target.measured
        return Measurements(coverage=measured.coverage, bytes=measured.bytes)

    return _replace_measured(lock, keep_lasting)


def with_measurements(lock: LockFile, file: MeasurementsFile) -> LockFile:
    """Return the lock file of a release with what is in its measured file."""

    def find_measured(recipe: str, name: str, target: LockedTarget) -> Measurements:
        entry = file.recipes.get(recipe, {}).get(name)
        return entry.measured if entry else target.measured

    return _replace_measured(lock, find_measured)


def read_lock_with_measurements(path: Path) -> LockFile:
    """Return a lock file; that of a release with the measurements that are beside it."""
    lock = read_lock(path).file
    file = read_measurements(path.parent) if path.name == LOCK else None
    return lock if file is None else with_measurements(lock, file)


def _replace_measured(
    lock: LockFile, find: Callable[[str, str, LockedTarget], Measurements]
) -> LockFile:
    recipes = {
        name: recipe.model_copy(
            update={
                "targets": {
                    target_name: target.model_copy(
                        update={"measured": find(name, target_name, target)}
                    )
                    for target_name, target in recipe.targets.items()
                }
            }
        )
        for name, recipe in lock.recipes.items()
    }
    return lock.model_copy(update={"recipes": recipes})
