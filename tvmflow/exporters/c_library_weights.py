"""`c-library-weights`: a plain C library without its weights, and these in a file that it maps or that a program has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters import c_library as c_library_exporter
from tvmflow.exporters.base import BuiltModel, ExportRequest
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import LibraryFiles
from tvmflow.targets.c_runtime.weights import write_weights

FORM: Final = c_library_exporter.FORM
SOURCES: Final = c_library_exporter.SOURCES

unsupported_reason = c_library_exporter.unsupported_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the header, the libraries and the weights, in a folder `<name>-c-library-weights`."""
    folder, names = _folder_name(request), (*_libraries(request), f"{request.name}.weights")
    return tuple(f"{folder}/{file}" for file in names if file)


def _folder_name(request: ExportRequest) -> str:
    return f"{request.name}-c-library-weights"


def _libraries(request: ExportRequest) -> LibraryFiles:
    """Return the names of header and libraries; a module of WebAssembly has no access to memory of others."""
    names = LibraryFiles.of(request.name, request.triple)
    return names._replace(shared="", loader="") if names.loader else names


def export(built: BuiltModel, folder: Path) -> None:
    """Write the weights, compile the C code, and write the libraries and the header."""
    place = folder / _folder_name(built.request)
    place.mkdir(exist_ok=True)
    names, compiled = _libraries(built.request), dict(built.forms[FORM])
    head = write_weights(compiled.pop(c_runtime.CONSTANTS), place / f"{built.name}.weights")
    model = built.c_model._replace(weights_head=head)
    c_library_exporter.write_library(model, compiled, names, place, place)
