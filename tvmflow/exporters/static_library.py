"""`static-library`: the objects for somebody's own linker, as part of a library of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters._base import Asked, Built, cpu_only
from tvmflow.targets.linking import archive_static

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

why_not = cpu_only


def files(asked: Asked) -> tuple[str, ...]:
    """`lib<name>.a`, or `<name>.lib` for Microsoft's linker."""
    return (library_name(asked, asked.name),)


def library_name(asked: Asked, stem: str) -> str:
    """What linkers of the target's system call the static library `stem`."""
    suffix = asked.platform.static_suffix
    return f"{stem}{suffix}" if suffix == ".lib" else f"lib{stem}{suffix}"


def export(built: Built, folder: Path) -> None:
    """The same objects as in the shared library."""
    archive_static(built.objects, folder / files(built.asked)[0], built.asked.triple)
