"""Archives whose bytes depend on their content alone: no times, no owners, one order."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

# The earliest time that a zip can hold; any fixed one makes equal content equal bytes.
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def write_zip(output: Path, content: Mapping[str, bytes]) -> None:
    """A zip without compression, its entries in the order of `content`."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)


def write_tar(output: Path, files: Mapping[str, Path | bytes]) -> None:
    """A tar of files, or of contents, sorted by name."""
    with output.open("wb") as stream:
        _fill(stream, files)


def write_tar_gz(output: Path, files: Mapping[str, Path | bytes]) -> None:
    """The same, compressed; its header names neither a file nor a time."""
    with (
        output.open("wb") as stream,
        gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed,
    ):
        _fill(packed, files)


def _fill(stream: IO[bytes] | gzip.GzipFile, files: Mapping[str, Path | bytes]) -> None:
    # plain ustar, but for names that are too long for it
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            source = files[name]
            content = source if isinstance(source, bytes) else source.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
