"""CUDA's compiler NVRTC, called through its C interface (docs.nvidia.com/cuda/nvrtc)."""

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
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import EnvironmentProblem, StageError, TvmflowError
from tvmflow.core.processes import module_command, without_torch
from tvmflow.core.types import Json
from tvmflow.targets.backends.cuda.gpu import INSTALL, find_packaged, load_runtime

PACKAGES: Final = (
    *("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
    *("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc-cu12"),
)
"""Distributions that `tvmflow[cuda]` installs and that affect compiled code."""

# Definitions that TVM's kernels need; a compiler for host code gets them from headers.
_PREAMBLE: Final = """\
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
"""
_LONGEST_LOG: Final = 1000


class Toolkit(NamedTuple):
    """The parts of CUDA that a build needs, as NVIDIA's packages install them."""

    compiler: Path
    builtins: Path
    runtime: Path
    headers: tuple[Path, ...]


def is_installed() -> bool:
    """Return whether all parts of the toolkit are installed."""
    return _search() is not None


def find_toolkit() -> Toolkit:
    """Return the installed toolkit; EnvironmentProblem when a part is missing."""
    toolkit = _search()
    if toolkit is None:
        raise EnvironmentProblem("CUDA's compiler is not installed", fix=INSTALL)
    return toolkit


def _search() -> Toolkit | None:
    compiler = find_packaged("lib/libnvrtc.so.*")
    builtins = find_packaged("lib/libnvrtc-builtins.so.*")
    runtime = find_packaged("lib/libcudart.so.*")
    headers = find_packaged("include")
    # Several packages install headers: one file or folder of each shows that the package is installed.
    has_headers = find_packaged("include/cccl") and find_packaged("include/crt/mma.h")
    if compiler and builtins and runtime and headers and has_headers:
        return Toolkit(compiler, builtins, runtime, (headers, headers / "cccl"))
    return None


class Compiled(NamedTuple):
    """Kernels as machine code for one architecture (cubin), and as PTX."""

    cubin: bytes
    ptx: bytes


def compile_kernels(source: str, arch: str, toolkit: Toolkit) -> Compiled:
    """Compile CUDA source; StageError with the compiler's log if the source is rejected.

    TVM sets `--use_fast_math` when it calls nvcc. It is not set here, because it changes results.
    """
    # The compiler finds its builtins only by their name, so they are loaded first.
    ctypes.CDLL(str(toolkit.builtins), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(toolkit.compiler))
    program = ctypes.c_void_p()
    text = (_PREAMBLE + source).encode()
    code = library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    _check(library, code)
    try:
        options = [f"--gpu-architecture={arch}", "-default-device"]
        options += [f"-I{folder}" for folder in toolkit.headers]
        argv = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), argv):
            log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise StageError(
                f"CUDA's compiler rejects a kernel for {arch}: {log.strip()[:_LONGEST_LOG]}",
                fix=f"this CUDA builds for {', '.join(_list_architectures(library))}",
            )
        return Compiled(
            cubin=_read(library, program, "CUBIN"), ptx=_read(library, program, "PTX").rstrip(b"\0")
        )
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def register_compiler(toolkit: Toolkit, errors: list[TvmflowError]) -> None:
    """Make TVM, whose CUDA runtime is loaded, call NVRTC instead of its own compiler.

    Compilation errors are also appended to `errors`, because TVM replaces them by errors of its own types.
    """
    import tvm
    import tvm_ffi

    def compile_cubin(source: Any) -> bytes:
        try:
            return compile_kernels(
                str(source), str(tvm.target.Target.current().arch), toolkit
            ).cubin
        except TvmflowError as error:
            errors.append(error)
            raise

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cubin, override=True)


def _list_architectures(library: Any) -> list[str]:
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(numbers))
    return [f"sm_{number}" for number in numbers]


def _read(library: Any, program: ctypes.c_void_p, name: str) -> bytes:
    """Return a result of the compiler: one function returns its size, another one its content."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{name}")(program, content))
    return content.raw


def _check(library: Any, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        name = library.nvrtcGetErrorString(code).decode()
        raise EnvironmentProblem(f"CUDA's compiler does not work: {name}", fix=INSTALL)


# ---------------------------------------------------------------- builds on machines without a GPU
# TVM compiles CUDA kernels ahead of time only if its CUDA runtime can be loaded. Otherwise their source would go into
# the library, and be compiled on the user's machine. The runtime needs the driver's library, but calls nothing in it
# during a build. So it gets an empty stub, in a separate process that only builds and never runs a kernel.

# The driver's symbols that TVM's CUDA runtime needs when it is loaded.
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
    """Call a function in a new process that can build for CUDA; see `Backend.call_builder`."""
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
    """Prepare this process to build, call the function, and print its result as the last line."""
    arguments = json.load(sys.stdin)
    module, _, function = name.partition(":")
    compiler_errors: list[TvmflowError] = []
    try:
        load_without_driver(compiler_errors)
        value = getattr(importlib.import_module(module), function)(*arguments)
        answer: Mapping[str, Json] = {"value": value}
    except Exception as error:
        # TVM replaces an error of the compiler by an error of its own types.
        known = [*compiler_errors, *([error] if isinstance(error, TvmflowError) else [])]
        if not known:
            raise
        answer = {_ERROR: [type(known[0]).__name__, known[0].message, known[0].fix]}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def load_without_driver(errors: list[TvmflowError]) -> None:
    """Prepare this process to compile for a GPU without a driver; it must never run anything on a GPU.

    Compilation errors are appended to `errors`. Raises EnvironmentProblem without compiler or runtime.
    """
    from tvmflow.targets.linking import link_stub

    with without_torch():
        import tvm_ffi

    toolkit = find_toolkit()
    if tvm_ffi.get_global_func(_RUNTIME_FUNCTION, allow_missing=True) is None:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            stub = Path(folder, "libcuda.so.1")
            link_stub(stub, _DRIVER_SYMBOLS)
            for library in (stub, toolkit.runtime):
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        load_runtime()
    register_compiler(toolkit, errors)


if __name__ == "__main__":
    # Imported under the name that all other modules use, so that there is no second copy of this module.
    importlib.import_module("tvmflow.targets.backends.cuda.nvrtc")._main(sys.argv[1])
