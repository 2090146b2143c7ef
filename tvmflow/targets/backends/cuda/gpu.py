"""The NVIDIA GPU of this machine, and the libraries that a process needs to run code on it.

The driver is probed in another process, because a process that has started it must not be forked.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.targets.backends._driver_probes import NO_DEVICE, probe_cuda, probe_in_process

INSTALL: Final = "pip install 'tvmflow[cuda]'"

RUNTIME_PACKAGE: Final = "nvidia-cuda-runtime ==13.*"
"""The pip requirement of programs that load code for these GPUs, besides TVM."""

OLDEST_ARCH: Final = "sm_50"
"""The oldest architecture that kernels are built for."""

_RUNTIME: Final = "libcudart.so.13"
# The lowest CUDA version of a driver, in the driver's notation (12040 is 12.4): for NVRTC and TVM's wheel, and for PTX
# for GPUs that NVRTC does not support.
_OLDEST_DRIVER: Final = 13000
_OLDEST_DRIVER_OF_PTX: Final = 10000
_PROBE_TIMEOUT_S: Final = 30.0
# The compute capabilities of Jetson boards; their code runs on no other GPU.
_TEGRA: Final = frozenset({"87", "101", "110"})
# The oldest architecture that CUDA 13 supports.
_OLDEST_OF_NVRTC: Final = "sm_75"
# The folder of nvidia-cuda-nvcc-cu12, and its library that LLVM links into kernels.
_CUDA_12: Final = "cuda_nvcc"
_LIBDEVICE: Final = "nvvm/libdevice/libdevice.*.bc"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_ARCH: Final = re.compile(r"sm_[0-9]{2,3}[af]?")


class Gpu(NamedTuple):
    """The first visible GPU: compute capability (`sm_90`), and its driver's CUDA version (12040 is 12.4)."""

    name: str
    arch: str
    driver: int


class GpuDetection(NamedTuple):
    """A GPU, or the reason why no GPU can be used."""

    gpu: Gpu | None
    reason: str = ""


_NO_DRIVER: Final = GpuDetection(None, "this machine has no driver for NVIDIA GPUs")


@functools.cache
def detect_gpu() -> GpuDetection:
    """Return this machine's GPU; another process asks the driver."""
    try:
        answer = probe_in_process("cuda", _PROBE_TIMEOUT_S)
        return _NO_DRIVER if answer is None else _parse_probe(*answer)
    except (OSError, TypeError) as error:
        return GpuDetection(None, f"NVIDIA's driver does not answer: {error}")


@functools.cache
def start_gpu() -> GpuDetection:
    """Return this machine's GPU; this starts its driver in this process."""
    try:
        return _parse_probe(*probe_cuda())
    except OSError:
        return _NO_DRIVER


def _parse_probe(code: int, version: int, name: str, major: int, minor: int) -> GpuDetection:
    reason = ""
    if code == NO_DEVICE:
        reason = "no NVIDIA GPU can be seen here (CUDA_VISIBLE_DEVICES may hide them)"
    elif code:
        reason = f"NVIDIA's driver cannot be started: error {code}"
    found = Gpu(name=name, arch=f"sm_{major}{minor}", driver=version)
    return GpuDetection(None if reason else found, reason)


def unrunnable_reason(arch: str, detection: GpuDetection) -> str:
    """Return why code for `arch` does not run on the detected GPU, or an empty string."""
    if detection.gpu is None:
        return detection.reason
    oldest = _OLDEST_DRIVER_OF_PTX if is_unknown_to_nvrtc(arch) else _OLDEST_DRIVER
    if (version := detection.gpu.driver) < oldest:
        return f"its driver is for CUDA {_version_text(version)}, and code for {arch} needs {_version_text(oldest)} or later"
    if not runs_code_for(arch, detection.gpu.arch):
        return f"it is for {arch}, and this machine's GPU ({detection.gpu.name}) is {detection.gpu.arch}"
    return ""


def _version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def runs_code_for(code_arch: str, gpu_arch: str) -> bool:
    """Return whether a GPU runs code for an architecture.

    SASS (machine code) runs on GPUs of the same major version whose minor version is not lower. PTX runs on GPUs of
    the same or any later version.

    >>> runs_code_for("sm_80", "sm_86"), runs_code_for("sm_86", "sm_80"), runs_code_for("sm_75", "sm_80")
    (True, False, False)
    >>> runs_code_for("sm_90a", "sm_90")
    True
    """
    gpu = gpu_arch.removeprefix("sm_")
    code = code_arch.removeprefix("sm_")
    base = code.rstrip(_LETTERS)
    if base != code:
        # A suffix such as `a` means code for exactly this architecture.
        return base == gpu
    if is_unknown_to_nvrtc(code_arch):
        return int(code) <= int(gpu)
    if {code, gpu} & _TEGRA:
        return code == gpu
    return code[:-1] == gpu[:-1] and code[-1:] <= gpu[-1:]


def is_arch(text: str) -> bool:
    """Return whether text is the name of an architecture, such as `sm_90` or `sm_90a`."""
    return _ARCH.fullmatch(text) is not None


def load_runtime() -> None:
    """Load CUDA's runtime and TVM's runtime for it; EnvironmentProblem if either or the driver is missing."""
    import tvm_ffi

    for path in (_RUNTIME, str(find_packaged(f"lib/{_RUNTIME}") or _RUNTIME)):
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
    else:
        raise EnvironmentProblem(
            f"CUDA's runtime library ({_RUNTIME}) cannot be loaded",
            fix=f"pip install '{RUNTIME_PACKAGE}'",
        )
    try:
        tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", "tvm_runtime_cuda", "RTLD_GLOBAL")
    except (OSError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"TVM's runtime for CUDA cannot be loaded: {error}",
            fix="install TVM's wheel for Linux, which has it; check the driver with `nvidia-smi`",
        ) from None


def is_unknown_to_nvrtc(arch: str) -> bool:
    """Return whether NVRTC (CUDA 13) cannot compile for an architecture.

    >>> is_unknown_to_nvrtc("sm_62"), is_unknown_to_nvrtc("sm_75"), is_unknown_to_nvrtc("sm_90a")
    (True, False, False)
    """
    return _is_before(arch, _OLDEST_OF_NVRTC)


def is_unknown_to_ptx(arch: str) -> bool:
    """Return whether an architecture is older than the oldest one for which PTX is generated."""
    return _is_before(arch, OLDEST_ARCH)


def _is_before(arch: str, oldest: str) -> bool:
    number, limit = (name.removeprefix("sm_").rstrip(_LETTERS) for name in (arch, oldest))
    return number.isdigit() and int(number) < int(limit)


def has_libdevice() -> bool:
    """Return whether libdevice, NVIDIA's library of math functions, is installed."""
    return find_packaged(_LIBDEVICE, _CUDA_12) is not None


def find_libdevice() -> Path:
    """Return libdevice, NVIDIA's math functions as LLVM bitcode; EnvironmentProblem without it."""
    path = find_packaged(_LIBDEVICE, _CUDA_12)
    if path is None:
        raise EnvironmentProblem(
            "the mathematical functions for NVIDIA GPUs before sm_75 (libdevice) are not installed",
            fix=INSTALL,
        )
    return path


def find_packaged(pattern: str, package: str = "cu13") -> Path | None:
    """Return the first match of a glob in NVIDIA's Python packages; by default, in those of CUDA 13."""
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        matches = sorted(Path(folder, package).glob(pattern))
        if matches:
            return matches[0]
    return None
