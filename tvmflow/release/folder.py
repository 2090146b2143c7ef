"""The release folder: files, lock file, checksums and report of one version. It appears complete and never changes."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import LockMismatch, RecipeError, VerifyFailed
from tvmflow.core.files import hash_file
from tvmflow.core.types import Artifact, Plan
from tvmflow.planning.pipelines import Pipeline
from tvmflow.provenance.delivered import list_delivered_targets
from tvmflow.provenance.write import write_release_sidecars
from tvmflow.recipe import Release
from tvmflow.recipe.lock_file import Lock, read_lock
from tvmflow.release.content import ContentChange, compare_content, list_locked, list_planned
from tvmflow.release.gates import (
    Comparison,
    FailedGate,
    check_content,
    compare_releases,
    find_failed_gates,
)
from tvmflow.release.page import render_report
from tvmflow.release.previous import LOCK, SUMS, find_folder, find_previous
from tvmflow.release.timing import time_alternately
from tvmflow.stages import pick_best, verify
from tvmflow.store.local import LocalStore

_log = logging.getLogger(__name__)

REPORT: Final = "report.html"
_BUNDLE: Final = ".tvmflow"

# Files with measurements of one run. All other files are the same whenever a release is made.
_VARYING: Final = (LOCK, REPORT, verify.DELIVERED_VERDICT, pick_best.ROOFLINE)

_SHA256_DIGITS: Final = 64
_SUMS_SEPARATOR: Final = "  "


class ReleaseResult(NamedTuple):
    """The outcome of a release.

    Attributes:
        folder: The release folder; it does not exist when gates failed.
        is_new: Whether it was created now.
        previous: Name of the release that it was compared with; empty if there is none.
        comparisons: All recipes and targets beside that release.
        failed_gates: The gates that kept the release from being made.
        content: What is new and what is gone since that release.
    """

    folder: Path
    is_new: bool
    previous: str = ""
    comparisons: tuple[Comparison, ...] = ()
    failed_gates: tuple[FailedGate, ...] = ()
    content: ContentChange = ContentChange()


def check_before_build(
    pipeline: Pipeline, release: Release, plan: Plan, requested: Collection[str]
) -> None:
    """Check what is known of a release before anything is built: the previous one, and what would be lost.

    Args:
        pipeline: The pipeline with the release.
        release: Its version, folder and gates.
        plan: What will be built.
        requested: The recipes and targets of the pipeline, whatever the command line selects of them.

    Raises:
        RecipeError: when there is no release to compare with, or when `drop` names what is there.
        LockMismatch: when the previous release is not as it was made.
        VerifyFailed: when the release would lack something that it must have.
    """
    planned = list_planned(plan)
    for index, name in enumerate(release.drop):
        if name in planned:
            where = pipeline.where("release", "drop", index) if pipeline.where else pipeline.path
            raise RecipeError(
                f"{where}: release.drop.{index}: {name} is in this release",
                fix="remove it from release.drop, so that its loss is noticed later",
            )
    lost = check_content(compare_content(planned, requested), str(pipeline.path), release)
    if not find_folder(pipeline, release).is_dir():
        previous = find_previous(pipeline, release)
        if previous is not None:
            lost += _check_content(planned, previous, release)
    if lost:
        unique = {failed.label: failed for failed in reversed(lost)}
        lines = [f"{name}: {unique[name].gate}: {unique[name].message}" for name in sorted(unique)]
        raise VerifyFailed(
            "\n".join([*lines, "NOT RELEASED: nothing was built"]),
            fix="build it, without --target and --variant, or name what is meant to go: "
            f"`drop: [{', '.join(sorted(unique))}]` under `release` in {pipeline.path}",
        )


def make_release(
    pipeline: Pipeline,
    release: Release,
    lock: str,
    plan: Plan,
    artifacts: Mapping[str, Artifact],
    store: LocalStore,
    device_locks: Path,
) -> ReleaseResult:
    """Check the gates and create the release folder if all pass.

    Args:
        pipeline: The pipeline with the release.
        release: Its version, folder and gates.
        lock: The text of the lock file.
        plan: A plan whose stages all have results.
        artifacts: Those results, by stage id.
        store: The store with the results.
        device_locks: The folder of the device locks.

    Raises:
        LockMismatch: when the release exists with other files, or was changed.
        RecipeError: when there is no release to compare with.
    """
    folder = find_folder(pipeline, release)
    files = dict(_list_files(plan, artifacts))
    if folder.is_dir():
        _check_existing(folder, files)
        return ReleaseResult(folder, is_new=False)
    previous = find_previous(pipeline, release)
    with disk_errors(str(folder.parent)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = folder.parent / f".{folder.name}.{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            _copy_files(part, files, store)
            (part / LOCK).write_text(lock, encoding="utf-8")
            result = _compare(folder, part, release, previous, device_locks)
            result = _add_content(result, plan, previous, release)
            if not result.failed_gates:
                _write_report(part, result, files)
                groups_of_files = list_delivered_targets(plan, artifacts)
                write_release_sidecars(part, pipeline.name, release.version, groups_of_files, store)
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return result


def _list_files(plan: Plan, artifacts: Mapping[str, Artifact]) -> Iterator[tuple[str, str]]:
    """Yield `(RECIPE/TARGET/NAME, sha256)` of every delivered file."""
    for delivery in plan.deliveries:
        if delivery.stage_id in artifacts:
            digests = artifacts[delivery.stage_id].digests(())
            for stored, name in delivery.files:
                yield f"{delivery.recipe}/{delivery.target}/{name}", digests[stored]


def _copy_files(part: Path, files: Mapping[str, str], store: LocalStore) -> None:
    for name, digest in files.items():
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.blobs.verified_path(digest), path)


def _write_report(part: Path, result: ReleaseResult, files: Mapping[str, str]) -> None:
    lock = read_lock(part / LOCK).file
    html = render_report(
        result.folder.name, result.previous, result.comparisons, lock, result.content
    )
    (part / REPORT).write_text(html, encoding="utf-8")
    varying = {name: hash_file(str(part / name)) for name in (LOCK, REPORT)}
    (part / SUMS).write_text(_format_sums(files) + _format_sums(varying), encoding="utf-8")


def _format_sums(files: Mapping[str, str]) -> str:
    """Return lines that `sha256sum --check` reads."""
    return "".join(f"{digest}{_SUMS_SEPARATOR}{name}\n" for name, digest in sorted(files.items()))


def _parse_sums(text: str) -> dict[str, str]:
    start = _SHA256_DIGITS + len(_SUMS_SEPARATOR)
    return {line[start:]: line[:_SHA256_DIGITS] for line in text.splitlines()}


def _check_existing(folder: Path, files: Mapping[str, str]) -> None:
    """Check that a release has the same files, apart from measurements, and that none was changed.

    Raises:
        LockMismatch: otherwise.
    """
    try:
        recorded = _parse_sums((folder / SUMS).read_text(encoding="utf-8"))
    except OSError as error:
        raise LockMismatch(
            f"{folder} is not a release that tvmflow made: {SUMS}: {error.strerror}",
            fix="move it away, or raise release.version",
        ) from error
    lasting = sorted(name for name in {*files, *recorded} if not name.endswith(_VARYING))
    for name in lasting:
        if files.get(name) != recorded.get(name):
            raise LockMismatch(
                f"{folder} exists with a different {name}",
                fix="a version is released once: raise release.version",
            )
    for name, digest in recorded.items():
        if hash_file(str(folder / name)) != digest:
            raise LockMismatch(
                f"{folder / name} was changed after the release",
                fix=f"remove {folder}, and run again",
            )


# ---------------------------------------------------------------- comparison


def _check_content(planned: Collection[str], previous: Lock, release: Release) -> list[FailedGate]:
    change = compare_content(planned, list_locked(previous.file))
    return check_content(change, previous.path.parent.name, release)


def _add_content(
    result: ReleaseResult, plan: Plan, previous: Lock | None, release: Release
) -> ReleaseResult:
    """Return the result with what is new and what is gone since the previous release."""
    if previous is None:
        return result
    planned = list_planned(plan)
    failed = (*result.failed_gates, *_check_content(planned, previous, release))
    content = compare_content(planned, list_locked(previous.file))
    return result._replace(is_new=not failed, failed_gates=failed, content=content)


def _compare(
    folder: Path, part: Path, release: Release, previous: Lock | None, device_locks: Path
) -> ReleaseResult:
    current = read_lock(part / LOCK).file
    comparisons = tuple(
        _measure_latencies(comparison, part, previous, device_locks)
        for comparison in compare_releases(current, previous and previous.file)
    )
    failed = tuple(find_failed_gates(comparisons, release.gates))
    name = previous.path.parent.name if previous else ""
    return ReleaseResult(folder, not failed, name, comparisons, failed)


def _measure_latencies(
    comparison: Comparison, part: Path, previous: Lock | None, device_locks: Path
) -> Comparison:
    """Return a comparison with both latencies, where both releases have a bundle that runs here."""
    # A library that was not timed when it was verified does not run on this machine.
    is_timed = comparison.current.latency_us is not None and comparison.previous_seconds is not None
    if previous is None or not is_timed:
        return comparison
    name = f"{comparison.recipe}/{comparison.target}/{comparison.recipe}{_BUNDLE}"
    bundles = (part / name, previous.path.parent / name)
    if not all(path.is_file() for path in bundles):
        return comparison._replace(not_timed_reason="not both releases have a bundle")
    if hash_file(str(bundles[0])) == hash_file(str(bundles[1])):
        return comparison._replace(is_same_library=True)
    timed = time_alternately(*bundles, device_locks)
    if isinstance(timed, str):
        return comparison._replace(not_timed_reason=timed)
    return comparison._replace(latencies=timed)
