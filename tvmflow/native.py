"""TVM's runtime without its compiler: libraries, calls, and tensors in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CPU: Final = 1
_POOLED_ALLOCATOR: Final = 2
_ALIGNMENT: Final = 64

Main = Callable[..., Any]
"""A model's `main`: takes the runtime's tensors, and gives one or several."""

Watch = Callable[[str, bool], None]
"""Told the name of an operator, before it begins (True) and when it has ended."""


class Program(Protocol):
    """What a `Module` calls."""

    @property
    def main(self) -> Main: ...

    def watched(self, watch: Watch) -> Main:
        """A `main` of its own, which is slower, and tells of every operator."""
        ...


class Executable:
    """A library with one compiled model."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.main: Main = self._machine()["main"]

    def _machine(self) -> Any:
        machine = self._library["vm_load_executable"]()
        machine["vm_initialization"](_CPU, 0, _POOLED_ALLOCATOR)
        return machine

    def watched(self, watch: Watch) -> Main:
        # a machine that is watched stays slow
        machine = self._machine()

        def tell(_function: Any, name: str, before: bool, *_: Any) -> int:
            watch(name, before)
            return 0

        machine["set_instrument"](tell)
        main: Main = machine["main"]
        return main


def tensors_of(result: Any) -> list[Any]:
    """What a `main` gave, one or several, as a list."""
    import tvm_ffi

    return [result] if isinstance(result, tvm_ffi.Tensor) else list(result)


def load_library(content: bytes, suffix: str) -> Any:
    """A shared library from its bytes; `suffix` is what its system calls such files."""
    import tvm_ffi

    load_runtime()
    # the loader maps the file, after which it may go
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        library = Path(folder, f"library{suffix}")
        library.write_bytes(content)
        return tvm_ffi.load_module(library)


def load_runtime() -> None:
    """What libraries need of TVM, for all of this process."""
    import tvm_ffi

    for name in ("tvm_runtime", "tvm_runtime_extra"):
        tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")


def aligned(spec: TensorSpec) -> tuple[Array, Any]:
    """An input buffer with the alignment that kernels count on, and the runtime's view of it."""
    import numpy as np
    import tvm_ffi

    dtype = np.dtype(spec.dtype)
    size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array = raw[start : start + size].view(dtype).reshape(spec.shape)
    return array, tvm_ffi.from_dlpack(array)


def filled(content: Array) -> tuple[Array, Any]:
    """The same for an array whose content is known."""
    import numpy as np

    spec = TensorSpec("", tuple(content.shape), str(content.dtype))
    array, tensor = aligned(spec)
    np.copyto(array, content)
    return array, tensor
