"""`objects`: the object files in a tar, which TVM links when it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.compiler.form_names import VM
from tvmflow.exporters.archives import write_tar
from tvmflow.exporters.base import BuiltModel, ExportRequest, loadable_reason

FORM: Final = VM
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = loadable_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.tar`: TVM's loader goes by the suffix."""
    return (f"{request.name}.tar",)


def export(built: BuiltModel, folder: Path) -> None:
    """Write the objects under the names that they were compiled with."""
    write_tar(folder / files(built.request)[0], built.forms[FORM])
