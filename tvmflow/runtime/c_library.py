"""Plain C libraries, called through ctypes: nothing of TVM is needed.

The interface is that of `targets/c_library/library.h`. A context serves one call at a time; calls
from several Python threads run at once, each in a context of its own, on the same weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.errors import BundleError, EnvironmentProblem, TvmflowError
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.arrays import address_of, align, allocate_aligned
from tvmflow.runtime.programs import Call, Record

if TYPE_CHECKING:
    from tvmflow.runtime.arrays import Array

ABI: Final = 1
"""The version of the interface."""

# Codes that say something of the machine: NO_MEMORY, NO_THREADS and MISSING_FEATURE.
_MACHINE_CODES: Final = (8, 9, 10)
# Below, the library's copy from aligned memory costs less than aligned memory in Python.
_MIN_ALIGNED_BYTES: Final = 1 << 14


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


class Tensor(ctypes.Structure):
    """`NAME_tensor` of the header."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
    )

    @property
    def spec(self) -> TensorSpec:
        """The tensor as Python describes it."""
        shape = tuple(self.shape[index] for index in range(self.rank))
        return TensorSpec(self.name.decode(), shape, self.dtype.decode())


_Hook = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64)

# Function -> its result, and its arguments.
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "create": (ctypes.c_int, (ctypes.POINTER(Options), ctypes.POINTER(ctypes.c_void_p))),
    "destroy": (ctypes.c_int, (ctypes.c_void_p,)),
    "inputs": (ctypes.POINTER(Tensor), ()),
    "kernel_name": (ctypes.c_char_p, (ctypes.c_size_t,)),
    "message": (ctypes.c_char_p, (ctypes.c_int,)),
    "missing_feature": (ctypes.c_char_p, ()),
    "outputs": (ctypes.POINTER(Tensor), ()),
    "profile": (ctypes.c_int, (ctypes.c_void_p, _Hook, ctypes.c_void_p)),
    "run": (
        ctypes.c_int,
        (
            *(ctypes.c_void_p, ctypes.POINTER(Buffer), ctypes.c_size_t),
            *(ctypes.POINTER(Buffer), ctypes.c_size_t),
        ),
    ),
}

# The contexts of a process have no threads in a child that it forks.
_libraries: weakref.WeakSet[NativeProgram] = weakref.WeakSet()


def _forget_contexts() -> None:
    for library in _libraries:
        library.forget_contexts()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_contexts)


class NativeProgram:
    """A shared C library in this process.

    Args:
        path: The file, which may be removed afterwards.
        prefix: The beginning of all names in it, without the underscore after it.
        threads: The threads of each call.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        threads: The threads of each call.

    Raises:
        BundleError: It is no such library, or one of another version.
        EnvironmentProblem: The machine lacks memory, threads or an instruction set.
    """

    def __init__(self, path: Path, prefix: str, threads: int) -> None:
        try:
            self._library = ctypes.CDLL(str(path.absolute()))
            self.functions = {
                name: self._declare(f"{prefix}_{name}", *types)
                for name, types in _SIGNATURES.items()
            }
        except (OSError, AttributeError) as error:
            reason = str(error).strip().splitlines()[-1]
            fix = "check free memory and the temporary folder ($TMPDIR); else build it again"
            raise BundleError(f"the library cannot be loaded: {reason}", fix=fix) from error
        self.threads = threads
        self._free: list[_Context] = []
        self.inputs, self.outputs = self._describe("inputs"), self._describe("outputs")
        self._is_large = [spec.bytes >= _MIN_ALIGNED_BYTES for spec in self.outputs]
        # what a machine lacks is told when the library is loaded, not at the first call
        self._free.append(_Context(self))
        _libraries.add(self)

    def _declare(self, name: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        function = self._library[name]
        function.restype, function.argtypes = result, arguments
        return function

    def _describe(self, direction: str) -> tuple[TensorSpec, ...]:
        described = self.functions[direction]()
        count = 0
        while described[count].name is not None:
            count += 1
        return tuple(described[index].spec for index in range(count))

    def check(self, status: int) -> None:
        """Raise an error for a code that is not 0."""
        if status:
            raise self._error(status)

    def _error(self, status: int) -> TvmflowError:
        message = self.functions["message"](status).decode()
        if status not in _MACHINE_CODES:
            return BundleError(message)
        feature = self.functions["missing_feature"]()
        message += f": {feature.decode()}" if feature else ""
        return EnvironmentProblem(message, fix="free memory, use fewer threads, or another machine")

    def forget_contexts(self) -> None:
        """Leave the contexts of the process that this one was forked from alone."""
        for context in self._free:
            context.abandon()
        self._free = []

    @contextlib.contextmanager
    def _context(self) -> Iterator[_Context]:
        try:
            context = self._free.pop()
        except IndexError:
            context = _Context(self)
        try:
            yield context
        finally:
            self._free.append(context)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs for inputs; in place of None there is an array that takes an output."""
        results = self._allocate(outputs)
        with self._context() as context:
            context.run(inputs, results)
        return results

    def _allocate(self, outputs: Sequence[Array | None]) -> list[Array]:
        import numpy as np

        return [
            array
            if array is not None
            else allocate_aligned(spec)
            if is_large
            else np.empty(spec.shape, spec.dtype)
            for array, spec, is_large in zip(outputs, self.outputs, self._is_large, strict=True)
        ]

    @contextlib.contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[Call]:
        """Give a call with inputs that are in place; outputs are always the same arrays."""
        placed = [self.place(array, spec) for array, spec in zip(inputs, self.inputs, strict=True)]
        outputs = [allocate_aligned(spec) for spec in self.outputs]
        with self._context() as context:
            context.run(placed, outputs)
            yield context.again

    @contextlib.contextmanager
    def profiled(self, inputs: Sequence[Array], record: Record) -> Iterator[Call]:
        """Give such a call, which reports each kernel."""
        yield partial(self.profiled_main(record), *inputs)

    def place(self, tensor: Any, spec: TensorSpec) -> Array:
        """Return an array, or the tensor of another part, as an aligned array."""
        import numpy as np

        return align(tensor if isinstance(tensor, np.ndarray) else _fetch(tensor), spec)

    def main(self, *tensors: Array) -> list[Array]:
        """Return the outputs as arrays."""
        return self.run(tensors, [None] * len(self.outputs))

    def profiled_main(self, record: Record) -> Callable[..., list[Array]]:
        """Return another `main`, which is slower and reports each kernel."""
        context = _Context(self)
        context.profile(record)

        def main(*tensors: Array) -> list[Array]:
            outputs = self._allocate([None] * len(self.outputs))
            context.run(tensors, outputs)
            return outputs

        return main

    def fetch(self, tensor: Array) -> Array:
        """Return the array itself."""
        return tensor

    def wait(self) -> None:
        """Return at once: calls have ended when they return."""


def _fetch(tensor: Any) -> Array:
    """Return a tensor of TVM's runtime as an array, from any device."""
    from tvmflow.runtime.virtual_machine import fetch_array

    return fetch_array(tensor)


class _Context:
    """Memory and threads for one call at a time."""

    def __init__(self, library: NativeProgram) -> None:
        functions = library.functions
        self._check = library.check
        self._handle = ctypes.c_void_p()
        options = Options(abi=ABI, threads=library.threads)
        self._check(functions["create"](options, self._handle))
        self._finalizer = weakref.finalize(self, functions["destroy"], self._handle)
        inputs, self._inputs = _make_buffers(library.inputs)
        outputs, self._outputs = _make_buffers(library.outputs)
        arguments = (self._handle, inputs, len(inputs), outputs, len(outputs))
        self._call = partial(functions["run"], *arguments)
        self._functions = functions

    def abandon(self) -> None:
        """Never destroy it: its threads are those of another process."""
        self._finalizer.detach()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute outputs in place."""
        for buffer, array in zip(self._inputs, inputs, strict=True):
            buffer.data = address_of(array)
        for buffer, array in zip(self._outputs, outputs, strict=True):
            buffer.data = address_of(array)
        self.again()

    def again(self) -> None:
        """Compute once more from the same inputs into the same outputs, which must still be there."""
        status = self._call()
        if status:
            self._check(status)

    def profile(self, record: Record) -> None:
        """Report each kernel of all calls."""
        kernel_name = self._functions["kernel_name"]

        def report(_user: Any, kernel: int, nanoseconds: int) -> None:
            record(kernel_name(kernel).decode(), nanoseconds / 1e9)

        self._hook = _Hook(report)
        self._check(self._functions["profile"](self._handle, self._hook, None))


def _make_buffers(specs: Sequence[TensorSpec]) -> tuple[Any, list[Buffer]]:
    """Return an array of buffers of the sizes of tensors, and its elements."""
    buffers = (Buffer * len(specs))(*(Buffer(None, spec.bytes) for spec in specs))
    return buffers, [buffers[index] for index in range(len(specs))]
