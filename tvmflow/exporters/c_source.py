"""`c-source`: the kernels as C, for a compiler that TVM does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.compiler import form_names
from tvmflow.exporters.archives import write_tar_gz
from tvmflow.exporters.base import BuiltModel, ExportRequest, cpu_only_reason, json_bytes

FORM: Final = form_names.C_SOURCE
SOURCES: Final = (Path(__file__).with_name("c_source.md"),)

# Precision -> the type that C lacks.
_MISSING_TYPES: Final = {"mixed": "float16", "bfloat16": "bfloat16"}
# TVM's names of its files -> names that say what they hold.
_NAMES: Final = {"lib0.c": "kernels.c", "devc.c": "model.c"}


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no C source: only for a CPU, and without types that C compilers do not share."""
    missing = _MISSING_TYPES.get(request.precision)
    no_type = f"C has no {missing} (kernels.precision: {request.precision})" if missing else ""
    return cpu_only_reason(request) or no_type


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>-c.tar.gz`."""
    return (f"{request.name}-c.tar.gz",)


def export(built: BuiltModel, folder: Path) -> None:
    """Write `kernels.c`, `model.c` (weights and the order of calls), the signature, and how to compile them."""
    base = f"{built.name}-c"
    content: dict[str, Path | bytes] = {
        f"{base}/{_NAMES.get(name, name)}": path for name, path in built.forms[FORM].items()
    }
    suffix = built.request.platform.shared_suffix
    text = SOURCES[0].read_text().replace("@NAME@", built.name).replace("@SUFFIX@", suffix)
    content[f"{base}/README.md"] = text.encode()
    content[f"{base}/signature.json"] = json_bytes(built.signature)
    write_tar_gz(folder / files(built.request)[0], content)
