"""The forms in which a model is compiled.

`build` makes the form for the library's runtime, and the forms that exporters need. Each form fills a folder with the
files that its exporter delivers or links.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import vm_build

from tvmflow.compiler import c_program, code_generation
from tvmflow.compiler.c_program import web_program
from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.contraction.machine import is_cpu
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.schedules.dot_products import expand_dot_products
from tvmflow.core.errors import StageError
from tvmflow.core.formatting import last_line
from tvmflow.core.types import Array
from tvmflow.graph import ir
from tvmflow.runtime.weights import TENSOR_MAGIC
from tvmflow.targets import form_names
from tvmflow.targets.linking import LINKERS, elf
from tvmflow.targets.linking.zig import find_c_error
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.threads import count_usable_cpus
from tvmflow.targets.tvm_target import cpu_triple

# TVM's C code generator writes vector types that C lacks. C compilers vectorize by themselves.
_NO_VECTORS: Final = {"tirx.disable_vectorize": True}
# TIR operator and dtype -> the function of the C library.
_C_FUNCTIONS: Final = {("tirx.fabs", "float32"): "fabsf", ("tirx.fabs", "float64"): "fabs"}


class FormInputs(NamedTuple):
    """A scheduled model to compile, and the symbols of its code (see `compile_form`)."""

    model: ScheduledModel
    prefix: str
    content_prefix: str
    is_isa_level: bool


def _compile_without_weights(inputs: FormInputs, folder: Path) -> None:
    """Write object files whose `main` takes inputs, then weights; and a file of the weights in order."""
    from safetensors.numpy import save_file

    model = inputs.model
    copy_objects_of(model.mod, model.compile_without_weights(), model.target, folder)
    pairs = zip(ir.list_weights(model.mod["main"]), model.weights, strict=True)
    # The index makes names unique, as lifting may repeat them, and keeps the order, because safetensors sorts by name.
    arrays = {f"{index:04d}.{var.name}": weight for index, (var, weight) in enumerate(pairs)}
    save_file(arrays, folder / form_names.WEIGHTS_FILE)


def _compile_system_library(inputs: FormInputs, folder: Path) -> None:
    """Write object files that register their functions under the prefix when the program starts."""
    mod = inputs.model.mod.with_attr("system_lib_prefix", inputs.prefix)
    compiled = inputs.model._replace(mod=mod).compile()
    copy_objects_of(mod, compiled, inputs.model.target, folder, inputs.prefix)


def _generate_c_source(inputs: FormInputs, folder: Path) -> None:
    """Write the kernels as C files, without threads; StageError if TVM cannot generate valid C."""
    target = tvm.target.Target({"kind": "c"})
    with tvm.transform.PassContext(config=_NO_VECTORS):
        try:
            mod = ir.rewrite_kernel_calls(expand_dot_products(inputs.model.mod), _to_c_call)
            library = inputs.model._replace(mod=mod, target=target).compile()
        except Exception as error:
            raise _unsupported_in_c(last_line(error)) from error
    export_object_files(library, folder)
    from tvm_ffi import libinfo

    includes = [Path(tvm.__file__).parent / "include", Path(libinfo.find_include_path())]
    # TVM generates invalid C for some calls of its runtime.
    for source in sorted(folder.glob("lib*.c")):
        c_error = find_c_error(source, includes)
        if c_error:
            # find the function that contains the line of the error
            line = c_error.partition(":")[0]
            before = source.read_text().splitlines()[: int(line) if line.isdigit() else 0]
            names = re.findall(r"int32_t __tvm_ffi_(\w+)\(", "\n".join(before))
            kernel = f"'{names[-1]}', line " if names else ""
            raise _unsupported_in_c(f"{kernel}{c_error}")


def _to_c_call(call: Any) -> Any:
    """Return a call of the C library in place of an operation that TVM's C code generator lacks."""
    function = _C_FUNCTIONS.get((ir.operator_name(call), str(getattr(call.ty, "dtype", ""))))
    return tirx.call_pure_extern(call.ty.dtype, function, *call.args) if function else call


def _unsupported_in_c(reason: str) -> StageError:
    return StageError(
        f"this model has a kernel that TVM cannot write as C: {reason}",
        fix="leave c-source out of `outputs`; static-library and objects hold the same kernels compiled",
    )


FORMS: Final[Mapping[str, Callable[[FormInputs, Path], None]]] = {
    # object files with plain C functions and constants, and the C code that calls the functions
    form_names.C_LIBRARY: lambda inputs, folder: c_program.compile_program(
        inputs.model, inputs.content_prefix, folder, is_isa_level=inputs.is_isa_level
    ),
    form_names.C_SOURCE: _generate_c_source,
    form_names.PARAMS: _compile_without_weights,
    form_names.SYSTEM_LIBRARY: _compile_system_library,
    # object files that TVM's virtual machine runs
    form_names.VM: lambda inputs, folder: write_object_files(inputs.model, folder),
    # steps, WGSL and weights, which a package for browsers runs
    form_names.WEBGPU: lambda inputs, folder: web_program.compile_web_program(inputs.model, folder),
}


def compile_form(
    form: str,
    model: ScheduledModel,
    folder: Path,
    *,
    prefix: str = "",
    content_prefix: str = "tf_",
    is_isa_level: bool = False,
) -> None:
    """Write the files of a form (see `targets.form_names`) of a model to an empty folder.

    `prefix` starts the symbols of a system library. `content_prefix` starts the symbols of a C library, and is unique to
    its content. With `is_isa_level`, the library also has code for other ISA levels.
    """
    FORMS[form](FormInputs(model, prefix, content_prefix, is_isa_level), folder)


# ---------------------------------------------------------------- object files
# TVM serializes the constants of a model to a string, copies them into an LLVM module and assembles it. That takes
# several copies of all weights in memory, and tens of seconds for a gigabyte. Here the executable has a small marker in
# place of each weight, and the weights are inserted while the object file is written. The file has the same bytes.

_SYMBOL: Final = "__tvm_ffi__library_bin"
_EXECUTABLE: Final = b"relax.VMExecutable"
# The first value of a marker, chosen at random. The second value is the index of the weight.
_MARKER: Final = 0x3C1D5A7E96B2F048
_LENGTH: Final = struct.Struct("<Q")


def write_object_files(model: ScheduledModel, folder: Path) -> None:
    """Write the object files of a model with its weights, so that `main` takes only the inputs."""
    mod, weights, target = model
    platform = parse_triple(cpu_triple(target.export()))
    if not ir.list_kernels(mod) or LINKERS.get(platform.system) is not elf:
        copy_objects_of(mod, model.compile(), target, folder)
        return
    markers = {
        var: tvm.ir.GenericConst(tvm.runtime.tensor(_make_marker(index)), var.ty)
        for index, var in enumerate(ir.list_weights(mod["main"]))
    }
    bound = relax.transform.BindParams("main", markers)(mod)
    compiled = _compile_kernels(bound, target, folder)

    def pack(module: Any, _is_system_library: bool, _prefix: str, workspace: str) -> str:
        serialize = tvm.get_global_func("runtime.ModulePackImportsToTensor")
        pieces = _replace_markers(serialize(module).numpy().tobytes(), weights)
        output = Path(workspace, "devc.o")
        elf.write_data(output, Path(workspace, "lib0.o"), _SYMBOL, pieces)
        return str(output)

    export_object_files(compiled, folder, fpack_imports=pack)


def _compile_kernels(
    mod: tvm.IRModule, target: tvm.target.Target, folder: Path
) -> relax.VMExecutable:
    """Return the executable with the first group of kernels; write other groups to the folder.

    The result is that of `tvm.compile`, which uses one thread; here several threads compile for a CPU.
    """
    if not is_cpu(target):
        return code_generation.compile_model(mod, target)
    with target:
        lowered = relax.get_pipeline("default")(mod)
    builder = relax.ExecBuilder()
    kernels = compile_c_sources(vm_build._filter_tir(vm_build._vmcodegen(builder, lowered)), target)
    groups = code_generation.split_kernels(kernels)

    def write(number: int) -> None:
        library = code_generation.build_kernels(groups[number], target)
        library.write_to_file(str(folder / f"lib{number}.o"))

    with ThreadPoolExecutor(count_usable_cpus()) as pool:
        others = pool.map(write, range(1, len(groups)))
        with target:
            executable = vm_build._vmlink(
                builder, target, groups[0], code_generation.pipeline_for(target)
            )
        list(others)
    return executable


def copy_objects_of(
    mod: tvm.IRModule,
    library: relax.VMExecutable,
    target: tvm.target.Target,
    folder: Path,
    prefix: str = "",
) -> None:
    """Move the object files of a compiled model, which may have no kernels, to a folder.

    TVM takes the object format of its data from the kernels' object file, and writes C++ if there are no kernels.
    `prefix` is the prefix of a system library; empty for other libraries.
    """
    if ir.list_kernels(mod):
        export_object_files(library, folder)
        return
    host = json.dumps({"kind": "llvm", "mtriple": cpu_triple(target.export())})

    def pack(module: Any, _is_system_library: bool, _prefix: str, workspace: str) -> str:
        make_object = tvm.get_global_func("runtime.ModulePackImportsToLLVM")
        output = str(Path(workspace, "devc.o"))
        make_object(module, bool(prefix), host, prefix).write_to_file(output)
        return output

    export_object_files(library, folder, fpack_imports=pack)
    # TVM writes this file for the module without kernels
    (folder / "lib0.c").unlink()


def export_object_files(library: relax.VMExecutable, folder: Path, **options: Any) -> None:
    """Move a model's object or C files to a folder; `options` are passed to TVM's `export_library`."""

    def move(_output: str, files: list[str], **_: Any) -> None:
        for file in sorted(files):
            shutil.move(file, folder)

    # the scratch folder is on the same disk, so that moving a file only renames it
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unlinked = str(folder / "unlinked.so")
        library.export_library(unlinked, fcompile=move, workspace_dir=scratch, **options)


def _make_marker(index: int) -> Array:
    return np.array([_MARKER, index], np.int64)


def _replace_markers(content: bytes, weights: Sequence[Array]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a serialized module with weights in place of their markers.

    The module consists of its length, the names of its members, and each member with its length. One member is the
    executable, which has all markers.
    """
    length_at = content.index(_EXECUTABLE) + len(_EXECUTABLE)
    (length,) = _LENGTH.unpack_from(content, length_at)
    positions, added = list[tuple[int, int]](), 0
    for index, array in enumerate(weights):
        marker = _make_marker(index)
        serialized = _header(marker) + marker.tobytes()
        if content.count(serialized) != 1:
            count = content.count(serialized)
            raise AssertionError(f"weight {index} is {count} times in the executable")
        positions.append((content.index(serialized), index))
        added += len(_header(array)) + array.nbytes - len(serialized)
    positions.sort()
    (total,) = _LENGTH.unpack_from(content)
    if not all(length_at <= position < length_at + length for position, _ in positions):
        raise AssertionError("the weights are outside of the executable")
    yield _LENGTH.pack(total + added)
    yield content[_LENGTH.size : length_at]
    yield _LENGTH.pack(length + added)
    copied = length_at + _LENGTH.size
    for start, index in positions:
        yield content[copied:start]
        yield _header(weights[index])
        yield np.ascontiguousarray(weights[index]).reshape(-1).view(np.uint8).data
        copied = start + len(_header(_make_marker(index))) + _make_marker(index).nbytes
    yield content[copied:]


def _header(array: Array) -> bytes:
    """Return the header that TVM writes before the values of a tensor."""
    dtype, cpu = tvm_ffi.dtype(str(array.dtype)), (1, 0)
    start = struct.pack("<QQii", TENSOR_MAGIC, 0, *cpu)
    kind = struct.pack("<iBBH", array.ndim, dtype.type_code, dtype.bits, dtype.lanes)
    return start + kind + struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes)
