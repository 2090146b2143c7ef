"""`archive`: everything else that is delivered for a target, in one compressed file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters.archives import write_tar_gz
from tvmflow.exporters.base import BuiltModel, ExportRequest, PartitionedModel, no_reason

FORM: Final = ""
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = no_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.<target>.tar.gz`."""
    return (f"{request.name}.{request.target}.tar.gz",)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Write the other files in `dist` to an archive, in a folder with the recipe's name."""
    content = {f"{built.name}/{name}": path for name, path in built.exported_files.items()}
    write_tar_gz(folder / files(built.request)[0], content)
