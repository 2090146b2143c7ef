"""Compilations beside the usual one: exporters name them as their `FORM`, and `build` makes those that are wanted.

Each fills a folder with the files of which its exporter makes what is delivered.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx

from tvmflow.errors import StageError
from tvmflow.exporters import c_source, params, system_library
from tvmflow.passes._function import with_calls
from tvmflow.stages import _lowering
from tvmflow.targets.linking import complaint_about

# TVM writes vectors as types that C does not have; a C compiler finds vector code by itself.
_WITHOUT_VECTORS: Final = {"tirx.disable_vectorize": True}
# TIR's operation -> by type, what C's library calls it.
_C_FUNCTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "tirx.fabs": {"float32": "fabsf", "float64": "fabs"},
}


class Parts(NamedTuple):
    """What every compilation starts from: scheduled kernels, the weights that `main` takes, the target.

    `prefix` is what the symbols of a system library begin with.
    """

    lowered: tvm.IRModule
    weights: list[tvm.runtime.Tensor]
    target: tvm.target.Target
    prefix: str


def _without_weights(parts: Parts, folder: Path) -> None:
    """Objects whose `main` takes the weights after the inputs, and the weights, named in that order."""
    from safetensors.numpy import save_file

    main = parts.lowered["main"]
    names = [var.name for var in main.params[int(main.attrs["num_input"]) :]]
    with parts.target:
        keep_files(tvm.compile(parts.lowered, parts.target), folder)
    arrays = {
        # lifting may give two weights one name, and files of weights have no order but that of names
        f"{index:04d}.{name}": weight.numpy()
        for index, (name, weight) in enumerate(zip(names, parts.weights, strict=True))
    }
    save_file(arrays, folder / params.WEIGHTS)


def _system_library(parts: Parts, folder: Path) -> None:
    """Objects that register themselves under the prefix when the program that holds them starts."""
    named = parts.lowered.with_attr("system_lib_prefix", parts.prefix)
    keep_files(_lowering.compile_with_weights(named, parts.weights, parts.target), folder)


def _c_source(parts: Parts, folder: Path) -> None:
    """C files of the same kernels, on one thread. Raises StageError for what TVM has no C for."""
    target = tvm.target.Target({"kind": "c"})
    with tvm.transform.PassContext(config=_WITHOUT_VECTORS):
        try:
            library = _lowering.compile_with_weights(
                with_calls(parts.lowered, _in_c), parts.weights, target
            )
        except Exception as refused:
            raise _no_c(str(refused).strip().splitlines()[-1]) from refused
    keep_files(library, folder)
    # some calls of functions in TVM's runtime become text that is no C
    for source in sorted(folder.glob("lib*.c")):
        complaint = complaint_about(source, _headers())
        if complaint:
            raise _no_c(f"{_kernel_at(source, complaint)}{complaint}")


def _in_c(call: Any) -> Any:
    """An operation as C's library calls it, where TVM's C does not know that."""
    types = _C_FUNCTIONS.get(getattr(call.op, "name", ""), {})
    function = types and types.get(str(call.ty.dtype))
    return tirx.call_pure_extern(call.ty.dtype, function, *call.args) if function else call


def _no_c(sentence: str) -> StageError:
    return StageError(
        f"this model has a kernel that TVM cannot write as C: {sentence}",
        fix="leave c-source out of `outputs`; static-library and objects hold the same kernels compiled",
    )


def _headers() -> list[Path]:
    from tvm_ffi import libinfo

    return [Path(tvm.__file__).parent / "include", Path(libinfo.find_include_path())]


def _kernel_at(source: Path, complaint: str) -> str:
    """`NAME, line ` of the function in which a compiler complains."""
    line = complaint.partition(":")[0]
    before = source.read_text().splitlines()[: int(line) if line.isdigit() else 0]
    names = re.findall(r"int32_t __tvm_ffi_(\w+)\(", "\n".join(before))
    return f"'{names[-1]}', line " if names else ""


FORMS: Final[Mapping[str, Callable[[Parts, Path], None]]] = {
    c_source.FORM: _c_source,
    params.FORM: _without_weights,
    system_library.FORM: _system_library,
}


def keep_files(library: relax.VMExecutable, folder: Path) -> None:
    """The object or C files of a compiled model, as they are before they are linked."""

    def keep(output: str, files: list[str], **_: Any) -> None:
        for file in sorted(files):
            shutil.copy(file, folder)

    library.export_library(str(folder / "unlinked.so"), fcompile=keep)
