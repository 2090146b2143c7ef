"""Comparison of two runs, releases, lock files or deliveries: figures and other changes."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core.documents import Unreadable, read_file, read_json
from tvmflow.core.errors import UsageError
from tvmflow.core.file_kinds import RECIPE, recognize
from tvmflow.core.formatting import excerpt, latency_text, size_text
from tvmflow.core.keys import list_changes
from tvmflow.core.project import shortest_path
from tvmflow.core.statistics import NOISE_TEXTS, Judgement, judge_ratio
from tvmflow.core.types import Json
from tvmflow.engine.builds import Build, list_builds, read_kernel_times
from tvmflow.engine.report import INCOMPLETE, RunReport, StageReport
from tvmflow.engine.run_records import RunRecord, list_runs, may_name_run, read_run
from tvmflow.engine.summary import verdict_text
from tvmflow.pages.content import Change
from tvmflow.planning.recipes import load_recipe
from tvmflow.recipe.lock_file import LockFile
from tvmflow.release.gates import (
    LOCK,
    MEASUREMENTS,
    latency_of,
    read_lock_with_measurements,
    read_measurements,
)
from tvmflow.release.lock import diff_locks
from tvmflow.stages import verify
from tvmflow.stages.base import find_facts
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.store.local import LocalStore

_LIBRARIES: Final = (".so", ".dylib", ".dll", ".wasm")


class InterleavedLatencies(NamedTuple):
    """Latencies in seconds of a library and of its predecessor in the release `release`."""

    release: str
    before_s: float
    after_s: float


class Side(NamedTuple):
    """One side of a comparison: its builds by name, and its lock file or run record, if any.

    `release` is the name of a release's folder. Build names map in `interleaved` to latencies measured with another
    release's library, in `same_as` to the release with the same library, and in `kernels` to each kernel's seconds per
    call.
    """

    name: str
    builds: Mapping[str, Build]
    lock: LockFile | None = None
    run: RunRecord | None = None
    release: str = ""
    interleaved: Mapping[str, InterleavedLatencies] = MappingProxyType({})
    same_as: Mapping[str, str] = MappingProxyType({})
    kernels: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def load_side(name: str, store: LocalStore) -> Side:
    """Return the release, lock file, delivery or run with a name, or the last delivery of a recipe.

    Raises:
        UsageError: If the name is unknown.
        TvmflowError: If the side cannot be read.
    """
    path = Path(name)
    if (path / LOCK).is_file():
        return _read_release(f"release {name}", path)
    if path.is_file():
        kind = recognize(path)
        if kind is not None and kind.group == RECIPE:
            return _read_last_delivery(path, store)
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


def _read_last_delivery(path: Path, store: LocalStore) -> Side:
    """Return the builds of a recipe in the last run that delivered them."""
    recipe = load_recipe(path).recipe
    names = {recipe.name, *(f"{recipe.name}-{variant}" for variant in recipe.variants)}
    for run in list_runs(store).runs:
        builds = [build for build in run.builds if build.recipe in names and build.folder]
        if builds:
            name = f"{path} (run {run.id})"
            own = {build.name: build for build in builds}
            # Without the run: the settings of two recipes differ too much to compare.
            return make_side(run)._replace(name=name, builds=own, run=None)
    raise UsageError(
        f"{path}: no run in {shortest_path(store.root)} has delivered anything of this recipe",
        fix=f"run it with `tvmflow run {path}`; `--store DIR` names another store",
    )


def make_side(run: RunRecord) -> Side:
    """Return a run as a side of a comparison."""
    kernels = {
        f"{stage.recipe}/{stage.target}": read_kernel_times(find_facts(Verdict, stage.facts))
        for stage in run.stages
        if stage.stage == verify.NAME
    }
    builds = {build.name: build for build in run.builds}
    return Side(f"run {run.id}", builds, run=run, kernels=kernels)


def _read_release(name: str, folder: Path) -> Side:
    side = _read_lock(name, folder / LOCK)._replace(release=folder.resolve().name)
    file = read_measurements(folder)
    if file is None:
        return side
    builds, interleaved, same_as, kernels = dict(side.builds), {}, {}, {}
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
                interleaved[build.name] = InterleavedLatencies(*pair)
    return side._replace(builds=builds, interleaved=interleaved, same_as=same_as, kernels=kernels)


def _read_lock(name: str, path: Path) -> Side:
    lock = read_lock_with_measurements(path)
    builds = {}
    for recipe_name, recipe in lock.recipes.items():
        for target_name, target in recipe.targets.items():
            measured = target.measured
            build = Build(
                recipe_name,
                target_name,
                error=measured.max_abs_error,
                accuracy=measured.accuracy,
                latency_s=latency_of(measured),
                size_bytes=_add_sizes(measured.bytes.items()) or None,
                kernels=len(target.kernels) or None,
                tuned_kernels=len(target.choice) if target.kernels else None,
            )
            builds[build.name] = build
    return Side(name, builds, lock=lock)


def _read_delivery(name: str, folder: Path) -> Side:
    """Return the builds in `dist`, or in a recipe's or target's folder inside `dist`."""
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
    folder = path.absolute().parent
    try:
        facts = read_json(read_file(path))
    except Unreadable as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    build = _make_build(folder.parent.name, folder.name, facts, path)
    times = read_kernel_times(find_facts(Verdict, facts))
    return build._replace(size_bytes=_find_library_size(folder)), times


def _make_build(recipe: str, target: str, facts: Json, path: Path) -> Build:
    """Return a build from the facts of `verify`; `path` is their file, for messages."""
    stage = StageReport(f"{recipe}:{verify.NAME}/{target}", facts=facts)
    (build,) = list_builds(RunReport((stage,)))
    for warning in build.warnings:
        if warning.startswith(INCOMPLETE):
            raise UsageError(f"{path} are not the measurements of a library: {warning}")
    return build


def _add_sizes(files: Iterable[tuple[str, int]]) -> int:
    return sum(size for name, size in files if name.endswith(_LIBRARIES))


def _find_library_size(folder: Path) -> int | None:
    for bundle in sorted(folder.glob("*.tvmflow")):
        try:
            with zipfile.ZipFile(bundle) as archive:
                entries = [(entry.filename, entry.file_size) for entry in archive.infolist()]
        except (OSError, zipfile.BadZipFile):
            continue
        return _add_sizes(entries) or None
    return None


def read_sizes(side: Side, build: Build) -> Mapping[str, int]:
    """Return the size of each delivered file of a build, from the lock file; empty if unknown."""
    recipe = side.lock.recipes.get(build.recipe) if side.lock else None
    target = recipe.targets.get(build.target) if recipe else None
    return target.measured.bytes if target else {}


# A difference of more standard deviations than this is not noise.
_DEVIATIONS: Final = 2.0
# Relative day-to-day variation of a machine's speed.
_DRIFT: Final = 0.02
# Differences of lock files that are also figures.
_MEASURED: Final = frozenset({"latency", "accuracy", "coverage", "error"})
# Figures whose relative change is shown.
_RELATIVE: Final = ("latency", "untuned", "library", "files")
_LATENCIES: Final = ("latency", "untuned")
_COSTS: Final = ("latency", "library", "files")
_EVERYWHERE: Final = "everywhere"


class Figure(NamedTuple):
    """A figure of a build before and after (None if unknown); `text` shows both.

    `what` is `latency` or `untuned` (seconds), `library` or `files` (bytes), `error`, `accuracy`, `result`, or
    `tuned kernels`. `judgement`, for latencies only, says whether the difference is significant.
    """

    build: str
    what: str
    before: float | str | None
    after: float | str | None
    text: str
    judgement: Judgement | None = None

    @property
    def is_noise(self) -> bool:
        """True if the difference is within the noise of both measurements."""
        return self.judgement in NOISE_TEXTS

    @property
    def change(self) -> float | None:
        """The relative change: 0.1 is 10 % more; None if it is undefined."""
        if isinstance(self.before, (int, float)) and isinstance(self.after, (int, float)):
            return self.after / self.before - 1 if self.before else None
        return None


class Comparison(NamedTuple):
    """The comparison of two sides: figures of common builds, and other changes."""

    before: str
    after: str
    figures: tuple[Figure, ...]
    changes: tuple[Change, ...]

    def list_regressions(self, percent: float) -> list[Figure]:
        """Return latencies and sizes that grew by more than `percent`, and libraries no longer verified."""
        return [
            figure
            for figure in self.figures
            if (
                figure.what == "result"
                and figure.before == "verified"
                and figure.after != "verified"
            )
            or (
                figure.what in _COSTS
                and not figure.is_noise
                and (figure.change or 0) > percent / 100
            )
        ]


# ---------------------------------------------------------------- differences


def compare_sides(before: Side, after: Side, store: LocalStore) -> Comparison:
    """Compare two sides; `store` holds the pre-images of the runs' stages."""
    common = _pair_builds(before, after)
    figures = [
        figure
        for name, other in common.items()
        for figure in _list_figures(before.builds[other], after.builds[name])
    ]
    figures = [_measured_interleaved(figure, before, after) for figure in figures]
    changes = [Change(name, "build", "added") for name in after.builds if name not in common]
    paired = set(common.values())
    changes += [Change(name, "build", "removed") for name in before.builds if name not in paired]
    if before.lock and after.lock:
        figures += _list_file_sizes(before, after)
        # Without changes that are figures, and without builds of only one side.
        changes += [
            change
            for change in diff_locks(before.lock, after.lock)
            if change.what not in _MEASURED
            and not (change.what == "target" and change.text in ("added", "removed"))
        ]
    if before.run and after.run:
        changes += _compare_runs(before.run, after.run, store)
    return Comparison(before.name, after.name, tuple(figures), tuple(changes))


def _pair_builds(before: Side, after: Side) -> dict[str, str]:
    """Return build of the second side -> build of the first side to compare it with.

    If the sides have no common names, as for a float and an int8 recipe, builds are paired by target.
    """
    common = {name: name for name in after.builds if name in before.builds}
    if common:
        return common
    old, new = (_group_by_target(side) for side in (before, after))
    pairs = ((names, old.get(target, ())) for target, names in sorted(new.items()))
    return {names[0]: others[0] for names, others in pairs if len(names) == len(others) == 1}


def _group_by_target(side: Side) -> dict[str, list[str]]:
    targets: dict[str, list[str]] = {}
    for name, build in side.builds.items():
        targets.setdefault(build.target, []).append(name)
    return targets


def _list_figures(before: Build, after: Build) -> Iterator[Figure]:
    rows: tuple[tuple[str, Callable[[Build], float | str | None], Callable[..., str]], ...] = (
        ("result", lambda build: verdict_text(build) or None, str),
        ("latency", lambda build: build.latency_s, latency_text),
        ("untuned", lambda build: build.untuned_latency_s, latency_text),
        ("library", lambda build: build.size_bytes, size_text),
        ("error", lambda build: build.error, "{:.1e}".format),
        ("error vs float", lambda build: build.quantization_error, "{:.2%}".format),
        ("accuracy", lambda build: build.accuracy, "{:.2%}".format),
        ("tuned kernels", lambda build: build.tuned_kernels, str),
    )
    for what, read, show in rows:
        old, new = read(before), read(after)
        if old is None and new is None:
            continue
        judgement = None
        if what in _LATENCIES and not isinstance(old, str) and not isinstance(new, str):
            judgement = judge_change(old, new, _find_deviation(before, after))
        name = after.name if before.name == after.name else f"{before.name} -> {after.name}"
        figure = Figure(build=name, what=what, before=old, after=new, text="", judgement=judgement)
        yield figure._replace(text=_figure_text(figure, show))


def _figure_text(figure: Figure, show: Callable[..., str]) -> str:
    old, new = figure.before, figure.after
    texts = ["unknown" if value is None else show(value) for value in (old, new)]
    if old == new:
        return texts[0]
    text = " -> ".join(texts)
    if figure.what not in _RELATIVE or figure.change is None:
        return text
    noise = NOISE_TEXTS.get(figure.judgement, "") if figure.judgement else ""
    return f"{text} ({figure.change:+.1%}{noise and f', {noise}'})"


def _measured_interleaved(figure: Figure, before: Side, after: Side) -> Figure:
    """Replace a latency by the interleaved measurement of both releases, if there is one.

    Different latencies of the same library are judged as noise.
    """
    if figure.what != "latency" or not before.release:
        return figure
    if after.same_as.get(figure.build) == before.release and figure.before != figure.after:
        ratio = 1 + (figure.change or 0.0)
        figure = figure._replace(judgement=judge_ratio(ratio, min(ratio, 1), max(ratio, 1)))
        return figure._replace(text=f"{_figure_text(figure, latency_text)}: the same library")
    pair = after.interleaved.get(figure.build)
    if pair is None or pair.release != before.release:
        return figure
    judgement = judge_change(pair.before_s, pair.after_s)
    figure = figure._replace(before=pair.before_s, after=pair.after_s, judgement=judgement)
    return figure._replace(text=f"{_figure_text(figure, latency_text)}, interleaved")


def _list_file_sizes(before: Side, after: Side) -> Iterator[Figure]:
    """Yield the total file size of builds with unknown library sizes, if both sides have the same files."""
    for name, build in after.builds.items():
        old, new = (read_sizes(side, build) for side in (before, after))
        if build.size_bytes is None and old and old.keys() == new.keys():
            figure = Figure(
                build=name, what="files", before=sum(old.values()), after=sum(new.values()), text=""
            )
            yield figure._replace(text=_figure_text(figure, size_text))


def _find_deviation(before: Build, after: Build) -> float:
    """Return the relative uncertainty of the ratio of two latencies, from the deviation of their repeats."""
    builds = [build for build in (before, after) if build.latency_s]
    return _DEVIATIONS * math.hypot(
        *((b.latency_std_s or 0.0) / (b.latency_s or 1) for b in builds)
    )


def judge_change(
    before_s: float | None, after_s: float | None, deviation: float = 0.0
) -> Judgement | None:
    """Return the judgement on two latencies, or None if one is unknown.

    `deviation` is the relative uncertainty of their ratio; the day-to-day variation of a machine is its minimum.
    """
    if not before_s or after_s is None:
        return None
    ratio, limit = after_s / before_s, 1 + max(deviation, _DRIFT)
    return judge_ratio(ratio, ratio / limit, ratio * limit)


def _compare_runs(before: RunRecord, after: RunRecord, store: LocalStore) -> Iterator[Change]:
    """Yield the differences of machines, tools, recipes and pre-images of stages."""
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
        if not old or not old.key or not stage.key or old.key == stage.key:
            continue
        preimages = store.preimage(old.key), store.preimage(stage.key)
        if preimages[0] is None or preimages[1] is None:
            yield Change(stage.stage_id, "changed", "its earlier result is no longer in the store")
            continue
        for cause in list_changes(preimages[0], preimages[1]) or ["changed"]:
            yield Change(stage.stage_id, "because", cause)


def comparison_json(comparison: Comparison, regressions: list[Figure]) -> dict[str, Json]:
    """Return a comparison as plain JSON."""
    figures = [
        {**figure._asdict(), "is_noise": figure.is_noise, "change": figure.change}
        for figure in comparison.figures
    ]
    return {
        "before": comparison.before,
        "after": comparison.after,
        "figures": figures,
        "changes": comparison.changes,
        "regressions": regressions,
    }
