"""`bundle`: one file with library, signature and a manifest that is checked before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.types import Json
from tvmflow.exporters import _base
from tvmflow.exporters._archives import write_zip
from tvmflow.exporters._base import BuiltModel, ExportRequest, PartitionedModel
from tvmflow.runtime.bundles import PARTITIONED_FORMAT

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
        "manifest.json": _base.json_bytes(built.manifest),
        "signature.json": _base.json_bytes(built.signature),
        built.request.library_name: built.library.read_bytes(),
    }
    write_zip(output, content)


def write_partitioned(
    manifest: Mapping[str, Json],
    signature: Mapping[str, Json],
    parts: Mapping[str, Path],
    output: Path,
) -> None:
    """Write the bundle of a partitioned model: the bundle of each part, in order, in place of the library."""
    part_files = {name: f"parts/{name}.tvmflow" for name in parts}
    listed = [{"name": name, "file": file} for name, file in part_files.items()]
    content = {
        "manifest.json": _base.json_bytes(
            {**manifest, "bundle": PARTITIONED_FORMAT, "parts": listed}
        ),
        "signature.json": _base.json_bytes(signature),
    }
    content |= {part_files[name]: path.read_bytes() for name, path in parts.items()}
    write_zip(output, content)
