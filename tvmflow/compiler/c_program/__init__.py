"""Plain C libraries: a lowered model as C functions, constants, and C code that calls them.

They do not depend on TVM. Their runtime and their public header are in `targets.c_runtime`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from tvmflow.compiler.c_program import c_code, c_kernels
from tvmflow.compiler.c_program.device_program import (
    DeviceCode,
    DeviceWriter,
    has_threads,
    lower_device_kernels,
    place_on_device,
)
from tvmflow.compiler.c_program.program import (
    Program,
    UnsupportedProgram,
    list_called_kernels,
    plan_memory,
    read_program,
)
from tvmflow.compiler.code_generation import split_kernels
from tvmflow.compiler.contraction.machine import is_cpu
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.passes.operand_checks import FAILURE
from tvmflow.core.types import Array, Json, Size
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import NoSize, list_symbols
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_runtime.weights import BEGIN, write_weights
from tvmflow.targets.linking import ALIGNMENT, compile_c, padded, pe, write_data
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.threads import count_usable_cpus
from tvmflow.targets.tvm_target import cpu_triple

RUNTIME_SYMBOLS: Final = {
    "__TVMBackendAllocWorkspace": "TF_ALLOC_WORKSPACE",
    "__TVMBackendFreeWorkspace": "TF_FREE_WORKSPACE",
    "__TVMBackendParallelLaunch": "TF_PARALLEL_LAUNCH",
}
"""TVM's function pointers for memory and threads, which kernels call -> their macros in the runtime."""

# TVM defines these functions in each object file. Linkers for Windows reject the duplicate definitions.
_HELPERS: Final = ("__extendhfsf2", "__truncsfhf2")


def compile_program(
    model: ScheduledModel, prefix: str, folder: Path, *, is_isa_level: bool = False
) -> None:
    """Write object files with kernels and constants, and the C code that calls the kernels.

    All symbols begin with the prefix. With `is_isa_level`, the constants are shared with the code for other ISA levels.
    Raises UnsupportedProgram if the model needs TVM's runtime.
    """
    if not is_cpu(model.target):
        _compile_for_device(model, prefix, folder)
        return
    mod, weights, target = model
    platform = parse_triple(cpu_triple(target.export()))
    layouts: c_kernels.KernelLayouts = {}
    if is_isa_level and platform.arch == "x86_64":
        weights, own = c_kernels.share_weights(mod, weights)
        layouts = {f"{prefix}{name}": known for name, known in own.items()}
    program = read_program(mod, weights)
    program.has_placed_constants = not is_isa_level
    plan_memory(program)
    traits = _write_kernels(list_called_kernels(mod, program), target, prefix, layouts, folder)
    code = c_code.generate_code(program, traits, prefix, platform.address_bits)
    _write_constants(program, prefix, folder)
    if is_isa_level:
        pieces = [[array.nbytes, _digest(array)] for array in program.constants]
        (folder / c_runtime.isa_levels.PLACES).write_text(json.dumps(pieces))
    _write_code(code, prefix, folder)


def _compile_for_device(model: ScheduledModel, prefix: str, folder: Path) -> None:
    """Write the files of `compile_program` for a device; kernels without device threads run on the host."""
    mod, weights, target = model
    program = read_program(mod, weights)
    if program.dimensions:
        raise UnsupportedProgram("dynamic shapes on a GPU")
    functions = list_called_kernels(mod, program)
    on_host = {name: kernel for name, kernel in functions.items() if not has_threads(kernel)}
    on_device = {name: kernel for name, kernel in functions.items() if name not in on_host}
    device = lower_device_kernels(on_device, target)
    tensors = place_on_device(program, device.kernels)
    plan_memory(program)
    traits: dict[str, c_code.KernelTraits] = {}
    if on_host:
        traits = _write_kernels(on_host, tvm.target.Target(target.host), prefix, {}, folder)
    else:
        # The writer of the constants copies the format of this object file. The compiler leaves temporary files.
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "empty.c").write_text("typedef int tf_nothing;\n")
            compile_c(Path(scratch), "empty.c", "empty.o", cpu_triple(target.export()))
            shutil.move(Path(scratch) / "empty.o", folder / "kernels0.o")
    _write_constants(program, prefix, folder)
    content = backend_for(target.export()).generate_device_code(device.functions, target)
    code = DeviceCode(
        kernels=device.kernels,
        tensors=tensors,
        symbol=f"{prefix}device_code",
        bytes=len(content),
        digest=hashlib.sha256(content).hexdigest(),
    )
    some = min(folder.glob("kernels*.o"))
    pieces = [content, bytes(1 + -(len(content) + 1) % ALIGNMENT)]
    write_data(folder / c_runtime.DEVICE_CODE, some, code.symbol, pieces)
    _write_code(DeviceWriter(program, traits, prefix, code).write(), prefix, folder)


def _write_code(text: str, prefix: str, folder: Path) -> None:
    """Write the C code of a program after macros that name the runtime functions that kernels call."""
    macros = (
        f"#define {macro} {runtime_symbol(prefix, name)}" for name, macro in RUNTIME_SYMBOLS.items()
    )
    (folder / c_runtime.PROGRAM).write_text("\n".join((*macros, text)))


def runtime_symbol(prefix: str, name: str) -> str:
    """Return a symbol, unique to a library, for a runtime pointer or helper that kernels call.

    It is as long as TVM's `name`, which it replaces in object files.
    """
    digest = hashlib.sha256(f"{prefix} {name}".encode()).hexdigest()
    return f"tf_{digest}"[: len(name)]


def _read_traits(function: tirx.PrimFunc, lowered: tirx.PrimFunc) -> c_code.KernelTraits:
    """Return the traits of a kernel, given before and after it was lowered."""
    symbol = str(lowered.attrs["global_symbol"])
    allocated = [
        call.args[2]
        for call in ir.find_nodes(lowered.body, tvm.ir.Call)
        if ir.operator_name(call) == "tirx.TVMBackendAllocWorkspace"
    ]
    names = {
        variable: f"n{n}" for n, variable in enumerate(c_kernels.list_size_parameters(function))
    }
    bindings = {binding.var: binding.value for binding in ir.find_nodes(lowered.body, tirx.Bind)}
    sizes = [_read_allocation(size, names, bindings, symbol) for size in allocated]
    rounded = (f"({size} + {ALIGNMENT - 1}) // {ALIGNMENT} * {ALIGNMENT}" for size in sizes)
    scratch = " + ".join(rounded) if names else sum(padded(int(size)) for size in sizes)
    return c_code.KernelTraits(
        symbol=symbol,
        work=c_code.estimate_parallel_work(function, names),
        scratch=scratch or 0,
        sizes=tuple(names.values()),
        failure=str(function.attrs.get(FAILURE, "")),
    )


def _read_allocation(
    size: Any, names: Mapping[Any, str], bindings: Mapping[Any, Any], symbol: str
) -> Size:
    while unbound := {var: bindings[var] for var in list_symbols(size) if var in bindings}:
        size = ir.replace_variables(size, unbound)
    # sizes are not negative, so both divisions give the same result
    size = tvm_ffi.structural_map(size, (tirx.Div, lambda node: tirx.FloorDiv(node.a, node.b)))
    try:
        if set(list_symbols(size)) <= names.keys():
            return c_kernels.named_size_text(size, names)
    except NoSize:
        pass
    raise UnsupportedProgram(
        f"memory of the kernel {symbol}, whose size depends on the position in a loop"
    )


def _write_kernels(
    kernels: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    prefix: str,
    layouts: c_kernels.KernelLayouts,
    folder: Path,
) -> dict[str, c_code.KernelTraits]:
    """Write groups of kernels to object files, one thread for each group; return the kernels' traits."""
    functions = {
        tvm.ir.GlobalVar(name): function.with_attr("global_symbol", f"{prefix}{name}")
        for name, function in kernels.items()
    }
    groups = split_kernels(tvm.IRModule(functions))
    is_windows = parse_triple(cpu_triple(target.export())).system == "windows"

    def write(number: int) -> dict[str, c_code.KernelTraits]:
        path = folder / f"kernels{number}.o"
        traits: dict[str, c_code.KernelTraits] = {}

        def read_traits(mod: tvm.IRModule) -> None:
            for var, function in mod.functions_items():
                traits[var.name_hint] = _read_traits(kernels[var.name_hint], function)

        group = dict(groups[number].functions_items())
        lowered = c_kernels.lower_kernels(group, target, read_traits, layouts)
        c_kernels.compile_kernels(lowered, target, path)
        content = path.read_bytes()
        renamed = {name: runtime_symbol(prefix, name) for name in RUNTIME_SYMBOLS}
        if is_windows:
            content = pe.remove_exports(content)
            renamed |= {name: runtime_symbol(f"{prefix}{number}", name) for name in _HELPERS}
        for name, new_name in renamed.items():
            content = content.replace(name.encode(), new_name.encode())
        path.write_bytes(content)
        return traits

    with ThreadPoolExecutor(count_usable_cpus()) as pool:
        return dict(ChainMap(*pool.map(write, range(len(groups)))))


def _write_constants(program: Program, prefix: str, folder: Path) -> None:
    offsets = c_code.place_constants(program)

    def pieces() -> Iterator[bytes | memoryview]:
        for array, begin, end in zip(program.constants, offsets, offsets[1:], strict=False):
            yield _bytes_of(array).data
            yield bytes(end - begin - array.nbytes)
        yield bytes(ALIGNMENT)

    code = min(folder.glob("kernels*.o"))
    write_data(folder / c_runtime.CONSTANTS, code, f"{prefix}weights", pieces())


def _digest(array: Array) -> str:
    """Return the digest of a constant without trailing zeros, because other ISA levels may pad it."""
    content = _bytes_of(array)
    used = content.nonzero()[0]
    return hashlib.sha256(content[: used[-1] + 1 if len(used) else 0].data).hexdigest()


# ---------------------------------------------------------------- libraries loaded into this process for measurements

_NAME: Final = "variant"


class KernelLibrary(NamedTuple):
    """A library that this process can load. The device is not used before `load`."""

    path: Path
    signature: Mapping[str, Json]
    threads: int

    def load(self) -> NativeProgram:
        """Load the library; the file may be removed afterwards."""
        return NativeProgram(self.path, _NAME, self.threads, self.signature)


def link_kernel(
    kernel: tirx.PrimFunc, arguments: Sequence[Array], target: tvm.target.Target, folder: Path
) -> KernelLibrary:
    """Compile a scheduled kernel of fixed sizes for this machine, as a library without inputs.

    The arguments become weights of the library, so that a call copies nothing to a device. StageError if the kernel
    cannot become launches on a device, or writes to a parameter that precedes an input.
    """
    written = {
        region.source
        for block in ir.find_nodes(kernel.body, s_tir.SBlock)
        for region in block.writes
    }
    params = list(kernel.params)
    first = next((n for n, param in enumerate(params) if param in written), len(params))
    if not all(param in written for param in params[first:]):
        raise UnsupportedProgram("a kernel that writes to what it reads")
    shapes = [(list(map(int, param.ty.shape)), str(param.ty.dtype.dtype)) for param in params]
    types = [relax.TensorType(*shape) for shape in shapes]
    builder = relax.BlockBuilder()
    var = builder.add_func(kernel, "kernel")
    weights = [relax.Var(f"w{index}", ty) for index, ty in enumerate(types[:first])]
    with builder.function("main", weights):
        with builder.dataflow():
            output = builder.emit_output(relax.call_tir(var, weights, types[first:]))
        builder.emit_func_output(output)
    signature = {
        "inputs": [],
        "outputs": [
            {"name": f"y{index}", "shape": shape, "dtype": dtype}
            for index, (shape, dtype) in enumerate(shapes[first:])
        ],
    }
    model = ScheduledModel(builder.get(), arguments[:first], target)
    return _link(model, signature, count_usable_cpus(), folder)


def load_c_library(
    model: ScheduledModel, signature: Mapping[str, Json], threads: int
) -> NativeProgram:
    """Compile a model for this machine, and load it; UnsupportedProgram if it needs TVM's runtime."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        return _link(model, signature, threads, Path(scratch)).load()


class LibraryForWeights:
    """A model that is compiled once for this machine and can be loaded with different sets of weights."""

    def __init__(self, model: ScheduledModel, signature: Mapping[str, Json], threads: int) -> None:
        # equal constants would be stored once, and could not be replaced separately
        distinct = [_mark(array, index) for index, array in enumerate(model.weights)]
        self._begins = [*accumulate((padded(array.nbytes) for array in distinct), initial=BEGIN)]
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
            file = Path(scratch) / "weights"
            marked = model._replace(weights=distinct)
            library = _link(marked, signature, threads, Path(scratch), file)
            with file.open("rb") as stream:
                for begin, array in zip(self._begins, distinct, strict=False):
                    stream.seek(begin)
                    if stream.read(array.nbytes) != _bytes_of(array).tobytes():
                        raise AssertionError("weights are not where they are to be replaced")
                del distinct, marked
                self._content = _place(file.stat().st_size)
                stream.seek(0)
                stream.readinto(self._content.data)
            self._replace(self._content, dict(enumerate(model.weights)))
            self.program = NativeProgram(library.path, _NAME, threads, signature, self._content)

    def exchange(self, weights: Mapping[int, Array]) -> NativeProgram:
        """Return the library with some weights replaced, by index."""
        content = _place(self._content.size)
        content[:] = self._content
        self._replace(content, weights)
        return self.program.with_weights(content)

    def _replace(self, content: Array, weights: Mapping[int, Array]) -> None:
        for index, array in weights.items():
            begin = self._begins[index]
            content[begin : begin + array.nbytes] = _bytes_of(array)


def _place(size: int) -> Array:
    """Return aligned memory of this many bytes."""
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size]


def _mark(array: Array, index: int) -> Array:
    """Return an array filled with a NaN whose payload is the index; arrays below 4 bytes are truncated."""
    pattern = np.array([0x7FA00000 + index], "<u4").view(np.uint8)
    marked: Array = np.resize(pattern, array.nbytes).view(array.dtype).reshape(array.shape)
    return marked


def _bytes_of(array: Array) -> Array:
    content: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return content


def _link(
    model: ScheduledModel,
    signature: Mapping[str, Json],
    threads: int,
    folder: Path,
    weights_file: Path | None = None,
) -> KernelLibrary:
    """Compile and link a model in an empty folder; with `weights_file`, write its weights to that file."""
    library = folder / "library.so"
    compile_program(model, c_runtime.symbol_prefix(_NAME), folder)
    compiled = {path.name: path for path in folder.iterdir()}
    target = model.target.export()
    executor = backend_for(target).EXECUTOR
    described = c_runtime.DescribedModel(
        _NAME, signature, (), cpu_triple(target), executor=executor
    )
    if weights_file is not None:
        head = write_weights(compiled.pop(c_runtime.CONSTANTS), weights_file)
        described = described._replace(weights_head=head)
    c_runtime.link(described, compiled, library)
    return KernelLibrary(library, signature, threads)
