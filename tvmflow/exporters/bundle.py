"""`bundle`: one file with library, signature and a manifest that is checked before anything is loaded."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.types import Json
from tvmflow.exporters import _base
from tvmflow.exporters._archives import write_zip
from tvmflow.exporters._base import BuiltModel, ExportRequest, PartitionedModel
from tvmflow.runtime.bundles import LIBRARY_FORMAT, MANIFEST, PARTITIONED_FORMAT, SIGNATURE

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = _base.no_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.tvmflow`."""
    return (f"{request.name}.tvmflow",)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Copy the bundle, which `tvmflow.load` opens."""
    shutil.copyfile(built.bundle, folder / files(built.request)[0])


def write(built: BuiltModel, output: Path) -> None:
    """Write a zip without compression: `manifest.json`, `signature.json` and the library, in this order."""
    content = {
        SIGNATURE: _base.json_bytes(built.signature),
        built.request.library_name: built.library.read_bytes(),
    }
    _write(built.manifest, LIBRARY_FORMAT, content, output)


def write_partitioned(
    manifest: Mapping[str, Json],
    signature: Mapping[str, Json],
    parts: Mapping[str, Path],
    output: Path,
) -> None:
    """Write the bundle of a partitioned model: the bundle of each part, in order, in place of the library."""
    part_files = {name: f"parts/{name}.tvmflow" for name in parts}
    listed = [{"name": name, "file": file} for name, file in part_files.items()]
    content = {SIGNATURE: _base.json_bytes(signature)}
    content |= {part_files[name]: path.read_bytes() for name, path in parts.items()}
    _write({**manifest, "parts": listed}, PARTITIONED_FORMAT, content, output)


def _write(
    manifest: Mapping[str, Json], bundle_format: int, content: Mapping[str, bytes], output: Path
) -> None:
    """Write a zip whose manifest has size and digest of every other file in it."""
    files = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }
    document = {**manifest, "bundle": bundle_format, "files": files}
    write_zip(output, {MANIFEST: _base.json_bytes(document), **content})
