"""TVM's runtime without its compiler: libraries, calls, and tensors in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tvmflow.targets.gpu import load_cuda
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# DLPack's numbers of kinds of devices
_CPU: Final = 1
_CUDA: Final = 2
_POOLED_ALLOCATOR: Final = 2
_ALIGNMENT: Final = 64

Main = Callable[..., Any]
"""A model's `main`: takes the runtime's tensors, and gives one or several."""

Watch = Callable[[str, bool], None]
"""Told the name of an operator, before it begins (True) and when it has ended."""


class Place:
    """Where a library runs and has its tensors: the CPU, or the first GPU that there is for this process."""

    def __init__(self, kind: int) -> None:
        self._kind = kind

    @property
    def is_cpu(self) -> bool:
        """Whether tensors are in the memory that numpy sees."""
        return self._kind == _CPU

    @property
    def allocators(self) -> tuple[int, ...]:
        """What a machine of TVM's is told: device, number and allocator, of the CPU last."""
        kinds = (_CPU,) if self.is_cpu else (self._kind, _CPU)
        return tuple(number for kind in kinds for number in (kind, 0, _POOLED_ALLOCATOR))

    def holds(self, tensor: Any) -> bool:
        """Whether one of the runtime's tensors is here."""
        return bool(tensor.device.dlpack_device_type() == self._kind)

    def empty(self, spec: TensorSpec) -> Any:
        """A tensor of the runtime, of any content."""
        import tvm_ffi

        if self.is_cpu:
            return aligned(spec)[1]
        allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
        shape, dtype = tvm_ffi.Shape(spec.shape), tvm_ffi.dtype(spec.dtype)
        return allocate(shape, dtype, self._device, None)

    def wait(self) -> None:
        """Until all that was begun here is done: a GPU's calls and copies return before."""
        import tvm_ffi

        if not self.is_cpu:
            tvm_ffi.get_global_func("runtime.Device_StreamSync")(self._device, 0)

    @property
    def _device(self) -> Any:
        import tvm_ffi

        return tvm_ffi.device(self._kind, 0)


CPU: Final = Place(_CPU)
GPU: Final = Place(_CUDA)


def copy(source: Any, target: Any) -> None:
    """Begin to bring the content of one of the runtime's tensors to another, of the same shape and dtype."""
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(source, target)


class Buffer:
    """What a library takes: `array` is filled here, `tensor` is what it is handed once it was `sent`."""

    def __init__(self, spec: TensorSpec, place: Place) -> None:
        self.array, self._here = aligned(spec)
        self.tensor = self._here if place.is_cpu else place.empty(spec)

    def send(self) -> None:
        """Bring the array's content to where the library runs."""
        if self.tensor is not self._here:
            copy(self._here, self.tensor)


class Program(Protocol):
    """What a `Module` calls."""

    @property
    def main(self) -> Main: ...

    @property
    def place(self) -> Place:
        """Where `main` takes its tensors."""
        ...

    def wait(self) -> None:
        """Until all calls are done."""
        ...

    def watched(self, watch: Watch) -> Main:
        """A `main` of its own, which is slower, and tells of every operator."""
        ...


class Executable:
    """A library with one compiled model."""

    def __init__(self, library: Any, place: Place = CPU) -> None:
        self._library = library
        self.place = place
        self.wait = place.wait
        self.main: Main = self._machine()["main"]

    def _machine(self) -> Any:
        machine = self._library["vm_load_executable"]()
        machine["vm_initialization"](*self.place.allocators)
        return machine

    def watched(self, watch: Watch) -> Main:
        # a machine that is watched stays slow
        machine = self._machine()

        def tell(_function: Any, name: str, before: bool, *_: Any) -> int:
            self.wait()
            watch(name, before)
            return 0

        machine["set_instrument"](tell)
        main: Main = machine["main"]
        return main


def tensors_of(result: Any) -> list[Any]:
    """What a `main` gave, one or several, as a list."""
    import tvm_ffi

    return [result] if isinstance(result, tvm_ffi.Tensor) else list(result)


def load_library(content: bytes, suffix: str, place: Place = CPU) -> Any:
    """A shared library from its bytes; `suffix` is what its system calls such files."""
    import tvm_ffi

    load_runtime(place)
    # the loader maps the file, after which it may go
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        library = Path(folder, f"library{suffix}")
        library.write_bytes(content)
        return tvm_ffi.load_module(library)


def load_runtime(place: Place = CPU) -> None:
    """What libraries need of TVM, for all of this process."""
    import tvm_ffi

    for name in ("tvm_runtime", "tvm_runtime_extra"):
        tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")
    if not place.is_cpu:
        load_cuda()


def aligned(spec: TensorSpec) -> tuple[Array, Any]:
    """An array with the alignment that kernels count on, and the runtime's view of it."""
    import numpy as np
    import tvm_ffi

    dtype = np.dtype(spec.dtype)
    size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array = raw[start : start + size].view(dtype).reshape(spec.shape)
    return array, tvm_ffi.from_dlpack(array)


def sent(content: Array, place: Place) -> Any:
    """A tensor of the runtime with this content, where a library runs."""
    import numpy as np

    buffer = Buffer(TensorSpec("", tuple(content.shape), str(content.dtype)), place)
    np.copyto(buffer.array, content)
    buffer.send()
    place.wait()
    return buffer.tensor


def array_of(tensor: Any) -> Array:
    """A copy of one of the runtime's tensors, wherever it is; what makes it is waited for."""
    import numpy as np

    if CPU.holds(tensor):
        return np.array(np.from_dlpack(tensor))
    array, here = aligned(TensorSpec("", tuple(tensor.shape), str(tensor.dtype)))
    copy(tensor, here)
    GPU.wait()
    return array
