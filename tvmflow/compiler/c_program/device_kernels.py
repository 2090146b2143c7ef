"""Kernels for a device, such as a GPU: code of their functions, and the launches of each kernel.

A scheduled kernel becomes one or more device functions and code for the host that launches them. Sizes
are fixed, so the host's code is evaluated here: what is left is a list of launches, which any executor
can start. Nothing here knows who does that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import tvm
from tvm import s_tir, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import is_open
from tvmflow.core.errors import StageError
from tvmflow.targets.backends import backend_for

Extents = tuple[int, int, int]
"""Sizes along x, y and z."""


class Scalar(NamedTuple):
    """A number that a launch passes besides tensors; `dtype` is NumPy's name."""

    dtype: str
    value: int | float


class Launch(NamedTuple):
    """A launch of a device function.

    Attributes:
        function: The name of the function in the code.
        grid: The blocks of threads.
        block: The threads of a block.
        arguments: The tensors that it takes, in its order: places in the list of the kernel's tensors, after
            which those of its scratch memory follow.
        scalars: The numbers that it takes after the tensors.
        shared_bytes: The dynamic shared memory of a block.
    """

    function: str
    grid: Extents
    block: Extents
    arguments: tuple[int, ...]
    scalars: tuple[Scalar, ...] = ()
    shared_bytes: int = 0


class DeviceKernel(NamedTuple):
    """A kernel as launches.

    Attributes:
        name: Its name in the lowered module.
        launches: Its launches, in order.
        scratch: The bytes of each buffer on the device that it needs while it runs.
    """

    name: str
    launches: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()


class DeviceProgram(NamedTuple):
    """Kernels for a device.

    Attributes:
        functions: The device functions, ready for the code generator of the target.
        kernels: The kernels by name.
    """

    functions: tvm.IRModule
    kernels: Mapping[str, DeviceKernel]


def lower_device_kernels(
    kernels: Mapping[str, tirx.PrimFunc], target: tvm.target.Target
) -> DeviceProgram:
    """Lower scheduled kernels to device functions and launches.

    Args:
        kernels: The kernels by name; their sizes are fixed.
        target: The target of the device, with its host.

    Raises:
        UnsupportedKernel: A kernel does something on the host besides launching, or has open sizes.
    """
    names = {_shorten(name, place): name for place, name in enumerate(sorted(kernels))}
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
    """Return whether a scheduled kernel is for a device: it has threads there."""
    return any(
        loop.thread_binding is not None for loop in ir.find_nodes(kernel.body, tirx.For)
    ) or any(
        statement.attr_key == "thread_extent"
        for statement in ir.find_nodes(kernel.body, tirx.AttrStmt)
    )


def generate_device_code(program: DeviceProgram, target: tvm.target.Target) -> bytes:
    """Return the code of all device functions, as the driver of the target's kind takes it."""
    return backend_for(target.export()).generate_device_code(program.functions, target)


class UnsupportedKernel(StageError):
    """A kernel cannot become launches on a device.

    Attributes:
        kernel: Its name.
        reason: What it does.
    """

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(
            f"the kernel {kernel} cannot run on a device by its driver alone: {reason}",
            fix="choose `runtime: vm` where TVM's runtime knows the device, or another target",
        )
        self.kernel = kernel
        self.reason = reason


_IS_DEVICE_FUNCTION: Final = "tirx.is_global_func"
_LAUNCH: Final = "tirx.call_ffi_kernel"
_DYNAMIC_MEMORY: Final = "tirx.use_dyn_shared_memory"
_AXES: Final = "xyz"
# More launches than this are more code than a model is worth.
_MOST_LAUNCHES: Final = 1 << 16

_LONGEST_NAME: Final = 60

# TVM's pipeline `s_tir`, until kernels are functions for a host and a device.
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


def _shorten(name: str, place: int) -> str:
    """Return a name for functions of a kernel, which drivers use as that of a file."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}_{place}"


def _without_offsets(name: str, function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel whose tensors begin where their pointers point to."""
    offsets = {}
    for param in function.params:
        if not hasattr(param.ty, "shape") or any(map(is_open, param.ty.shape)):
            raise UnsupportedKernel(name, "its sizes are known only when it runs")
        if isinstance(offset := param.ty.elem_offset, tvm.ir.Var):
            offsets[offset] = tirx.const(0, str(offset.ty.dtype))
    return ir.replace_variables(function, offsets) if offsets else function


class _Evaluation:
    """Evaluates the code for the host of one kernel."""

    def __init__(self, name: str, function: tirx.PrimFunc) -> None:
        self._name = name
        self._launches: list[Launch] = []
        self._scratch: list[int] = []
        self._tensors = len(function.params)
        # a buffer -> its place in the list of tensors
        self._places: dict[Any, int] = {param: place for place, param in enumerate(function.params)}
        self._values: dict[Any, Any] = {}
        self._analyzer = tvm.sym.Analyzer()
        self._run(function.body)
        self.kernel = DeviceKernel(name, tuple(self._launches), tuple(self._scratch))

    def _run(self, statement: Any) -> None:
        """Evaluate a statement."""
        if isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                self._run(part)
        elif isinstance(statement, tirx.DeclBuffer):
            self._places[statement.buffer] = self._place(statement.data)
        elif isinstance(statement, tirx.AllocBuffer):
            self._allocate(statement.buffer)
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
            chosen = statement.then_case
            if not self._number(statement.condition):
                chosen = statement.else_case
            if chosen is not None:
                self._run(chosen)
        elif isinstance(statement, tirx.Evaluate):
            if ir.operator_name(statement.value) == _LAUNCH:
                self._launch(statement.value)
        else:
            raise UnsupportedKernel(
                self._name, f"its code for the host has a {type(statement).__name__}"
            )

    def _allocate(self, buffer: Any) -> None:
        """Give a buffer on the device its place after the tensors."""
        dtype = tvm.DataType(str(buffer.ty.dtype.dtype))
        elements = math.prod(map(self._number, buffer.ty.shape))
        self._places[buffer] = self._tensors + len(self._scratch)
        self._scratch.append(max(1, elements * dtype.itemsize))

    def _launch(self, call: Any) -> None:
        """Add a launch: its function, pointers, numbers, then its extents."""
        if len(self._launches) == _MOST_LAUNCHES:
            raise UnsupportedKernel(self._name, f"it has more than {_MOST_LAUNCHES} launches")
        names = [str(name) for name in call.attrs.launch_params]
        function, *arguments = call.args
        first_extent = len(arguments) - len(names)
        extents = dict(zip(names, map(self._number, arguments[first_extent:]), strict=True))
        pointers, scalars = list[int](), list[Scalar]()
        for argument in arguments[:first_extent]:
            if isinstance(argument.ty, tvm.ir.PointerType):
                pointers.append(self._place(argument))
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

    def _place(self, pointer: Any) -> int:
        """Return the place of the buffer that a pointer is to."""
        buffer = pointer.args[0] if isinstance(pointer, tvm.ir.Call) else pointer
        if buffer not in self._places:
            raise UnsupportedKernel(self._name, f"its code for the host computes {pointer}")
        return self._places[buffer]

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
