"""Runs kernels for OpenCL by the system's library, through ctypes, as on PoCL: launches, and whole models."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import tirx

from tvmflow.compiler.c_program.device_program import Launch, lower_device_kernels
from tvmflow.compiler.c_program.program import Branch, Copy, KernelCall, Program, Storage

Array = np.ndarray[Any, Any]

TARGET: Final[dict[str, Any]] = {
    "kind": "opencl",
    "max_threads_per_block": 256,
    "max_shared_memory_per_block": 32768,
    "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
}
"""The target of the device that tests run on."""

_PROFILING: Final = 2
_READ_WRITE: Final = 1
_ALL_DEVICES: Final = 0xFFFFFFFF
_EXTENSIONS: Final = 0x1030
_BUILD_LOG: Final = 0x1183
_START: Final = 0x1282
_END: Final = 0x1283


class Generated(NamedTuple):
    """The code of a kernel: its source, and its launches."""

    source: str
    launches: tuple[Launch, ...]


def generate(function: tirx.PrimFunc, target: tvm.target.Target, name: str) -> Generated:
    """Return the code of a scheduled kernel (for CUDA, in CUDA C)."""
    program = lower_device_kernels({name: function}, target)
    write = tvm.get_global_func(f"target.build.{target.kind.name}")
    source = str(write(program.functions, target).inspect_source())
    kernel = program.kernels[name]
    assert not kernel.scratch and not any(launch.scalars for launch in kernel.launches)
    return Generated(source, kernel.launches)


@functools.cache
def find_device() -> Device | None:
    """Return the first device of the system's OpenCL; None without one."""
    try:
        library = ctypes.CDLL("libOpenCL.so.1")
    except OSError:
        return None
    platforms = (ctypes.c_void_p * 8)()
    count = ctypes.c_uint()
    if library.clGetPlatformIDs(8, platforms, ctypes.byref(count)):
        return None
    for platform in list(platforms)[: count.value]:
        device = ctypes.c_void_p()
        handle, kind = ctypes.c_void_p(platform), ctypes.c_uint64(_ALL_DEVICES)
        if not library.clGetDeviceIDs(handle, kind, 1, ctypes.byref(device), None):
            return Device(library, device)
    return None


class Device:
    """A device of OpenCL, with a queue that measures."""

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        self._cl, self._device = library, device
        for name in ("Context", "CommandQueue", "ProgramWithSource", "Kernel", "Buffer"):
            getattr(library, f"clCreate{name}").restype = ctypes.c_void_p
        self._context = self._create("Context", None, 1, ctypes.byref(device), None, None)
        profiling = ctypes.c_uint64(_PROFILING)
        self._queue = self._create("CommandQueue", self._context, device, profiling)

    @functools.cached_property
    def has_float16(self) -> bool:
        """Whether the device computes with float16."""
        text, size = ctypes.create_string_buffer(1 << 14), ctypes.c_size_t(1 << 14)
        kind = ctypes.c_uint(_EXTENSIONS)
        _check("extensions", self._cl.clGetDeviceInfo(self._device, kind, size, text, None))
        return b"cl_khr_fp16" in text.value

    def _create(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        status = ctypes.c_int()
        handle = getattr(self._cl, f"clCreate{kind}")(*arguments, ctypes.byref(status))
        _check(kind, status.value)
        return ctypes.c_void_p(handle)

    def allocate(self, size: int) -> ctypes.c_void_p:
        """Return a new buffer."""
        flags, size_t = ctypes.c_uint64(_READ_WRITE), ctypes.c_size_t(max(16, size))
        return self._create("Buffer", self._context, flags, size_t, None)

    def release(self, buffer: ctypes.c_void_p) -> None:
        """Free a buffer."""
        _check("release", self._cl.clReleaseMemObject(buffer))

    def write(self, buffer: ctypes.c_void_p, array: Array) -> None:
        """Copy an array to a buffer."""
        self._transfer("Write", buffer, np.ascontiguousarray(array))

    def read(self, buffer: ctypes.c_void_p, array: Array) -> Array:
        """Copy a buffer to an array, and return it."""
        self._transfer("Read", buffer, array)
        return array

    def _transfer(self, kind: str, buffer: ctypes.c_void_p, array: Array) -> None:
        call = getattr(self._cl, f"clEnqueue{kind}Buffer")
        zero, size = ctypes.c_size_t(0), ctypes.c_size_t(array.nbytes)
        data = array.ctypes.data_as(ctypes.c_void_p)
        if array.nbytes:
            _check(kind, call(self._queue, buffer, 1, zero, size, data, 0, None, None))

    def copy(self, source: ctypes.c_void_p, target: ctypes.c_void_p, size: int) -> None:
        """Copy a buffer to another one."""
        zero, size_t = ctypes.c_size_t(0), ctypes.c_size_t(size)
        call = self._cl.clEnqueueCopyBuffer
        _check("copy", call(self._queue, source, target, zero, zero, size_t, 0, None, None))

    def build(self, source: str, name: str) -> ctypes.c_void_p:
        """Return a function of a source; the driver's log is the error of one that it rejects."""
        text = (ctypes.c_char_p * 1)(source.encode())
        program = self._create("ProgramWithSource", self._context, 1, text, None)
        if self._cl.clBuildProgram(program, 0, None, None, None, None):
            log = ctypes.create_string_buffer(1 << 16)
            size, kind = ctypes.c_size_t(len(log)), ctypes.c_uint(_BUILD_LOG)
            self._cl.clGetProgramBuildInfo(program, self._device, kind, size, log, None)
            raise AssertionError(log.value.decode(errors="replace"))
        return self._create("Kernel", program, name.encode())

    def launch(
        self, kernel: ctypes.c_void_p, launch: Launch, buffers: Sequence[ctypes.c_void_p]
    ) -> float:
        """Launch a function, wait for it, and return the seconds that it took on the device."""
        for position, place in enumerate(launch.arguments):
            buffer = buffers[place]
            size = ctypes.c_size_t(ctypes.sizeof(buffer))
            _check(
                "argument", self._cl.clSetKernelArg(kernel, position, size, ctypes.byref(buffer))
            )
        threads = (ctypes.c_size_t * 3)(*launch.block)
        total = (ctypes.c_size_t * 3)(
            *(a * b for a, b in zip(launch.grid, launch.block, strict=True))
        )
        event = ctypes.c_void_p()
        status = self._cl.clEnqueueNDRangeKernel(
            *(self._queue, kernel, 3, None, total, threads, 0, None, ctypes.byref(event))
        )
        _check(launch.function, status)
        _check("wait", self._cl.clFinish(self._queue))
        times = []
        for kind in (_START, _END):
            time = ctypes.c_uint64()
            self._cl.clGetEventProfilingInfo(
                event, ctypes.c_uint(kind), ctypes.c_size_t(8), ctypes.byref(time), None
            )
            times.append(time.value)
        self._cl.clReleaseEvent(event)
        return (times[1] - times[0]) * 1e-9


def _check(what: str, status: int) -> None:
    assert status == 0, f"OpenCL: {what} gives {status}"


class Model:
    """A program whose kernels are scheduled, on a device."""

    def __init__(self, device: Device, mod: tvm.IRModule, program: Program, target: Any) -> None:
        self._device, self._program = device, program
        self._kernels: dict[str, tuple[ctypes.c_void_p, Launch]] = {}
        steps = [step for step in program.steps if isinstance(step, KernelCall)]
        for name in sorted({step.kernel for step in steps}):
            generated = generate(mod[name], target, name)
            (launch,) = generated.launches
            self._kernels[name] = (device.build(generated.source, launch.function), launch)
        self._buffers: dict[int, tuple[Storage, ctypes.c_void_p]] = {}
        for index, array in enumerate(program.constants):
            for storage in self._list_storages():
                if (storage.scope, storage.index) == ("constant", index):
                    device.write(self._buffer(storage), array)

    def _list_storages(self) -> list[Storage]:
        storages = [*self._program.inputs, *self._program.outputs]
        for step in self._program.steps:
            assert not isinstance(step, Branch), "the model has no condition"
            storages += step.tensors if isinstance(step, KernelCall) else (step.source, step.target)
        return [storage.resolve() for storage in storages]

    def _buffer(self, storage: Storage) -> ctypes.c_void_p:
        storage = storage.resolve()
        if id(storage) not in self._buffers:
            self._buffers[id(storage)] = (storage, self._device.allocate(storage.bytes))
        return self._buffers[id(storage)][1]

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute the outputs in place, and return the seconds of each kernel, summed over its launches."""
        seconds = dict.fromkeys(self._kernels, 0.0)
        for storage, array in zip(self._program.inputs, inputs, strict=True):
            self._device.write(self._buffer(storage), array)
        for step in self._program.steps:
            if isinstance(step, Copy):
                size = step.source.resolve().bytes
                self._device.copy(self._buffer(step.source), self._buffer(step.target), size)
                continue
            assert isinstance(step, KernelCall)
            kernel, launch = self._kernels[step.kernel]
            buffers = [self._buffer(tensor) for tensor in step.tensors]
            seconds[step.kernel] += self._device.launch(kernel, launch, buffers)
        for storage, array in zip(self._program.outputs, outputs, strict=True):
            self._device.read(self._buffer(storage), array)
        return seconds

    def close(self) -> None:
        """Free all buffers."""
        for _, buffer in self._buffers.values():
            self._device.release(buffer)
        self._buffers.clear()


def run_kernel(
    device: Device, function: tirx.PrimFunc, target: Any, arrays: Sequence[Array], rows: int = 0
) -> None:
    """Run a scheduled kernel on arrays in the order of its parameters, in place; all rows of blocks, or the first."""
    generated = generate(function, target, "kernel")
    (launched,) = generated.launches
    across, down, deep = launched.grid
    launched = launched._replace(grid=(across, rows or down, deep))
    kernel = device.build(generated.source, launched.function)
    buffers = [device.allocate(array.nbytes) for array in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        device.write(buffer, array)
    device.launch(kernel, launched, buffers)
    for buffer, array in zip(buffers, arrays, strict=True):
        device.read(buffer, array)
        device.release(buffer)
