"""`archive`: everything else that is delivered for a target, in one compressed file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters._archives import write_tar_gz
from tvmflow.exporters._base import Asked, Built, Joined, any_target

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

why_not = any_target


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>.<target>.tar.gz`."""
    return (f"{asked.name}.{asked.target}.tar.gz",)


def export(built: Built | Joined, folder: Path) -> None:
    """The other files as they stand in `dist`, below a folder with the recipe's name."""
    below = {f"{built.name}/{name}": path for name, path in built.others.items()}
    write_tar_gz(folder / files(built.asked)[0], below)
