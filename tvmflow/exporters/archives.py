"""Reproducible archives (no times, no owners, fixed order), and the output `archive`.

The output contains all other delivered files of a target.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Final

from tvmflow.exporters.exporter import BuiltModel, ExportRequest, PartitionedModel, no_reason

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = no_reason

# The earliest time in a zip; a fixed time makes archives reproducible.
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)

# zlib's default level would take minutes for weights as C code (1 GB for ResNet-50), and save only a sixth.
_LEVEL: Final = 4
_CHUNK: Final = 1 << 20
_COMPRESSED: Final = frozenset({"archive", "c-source"})


def compressor_versions(outputs: Collection[str]) -> dict[str, str]:
    """Return the version of zlib if the bytes of these outputs depend on it."""
    return {"zlib": zlib.ZLIB_RUNTIME_VERSION} if _COMPRESSED & set(outputs) else {}


def write_zip(output: Path, content: Mapping[str, Path | bytes]) -> None:
    """Write an uncompressed zip in the order of `content`, which maps names to files or bytes."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for name, source in content.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            stream, entry.file_size = _open(source)
            with stream, archive.open(entry, "w") as written:
                shutil.copyfileobj(stream, written, _CHUNK)


def _open(source: Path | bytes) -> tuple[IO[bytes], int]:
    if isinstance(source, bytes):
        return io.BytesIO(source), len(source)
    return source.open("rb"), source.stat().st_size


def write_tar(output: Path, files: Mapping[str, Path | bytes]) -> None:
    """Write a tar sorted by name; `files` maps names to files or bytes."""
    with output.open("wb") as stream:
        _write_entries(stream, files)


def write_tar_gz(output: Path, files: Mapping[str, Path | bytes]) -> None:
    """Write a gzipped tar sorted by name; `files` maps names to files or bytes."""
    with (
        output.open("wb") as stream,
        gzip.GzipFile("", "wb", _LEVEL, fileobj=stream, mtime=0) as compressed,
    ):
        _write_entries(compressed, files)


def _write_entries(stream: IO[bytes] | gzip.GzipFile, files: Mapping[str, Path | bytes]) -> None:
    # The PAX format writes plain ustar entries, except for long names.
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            stream, entry.size = _open(files[name])
            entry.mode = 0o644
            with stream:
                archive.addfile(entry, stream)


# ---------------------------------------------------------------- the output


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.<target>.tar.gz`."""
    return (f"{request.name}.{request.target}.tar.gz",)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Archive the other delivered files, in a folder with the recipe's name."""
    content = {f"{built.name}/{name}": path for name, path in built.exported_files.items()}
    write_tar_gz(folder / files(built.request)[0], content)
