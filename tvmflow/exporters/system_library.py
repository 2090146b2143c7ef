"""`system-library`: a static library that makes itself known to TVM's runtime when the program starts.

All its symbols begin with a prefix of its own, so that one program may hold several.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.exporters import static_library
from tvmflow.exporters._base import Asked, Built, cpu_only, identifier
from tvmflow.targets.linking import archive_static

FORM: Final = "system-library"
SOURCES: Final[tuple[Path, ...]] = ()

why_not = cpu_only


def prefix(name: str) -> str:
    """What the symbols of this recipe's library begin with, and what programs find it by.

    >>> prefix("digits")
    'digits_'
    """
    return f"{identifier(name)}_"


def files(asked: Asked) -> tuple[str, ...]:
    """`lib<name>-system.a` (`<name>-system.lib` for Microsoft's linker), `<name>-system.h`."""
    library = static_library.library_name(asked, f"{asked.name}-system")
    return (library, f"{asked.name}-system.h")


def export(built: Built, folder: Path) -> None:
    """The library, and a header with its prefix and with what the model takes and gives."""
    library, header = files(built.asked)
    objects = tuple(built.forms[FORM].values())
    archive_static(objects, folder / library, built.asked.triple)
    (folder / header).write_text(_header(built))


def _header(built: Built) -> str:
    macro = identifier(built.name).upper()
    lines = [
        f"/* {built.name}: find the model with ffi.SystemLib({macro}_PREFIX).",
        " *",
        *_lines("takes", built.signature["inputs"]),
        *_lines("gives", built.signature["outputs"]),
        " *",
        " * Link it whole, or the linker drops it: -Wl,--whole-archive (macOS: -force_load, Windows: /WHOLEARCHIVE).",
        " */",
        f"#ifndef {macro}_SYSTEM_H_",
        f"#define {macro}_SYSTEM_H_",
        f'#define {macro}_PREFIX "{prefix(built.name)}"',
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _lines(verb: str, tensors: list[Mapping[str, Any]]) -> list[str]:
    # a name in a model may hold anything, also what ends a comment
    return [
        f" * {verb} {each['name'].replace('*/', '* /')}: {each['dtype']} {each['shape']}"
        for each in tensors
    ]
