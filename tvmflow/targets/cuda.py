"""CUDA's compiler as a package: machine code for NVIDIA GPUs out of TVM's kernels.

The compiler is NVRTC, called through its C interface as NVIDIA documents it (docs.nvidia.com/cuda/nvrtc).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem, StageError, TvmflowError
from tvmflow.targets.gpu import INSTALL, packaged

PACKAGES: Final = (
    *("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
    *("nvidia-cuda-cccl", "nvidia-cuda-crt"),
)
"""Distributions that come with `tvmflow[cuda]`; their code shapes what is built."""

# What a compiler for host code would define before it reads TVM's kernels.
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


class Toolkit(NamedTuple):
    """The parts of CUDA that a build needs, as NVIDIA's packages install them."""

    compiler: Path
    builtins: Path
    runtime: Path
    headers: tuple[Path, ...]


def is_installed() -> bool:
    """Whether there is one."""
    return _find() is not None


def toolkit() -> Toolkit:
    """The installed one. Raises EnvironmentProblem with what to install."""
    found = _find()
    if found is None:
        raise EnvironmentProblem("CUDA's compiler is not installed", fix=INSTALL)
    return found


def _find() -> Toolkit | None:
    compiler = packaged("lib/libnvrtc.so.*")
    builtins = packaged("lib/libnvrtc-builtins.so.*")
    runtime = packaged("lib/libcudart.so.*")
    headers = packaged("include")
    # headers are of several packages: of each one, what tells that it is there
    whole = packaged("include/cccl") and packaged("include/crt/mma.h")
    if compiler and builtins and runtime and headers and whole:
        return Toolkit(compiler, builtins, runtime, (headers, headers / "cccl"))
    return None


def compile_cubin(source: str, arch: str, tools: Toolkit) -> bytes:
    """Machine code of one architecture (`sm_90`) for CUDA source. Raises StageError with the compiler's words.

    Without `--use_fast_math`, which TVM's own road to nvcc sets: it makes other numbers.
    """
    # the compiler looks for its builtins by name only
    ctypes.CDLL(str(tools.builtins), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(tools.compiler))
    program = ctypes.c_void_p()
    text = (_PREAMBLE + source).encode()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None),
    )
    try:
        options = [f"--gpu-architecture={arch}", "-default-device"]
        options += [f"-I{folder}" for folder in tools.headers]
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), words):
            log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise StageError(
                f"CUDA's compiler refuses a kernel for {arch}: {log.strip()[:1000]}",
                fix=f"this CUDA builds for {', '.join(_architectures(library))}",
            )
        return _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def take_over_compiling(tools: Toolkit, refused: list[TvmflowError]) -> None:
    """Have TVM, whose CUDA runtime is loaded, call this compiler in the place of its own.

    TVM passes on an error as one of its own: `refused` gets what it was.
    """
    import tvm
    import tvm_ffi

    def compile_kernels(source: Any) -> bytes:
        try:
            return compile_cubin(str(source), str(tvm.target.Target.current().arch), tools)
        except TvmflowError as error:
            refused.append(error)
            raise

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_kernels, override=True)


def _architectures(library: Any) -> list[str]:
    """The GPUs that the compiler knows, the oldest first."""
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(numbers))
    return [f"sm_{number}" for number in numbers]


def _read(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    """What the compiler gives through a pair of functions, one for its size and one for itself."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(library: Any, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        name = library.nvrtcGetErrorString(code).decode()
        raise EnvironmentProblem(f"CUDA's compiler does not work: {name}", fix=INSTALL)
