"""The sides of a comparison: what runs, releases, lock files and deliveries have of each build."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core.documents import Unreadable, read_file, read_json
from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import excerpt
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Json
from tvmflow.engine.builds import Build, list_builds, read_kernel_times
from tvmflow.engine.report import INCOMPLETE, RunReport, StageReport
from tvmflow.engine.run_records import RunRecord, may_name_run, read_run
from tvmflow.recipe.lock_file import LockFile
from tvmflow.release.measurements import (
    LOCK,
    MEASUREMENTS,
    read_lock_with_measurements,
    read_measurements,
)
from tvmflow.stages import verify
from tvmflow.stages.base import find_facts
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.store.local import LocalStore

_LIBRARIES: Final = (".so", ".dylib", ".dll", ".wasm")


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
        same_as: The name of the other release whose library a release has unchanged, by the name of the build.
        kernels: The seconds that each kernel takes in one call of a library, by the name of the build.
    """

    name: str
    builds: Mapping[str, Build]
    lock: LockFile | None = None
    run: RunRecord | None = None
    release: str = ""
    in_turns: Mapping[str, LatenciesInTurns] = MappingProxyType({})
    same_as: Mapping[str, str] = MappingProxyType({})
    kernels: Mapping[str, Mapping[str, float]] = MappingProxyType({})


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
    if not may_name_run(store, name):
        raise UsageError(
            f"there is no file or folder {excerpt(name)}, and no run of this name in {shortest_path(store.root)}",
            fix="give a run that `tvmflow runs` lists (its id, `latest`, `latest~1`), the folder of a release, "
            "a lock file, or a folder in dist; `--store DIR` names another store",
        )
    return make_side(read_run(store, name))


def make_side(run: RunRecord) -> Side:
    """Return what a run has for a comparison."""
    kernels = {
        f"{stage.recipe}/{stage.target}": read_kernel_times(find_facts(Verdict, stage.facts))
        for stage in run.stages
        if stage.stage == verify.NAME
    }
    builds = {build.name: build for build in run.builds}
    return Side(f"run {run.id}", builds, run=run, kernels=kernels)


def _read_release(name: str, folder: Path) -> Side:
    """Return what is in the folder of a release: its lock file with all that it measured."""
    side = _read_lock(name, folder / LOCK)._replace(release=folder.resolve().name)
    file = read_measurements(folder)
    if file is None:
        return side
    builds, in_turns, same_as, kernels = dict(side.builds), {}, {}, {}
    for recipe, targets in file.recipes.items():
        for target, measured in targets.items():
            facts = file.verification.get(recipe, {}).get(target) or {}
            build = _make_build(recipe, target, facts, folder / MEASUREMENTS)
            kernels[build.name] = read_kernel_times(find_facts(Verdict, facts))
            locked = side.builds.get(build.name, build)
            builds[build.name] = build._replace(
                size_bytes=measured.library_bytes or locked.size_bytes,
                kernels=locked.kernels,
                tuned_kernels=locked.tuned_kernels,
            )
            if measured.is_same_library:
                same_as[build.name] = file.compared_with
            if measured.current_s and measured.previous_s:
                pair = (file.compared_with, measured.previous_s, measured.current_s)
                in_turns[build.name] = LatenciesInTurns(*pair)
    return side._replace(builds=builds, in_turns=in_turns, same_as=same_as, kernels=kernels)


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
        build, kernels_of_build = _read_delivered_build(path)
        builds[build.name], kernels[build.name] = build, kernels_of_build
    return Side(f"delivery {name}", builds, kernels=kernels)


def _read_delivered_build(path: Path) -> tuple[Build, dict[str, float]]:
    """Return a build from its measurements, and the seconds of each of its kernels."""
    folder = path.absolute().parent
    try:
        facts = read_json(read_file(path))
    except Unreadable as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    build = _make_build(folder.parent.name, folder.name, facts, path)
    times = read_kernel_times(find_facts(Verdict, facts))
    return build._replace(size_bytes=_find_library_size(folder)), times


def _make_build(recipe: str, target: str, facts: Json, path: Path) -> Build:
    """Return what `verify` says of a library; `path` is where that was read, for messages."""
    stage = StageReport.of_result(f"{recipe}:{verify.NAME}/{target}", facts)
    (build,) = list_builds(RunReport((stage,)))
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


def read_sizes(side: Side, build: Build) -> Mapping[str, int]:
    """Return the size of each delivered file of a build in a lock file; empty where it has none."""
    recipe = side.lock.recipes.get(build.recipe) if side.lock else None
    target = recipe.targets.get(build.target) if recipe else None
    return target.measured.bytes if target else {}
