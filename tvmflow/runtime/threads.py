"""The threads that kernels run in: chosen when a library is loaded, not when it is built.

TVM has a pool for each Python thread that calls kernels, and fixes its size at the first call.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.targets.threads import choose_threads, environment_for

# AffinityMode::kBig in tvm/runtime/threading_backend.h: TVM's default.
_BIG_CORES: Final = 1
# TVM reads environment variables, which all Python threads share.
_environment_lock = threading.Lock()
_this_thread = threading.local()


class ThreadPool(NamedTuple):
    """The number of threads that a model's kernels use, the calling one included.

    Attributes:
        threads: The number.
        is_requested: Whether a program asked for it: it is then an error to have fewer.
    """

    threads: int
    is_requested: bool

    @classmethod
    def of(cls, threads: int | None) -> ThreadPool:
        """Return a pool of so many threads; by default those of the environment, or one a usable core.

        Raises:
            BundleError: It is not a number of threads.
        """
        if threads is None:
            return cls(choose_threads(), is_requested=False)
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise BundleError(
                f"threads is {threads!r}, which is not a number of threads",
                fix="give a whole number of at least 1, or None for one a usable core",
            )
        return cls(threads, is_requested=True)

    def enter(self) -> None:
        """Run kernels that this Python thread calls from now on with these threads.

        Raises:
            EnvironmentProblem: The pool of this Python thread is smaller than the program asked for.
        """
        if getattr(_this_thread, "threads", None) == self.threads:
            return
        size = self._resize()
        if self.is_requested and size < self.threads:
            raise EnvironmentProblem(
                f"{self.threads} threads are requested, and the pool of this Python thread has {size}: "
                "its first call of a kernel was with so many",
                fix="first call the model that uses most threads, or each from a Python thread of its own",
            )
        _this_thread.threads = self.threads

    def _resize(self) -> int:
        """Let TVM use this Python thread's pool with as many threads; return how many it has of them.

        The pool is made at the first call.
        """
        import tvm_ffi

        with _environment_lock, environment_for(self.threads):
            tvm_ffi.get_global_func("runtime.config_threadpool")(_BIG_CORES, self.threads)
        return int(tvm_ffi.get_global_func("runtime.NumThreads")())
