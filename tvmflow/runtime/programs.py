"""The interface of a model's code (C library or TVM's virtual machine), and its kernels' threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.types import Array, TensorSpec
from tvmflow.targets.threads import choose_threads, environment_for

Record = Callable[[str, float], None]
"""Receives the name of an operator and the seconds of one call of it."""

Observe = Callable[[bytes | bytearray], None]
"""Receives memory with tensors of a call: those of a kernel, or all tensors of a C library."""

Call = Callable[[], object]
"""Calls a model whose inputs are already in place."""

Main = Callable[..., list[Any]]
"""The function of a part: tensors to tensors."""


def wrong_value_error(message: str) -> BundleError:
    """Return the error for an index that is out of range, or for a divisor that is 0."""
    return BundleError(message, fix="check the values of the inputs before the call")


class Program(Protocol):
    """The code of a model."""

    @property
    def threads(self) -> int:
        """The maximum number of threads that a call uses, including the calling thread."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs, each in the given array, or in a new array for None."""
        ...

    def bound(self, inputs: Sequence[Array]) -> AbstractContextManager[Call]:
        """Yield a function that calls the program on inputs that are already in place."""
        ...

    def profiled(self, inputs: Sequence[Array], record: Record) -> AbstractContextManager[Call]:
        """Yield a function as `bound` does, which also reports each operator."""
        ...

    def wait(self) -> None:
        """Wait until all calls have ended: on a GPU, calls return before they have ended."""


class PartProgram(Program, Protocol):
    """The code of one library, which may be a part of a model: its tensors stay on its device."""

    def watch(self, inputs: Sequence[Array], observe: Observe) -> list[Array]:
        """Return the outputs of a call; `observe` gets its memory after each kernel."""
        ...

    def place(self, tensor: Any, spec: TensorSpec) -> Any:
        """Return an array, or the tensor of another part, as a tensor of this part."""
        ...

    def main(self, *tensors: Any) -> list[Any]:
        """Return the outputs as tensors that are valid until the next call."""
        ...

    def profiled_main(self, record: Record) -> Main:
        """Return a slower variant of `main` that reports each operator."""
        ...

    def fetch(self, tensor: Any) -> Array:
        """Return one of its tensors as an array that is valid until the next call."""
        ...


# ---------------------------------------------------------------- threads
# The thread count is chosen when a library is loaded, not when it is built. TVM has a pool for each Python thread that
# calls kernels, and fixes the size of the pool at the first call.

# AffinityMode::kBig in tvm/runtime/threading_backend.h: TVM's default.
_BIG_CORES: Final = 1
# Held while environment variables for TVM are set, because all Python threads share them.
_environment_lock = threading.Lock()
_this_thread = threading.local()


class ThreadPool(NamedTuple):
    """The threads of a model's kernels, including the calling one; if requested, fewer are an error."""

    threads: int
    is_requested: bool

    @classmethod
    def of(cls, threads: int | None) -> ThreadPool:
        """Return a pool of this many threads, by default the environment's; BundleError if invalid."""
        if threads is None:
            return cls(choose_threads(), is_requested=False)
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise BundleError(
                f"threads is {threads!r}, which is not a number of threads",
                fix="give a whole number of at least 1, or None for one a usable core",
            )
        return cls(threads, is_requested=True)

    def enter(self) -> None:
        """Let this Python thread's kernels use these threads; EnvironmentProblem if it has fewer."""
        import tvm_ffi

        if getattr(_this_thread, "threads", None) == self.threads:
            return
        with _environment_lock, environment_for(self.threads):
            tvm_ffi.get_global_func("runtime.config_threadpool")(_BIG_CORES, self.threads)
        size = int(tvm_ffi.get_global_func("runtime.NumThreads")())
        if self.is_requested and size < self.threads:
            raise EnvironmentProblem(
                f"{self.threads} threads are requested, and the pool of this Python thread has {size}: "
                "its first call of a kernel was with so many",
                fix="first call the model that uses most threads, or each from a Python thread of its own",
            )
        _this_thread.threads = self.threads
