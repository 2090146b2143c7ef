"""Programs for WebGPU: steps, WGSL and weights of a model, which `exporters/web/webgpu.js` reads."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.c_program.device_program import (
    DeviceKernel,
    DeviceProgram,
    Launch,
    Scalar,
    UnsupportedKernel,
    lower_device_kernels,
)
from tvmflow.compiler.c_program.program import (
    Branch,
    Copy,
    KernelCall,
    Program,
    Step,
    Storage,
    UnsupportedProgram,
    list_called_kernels,
    read_program,
)
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.passes.cast_integers import to_int32
from tvmflow.core.formatting import last_line
from tvmflow.core.types import Json
from tvmflow.graph.ir import IF_THEN_ELSE, find_nodes, replace_variables
from tvmflow.targets.backends import webgpu
from tvmflow.targets.form_names import WEBGPU_KERNELS, WEBGPU_PROGRAM, WEBGPU_WEIGHTS
from tvmflow.targets.linking import padded

SEPARATOR: Final = "//----\n"
"""The line between the functions in the file of kernels."""

DEFAULT_LIMITS: Final[Mapping[str, int]] = {
    "maxStorageBuffersPerShaderStage": 8,
    "maxComputeWorkgroupStorageSize": 16384,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupSizeX": 256,
    "maxComputeWorkgroupSizeY": 256,
    "maxComputeWorkgroupSizeZ": 64,
    "maxComputeWorkgroupsPerDimension": 65535,
    "maxStorageBufferBindingSize": 134217728,
    "maxBufferSize": 268435456,
}
"""The default limits, which every WebGPU device supports (https://www.w3.org/TR/webgpu/#limits)."""

# An extension of WGSL -> the device feature that it needs.
_FEATURES: Final[Mapping[str, str]] = {"f16": "shader-f16", "subgroups": "subgroups"}
# The element types of tensors.
_ELEMENTS: Final = frozenset({"f32", "i32", "u32", "f16"})
_ALIGNMENT: Final = 4

_BINDING: Final = re.compile(
    r"@group\(0\) @binding\(\d+\) var<storage, (read|read_write)> \w+ : array<(?:vec\d<)?(\w+)>?>;"
)
_FIELDS: Final = re.compile(r"struct PODArgs \{([^}]*)\}")
_ENABLED: Final = re.compile(r"^enable (\w+);", re.MULTILINE)
_SHARED: Final = re.compile(r"var<workgroup> \w+ : array<(vec(\d)<)?\w(\d+)>?, (\d+)>;")
_SPLAT: Final = re.compile(r"(vec4<\w+>)\(([^,]+)(?:, \2){3}\)")
# a name after a dot is a member, which keeps its name
_NAME: Final = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_VALUE: Final = re.compile(r"let (\w+) : .*;")
_DECLARED: Final = re.compile(r"\b(?:let|var(?:<[\w, ]+>)?|fn)\s+([A-Za-z_]\w*)")


def compile_web_program(model: ScheduledModel, folder: Path) -> None:
    """Write a model's steps as JSON, kernels as WGSL, and weights; StageError if it is not supported."""
    mod, weights, target = model
    try:
        program = read_program(mod, list(map(to_int32, weights)))
        if program.dimensions:
            raise UnsupportedProgram("it has sizes that each call chooses")
        if program.counts:
            raise UnsupportedProgram("it has outputs whose size is known after a call")
        lowered = lower_device_kernels(list_called_kernels(mod, program), target)
        functions = _generate_functions(lowered, target)
        document = _Writer(program, lowered.kernels, functions).write()
    except UnsupportedKernel as error:
        raise webgpu.refuse(f"the kernel {error.kernel}: {error.reason}") from error
    except UnsupportedProgram as error:
        raise webgpu.refuse(error.reason) from error
    sources = (f"// {name}\n{function.source}" for name, function in functions.items())
    (folder / WEBGPU_KERNELS).write_text(SEPARATOR.join(sources), encoding="utf-8")
    (folder / WEBGPU_PROGRAM).write_text(json.dumps(document, separators=(",", ":")))
    with (folder / WEBGPU_WEIGHTS).open("wb") as file:
        for array in program.constants:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.write(bytes(-array.nbytes % _ALIGNMENT))
        # packages must not contain empty files, so models without weights get some bytes
        file.write(bytes(_ALIGNMENT))


# ---------------------------------------------------------------- WGSL


class _Function(NamedTuple):
    """A function on the device: a module of WGSL, the name of its entry point, and its parameters.

    `access` holds `r` for each tensor that it only reads, `w` for others. Launches pass a scalar for each field.
    """

    source: str
    entry: str
    access: str
    elements: tuple[str, ...]
    fields: int
    features: frozenset[str]
    shared_bytes: int


def _generate_functions(program: DeviceProgram, target: tvm.target.Target) -> dict[str, _Function]:
    functions = {}
    for var, function in program.functions.functions_items():
        name = str(var.name_hint)
        alone = tvm.IRModule({var: _shorten_code(function)})
        try:
            source = webgpu.WebgpuBackend().generate_device_code(alone, target).decode()
        except Exception as error:
            raise UnsupportedKernel(name, f"there is no WGSL for it: {last_line(error)}") from error
        functions[name] = _read_function(name, source)
    return dict(sorted(functions.items()))


def _shorten_code(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function with fewer branches and expressions, because browsers compile slowly.

    Conditions lose their short-circuit evaluation, so values that are not needed may be loaded. That is safe: WGSL
    defines the result of any load and any division. With SwiftShader, each further branch in a loop doubles the
    compile time, and copies of padded tensors had five branches for each element.
    """
    callbacks = [
        (tirx.And, lambda both: tirx.BitwiseAnd(both.a, both.b)),
        (tirx.Or, lambda either: tirx.BitwiseOr(either.a, either.b)),
        (tirx.Cast, _convert_bool),
        (tvm.ir.Call, _select),
        (tirx.BufferStore, _name_vector),
    ]
    return _without_integer_vectors(
        function.with_body(tvm_ffi.structural_map(function.body, callbacks))
    )


def _without_integer_vectors(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Inline variables that are vectors of integers: TVM mistakes them for scalar indices."""
    values: dict[Any, Any] = {}

    def drop(bind: Any) -> Any:
        dtype = bind.value.ty.dtype
        if dtype.lanes == 1 or str(dtype).startswith("float"):
            return bind
        values[bind.var] = replace_variables(bind.value, values)
        return tirx.Evaluate(tirx.const(0, "int32"))

    body = tvm_ffi.structural_map(function.body, (tirx.Bind, drop))
    return replace_variables(function.with_body(body), values) if values else function


def _convert_bool(cast: Any) -> Any:
    """Replace a cast from or to bool by a select or a comparison: TVM cannot generate vectors of it."""
    source, target = str(cast.value.ty.dtype), cast.ty.dtype
    if source.startswith("bool") and not str(target).startswith("bool"):
        return tirx.Select(cast.value, tirx.const(1, str(target)), tirx.const(0, str(target)))
    if str(target).startswith("bool") and not source.startswith("bool"):
        return tirx.NE(cast.value, tirx.const(0, source))
    return cast


def _select(call: Any) -> Any:
    """Return `if_then_else` as a select, which has no branch, if it contains at most one load."""
    if getattr(call.op, "name", "") != IF_THEN_ELSE or find_nodes(call, tvm.ir.Call) != [call]:
        return call
    condition, *values = call.args
    is_short = sum(len(find_nodes(value, tvm.ir.TensorLoad)) for value in values) <= 1
    return tirx.Select(condition, *values) if is_short else call


def _name_vector(store: Any) -> Any:
    """Bind the value of a vector store to a variable, because TVM repeats the value for each element."""
    dtype = store.value.ty.dtype
    is_float = str(dtype).startswith("float")
    if dtype.lanes == 1 or not is_float or isinstance(store.value, tirx.Broadcast):
        return store
    name = tirx.Var("vector", str(dtype))
    return tirx.SeqStmt(
        [tirx.Bind(name, store.value), tirx.BufferStore(store.buffer, name, store.indices)]
    )


def _read_function(name: str, source: str) -> _Function:
    bindings = _BINDING.findall(source)
    fields = _FIELDS.search(source)
    features = {_FEATURES.get(extension, extension) for extension in _ENABLED.findall(source)}
    shared = [
        math.prod((int(lanes or 1), int(bits) // 8, int(length)))
        for _, lanes, bits, length in _SHARED.findall(source)
    ]
    short = shorten_source(source)
    entry = re.search(r"@compute[^{]*?fn (\w+)", short)
    if fields is None or entry is None:
        raise UnsupportedKernel(name, "its code in WGSL has no entry point")
    return _Function(
        source=short,
        entry=entry[1],
        access="".join("r" if access == "read" else "w" for access, _ in bindings),
        elements=tuple(element for _, element in bindings),
        # the last one is the number of workgroups
        fields=fields[1].count(":") - 1,
        features=frozenset(features),
        shared_bytes=sum(shared),
    )


def shorten_source(source: str) -> str:
    r"""Return a module of WGSL without comments, indentation and unused values, and with short names.

    The names of kernels and tensors, which come from the model, are all replaced.

    >>> print(shorten_source("// a\nvar<workgroup> shared_values : array<f32, 2>;\n  shared_values[0i] = 1f;"))
    var<workgroup> v0 : array<f32, 2>;
    v0[0i] = 1f;
    """
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("//"))
    text = _without_unused(_SPLAT.sub(r"\1(\2)", text))
    names = dict.fromkeys(_DECLARED.findall(text))
    short = {name: f"v{number}" for number, name in enumerate(names) if name != "podArgs"}
    return _NAME.sub(lambda match: short.get(match[0], match[0]), text)


def _without_unused(text: str) -> str:
    """Remove unused `let` values, such as indices that TVM writes out again at each load."""
    lines = text.splitlines()
    uses = Counter(_NAME.findall(text))
    kept = []
    # values are only used after their definition: going backwards finds chains of unused values
    for line in reversed(lines):
        value = _VALUE.match(line)
        if value and uses[value[1]] == 1:
            uses -= Counter(_NAME.findall(line))
        else:
            kept.append(line)
    return "\n".join(reversed(kept))


# ---------------------------------------------------------------- steps


class _Writer:
    def __init__(
        self,
        program: Program,
        kernels: Mapping[str, DeviceKernel],
        functions: Mapping[str, _Function],
    ) -> None:
        self._program = program
        self._kernels = kernels
        self._functions = functions
        self._numbers_of_functions = {name: number for number, name in enumerate(functions)}
        self._buffers: list[list[Json]] = []
        # the buffers of inputs, outputs and constants, by kind and index
        self._fixed: dict[tuple[str, int], int] = {}
        self._buffers_of_tensors: dict[Storage, int] = {}
        self._free: list[int] = []
        self._limits: dict[str, int] = {}

    def write(self) -> Json:
        """Return buffers, functions and steps, and the features and limits that not all devices have."""
        program, offset = self._program, 0
        for kind, storages in (("input", program.inputs), ("output", program.outputs)):
            for storage in storages:
                self._add(kind, storage.index, [kind, storage.bytes, storage.index])
        for index, array in enumerate(program.constants):
            self._add("constant", index, ["weights", array.nbytes, offset])
            self._need_memory(array.nbytes)
            offset += padded(array.nbytes, _ALIGNMENT)
        steps = list(self._write_steps())
        for kind, size, *_ in self._buffers:
            if kind != "weights":
                self._need_memory(size)
        functions = self._functions.values()
        for function in functions:
            self._need("maxStorageBuffersPerShaderStage", len(function.access))
            self._need("maxComputeWorkgroupStorageSize", function.shared_bytes)
        return {
            "buffers": self._buffers,
            "functions": [[function.entry, function.access] for function in functions],
            "steps": steps,
            "features": sorted({name for function in functions for name in function.features}),
            "limits": dict(sorted(self._limits.items())),
        }

    def _add(self, scope: str, index: int, buffer: list[Json]) -> None:
        self._fixed[scope, index] = len(self._buffers)
        self._buffers.append(buffer)

    def _need(self, limit: str, value: int) -> None:
        if value > max(DEFAULT_LIMITS[limit], self._limits.get(limit, 0)):
            self._limits[limit] = value

    def _need_memory(self, size: int) -> None:
        self._need("maxBufferSize", size)
        self._need("maxStorageBufferBindingSize", size)

    def _write_steps(self) -> Iterator[Json]:
        """Yield copies `[source, target, bytes]` and launches `[function, buffers, grid, scalars]`."""
        last = {
            storage: number
            for number, step in enumerate(self._program.steps)
            for storage in _list_tensors(step)
        }
        for number, step in enumerate(self._program.steps):
            buffers = [self._find(storage) for storage in _list_tensors(step)]
            if isinstance(step, Copy):
                yield [*buffers, step.source.resolve().bytes]
            else:
                assert isinstance(step, KernelCall)
                kernel = self._kernels[step.kernel]
                scratch = list(map(self._take, kernel.scratch))
                for launch in kernel.launches:
                    yield self._write_launch(launch, [*buffers, *scratch])
                self._free += scratch
            for storage in dict.fromkeys(_list_tensors(step)):
                if last[storage] == number and storage in self._buffers_of_tensors:
                    self._free.append(self._buffers_of_tensors.pop(storage))

    def _find(self, storage: Storage) -> int:
        """Return the buffer of a tensor; an intermediate tensor gets one when a step first uses it."""
        if storage.scope != "arena":
            return self._fixed[storage.scope, storage.index]
        if storage not in self._buffers_of_tensors:
            self._buffers_of_tensors[storage] = self._take(storage.bytes)
        return self._buffers_of_tensors[storage]

    def _take(self, size: int) -> int:
        """Return the free buffer that must grow least, then wastes least; a new buffer if none is free."""
        if not self._free:
            self._buffers.append(["tensor", size])
            return len(self._buffers) - 1
        sizes = {number: int(self._buffers[number][1]) for number in self._free}
        chosen = min(self._free, key=lambda number: (max(0, size - sizes[number]), sizes[number]))
        self._free.remove(chosen)
        self._buffers[chosen][1] = max(size, sizes[chosen])
        return chosen

    def _write_launch(self, launch: Launch, tensors: Sequence[int]) -> Json:
        function = self._functions[launch.function]
        arguments = [tensors[index] for index in launch.arguments]
        unknown = sorted({*function.elements} - _ELEMENTS)
        if unknown or launch.grid[2] != 1 or len(launch.scalars) != function.fields:
            reason = f"elements of {unknown[0]}" if unknown else "its launch"
            raise UnsupportedKernel(launch.function, f"WebGPU has no such thing: {reason}")
        for axis, size in zip("XYZ", launch.block, strict=True):
            self._need(f"maxComputeWorkgroupSize{axis}", size)
        self._need("maxComputeInvocationsPerWorkgroup", math.prod(launch.block))
        width, height, _ = launch.grid
        most = DEFAULT_LIMITS["maxComputeWorkgroupsPerDimension"]
        self._need("maxComputeWorkgroupsPerDimension", height)
        # the kernel combines x and z to one workgroup index, and skips indices above the last field
        depth = -(-width // most)
        grid = [min(width, most), height, depth]
        fields = [*map(_bits, launch.scalars), width - 1]
        return [self._numbers_of_functions[launch.function], arguments, grid, fields]


def _list_tensors(step: Step) -> list[Storage]:
    if isinstance(step, Branch):
        raise UnsupportedProgram("it has a branch that depends on data")
    return [storage.resolve() for storage in step.tensors]


def _bits(scalar: Scalar) -> int:
    if scalar.dtype.startswith("float"):
        return int.from_bytes(struct.pack("<f", scalar.value), "little")
    return int(scalar.value) & 0xFFFFFFFF
