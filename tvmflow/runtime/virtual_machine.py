"""Libraries for TVM's virtual machine: loading the runtime without the compiler, calls, and tensors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tvmflow.core.types import Array, TensorSpec
from tvmflow.runtime.arrays import align, allocate_aligned
from tvmflow.runtime.programs import Call, Observe, Record, ThreadPool, wrong_value_error
from tvmflow.targets.backends.backend import Backend
from tvmflow.targets.backends.cpu import CpuBackend

# AllocatorType::kPooled in tvm/runtime/memory/memory_manager.h
_POOLED_ALLOCATOR: Final = 2


class ExecutionDevice:
    """The device of a backend in this process, which holds tensors and runs a library's calls."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def is_host(self) -> bool:
        """True if tensors are in the host's memory, which numpy can access."""
        return self._backend.RUNS_ON_HOST_CPU

    @property
    def allocators(self) -> tuple[int, ...]:
        """The arguments of `vm_initialization`: type, index and allocator of each device, the CPU last."""
        own, host = self._backend.DLPACK_DEVICE_TYPE, CpuBackend.DLPACK_DEVICE_TYPE
        types = (host,) if self.is_host else (own, host)
        return tuple(number for type_ in types for number in (type_, 0, _POOLED_ALLOCATOR))

    def holds(self, tensor: Any) -> bool:
        """Return whether one of the runtime's tensors is on this device."""
        return bool(tensor.device.dlpack_device_type() == self._backend.DLPACK_DEVICE_TYPE)

    def allocate(self, spec: TensorSpec) -> Any:
        """Return a tensor of the runtime with undefined content."""
        import tvm_ffi

        if self.is_host:
            return view_tensor(allocate_aligned(spec))
        allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
        shape, dtype = tvm_ffi.Shape(spec.shape), tvm_ffi.dtype(spec.dtype)
        return allocate(shape, dtype, self._device, None)

    def synchronize(self) -> None:
        """Wait until all calls and copies on this device have ended: on a GPU, they are asynchronous."""
        if not self.is_host:
            _synchronize(self._device)

    def load_runtime(self) -> None:
        """Load TVM's runtime and the backend's runtime into this process."""
        import tvm_ffi

        for name in ("tvm_runtime", "tvm_runtime_extra"):
            tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")
        self._backend.load_runtime()

    @property
    def _device(self) -> Any:
        import tvm_ffi

        return tvm_ffi.device(self._backend.DLPACK_DEVICE_TYPE, 0)


CPU: Final = ExecutionDevice(CpuBackend())


@contextlib.contextmanager
def _registered_functions() -> Iterator[None]:
    """Register functions that libraries find by name, unless TVM, which defines them in Python, is loaded.

    A virtual machine looks the functions up when it is created, and keeps them. Afterwards they are removed, because TVM
    cannot be imported while its names are taken.
    """
    import tvm_ffi

    with _REGISTRATION:
        names = [n for n in _FUNCTIONS if tvm_ffi.get_global_func(n, allow_missing=True) is None]
        for name in names:
            tvm_ffi.register_global_func(name, _FUNCTIONS[name])
        try:
            yield
        finally:
            for name in names:
                tvm_ffi.registry.remove_global_func(name)


def _find_nonzero(tensor: Any) -> Any:
    """Return the indices of nonzero elements, with a row for each axis."""
    import numpy as np

    return send_array(np.stack(np.atleast_1d(fetch_array(tensor)).nonzero()))


def _find_unique(
    tensor: Any,
    is_sorted: int,
    return_index: int,
    return_inverse: int,
    return_counts: int,
    axis: int | None = None,
) -> Any:
    """Return the unique values of a tensor, or slices along an axis, and the other requested results."""
    import numpy as np

    array = fetch_array(tensor)
    axis = None if axis is None else int(axis)
    values, first, inverse, counts = np.unique(
        array, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not is_sorted:
        order = np.argsort(first)
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        values = np.take(values, order, axis=axis or 0)
        first, inverse, counts = first[order], ranks[inverse], counts[order]
    wanted = ((return_index, first), (return_inverse, inverse), (return_counts, counts))
    others = [send_array(found) for is_wanted, found in wanted if is_wanted]
    return (send_array(values), *others) if others else send_array(values)


def _shape_to_tensor(shape: Any) -> Any:
    """Return the sizes of a shape as a tensor."""
    import numpy as np

    return send_array(np.array([int(size) for size in shape], "int64"))


_REGISTRATION: Final = threading.Lock()
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "relax.run.nonzero": _find_nonzero,
    "relax.run.shape_to_tensor": _shape_to_tensor,
    "relax.run.unique": _find_unique,
}


def view_tensor(array: Array) -> Any:
    """Return the runtime's view of an aligned array."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(array)


def _copy(source: Any, destination: Any) -> None:
    """Start copying a tensor of the runtime to another one of the same shape and dtype."""
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")(source, destination)


def _copy_and_wait(source: Any, destination: Any) -> None:
    _copy(source, destination)
    for tensor in (source, destination):
        if not CPU.holds(tensor):
            _synchronize(tensor.device)


def _synchronize(device: Any) -> None:
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.Device_StreamSync")(device, 0)


class InputBuffer:
    """An input of a library: the caller fills `array`; `tensor` is the argument of `main` after `send()`."""

    def __init__(self, spec: TensorSpec, device: ExecutionDevice) -> None:
        self.array = allocate_aligned(spec)
        self._host_tensor = view_tensor(self.array)
        self.tensor = self._host_tensor if device.is_host else device.allocate(spec)

    def send(self) -> None:
        """Start copying the array's content to the device."""
        if self.tensor is not self._host_tensor:
            _copy(self._host_tensor, self.tensor)


class VirtualMachine:
    """A model's library, and TVM's virtual machine that runs it: one call at a time."""

    def __init__(
        self,
        library: Any,
        inputs: Sequence[TensorSpec],
        device: ExecutionDevice = CPU,
        weights: Sequence[Any] = (),
        pool: ThreadPool | None = None,
    ) -> None:
        self._library = library
        self.device = device
        self.wait = device.synchronize
        self.pool = pool or ThreadPool.of(None)
        self._weights = tuple(weights)
        self._lock = threading.Lock()
        self._specs = tuple(inputs)
        # buffers for dynamic shapes are made at a call, for its shapes
        fixed = [] if any(spec.sizes for spec in inputs) else self._specs
        self._shapes = [spec.shape for spec in fixed]
        self._buffers = [InputBuffer(spec, device) for spec in fixed]
        self._copies: dict[str, Any] = {}
        self._main = self._create_vm()["main"]

    @property
    def threads(self) -> int:
        """The number of threads that a call uses, including the calling thread."""
        return self.pool.threads

    def _create_vm(self) -> Any:
        with _registered_functions():
            vm = self._library["vm_load_executable"]()
            vm["vm_initialization"](*self.device.allocators)
        return vm

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs, each in the given array, or in a new array for None."""
        import numpy as np

        with self.bound(inputs) as call:
            results = list_tensors(call())
            for index, (tensor, output) in enumerate(zip(results, outputs, strict=True)):
                if output is None:
                    # a copy, because the runtime reuses the memory at the next call
                    results[index] = fetch_array(tensor)
                else:
                    np.copyto(output, self.fetch(tensor))
                    results[index] = output
            return results

    @contextlib.contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[Call]:
        """Yield a call with inputs that are on the device."""
        with self._lock:
            self.pool.enter()
            yield partial(_call, self._main, *self._fill(inputs))

    @contextlib.contextmanager
    def profiled(self, inputs: Sequence[Array], record: Record) -> Iterator[Call]:
        """Yield a call that reports each kernel and step, which takes a few microseconds more for each."""
        with self._lock:
            self.pool.enter()
            yield partial(self._instrumented_main(record), *self._fill(inputs))

    def watch(self, inputs: Sequence[Array], observe: Observe) -> list[Array]:
        """Return the outputs of a call; `observe` gets the tensors of each kernel after it ran."""
        import tvm_ffi

        vm = self._create_vm()

        def show(_function: Any, _name: str, before: bool, _result: Any, *operands: Any) -> int:
            if not before:
                for operand in operands:
                    if isinstance(operand, tvm_ffi.Tensor):
                        observe(fetch_array(operand).tobytes())
            return 0

        vm["set_instrument"](show)
        with self._lock:
            self.pool.enter()
            return [fetch_array(tensor) for tensor in list_tensors(vm["main"](*self._fill(inputs)))]

    def _fill(self, inputs: Sequence[Array]) -> list[Any]:
        import numpy as np

        shapes = [array.shape for array in inputs]
        if shapes != self._shapes:
            specs = [
                spec._replace(shape=shape) for spec, shape in zip(self._specs, shapes, strict=True)
            ]
            self._buffers = [InputBuffer(spec, self.device) for spec in specs]
            self._shapes = shapes
        for buffer, array in zip(self._buffers, inputs, strict=True):
            np.copyto(buffer.array, array)
            buffer.send()
        return [*(buffer.tensor for buffer in self._buffers), *self._weights]

    def place(self, tensor: Any, spec: TensorSpec) -> Any:
        """Return an array, or the tensor of another part, as a tensor on this device."""
        import numpy as np

        if isinstance(tensor, np.ndarray):
            tensor = view_tensor(align(tensor, spec))
        if self.device.holds(tensor):
            return tensor
        copied = self._copies.get(spec.name)
        shape = tuple(tensor.shape)
        if copied is None or tuple(copied.shape) != shape:
            copied = self._copies[spec.name] = self.device.allocate(spec._replace(shape=shape))
        # the part that computed the tensor reuses its memory as soon as it is called again
        _copy_and_wait(tensor, copied)
        return copied

    def main(self, *tensors: Any) -> list[Any]:
        """Return the outputs as the runtime's tensors, valid until the next call."""
        self.pool.enter()
        return list_tensors(_call(self._main, *tensors, *self._weights))

    def profiled_main(self, record: Record) -> Callable[..., list[Any]]:
        """Return a slower variant of `main` that reports each operator."""
        main = self._instrumented_main(record)

        def call(*tensors: Any) -> list[Any]:
            self.pool.enter()
            return list_tensors(main(*tensors, *self._weights))

        return call

    def _instrumented_main(self, record: Record) -> Callable[..., Any]:
        # a separate virtual machine, because one with an instrument stays slow
        vm = self._create_vm()
        started = 0.0

        def report(_function: Any, name: str, before: bool, *_: Any) -> int:
            nonlocal started
            self.wait()
            if before:
                started = time.perf_counter()
            else:
                record(name, time.perf_counter() - started)
            return 0

        vm["set_instrument"](report)
        main: Callable[..., Any] = vm["main"]
        return main

    def fetch(self, tensor: Any) -> Array:
        """Return one of the runtime's tensors as an array that is valid until the next call."""
        return read_array(tensor)


def _call(main: Callable[..., Any], *tensors: Any) -> Any:
    """Call a `main`; BundleError when an input has an index out of range, or a divisor that is 0."""
    try:
        return main(*tensors)
    except ValueError as error:
        raise wrong_value_error(str(error)) from error


def list_tensors(result: Any) -> list[Any]:
    """Return the result of a `main`, one tensor or several, as a list."""
    import tvm_ffi

    return [result] if isinstance(result, tvm_ffi.Tensor) else list(result)


def load_library(library: Path, device: ExecutionDevice = CPU) -> Any:
    """Load a shared library for a device. The loader maps the file, which may be removed afterwards."""
    import tvm_ffi

    device.load_runtime()
    return tvm_ffi.load_module(library)


def send_array(content: Array, device: ExecutionDevice = CPU) -> Any:
    """Return a tensor of the runtime on a device, with the content of an array."""
    import numpy as np

    buffer = InputBuffer(TensorSpec("", tuple(content.shape), str(content.dtype)), device)
    np.copyto(buffer.array, content)
    buffer.send()
    device.synchronize()
    return buffer.tensor


def read_array(tensor: Any) -> Array:
    """Return one of the runtime's tensors as an array: a view on the CPU, a copy from a GPU."""
    import numpy as np

    return np.from_dlpack(tensor) if CPU.holds(tensor) else fetch_array(tensor)


def fetch_array(tensor: Any) -> Array:
    """Return a copy of one of the runtime's tensors on any device, after waiting for its content."""
    import numpy as np

    if CPU.holds(tensor):
        return np.array(np.from_dlpack(tensor))
    array = allocate_aligned(TensorSpec("", tuple(tensor.shape), str(tensor.dtype)))
    _copy_and_wait(tensor, view_tensor(array))
    return array
