"""Libraries for TVM's runtime, and files to build them with other compilers and linkers.

TVM loads `objects` and `shared-library`; `params` is a library with separate weights; `static-library`,
`system-library` and `c-source` become part of a larger program.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from tvmflow.core.generated_text import identifier
from tvmflow.exporters import bundle
from tvmflow.exporters.archives import write_tar, write_tar_gz
from tvmflow.exporters.exporter import (
    BuiltModel,
    Exporter,
    ExportRequest,
    Form,
    cpu_only_reason,
    json_bytes,
    link_or_copy,
    loadable_cpu_reason,
    loadable_vm_reason,
)
from tvmflow.runtime.bundles import VM
from tvmflow.runtime.weights import read_safetensors
from tvmflow.targets import form_names
from tvmflow.targets.c_runtime import symbol_prefix, write_tensor_comment
from tvmflow.targets.linking import archive_static, link_shared

# ---------------------------------------------------------------- objects and libraries


def _objects_files(request: ExportRequest) -> tuple[str, ...]:
    """Return the archive's name; TVM's loader depends on its suffix."""
    return (f"{request.name}.tar",)


def _export_objects(built: BuiltModel, folder: Path) -> None:
    """Write the objects under their original names; TVM links them at load time."""
    write_tar(folder / _objects_files(built.request)[0], built.forms[form_names.VM])


def _shared_files(request: ExportRequest) -> tuple[str, ...]:
    """Return the name of the library with the suffix of the target's system."""
    return (f"{request.name}{request.platform.shared_suffix}",)


def _export_shared(built: BuiltModel, folder: Path) -> None:
    """Deliver the library for TVM's virtual machine, with its weights."""
    assert built.vm_library is not None
    link_or_copy(built.vm_library, folder / _shared_files(built.request)[0])


def _static_files(request: ExportRequest) -> tuple[str, ...]:
    """Return the name of the static library."""
    return (_static_name(request, request.name),)


def _static_name(request: ExportRequest, stem: str) -> str:
    """Return `lib<stem>.a`, or `<stem>.lib` for Microsoft's linker."""
    suffix = request.platform.static_suffix
    return f"{stem}{suffix}" if suffix == ".lib" else f"lib{stem}{suffix}"


def _export_static(built: BuiltModel, folder: Path) -> None:
    """Write the objects of the library as an archive."""
    objects = list(built.forms[form_names.VM].values())
    archive_static(objects, folder / _static_files(built.request)[0], built.request.triple)


# ---------------------------------------------------------------- system library
# A static library that registers itself with TVM's runtime when the program starts. Its symbols have a unique
# prefix, so that a program may link several.


def _system_files(request: ExportRequest) -> tuple[str, ...]:
    """Return the names of the static library and its header."""
    return (_static_name(request, f"{request.name}-system"), f"{request.name}-system.h")


def _export_system(built: BuiltModel, folder: Path) -> None:
    """Write the objects of the library as an archive, and the header."""
    library, header = _system_files(built.request)
    objects = tuple(built.forms[form_names.SYSTEM_LIBRARY].values())
    archive_static(objects, folder / library, built.request.triple)
    (folder / header).write_text(write_system_header(built), encoding="utf-8")


def write_system_header(built: BuiltModel) -> str:
    """Return the header of a system library."""
    macro = identifier(built.name).upper()
    lines = [
        f"/* {built.name}: find the model with ffi.SystemLib({macro}_PREFIX).",
        " *",
        write_tensor_comment(built.signature),
        " *",
        " * Link the whole library, or the linker drops it: -Wl,--whole-archive (macOS: -force_load, Windows: /WHOLEARCHIVE).",
        " */",
        f"#ifndef {macro}_SYSTEM_H_",
        f"#define {macro}_SYSTEM_H_",
        f'#define {macro}_PREFIX "{symbol_prefix(built.name)}"',
        "#endif",
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- params
# The weights have the kernels' layout, after constant folding at build time. They differ from the model's.


def _params_files(request: ExportRequest) -> tuple[str, ...]:
    """Return bundle and library without weights, and the weights as safetensors and in TVM's format."""
    lean = f"{request.name}.lean"
    library = f"{lean}{request.platform.shared_suffix}"
    return (f"{lean}.tvmflow", library, f"{request.name}.safetensors", f"{request.name}.params")


def _export_params(built: BuiltModel, folder: Path) -> None:
    """Write library and weights in two formats each: for tvmflow, and for TVM without tvmflow."""
    import tvm

    lean, library, safetensors, params = (folder / name for name in _params_files(built.request))
    compiled = built.forms[form_names.PARAMS]
    # `main` takes the weights sorted by name.
    weights = sorted(read_safetensors(compiled[form_names.WEIGHTS_FILE]).items())
    objects = [path for name, path in compiled.items() if name != form_names.WEIGHTS_FILE]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        linked = Path(scratch, library.name)
        link_shared(objects, linked, built.request.triple)
        specs = [
            {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
            for name, array in weights
        ]
        bundle.write(built.with_library(linked, objects, params=specs, runtime=VM), lean)
        shutil.move(linked, library)
    shutil.copyfile(compiled[form_names.WEIGHTS_FILE], safetensors)
    tensors = {name: tvm.runtime.tensor(array) for name, array in weights}
    params.write_bytes(bytes(tvm.runtime.save_param_dict(tensors)))


# ---------------------------------------------------------------- C source

_C_README: Final = Path(__file__).with_name("c_source.md")
# `kernels.precision` -> the element type that it needs and C lacks.
_MISSING_TYPES: Final = {"mixed": "float16", "float16": "float16", "bfloat16": "bfloat16"}
# TVM's file name -> descriptive name.
_C_NAMES: Final = {"lib0.c": "kernels.c", "devc.c": "model.c"}


def _no_c_source_reason(request: ExportRequest) -> str:
    """Return why a target cannot have C source, or an empty string."""
    missing = _MISSING_TYPES.get(request.precision)
    no_type = f"C has no {missing} (kernels.precision: {request.precision})" if missing else ""
    return cpu_only_reason(request) or no_type


def _c_source_files(request: ExportRequest) -> tuple[str, ...]:
    """Return the name of the archive of sources."""
    return (f"{request.name}-c.tar.gz",)


def _export_c_source(built: BuiltModel, folder: Path) -> None:
    """Write `kernels.c`, `model.c` (weights, order of calls), the signature, and a README."""
    base = f"{built.name}-c"
    content: dict[str, Path | bytes] = {
        f"{base}/{_C_NAMES.get(name, name)}": path
        for name, path in built.forms[form_names.C_SOURCE].items()
    }
    suffix = built.request.platform.shared_suffix
    text = _C_README.read_text().replace("@NAME@", built.name).replace("@SUFFIX@", suffix)
    content[f"{base}/README.md"] = text.encode()
    content[f"{base}/signature.json"] = json_bytes(built.signature)
    write_tar_gz(folder / _c_source_files(built.request)[0], content)


EXPORTERS: Final[dict[str, Exporter]] = {
    "c-source": Form(
        FORM=form_names.C_SOURCE,
        unsupported_reason=_no_c_source_reason,
        files=_c_source_files,
        export=_export_c_source,
        SOURCES=(_C_README,),
    ),
    "objects": Form(form_names.VM, loadable_vm_reason, _objects_files, _export_objects),
    "params": Form(form_names.PARAMS, loadable_cpu_reason, _params_files, _export_params),
    "shared-library": Form(form_names.VM, loadable_vm_reason, _shared_files, _export_shared),
    "static-library": Form(form_names.VM, loadable_cpu_reason, _static_files, _export_static),
    "system-library": Form(
        form_names.SYSTEM_LIBRARY, loadable_cpu_reason, _system_files, _export_system
    ),
}
