"""`objects`: the object files in a tar, which TVM links where it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters._archives import write_tar
from tvmflow.exporters._base import Asked, Built, any_target

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

why_not = any_target


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>.tar`: TVM's loader goes by the ending."""
    return (f"{asked.name}.tar",)


def export(built: Built, folder: Path) -> None:
    """The objects under the names that they were compiled as."""
    write_tar(folder / files(built.asked)[0], {path.name: path for path in built.objects})
