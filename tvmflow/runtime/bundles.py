"""Reading bundles (`.tvmflow` files), which are untrusted and may be for another machine.

Nothing is unpacked to a path that a bundle names. No entry is larger than the bundle. The manifest states the size and
digest of every other entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Final, NamedTuple

from tvmflow.core.documents import Unreadable, get_field, quote, read_json
from tvmflow.core.errors import BundleError
from tvmflow.core.types import Json

LIBRARY_FORMAT: Final = 3
"""The format of a bundle with a library inside."""
PARTITIONED_FORMAT: Final = 4
"""The format of a bundle with the bundles of a model's parts inside."""
DEFAULT_MAX_BYTES: Final = 8 << 30
"""The default limit of the size of a bundle, and of the tensors of its model."""

MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "signature.json"
LIBRARY_NAMES: Final = ("library.so", "library.dylib", "library.dll")

C_RUNTIME: Final = "c"
"""The C runtime, which is part of the library and calls its kernels."""
VM: Final = "vm"
"""TVM's virtual machine, which runs the library."""

_CHUNK: Final = 1 << 20
_MAX_JSON_BYTES: Final = 16 << 20


class Bundle(NamedTuple):
    """The content of a bundle: a library, or the bundles of the model's parts by name, in order.

    The library is in `library`, or in `library_file` if it was written to a file; `problems` holds a sentence for
    each file that differs from the manifest.
    """

    manifest: Mapping[str, Json]
    signature: Mapping[str, Json]
    library: bytes
    parts: Mapping[str, Bundle]
    problems: tuple[str, ...] = ()
    library_file: Path | None = None


def runtime_of(manifest: Mapping[str, Json]) -> str:
    """Return the runtime in a manifest, C_RUNTIME or VM; ValueError for any other."""
    runtime = manifest.get("runtime")
    if runtime not in (C_RUNTIME, VM):
        raise ValueError(f"the runtime {quote(runtime)} is unknown")
    return str(runtime)


def read_bundle(path: str | Path, *, with_libraries: bool = True) -> Bundle:
    """Return the content of a bundle, checked against its manifest, with or without the libraries.

    Raises:
        BundleError: when the file is missing, damaged, too large or of another format.
    """
    with open_file(path, DEFAULT_MAX_BYTES) as stream:
        return read_open_bundle(path, stream, with_libraries=with_libraries)


def read_open_bundle(
    path: str | Path,
    stream: IO[bytes],
    libraries: Path | None = None,
    *,
    with_libraries: bool = True,
) -> Bundle:
    """Return a bundle as `read_bundle` does, and write its libraries to the folder `libraries`.

    Raises:
        BundleError: when the file is damaged or of another format, or the folder cannot be written.
    """
    try:
        bundle = read_content(stream, with_libraries=with_libraries, libraries=libraries)
    except _Unwritable as error:
        raise BundleError(
            f"the library of {path} cannot be written to a file: {error}",
            fix="check the temporary folder ($TMPDIR)",
        ) from error
    except Unreadable as error:
        raise damaged_bundle_error(path, _explain(stream) or error) from None
    if bundle.problems:
        raise damaged_bundle_error(path, "; ".join(bundle.problems))
    return bundle


@contextlib.contextmanager
def open_file(path: str | Path, max_bytes: int) -> Iterator[IO[bytes]]:
    """Open a regular file up to a size limit; BundleError if it is missing, larger or not regular."""
    with contextlib.ExitStack() as opened:
        try:
            # without O_NONBLOCK, opening a named pipe would wait for a writer forever
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            opened.callback(os.close, descriptor)
            status = os.fstat(descriptor)
        except FileNotFoundError:
            reason, fix = f"there is no file {path}", "`tvmflow run RECIPE` builds it"
            raise BundleError(reason, fix=fix) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fix = "give the path of a file that can be read"
            raise BundleError(f"{path} cannot be read: {reason}", fix=fix) from None
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is not a file", fix="give the path of a file")
        if status.st_size > max_bytes:
            raise BundleError(
                f"{path} has {status.st_size} bytes, more than the limit of {max_bytes}",
                fix="if it is to be that large, load it with a larger max_bytes",
            )
        yield opened.enter_context(os.fdopen(descriptor, "rb", closefd=False))


def damaged_file_error(path: str | Path, kind: str, reason: object) -> BundleError:
    """Return the error for a file that is not of the expected kind."""
    return BundleError(f"{path} is not {kind}: {reason}", fix="copy or build it again")


def damaged_bundle_error(path: str | Path, reason: object) -> BundleError:
    """Return the error for a bundle that is unusable."""
    return damaged_file_error(path, "a complete tvmflow bundle", reason)


def _explain(stream: IO[bytes]) -> str:
    """Return a hint if another delivered file was passed as a bundle; else an empty string."""
    with contextlib.suppress(Unreadable, *ZIP_ERRORS):
        stream.seek(0)
        start = stream.read(2)
        if start == b"\x1f\x8b":
            return "it is a compressed archive; unpack it, and load the .tvmflow file in it"
        stream.seek(0)
        check_zip_end(stream)
        with zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
        if MANIFEST not in names and any(name.endswith(".dist-info/WHEEL") for name in names):
            return "it is a wheel; install it with pip, and import the model"
    return ""


class _Unwritable(Exception):
    """A library cannot be written to a file."""


def read_content(
    stream: IO[bytes], *, with_libraries: bool = True, libraries: Path | None = None
) -> Bundle:
    """Return the content of a bundle; its `problems` are the differences from its manifest.

    Raises:
        Unreadable: It is not a bundle, or it is malicious.
    """
    try:
        keeps = with_libraries and libraries is None
        return _read(stream, keeps, libraries, is_part=False)
    except Unreadable:
        raise
    except ZIP_ERRORS as error:
        raise Unreadable(f"it is damaged ({quote(str(error))[1:-1]})") from error


def _read(
    stream: IO[bytes], with_libraries: bool, libraries: Path | None, *, is_part: bool
) -> Bundle:
    """Return the content of a bundle; the bundle of a part (`is_part`) must not have parts itself."""
    check_zip_end(stream)
    size = stream.seek(0, os.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        _check_stored(archive)
        # overlapping entries (a zip bomb) would take forever to read
        names = check_entries(archive.infolist(), size)
        contents = {name: _read_document(archive, names, name) for name in (MANIFEST, SIGNATURE)}
        manifest, signature = (_parse_object(name, text) for name, text in contents.items())
        described = get_field(manifest, "files", of=dict)
        library, copies, parts = "", dict[str, Path](), dict[str, Bundle]()
        if _check_format(manifest.get("bundle"), is_part=is_part) == LIBRARY_FORMAT:
            library = get_field(manifest, "library", of=str)
            if library not in LIBRARY_NAMES:
                text = f"its manifest calls the library {quote(library)}, as no bundle does"
                raise Unreadable(text)
            if library not in names | described.keys():
                raise Unreadable(f"it has no {quote(library)}")
            if library in names and with_libraries:
                contents[library] = archive.read(library)
            if library in names and libraries:
                copies[library] = libraries / library
        else:
            parts = _read_parts(archive, names, manifest, with_libraries, libraries)
        problems = list(_find_wrong_files(archive, names, described, contents, copies))
    for name, part in parts.items():
        problems += [f"part '{name}': {problem}" for problem in part.problems]
    return Bundle(
        manifest=manifest,
        signature=signature,
        library=contents.get(library, b""),
        parts=parts,
        problems=tuple(problems),
        library_file=copies.get(library),
    )


def _check_stored(archive: zipfile.ZipFile) -> None:
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise Unreadable(f"its entry {quote(entry.filename)} is compressed, as no bundle's is")
        if entry is archive.infolist()[0] and entry.header_offset:
            # a truncated bundle may end with the index of a part, whose first entry is not at offset 0
            raise Unreadable("it is damaged (its end is missing)")


def _check_format(number: Json, *, is_part: bool) -> int:
    """Return the format of a bundle, one of the two known ones; Unreadable for any other."""
    if type(number) is int and (
        number == LIBRARY_FORMAT or (number == PARTITIONED_FORMAT and not is_part)
    ):
        return number
    raise Unreadable(
        f"it has bundle format {quote(number)}, and this tvmflow reads {LIBRARY_FORMAT} and "
        f"{PARTITIONED_FORMAT}; load it with the tvmflow that made it"
    )


def _read_parts(
    archive: zipfile.ZipFile,
    names: set[str],
    manifest: Mapping[str, Json],
    with_libraries: bool,
    libraries: Path | None,
) -> dict[str, Bundle]:
    parts: dict[str, Bundle] = {}
    for entry in get_field(manifest, "parts", of=list):
        name, file = get_field(entry, "name", of=str), get_field(entry, "file", of=str)
        if file not in names:
            raise Unreadable(f"it has no part {quote(file)}")
        if not name or name in parts:
            raise Unreadable(f"it has two parts {quote(name)}, or one without a name")
        folder = libraries and libraries / str(len(parts))
        if folder:
            folder.mkdir()
        with archive.open(file) as inner:
            parts[name] = _read(inner, with_libraries, folder, is_part=True)
    if not parts:
        raise Unreadable("its manifest names no parts")
    return parts


def _read_document(archive: zipfile.ZipFile, names: set[str], name: str) -> bytes:
    if name not in names:
        raise Unreadable(f"it has no {name}")
    if archive.getinfo(name).file_size > _MAX_JSON_BYTES:
        raise Unreadable(f"its {name} is larger than {_MAX_JSON_BYTES >> 20} MB")
    return archive.read(name)


def _parse_object(name: str, text: bytes) -> dict[str, Json]:
    try:
        value = read_json(text)
    except Unreadable as error:
        raise Unreadable(f"its {name}: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"its {name} is not an object")
    return value


def _find_wrong_files(
    archive: zipfile.ZipFile,
    names: set[str],
    described: Mapping[str, Json],
    contents: Mapping[str, bytes],
    copies: Mapping[str, Path],
) -> Iterator[str]:
    """Yield a sentence for each file that differs from the manifest; copy files to paths in `copies`."""
    for name in sorted(described.keys() - names):
        yield f"it has no {quote(name)}, which its manifest names"
    for name in sorted(names - {MANIFEST}):
        if name not in described:
            yield f"its manifest does not name its {quote(name)}"
            continue
        size = get_field(described[name], "bytes", of=int)
        digest = get_field(described[name], "sha256", of=str)
        if size != archive.getinfo(name).file_size or digest != _digest(
            archive, name, contents, copies.get(name)
        ):
            yield f"its {quote(name)} is not the one that its manifest describes"


def _digest(
    archive: zipfile.ZipFile, name: str, contents: Mapping[str, bytes], copy: Path | None
) -> str:
    """Return the digest of a file, and optionally write a copy."""
    if name in contents:
        return hashlib.sha256(contents[name]).hexdigest()
    digest = hashlib.sha256()
    with archive.open(name) as stream, _open_copy(copy) as target:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            with _explain_unwritable():
                target.write(chunk)
                target.flush()
    return digest.hexdigest()


def _open_copy(path: Path | None) -> IO[bytes]:
    with _explain_unwritable():
        return Path(path or os.devnull).open("wb")


@contextlib.contextmanager
def _explain_unwritable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error) from error


# ---------------------------------------------------------------- untrusted zip files

# The end of a zip: signature, 8 unused bytes, size and offset of the index, length of the comment (here 0).
_ZIP_END: Final = struct.Struct("<4s8sIIH")
_ZIP_END_MAGIC: Final = b"PK\5\6"
_ENCRYPTED: Final = 0x1
_MAX_INDEX_BYTES: Final = 16 << 20
_MAX_ENTRIES: Final = 10_000

ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    struct.error,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    # for an encrypted entry, or a compression that Python does not support
    RuntimeError,
    ArithmeticError,
)
"""The errors that reading damaged or malicious zips may raise."""


def check_zip_end(stream: IO[bytes]) -> None:
    """Check that a stream ends with the index of a zip, and that the index is small.

    Python would read an index of any size, and look for it in the middle of a damaged file.

    Raises:
        Unreadable: The index is missing or too large.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - _ZIP_END.size, 0))
    end = stream.read(_ZIP_END.size)
    stream.seek(0)
    if len(end) < _ZIP_END.size or not end.startswith(_ZIP_END_MAGIC):
        raise Unreadable("it is damaged (its end is missing)")
    _, _, index_bytes, _, _ = _ZIP_END.unpack(end)
    if index_bytes > _MAX_INDEX_BYTES:
        raise Unreadable("it is damaged (its index is too large)")


def check_entries(entries: Collection[zipfile.ZipInfo], max_bytes: int) -> set[str]:
    """Return the names of a zip's entries.

    Raises:
        Unreadable: if there are none or too many, if they are too large, or if one is not a regular file, is encrypted,
            is a duplicate, or points outside of the zip.
    """
    if not entries or len(entries) > _MAX_ENTRIES:
        raise Unreadable(f"it has {len(entries)} entries")
    names: set[str] = set()
    for entry in entries:
        check_name(entry.filename, names)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.is_dir() or kind not in (0, stat.S_IFREG):
            raise Unreadable(f"its entry {quote(entry.filename)} is not a file")
        if entry.flag_bits & _ENCRYPTED:
            raise Unreadable(f"its entry {quote(entry.filename)} is encrypted")
        names.add(entry.filename)
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise Unreadable(f"its entries are larger than {max_bytes} bytes")
    return names


def check_name(name: str, names: Collection[str]) -> None:
    """Raise Unreadable if an entry's name points outside of the zip, or repeats one of `names`."""
    path = PurePosixPath(name)
    is_outside = path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive
    if is_outside or "\\" in name:
        raise Unreadable(f"it has an entry that points outside of it: {quote(name)}")
    if name in names:
        raise Unreadable(f"it has two entries {quote(name)}")
