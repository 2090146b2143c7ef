"""`shared-library`: one self-contained file that TVM's runtime loads, weights inside."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.compiler.form_names import VM
from tvmflow.exporters.base import BuiltModel, ExportRequest, link_or_copy, loadable_reason

FORM: Final = VM
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = loadable_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>.so`, or the name with the suffix of the target's system."""
    return (f"{request.name}{request.platform.shared_suffix}",)


def export(built: BuiltModel, folder: Path) -> None:
    """Deliver the library for TVM's virtual machine."""
    assert built.vm_library is not None
    link_or_copy(built.vm_library, folder / files(built.request)[0])
