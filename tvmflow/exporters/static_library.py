"""`static-library`: the objects for another linker, as part of a larger library or program."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.compiler.form_names import VM
from tvmflow.exporters.base import BuiltModel, ExportRequest, loadable_cpu_reason
from tvmflow.targets.linking import archive_static

FORM: Final = VM
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = loadable_cpu_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `lib<name>.a`, or `<name>.lib` for Microsoft's linker."""
    return (library_name(request, request.name),)


def library_name(request: ExportRequest, stem: str) -> str:
    """Return the file name that linkers of the target's system expect of the static library `stem`."""
    suffix = request.platform.static_suffix
    return f"{stem}{suffix}" if suffix == ".lib" else f"lib{stem}{suffix}"


def export(built: BuiltModel, folder: Path) -> None:
    """Write the objects of the shared library to an archive."""
    objects = list(built.forms[FORM].values())
    archive_static(objects, folder / files(built.request)[0], built.request.triple)
