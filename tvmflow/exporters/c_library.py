"""`c-library`: the model as a plain C library that needs nothing of TVM: libraries and a header."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.compiler import form_names
from tvmflow.exporters._base import BuiltModel, ExportRequest, cpu_only_reason
from tvmflow.targets import c_library

FORM: Final = form_names.C_LIBRARY
SOURCES: Final = c_library.SOURCES


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no C library for a target: only CPUs and the systems whose headers there are."""
    return cpu_only_reason(request) or c_library.unsupported_reason(request.triple)


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the header and the libraries, in a folder `<name>-c-library`."""
    names = c_library.LibraryFiles.of(request.name, request.triple)
    return tuple(f"{_folder_name(request)}/{file}" for file in names if file)


def _folder_name(request: ExportRequest) -> str:
    return f"{request.name}-c-library"


def export(built: BuiltModel, folder: Path) -> None:
    """Compile the C code, and write the libraries and the header."""
    place = folder / _folder_name(built.request)
    place.mkdir(exist_ok=True)
    names = c_library.LibraryFiles.of(built.name, built.request.triple)
    c_library.link(
        built.c_model,
        built.forms[FORM],
        place / names.shared if names.shared else None,
        place / names.static,
        place / names.header,
        place / names.import_library if names.import_library else None,
    )
    if names.loader:
        (place / names.loader).write_text(c_library.write_loader(built.c_model))
