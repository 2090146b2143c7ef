"""The comparison of two runs, releases, lock files or deliveries: what became better or worse, and what changed."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core.documents import Unreadable, read_file, read_json
from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import latency_text, size_text
from tvmflow.core.keys import list_changes
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Json
from tvmflow.engine.builds import Build, list_builds, read_kernel_times
from tvmflow.engine.headline import verdict_text
from tvmflow.engine.report import BAD_FACTS, INCOMPLETE, RunReport, StageReport
from tvmflow.engine.run_records import RunRecord, read_run
from tvmflow.recipe.lock_file import LockFile
from tvmflow.release.lock_diff import Change, diff_locks
from tvmflow.release.measurements import (
    LOCK,
    MEASUREMENTS,
    read_lock_with_measurements,
    read_measurements,
)
from tvmflow.stages._base import Facts
from tvmflow.store.local import LocalStore

# Beyond so many standard deviations of both measurements, a difference is no noise.
_DEVIATIONS: Final = 2.0
# The speed of a machine differs by this from one day to the next.
_DRIFT: Final = 0.02
_LIBRARIES: Final = (".so", ".dylib", ".dll", ".wasm")
# What `diff` of lock files says of measurements is among the figures.
_MEASURED: Final = frozenset({"latency", "accuracy", "coverage", "error"})
# Figures whose relative change is shown.
_RELATIVE: Final = ("latency", "untuned", "library", "files")
_COSTS: Final = ("latency", "library", "files")
_EVERYWHERE: Final = "everywhere"


class LatenciesInTurns(NamedTuple):
    """The latencies of a library and of its predecessor in another release, in seconds."""

    release: str
    before_s: float
    after_s: float


class Side(NamedTuple):
    """One side of a comparison.

    Attributes:
        name: The name for people: `run 1rywbth`, `release releases/1.0`.
        builds: The builds by name.
        lock: The lock file; None for a run or a delivery.
        run: The record of the run; None for the others.
        release: The name of the release, as that of its folder; empty for the others.
        in_turns: The latencies of libraries that a release measured alternately with those of another one.
        kernels: The seconds that each kernel takes in one call of a library, by the name of the build.
    """

    name: str
    builds: Mapping[str, Build]
    lock: LockFile | None = None
    run: RunRecord | None = None
    release: str = ""
    in_turns: Mapping[str, LatenciesInTurns] = MappingProxyType({})
    kernels: Mapping[str, Mapping[str, float]] = MappingProxyType({})


class Figure(NamedTuple):
    """A figure of a build on both sides.

    Attributes:
        build: The name of the build.
        what: `latency`, `library` and `files` (seconds and bytes, less is better), `untuned`, `error`,
            `accuracy`, `result`, or `tuned kernels`.
        before: The value on the first side; None when it is not known.
        after: The same on the second side.
        text: Both for people.
        is_noise: The difference lies within the noise of both measurements.
    """

    build: str
    what: str
    before: float | str | None
    after: float | str | None
    text: str
    is_noise: bool = False

    @property
    def change(self) -> float | None:
        """The relative change: 0.1 is 10 % more; None where there is none."""
        if isinstance(self.before, (int, float)) and isinstance(self.after, (int, float)):
            return self.after / self.before - 1 if self.before else None
        return None


class Comparison(NamedTuple):
    """The comparison of two sides.

    Attributes:
        before: The name of the first side.
        after: The name of the second side.
        figures: What is measured of the builds that both have.
        changes: What else changed: builds, inputs, settings, kernels, packages.
    """

    before: str
    after: str
    figures: tuple[Figure, ...]
    changes: tuple[Change, ...]

    def list_regressions(self, percent: float) -> list[Figure]:
        """Return what became worse: latency or size by more than a percentage, or a library that is no longer verified."""
        return [figure for figure in self.figures if _is_regression(figure, percent / 100)]


def _is_regression(figure: Figure, limit: float) -> bool:
    if figure.what == "result":
        return figure.before == "verified" and figure.after != "verified"
    is_cost = figure.what in _COSTS and not figure.is_noise
    return is_cost and figure.change is not None and figure.change > limit


# ---------------------------------------------------------------- sides


def load_side(name: str, store: LocalStore) -> Side:
    """Return what a command line names: a release's folder, a lock file, a folder of deliveries, or a run.

    Raises:
        UsageError: There is nothing of this name.
        TvmflowError: It cannot be read.
    """
    path = Path(name)
    if (path / LOCK).is_file():
        return _read_release(f"release {name}", path)
    if path.is_file():
        return _read_lock(f"lock file {name}", path)
    if path.is_dir():
        return _read_delivery(name, path)
    return make_side(read_run(store, name))


def make_side(run: RunRecord) -> Side:
    """Return what a run has for a comparison."""
    kernels = {
        f"{stage.recipe}/{stage.target}": read_kernel_times(stage.facts)
        for stage in run.stages
        if stage.stage == "verify"
    }
    builds = {build.name: build for build in run.builds}
    return Side(f"run {run.id}", builds, run=run, kernels=kernels)


def _read_release(name: str, folder: Path) -> Side:
    """Return what is in the folder of a release: its lock file with all that it measured."""
    side = _read_lock(name, folder / LOCK)._replace(release=folder.resolve().name)
    file = read_measurements(folder)
    if file is None:
        return side
    builds, in_turns, kernels = dict(side.builds), {}, {}
    for recipe, targets in file.recipes.items():
        for target, measured in targets.items():
            facts = file.verification.get(recipe, {}).get(target) or {}
            build = _make_build(recipe, target, facts, folder / MEASUREMENTS)
            kernels[build.name] = read_kernel_times(facts)
            locked = side.builds.get(build.name, build)
            builds[build.name] = build._replace(
                size_bytes=measured.library_bytes or locked.size_bytes,
                kernels=locked.kernels,
                tuned_kernels=locked.tuned_kernels,
            )
            if measured.current_s and measured.previous_s:
                pair = (file.compared_with, measured.previous_s, measured.current_s)
                in_turns[build.name] = LatenciesInTurns(*pair)
    return side._replace(builds=builds, in_turns=in_turns, kernels=kernels)


def _read_lock(name: str, path: Path) -> Side:
    lock = read_lock_with_measurements(path)
    builds = {}
    for recipe_name, recipe in lock.recipes.items():
        for target_name, target in recipe.targets.items():
            measured = target.measured
            latency_us = measured.latency_us
            build = Build(
                recipe_name,
                target_name,
                error=measured.max_abs_error,
                accuracy=measured.accuracy,
                latency_s=None if latency_us is None else latency_us / 1e6,
                size_bytes=_add_sizes(measured.bytes.items()) or None,
                kernels=len(target.kernels) or None,
                tuned_kernels=len(target.choice) if target.kernels else None,
            )
            builds[build.name] = build
    return Side(name, builds, lock=lock)


def _read_delivery(name: str, folder: Path) -> Side:
    """Return what is in `dist`, in the folder of a recipe in it, or in that of a target."""
    paths = [path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{MEASUREMENTS}")]
    if not paths:
        raise UsageError(
            f"{name}: no {MEASUREMENTS} is in this folder, nor in the folders of targets in it",
            fix="name the folder of a release, or one that `tvmflow run` delivered to",
        )
    builds, kernels = {}, {}
    for path in sorted(paths):
        build, facts = _read_delivered_build(path)
        builds[build.name], kernels[build.name] = build, read_kernel_times(facts)
    return Side(f"delivery {name}", builds, kernels=kernels)


def _read_delivered_build(path: Path) -> tuple[Build, Facts]:
    folder = path.absolute().parent
    try:
        facts = read_json(read_file(path))
    except Unreadable as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    build = _make_build(folder.parent.name, folder.name, facts, path)
    return build._replace(size_bytes=_find_library_size(folder)), facts


def _make_build(recipe: str, target: str, facts: Json, path: Path) -> Build:
    """Return what `verify` says of a library; `path` is where that was read, for messages."""
    stage = StageReport(f"{recipe}:verify/{target}", "hit", "", 0.0, facts)
    try:
        (build,) = list_builds(RunReport((stage,), (), (), 0.0))
    except BAD_FACTS as error:
        raise UsageError(f"{path} are not the measurements of a library") from error
    for warning in build.warnings:
        if warning.startswith(INCOMPLETE):
            raise UsageError(f"{path} are not the measurements of a library: {warning}")
    return build


def _add_sizes(files: Iterable[tuple[str, int]]) -> int:
    """Return the bytes of the libraries among files, from their names and sizes."""
    return sum(size for name, size in files if name.endswith(_LIBRARIES))


def _find_library_size(folder: Path) -> int | None:
    """Return the size of the library in a bundle; None without a bundle."""
    for bundle in sorted(folder.glob("*.tvmflow")):
        try:
            with zipfile.ZipFile(bundle) as archive:
                entries = [(entry.filename, entry.file_size) for entry in archive.infolist()]
        except (OSError, zipfile.BadZipFile):
            continue
        return _add_sizes(entries) or None
    return None


# ---------------------------------------------------------------- differences


def compare_sides(before: Side, after: Side, store: LocalStore) -> Comparison:
    """Return all differences of two sides.

    Args:
        before: The first side.
        after: The second side.
        store: The store, which has what the stages of runs depended on.
    """
    common = [name for name in after.builds if name in before.builds]
    figures = [
        figure
        for name in common
        for figure in _list_figures(before.builds[name], after.builds[name])
    ]
    figures = [_measured_in_turns(figure, before, after) for figure in figures]
    changes = [Change(name, "build", "added") for name in after.builds if name not in common]
    changes += [Change(name, "build", "removed") for name in before.builds if name not in common]
    if before.lock and after.lock:
        figures += _list_file_sizes(before, after)
        differences = diff_locks(before.lock, after.lock)
        changes += [change for change in differences if change.what not in _MEASURED]
    if before.run and after.run:
        changes += _compare_runs(before.run, after.run, store)
    return Comparison(before.name, after.name, tuple(figures), tuple(changes))


def _list_figures(before: Build, after: Build) -> Iterator[Figure]:
    """Yield the figures that are known of a build on at least one side."""
    rows: tuple[tuple[str, Callable[[Build], float | str | None], Callable[..., str]], ...] = (
        ("result", lambda build: verdict_text(build) or None, str),
        ("latency", lambda build: build.latency_s, latency_text),
        ("untuned", lambda build: build.untuned_latency_s, latency_text),
        ("library", lambda build: build.size_bytes, size_text),
        ("error", lambda build: build.error, "{:.1e}".format),
        ("accuracy", lambda build: build.accuracy, "{:.2%}".format),
        ("tuned kernels", lambda build: build.tuned_kernels, str),
    )
    for what, read, show in rows:
        old, new = read(before), read(after)
        if old is None and new is None:
            continue
        is_noise = what == "latency" and _is_noise(before, after)
        figure = Figure(after.name, what, old, new, "", is_noise)
        yield figure._replace(text=_figure_text(figure, show))


def _figure_text(figure: Figure, show: Callable[..., str]) -> str:
    old, new = figure.before, figure.after
    texts = ["unknown" if value is None else show(value) for value in (old, new)]
    if old == new:
        return texts[0]
    text = " -> ".join(texts)
    if figure.what not in _RELATIVE or figure.change is None:
        return text
    return f"{text} ({figure.change:+.1%}{', within the noise' if figure.is_noise else ''})"


def _measured_in_turns(figure: Figure, before: Side, after: Side) -> Figure:
    """Return a latency as the second release measured it alternately with the first; other figures as they are."""
    pair = after.in_turns.get(figure.build)
    if figure.what != "latency" or pair is None or pair.release != before.release:
        return figure
    is_noise = is_drift(pair.before_s, pair.after_s)
    figure = figure._replace(before=pair.before_s, after=pair.after_s, is_noise=is_noise)
    return figure._replace(text=f"{_figure_text(figure, latency_text)}, measured in turns")


def _list_file_sizes(before: Side, after: Side) -> Iterator[Figure]:
    """Yield the size of all delivered files, where the size of the library is not known and they have the same names."""
    for name, build in after.builds.items():
        old, new = (read_sizes(side, build) for side in (before, after))
        if build.size_bytes is None and old and old.keys() == new.keys():
            figure = Figure(name, "files", sum(old.values()), sum(new.values()), "")
            yield figure._replace(text=_figure_text(figure, size_text))


def read_sizes(side: Side, build: Build) -> Mapping[str, int]:
    """Return the size of each delivered file of a build in a lock file; empty where it has none."""
    recipe = side.lock.recipes.get(build.recipe) if side.lock else None
    target = recipe.targets.get(build.target) if recipe else None
    return target.measured.bytes if target else {}


def _is_noise(before: Build, after: Build) -> bool:
    """Return whether two latencies differ by no more than their measurements vary, or machines from day to day."""
    if before.latency_s is None or after.latency_s is None:
        return False
    deviation = math.hypot(before.latency_std_s or 0.0, after.latency_std_s or 0.0)
    limit = max(_DEVIATIONS * deviation, _DRIFT * before.latency_s)
    return abs(after.latency_s - before.latency_s) <= limit


def is_drift(before_s: float | None, after_s: float | None) -> bool:
    """Return whether two latencies differ by no more than the speed of a machine from day to day."""
    if not before_s or after_s is None:
        return False
    return abs(after_s / before_s - 1) <= _DRIFT


def _compare_runs(before: RunRecord, after: RunRecord, store: LocalStore) -> Iterator[Change]:
    """Yield what differs in the tools, the machines, the recipes, and in what stages depend on."""
    for field in ("name", "cpu", "cpus", "platform"):
        old, new = getattr(before.machine, field), getattr(after.machine, field)
        if old != new:
            yield Change(_EVERYWHERE, "machine", f"{field} {old} -> {new}")
    if before.tvmflow != after.tvmflow:
        yield Change(_EVERYWHERE, "package", f"tvmflow {before.tvmflow} -> {after.tvmflow}")
    old_sources = {source.path: source.sha256 for source in before.sources}
    for source in after.sources:
        if old_sources.get(source.path, source.sha256) != source.sha256:
            yield Change(_EVERYWHERE, source.kind, f"{shortest_path(source.path)} was edited")
    old_stages = {stage.stage_id: stage for stage in before.stages}
    for stage in after.stages:
        old = old_stages.get(stage.stage_id)
        if old and old.key and stage.key and old.key != stage.key:
            yield from _compare_keys(old, stage, store)


def _compare_keys(old: StageReport, new: StageReport, store: LocalStore) -> Iterator[Change]:
    preimages = [store.preimage(stage.key) for stage in (old, new)]
    if preimages[0] is None or preimages[1] is None:
        yield Change(new.stage_id, "changed", "its earlier result is no longer in the store")
        return
    for cause in list_changes(preimages[0], preimages[1]) or ["changed"]:
        yield Change(new.stage_id, "because", cause)


def to_json(comparison: Comparison, regressions: list[Figure]) -> dict[str, Json]:
    """Return a comparison as plain JSON."""
    figures = [{**figure._asdict(), "change": figure.change} for figure in comparison.figures]
    return {
        "before": comparison.before,
        "after": comparison.after,
        "figures": figures,
        "changes": [change._asdict() for change in comparison.changes],
        "regressions": [figure._asdict() for figure in regressions],
    }
