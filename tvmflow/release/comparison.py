"""The comparison of two runs, releases, lock files or deliveries.

It says what became better or worse, and what changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tvmflow.core.formatting import latency_text, size_text
from tvmflow.core.keys import list_changes
from tvmflow.core.project import shortest_path
from tvmflow.core.statistics import NOISE_TEXTS, Judgement, judge_ratio
from tvmflow.core.types import Json
from tvmflow.engine.builds import Build
from tvmflow.engine.report import StageReport
from tvmflow.engine.run_records import RunRecord
from tvmflow.engine.summary import verdict_text
from tvmflow.release.lock import Change, diff_locks
from tvmflow.release.sides import Side, read_sizes
from tvmflow.store.local import LocalStore

# Beyond so many standard deviations of both measurements, a difference is no noise.
_DEVIATIONS: Final = 2.0
# The speed of a machine differs by this from one day to the next.
_DRIFT: Final = 0.02
# What `diff` of lock files says of measurements is among the figures.
_MEASURED: Final = frozenset({"latency", "accuracy", "coverage", "error"})
# Figures whose relative change is shown.
_RELATIVE: Final = ("latency", "untuned", "library", "files")
_LATENCIES: Final = ("latency", "untuned")
_COSTS: Final = ("latency", "library", "files")
_EVERYWHERE: Final = "everywhere"


class Figure(NamedTuple):
    """A figure of a build on both sides.

    Attributes:
        build: The name of the build.
        what: `latency`, `library` and `files` (seconds and bytes, less is better), `untuned`, `error`,
            `accuracy`, `result`, or `tuned kernels`.
        before: The value on the first side; None when it is not known.
        after: The same on the second side.
        text: Both for people.
        judgement: What both measurements say of the change of a latency; None where it is not judged.
    """

    build: str
    what: str
    before: float | str | None
    after: float | str | None
    text: str
    judgement: Judgement | None = None

    @property
    def is_noise(self) -> bool:
        """True if the difference lies within the noise of both measurements, whatever its size."""
        return self.judgement in NOISE_TEXTS

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
        """Return what became worse.

        This is latency or size by more than a percentage, or a library that is no longer verified.
        """
        return [figure for figure in self.figures if _is_regression(figure, percent / 100)]


def _is_regression(figure: Figure, limit: float) -> bool:
    if figure.what == "result":
        return figure.before == "verified" and figure.after != "verified"
    is_cost = figure.what in _COSTS and not figure.is_noise
    return is_cost and figure.change is not None and figure.change > limit


# ---------------------------------------------------------------- differences


def compare_sides(before: Side, after: Side, store: LocalStore) -> Comparison:
    """Return all differences of two sides.

    The store has what the stages of runs depended on.
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
        changes += [change for change in differences if not _is_said(change)]
    if before.run and after.run:
        changes += _compare_runs(before.run, after.run, store)
    return Comparison(before.name, after.name, tuple(figures), tuple(changes))


def _is_said(change: Change) -> bool:
    """Return whether the figures, or the builds of one side, say what a difference of lock files does."""
    is_build = change.what == "target" and change.text in ("added", "removed")
    return is_build or change.what in _MEASURED


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
        judgement = None
        if what in _LATENCIES and not isinstance(old, str) and not isinstance(new, str):
            judgement = judge_change(old, new, _find_deviation(before, after))
        figure = Figure(
            build=after.name, what=what, before=old, after=new, text="", judgement=judgement
        )
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


def _measured_in_turns(figure: Figure, before: Side, after: Side) -> Figure:
    """Return a latency as the second release measured it alternately with the first.

    Other figures stay as they are.

    One library that was measured twice is as fast as itself, whatever the machine did meanwhile.
    """
    if figure.what != "latency" or not before.release:
        return figure
    if after.same_as.get(figure.build) == before.release and figure.before != figure.after:
        ratio = 1 + (figure.change or 0.0)
        figure = figure._replace(judgement=judge_ratio(ratio, min(ratio, 1), max(ratio, 1)))
        return figure._replace(text=f"{_figure_text(figure, latency_text)}: the same library")
    pair = after.in_turns.get(figure.build)
    if pair is None or pair.release != before.release:
        return figure
    judgement = judge_change(pair.before_s, pair.after_s)
    figure = figure._replace(before=pair.before_s, after=pair.after_s, judgement=judgement)
    return figure._replace(text=f"{_figure_text(figure, latency_text)}, measured in turns")


def _list_file_sizes(before: Side, after: Side) -> Iterator[Figure]:
    """Yield the size of all delivered files, where the size of the library is not known.

    Both sides must have files of the same names.
    """
    for name, build in after.builds.items():
        old, new = (read_sizes(side, build) for side in (before, after))
        if build.size_bytes is None and old and old.keys() == new.keys():
            figure = Figure(
                build=name, what="files", before=sum(old.values()), after=sum(new.values()), text=""
            )
            yield figure._replace(text=_figure_text(figure, size_text))


def _find_deviation(before: Build, after: Build) -> float:
    """Return how far the ratio of two latencies may lie from the true one, by how their repeats vary."""
    parts = [
        (build.latency_std_s or 0.0) / build.latency_s
        for build in (before, after)
        if build.latency_s
    ]
    return _DEVIATIONS * math.hypot(*parts)


def judge_change(
    before_s: float | None, after_s: float | None, deviation: float = 0.0
) -> Judgement | None:
    """Return what two latencies say; None where one of them is not known.

    Args:
        before_s: The earlier latency.
        after_s: The later latency.
        deviation: How far their ratio may lie from the true one, relative to it. The speed of a machine changes
            from day to day, so that it is never less than that.
    """
    if not before_s or after_s is None:
        return None
    ratio, limit = after_s / before_s, 1 + max(deviation, _DRIFT)
    return judge_ratio(ratio, ratio / limit, ratio * limit)


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
    figures = [
        {**figure._asdict(), "is_noise": figure.is_noise, "change": figure.change}
        for figure in comparison.figures
    ]
    return {
        "before": comparison.before,
        "after": comparison.after,
        "figures": figures,
        "changes": [change._asdict() for change in comparison.changes],
        "regressions": [figure._asdict() for figure in regressions],
    }
