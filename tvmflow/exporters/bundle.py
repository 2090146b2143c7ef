"""`bundle`: one file with library, signature and a manifest that is checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters._archives import write_zip
from tvmflow.exporters._base import Asked, Built, any_target, json_bytes

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

why_not = any_target


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>.tvmflow`."""
    return (f"{asked.name}.tvmflow",)


def export(built: Built, folder: Path) -> None:
    """What `tvmflow.load` opens."""
    write(built, folder / files(built.asked)[0])


def write(built: Built, output: Path) -> None:
    """A zip without compression: `manifest.json`, `signature.json` and the library, in this order."""
    write_zip(
        output,
        {
            "manifest.json": json_bytes(built.manifest),
            "signature.json": json_bytes(built.signature),
            library_name(built.asked): built.library.read_bytes(),
        },
    )


def library_name(asked: Asked) -> str:
    """What the library is called inside: loaders go by the ending."""
    return f"library{asked.platform.shared_suffix}"
