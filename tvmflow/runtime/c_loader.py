"""Plain C libraries, called through ctypes without TVM.

Their interface is `targets/c_runtime/library.h`. A context serves one call at a time. Calls from several Python threads
run concurrently, each in its own context, on the same weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.runtime.arrays import (
    CallTensors,
    OutputArrays,
    address_of,
    align,
    allocate_aligned,
    read_dynamic_tensors,
)
from tvmflow.runtime.programs import Call, Observe, Record, wrong_value_error

if sys.platform == "win32":
    from _ctypes import FreeLibrary as unload
else:
    from _ctypes import dlclose as unload

ABI: Final = 1
"""The version of the interface."""
_ABI_WITHOUT_WEIGHTS: Final = 0x10001

# Error codes about the machine: NO_MEMORY, NO_THREADS, MISSING_FEATURE, WRONG_LEVEL, and the codes for a device.
_MACHINE_CODES: Final = (8, 9, 10, 19, 20, 21, 22, 23)
_NO_MEMORY: Final = 8
# Held while a library starts a driver: PoCL fails if two libraries start it at the same time.
_driver_lock = threading.Lock()
LOWER_LEVEL: Final = (
    "build the recipe for this machine (`host`), for a lower CPU level, or for all CPUs of the architecture "
    "in one library (the preset x86-64-any or aarch64-any)"
)
"""The remedy if the CPU lacks features that a library needs."""
# The first code for a wrong value of an input, and the first for a wrong size.
_WRONG_VALUE: Final = 1000
_WRONG_SIZE: Final = 65536
# The remedy for each error code of the header.
_REMEDIES: Final[Mapping[int, str]] = {
    2: "load it with the tvmflow that made it",
    6: "give arrays of their own as `out`",
    8: "free memory, or use fewer threads",
    9: "use fewer threads, or let the process start more (`ulimit -u`)",
    10: LOWER_LEVEL,
    19: "unset the variable, or let it name a level that this CPU has",
    20: "install the driver of the device's maker (on Debian, `clinfo` shows what OpenCL finds)",
    21: "run it on a machine with such a device, or build the recipe for another target",
    22: "build the recipe for the limits of this device (`tvmflow targets`), or update its driver",
    23: "start the process again; use the device only in processes that are not forked afterwards",
    24: "call `drop`, `truncate` or `reset`, or build the library with a larger `max` of the dimension",
    25: "load what `save` of a session of this model returned, unchanged",
    26: "call `reset`, or load a state that was saved before",
    27: "give a temperature and a penalty of at least 0, a top_p from 0 to 1, and a top_k from 0 to 1024",
}
# The maximum number of threads that a library accepts; it starts only as many as its kernels can use.
_MAX_THREADS: Final = 1024


class OutOfMemory(EnvironmentProblem):
    """This machine, or its device, has too little free memory for a call."""


class Buffer(ctypes.Structure):
    """`NAME_buffer` of the header."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Options(ctypes.Structure):
    """`NAME_options` of the header."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("allocate", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("parallel_for", ctypes.c_void_p),
        ("user", ctypes.c_void_p),
    )


class _OptionsWithWeights(Options):
    """`NAME_options` of a library with weights in a separate file, on systems that can map files."""

    _fields_ = (
        ("weights_file", ctypes.c_char_p),
        ("weights", ctypes.c_void_p),
        ("weights_bytes", ctypes.c_size_t),
    )  # type: ignore[assignment]  # they come after those of the base


class Tensor(ctypes.Structure):
    """`NAME_tensor` of the header."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
    )

    def spec(self, bounded_axis: int = -1) -> TensorSpec:
        """Return the tensor's spec; `bounded_axis` is -1 for a shape that does not depend on data."""
        shape = tuple(self.shape[index] for index in range(self.rank))
        axis = None if bounded_axis < 0 else bounded_axis
        return TensorSpec(self.name.decode(), shape, self.dtype.decode(), axis)


class _Dimension(ctypes.Structure):
    """`NAME_dimension` of the header."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("min", ctypes.c_int64),
        ("max", ctypes.c_int64),
        ("multiple_of", ctypes.c_int64),
    )


class Sampling(ctypes.Structure):
    """`NAME_sampling` of the header."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_uint32),
        ("top_p", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
    )


_INT, _INT64, _SIZE, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
_CONTEXT = _VOID_P = ctypes.c_void_p
_VOID_PP, _INT64_P, _SIZE_P = map(ctypes.POINTER, (_VOID_P, _INT64, _SIZE))
_BUFFERS, _TENSORS = ctypes.POINTER(Buffer), ctypes.POINTER(Tensor)

_Hook = ctypes.CFUNCTYPE(None, _VOID_P, _SIZE, ctypes.c_uint64)
_Allocate = ctypes.CFUNCTYPE(_VOID_P, _VOID_P, _SIZE, _SIZE)
_Release = ctypes.CFUNCTYPE(None, _VOID_P, _VOID_P)

# Function -> its result, and its arguments.
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "bounded_axis": (_INT, (_SIZE,)),
    "create": (_INT, (ctypes.POINTER(Options), _VOID_PP)),
    "destroy": (_INT, (_CONTEXT,)),
    "inputs": (_TENSORS, ()),
    "kernel_name": (_TEXT, (_SIZE,)),
    "message": (_TEXT, (_INT,)),
    "missing_feature": (_TEXT, ()),
    "output_shape": (_INT, (_CONTEXT, _SIZE, _INT64_P)),
    "outputs": (_TENSORS, ()),
    "profile": (_INT, (_CONTEXT, _Hook, _VOID_P)),
    "run": (_INT, (_CONTEXT, _BUFFERS, _SIZE, _BUFFERS, _SIZE)),
}
_OPTIONAL_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    # in libraries with dynamic dimensions, with ISA levels, or with kernels on a device
    "dimensions": (ctypes.POINTER(_Dimension), ()),
    "set_dimension": (_INT, (_CONTEXT, _SIZE, _INT64)),
    "level": (_TEXT, (_CONTEXT,)),
    "device_error": (_TEXT, ()),
    # in libraries with states
    "step": _SIGNATURES["run"],
    "reset": (_INT, (_CONTEXT,)),
    "length": (_INT64, (_CONTEXT,)),
    "dropped": (_INT64, (_CONTEXT,)),
    "truncate": (_INT, (_CONTEXT, _INT64)),
    "drop": (_INT, (_CONTEXT, _INT64)),
    "state": (_INT, (_CONTEXT, _SIZE, _VOID_PP, _SIZE_P)),
    "state_bytes": (_INT, (_CONTEXT, _SIZE_P)),
    "save_state": (_INT, (_CONTEXT, _TEXT, _SIZE)),
    "load_state": (_INT, (_CONTEXT, _TEXT, _SIZE)),
    "fork": (_INT, (_CONTEXT, _VOID_PP)),
    "sample": (
        _INT,
        (_CONTEXT, _VOID_P, _SIZE, ctypes.POINTER(Sampling), _VOID_P, _SIZE, _INT64_P),
    ),
    "seed": (_INT, (_CONTEXT, ctypes.c_uint64)),
}

# Loaded programs, whose contexts a forked child must not use: their threads exist only in the parent.
_libraries: weakref.WeakSet[NativeProgram] = weakref.WeakSet()


def _forget_contexts() -> None:
    for library in _libraries:
        library.forget_contexts()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_contexts)


class _LoadedLibrary:
    """The functions of a shared library, which is unloaded when nothing refers to this object anymore."""

    def __init__(self, path: Path, prefix: str) -> None:
        library = ctypes.CDLL(str(path.absolute()))
        # not unloaded when the interpreter exits, because a thread may still run its code
        weakref.finalize(self, unload, library._handle).atexit = False
        self.functions: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in (_SIGNATURES | _OPTIONAL_SIGNATURES).items():
            symbol = f"{prefix}_{name}"
            if name in _OPTIONAL_SIGNATURES and not hasattr(library, symbol):
                continue
            function = library[symbol]
            function.restype, function.argtypes = result, arguments
            self.functions[name] = function


class NativeProgram:
    """A shared C library in this process.

    Args:
        path: The file.
        prefix: The prefix of its symbols, without the underscore after it.
        threads: The maximum number of threads of a call.
        signature: The inputs and outputs, which a library with dynamic shapes describes only in part.
        weights: The content of the weights file, aligned to 64 bytes, for a library without weights.

    Attributes:
        dynamic_tensors: The inputs and outputs of a model with dynamic shapes; else None.
        level: The ISA level whose code it runs; empty for a library with code for one CPU.

    Raises:
        OSError: The system cannot load it.
        AttributeError: It lacks symbols of such a library.
        BundleError: Its interface version is not supported, or its dimensions differ from the signature.
        EnvironmentProblem: The machine lacks memory, threads or an instruction set.
    """

    def __init__(
        self,
        path: Path,
        prefix: str,
        threads: int,
        signature: Mapping[str, Json] = MappingProxyType({}),
        weights: Array | None = None,
    ) -> None:
        self.loaded = _LoadedLibrary(path, prefix)
        self.weights = weights
        self.threads = threads
        self.dynamic_tensors = read_dynamic_tensors(signature)
        # the first context is created now: it reports a missing CPU feature on load, not at the first call, and checks
        # the version, without which the library's descriptions cannot be read
        self._free = [_Context(self)]
        level = self.loaded.functions.get("level")
        self.level = level(None).decode() if level else ""
        self._check_dimensions()
        self._new_outputs = [OutputArrays().maker(spec) for spec in self.outputs]
        _libraries.add(self)

    def with_weights(self, weights: Array) -> NativeProgram:
        """Return the same library with other weights; see the class."""
        other = copy(self)
        other.weights = weights
        other._free = [_Context(other)]
        _libraries.add(other)
        return other

    def _check_dimensions(self) -> None:
        """Raise BundleError if library and signature have different dynamic dimensions."""
        known = self.dynamic_tensors
        expected = sorted(
            (entry.name, entry.min, entry.max, entry.multiple_of)
            for entry in (known.dimensions if known else ())
        )
        is_same = self._dimensions == expected
        if known and is_same:
            described = (self._describe("inputs"), self._describe("outputs"))
            is_same = described == (_in_c(known.inputs), _in_c(known.outputs))
        if not is_same:
            raise BundleError(
                "the dimensions in its signature.json are not those of its library",
                fix="copy or build it again",
            )

    @cached_property
    def _dimensions(self) -> list[tuple[Any, ...]]:
        """Name, minimum, maximum and divisor of each dimension, in their order."""
        entries = _list_entries(self.loaded.functions.get("dimensions"))
        return [(entry.name.decode(), entry.min, entry.max, entry.multiple_of) for entry in entries]

    @property
    def dimension_names(self) -> list[str]:
        """The names of its dimensions, in their order."""
        return [name for name, *_ in self._dimensions]

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its inputs."""
        return self.dynamic_tensors.inputs if self.dynamic_tensors else self._describe("inputs")

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs."""
        return self.dynamic_tensors.outputs if self.dynamic_tensors else self._describe("outputs")

    def _describe(self, direction: str) -> tuple[TensorSpec, ...]:
        functions = self.loaded.functions
        axis = functions["bounded_axis"] if direction == "outputs" else lambda _: -1
        entries = _list_entries(functions[direction])
        return tuple(entry.spec(axis(index)) for index, entry in enumerate(entries))

    def forget_contexts(self) -> None:
        """Drop the contexts of the parent process, without destroying them, after a fork."""
        for context in self._free:
            context.abandon()
        self._free = []

    def _take_context(self) -> _Context:
        """Return a free or new context; the caller returns it to `_free` after the call."""
        try:
            return self._free.pop()
        except IndexError:
            return _Context(self)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs, each in the given array, or in a new array for None."""
        results = self._allocate(inputs, outputs)
        context = self._take_context()
        try:
            context.run(inputs, results)
            return context.cut(results)
        finally:
            self._free.append(context)

    def _allocate(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None] | None = None
    ) -> list[Array]:
        """Return the arrays for the outputs of a call: the given ones, and new arrays for None."""
        makers: Sequence[Callable[[], Array]] = self._new_outputs
        if self.dynamic_tensors is not None:
            makers = self.dynamic_tensors.tensors_of(inputs).new_outputs
        given = outputs or [None] * len(makers)
        return [
            make() if array is None else array for array, make in zip(given, makers, strict=True)
        ]

    @contextlib.contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[Call]:
        """Yield a function that calls the program on these inputs, and always reuses the output arrays."""
        placed = [align(array, spec) for array, spec in zip(inputs, self.inputs, strict=True)]
        specs = self.outputs
        if self.dynamic_tensors is not None:
            specs = self.dynamic_tensors.tensors_of(inputs).outputs
        outputs = [allocate_aligned(spec) for spec in specs]
        context = self._take_context()
        try:
            context.run(placed, outputs)
            yield context.again
        finally:
            self._free.append(context)

    @contextlib.contextmanager
    def profiled(self, inputs: Sequence[Array], record: Record) -> Iterator[Call]:
        """Yield a function that calls the program on these inputs, and reports each kernel."""
        yield partial(self.profiled_main(record), *inputs)

    def place(self, tensor: Any, spec: TensorSpec) -> Array:
        """Return an array, or the tensor of another part, as an array."""
        import numpy as np

        if isinstance(tensor, np.ndarray):
            return tensor
        from tvmflow.runtime.virtual_machine import read_array

        return read_array(tensor)

    def main(self, *tensors: Array) -> list[Array]:
        """Return the outputs as arrays."""
        return self.run(tensors, [None] * len(self.outputs))

    def profiled_main(self, record: Record) -> Callable[..., list[Array]]:
        """Return a slower variant of `main` that reports each kernel."""
        context = _Context(self)
        context.profile(record)

        def main(*tensors: Array) -> list[Array]:
            outputs = self._allocate(tensors)
            context.run(tensors, outputs)
            return context.cut(outputs)

        return main

    def watch(self, inputs: Sequence[Array], observe: Observe) -> list[Array]:
        """Return the outputs of a call; `observe` gets its memory, with all tensors, after each kernel."""
        memory = _Memory()
        context = _Context(self, memory)
        context.profile(lambda name, seconds: observe(memory.block))
        results = self._allocate(inputs)
        context.run(inputs, results)
        return results

    def measure_memory(self, inputs: Sequence[Array]) -> int:
        """Return the peak of the bytes that a context allocates, from its creation to the end of a call."""
        memory = _Memory()
        _Context(self, memory).run(inputs, self._allocate(inputs))
        return memory.peak_bytes

    def fetch(self, tensor: Array) -> Array:
        """Return the array itself."""
        return tensor

    def wait(self) -> None:
        """Do nothing, because calls are synchronous."""


def _list_entries(function: Callable[[], Any] | None) -> Iterator[Any]:
    """Yield the entries of an array that a function of the library returns; it ends at a NULL name."""
    described = function() if function else ()
    for entry in described:
        if entry.name is None:
            return
        yield entry


def _in_c(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return tensor specs as a C library describes them, with -1 for dynamic dimensions."""
    shapes = [spec.sizes or spec.shape for spec in specs]
    return tuple(
        spec._replace(
            shape=tuple(-1 if isinstance(n, str) else n for n in shape), sizes=(), row_scales=False
        )
        for spec, shape in zip(specs, shapes, strict=True)
    )


class _Memory:
    """The memory of one context, allocated by Python so that it can be read: `block` holds its tensors."""

    def __init__(self) -> None:
        self.block = bytearray()
        self.peak_bytes = 0
        self._blocks: dict[int, tuple[bytearray, int]] = {}
        self.allocate, self.release = _Allocate(self._allocate), _Release(self._release)

    def _allocate(self, _user: Any, size: int, alignment: int) -> int:
        self.block = bytearray(size + alignment)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.block))
        address += -address % alignment
        self._blocks[address] = self.block, size
        total = sum(size for _, size in self._blocks.values())
        self.peak_bytes = max(self.peak_bytes, total)
        return address

    def _release(self, _user: Any, address: int) -> None:
        self._blocks.pop(address, None)


class _Context:
    """Memory and threads for one call at a time; it starts with a copy of the states of `original`."""

    def __init__(
        self,
        library: NativeProgram,
        memory: _Memory | None = None,
        original: _Context | None = None,
    ) -> None:
        loaded, functions = library.loaded, library.loaded.functions
        self._functions = functions
        self._handle = ctypes.c_void_p()
        if original is None:
            self._create(library, memory)
        else:
            self._check(functions["fork"](original._handle, self._handle))
        # the finalizer keeps library and memory alive, because garbage is finalized in any order
        self._finalizer = weakref.finalize(self, _destroy, loaded, self._handle, memory)
        self._finalizer.atexit = False
        inputs, self._inputs = _make_buffers(library.inputs)
        outputs, self._outputs = _make_buffers(library.outputs)
        arguments = (self._handle, inputs, len(inputs), outputs, len(outputs))
        self._call = partial(functions["run"], *arguments)
        self._open = library.dynamic_tensors
        self._dimension_names = library.dimension_names if self._open else []
        self._tensors: CallTensors | None = None
        self._bounded = [
            (index, spec.bounded_axis, (ctypes.c_int64 * len(spec.shape))())
            for index, spec in enumerate(library.outputs)
            if spec.bounded_axis is not None
        ]

    def _create(self, library: NativeProgram, memory: _Memory | None) -> None:
        functions = self._functions
        options = Options(abi=ABI, threads=min(library.threads, _MAX_THREADS))
        if library.weights is not None:
            options = _OptionsWithWeights(
                abi=_ABI_WITHOUT_WEIGHTS,
                threads=options.threads,
                weights=address_of(library.weights),
                weights_bytes=library.weights.nbytes,
            )
        if memory is not None:
            options.allocate = ctypes.cast(memory.allocate, ctypes.c_void_p)
            options.release = ctypes.cast(memory.release, ctypes.c_void_p)
        is_on_device = "device_error" in functions
        with _driver_lock if is_on_device else contextlib.nullcontext():
            self._check(functions["create"](options, self._handle))

    def _check(self, status: int) -> None:
        """Raise the error for a status code; 0 is success."""
        if not status:
            return
        message, fix = self._functions["message"](status).decode(), _REMEDIES.get(status, "")
        if _WRONG_VALUE <= status < _WRONG_SIZE:
            raise wrong_value_error(message)
        if status not in _MACHINE_CODES:
            raise BundleError(message, fix=fix)
        detail = self._functions["missing_feature"]()
        if "device_error" in self._functions:
            detail = detail or self._functions["device_error"]()
        text = detail.decode(errors="replace").strip() if detail else ""
        kind = OutOfMemory if status == _NO_MEMORY else EnvironmentProblem
        raise kind(f"{message}: {text}" if text else message, fix=fix)

    def abandon(self) -> None:
        """Never destroy the context: its threads belong to another process."""
        self._finalizer.detach()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute the outputs in the given arrays."""
        if self._open is not None:
            self._choose(self._open.tensors_of(inputs))
        for buffer, array in zip(self._inputs, inputs, strict=True):
            buffer.data = address_of(array)
        for buffer, array in zip(self._outputs, outputs, strict=True):
            buffer.data = address_of(array)
        self.again()

    def _choose(self, tensors: CallTensors) -> None:
        if tensors is self._tensors:
            return
        self._tensors = None
        for index, name in enumerate(self._dimension_names):
            if name in tensors.sizes:
                status = self._functions["set_dimension"](self._handle, index, tensors.sizes[name])
                self._check(status)
        for buffers, specs in ((self._inputs, tensors.inputs), (self._outputs, tensors.outputs)):
            for buffer, spec in zip(buffers, specs, strict=True):
                buffer.bytes = spec.bytes
        self._tensors = tensors

    def again(self) -> None:
        """Repeat the last call with the same input and output arrays, which must still exist."""
        status = self._call()
        if status:
            self._check(status)

    def cut(self, outputs: list[Array]) -> list[Array]:
        """Return the outputs of the last call, each cut to its valid length as a view."""
        for index, axis, shape in self._bounded:
            self._check(self._functions["output_shape"](self._handle, index, shape))
            # all axes before have size 1
            outputs[index] = outputs[index][(slice(None),) * axis + (slice(shape[axis]),)]
        return outputs

    def profile(self, record: Record) -> None:
        """Report each kernel of all further calls to `record`."""
        kernel_name = self._functions["kernel_name"]
        names: dict[int, str] = {}

        def report(_user: Any, kernel: int, nanoseconds: int) -> None:
            # names are cached, because the time of this hook is part of the call
            name = names.get(kernel) or names.setdefault(kernel, kernel_name(kernel).decode())
            record(name, nanoseconds / 1e9)

        self._hook = _Hook(report)
        self._check(self._functions["profile"](self._handle, self._hook, None))


class StepContext(_Context):
    """A context that holds the states of a library (see `targets/c_runtime/states.h`).

    `counts` are the numbers of inputs and outputs of a step. Methods raise BundleError if the library rejects an
    argument, and then leave the states unchanged.
    """

    def __init__(
        self, library: NativeProgram, counts: tuple[int, int], original: StepContext | None = None
    ) -> None:
        super().__init__(library, original=original)
        self._library = library
        self._counts = counts
        self._arrays = [(Buffer * count)() for count in counts]
        arguments = [value for pair in zip(self._arrays, counts, strict=True) for value in pair]
        self._step = partial(self._functions["step"], self._handle, *arguments)
        self._sizes: dict[int, int] = {}

    def fork(self) -> StepContext:
        """Return another context with a copy of the states."""
        return StepContext(self._library, self._counts, self)

    def step(
        self, sizes: Mapping[str, int], inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        """Compute the next step into `outputs`; `sizes` holds all dimensions except the states' length."""
        for index, name in enumerate(self._dimension_names):
            if name in sizes and self._sizes.get(index) != sizes[name]:
                self._check(self._functions["set_dimension"](self._handle, index, sizes[name]))
                self._sizes[index] = sizes[name]
        for buffers, arrays in zip(self._arrays, (inputs, outputs), strict=True):
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer.data, buffer.bytes = address_of(array), array.nbytes
        if status := self._step():
            self._check(status)

    @property
    def length(self) -> int:
        """The length of the growing states."""
        return int(self._functions["length"](self._handle))

    @property
    def dropped(self) -> int:
        """The number of rows that `drop` has taken from the growing states."""
        return int(self._functions["dropped"](self._handle))

    def reset(self) -> None:
        """Reset the states to the beginning."""
        self._check(self._functions["reset"](self._handle))

    def truncate(self, length: int) -> None:
        """Cut the growing states to a length."""
        self._check(self._functions["truncate"](self._handle, length))

    def drop(self, count: int) -> None:
        """Drop the oldest rows of the growing states."""
        self._check(self._functions["drop"](self._handle, count))

    def read(self, index: int) -> bytes:
        """Return the elements of a state, dense in C order."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(self._functions["state"](self._handle, index, data, size))
        return ctypes.string_at(data, size.value) if size.value else b""

    def seed(self, seed: int) -> None:
        """Seed the random state of `sample`."""
        self._check(self._functions["seed"](self._handle, seed % (1 << 64)))

    def sample(self, logits: Array, sampling: Sampling, recent: Array) -> int:
        """Sample a token by float32 logits (vocabulary,), after the penalty for the int64 tokens `recent`."""
        token = ctypes.c_int64()
        arguments = (address_of(logits), logits.size, sampling, address_of(recent), recent.size)
        self._check(self._functions["sample"](self._handle, *arguments, token))
        return token.value

    def save(self) -> bytes:
        """Return all states, with a header by which `load` detects damaged or foreign data."""
        size = ctypes.c_size_t()
        self._check(self._functions["state_bytes"](self._handle, size))
        data = ctypes.create_string_buffer(size.value)
        self._check(self._functions["save_state"](self._handle, data, size.value))
        return data.raw

    def load(self, data: bytes) -> None:
        """Restore all states from the result of `save`."""
        self._check(self._functions["load_state"](self._handle, data, len(data)))


def _destroy(loaded: _LoadedLibrary, handle: ctypes.c_void_p, _memory: _Memory | None) -> None:
    loaded.functions["destroy"](handle)


def _make_buffers(specs: Sequence[TensorSpec]) -> tuple[Any, list[Buffer]]:
    """Return a C array with a buffer for each tensor, and a list of its elements."""
    buffers = (Buffer * len(specs))(*(Buffer(None, spec.bytes) for spec in specs))
    return buffers, list(buffers)
