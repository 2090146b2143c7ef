"""Builds for NVIDIA GPUs on machines that have none: in a process with an empty stand-in for the driver.

TVM compiles CUDA kernels ahead of time only where its CUDA runtime can be loaded; without it,
their source would go into the library and be compiled on the user's machine. The runtime needs
the driver's library to be there but calls nothing in it while it builds. So it gets an empty one,
in a process that does nothing else and never runs a kernel.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.errors import StageError, TvmflowError
from tvmflow.targets import cuda
from tvmflow.targets.gpu import load_cuda
from tvmflow.values import Json

# What TVM's CUDA runtime asks of the driver's library when it is loaded.
_DRIVER: Final = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString"),
    *("cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    "cuTensorMapEncodeTiled",
)
# What TVM's CUDA runtime registers when it is loaded.
_LOADED: Final = "ffi.Module.load_from_bytes.cuda"
_ERROR: Final = "error"


def in_its_process(function: str, *arguments: Json) -> Json:
    """`module:function(*arguments)` in a new process that can build for CUDA; all are JSON.

    What it raises of tvmflow's errors is raised here.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, function],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise StageError(
            f"the build for CUDA ended with code {done.returncode}",
            fix="the stage's log has what it said last",
        )
    answer = json.loads(lines[-1])
    if _ERROR in answer:
        kind, message, fix = answer[_ERROR]
        raised: type[TvmflowError] = getattr(importlib.import_module("tvmflow.errors"), kind)
        raise raised(message, fix=fix)
    return answer["value"]


def _main(name: str) -> None:
    """Make this process able to build, call the function, print what it gives as the last line."""
    arguments = json.load(sys.stdin)
    module, _, function = name.partition(":")
    refused: list[TvmflowError] = []
    try:
        load_without_driver(refused)
        value = getattr(importlib.import_module(module), function)(*arguments)
        answer: Mapping[str, Json] = {"value": value}
    except Exception as error:
        # TVM passes on what its compiler raises as an error of its own
        known = [*refused, *([error] if isinstance(error, TvmflowError) else [])]
        if not known:
            raise
        answer = {_ERROR: [type(known[0]).__name__, known[0].message, known[0].fix]}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def load_without_driver(refused: list[TvmflowError]) -> None:
    """Make this process, which must not run anything on a GPU, able to compile for one; what the compiler refuses goes into `refused`.

    Raises EnvironmentProblem.
    """
    import tvm_ffi

    from tvmflow.targets.linking import link_empty

    tools = cuda.toolkit()
    if tvm_ffi.get_global_func(_LOADED, allow_missing=True) is None:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            stand_in = Path(folder, "libcuda.so.1")
            link_empty(stand_in, _DRIVER)
            for library in (stand_in, tools.runtime):
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        load_cuda()
    cuda.take_over_compiling(tools, refused)


if __name__ == "__main__":
    _main(sys.argv[1])
