"""Release gates (limits for every recipe and target), and the measurements and content of releases."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, TypeAlias

from pydantic import Field

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import latency_text
from tvmflow.core.schema import ClosedModel, FormatVersion
from tvmflow.core.types import Artifact, Json, Plan
from tvmflow.engine.builds import list_builds
from tvmflow.engine.report import RunReport, StageReport, compare_libraries
from tvmflow.recipe import Gates, Release
from tvmflow.recipe.lock_file import LockFile, Measurements, read_lock
from tvmflow.release.timing import LatencyPair
from tvmflow.stages import export, join, verify

LOCK: Final = "release.lock.yaml"
MEASUREMENTS: Final = "measurements.json"
MEASUREMENTS_PAGE: Final = "measurements.html"
MEASURED_FILES: Final = (MEASUREMENTS, MEASUREMENTS_PAGE)
"""The files of a release that are not reproducible; their statement is not, either."""


class MeasuredTarget(ClosedModel):
    """The measurements of one target, and those of the previous release.

    `current_s` and `previous_s` are latencies in seconds from an interleaved measurement of both libraries; if they are
    missing, `not_timed_reason` says why. `library_bytes` includes all parts of a partitioned target.
    """

    measured: Measurements
    previous: Measurements
    current_s: float | None = None
    previous_s: float | None = None
    not_timed_reason: str = ""
    is_same_library: bool = False
    library_bytes: int | None = None
    is_pareto_optimal: bool = False

    @property
    def latencies(self) -> LatencyPair | None:
        """Both latencies, if they were measured."""
        if self.current_s is None or self.previous_s is None:
            return None
        return LatencyPair(self.current_s, self.previous_s)


class MeasurementsFile(ClosedModel):
    """The file of measurements of a release.

    `compared_with` is the name of the previous release or "", `gates` holds the limits, `recipes` the measurements by
    recipe and target, and `verification` the documents of `verify`.
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
    comparisons: Sequence[TargetComparison],
    content: ContentChange,
    gates: Gates,
    plan: Plan,
    artifacts: Mapping[str, Artifact],
) -> MeasurementsFile:
    """Return the file of measurements; `previous` is empty for the first release."""
    builds = list_builds(RunReport(list_results(plan, artifacts), origins=plan.origins))
    sizes = {build.name: build.size_bytes for build in builds}
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


def list_results(plan: Plan, artifacts: Mapping[str, Artifact]) -> tuple[StageReport, ...]:
    """Return the report of every stage with a result, as in a run where all are up to date."""
    return tuple(
        StageReport(spec.id, facts=artifact.facts, reason="unchanged", key=artifact.key)
        for spec in plan.stages
        if (artifact := artifacts.get(spec.id)) is not None
    )


def read_comparisons(file: MeasurementsFile) -> list[TargetComparison]:
    """Return the comparisons with the previous release in a file of measurements."""
    return [
        TargetComparison(
            recipe=recipe,
            target=name,
            current=target.measured,
            previous=target.previous,
            latencies=target.latencies,
            not_timed_reason=target.not_timed_reason,
            is_same_library=target.is_same_library,
        )
        for recipe, targets in file.recipes.items()
        for name, target in targets.items()
    ]


def measurements_text(file: MeasurementsFile) -> str:
    """Return the JSON of a file of measurements."""
    return json.dumps(file.model_dump(), indent=1, sort_keys=True) + "\n"


def read_measurements(folder: Path) -> MeasurementsFile | None:
    """Return the file of measurements in a folder, or None; RecipeError if it is damaged."""
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
    """Remove the measurements of `verify`, which are not reproducible, from a lock file."""
    return _replace_measured(
        lock,
        lambda _, __, measured: Measurements(coverage=measured.coverage, bytes=measured.bytes),
    )


def with_measurements(lock: LockFile, file: MeasurementsFile) -> LockFile:
    """Add a release's measurements to its lock file."""

    def find_measured(recipe: str, target: str, measured: Measurements) -> Measurements:
        entry = file.recipes.get(recipe, {}).get(target)
        return entry.measured if entry else measured

    return _replace_measured(lock, find_measured)


def read_lock_with_measurements(path: Path) -> LockFile:
    """Read a lock file; for a release, add the measurements beside it."""
    lock = read_lock(path).file
    file = read_measurements(path.parent) if path.name == LOCK else None
    return lock if file is None else with_measurements(lock, file)


def _replace_measured(
    lock: LockFile, find: Callable[[str, str, Measurements], Measurements]
) -> LockFile:
    recipes = {}
    for name, recipe in lock.recipes.items():
        targets = {
            target_name: target.model_copy(
                update={"measured": find(name, target_name, target.measured)}
            )
            for target_name, target in recipe.targets.items()
        }
        recipes[name] = recipe.model_copy(update={"targets": targets})
    return lock.model_copy(update={"recipes": recipes})


CONTENT_GATE: Final = "content"
"""The gate that is always active: a release drops only names in `release.drop`."""


class TargetComparison(NamedTuple):
    """A recipe and target of a release, compared with the previous release.

    `previous` is empty for a new target. `latencies` are interleaved measurements. Without them, `not_timed_reason` is
    set, or both libraries are the same.
    """

    recipe: str
    target: str
    current: Measurements
    previous: Measurements = Measurements()
    latencies: LatencyPair | None = None
    not_timed_reason: str = ""
    is_same_library: bool = False

    @property
    def label(self) -> str:
        """The recipe and target as `RECIPE/TARGET`."""
        return f"{self.recipe}/{self.target}"

    @property
    def seconds(self) -> float | None:
        """The new library's latency in seconds, from an interleaved measurement if there is one."""
        return self.latencies.current_s if self.latencies else latency_of(self.current)

    @property
    def previous_seconds(self) -> float | None:
        """The previous library's latency in seconds, from an interleaved measurement if there is one."""
        return self.latencies.previous_s if self.latencies else latency_of(self.previous)


class FailedGate(NamedTuple):
    """A gate that a recipe does not pass on a target."""

    label: str
    gate: str
    message: str


def latency_of(measured: Measurements) -> float | None:
    """Return the latency in seconds; None if it was not measured."""
    return None if measured.latency_us is None else measured.latency_us / 1e6


def compare_releases(current: LockFile, previous: LockFile | None) -> list[TargetComparison]:
    """Return every recipe and target of a lock file with its previous measurements."""
    return [
        TargetComparison(name, target, locked.measured, _find_measured(previous, name, target))
        for name, recipe in current.recipes.items()
        for target, locked in recipe.targets.items()
    ]


def _find_measured(lock: LockFile | None, recipe: str, target: str) -> Measurements:
    locked_recipe = lock.recipes.get(recipe) if lock else None
    locked = locked_recipe.targets.get(target) if locked_recipe else None
    return locked.measured if locked else Measurements()


def find_failed_gates(comparisons: Sequence[TargetComparison], gates: Gates) -> list[FailedGate]:
    """Return every gate that a recipe does not pass on a target."""
    return [
        FailedGate(comparison.label, gate, message)
        for comparison in comparisons
        for gate, check in _GATES.items()
        if (limit := getattr(gates, gate)) is not None
        for message in check(comparison, limit)[1]
    ]


def check_content(change: ContentChange, source: str, release: Release) -> list[FailedGate]:
    """Return the removed names that `release.drop` does not declare."""
    return [
        FailedGate(name, CONTENT_GATE, f"it is in {source}, and not in this release")
        for name in list_missing(change.removed, release.drop)
    ]


class CheckedGate(NamedTuple):
    """A gate with its limit, and the value of a recipe and target; None if it is unknown."""

    label: str
    gate: str
    limit: float
    value: float | None
    is_failed: bool


def list_checked_gates(
    comparisons: Sequence[TargetComparison], gates: Mapping[str, float]
) -> list[CheckedGate]:
    """Return every gate with a limit, for each recipe and target."""
    return [
        CheckedGate(comparison.label, gate, gates[gate], value, is_failed=bool(problems))
        for gate, check in _GATES.items()
        if gate in gates
        for comparison in comparisons
        for value, problems in [check(comparison, gates[gate])]
    ]


# ---------------------------------------------------------------- the value and the problems of each gate

_Checked: TypeAlias = tuple[float | None, list[str]]


def _check_minimum(field: str, comparison: TargetComparison, limit: float) -> _Checked:
    value: float | None = getattr(comparison.current, field)
    if value is None:
        is_lost = getattr(comparison.previous, field) is not None
        return None, [f"{field} is no longer measured"] if is_lost else []
    return value, [f"{field} {value:.2%}, below {limit:.2%}"] if value < limit else []


def _check_accuracy_drop(comparison: TargetComparison, limit: float) -> _Checked:
    accuracy, previous = comparison.current.accuracy, comparison.previous.accuracy
    if accuracy is None or previous is None:
        return None, [] if previous is None else ["accuracy is no longer measured"]
    drop = previous - accuracy
    text = f"accuracy {accuracy:.2%}, {drop:.2%} below the {previous:.2%} of the previous release"
    return drop, [text] if drop > limit else []


def _check_slowdown(comparison: TargetComparison, limit: float) -> _Checked:
    seconds, previous = comparison.seconds, comparison.previous_seconds
    if seconds is None or previous is None:
        is_lost = previous is not None and not comparison.is_same_library
        return None, ["latency is no longer measured"] if is_lost else []
    if comparison.is_same_library:
        return 0.0, []
    slowdown = seconds / previous - 1
    source = "measured interleaved" if comparison.latencies else "as recorded"
    text = (
        f"latency {latency_text(seconds)}, {slowdown:.1%} slower than the previous release "
        f"({latency_text(previous)}, {source})"
    )
    return slowdown, [text] if seconds > previous * (1 + limit) else []


def _check_growth(comparison: TargetComparison, limit: float) -> _Checked:
    sizes, previous = comparison.current.bytes, comparison.previous.bytes
    growths = {name: sizes[name] / previous[name] - 1 for name in sizes if previous.get(name)}
    problems = [
        f"{name} has {sizes[name]:,} bytes, {growth:.1%} more than the previous release"
        for name, growth in growths.items()
        if sizes[name] > previous[name] * (1 + limit)
    ]
    return max(growths.values(), default=None), problems


def _check_size(comparison: TargetComparison, limit: float) -> _Checked:
    sizes = comparison.current.bytes
    large = [name for name in sizes if sizes[name] > limit]
    problems = [f"{name} has {sizes[name]:,} bytes, more than {limit:,}" for name in large]
    return max(sizes.values(), default=None), problems


_GATES: Final[Mapping[str, Callable[[TargetComparison, float], _Checked]]] = {
    "min_accuracy": partial(_check_minimum, "accuracy"),
    "max_accuracy_drop": _check_accuracy_drop,
    "min_coverage": partial(_check_minimum, "coverage"),
    "max_slowdown": _check_slowdown,
    "max_growth": _check_growth,
    "max_bytes": _check_size,
}


# ---------------------------------------------------------------- content


class ContentChange(NamedTuple):
    """Names that a release adds, and names that it lacks, relative to its predecessor.

    Names are `RECIPE`, `RECIPE/TARGET`, `RECIPE/TARGET/OUTPUT`, and `RECIPE/TARGET/verify` for a target that is
    verified against a reference. A name includes everything below it.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def list_planned(plan: Plan) -> frozenset[str]:
    """Return the names of everything that a plan delivers."""
    return _list_content((spec.recipe, spec.label, spec.settings) for spec in plan.stages)


def list_locked(lock: LockFile) -> frozenset[str]:
    """Return the names of everything that a lock file's release contains."""
    return _list_content(
        (name, label, stage.settings)
        for name, recipe in lock.recipes.items()
        for label, stage in recipe.stages.items()
    )


def compare_content(current: Collection[str], previous: Collection[str]) -> ContentChange:
    """Return the outermost added and removed names."""
    added, removed = set(current) - set(previous), set(previous) - set(current)
    return ContentChange(_outermost(added), _outermost(removed))


def list_missing(removed: Iterable[str], declared: Collection[str]) -> list[str]:
    """Return the removed names that `release.drop` lists neither directly nor through a parent."""
    return [name for name in removed if name not in declared and not _is_inside(name, declared)]


def _outermost(names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in sorted(names) if not _is_inside(name, names))


def _is_inside(name: str, names: Collection[str]) -> bool:
    """Return whether `names` contains a parent of a name: `net/host` or `net` for `net/host/wheel`."""
    return any(str(parent) in names for parent in PurePosixPath(name).parents)


def _list_content(stages: Iterable[tuple[str, str, Mapping[str, Json]]]) -> frozenset[str]:
    """Return the names of everything delivered by stages, given by recipe, label and settings."""
    rows = [(recipe, *label.partition("/")[::2], settings) for recipe, label, settings in stages]
    joined = {(recipe, target) for recipe, stage, target, _ in rows if stage == join.NAME}
    names: set[str] = set()
    for recipe, stage, target, settings in rows:
        # A part is delivered in the folder of its partitioned target.
        whole = target.rpartition(".")[0]
        place = f"{recipe}/{whole if (recipe, whole) in joined else target}"
        if stage in (export.NAME, join.NAME):
            names |= {recipe, place, *(f"{place}/{output}" for output in settings["outputs"])}
        elif stage == verify.NAME and settings["verify"]["against"] != "none":
            names.add(f"{place}/{verify.NAME}")
    return frozenset(names)
