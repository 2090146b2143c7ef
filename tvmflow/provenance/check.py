"""Checks delivered files against statements of provenance and their signatures."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tvmflow.core.documents import Unreadable, get_field
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text
from tvmflow.core.signing import PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX
from tvmflow.provenance.contents import BUNDLE, find_bundle, list_model_files
from tvmflow.runtime.bundles import DEFAULT_MAX_BYTES
from tvmflow.runtime.statements import (
    Finding,
    SignedStatement,
    compare_file,
    find_statements,
    read_statements,
)

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- files


def check_file(
    path: Path, statements: Sequence[SignedStatement], max_bytes: int = DEFAULT_MAX_BYTES
) -> Finding:
    """Compare a file with statements, and a bundle also with its own manifest.

    Args:
        path: The file.
        statements: The statements that may be about it.
        max_bytes: The size of the largest bundle that is read.
    """
    if path.is_symlink() or not path.is_file():
        return Finding(path, False, "it is not a regular file, and nothing else was delivered")
    try:
        digest = hash_file(str(path))
    except OSError as error:
        return Finding(path, False, f"it cannot be read: {error.strerror}")
    finding = compare_file(path, digest, statements)
    problems = list(_bundle_problems(path, finding, max_bytes)) if finding.good else []
    return finding._replace(good=False, message=problems[0]) if problems else finding


def _bundle_problems(path: Path, finding: Finding, max_bytes: int) -> Iterator[str]:
    """Yield the differences of a bundle from its own manifest and from its statement."""
    try:
        content = find_bundle(path, max_bytes) if path.suffix == BUNDLE else None
    except Unreadable as error:
        yield str(error)
        return
    if content is None:
        return
    yield from content.bundle.problems
    assert finding.source is not None and finding.source.statement is not None
    if finding.source.statement.is_of_measurements:
        return
    results = finding.source.statement.dependencies("result")
    names = [get_field(entry, "name", of=str).rpartition("/")[2] for entry in results]
    digests = [get_field(entry, "digest", "sha256", of=str) for entry in results]
    used = set(zip(names, digests, strict=True))
    for bundle in (content.bundle, *content.bundle.parts.values()):
        for name, digest in list_model_files(bundle):
            if (name, digest) not in used:
                yield f"its manifest names another {name} than {finding.source.path.name} does"


# ---------------------------------------------------------------- folders


def check_delivered(
    path: Path,
    trusted: Sequence[PublicKey],
    statements: Sequence[Path] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[Finding]:
    """Yield a finding for a file, or for every file in a folder and every one that is missing.

    Args:
        path: A file or a folder.
        trusted: Keys of which one must have signed; none to believe all statements.
        statements: Files of statements; by default those beside each file or in folders above.
        max_bytes: The size of the largest bundle that is read.
    """
    read_once = functools.cache(functools.partial(read_statements, trusted=tuple(trusted)))
    files = list(_list_files(path)) if path.is_dir() else [path]
    if not files:
        yield Finding(path, False, "the folder is empty")
    for file in files:
        if file.name.endswith(STATEMENT_SUFFIX):
            yield from _check_statements(file, trusted)
        else:
            sources = statements or find_statements(file)
            signed = [statement for source in sources for statement in read_once(source)]
            yield check_file(file, signed, max_bytes)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder but folders; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders.sort()
        yield from (Path(parent, name) for name in sorted([*names, *links]))


def _check_statements(path: Path, trusted: Sequence[PublicKey]) -> Iterator[Finding]:
    """Yield whether each statement in a file is believed, and which of its files are missing."""
    for signed in read_statements(path, trusted):
        if signed.problem or signed.statement is None:
            _log.debug("%s: %s", path, signed.problem)
            yield Finding(path, False, signed.problem, signed)
            continue
        subjects = signed.statement.subjects
        message = f"{count_text(len(subjects), 'file')}, {signed.signature}"
        yield Finding(path, True, message, signed)
        for name in subjects:
            file = path.parent / name
            if not file.is_file():
                yield Finding(file, False, f"it is missing, but {path.name} names it", signed)
