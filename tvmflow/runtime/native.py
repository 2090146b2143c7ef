"""TVM's runtime without its compiler: libraries, calls, and tensors in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tvmflow.core.types import TensorSpec
from tvmflow.targets.backends import cpu
from tvmflow.targets.backends._base import Backend

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# AllocatorType::kPooled in tvm/runtime/memory/memory_manager.h
_POOLED_ALLOCATOR: Final = 2
_ALIGNMENT: Final = 64

Main = Callable[..., Any]
"""A model's `main`: takes the runtime's tensors and returns one tensor or several."""

Instrument = Callable[[str, bool], None]
"""Receives the name of an operator before it begins (True) and after it has ended (False)."""


class ExecutionDevice:
    """The device of a backend in this process: a library runs there, and its tensors are there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def is_host(self) -> bool:
        """True where tensors are in the memory that numpy uses."""
        return self._backend.RUNS_ON_HOST_CPU

    @property
    def allocators(self) -> tuple[int, ...]:
        """The arguments of `vm_initialization`: type, number and allocator of each device, the CPU last."""
        own, host = self._backend.DLPACK_DEVICE_TYPE, cpu.DLPACK_DEVICE_TYPE
        types = (host,) if self.is_host else (own, host)
        return tuple(number for type_ in types for number in (type_, 0, _POOLED_ALLOCATOR))

    def holds(self, tensor: Any) -> bool:
        """Return whether one of the runtime's tensors is on this device."""
        return bool(tensor.device.dlpack_device_type() == self._backend.DLPACK_DEVICE_TYPE)

    def allocate(self, spec: TensorSpec) -> Any:
        """Return a tensor of the runtime with undefined content."""
        import tvm_ffi

        if self.is_host:
            return allocate_aligned(spec)[1]
        allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
        shape, dtype = tvm_ffi.Shape(spec.shape), tvm_ffi.dtype(spec.dtype)
        return allocate(shape, dtype, self._device, None)

    def synchronize(self) -> None:
        """Wait until all calls and copies on this device have ended: those of a GPU return earlier."""
        if not self.is_host:
            _synchronize(self._device)

    def load_runtime(self) -> None:
        """Load what libraries need of TVM and of the backend, into this process."""
        import tvm_ffi

        for name in ("tvm_runtime", "tvm_runtime_extra"):
            tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")
        self._backend.load_runtime()

    @property
    def _device(self) -> Any:
        import tvm_ffi

        return tvm_ffi.device(self._backend.DLPACK_DEVICE_TYPE, 0)


CPU: Final = ExecutionDevice(cpu)


def _copy(source: Any, destination: Any) -> None:
    """Begin to copy the content of one of the runtime's tensors to another of the same shape and dtype."""
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(source, destination)


def copy_and_wait(source: Any, destination: Any) -> None:
    """Copy the content of one of the runtime's tensors to another, and wait until the copy has ended."""
    _copy(source, destination)
    for tensor in (source, destination):
        if not CPU.holds(tensor):
            _synchronize(tensor.device)


def _synchronize(device: Any) -> None:
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.Device_StreamSync")(device, 0)


class InputBuffer:
    """An input of a library: `array` is filled by the caller; `tensor` is what `main` takes after `send()`."""

    def __init__(self, spec: TensorSpec, device: ExecutionDevice) -> None:
        self.array, self._host_tensor = allocate_aligned(spec)
        self.tensor = self._host_tensor if device.is_host else device.allocate(spec)

    def send(self) -> None:
        """Begin to copy the array's content to the device."""
        if self.tensor is not self._host_tensor:
            _copy(self._host_tensor, self.tensor)


class Program(Protocol):
    """The code of a model, as a `Module` calls it."""

    @property
    def main(self) -> Main:
        """The model's function."""

    @property
    def device(self) -> ExecutionDevice:
        """The device on which `main` takes its tensors."""

    def wait(self) -> None:
        """Wait until all calls have ended."""

    def instrumented_main(self, instrument: Instrument) -> Main:
        """Return another `main`, which is slower and reports every operator."""


class Executable:
    """A library with one compiled model."""

    def __init__(self, library: Any, device: ExecutionDevice = CPU) -> None:
        self._library = library
        self.device = device
        self.wait = device.synchronize
        self.main: Main = self._create_vm()["main"]

    def _create_vm(self) -> Any:
        vm = self._library["vm_load_executable"]()
        vm["vm_initialization"](*self.device.allocators)
        return vm

    def instrumented_main(self, instrument: Instrument) -> Main:
        """Return another `main`, which is slower and reports every operator."""
        # a virtual machine with an instrument stays slow, so this one is another
        vm = self._create_vm()

        def report(_function: Any, name: str, before: bool, *_: Any) -> int:
            self.wait()
            instrument(name, before)
            return 0

        vm["set_instrument"](report)
        main: Main = vm["main"]
        return main


def list_tensors(result: Any) -> list[Any]:
    """Return the result of a `main`, one tensor or several, as a list."""
    import tvm_ffi

    return [result] if isinstance(result, tvm_ffi.Tensor) else list(result)


def load_library(library: Path, device: ExecutionDevice = CPU) -> Any:
    """Load a shared library for a device. The loader maps the file, which may be removed afterwards."""
    import tvm_ffi

    device.load_runtime()
    return tvm_ffi.load_module(library)


def allocate_aligned(spec: TensorSpec) -> tuple[Array, Any]:
    """Return an array with the alignment that kernels rely on, and the runtime's view of it."""
    import numpy as np
    import tvm_ffi

    dtype = np.dtype(spec.dtype)
    size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array = raw[start : start + size].view(dtype).reshape(spec.shape)
    return array, tvm_ffi.from_dlpack(array)


def send_array(content: Array, device: ExecutionDevice) -> Any:
    """Return a tensor of the runtime on a device, with the content of an array."""
    import numpy as np

    buffer = InputBuffer(TensorSpec("", tuple(content.shape), str(content.dtype)), device)
    np.copyto(buffer.array, content)
    buffer.send()
    device.synchronize()
    return buffer.tensor


def fetch_array(tensor: Any) -> Array:
    """Return a copy of one of the runtime's tensors, from any device, once its content is complete."""
    import numpy as np

    if CPU.holds(tensor):
        return np.array(np.from_dlpack(tensor))
    array, host_tensor = allocate_aligned(TensorSpec("", tuple(tensor.shape), str(tensor.dtype)))
    copy_and_wait(tensor, host_tensor)
    return array
