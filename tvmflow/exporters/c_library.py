"""`c-library`: the model as a plain C library without TVM, with a header.

`c-library-weights` has the weights in a separate file. Models with image inputs have a second header with preprocessing
and class names, which C++ projects contain, too. `xcframework` is the static library for iPhones and the simulator.
"""

from __future__ import annotations

import math
import plistlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.generated_text import c_string, class_name
from tvmflow.core.types import Json, TensorSpec
from tvmflow.exporters.exporter import (
    BuiltModel,
    Exporter,
    ExportRequest,
    Form,
    fill_template,
    single_process_reason,
    write_text,
)
from tvmflow.runtime.images import LEVELS, Preprocessing, read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.targets import c_runtime, form_names
from tvmflow.targets.c_runtime import DescribedModel, LibraryFiles, describe_shape
from tvmflow.targets.c_runtime.weights import write_weights
from tvmflow.targets.linking import macho

_IMAGE_SOURCES: Final = (Path(__file__).with_name("images.h"),)
# NumPy type -> C type, where it is not the name with `_t`. float16 values are passed as bits.
_TYPES: Final[Mapping[str, str]] = {"float32": "float", "float64": "double", "float16": "uint16_t"}


def image_header_name(name: str) -> str:
    """Return the name of a model's image header.

    >>> image_header_name("digits")
    'digits-images.h'
    """
    return f"{name}-images.h"


def write_image_header(model: DescribedModel, manifest: Mapping[str, Json]) -> str:
    """Return a model's image header, with preprocessing and labels from the bundle's manifest."""
    entries = read_images(model, manifest)
    labels = read_labels(manifest)
    names = labels.names if labels else ()
    place, entry = next(iter(entries.items()))
    name = model.prefix.upper()
    values = {
        "TITLE": model.name,
        "PREFIX": model.prefix,
        "NAME": name,
        "TYPE": _type_of(entry),
        "COUNT": str(math.prod(entry.input.shape)),
        "PLACE": str(place),
        "TABLES": "\n".join(_write_table(model.prefix, i, entry) for i, entry in entries.items()),
        "PREPROCESSINGS": ",\n".join(_write_entries(model, entries)),
        "LABEL_COUNT": str(len(names)),
        "LABELS": "".join(f"{c_string(name)}, " for name in names),
    }
    return fill_template(_IMAGE_SOURCES[0].read_text(encoding="utf-8"), values)


def read_images(model: DescribedModel, manifest: Mapping[str, Json]) -> Mapping[int, Preprocessing]:
    """Return the preprocessing of each image input by the input's index."""
    inputs = [TensorSpec.from_json(tensor) for tensor in model.signature["inputs"]]
    entries = read_preprocessing(manifest, inputs)
    return {i: entries[spec.name] for i, spec in enumerate(inputs) if spec.name in entries}


def _type_of(entry: Preprocessing) -> str:
    return _TYPES.get(entry.input.dtype, f"{entry.input.dtype}_t")


def _write_table(prefix: str, place: int, entry: Preprocessing) -> str:
    table = entry.table()
    values = table.view("uint16") if entry.input.dtype == "float16" else table
    rows = ",\n".join("  {" + ", ".join(map(_literal, row)) + "}" for row in values)
    kind, name = _type_of(entry), f"{prefix}_levels{place}_"
    return f"static const {kind} {name}[{len(values)}][{LEVELS}] = {{\n{rows}}};"


def _literal(value: Any) -> str:
    """Return a NumPy scalar as an exact C literal."""
    kind = value.dtype.kind
    if kind == "f":
        return float(value).hex() + ("f" if value.dtype.itemsize == 4 else "")
    return f"{value}{'u' if kind == 'u' else ''}"


def _write_entries(model: DescribedModel, entries: Mapping[int, Preprocessing]) -> Iterator[str]:
    for place, entry in entries.items():
        height, width = entry.resize if isinstance(entry.resize, tuple) else (entry.resize or 0, 0)
        table = f"{model.prefix}_levels{place}_"
        fields = (
            place,
            describe_shape(model.signature["inputs"][place])[0],
            *(*entry.size, entry.channels, height, width),
            -1 if entry.pad is None else entry.pad,
            int(entry.interpolation == "bicubic"),
            int(entry.colour == "BGR"),
            int(entry.layout == "NHWC"),
            f"sizeof **{table}",
            table,
        )
        yield f"    {{{', '.join(map(str, fields))}}}"


# ---------------------------------------------------------------- libraries

FORM: Final = form_names.C_LIBRARY
SOURCES: Final = (*c_runtime.SOURCES, *_IMAGE_SOURCES)


def unsupported_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a C library (its kind, or its system), or an empty string."""
    return single_process_reason(request) or c_runtime.unsupported_reason(request.triple)


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the headers and the libraries, in a folder `<name>-c-library`."""
    names = (*LibraryFiles.of(request.name, request.triple), *_image_headers(request))
    return tuple(f"{request.name}-c-library/{file}" for file in names if file)


def _image_headers(request: ExportRequest) -> list[str]:
    return [image_header_name(request.name)] if request.has_images else []


def _write_image_headers(built: BuiltModel, folder: Path) -> None:
    for name in _image_headers(built.request):
        write_text(folder / name, write_image_header(built.c_model, built.manifest))


def export(built: BuiltModel, folder: Path) -> None:
    """Compile the C code, and write the libraries and the headers."""
    place = folder / f"{built.name}-c-library"
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
    """Write those files of a C library that have a name in `names`; no header if `headers` is None.

    `code` is a folder that keeps the C code and objects for further libraries of the model.
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
    """Return the files of the library, its weights, and headers."""
    names = (*_libraries(request), f"{request.name}.weights", *_image_headers(request))
    return tuple(f"{request.name}-c-library-weights/{file}" for file in names if file)


def _libraries(request: ExportRequest) -> LibraryFiles:
    """Return header and libraries; WebAssembly modules share no memory, so they get only a static one."""
    names = LibraryFiles.of(request.name, request.triple)
    return names._replace(shared="", loader="") if names.loader else names


def _export_with_weights(built: BuiltModel, folder: Path) -> None:
    """Write the library, and its weights in a file."""
    place = folder / f"{built.name}-c-library-weights"
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


# ---------------------------------------------------------------- frameworks for iOS

_MODULE_MAP: Final = "module.modulemap"
# The first version of the simulator on arm64 Macs.
_SIMULATOR_TRIPLE: Final = "arm64-apple-ios14.0-simulator"


class _Slice(NamedTuple):
    """A library in a folder of the framework: for the target, or for `triple` and Xcode's `variant`."""

    folder: str
    triple: str
    variant: str


_SLICES: Final = (
    _Slice("ios-arm64", "", ""),
    _Slice("ios-arm64-simulator", _SIMULATOR_TRIPLE, "simulator"),
)


def _no_framework_reason(request: ExportRequest) -> str:
    reason = unsupported_reason(request)
    if not reason and request.platform.system != "ios":
        return f"{request.triple} is not iOS: name the preset ios"
    return reason


def _framework_files(request: ExportRequest) -> tuple[str, ...]:
    names = LibraryFiles.of(request.name, request.triple)
    headers = f"Headers/{request.name}"
    in_slice = (names.static, f"{headers}/{names.header}", f"{headers}/{_MODULE_MAP}")
    paths = [f"{part.folder}/{file}" for part in _SLICES for file in in_slice]
    return tuple(f"{request.name}.xcframework/{path}" for path in ("Info.plist", *paths))


def _export_framework(built: BuiltModel, folder: Path) -> None:
    """Write the framework; slices share the kernels, and C code is compiled for each."""
    framework = folder / f"{built.name}.xcframework"
    names = LibraryFiles.of(built.name, built.request.triple)
    for part in _SLICES:
        headers = framework / part.folder / "Headers" / built.name
        headers.mkdir(parents=True)
        static, header = framework / part.folder / names.static, headers / names.header
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled = {}
            for name, path in built.forms[FORM].items():
                compiled[name] = path
                if part.triple and name.endswith(".o"):
                    compiled[name] = Path(scratch, name)
                    macho.write_for_simulator(path, compiled[name])
            model = built.c_model
            model = model._replace(triple=part.triple or model.triple)
            c_runtime.link(model, compiled, None, static, header)
        text = f'module {class_name(built.name)} {{\n  header "{names.header}"\n  export *\n}}\n'
        (headers / _MODULE_MAP).write_text(text, encoding="utf-8")
    libraries = [_describe_slice(part, names) for part in _SLICES]
    content = {
        "AvailableLibraries": libraries,
        "CFBundlePackageType": "XFWK",
        "XCFrameworkFormatVersion": "1.0",
    }
    (framework / "Info.plist").write_bytes(plistlib.dumps(content))


def _describe_slice(part: _Slice, names: LibraryFiles) -> dict[str, Json]:
    return {
        "HeadersPath": "Headers",
        "LibraryIdentifier": part.folder,
        "LibraryPath": names.static,
        "SupportedArchitectures": ["arm64"],
        "SupportedPlatform": "ios",
        **({"SupportedPlatformVariant": part.variant} if part.variant else {}),
    }


XCFRAMEWORK: Final[Exporter] = Form(
    FORM=FORM,
    unsupported_reason=_no_framework_reason,
    files=_framework_files,
    export=_export_framework,
    SOURCES=SOURCES,
)
"""The exporter `xcframework`."""
