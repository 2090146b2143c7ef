"""`c-library`: the model as a plain C library that needs nothing of TVM: libraries and a header.

`c-library-weights` is such a library without its weights, and these in a file that it maps or that a
program has in memory.
A model of images has a second header, with their preprocessing and the names of the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.compiler import form_names
from tvmflow.exporters import c_images
from tvmflow.exporters.base import BuiltModel, Exporter, ExportRequest, Form, c_library_reason
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel, LibraryFiles
from tvmflow.targets.c_runtime.weights import write_weights

FORM: Final = form_names.C_LIBRARY
SOURCES: Final = (*c_runtime.SOURCES, *c_images.SOURCES)


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no C library for a target: its kind, or a system without headers."""
    return c_library_reason(request) or c_runtime.unsupported_reason(request.triple)


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the headers and the libraries, in a folder `<name>-c-library`."""
    names = (*LibraryFiles.of(request.name, request.triple), *_image_headers(request))
    return tuple(f"{_folder_name(request)}/{file}" for file in names if file)


def _image_headers(request: ExportRequest) -> list[str]:
    return [c_images.header_name(request.name)] if request.has_images else []


def _write_image_headers(built: BuiltModel, folder: Path) -> None:
    for name in _image_headers(built.request):
        text = c_images.write_header(built.c_model, built.manifest)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _folder_name(request: ExportRequest) -> str:
    return f"{request.name}-c-library"


def export(built: BuiltModel, folder: Path) -> None:
    """Compile the C code, and write the libraries and the headers."""
    place = folder / _folder_name(built.request)
    place.mkdir(exist_ok=True)
    names = LibraryFiles.of(built.name, built.request.triple)
    write_library(built.c_model, built.forms[FORM], names, place, place, built.c_code)
    _write_image_headers(built, place)


def write_library(
    model: DescribedModel,
    compiled: Mapping[str, Path],
    names: LibraryFiles,
    folder: Path,
    headers: Path | None,
    code: Path | None = None,
) -> None:
    """Write those files of a C library that have a name.

    Without the folder `headers`, the header is written already. `code` has C code and objects of the same model.

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
        folder=code,
    )
    if names.loader:
        (folder / names.loader).write_text(c_runtime.write_loader(model), encoding="utf-8")


# ---------------------------------------------------------------- weights in a file


def _files_with_weights(request: ExportRequest) -> tuple[str, ...]:
    """Return the headers, the libraries and the weights, in a folder `<name>-c-library-weights`."""
    folder, weights = _weights_folder_name(request), f"{request.name}.weights"
    names = (*_libraries(request), weights, *_image_headers(request))
    return tuple(f"{folder}/{file}" for file in names if file)


def _weights_folder_name(request: ExportRequest) -> str:
    return f"{request.name}-c-library-weights"


def _libraries(request: ExportRequest) -> LibraryFiles:
    """Return the names of header and libraries; a module of WebAssembly has no access to memory of others."""
    names = LibraryFiles.of(request.name, request.triple)
    return names._replace(shared="", loader="") if names.loader else names


def _export_with_weights(built: BuiltModel, folder: Path) -> None:
    """Write the weights, compile the C code, and write the libraries and the headers."""
    place = folder / _weights_folder_name(built.request)
    place.mkdir(exist_ok=True)
    names, compiled = _libraries(built.request), dict(built.forms[FORM])
    head = write_weights(compiled.pop(c_runtime.CONSTANTS), place / f"{built.name}.weights")
    model = built.c_model._replace(weights_head=head)
    write_library(model, compiled, names, place, place)
    _write_image_headers(built, place)


WITH_WEIGHTS: Final[Exporter] = Form(
    FORM=FORM,
    unsupported_reason=unsupported_reason,
    files=_files_with_weights,
    export=_export_with_weights,
    SOURCES=SOURCES,
)
"""The exporter `c-library-weights`."""
