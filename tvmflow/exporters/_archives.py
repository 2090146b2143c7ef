"""Archives whose bytes depend on their content alone: no times, no owners, one order."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Final

# The earliest time that a zip can hold; any fixed time makes equal content equal bytes.
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)

# With zlib's default level, weights as C text (a gigabyte for ResNet-50) take minutes, and become a sixth smaller.
_LEVEL: Final = 4
_COMPRESSED: Final = frozenset({"archive", "c-source"})


def compressor_versions(outputs: Collection[str]) -> dict[str, str]:
    """Return what the bytes of these outputs depend on besides their content: versions of zlib differ."""
    return {"zlib": zlib.ZLIB_RUNTIME_VERSION} if _COMPRESSED & set(outputs) else {}


def write_zip(output: Path, content: Mapping[str, bytes]) -> None:
    """Write a zip without compression, its entries in the order of `content`."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)


def write_tar(output: Path, files: Mapping[str, Path | bytes]) -> None:
    """Write a tar of files, or of contents, sorted by name."""
    with output.open("wb") as stream:
        _write_entries(stream, files)


def write_tar_gz(output: Path, files: Mapping[str, Path | bytes]) -> None:
    """Write a compressed tar of files, or of contents, sorted by name; its header has no file name and no time."""
    with (
        output.open("wb") as stream,
        gzip.GzipFile("", "wb", _LEVEL, fileobj=stream, mtime=0) as compressed,
    ):
        _write_entries(compressed, files)


def _write_entries(stream: IO[bytes] | gzip.GzipFile, files: Mapping[str, Path | bytes]) -> None:
    # entries are plain ustar, except for names that are too long for it
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            source = files[name]
            content = source if isinstance(source, bytes) else source.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
