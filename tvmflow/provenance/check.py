"""Checks delivered files against statements of provenance and their signatures.

What a file says of itself is read without running or loading anything in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import lzma
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from tvmflow.core.documents import Unreadable, get_field, quote
from tvmflow.core.file_kinds import recognize
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text
from tvmflow.core.signing import PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX
from tvmflow.runtime.bundles import DEFAULT_MAX_BYTES, Bundle, read_content
from tvmflow.runtime.statements import (
    Finding,
    SignedStatement,
    compare_file,
    find_statements,
    read_statements,
)
from tvmflow.runtime.zips import ZIP_ERRORS, check_entries, check_name, check_zip_end

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- files


def check_file(
    path: Path, statements: Sequence[SignedStatement], max_bytes: int = DEFAULT_MAX_BYTES
) -> Finding:
    """Compare a file with statements, and a bundle also with its own manifest.

    A larger bundle than `max_bytes` is not read.
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

    One of the trusted keys must have signed; with none, all statements are believed. By default, statements are
    those beside each file or in folders above.
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


# ---------------------------------------------------------------- what a file says of itself


BUNDLE: Final = ".tvmflow"
_CHUNK: Final = 1 << 20
_MAX_ENTRIES: Final = 10_000
_MAX_HEADER_BYTES: Final = 1 << 20
_ZIP_MAGIC: Final = b"PK\x03\x04"
_GZIP_MAGIC: Final = b"\x1f\x8b"

# The errors of readers of archives that are damaged, or made to do harm.
_ARCHIVE_ERRORS: Final = (*ZIP_ERRORS, tarfile.TarError, zlib.error, lzma.LZMAError)


class FoundBundle(NamedTuple):
    """A bundle, and its place in an archive or wheel; that is empty for a file of its own."""

    bundle: Bundle
    path_in_archive: str = ""


def list_model_files(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """Yield name and sha256 of the model and the weights that one library was built from."""
    for field, name in (("ir_sha256", "model.json"), ("weights_sha256", "params.safetensors")):
        digest = get_field(bundle.manifest, "model", field, of=str)
        if digest:
            yield name, digest


def describe_kind(path: Path) -> str:
    """Return the kind of a file for people."""
    kind = recognize(path)
    return kind.text.removeprefix("is ") if kind and kind.text.startswith("is ") else "a file"


def find_bundle(path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> FoundBundle | None:
    """Return the bundle that a file is or contains; None where there is none.

    `max_bytes` limits the bundle, and what an archive may unpack to.

    Raises:
        Unreadable: The bundle or the archive is damaged, or larger than that.
    """
    with path.open("rb") as stream, _archive_errors():
        start = stream.read(4)
        stream.seek(0)
        if path.suffix == BUNDLE:
            if path.stat().st_size > max_bytes:
                raise _too_large(max_bytes)
            return FoundBundle(read_content(stream, with_libraries=False))
        if start == _ZIP_MAGIC:
            return _find_in_zip(stream, max_bytes)
        if start[:2] == _GZIP_MAGIC or tarfile.is_tarfile(stream):
            stream.seek(0)
            return _find_in_tar(stream, max_bytes)
    return None


def _too_large(max_bytes: int) -> Unreadable:
    return Unreadable(f"it has, or unpacks to, more than the limit of {max_bytes} bytes")


@contextlib.contextmanager
def _archive_errors() -> Iterator[None]:
    """Raise Unreadable for whatever a damaged or harmful archive makes its reader raise."""
    try:
        yield
    except Unreadable:
        raise
    except _ARCHIVE_ERRORS as error:
        raise Unreadable(f"it is damaged ({quote(str(error))[1:-1]})") from error


# ---------------------------------------------------------------- archives and wheels


def _find_in_zip(stream: IO[bytes], max_bytes: int) -> FoundBundle | None:
    check_zip_end(stream)
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        name = next((entry.filename for entry in entries if entry.filename.endswith(BUNDLE)), "")
        if not name:
            return None
        check_entries(entries, max_bytes)
        with archive.open(name) as inner:
            return _read_packed(inner, name, max_bytes)


class _Member(tarfile.TarInfo):
    """A member of a tar whose extended header, which is read as a whole, is not large."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Return the member that a header describes."""
        member = super().frombuf(buf, encoding, errors)
        is_header = member.type not in tarfile.SUPPORTED_TYPES or member.type in _HEADER_TYPES
        if is_header and member.size > _MAX_HEADER_BYTES:
            raise Unreadable(f"it has a header of {member.size} bytes")
        return member


_HEADER_TYPES: Final = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def _find_in_tar(stream: IO[bytes], max_bytes: int) -> FoundBundle | None:
    first: FoundBundle | None = None
    problems: list[str] = []
    names: set[str] = set()
    unpacked = 0
    # A stream is read once from its beginning, so that what it unpacks to is counted.
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member) as archive:
        for count, member in enumerate(archive):
            unpacked += member.size
            if unpacked > max_bytes or count > _MAX_ENTRIES:
                raise _too_large(max_bytes)
            try:
                check_name(member.name, names)
            except Unreadable as error:
                problems.append(str(error))
            names.add(member.name)
            if not member.isreg() or member.issparse():
                problems.append(f"its entry {quote(member.name)} is not a file")
            elif member.name.endswith(BUNDLE) and not first:
                inner = archive.extractfile(member)
                assert inner is not None
                first = _read_packed(inner, member.name, max_bytes)
    # An archive of something else may have what it wants.
    if first and problems:
        raise Unreadable(problems[0])
    return first


def _read_packed(inner: IO[bytes], name: str, max_bytes: int) -> FoundBundle:
    """Return the content of a bundle in an archive, which is unpacked into a temporary file."""
    with tempfile.TemporaryFile() as copy:
        while chunk := inner.read(_CHUNK):
            copy.write(chunk)
            if copy.tell() > max_bytes:
                raise _too_large(max_bytes)
        copy.seek(0)
        return FoundBundle(read_content(copy, with_libraries=False), name)
