"""Reads what a delivered file says of itself, without running or loading anything in it."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Final, NamedTuple

from tvmflow.core.documents import Unreadable, get_field, quote, read_json
from tvmflow.core.types import Json
from tvmflow.runtime.bundles import LIBRARY_FORMAT, PARTITIONED_FORMAT

BUNDLE: Final = ".tvmflow"
_MANIFEST: Final = "manifest.json"
_SIGNATURE: Final = "signature.json"
_CHUNK: Final = 1 << 20
_MAX_JSON_BYTES: Final = 16 << 20
_MAX_ENTRIES: Final = 10_000
_MAX_UNPACKED_BYTES: Final = 1 << 30
_ZIP_MAGIC: Final = b"PK\x03\x04"
_GZIP_MAGIC: Final = b"\x1f\x8b"

# The errors of readers of archives that are damaged, or made to do harm.
_ARCHIVE_ERRORS: Final = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    # An encrypted entry; NotImplementedError is one too.
    RuntimeError,
    ArithmeticError,
)

# The kind of a file by its first bytes.
_KINDS: Final[Mapping[bytes, str]] = {
    b"\x7fELF": "a shared library or an object file (ELF)",
    b"MZ": "a library for Windows",
    b"\xcf\xfa\xed\xfe": "a library or an object file for macOS",
    b"!<arch>\n": "a static library",
    _ZIP_MAGIC: "a zip",
    _GZIP_MAGIC: "a compressed archive",
}


class BundleContent(NamedTuple):
    """The documents of a bundle.

    Attributes:
        manifest: The manifest.
        signature: The model's inputs and outputs.
        parts: The bundles of a partitioned model, by the names of its parts.
        problems: A sentence for each file that is not what the manifest describes.
        path_in_archive: Its place in an archive or wheel; empty for a file of its own.
    """

    manifest: Mapping[str, Json]
    signature: Mapping[str, Json]
    parts: Mapping[str, BundleContent]
    problems: tuple[str, ...]
    path_in_archive: str = ""

    def model_files(self) -> Iterator[tuple[str, str]]:
        """Yield name and sha256 of the model and the weights that one library was built from."""
        for field, name in (("ir_sha256", "model.json"), ("weights_sha256", "params.safetensors")):
            digest = get_field(self.manifest, "model", field, of=str)
            if digest:
                yield name, digest


def describe_kind(path: Path) -> str:
    """Return the kind of a file by its first bytes, for people."""
    with path.open("rb") as stream:
        start = stream.read(8)
    return next((kind for magic, kind in _KINDS.items() if start.startswith(magic)), "a file")


def find_bundle(path: Path) -> BundleContent | None:
    """Return the bundle that a file is or contains; None where there is none.

    Raises:
        Unreadable: The bundle or the archive is damaged.
    """
    with path.open("rb") as stream, _archive_errors():
        start = stream.read(4)
        stream.seek(0)
        if path.suffix == BUNDLE:
            return _read_bundle(stream, path.stat().st_size, is_part=False)
        if start == _ZIP_MAGIC:
            return _find_in_zip(stream)
        if start[:2] == _GZIP_MAGIC or tarfile.is_tarfile(stream):
            stream.seek(0)
            return _find_in_tar(stream)
    return None


@contextlib.contextmanager
def _archive_errors() -> Iterator[None]:
    """Raise Unreadable for whatever a damaged or harmful archive makes its reader raise."""
    try:
        yield
    except Unreadable:
        raise
    except _ARCHIVE_ERRORS as error:
        raise Unreadable(f"it is damaged ({quote(str(error))[1:-1]})") from error


# ---------------------------------------------------------------- bundles


def _read_bundle(stream: IO[bytes], size: int, *, is_part: bool) -> BundleContent:
    """Return the content of a bundle.

    Args:
        stream: The file.
        size: Its bytes.
        is_part: It is the bundle of a part, which has no parts itself.
    """
    with zipfile.ZipFile(stream) as archive:
        names = _read_names(archive)
        if sum(entry.file_size for entry in archive.infolist()) > size:
            # Entries that overlap would take forever to read.
            raise Unreadable("its entries are larger than the file")
        if archive.infolist()[0].header_offset:
            # The index that is found last in a truncated bundle is that of a part inside it.
            raise Unreadable("its end is missing")
        manifest = _read_object(archive, names, _MANIFEST)
        signature = _read_object(archive, names, _SIGNATURE)
        bundle_format = manifest.get("bundle")
        if bundle_format == LIBRARY_FORMAT:
            problems = tuple(_find_wrong_files(archive, names, manifest))
            return BundleContent(manifest, signature, {}, problems)
        if bundle_format != PARTITIONED_FORMAT or is_part:
            raise Unreadable(
                f"it has bundle format {quote(bundle_format)}, which this tvmflow does not read"
            )
        parts = _read_parts(archive, names, manifest)
    problems = tuple(
        f"part '{name}': {problem}" for name, part in parts.items() for problem in part.problems
    )
    return BundleContent(manifest, signature, parts, problems)


def _read_parts(
    archive: zipfile.ZipFile, names: set[str], manifest: Mapping[str, Json]
) -> dict[str, BundleContent]:
    parts: dict[str, BundleContent] = {}
    for entry in get_field(manifest, "parts", of=list):
        file = get_field(entry, "file", of=str)
        if file not in names:
            raise Unreadable(f"it has no part {quote(file)}")
        with archive.open(file) as inner:
            size = archive.getinfo(file).file_size
            parts[get_field(entry, "name", of=str)] = _read_bundle(inner, size, is_part=True)
    return parts


def _read_names(archive: zipfile.ZipFile) -> set[str]:
    """Return the names of the entries.

    Raises:
        Unreadable: There is an entry that no bundle has.
    """
    entries = archive.infolist()
    if not entries or len(entries) > _MAX_ENTRIES:
        raise Unreadable(f"it has {len(entries)} entries")
    names: set[str] = set()
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
            raise Unreadable(f"it has an entry that points outside of it: {quote(entry.filename)}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise Unreadable(f"its entry {quote(entry.filename)} is compressed, as no bundle's is")
        if entry.filename in names:
            raise Unreadable(f"it has two entries {quote(entry.filename)}")
        names.add(entry.filename)
    return names


def _read_object(archive: zipfile.ZipFile, names: set[str], name: str) -> dict[str, Json]:
    """Return the JSON object in an entry.

    Raises:
        Unreadable: There is no such entry, or it holds something else.
    """
    if name not in names:
        raise Unreadable(f"it has no {name}")
    if archive.getinfo(name).file_size > _MAX_JSON_BYTES:
        raise Unreadable(f"its {name} is larger than {_MAX_JSON_BYTES >> 20} MB")
    try:
        value = read_json(archive.read(name))
    except Unreadable as error:
        raise Unreadable(f"its {name}: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"its {name} is no object")
    return value


def _find_wrong_files(
    archive: zipfile.ZipFile, names: set[str], manifest: Mapping[str, Json]
) -> Iterator[str]:
    """Yield a sentence for every entry that the manifest has another digest for, or none."""
    digests = get_field(manifest, "sha256", of=dict)
    library = get_field(manifest, "library", of=str) or "library.so"
    if library not in names:
        yield f"it has no {quote(library)}, which its manifest names"
    for name in sorted(names - {_MANIFEST, _SIGNATURE}):
        expected = digests.get(name)
        if expected is None:
            yield f"its manifest does not name its {quote(name)}"
        elif _digest(archive, name) != expected:
            yield f"its {quote(name)} is not the one that its manifest describes"


def _digest(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    with archive.open(name) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------- archives and wheels


def _find_in_zip(stream: IO[bytes]) -> BundleContent | None:
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if len(entries) > _MAX_ENTRIES:
            raise Unreadable(f"it has {len(entries)} entries")
        for entry in entries:
            if entry.filename.endswith(BUNDLE):
                with archive.open(entry) as inner:
                    return _read_packed(inner, entry.filename)
    return None


def _find_in_tar(stream: IO[bytes]) -> BundleContent | None:
    # A stream is read once from its beginning, so that what it unpacks to is counted.
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        unpacked = 0
        for count, member in enumerate(archive):
            unpacked += member.size
            if unpacked > _MAX_UNPACKED_BYTES or count > _MAX_ENTRIES:
                raise Unreadable("it unpacks to more than the limit of this check")
            if member.isfile() and member.name.endswith(BUNDLE):
                inner = archive.extractfile(member)
                if inner is not None:
                    return _read_packed(inner, member.name)
    return None


def _read_packed(inner: IO[bytes], name: str) -> BundleContent:
    """Return the content of a bundle in an archive, which is unpacked into a temporary file."""
    with tempfile.TemporaryFile() as copy:
        while chunk := inner.read(_CHUNK):
            copy.write(chunk)
            if copy.tell() > _MAX_UNPACKED_BYTES:
                raise Unreadable("it unpacks to more than the limit of this check")
        size = copy.tell()
        copy.seek(0)
        return _read_bundle(copy, size, is_part=False)._replace(path_in_archive=name)
