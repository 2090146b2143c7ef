"""`shared-library`: one self-contained file that TVM's runtime loads, weights inside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.exporters._base import BuiltModel, ExportRequest, no_reason

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = no_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.so`, or the name with the suffix of the target's system."""
    return (f"{request.name}{request.platform.shared_suffix}",)


def export(built: BuiltModel, folder: Path) -> None:
    """Copy the linked library."""
    shutil.copyfile(built.library, folder / files(built.request)[0])
