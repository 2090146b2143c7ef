"""`system-library`: a static library that registers itself with TVM's runtime when the program starts.

All its symbols begin with a prefix of its own, so that one program may hold several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.compiler import form_names
from tvmflow.core.generated_text import identifier
from tvmflow.exporters import base, static_library
from tvmflow.exporters.base import BuiltModel, ExportRequest
from tvmflow.targets.c_runtime import symbol_prefix, write_tensor_comment
from tvmflow.targets.linking import archive_static

FORM: Final = form_names.SYSTEM_LIBRARY
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = base.loadable_cpu_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `lib<name>-system.a` (`<name>-system.lib` for Microsoft's linker), `<name>-system.h`."""
    library = static_library.library_name(request, f"{request.name}-system")
    return (library, f"{request.name}-system.h")


def export(built: BuiltModel, folder: Path) -> None:
    """Write the library, and a header with its prefix and the model's inputs and outputs."""
    library, header = files(built.request)
    objects = tuple(built.forms[FORM].values())
    archive_static(objects, folder / library, built.request.triple)
    (folder / header).write_text(_write_header(built), encoding="utf-8")


def _write_header(built: BuiltModel) -> str:
    macro = identifier(built.name).upper()
    lines = [
        f"/* {built.name}: find the model with ffi.SystemLib({macro}_PREFIX).",
        " *",
        write_tensor_comment(built.signature),
        " *",
        " * Link the whole library, or the linker drops it: -Wl,--whole-archive (macOS: -force_load, Windows: /WHOLEARCHIVE).",
        " */",
        f"#ifndef {macro}_SYSTEM_H_",
        f"#define {macro}_SYSTEM_H_",
        f'#define {macro}_PREFIX "{symbol_prefix(built.name)}"',
        "#endif",
    ]
    return "\n".join(lines) + "\n"
