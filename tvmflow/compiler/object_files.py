"""Object files of a compiled model. Its weights go to their file directly, and never through TVM.

TVM keeps the constants of a model in an executable, which it serializes to a string, copies into an
LLVM module and assembles: several copies of all weights in memory, and tens of seconds for a
gigabyte. Here the executable has a small marker for each weight instead. It is serialized with
these, and the weights take their places while the object file is written. The bytes in the file are
those that TVM would have written.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import vm_build

from tvmflow.compiler import code_generation, ir, lowering
from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.cpu_model import is_cpu
from tvmflow.targets.linking import LINKERS, elf, elf_data
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.threads import count_usable_cpus
from tvmflow.targets.tvm_target import cpu_triple

Array = np.ndarray[Any, Any]

_SYMBOL: Final = "__tvm_ffi__library_bin"
_EXECUTABLE: Final = b"relax.VMExecutable"
# Serialized tensors begin with it, and 8 bytes that are reserved (src/runtime/tensor.cc of TVM).
_TENSOR_MAGIC: Final = 0xDD5E40F096B4A13F
# The first value of a marker, a random number; the second is the index of its weight.
_MARKER: Final = 0x3C1D5A7E96B2F048
_LENGTH: Final = struct.Struct("<Q")


def write_object_files(
    mod: tvm.IRModule, weights: Sequence[Array], target: tvm.target.Target, folder: Path
) -> None:
    """Compile a lowered module and write its object files; its `main` then takes the model's inputs alone.

    Args:
        mod: The module.
        weights: The weights that its `main` takes after its inputs.
        target: The target to compile for.
        folder: The folder to write into.
    """
    platform = parse_triple(cpu_triple(target.export()))
    if not lowering.list_kernels(mod) or LINKERS.get(platform.system) is not elf:
        compiled = lowering.compile_with_weights(mod, weights, target)
        copy_objects_of(mod, compiled, target, folder)
        return
    compiled = _compile_kernels(_bind_markers(mod), target, folder)

    def pack(module: Any, _is_system_library: bool, _prefix: str, workspace: str) -> str:
        serialize = tvm.get_global_func("runtime.ModulePackImportsToTensor")
        pieces = _replace_markers(serialize(module).numpy().tobytes(), weights)
        output = Path(workspace, "devc.o")
        elf_data.write_data(output, Path(workspace, "lib0.o"), _SYMBOL, pieces)
        return str(output)

    copy_object_files(compiled, folder, fpack_imports=pack)


def _compile_kernels(
    mod: tvm.IRModule, target: tvm.target.Target, folder: Path
) -> relax.VMExecutable:
    """Compile a module for a CPU with several threads, as `tvm.compile` does with one.

    Kernels are in groups that do not depend on the machine, so that their objects do not either.

    Returns:
        The executable with the first group of kernels; the objects of all others are in the folder.
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
    """Move the object files of a compiled model to a folder; its kernels may be none.

    TVM takes the format of its data from the object of the kernels, and writes C++ where there are none.

    Args:
        mod: The lowered module.
        library: The compiled model.
        target: The target.
        folder: The folder.
        prefix: The prefix of a system library; empty for other libraries.
    """
    if lowering.list_kernels(mod):
        copy_object_files(library, folder)
        return
    host = json.dumps({"kind": "llvm", "mtriple": cpu_triple(target.export())})

    def pack(module: Any, _is_system_library: bool, _prefix: str, workspace: str) -> str:
        make_object = tvm.get_global_func("runtime.ModulePackImportsToLLVM")
        output = str(Path(workspace, "devc.o"))
        make_object(module, bool(prefix), host, prefix).write_to_file(output)
        return output

    copy_object_files(library, folder, fpack_imports=pack)
    # the module of no kernels
    (folder / "lib0.c").unlink()


def copy_object_files(library: relax.VMExecutable, folder: Path, **options: Any) -> None:
    """Move the object or C files of a compiled model to a folder, as they are before they are linked.

    Args:
        library: The compiled model.
        folder: The folder.
        **options: Further options of TVM's `export_library`.
    """

    def move(_output: str, files: list[str], **_: Any) -> None:
        for file in sorted(files):
            shutil.move(file, folder)

    # TVM writes them to the same disk, where they can be renamed
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unlinked = str(folder / "unlinked.so")
        library.export_library(unlinked, fcompile=move, workspace_dir=scratch, **options)


def _bind_markers(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with a marker of the weight's type in place of each weight of `main`."""
    markers = {
        var: tvm.ir.GenericConst(tvm.runtime.tensor(_make_marker(index)), var.ty)
        for index, var in enumerate(ir.list_weights(mod["main"]))
    }
    return relax.transform.BindParams("main", markers)(mod)


def _make_marker(index: int) -> Array:
    return np.array([_MARKER, index], np.int64)


def _replace_markers(content: bytes, weights: Sequence[Array]) -> Iterator[bytes | memoryview]:
    """Give the pieces of a serialized module with weights in place of their markers.

    Args:
        content: The serialized module: its length, the names of what it consists of, and each of
            these with its length, of which one is an executable with all markers.
        weights: The weights.
    """
    length_at = content.index(_EXECUTABLE) + len(_EXECUTABLE)
    (length,) = _LENGTH.unpack_from(content, length_at)
    places = sorted((_find_marker(content, index), index) for index in range(len(weights)))
    added = sum(len(_header(array)) + array.nbytes for array in weights)
    added -= sum(len(_serialize(_make_marker(index))) for index in range(len(weights)))
    (total,) = _LENGTH.unpack_from(content)
    if not all(length_at <= place < length_at + length for place, _ in places):
        raise AssertionError("the weights are outside of the executable")
    yield _LENGTH.pack(total + added)
    yield content[_LENGTH.size : length_at]
    yield _LENGTH.pack(length + added)
    copied = length_at + _LENGTH.size
    for start, index in places:
        yield content[copied:start]
        yield _header(weights[index])
        yield np.ascontiguousarray(weights[index]).reshape(-1).view(np.uint8).data
        copied = start + len(_serialize(_make_marker(index)))
    yield content[copied:]


def _find_marker(content: bytes, index: int) -> int:
    """Return the position of the only marker of a weight."""
    marker = _serialize(_make_marker(index))
    if content.count(marker) != 1:
        raise AssertionError(f"weight {index} is {content.count(marker)} times in the executable")
    return content.index(marker)


def _serialize(array: Array) -> bytes:
    return _header(array) + array.tobytes()


def _header(array: Array) -> bytes:
    """Return what TVM writes before the values of a tensor."""
    dtype, cpu = tvm_ffi.dtype(str(array.dtype)), (1, 0)
    start = struct.pack("<QQii", _TENSOR_MAGIC, 0, *cpu)
    kind = struct.pack("<iBBH", array.ndim, dtype.type_code, dtype.bits, dtype.lanes)
    return start + kind + struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes)
