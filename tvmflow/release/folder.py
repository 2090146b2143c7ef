"""The immutable release folder of one version: files, lock file, checksums and report."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

from tvmflow.core import signing
from tvmflow.core.disk_errors import disk_errors, make_folder
from tvmflow.core.documents import Unreadable, get_field
from tvmflow.core.errors import LockMismatch, RecipeError, VerifyFailed
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text
from tvmflow.core.project import find_project, shortest_path
from tvmflow.core.signing import PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX, Artifact, Plan
from tvmflow.engine.report import StageReport
from tvmflow.pages.collect import list_kernels, list_stages, read_recipes
from tvmflow.pages.document import render_page
from tvmflow.planning.recipes import Pipeline
from tvmflow.provenance import (
    BOM_SUFFIX,
    MEASUREMENTS_STATEMENT,
    README,
    RELEASE_STATEMENT,
    list_delivered_targets,
    text_digest,
    write_release_statements,
    write_release_targets,
)
from tvmflow.recipe import LAST_RELEASE, NO_RELEASE, Release
from tvmflow.recipe.lock_file import LockFile, read_lock
from tvmflow.release.gates import (
    LOCK,
    MEASURED_FILES,
    MEASUREMENTS,
    MEASUREMENTS_PAGE,
    ContentChange,
    FailedGate,
    TargetComparison,
    check_content,
    compare_content,
    compare_releases,
    find_failed_gates,
    list_locked,
    list_planned,
    make_measurements,
    measurements_text,
    read_measurements,
    with_measurements,
    without_measurements,
)
from tvmflow.release.lock import lock_text
from tvmflow.release.page import REPORT, describe_measurements, describe_release
from tvmflow.release.timing import time_alternately
from tvmflow.runtime.statements import Statement, read_statements
from tvmflow.stages import pick_best, verify
from tvmflow.store.local import LocalStore

SUMS: Final = "SHA256SUMS"

_SHOWN_PROBLEMS: Final = 5


class PreviousRelease(NamedTuple):
    """The release to compare with: its folder, and its lock file with measurements."""

    folder: Path
    lock: LockFile

    @property
    def name(self) -> str:
        """Its name and version."""
        return self.folder.name


def find_folder(pipeline: Pipeline, release: Release) -> Path:
    """Return the path of a release's folder, which may not exist yet."""
    if release.folder is None:
        home = Path(shortest_path(find_project().releases))
    else:
        home = pipeline.path.parent / release.folder
    return home / f"{pipeline.name}-{release.version}"


def find_previous(pipeline: Pipeline, release: Release) -> PreviousRelease | None:
    """Verify and return the release to compare with, or None for the first release.

    Raises:
        RecipeError: if `against` names a release that does not exist.
        LockMismatch: if the release was changed, or no trusted key signed it.
    """
    if release.against == NO_RELEASE:
        return None
    home = find_folder(pipeline, release).parent
    folders = dict(_list_releases(pipeline.name, home))
    if release.against == LAST_RELEASE:
        older = [version for version in folders if Version(version) < Version(release.version)]
        if not older:
            return None
        version = max(older, key=Version)
        _log.debug("comparing with version %s, the latest before %s", version, release.version)
    else:
        version = release.against
        if version not in folders:
            where = pipeline.where("release", "against") if pipeline.where else str(pipeline.path)
            raise RecipeError(
                f"{where}: release.against: there is no release {version} in {home}",
                fix=f"releases in this folder: {', '.join(folders) or 'none'}",
            )
    return _read_verified(folders[version], f"{pipeline.name} {version}")


def _list_releases(name: str, home: Path) -> Iterator[tuple[str, Path]]:
    """Yield `(version, folder)` of every release of a pipeline, without checking it."""
    for folder in sorted(home.glob(f"{name}-*")):
        version = folder.name.removeprefix(f"{name}-")
        try:
            Version(version)
        except InvalidVersion:
            continue
        if folder.is_dir():
            yield version, folder


def _read_verified(folder: Path, about: str) -> PreviousRelease:
    if problems := list(_find_problems(folder, about)):
        hidden = len(problems) - _SHOWN_PROBLEMS
        more = [f"and {count_text(hidden, 'problem')} more"] if hidden > 0 else []
        lines = "".join(f"\n  {problem}" for problem in (*problems[:_SHOWN_PROBLEMS], *more))
        raise LockMismatch(
            f"{folder}, the release to compare with, is not as it was made:{lines}",
            fix="restore it from a copy, or compare with another release (release.against: a version, "
            "or none); `tvmflow verify` checks the whole folder",
        )
    try:
        lock, measurements = read_lock(folder / LOCK).file, read_measurements(folder)
    except RecipeError as error:
        raise RecipeError(
            error.problems, fix="compare with another release (release.against: a version, or none)"
        ) from error
    return PreviousRelease(folder, with_measurements(lock, measurements) if measurements else lock)


# ---------------------------------------------------------------- verification


def _find_problems(folder: Path, about: str) -> Iterator[str]:
    """Yield the problems of a release folder; `about` is the name and version that statements must have."""
    trusted = _trusted_keys(folder / RELEASE_STATEMENT)
    statement, problems = _read_statement(folder, RELEASE_STATEMENT, about, trusted)
    yield from problems
    if statement is None:
        return
    yield from _find_wrong_files(folder, statement, (LOCK, SUMS))
    yield from _find_wrong_statements(folder, statement, trusted)
    if not statement.measured_files:
        return
    measured, problems = _read_statement(folder, MEASUREMENTS_STATEMENT, about, trusted)
    yield from problems
    if measured is None:
        return
    yield from _find_wrong_files(folder, measured, statement.measured_files)
    # A valid measurement statement could belong to another release.
    for entry in measured.dependencies("statement"):
        if not _has_text(folder / RELEASE_STATEMENT, get_field(entry, "digest", "sha256", of=str)):
            yield f"{MEASUREMENTS_STATEMENT}: its files are not those of this release"


def _read_statement(
    folder: Path, name: str, about: str, trusted: Sequence[PublicKey]
) -> tuple[Statement | None, list[str]]:
    """Return the single trusted statement in a file, or None, and the problems."""
    signed = read_statements(folder / name, trusted)
    problems = [f"{name}: {entry.problem}" for entry in signed if entry.problem]
    statements = [entry.statement for entry in signed if entry.statement]
    if len(signed) > 1:
        problems.append(f"{name}: it has {len(signed)} statements")
    problems += [
        f"{name}: it is about {statement.about}, not {about}"
        for statement in statements
        if statement.about != about
    ]
    return (None if problems else statements[0]), problems


def _trusted_keys(statement: Path) -> tuple[PublicKey, ...]:
    """Return the trusted keys of the environment, or else the signing key if it signed the statement."""
    trusted = signing.load_trusted_keys()
    own = None if trusted else signing.load_signing_key()
    if own and any(own.public.id in signed.key_ids for signed in read_statements(statement, ())):
        return (own.public,)
    return trusted


def _find_wrong_files(folder: Path, statement: Statement, required: Sequence[str]) -> Iterator[str]:
    missing = [name for name in required if name not in statement.subjects]
    yield from (f"the statement about {statement.about} does not name {name}" for name in missing)
    for name, digest in statement.subjects.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            yield f"{name}: it is missing"
            continue
        try:
            actual = hash_file(path)
        except OSError as error:
            yield f"{name}: it cannot be read: {error.strerror}"
            continue
        if actual != digest:
            yield f"{name}: it was changed after the release"


def _find_wrong_statements(
    folder: Path, statement: Statement, trusted: Sequence[PublicKey]
) -> Iterator[str]:
    for entry in statement.dependencies("statement"):
        name = get_field(entry, "name", of=str)
        path = folder / name
        for signed in read_statements(path, trusted):
            if signed.problem:
                yield f"{name}: {signed.problem}"
            elif not _has_text(path, get_field(entry, "digest", "sha256", of=str)):
                yield f"{name}: it was changed after the release"


def _has_text(path: Path, digest: str) -> bool:
    try:
        return text_digest(path) == digest
    except (Unreadable, signing.InvalidEnvelope):
        return False


_log = logging.getLogger(__name__)

_BUNDLE: Final = ".tvmflow"

# Files that describe the other files, and may differ after another tuning or verification.
_DESCRIPTIONS: Final = (
    *(LOCK, REPORT, BOM_SUFFIX),
    *(verify.DELIVERED_VERDICT, pick_best.ROOFLINE),
)

# RECIPE/TARGET/README.md
_TARGET_DEPTH: Final = 3

_SUMS_SEPARATOR: Final = "  "


class ReleaseResult(NamedTuple):
    """The outcome of a release: its folder, which is not created if gates fail, and the comparison.

    `comparisons` holds all recipes and targets; `content` holds the changes since the release `previous`, which is
    empty for the first release.
    """

    folder: Path
    is_new: bool
    previous: str = ""
    comparisons: tuple[TargetComparison, ...] = ()
    failed_gates: tuple[FailedGate, ...] = ()
    content: ContentChange = ContentChange()


def check_before_build(
    pipeline: Pipeline, release: Release, plan: Plan, requested: Collection[str]
) -> None:
    """Check the previous release, and the content of the new one, before anything is built.

    `requested` are all recipes and targets of the pipeline, including those that the command line does not select.

    Raises:
        RecipeError: if the release to compare with is missing, or `drop` names planned content.
        LockMismatch: if the previous release was changed.
        VerifyFailed: if the release would lack required content.
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
    is_released = find_folder(pipeline, release).is_dir()
    if not is_released and (previous := find_previous(pipeline, release)):
        change = compare_content(planned, list_locked(previous.lock))
        lost += check_content(change, previous.name, release)
    if lost:
        unique = {failed.label: failed for failed in reversed(lost)}
        lines = [f"{name}: {unique[name].gate}: {unique[name].message}" for name in sorted(unique)]
        raise VerifyFailed(
            "\n".join([*lines, "NOT RELEASED: nothing was built"]),
            fix="build it, without --target and --variant, or declare the removal: "
            f"`drop: [{', '.join(sorted(unique))}]` under `release` in {pipeline.path}",
        )


def make_release(
    pipeline: Pipeline,
    release: Release,
    lock: LockFile,
    plan: Plan,
    artifacts: Mapping[str, Artifact],
    store: LocalStore,
    device_locks: Path,
    stages: Sequence[StageReport],
) -> ReleaseResult:
    """Check the gates and create the release folder if all pass.

    `lock` must have all measurements, and `artifacts` the results of all stages. `stages` are the reports of the run
    that makes the release.

    Raises:
        LockMismatch: if the release exists with other files, or was changed.
        RecipeError: if the release to compare with is missing.
    """
    folder = find_folder(pipeline, release)
    files = dict(_list_files(plan, artifacts))
    if folder.is_dir():
        _check_existing(folder, files)
        return ReleaseResult(folder, is_new=False)
    previous = find_previous(pipeline, release)
    make_folder(folder.parent)
    with disk_errors(str(folder.parent)):
        part = folder.parent / f".{folder.name}.{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            for name, digest in files.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(store.blobs.verified_path(digest), part / name)
            result = _compare(folder, part, lock, plan, release, previous, device_locks)
            if not result.failed_gates:
                write_release_targets(part, list_delivered_targets(plan, artifacts), store)
                _write_documents(part, result, lock)
                measurements = make_measurements(
                    *(result.previous, result.comparisons, result.content),
                    *(release.gates, plan, artifacts),
                )
                page = describe_measurements(folder.name, lock, measurements)
                # Only the store has the details of stages and kernels.
                page = page._replace(
                    stages=list_stages(stages, store),
                    kernels=list_kernels(stages, store) or page.kernels,
                    recipes=read_recipes(plan.origins),
                )
                (part / MEASUREMENTS).write_text(measurements_text(measurements), encoding="utf-8")
                (part / MEASUREMENTS_PAGE).write_text(render_page(page), encoding="utf-8")
                write_release_statements(part, pipeline.name, release.version, MEASURED_FILES)
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return result


def _is_description(name: str) -> bool:
    """Return whether a file describes other files; a README inside a delivered folder is an output."""
    path = PurePosixPath(name)
    is_readme = path.name == README and len(path.parts) in (1, _TARGET_DEPTH)
    return is_readme or name.endswith(_DESCRIPTIONS)


def _list_files(plan: Plan, artifacts: Mapping[str, Artifact]) -> Iterator[tuple[str, str]]:
    """Yield `(RECIPE/TARGET/NAME, sha256)` of delivered files, except measured ones."""
    for delivered in list_delivered_targets(plan, artifacts):
        for name, digest in delivered.reproducible_files:
            yield f"{delivered.recipe}/{delivered.target}/{name}", digest


def _write_documents(part: Path, result: ReleaseResult, lock: LockFile) -> None:
    (part / LOCK).write_text(lock_text(without_measurements(lock)), encoding="utf-8")
    report = describe_release(result.folder.name, without_measurements(lock))
    (part / REPORT).write_text(render_page(report), encoding="utf-8")
    (part / README).write_text(make_readme(result.folder.name, lock), encoding="utf-8")
    # Statements are excluded, because later signatures change them.
    names = sorted(
        path.relative_to(part).as_posix()
        for path in part.rglob("*")
        if path.is_file() and not path.name.endswith(STATEMENT_SUFFIX)
    )
    sums = "".join(f"{hash_file(part / name)}{_SUMS_SEPARATOR}{name}\n" for name in names)
    (part / SUMS).write_text(sums, encoding="utf-8")


def _check_existing(folder: Path, files: Mapping[str, str]) -> None:
    """Check that an existing release has the same files, except measurements, and that none was changed."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LockMismatch(
            f"{folder} is not a release that tvmflow made: {SUMS}: {error.strerror}",
            fix="move it away, or raise release.version",
        ) from error
    rows = (line.partition(_SUMS_SEPARATOR) for line in lines)
    recorded = {name: digest for digest, _, name in rows}
    lasting = sorted(name for name in {*files, *recorded} if not _is_description(name))
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


def _compare(
    folder: Path,
    part: Path,
    current: LockFile,
    plan: Plan,
    release: Release,
    previous: PreviousRelease | None,
    device_locks: Path,
) -> ReleaseResult:
    comparisons = tuple(
        _measure_latencies(comparison, part, previous, device_locks)
        for comparison in compare_releases(current, previous and previous.lock)
    )
    failed, content = find_failed_gates(comparisons, release.gates), ContentChange()
    if previous is not None:
        content = compare_content(list_planned(plan), list_locked(previous.lock))
        failed += check_content(content, previous.name, release)
    return ReleaseResult(
        folder=folder,
        is_new=not failed,
        previous=previous.name if previous else "",
        comparisons=comparisons,
        failed_gates=tuple(failed),
        content=content,
    )


def _measure_latencies(
    comparison: TargetComparison, part: Path, previous: PreviousRelease | None, device_locks: Path
) -> TargetComparison:
    """Add both latencies to a comparison if both releases have a bundle that runs here."""
    # Without a latency from `verify`, the library does not run on this machine.
    is_timed = comparison.current.latency_us is not None and comparison.previous_seconds is not None
    if previous is None or not is_timed:
        return comparison
    name = f"{comparison.recipe}/{comparison.target}/{comparison.recipe}{_BUNDLE}"
    bundles = (part / name, previous.folder / name)
    if not all(path.is_file() for path in bundles):
        return comparison._replace(not_timed_reason="not both releases have a bundle")
    if hash_file(str(bundles[0])) == hash_file(str(bundles[1])):
        return comparison._replace(is_same_library=True)
    timed = time_alternately(*bundles, device_locks)
    if isinstance(timed, str):
        return comparison._replace(not_timed_reason=timed)
    return comparison._replace(latencies=timed)


# ---------------------------------------------------------------- README

_FILES: Final = (
    (REPORT, "what the release has, for a browser"),
    (MEASUREMENTS_PAGE, "what was measured, beside the previous release, for a browser"),
    (MEASUREMENTS, "the same for programs"),
    (LOCK, f"`tvmflow run PIPELINE --locked --lock {LOCK}` builds the same files again"),
    (SUMS, f"`sha256sum --check {SUMS}`"),
    (RELEASE_STATEMENT, "a statement about the whole folder, which may be signed"),
    (MEASUREMENTS_STATEMENT, "the same about the measurements"),
)


def make_readme(name: str, lock: LockFile) -> str:
    """Return the README of a release, which depends only on the lock file."""
    folders = "".join(
        f"- [`{recipe}/{target}`]({recipe}/{target}/{README})\n"
        for recipe, locked in lock.recipes.items()
        for target in locked.targets
    )
    rows = "".join(f"| [`{file}`]({file}) | {text} |\n" for file, text in _FILES)
    return f"""\
# {name}

Tuned and verified libraries, made by tvmflow. Each folder has a README of its own:

{folders}
| file | purpose |
|---|---|
{rows}
`tvmflow verify .` in this folder compares every file with the statements about them; `--trusted KEY.pub` asks for \
signatures as well.
"""
