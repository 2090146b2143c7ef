"""What a delivered file says of itself, read without running or loading anything in it."""

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

from tvmflow.bundles import IN_PARTS, WHOLE
from tvmflow.provenance.documents import Unreadable, at, read_json, shown
from tvmflow.values import Json

_CHUNK: Final = 1 << 20
_MOST_TEXT: Final = 16 << 20
_MOST_ENTRIES: Final = 10_000
_MOST_UNPACKED: Final = 1 << 30
BUNDLE: Final = ".tvmflow"

# What reading a damaged archive, or one that was made to hurt, ends in.
_BROKEN: Final = (
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
    # an encrypted entry; NotImplementedError is one too
    RuntimeError,
    ArithmeticError,
)

# What a file begins with -> what that makes it.
_MAGIC: Final[Mapping[bytes, str]] = {
    b"\x7fELF": "a shared library or an object file (ELF)",
    b"MZ": "a library for Windows",
    b"\xcf\xfa\xed\xfe": "a library or an object file for macOS",
    b"!<arch>\n": "a static library",
    b"PK\x03\x04": "a zip",
    b"\x1f\x8b": "a compressed archive",
}


class Inside(NamedTuple):
    """A bundle, or what one says that is packed in something else (`within`, empty otherwise).

    `problems` are sentences about content that is not what the manifest says.
    """

    manifest: Mapping[str, Json]
    signature: Mapping[str, Json]
    parts: Mapping[str, Inside]
    problems: tuple[str, ...]
    within: str = ""

    def models(self) -> Iterator[tuple[str, str]]:
        """`(import's file, sha256)` of the model and the weights that were built, if it is one library."""
        for field, name in (("ir_sha256", "model.json"), ("weights_sha256", "params.safetensors")):
            digest = at(self.manifest, "model", field, of=str)
            if digest:
                yield name, digest


def kind_of(path: Path) -> str:
    """What the file is by how it begins, in words."""
    with path.open("rb") as stream:
        begin = stream.read(8)
    found = [words for magic, words in _MAGIC.items() if begin.startswith(magic)]
    return found[0] if found else "a file"


def look_inside(path: Path) -> Inside | None:
    """The bundle that the file is or holds; None where there is none. Raises Unreadable for one that is torn."""
    with path.open("rb") as stream, _readable():
        begin = stream.read(4)
        stream.seek(0)
        if path.suffix == BUNDLE:
            return _bundle(stream, path.stat().st_size, nested=False)
        if begin == b"PK\x03\x04":
            return _in_zip(stream)
        if begin[:2] == b"\x1f\x8b" or tarfile.is_tarfile(stream):
            stream.seek(0)
            return _in_tar(stream)
    return None


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Whatever a damaged or a hostile archive makes its reader raise is a sentence."""
    try:
        yield
    except Unreadable:
        raise
    except _BROKEN as error:
        raise Unreadable(f"it is damaged ({shown(str(error))[1:-1]})") from error


# ---------------------------------------------------------------- bundles


def _bundle(stream: IO[bytes], size: int, *, nested: bool) -> Inside:
    """What a bundle of that many bytes says; one of a part is `nested`, and has no parts itself."""
    with zipfile.ZipFile(stream) as archive:
        names = _names(archive)
        if sum(entry.file_size for entry in archive.infolist()) > size:
            # entries that lie over each other would take for ever to read
            raise Unreadable("it says that it is larger inside than outside")
        if archive.infolist()[0].header_offset:
            # of a torn bundle, the index that is found last is that of a part inside
            raise Unreadable("its end is missing")
        manifest = _json(archive, names, "manifest.json")
        signature = _json(archive, names, "signature.json")
        form = manifest.get("bundle")
        if form == WHOLE:
            return Inside(manifest, signature, {}, tuple(_wrong_files(archive, names, manifest)))
        if form != IN_PARTS or nested:
            raise Unreadable(
                f"it has bundle format {shown(form)}, which this tvmflow does not read"
            )
        parts: dict[str, Inside] = {}
        for each in at(manifest, "parts", of=list):
            name, file = at(each, "name", of=str), at(each, "file", of=str)
            if file not in names:
                raise Unreadable(f"it has no part {shown(file)}")
            with archive.open(file) as inner:
                parts[name] = _bundle(inner, archive.getinfo(file).file_size, nested=True)
        problems = [f"part '{n}': {p}" for n, part in parts.items() for p in part.problems]
        return Inside(manifest, signature, parts, tuple(problems))


def _names(archive: zipfile.ZipFile) -> set[str]:
    """The entries' names. Raises Unreadable for what no bundle of ours has."""
    entries = archive.infolist()
    if not entries or len(entries) > _MOST_ENTRIES:
        raise Unreadable(f"it has {len(entries)} entries")
    names: set[str] = set()
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
            raise Unreadable(f"it has an entry that points out of it: {shown(entry.filename)}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise Unreadable(f"its entry {shown(entry.filename)} is compressed, as no bundle's is")
        if entry.filename in names:
            raise Unreadable(f"it has two entries {shown(entry.filename)}")
        names.add(entry.filename)
    return names


def _json(archive: zipfile.ZipFile, names: set[str], name: str) -> dict[str, Json]:
    if name not in names:
        raise Unreadable(f"it has no {name}")
    if archive.getinfo(name).file_size > _MOST_TEXT:
        raise Unreadable(f"its {name} is larger than any is")
    try:
        value = read_json(archive.read(name))
    except Unreadable as error:
        raise Unreadable(f"its {name}: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"its {name} is no object")
    return value


def _wrong_files(
    archive: zipfile.ZipFile, names: set[str], manifest: Mapping[str, Json]
) -> Iterator[str]:
    """A sentence for every entry that the manifest has another digest for, or none."""
    digests = at(manifest, "sha256", of=dict)
    library = at(manifest, "library", of=str) or "library.so"
    if library not in names:
        yield f"it has no {shown(library)}, of which its manifest speaks"
    for name in sorted(names - {"manifest.json", "signature.json"}):
        wanted = digests.get(name)
        if wanted is None:
            yield f"its manifest does not know its {shown(name)}"
        elif _digest(archive, name) != wanted:
            yield f"its {shown(name)} is not the one that its manifest describes"


def _digest(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    with archive.open(name) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------- in something else


def _in_zip(stream: IO[bytes]) -> Inside | None:
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if len(entries) > _MOST_ENTRIES:
            raise Unreadable(f"it has {len(entries)} entries")
        for entry in entries:
            if entry.filename.endswith(BUNDLE):
                with archive.open(entry) as inner:
                    return _packed(inner, entry.filename)
    return None


def _in_tar(stream: IO[bytes]) -> Inside | None:
    # a stream is read once from its beginning, so that what it unpacks to is counted
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        unpacked = 0
        for count, member in enumerate(archive):
            unpacked += member.size
            if unpacked > _MOST_UNPACKED or count > _MOST_ENTRIES:
                raise Unreadable("more is packed in it than is looked through")
            if member.isfile() and member.name.endswith(BUNDLE):
                inner = archive.extractfile(member)
                if inner is not None:
                    return _packed(inner, member.name)
    return None


def _packed(inner: IO[bytes], name: str) -> Inside:
    """A bundle that is packed in something else, in a file of its own while it is read."""
    with tempfile.TemporaryFile() as copy:
        while chunk := inner.read(_CHUNK):
            copy.write(chunk)
            if copy.tell() > _MOST_UNPACKED:
                raise Unreadable("more is packed in it than is looked through")
        size = copy.tell()
        copy.seek(0)
        return _bundle(copy, size, nested=False)._replace(within=name)
