"""Reads what a delivered file says of itself, without running or loading anything in it."""

from __future__ import annotations

import contextlib
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from tvmflow.core.documents import Unreadable, get_field, quote
from tvmflow.core.file_kinds import recognize
from tvmflow.runtime.bundles import (
    DEFAULT_MAX_BYTES,
    Bundle,
    read_content,
)
from tvmflow.runtime.zips import ZIP_ERRORS, check_entries, check_name, check_zip_end

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

    Args:
        path: The file.
        max_bytes: How much a bundle may have, and an archive may unpack to.

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
