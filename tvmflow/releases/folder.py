"""Makes a release: files, lock, checksums and report in one folder, all at once and once for all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

from tvmflow.delivery import VERDICT
from tvmflow.errors import LockMismatch, RecipeError
from tvmflow.locks import Lock, read_lock
from tvmflow.provenance.beside import groups
from tvmflow.provenance.writing import write_release
from tvmflow.recipe import LAST, NONE, Pipeline, Release
from tvmflow.releases import gates, page, timing
from tvmflow.releases.gates import Miss, Row
from tvmflow.stages import pick_best
from tvmflow.stores.local import LocalStore, disk_errors, hash_file
from tvmflow.values import Artifact, Plan

LOCK: Final = "release.lock.yaml"
SUMS: Final = "SHA256SUMS"
REPORT: Final = "report.html"
_BUNDLE: Final = ".tvmflow"

# What tells of one run, and what is only in the folder: the rest of a release is the same whenever it is made.
_OF_TODAY: Final = (LOCK, REPORT, VERDICT, pick_best.ROOFLINE)


class Released(NamedTuple):
    """How a release ended: its folder, whether it is `new`, and the gates that were missed, for which there is none."""

    folder: Path
    new: bool
    against: str
    rows: tuple[Row, ...]
    misses: tuple[Miss, ...]


def make_release(
    pipeline: Pipeline,
    release: Release,
    lock: str,
    plan: Plan,
    artifacts: Mapping[str, Artifact],
    store: LocalStore,
    locks: Path,
) -> Released:
    """Judge what the plan's results are, and put them into `<name>-<version>` if every gate is passed.

    `lock` is the text of their lock. A release that is there and holds the same files is left as it
    is. Raises LockMismatch when it holds others, RecipeError when there is none to compare with.
    """
    home = pipeline.path.parent / release.folder
    folder = home / f"{pipeline.name}-{release.version}"
    files = dict(_files(plan, artifacts))
    if folder.is_dir():
        return _there(folder, files)
    before = _before(pipeline, release, home)
    with disk_errors(str(home)):
        home.mkdir(parents=True, exist_ok=True)
        part = home / f".{folder.name}.{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            _fill(part, files, store)
            (part / LOCK).write_text(lock, encoding="utf-8")
            now = read_lock(part / LOCK).file
            rows = _timed(gates.rows(now, before and before.file), part, before, locks)
            missed = gates.misses(rows, release.gates)
            against = before.path.parent.name if before else ""
            if not missed:
                (part / REPORT).write_text(
                    page.render(folder.name, against, rows, now), encoding="utf-8"
                )
                ours = {name: hash_file(str(part / name)) for name in (LOCK, REPORT)}
                (part / SUMS).write_text(_sums(files) + _sums(ours), encoding="utf-8")
                described = groups(plan, artifacts)
                write_release(part, pipeline.name, release.version, described, store)
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return Released(folder, not missed, against, tuple(rows), tuple(missed))


def _files(plan: Plan, artifacts: Mapping[str, Artifact]) -> Iterator[tuple[str, str]]:
    """`(recipe/target/name, sha256)` of all that is delivered."""
    for delivery in plan.deliveries:
        if delivery.stage_id in artifacts:
            digests = artifacts[delivery.stage_id].digests(())
            for stored, name in delivery.files:
                yield f"{delivery.recipe}/{delivery.target}/{name}", digests[stored]


def _sums(files: Mapping[str, str]) -> str:
    """As `sha256sum` writes and checks them."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))


def _there(folder: Path, files: Mapping[str, str]) -> Released:
    """A release that was made before; its files are looked at again. Times in it may be others now."""
    try:
        recorded = (folder / SUMS).read_text(encoding="utf-8")
    except OSError as error:
        raise LockMismatch(
            f"{folder} is no release that tvmflow made: {SUMS}: {error.strerror}",
            fix="move it away, or raise release.version",
        ) from error
    there = {line[66:]: line[:64] for line in recorded.splitlines()}
    lasting = {name for name in {*files, *there} if not name.endswith(_OF_TODAY)}
    changed = [name for name in sorted(lasting) if files.get(name) != there.get(name)]
    if changed:
        raise LockMismatch(
            f"{folder} is there, and holds another {changed[0]}",
            fix="releases are not made twice: raise release.version",
        )
    for name, digest in there.items():
        if hash_file(str(folder / name)) != digest:
            raise LockMismatch(
                f"{folder / name} is not what was released", fix=f"remove {folder}, and run again"
            )
    return Released(folder, False, "", (), ())


def _fill(part: Path, files: Mapping[str, str], store: LocalStore) -> None:
    for name, digest in files.items():
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.checked_blob(digest), path)


# ---------------------------------------------------------------- the release before


def _before(pipeline: Pipeline, release: Release, home: Path) -> Lock | None:
    """The lock of the release to compare with; None where there is none yet."""
    if release.against == NONE:
        return None
    found = dict(_releases(pipeline.name, home))
    if release.against != LAST:
        if release.against not in found:
            where = pipeline.where("release", "against") if pipeline.where else str(pipeline.path)
            raise RecipeError(
                f"{where}: release.against: there is no release {release.against} in {home}",
                fix=f"there are: {', '.join(found) or 'none'}",
            )
        return read_lock(found[release.against] / LOCK)
    older = [each for each in found if Version(each) < Version(release.version)]
    return read_lock(found[max(older, key=Version)] / LOCK) if older else None


def _releases(name: str, home: Path) -> Iterator[tuple[str, Path]]:
    """`(version, folder)` of every release of this name."""
    for folder in sorted(home.glob(f"{name}-*")):
        version = folder.name.removeprefix(f"{name}-")
        try:
            Version(version)
        except InvalidVersion:
            continue
        if (folder / LOCK).is_file():
            yield version, folder


def _timed(rows: Sequence[Row], part: Path, before: Lock | None, locks: Path) -> list[Row]:
    """The rows with times of both releases, where both have a bundle that runs here."""
    return [_with_times(row, part, before, locks) for row in rows]


def _with_times(row: Row, part: Path, before: Lock | None, locks: Path) -> Row:
    # what was not timed when it was verified does not run here
    if before is None or row.now.get("latency_us") is None or row.seconds_before is None:
        return row
    below = f"{row.recipe}/{row.target}/{row.recipe}{_BUNDLE}"
    bundles = (part / below, before.path.parent / below)
    if not all(path.is_file() for path in bundles):
        return row._replace(untimed="there is no bundle of both")
    if hash_file(str(bundles[0])) == hash_file(str(bundles[1])):
        return row._replace(same=True)
    found = timing.side_by_side(*bundles, locks)
    return row._replace(untimed=found) if isinstance(found, str) else row._replace(timed=found)
