"""`bundle`: one file with library, signature and manifest, which is checked before loading."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.files import hash_file
from tvmflow.core.types import Json
from tvmflow.exporters import exporter
from tvmflow.exporters.archives import write_zip
from tvmflow.exporters.exporter import BuiltModel, ExportRequest, PartitionedModel, link_or_copy
from tvmflow.runtime.bundles import LIBRARY_FORMAT, MANIFEST, PARTITIONED_FORMAT, SIGNATURE

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = exporter.loadable_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.tvmflow`."""
    return (f"{request.name}.tvmflow",)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Deliver the bundle, which `tvmflow.load` opens."""
    link_or_copy(built.bundle, folder / files(built.request)[0])


def write(built: BuiltModel, output: Path) -> None:
    """Write an uncompressed zip with `manifest.json`, `signature.json` and the library, in this order."""
    library = built.request.library_name
    content: dict[str, Path | bytes] = {SIGNATURE: exporter.json_bytes(built.signature)}
    content[library] = built.library
    _write({**built.manifest, "library": library}, LIBRARY_FORMAT, content, output)


def write_partitioned(
    manifest: Mapping[str, Json],
    signature: Mapping[str, Json],
    parts: Mapping[str, Path],
    output: Path,
) -> None:
    """Write the bundle of a partitioned model, which contains bundles of parts in place of a library."""
    part_files = {name: f"parts/{name}.tvmflow" for name in parts}
    listed = [{"name": name, "file": file} for name, file in part_files.items()]
    content: dict[str, Path | bytes] = {SIGNATURE: exporter.json_bytes(signature)}
    content |= {part_files[name]: path for name, path in parts.items()}
    _write({**manifest, "parts": listed}, PARTITIONED_FORMAT, content, output)


def _write(
    manifest: Mapping[str, Json],
    bundle_format: int,
    content: Mapping[str, Path | bytes],
    output: Path,
) -> None:
    known = manifest.get("sha256", {})
    files = {name: _describe(source, known.get(name)) for name, source in content.items()}
    document = {**manifest, "bundle": bundle_format, "files": files}
    write_zip(output, {MANIFEST: exporter.json_bytes(document), **content})


def _describe(source: Path | bytes, digest: str | None) -> dict[str, Json]:
    if isinstance(source, bytes):
        return {"bytes": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    return {"bytes": source.stat().st_size, "sha256": digest or hash_file(source)}
