"""Builds for NVIDIA GPUs on machines without one.

They run in a process with an empty stub of the driver's library.

TVM compiles CUDA kernels ahead of time only where its CUDA runtime can be loaded; without it,
their source would go into the library and be compiled on the user's machine. The runtime needs
the driver's library to exist but calls nothing in it while it builds. So it gets an empty one,
in a process that does nothing else and never runs a kernel.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.processes import module_command, without_torch
from tvmflow.core.types import Json
from tvmflow.targets.backends.cuda import gpu, nvrtc

# The symbols of the driver's library that TVM's CUDA runtime needs when it is loaded.
_DRIVER_SYMBOLS: Final = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString"),
    *("cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    "cuTensorMapEncodeTiled",
)
# A function that TVM's CUDA runtime registers when it is loaded.
_RUNTIME_FUNCTION: Final = "ffi.Module.load_from_bytes.cuda"
_ERROR: Final = "error"

_log = logging.getLogger(__name__)


def call(function: Callable[..., Json], *arguments: Json) -> Json:
    """Call a function in a new process that can build for CUDA; see `Backend.call_builder`.

    Raises:
        TvmflowError: what the function raises.
        StageError: when the process ends without a result.
    """
    _log.debug("%s runs in a process that can build for CUDA", function.__name__)
    done = subprocess.run(
        module_command(__name__, f"{function.__module__}:{function.__name__}"),
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise StageError(
            f"the process that builds for CUDA ended with exit code {done.returncode}",
            fix="read the end of the stage's log",
        )
    answer = json.loads(lines[-1])
    if _ERROR in answer:
        kind, message, fix = answer[_ERROR]
        error: type[TvmflowError] = getattr(importlib.import_module("tvmflow.core.errors"), kind)
        raise error(message, fix=fix)
    return answer["value"]


def _main(name: str) -> None:
    """Make this process able to build, call the function, and print its result as the last line."""
    arguments = json.load(sys.stdin)
    module, _, function = name.partition(":")
    compiler_errors: list[TvmflowError] = []
    try:
        load_without_driver(compiler_errors)
        value = getattr(importlib.import_module(module), function)(*arguments)
        answer: Mapping[str, Json] = {"value": value}
    except Exception as error:
        # TVM raises an error of the compiler again as one of its own types
        known = [*compiler_errors, *([error] if isinstance(error, TvmflowError) else [])]
        if not known:
            raise
        answer = {_ERROR: [type(known[0]).__name__, known[0].message, known[0].fix]}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def load_without_driver(errors: list[TvmflowError]) -> None:
    """Make this process, which must run nothing on a GPU, able to compile for one.

    Args:
        errors: Receives every error of a compilation.

    Raises:
        EnvironmentProblem: when CUDA's compiler or TVM's CUDA runtime is missing.
    """
    from tvmflow.targets.linking import link_stub

    with without_torch():
        import tvm_ffi

    toolkit = nvrtc.find_toolkit()
    if tvm_ffi.get_global_func(_RUNTIME_FUNCTION, allow_missing=True) is None:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            stub = Path(folder, "libcuda.so.1")
            link_stub(stub, _DRIVER_SYMBOLS)
            for library in (stub, toolkit.runtime):
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        gpu.load_runtime()
    nvrtc.register_compiler(toolkit, errors)


if __name__ == "__main__":
    _main(sys.argv[1])
