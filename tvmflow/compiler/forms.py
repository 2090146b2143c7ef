"""The forms in which a model is compiled. `build` makes the one for the library's runtime, and those that exporters need.

Each form fills a folder with the files that its exporter delivers or links.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx

from tvmflow.compiler import c_library, ir
from tvmflow.compiler.code_generation import compile_model
from tvmflow.compiler.form_names import (
    C_LIBRARY,
    C_SOURCE,
    PARAMS,
    SYSTEM_LIBRARY,
    VM,
    WEIGHTS_FILE,
)
from tvmflow.compiler.lowering import compile_with_weights
from tvmflow.compiler.object_files import (
    Array,
    copy_object_files,
    copy_objects_of,
    write_object_files,
)
from tvmflow.compiler.schedules.dot_products import expand_dot_products
from tvmflow.core.errors import StageError
from tvmflow.core.formatting import last_line
from tvmflow.targets.c_compiler import find_c_error

# TVM's C code generator writes vectors as types that C lacks; C compilers vectorize by themselves.
_NO_VECTORS: Final = {"tirx.disable_vectorize": True}
# TIR operator and dtype -> the function of C's library.
_C_FUNCTIONS: Final = {("tirx.fabs", "float32"): "fabsf", ("tirx.fabs", "float64"): "fabs"}


class FormInputs(NamedTuple):
    """The inputs from which every form is compiled.

    Attributes:
        mod: The lowered module with scheduled kernels.
        weights: The weights that `main` takes after its inputs.
        target: The target to compile for.
        prefix: The prefix of the symbols in a system library.
        content_prefix: A prefix of symbols that no other content has.
    """

    mod: tvm.IRModule
    weights: Sequence[Array]
    target: tvm.target.Target
    prefix: str
    content_prefix: str = "tf_"


def _compile_without_weights(inputs: FormInputs, folder: Path) -> None:
    """Write objects whose `main` takes the weights after its inputs, and the weights in that order."""
    from safetensors.numpy import save_file

    names = [var.name for var in ir.list_weights(inputs.mod["main"])]
    compiled = compile_model(inputs.mod, inputs.target)
    copy_objects_of(inputs.mod, compiled, inputs.target, folder)
    arrays = {
        # Lifting may give two weights the same name, and safetensors orders tensors by name.
        f"{index:04d}.{name}": weight
        for index, (name, weight) in enumerate(zip(names, inputs.weights, strict=True))
    }
    save_file(arrays, folder / WEIGHTS_FILE)


def _compile_system_library(inputs: FormInputs, folder: Path) -> None:
    """Write objects that register themselves under the prefix when their program starts."""
    mod = inputs.mod.with_attr("system_lib_prefix", inputs.prefix)
    compiled = compile_with_weights(mod, inputs.weights, inputs.target)
    copy_objects_of(mod, compiled, inputs.target, folder, inputs.prefix)


def _compile_for_vm(inputs: FormInputs, folder: Path) -> None:
    """Write objects that TVM's virtual machine runs."""
    write_object_files(inputs.mod, inputs.weights, inputs.target, folder)


def _compile_c_library(inputs: FormInputs, folder: Path) -> None:
    """Write objects with plain C functions and constants, and the C code that calls the functions."""
    c_library.compile_program(
        inputs.mod, inputs.weights, inputs.target, inputs.content_prefix, folder
    )


def _generate_c_source(inputs: FormInputs, folder: Path) -> None:
    """Write C files of the same kernels, without threads.

    Raises:
        StageError: TVM has no C for one of the kernels.
    """
    target = tvm.target.Target({"kind": "c"})
    with tvm.transform.PassContext(config=_NO_VECTORS):
        try:
            mod = ir.rewrite_kernel_calls(expand_dot_products(inputs.mod), _to_c_call)
            library = compile_with_weights(mod, inputs.weights, target)
        except Exception as error:
            raise _unsupported_in_c(last_line(error)) from error
    copy_object_files(library, folder)
    # TVM writes some calls of functions in its runtime as text that is not valid C.
    for source in sorted(folder.glob("lib*.c")):
        c_error = find_c_error(source, _list_include_folders())
        if c_error:
            raise _unsupported_in_c(f"{_describe_kernel_at(source, c_error)}{c_error}")


def _to_c_call(call: Any) -> Any:
    """Return an operation as a call of C's library where TVM's C code generator lacks it."""
    function = _C_FUNCTIONS.get((ir.operator_name(call), str(getattr(call.ty, "dtype", ""))))
    return tirx.call_pure_extern(call.ty.dtype, function, *call.args) if function else call


def _unsupported_in_c(reason: str) -> StageError:
    return StageError(
        f"this model has a kernel that TVM cannot write as C: {reason}",
        fix="leave c-source out of `outputs`; static-library and objects hold the same kernels compiled",
    )


def _list_include_folders() -> list[Path]:
    from tvm_ffi import libinfo

    return [Path(tvm.__file__).parent / "include", Path(libinfo.find_include_path())]


def _describe_kernel_at(source: Path, c_error: str) -> str:
    """Return `'NAME', line ` for the function in which a compiler reports an error."""
    line = c_error.partition(":")[0]
    before = source.read_text().splitlines()[: int(line) if line.isdigit() else 0]
    names = re.findall(r"int32_t __tvm_ffi_(\w+)\(", "\n".join(before))
    return f"'{names[-1]}', line " if names else ""


FORMS: Final[Mapping[str, Callable[[FormInputs, Path], None]]] = {
    C_LIBRARY: _compile_c_library,
    C_SOURCE: _generate_c_source,
    PARAMS: _compile_without_weights,
    SYSTEM_LIBRARY: _compile_system_library,
    VM: _compile_for_vm,
}
