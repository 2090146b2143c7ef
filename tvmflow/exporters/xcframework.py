"""`xcframework`: the model as a static library for iPhones and for the simulator, as Xcode takes it."""

from __future__ import annotations

import plistlib
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.generated_text import class_name
from tvmflow.core.types import Json
from tvmflow.exporters import c_library
from tvmflow.exporters.base import BuiltModel, ExportRequest
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import LibraryFiles
from tvmflow.targets.linking import macho

FORM: Final = c_library.FORM
SOURCES: Final = c_library.SOURCES

_MODULE_MAP: Final = "module.modulemap"
# The first simulator on Macs with this CPU.
_SIMULATOR_TRIPLE: Final = "arm64-apple-ios14.0-simulator"


class _Slice(NamedTuple):
    """A library in the framework.

    Attributes:
        folder: Its folder.
        triple: Its triple, where that is not the target's.
        variant: Xcode's name of what it is for, besides phones.
    """

    folder: str
    triple: str
    variant: str


_SLICES: Final = (
    _Slice("ios-arm64", "", ""),
    _Slice("ios-arm64-simulator", _SIMULATOR_TRIPLE, "simulator"),
)


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no framework for a target: it is not for iOS."""
    reason = c_library.unsupported_reason(request)
    if not reason and request.platform.system != "ios":
        return f"{request.triple} is not iOS: name the preset ios"
    return reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the files of the framework, in a folder `<name>.xcframework`."""
    names = LibraryFiles.of(request.name, request.triple)
    headers = f"Headers/{request.name}"
    in_slice = (names.static, f"{headers}/{names.header}", f"{headers}/{_MODULE_MAP}")
    paths = [f"{part.folder}/{file}" for part in _SLICES for file in in_slice]
    return tuple(f"{request.name}.xcframework/{path}" for path in ("Info.plist", *paths))


def export(built: BuiltModel, folder: Path) -> None:
    """Write the framework: the same kernels for both, and C code that is compiled for each.

    Raises:
        StageError: when the compiler fails; the message holds its error.
    """
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
    libraries = [_describe(part, names) for part in _SLICES]
    content = {
        "AvailableLibraries": libraries,
        "CFBundlePackageType": "XFWK",
        "XCFrameworkFormatVersion": "1.0",
    }
    (framework / "Info.plist").write_bytes(plistlib.dumps(content))


def _describe(part: _Slice, names: LibraryFiles) -> dict[str, Json]:
    return {
        "HeadersPath": "Headers",
        "LibraryIdentifier": part.folder,
        "LibraryPath": names.static,
        "SupportedArchitectures": ["arm64"],
        "SupportedPlatform": "ios",
        **({"SupportedPlatformVariant": part.variant} if part.variant else {}),
    }
