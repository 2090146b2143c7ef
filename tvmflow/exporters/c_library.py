"""`c-library`: the model as a plain C library that needs nothing of TVM: libraries and a header."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.compiler import form_names
from tvmflow.exporters.base import BuiltModel, ExportRequest, cpu_only_reason
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel, LibraryFiles

FORM: Final = form_names.C_LIBRARY
SOURCES: Final = c_runtime.SOURCES


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no C library for a target: only CPUs and the systems whose headers there are."""
    return cpu_only_reason(request) or c_runtime.unsupported_reason(request.triple)


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the header and the libraries, in a folder `<name>-c-library`."""
    names = LibraryFiles.of(request.name, request.triple)
    return tuple(f"{_folder_name(request)}/{file}" for file in names if file)


def _folder_name(request: ExportRequest) -> str:
    return f"{request.name}-c-library"


def export(built: BuiltModel, folder: Path) -> None:
    """Compile the C code, and write the libraries and the header."""
    place = folder / _folder_name(built.request)
    place.mkdir(exist_ok=True)
    names = LibraryFiles.of(built.name, built.request.triple)
    write_library(built.c_model, built.forms[FORM], names, place, place)


def write_library(
    model: DescribedModel,
    compiled: Mapping[str, Path],
    names: LibraryFiles,
    folder: Path,
    headers: Path | None,
) -> None:
    """Write those files of a C library that have a name.

    Args:
        model: The model.
        compiled: What `build` compiled for it, by file name.
        names: The names.
        folder: The folder of the libraries.
        headers: The folder of the header; None where it is written already.

    Raises:
        StageError: when compiler or linker fails; the message holds its error.
    """
    c_runtime.link(
        model,
        compiled,
        folder / names.shared if names.shared else None,
        folder / names.static,
        headers / names.header if headers else None,
        folder / names.import_library if names.import_library else None,
    )
    if names.loader:
        (folder / names.loader).write_text(c_runtime.write_loader(model), encoding="utf-8")
