"""`shared-library`: one self-contained file that TVM's runtime loads, weights inside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.exporters._base import Asked, Built, any_target

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

why_not = any_target


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>.so`, or as the target's system calls its libraries."""
    return (f"{asked.name}{asked.platform.shared_suffix}",)


def export(built: Built, folder: Path) -> None:
    """The linked library as it is."""
    shutil.copyfile(built.library, folder / files(built.asked)[0])
