"""Builds for NVIDIA GPUs on machines that have none: CUDA's compiler as a package, and an empty stand-in for the driver.

TVM compiles CUDA kernels ahead of time only where its CUDA runtime can be loaded; without it,
their source would go into the library and be compiled on the user's machine. The runtime needs
the driver's library to be there but calls nothing in it while it builds. So it gets an empty one,
in a process that does nothing else and never runs a kernel.

The compiler is NVRTC, called through its C interface as NVIDIA documents it (docs.nvidia.com/cuda/nvrtc).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem, StageError, TvmflowError
from tvmflow.values import Json

KIND: Final = "cuda"
PACKAGES: Final = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
"""Distributions that come with `tvmflow[cuda]`; their code shapes what is built."""

INSTALL: Final = "pip install 'tvmflow[cuda]'"
# What TVM's CUDA runtime asks of the driver's library when it is loaded.
_DRIVER: Final = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString"),
    *("cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    "cuTensorMapEncodeTiled",
)
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
_ERROR: Final = "error"


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
    for site in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        root = Path(site, "nvidia", "cu13")
        found = [
            next(iter(sorted((root / "lib").glob(pattern))), None)
            for pattern in ("libnvrtc.so.*", "libnvrtc-builtins.so.*", "libcudart.so.*")
        ]
        headers = root / "include"
        if None not in found and headers.is_dir():
            compiler, builtins, runtime = (path for path in found if path is not None)
            return Toolkit(compiler, builtins, runtime, (headers, headers / "cccl"))
    return None


# ---------------------------------------------------------------- the compiler


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


# ---------------------------------------------------------------- a process without a driver


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
        tools = toolkit()
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            _load_without_driver(tools, Path(folder), refused)
        value = getattr(importlib.import_module(module), function)(*arguments)
        answer: Mapping[str, Json] = {"value": value}
    except Exception as error:
        # TVM passes on what its compiler raises as an error of its own
        known = [*refused, *([error] if isinstance(error, TvmflowError) else [])]
        if not known:
            raise
        answer = {_ERROR: [type(known[0]).__name__, known[0].message, known[0].fix]}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _load_without_driver(tools: Toolkit, folder: Path, refused: list[TvmflowError]) -> None:
    """Load TVM with its CUDA runtime, and put our compiler, which keeps its errors in `refused`, in the place of its own."""
    from tvmflow.targets.linking import link_empty

    stand_in = folder / "libcuda.so.1"
    link_empty(stand_in, _DRIVER)
    for library in (stand_in, tools.runtime):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import tvm
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is None:
        raise EnvironmentProblem(
            "TVM's CUDA runtime cannot be loaded",
            fix=f"{INSTALL}; `tvmflow doctor` checks the installation",
        )

    def compile_kernels(source: Any) -> bytes:
        try:
            return compile_cubin(str(source), str(tvm.target.Target.current().arch), tools)
        except TvmflowError as error:
            refused.append(error)
            raise

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_kernels, override=True)


if __name__ == "__main__":
    _main(sys.argv[1])
