"""The previous release: found in the folder of all releases, and verified before any comparison."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

from tvmflow.core import signing
from tvmflow.core.documents import Unreadable, get_field
from tvmflow.core.errors import LockMismatch, RecipeError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text
from tvmflow.core.project import find_project, shortest_path
from tvmflow.core.signing import PublicKey
from tvmflow.planning.pipelines import Pipeline
from tvmflow.provenance.write import MEASUREMENTS_STATEMENT, RELEASE_STATEMENT, text_digest
from tvmflow.recipe import LAST_RELEASE, NO_RELEASE, Release
from tvmflow.recipe.lock_file import LockFile, read_lock
from tvmflow.release.measurements import LOCK, read_measurements, with_measurements
from tvmflow.runtime.statements import Statement, read_statements

_log = logging.getLogger(__name__)

SUMS: Final = "SHA256SUMS"

_SHOWN_PROBLEMS: Final = 5


class PreviousRelease(NamedTuple):
    """The release to compare with: its folder, and its lock file with the measurements of that time."""

    folder: Path
    lock: LockFile

    @property
    def name(self) -> str:
        """Its name and version."""
        return self.folder.name


def find_folder(pipeline: Pipeline, release: Release) -> Path:
    """Return the folder of a release, which need not exist."""
    if release.folder is None:
        home = Path(shortest_path(find_project().releases))
    else:
        home = pipeline.path.parent / release.folder
    return home / f"{pipeline.name}-{release.version}"


def find_previous(pipeline: Pipeline, release: Release) -> PreviousRelease | None:
    """Return the release to compare with, which was verified; None when there is none yet.

    Raises:
        RecipeError: when `against` names a release that does not exist.
        LockMismatch: when the release is not as it was made, or not signed by a key that is trusted.
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
    """Yield `(version, folder)` of every release of a pipeline, damaged or not."""
    for folder in sorted(home.glob(f"{name}-*")):
        version = folder.name.removeprefix(f"{name}-")
        try:
            Version(version)
        except InvalidVersion:
            continue
        if folder.is_dir():
            yield version, folder


def _read_verified(folder: Path, about: str) -> PreviousRelease:
    problems = list(find_problems(folder, about))
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        more = len(problems) - len(shown)
        if more:
            shown.append(f"and {count_text(more, 'problem')} more")
        lines = "".join(f"\n  {problem}" for problem in shown)
        raise LockMismatch(
            f"{folder}, the release to compare with, is not as it was made:{lines}",
            fix="restore it from a copy, or compare with another release (release.against: a version, "
            "or none); `tvmflow verify` checks the whole folder",
        )
    try:
        lock, measurements = read_lock(folder / LOCK).file, read_measurements(folder)
    except RecipeError as error:
        raise RecipeError(
            error.problems,
            fix="compare with another release (release.against: a version, or none)",
        ) from error
    return PreviousRelease(folder, with_measurements(lock, measurements) if measurements else lock)


# ---------------------------------------------------------------- verification


def find_problems(folder: Path, about: str) -> Iterator[str]:
    """Yield what is wrong with a release: files, checksums, measurements, statements and signatures.

    `about` is its name and version, which its statements must give.
    """
    trusted = _trusted_keys(folder / RELEASE_STATEMENT)
    for problem, statement in _read_statement(folder, RELEASE_STATEMENT, about, trusted):
        yield from problem
        if statement is None:
            continue
        yield from _find_wrong_files(folder, statement, (LOCK, SUMS))
        yield from _find_wrong_statements(folder, statement, trusted)
        measured = statement.measured_files
        if measured:
            yield from _find_wrong_measurements(folder, about, measured, trusted)


def _find_wrong_measurements(
    folder: Path, about: str, measured: Sequence[str], trusted: Sequence[PublicKey]
) -> Iterator[str]:
    """Yield what is wrong with the measured files, which a statement of their own names."""
    for problem, statement in _read_statement(folder, MEASUREMENTS_STATEMENT, about, trusted):
        yield from problem
        if statement is None:
            continue
        yield from _find_wrong_files(folder, statement, measured)
        # Measurements of another release have a good statement, too.
        for entry in statement.dependencies("statement"):
            if not _has_text(
                folder / RELEASE_STATEMENT, get_field(entry, "digest", "sha256", of=str)
            ):
                yield f"{MEASUREMENTS_STATEMENT}: it is about other files than those of this release"


def _read_statement(
    folder: Path, name: str, about: str, trusted: Sequence[PublicKey]
) -> Iterator[tuple[list[str], Statement | None]]:
    """Yield each statement in a file, or what is wrong with it."""
    for signed in read_statements(folder / name, trusted):
        if signed.problem or signed.statement is None:
            yield [f"{name}: {signed.problem}"], None
        elif signed.statement.about != about:
            yield [f"{name}: it is about {signed.statement.about}, not {about}"], None
        else:
            yield [], signed.statement


def _trusted_keys(statement: Path) -> tuple[PublicKey, ...]:
    """Return the keys that the environment trusts; without them, the own key if it signed the statement."""
    trusted = signing.load_trusted_keys()
    own = None if trusted else signing.load_signing_key()
    if own and any(own.public.id in signed.key_ids for signed in read_statements(statement, ())):
        return (own.public,)
    return trusted


def _find_wrong_files(folder: Path, statement: Statement, required: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the files that a statement names, and which it should name."""
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
    """Yield what is wrong with the statements that a statement depends on."""
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
