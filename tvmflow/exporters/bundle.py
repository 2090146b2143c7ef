"""`bundle`: one file with library, signature and a manifest that is checked before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.bundles import IN_PARTS
from tvmflow.exporters._archives import write_zip
from tvmflow.exporters._base import Asked, Built, Joined, any_target, json_bytes

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

why_not = any_target


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>.tvmflow`."""
    return (f"{asked.name}.tvmflow",)


def export(built: Built | Joined, folder: Path) -> None:
    """What `tvmflow.load` opens."""
    shutil.copyfile(built.bundle, folder / files(built.asked)[0])


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


def write_joined(
    manifest: Mapping[str, Any],
    signature: Mapping[str, Any],
    parts: Mapping[str, Path],
    output: Path,
) -> None:
    """The same of a model in parts: in place of the library the bundle of each part, in order."""
    listed = [{"name": name, "file": f"parts/{name}.tvmflow"} for name in parts]
    content = {
        "manifest.json": json_bytes({**manifest, "bundle": IN_PARTS, "parts": listed}),
        "signature.json": json_bytes(signature),
    }
    content |= {
        each["file"]: path.read_bytes() for each, path in zip(listed, parts.values(), strict=True)
    }
    write_zip(output, content)


def library_name(asked: Asked) -> str:
    """What the library is called inside: loaders go by the ending."""
    return f"library{asked.platform.shared_suffix}"
