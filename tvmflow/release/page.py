"""HTML pages of releases; comparison of a page's builds with another run, release or delivery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import names_text, size_text
from tvmflow.core.types import Json
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.report import RunReport, StageReport, can_be_shown
from tvmflow.pages.collect import time_text
from tvmflow.pages.content import (
    Gate,
    Kernel,
    KernelChange,
    Library,
    LibraryKernels,
    Page,
)
from tvmflow.recipe.lock_file import LockFile, Measurements, read_lock
from tvmflow.release.comparison import Figure, Side, compare_sides, judge_change, read_sizes
from tvmflow.release.gates import (
    LOCK,
    MEASUREMENTS_PAGE,
    CheckedGate,
    MeasurementsFile,
    TargetComparison,
    list_checked_gates,
    read_comparisons,
    read_measurements,
    with_measurements,
)
from tvmflow.stages import verify
from tvmflow.store.local import LocalStore
from tvmflow.targets.tvm_target import target_words

REPORT: Final = "report.html"

_BYTES: Final = "max_bytes"


def describe_release(name: str, lock: LockFile) -> Page:
    """Return the report on the content of a release, which depends only on the lock file."""
    return Page(
        kind="Release",
        title=name,
        about=_list_facts(lock),
        links=(("Measurements, and the comparison with the previous release", MEASUREMENTS_PAGE),),
        libraries=tuple(_list_locked(lock)),
        provenance=_list_provenance(lock),
    )


def describe_measurements(name: str, lock: LockFile, file: MeasurementsFile) -> Page:
    """Return the page with the measurements of a release and of the previous release."""
    comparisons = {comparison.label: comparison for comparison in read_comparisons(file)}
    builds = {build.name: build for build in _read_builds(file)}
    release = describe_release(name, lock)
    return release._replace(
        previous=file.compared_with,
        links=(("What the release has", REPORT),),
        libraries=tuple(
            _measure(library, comparisons[library.label], builds.get(library.label), file)
            for library in release.libraries
            if library.label in comparisons
        ),
        notes=tuple(_list_notes(file)),
        gates=tuple(map(_format_gate, list_checked_gates(list(comparisons.values()), file.gates))),
        kernels=tuple(_list_locked_kernels(lock)),
    )


def read_release(folder: Path) -> Page:
    """Return the page of the release in a folder; UsageError if the folder is not a release."""
    if not (folder / LOCK).is_file():
        raise UsageError(
            f"{folder} is not the folder of a release: it has no {LOCK}",
            fix="give the folder of a release, a recipe, or a run that `tvmflow runs` lists",
        )
    lock, file = read_lock(folder / LOCK).file, read_measurements(folder)
    if file is None:
        raise UsageError(f"{folder} has no measurements: its page is {REPORT}")
    return describe_measurements(folder.resolve().name, with_measurements(lock, file), file)


def _list_facts(lock: LockFile) -> tuple[tuple[str, str], ...]:
    versions = {f"{name} {recipe.version}" for name, recipe in lock.recipes.items()}
    return (("built on", lock.machine), ("recipes", ", ".join(sorted(versions))))


def _list_provenance(lock: LockFile) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    inputs = {
        f"{name}: {role}": digest
        for name, recipe in lock.recipes.items()
        for stage in recipe.stages.values()
        for role, digest in stage.inputs.items()
    }
    files = {role: digest for role, digest in inputs.items() if "/" not in role}
    return (
        ("Tools", tuple(lock.tools.items())),
        ("Files from outside, sha256", tuple(files.items())),
        ("Everything else", ((LOCK, "what these files can be built again with"),)),
    )


def _list_locked(lock: LockFile) -> Iterator[Library]:
    # Variants have the recipe file in common, and their names begin with the recipe's name.
    files: dict[str, list[str]] = {}
    for name, recipe in lock.recipes.items():
        files.setdefault(recipe.recipe, []).append(name)
    for base, names in ((_find_base(names), names) for names in files.values()):
        for name in names:
            for target_name, target in lock.recipes[name].targets.items():
                tuned = sum(1 for kernel in target.kernels.values() if kernel.trial)
                build = Build(
                    name,
                    target_name,
                    name.removeprefix(base).removeprefix("-"),
                    kernels=len(target.kernels) or None,
                    tuned_kernels=tuned if target.kernels else None,
                )
                yield Library(
                    build,
                    base,
                    machine=" ".join(target_words(target.tvm)),
                    files=target.measured.bytes,
                )


def _find_base(names: Sequence[str]) -> str:
    """Return the longest common prefix of several names that ends before a dash, or the single name."""
    base = names[0]
    while len(names) > 1 and "-" in base:
        base = base.rpartition("-")[0]
        if all(name.startswith(f"{base}-") for name in names):
            return base
    return names[0]


# ---------------------------------------------------------------- measurements


def _read_builds(file: MeasurementsFile) -> tuple[Build, ...]:
    stages = (
        StageReport(f"{recipe}:{verify.NAME}/{target}", facts=facts)
        for recipe, targets in file.verification.items()
        for target, facts in targets.items()
        if can_be_shown(verify.NAME, facts)
    )
    return list_builds(RunReport(tuple(stages)))


def _measure(
    library: Library, comparison: TargetComparison, verified: Build | None, file: MeasurementsFile
) -> Library:
    locked, current = library.build, comparison.current
    measured = file.recipes[locked.recipe][locked.target]
    build = (verified or locked)._replace(
        variant=locked.variant,
        kernels=locked.kernels,
        tuned_kernels=locked.tuned_kernels,
        latency_s=comparison.seconds,
        accuracy=current.accuracy,
        error=current.max_abs_error,
        size_bytes=measured.library_bytes,
        is_pareto_optimal=measured.is_pareto_optimal,
    )
    previous = None
    if comparison.previous != Measurements():
        previous = Build(
            locked.recipe,
            locked.target,
            latency_s=comparison.previous_seconds,
            accuracy=comparison.previous.accuracy,
            error=comparison.previous.max_abs_error,
        )
    reason = comparison.not_timed_reason
    note = f"not timed again: {reason}" if reason else ""
    if comparison.is_same_library or comparison.latencies:
        note = "the same library" if comparison.is_same_library else "measured interleaved"
    return library._replace(
        build=build,
        previous=previous,
        judgement=judge_change(comparison.previous_seconds, comparison.seconds),
        is_same=comparison.is_same_library,
        note=note,
        files=current.bytes,
        previous_files=comparison.previous.bytes,
    )


def _list_notes(file: MeasurementsFile) -> list[str]:
    notes = [] if file.compared_with else ["This is the first release."]
    notes += [f"New: {', '.join(file.added)}"] if file.added else []
    return notes + ([f"No longer in it: {', '.join(file.removed)}"] if file.removed else [])


def describe_gates(gates: Sequence[Mapping[str, Json]]) -> tuple[Gate, ...]:
    """Return the gates in a run's record, which are JSON of `CheckedGate`."""
    return tuple(_format_gate(CheckedGate(**gate)) for gate in gates)


def _format_gate(checked: CheckedGate) -> Gate:
    show = size_text if checked.gate == _BYTES else "{:.2%}".format
    state = "failed" if checked.is_failed else "passed"
    return Gate(
        label=checked.label,
        gate=checked.gate,
        limit=show(checked.limit),
        value="–" if checked.value is None else show(checked.value),
        state="not measured" if checked.value is None and not checked.is_failed else state,
    )


def _list_locked_kernels(lock: LockFile) -> Iterator[LibraryKernels]:
    note = "The course of the search is in the store that the release was made with."
    for name, recipe in lock.recipes.items():
        for target_name, target in recipe.targets.items():
            kernels = [
                Kernel(
                    kernel.name,
                    calls=kernel.calls,
                    flops=kernel.flops,
                    untuned_s=kernel.untuned_us / 1e6,
                    tuned_s=None if kernel.tuned_us is None else kernel.tuned_us / 1e6,
                )
                for kernel in target.measured_kernels
            ]
            kernels.sort(key=lambda kernel: -kernel.calls * (kernel.seconds or 0.0))
            if kernels:
                label, peak = f"{name}/{target_name}", target.peak_gflops
                yield LibraryKernels(label, tuple(kernels), peak, notes=(note,))


# ---------------------------------------------------------------- page comparison
# The profile times each kernel in few calls, so that smaller relative differences may be noise.
_MIN_CHANGE: Final = 0.1
# Changes below this share of the library's latency are not shown.
_MIN_SHARE: Final = 0.01
_SHOWN_NAMES: Final = 3


def compare_page(page: Page, before: Side, after: Side, store: LocalStore) -> Page:
    """Return a page with its builds compared with another side's; `store` holds the runs' pre-images.

    Raises:
        UsageError: If both sides are the same, or have no common build.
    """
    _check_sides(before, after)
    comparison = compare_sides(before, after, store)
    latencies = {figure.build: figure for figure in comparison.figures if figure.what == "latency"}
    libraries, notes = page.libraries, page.notes
    # A release's page already has interleaved measurements with the previous release.
    if not before.release or before.release != page.previous:
        libraries = tuple(
            _compare_library(library, before, after, latencies.get(library.label))
            for library in libraries
        )
        if not after.run:
            is_gated = page.gates and page.previous
            notes = (f"The gates compared it with {page.previous}.",) if is_gated else ()
    previous = before.release or before.name
    if before.run:
        previous = f"{before.name} of {time_text(before.run.began_s)}"
    return page._replace(
        previous=previous,
        libraries=libraries,
        notes=notes,
        kernel_changes=tuple(
            change
            for library in libraries
            if library.previous
            for change in _list_kernel_changes(library, before, after)
        ),
        changes=comparison.changes,
    )


def _check_sides(before: Side, after: Side) -> None:
    if before._replace(name=after.name) == after:
        raise UsageError(
            f"the page is about {after.name}: it cannot be compared with itself",
            fix="name an earlier run or release; `tvmflow runs` lists the runs",
        )
    if not before.builds.keys() & after.builds.keys():
        names = [
            names_text(list(side.builds), _SHOWN_NAMES) or "no build" for side in (before, after)
        ]
        raise UsageError(
            f"{before.name} and {after.name} have no build in common: {names[0]}; {names[1]}",
            fix="name a run or a release with the same recipe and target",
        )


def _compare_library(
    library: Library, before: Side, after: Side, latency: Figure | None
) -> Library:
    build, previous = library.build, before.builds.get(library.label)
    if previous and latency:
        build = build._replace(latency_s=_number(latency.after))
        previous = previous._replace(latency_s=_number(latency.before))
    keys = [_find_measurement(side, library) for side in (before, after)]
    # `--force verify` measures again under the same key, so that latencies must be equal, too.
    has_same_key = bool(keys[0]) and keys[0] == keys[1]
    is_same = has_same_key and previous is not None and build.latency_s == previous.latency_s
    return library._replace(
        build=build,
        previous=previous,
        judgement=latency.judgement if latency else None,
        is_same=is_same,
        note="not measured again" if is_same else "",
        previous_files=read_sizes(before, build),
    )


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, float | int) else None


def _find_measurement(side: Side, library: Library) -> str:
    """Return the key of the `verify` result with the latency; empty if unknown."""
    name = f"{library.build.recipe}:{verify.NAME}/{library.build.target}"
    stages = side.run.stages if side.run else ()
    return next((stage.key for stage in stages if stage.stage_id == name), "")


def _list_kernel_changes(library: Library, before: Side, after: Side) -> list[KernelChange]:
    """Return kernels of only one side and kernels with changed times, largest difference first.

    If the library's latency is unchanged, differences of kernel times are noise.
    """
    old, new = (side.kernels.get(library.label, {}) for side in (before, after))
    if not old or not new:
        return []
    smallest = _MIN_SHARE * max(sum(old.values()), sum(new.values()))
    is_noise = library.is_noise or library.is_same
    changes: list[tuple[float, KernelChange]] = []
    for name in dict.fromkeys([*new, *old]):
        change = KernelChange(library.label, name, old.get(name), new.get(name))
        difference = abs((change.after_s or 0.0) - (change.before_s or 0.0))
        if change.before_s is not None and change.after_s is not None:
            is_small = difference < smallest or difference <= _MIN_CHANGE * change.before_s
            if is_noise or is_small:
                continue
        changes.append((difference, change))
    return [change for _, change in sorted(changes, key=lambda row: -row[0])]
