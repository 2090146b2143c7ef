"""Programs whose kernels run on a device such as a GPU: launches, placement of tensors, C code.

A scheduled kernel becomes one or more device functions and code for the host that launches them. Sizes are fixed, so
the host's code is evaluated here and becomes a list of launches, which any executor can start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import s_tir, tirx

from tvmflow.compiler.c_program.c_code import KernelTraits, Writer
from tvmflow.compiler.c_program.program import (
    Branch,
    Copy,
    KernelCall,
    Program,
    Step,
    Storage,
    plan_arena,
)
from tvmflow.core.errors import StageError
from tvmflow.core.generated_text import c_string
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import is_dynamic
from tvmflow.targets.backends import backend_for
from tvmflow.targets.linking import padded

Extents = tuple[int, int, int]
"""Sizes along x, y and z."""


class Scalar(NamedTuple):
    """A scalar argument of a launch; `dtype` is NumPy's name."""

    dtype: str
    value: int | float

    def __str__(self) -> str:
        content = np.array(self.value, self.dtype).tobytes()
        return f"{{UINT64_C({int.from_bytes(content, 'little')}), {len(content)}}}"


class Launch(NamedTuple):
    """A launch of a device function: a grid of blocks of threads.

    Arguments are indices into the kernel's tensors followed by its scratch buffers; scalars come after them.
    `shared_bytes` is the dynamic shared memory of a block.
    """

    function: str
    grid: Extents
    block: Extents
    arguments: tuple[int, ...]
    scalars: tuple[Scalar, ...] = ()
    shared_bytes: int = 0


class DeviceKernel(NamedTuple):
    """A kernel as launches, with the bytes of each scratch buffer that it needs on the device."""

    name: str
    launches: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()


class DeviceProgram(NamedTuple):
    """Kernels for a device, and the device functions that they launch, ready for code generation."""

    functions: tvm.IRModule
    kernels: Mapping[str, DeviceKernel]


def lower_device_kernels(
    kernels: Mapping[str, tirx.PrimFunc], target: tvm.target.Target
) -> DeviceProgram:
    """Lower scheduled kernels to device functions and launches.

    UnsupportedKernel if one does something on the host besides launching, or has dynamic shapes.
    """
    # drivers name files after kernels, so long names are cut
    names = {
        name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}_{index}": name
        for index, name in enumerate(sorted(kernels))
    }
    functions = {
        tvm.ir.GlobalVar(short): _without_offsets(name, kernels[name]).with_attr(
            "global_symbol", short
        )
        for short, name in names.items()
    }
    target = backend_for(target.export()).lowering_target(target)
    bound = tirx.transform.BindTarget(target.with_host(tvm.target.Target(target.host)))
    mod = tvm.transform.Sequential([make() for make in _PASSES])(bound(tvm.IRModule(functions)))
    on_device: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    on_host: dict[str, tirx.PrimFunc] = {}
    for var, function in mod.functions_items():
        if function.attrs.get(_IS_DEVICE_FUNCTION):
            on_device[var] = function
        else:
            on_host[names[str(var.name_hint)]] = function
    finished = tvm.transform.Sequential([make() for make in _DEVICE_PASSES])
    return DeviceProgram(
        functions=finished(tvm.IRModule(on_device)),
        kernels={name: _Evaluation(name, on_host[name]).kernel for name in sorted(on_host)},
    )


def has_threads(kernel: tirx.PrimFunc) -> bool:
    """Return whether a scheduled kernel binds loops to threads of a device."""
    return any(
        getattr(node, "thread_binding", None) is not None
        or getattr(node, "attr_key", "") == "thread_extent"
        for node in ir.find_nodes(kernel.body, tirx.For, tirx.AttrStmt)
    )


class UnsupportedKernel(StageError):
    """A kernel cannot become launches on a device."""

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(
            f"the kernel {kernel} cannot run on a device with only its driver: {reason}",
            fix="choose `runtime: vm` where TVM's runtime knows the device, or another target",
        )
        self.kernel = kernel
        self.reason = reason


_IS_DEVICE_FUNCTION: Final = "tirx.is_global_func"
_LAUNCH: Final = "tirx.call_ffi_kernel"
_DYNAMIC_MEMORY: Final = "tirx.use_dyn_shared_memory"
_AXES: Final = "xyz"
# A kernel with more launches is rejected, because their code would be too large.
_MAX_LAUNCHES: Final = 1 << 16

_LONGEST_NAME: Final = 60

# TVM's pipeline `s_tir`, up to the split of kernels into functions for the host and the device.
_PASSES: Final = (
    s_tir.transform.CanonicalizeLoop,
    s_tir.transform.LowerCrossThreadReduction,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    s_tir.transform.LiftThreadBinding,
    s_tir.transform.ManifestSharedMemoryLocalStage,
    s_tir.transform.CompactBufferAllocation,
    s_tir.transform.LowerAutoCopy,
    s_tir.transform.UnifyThreadBinding,
    s_tir.transform.LowerMatchBuffer,
    s_tir.transform.StmtSimplify,
    s_tir.transform.InjectPermutedLayout,
    s_tir.transform.AnnotateIrregularLoop,
    s_tir.transform.InjectSoftwarePipeline,
    s_tir.transform.TransformMmaBufferLayout,
    s_tir.transform.LowerOpaqueBlock,
    tirx.transform.FlattenBuffer,
    tirx.transform.BF16ComputeLegalize,
    lambda: tirx.transform.NarrowDataType(32),
    s_tir.transform.LoopPartition,
    lambda: tirx.transform.VectorizeLoop(True),
    s_tir.transform.InjectVirtualThread,
    s_tir.transform.InjectDoubleBuffer,
    tirx.transform.StorageRewrite,
    s_tir.transform.HoistIfThenElse,
    tirx.transform.UnrollLoop,
    s_tir.transform.RenormalizeSplitPattern,
    tirx.transform.StmtSimplify,
    tirx.transform.RemoveNoOp,
    s_tir.transform.RewriteUnsafeSelect,
    tirx.transform.CommonSubexprElim,
    tirx.transform.FP8ComputeLegalize,
    tirx.transform.VerifyMemory,
    lambda: s_tir.transform.ThreadSync("shared"),
    lambda: s_tir.transform.ThreadSync("shared.dyn"),
    lambda: s_tir.transform.ThreadSync("warp"),
    s_tir.transform.InferFragment,
    s_tir.transform.LowerThreadAllreduce,
    s_tir.transform.MergeSharedMemoryAllocations,
    tirx.transform.SplitHostDevice,
)
_DEVICE_PASSES: Final = (
    tirx.transform.FP8StorageLegalize,
    tirx.transform.BF16StorageLegalize,
    tirx.transform.LowerWarpMemory,
    tirx.transform.StmtSimplify,
    tirx.transform.LowerIntrin,
)


def _without_offsets(name: str, function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel whose tensors have no offset: each begins at its pointer."""
    offsets = {}
    for param in function.params:
        if not hasattr(param.ty, "shape") or any(map(is_dynamic, param.ty.shape)):
            raise UnsupportedKernel(name, "its sizes are known only when it runs")
        if isinstance(offset := param.ty.elem_offset, tvm.ir.Var):
            offsets[offset] = tirx.const(0, str(offset.ty.dtype))
    return ir.replace_variables(function, offsets) if offsets else function


class _Evaluation:
    def __init__(self, name: str, function: tirx.PrimFunc) -> None:
        self._name = name
        self._launches: list[Launch] = []
        self._scratch: list[int] = []
        self._tensors = len(function.params)
        # a buffer -> its index in the list of tensors
        self._indices: dict[Any, int] = {param: n for n, param in enumerate(function.params)}
        self._values: dict[Any, Any] = {}
        self._analyzer = tvm.sym.Analyzer()
        self._run(function.body)
        self.kernel = DeviceKernel(name, tuple(self._launches), tuple(self._scratch))

    def _run(self, statement: Any) -> None:
        if isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                self._run(part)
        elif isinstance(statement, tirx.DeclBuffer):
            self._indices[statement.buffer] = self._index_of(statement.data)
        elif isinstance(statement, tirx.AllocBuffer):
            buffer = statement.buffer
            dtype = tvm.DataType(str(buffer.ty.dtype.dtype))
            elements = math.prod(map(self._number, buffer.ty.shape))
            self._indices[buffer] = self._tensors + len(self._scratch)
            self._scratch.append(max(1, elements * dtype.itemsize))
        elif isinstance(statement, tirx.Bind):
            self._values[statement.var] = self._evaluate(statement.value)
        elif isinstance(statement, tirx.AttrStmt):
            self._run(statement.body)
        elif isinstance(statement, tirx.For):
            first, extent = self._number(statement.min), self._number(statement.extent)
            for step in range(first, first + extent):
                dtype = str(statement.loop_var.ty.dtype)
                self._values[statement.loop_var] = tirx.const(step, dtype)
                self._run(statement.body)
        elif isinstance(statement, tirx.IfThenElse):
            is_true = self._number(statement.condition)
            chosen = statement.then_case if is_true else statement.else_case
            if chosen is not None:
                self._run(chosen)
        elif isinstance(statement, tirx.Evaluate):
            if ir.operator_name(statement.value) == _LAUNCH:
                self._launch(statement.value)
        else:
            raise UnsupportedKernel(
                self._name, f"its code for the host has a {type(statement).__name__}"
            )

    def _launch(self, call: Any) -> None:
        """Add a launch; the call has the function, pointers, scalars, then the extents."""
        if len(self._launches) == _MAX_LAUNCHES:
            raise UnsupportedKernel(self._name, f"it has more than {_MAX_LAUNCHES} launches")
        names = [str(name) for name in call.attrs.launch_params]
        function, *arguments = call.args
        first_extent = len(arguments) - len(names)
        extents = dict(zip(names, map(self._number, arguments[first_extent:]), strict=True))
        pointers, scalars = list[int](), list[Scalar]()
        for argument in arguments[:first_extent]:
            if isinstance(argument.ty, tvm.ir.PointerType):
                pointers.append(self._index_of(argument))
            else:
                value = self._evaluate(argument)
                scalars.append(Scalar(str(argument.ty.dtype), self._constant(value)))
        self._launches.append(
            Launch(
                function=str(function.value),
                grid=_read_extents("blockIdx", extents),
                block=_read_extents("threadIdx", extents),
                arguments=tuple(pointers),
                scalars=tuple(scalars),
                shared_bytes=extents.get(_DYNAMIC_MEMORY, 0),
            )
        )

    def _index_of(self, pointer: Any) -> int:
        buffer = pointer.args[0] if isinstance(pointer, tvm.ir.Call) else pointer
        if buffer not in self._indices:
            raise UnsupportedKernel(self._name, f"its code for the host computes {pointer}")
        return self._indices[buffer]

    def _evaluate(self, expr: Any) -> Any:
        return self._analyzer.simplify(ir.replace_variables(expr, self._values))

    def _constant(self, value: Any) -> int | float:
        if isinstance(value, tirx.IntImm):
            return int(value.value)
        if isinstance(value, tirx.FloatImm):
            return float(value.value)
        raise UnsupportedKernel(self._name, f"a launch depends on data: {value}")

    def _number(self, expr: Any) -> int:
        return int(self._constant(self._evaluate(expr)))


def _read_extents(kind: str, extents: Mapping[str, int]) -> Extents:
    x, y, z = (extents.get(f"{kind}.{axis}", 1) for axis in _AXES)
    return x, y, z


# ---------------------------------------------------------------- programs
# A tensor may be in the memory of the host, of the device, or of both. Kernels for the CPU run between launches in the
# same program. A tensor is copied when a step needs it in the other memory.

# `TF_DEVICE_ALIGNMENT` of `device.h`.
_pad: Final = partial(padded, alignment=512)


@dataclass(frozen=True, slots=True)
class Delivery(Copy):
    """A copy of a result to an output on the host, skipped if the program bound a device output."""


_Where = dict[Storage, set[str]]
"""A tensor -> the memories that have its content: `host`, `device` or both."""


class TensorsOnDevice(NamedTuple):
    """Device tensors by index: the device copies of inputs, and the outputs that end on the device."""

    inputs: Mapping[int, Storage]
    outputs: Mapping[int, Storage]


def place_on_device(program: Program, kernels: Mapping[str, DeviceKernel]) -> TensorsOnDevice:
    """Place each tensor on the host, on the device or on both, and add the copies between them.

    Afterwards, device kernels take only tensors in the memories `device` and `constant`, then scratch buffers. Device
    memory is planned here; host memory must not be planned yet.
    """
    placement = _Placement(program, kernels)
    program.steps = placement.place()
    _, program.device_arena = plan_arena(program.steps, "device", _pad)
    return TensorsOnDevice(placement.uploaded, placement.delivered)


class _Placement:
    def __init__(self, program: Program, kernels: Mapping[str, DeviceKernel]) -> None:
        self._program = program
        self._kernels = kernels
        self._twins: dict[Storage, Storage] = {}
        # index of an input or output -> its tensor on the device; outputs that end on the host have none
        self.uploaded: dict[int, Storage] = {}
        self.delivered: dict[int, Storage] = {}

    def place(self) -> tuple[Step, ...]:
        program = self._program
        where: _Where = {storage: {_HOST} for storage in program.inputs}
        steps = self._place_steps(program.steps, where)
        for output in dict.fromkeys(output.resolve() for output in program.outputs):
            if _DEVICE in where[output]:
                self.delivered[output.index] = self._twin(output, _DEVICE)
            if _HOST not in where[output]:
                steps.append(Delivery(self._twin(output, _DEVICE), output))
        self.uploaded = {
            storage.index: twin for storage, twin in self._twins.items() if storage.scope == "input"
        }
        return tuple(steps)

    def _place_steps(self, steps: Iterable[Step], where: _Where) -> list[Step]:
        placed: list[Step] = []
        for step in steps:
            if isinstance(step, KernelCall):
                self._place_call(step, where, placed)
            elif isinstance(step, Copy):
                self._place_copy(step, where, placed)
            else:
                self._place_branch(step, where, placed)
        return placed

    def _place_call(self, call: KernelCall, where: _Where, placed: list[Step]) -> None:
        kernel = self._kernels.get(call.kernel)
        memory = _DEVICE if kernel else _HOST
        tensors = [storage.resolve() for storage in call.tensors]
        for storage in tensors[: call.inputs]:
            self._bring(storage, memory, where, placed)
        where.update({storage: {memory} for storage in tensors[call.inputs :]})
        scratch = [Storage("device", size) for size in (kernel.scratch if kernel else ())]
        placed.append(
            KernelCall(
                call.kernel,
                (*(self._twin(storage, memory) for storage in tensors), *scratch),
                call.inputs,
                call.sizes,
            )
        )

    def _place_copy(self, copy: Copy, where: _Where, placed: list[Step]) -> None:
        source, target = copy.source.resolve(), copy.target.resolve()
        sides = self._sides(source, where)
        # outputs are copied to the host directly
        source_side = _HOST if target.scope == "output" and _HOST in sides else _first(sides)
        target_side = _HOST if target.scope == "output" else source_side
        placed.append(Copy(self._twin(source, source_side), self._twin(target, target_side)))
        where[target] = {target_side}

    def _place_branch(self, branch: Branch, where: _Where, placed: list[Step]) -> None:
        condition = branch.condition.resolve()
        self._bring(condition, _HOST, where, placed)
        after_true, after_false = ({s: {*sides} for s, sides in where.items()} for _ in range(2))
        if_true = self._place_steps(branch.if_true, after_true)
        if_false = self._place_steps(branch.if_false, after_false)
        where.clear()
        for storage in after_true.keys() & after_false.keys():
            if not after_true[storage] & after_false[storage]:
                self._bring(storage, _DEVICE, after_true, if_true)
                self._bring(storage, _DEVICE, after_false, if_false)
            where[storage] = after_true[storage] & after_false[storage]
        placed.append(Branch(condition, tuple(if_true), tuple(if_false)))

    def _sides(self, storage: Storage, where: _Where) -> set[str]:
        return {_HOST, _DEVICE} if storage.scope == "constant" else where[storage]

    def _bring(self, storage: Storage, memory: str, where: _Where, placed: list[Step]) -> None:
        """Append a copy of a tensor to a memory unless its content is there."""
        sides = self._sides(storage, where)
        if memory not in sides:
            placed.append(Copy(self._twin(storage, _first(sides)), self._twin(storage, memory)))
            where[storage] = {*sides, memory}

    def _twin(self, storage: Storage, memory: str) -> Storage:
        if memory == _HOST or storage.scope == "constant":
            return storage
        return self._twins.setdefault(storage, Storage("device", storage.bytes, storage.index))


_HOST: Final = "host"
_DEVICE: Final = "device"


def _first(sides: set[str]) -> str:
    """Return the memory to copy a tensor from: the device if its content is there, else the host."""
    return _DEVICE if _DEVICE in sides else _HOST


# ---------------------------------------------------------------- c code


class DeviceCode(NamedTuple):
    """The device code in a library: its C name, size and digest, the kernels, the device's tensors."""

    kernels: Mapping[str, DeviceKernel]
    tensors: TensorsOnDevice
    symbol: str
    bytes: int
    digest: str


class _Position(NamedTuple):
    """A tensor on the device: the fields of `tf_place`; `outer` numbers inputs and outputs from 1."""

    offset: int
    bytes: int
    source: int = 0
    is_weight: bool = False
    outer: int = 0


class DeviceWriter(Writer):
    """Writes the C code of a program on a device: launches in place of calls, and copies."""

    def __init__(
        self, program: Program, kernels: Mapping[str, KernelTraits], prefix: str, device: DeviceCode
    ) -> None:
        super().__init__(program, kernels, prefix)
        self._device = device
        self._positions: dict[_Position, int] = {}
        self._weights: dict[int, int] = {}
        self._weight_bytes = 0
        self._threads: dict[str, int] = {}
        for launch in (each for kernel in device.kernels.values() for each in kernel.launches):
            most = self._threads.get(launch.function, 0)
            self._threads[launch.function] = max(most, math.prod(launch.block))
        self._functions = {name: position for position, name in enumerate(self._threads)}
        self._launched: dict[str, None] = {}
        self._most_pointers = 0
        outer = [*device.tensors.inputs.values(), *device.tensors.outputs.values()]
        # the calling program may replace these by its own device memory
        self._outer = {storage: n for n, storage in enumerate(dict.fromkeys(outer), 1)}
        self._host_inputs: set[int] = set()
        # whether a copy from the device may still be running
        self._is_pending = False

    def _write_plan(self) -> list[str]:
        device, program = self._device, self._program
        inputs = self._list_positions(len(program.inputs), device.tensors.inputs)
        outputs = self._list_positions(program.count_described(), device.tensors.outputs)
        on_host = [
            str(index in self._host_inputs).lower() for index in range(len(program.inputs) + 1)
        ]
        lines = [
            f"#define TF_DEVICE_CODE {device.symbol}",
            f"#define TF_DEVICE_CODE_BYTES {device.bytes}u",
            f"#define TF_DEVICE_CODE_DIGEST {c_string(device.digest)}",
            f"#define TF_DEVICE_FUNCTIONS {len(self._functions)}",
            f"#define TF_DEVICE_ARENA UINT64_C({self._program.device_arena})",
            f"#define TF_DEVICE_WEIGHTS UINT64_C({self._weight_bytes})",
            f"#define TF_DEVICE_PLACES {len(self._positions)}",
            f"#define TF_DEVICE_MOST_POINTERS {self._most_pointers}",
            "extern const unsigned char TF_DEVICE_CODE[];",
            "static const char *const tf_device_functions[] = {",
            *(f"    {c_string(name)}," for name in self._functions),
            "    NULL,",
            "};",
            "static const uint32_t tf_device_threads[] = {",
            f"    {', '.join(map(str, [*self._threads.values(), 0]))}",
            "};",
            "static const tf_place tf_places[] = {",
            *(
                f"    {{{position.offset}u, {position.bytes}u, {position.source}u, {str(position.is_weight).lower()}}},"
                for position in self._positions
            ),
            "    {0, 0, 0, false},",
            "};",
            f"static const uint32_t tf_input_places[] = {{{inputs}}};",
            f"static const uint32_t tf_output_places[] = {{{outputs}}};",
            f"static const bool tf_host_inputs[] = {{{', '.join(on_host)}}};",
        ]
        for kernel in self._launched:
            lines += self._write_launches(kernel)
        return lines

    def _write_launches(self, kernel: str) -> list[str]:
        number = self._numbers[kernel]
        lists: dict[str, str] = {}
        rows = []
        for launch in self._device.kernels[kernel].launches:
            values = [
                self._functions[launch.function],
                *(f"{{{', '.join(map(str, sizes))}}}" for sizes in (launch.grid, launch.block)),
                launch.shared_bytes,
                len(launch.arguments),
                _name_list(lists, "uint16_t", f"a{number}", map(str, launch.arguments)),
                len(launch.scalars),
                _name_list(lists, "tf_scalar", f"s{number}", map(str, launch.scalars)),
            ]
            rows.append(f"    {{{', '.join(map(str, values))}}},")
        return [
            *(f"static const {text};" for text in lists.values()),
            f"static const tf_device_launch tf_launches{number}[] = {{",
            *rows,
            "};",
        ]

    def _write_step(self, step: Step, indent: str) -> list[str]:
        if isinstance(step, Copy):
            return self._write_copy(step, indent)
        if isinstance(step, KernelCall) and step.kernel in self._device.kernels:
            number = self._numbers.setdefault(step.kernel, len(self._numbers))
            self._launched[step.kernel] = None
            self._most_pointers = max(self._most_pointers, len(step.tensors))
            indices = ", ".join(f"{self._number(tensor)}" for tensor in step.tensors)
            return [f"{indent}TF_LAUNCH({number}, tf_launches{number}, {indices});"]
        return [*self._write_wait(indent), *super()._write_step(step, indent)]

    def _write_steps(self, steps: Sequence[Step], indent: str) -> list[str]:
        lines = super()._write_steps(steps, indent)
        # the runtime waits at the end of all steps; a branch waits itself: later code cannot know which side ran
        is_branch = steps is not self._program.steps
        return [*lines, *self._write_wait(indent)] if is_branch else lines

    def _write_wait(self, indent: str) -> list[str]:
        lines = [f"{indent}TF_TRY(tf_wait(tf->stream));"] if self._is_pending else []
        self._is_pending = False
        return lines

    def _write_copy(self, copy: Copy, indent: str) -> list[str]:
        source, target = copy.source.resolve(), copy.target.resolve()
        size = self._size(source)
        if not source.bytes:
            return []
        if target.scope == "device":
            handle = f"tf->handles[{self._number(target)}]"
            if source.scope in ("device", "constant"):
                handles = f"{handle}, tf->handles[{self._number(source)}]"
                return [f"{indent}TF_TRY(tf_copy_on_device(tf->stream, {handles}, {size}));"]
            address = super()._address(source)
            copy_in = f"TF_TRY(tf_copy_in(tf->stream, {handle}, {address}, {size}));"
            if source.scope == "input":
                # not copied if the calling program bound its own device memory
                copy_in = f"if (!tf->bound[{source.index}]) {copy_in}"
            return [*self._write_wait(indent), f"{indent}{copy_in}"]
        if source.scope == "device":
            self._is_pending = True
            operands = f"{self._address(target)}, tf->handles[{self._number(source)}], {size}"
            copy_out = f"TF_TRY(tf_copy_out(tf->stream, {operands}));"
            if isinstance(copy, Delivery) and target.index < self._program.count_described():
                # not copied if the calling program bound its own device memory
                copy_out = f"if (!tf->bound[TF_STATUS(INPUTS) + {target.index}]) {copy_out}"
            return [f"{indent}{copy_out}"]
        return [*self._write_wait(indent), *super()._write_step(copy, indent)]

    def _address(self, storage: Storage) -> str:
        storage = storage.resolve()
        if storage.scope == "input":
            self._host_inputs.add(storage.index)
        return super()._address(storage)

    def _list_positions(self, count: int, tensors: Mapping[int, Storage]) -> str:
        listed = (self._number(tensors[n]) if n in tensors else "TF_NO_PLACE" for n in range(count))
        return ", ".join([*map(str, listed), "TF_NO_PLACE"])

    def _number(self, storage: Storage) -> int:
        storage = storage.resolve()
        size = max(1, storage.bytes)
        if storage.scope == "constant":
            if storage.index not in self._weights:
                self._weights[storage.index] = self._weight_bytes
                self._weight_bytes += _pad(size)
            offset, source = self._weights[storage.index], self._offsets[storage.index]
            position = _Position(offset, size, source, is_weight=True)
        else:
            position = _Position(storage.offset, size, outer=self._outer.get(storage, 0))
        return self._positions.setdefault(position, len(self._positions))


def _name_list(lists: dict[str, str], ctype: str, prefix: str, items: Iterable[str]) -> str:
    """Return the name of a C array with these items, shared by equal lists; `NULL` for no items."""
    values = ", ".join(items)
    if not values:
        return "NULL"
    key = f"{ctype} {values}"
    if key not in lists:
        lists[key] = f"{ctype} tf_{prefix}_{len(lists)}[] = {{{values}}}"
    return lists[key].split()[1].removesuffix("[]")
