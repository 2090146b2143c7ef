"""The NVIDIA GPU of this machine, as far as compiled code is concerned, and what code for it is loaded with.

The driver is asked in a process of its own: one in which it was started must not be forked any more.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import EnvironmentProblem
from tvmflow.targets._gpu_probe import DRIVER, probe

CUDA: Final = "cuda"
"""TVM's kind of targets for these GPUs."""

INSTALL: Final = "pip install 'tvmflow[cuda]'"

RUNTIME_PACKAGE: Final = "nvidia-cuda-runtime ==13.*"
"""What pip installs for programs that load code for these GPUs, besides TVM."""

_RUNTIME: Final = "libcudart.so.13"
# The CUDA that TVM's wheel works with, as its driver tells it.
_OLDEST_DRIVER: Final = 13000
_NO_DEVICE: Final = 100
_SECONDS: Final = 30.0
# GPUs of boards, whose code is theirs alone.
_TEGRA: Final = frozenset({"72", "87", "101", "110"})


class Gpu(NamedTuple):
    """The first GPU that programs see here. `arch` is its compute capability as compilers name it: `sm_90`."""

    name: str
    arch: str


class Found(NamedTuple):
    """A GPU, or why there is none that could be used."""

    gpu: Gpu | None
    why_not: str = ""


_NO_DRIVER: Final = Found(None, "this machine has no driver for NVIDIA GPUs")


@functools.cache
def read_gpu() -> Found:
    """This machine's, as a process of its own is told by the driver."""
    import subprocess

    try:
        # loaded, not started
        ctypes.CDLL(DRIVER)
    except OSError:
        return _NO_DRIVER
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_gpu_probe.py"))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
        return _found(*json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as trouble:
        return Found(None, f"NVIDIA's driver does not answer: {trouble}")


@functools.cache
def start_gpu() -> Found:
    """The same for a process that is about to use it: the driver is started in it."""
    try:
        return _found(*probe())
    except OSError:
        return _NO_DRIVER


def _found(code: int, version: int, name: str, major: int, minor: int) -> Found:
    if code == _NO_DEVICE:
        return Found(None, "no NVIDIA GPU can be seen here (CUDA_VISIBLE_DEVICES may hide them)")
    if code:
        return Found(None, f"NVIDIA's driver cannot be started: error {code}")
    if version < _OLDEST_DRIVER:
        has = f"{version // 1000}.{version % 1000 // 10}"
        needs = _OLDEST_DRIVER // 1000
        return Found(
            None, f"its driver is for CUDA {has}, and TVM's runtime needs {needs} or later"
        )
    return Found(Gpu(name, f"sm_{major}{minor}"))


def why_not_run(arch: str, found: Found) -> str:
    """Why machine code for `arch` cannot run on the GPU that was found, or empty."""
    if found.gpu is None:
        return found.why_not
    if not fits(arch, found.gpu.arch):
        return f"it is for {arch}, and this machine's GPU ({found.gpu.name}) is {found.gpu.arch}"
    return ""


def fits(code: str, gpu: str) -> bool:
    """Whether machine code for one architecture runs on a GPU of another: of the same major version, not an older one.

    >>> fits("sm_80", "sm_86"), fits("sm_86", "sm_80"), fits("sm_75", "sm_80"), fits("sm_90a", "sm_90")
    (True, False, False, True)
    """
    has = gpu.removeprefix("sm_")
    wants = code.removeprefix("sm_")
    plain = wants.rstrip("abcdefghijklmnopqrstuvwxyz")
    if plain != wants:
        # for this architecture alone
        return plain == has
    if {wants, has} & _TEGRA:
        return wants == has
    return wants[:-1] == has[:-1] and wants[-1:] <= has[-1:]


def load_cuda() -> None:
    """CUDA's runtime library and TVM's for it, for all of this process. Raises EnvironmentProblem."""
    import tvm_ffi

    for path in (_RUNTIME, str(packaged(f"lib/{_RUNTIME}") or _RUNTIME)):
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
    except (OSError, RuntimeError) as trouble:
        raise EnvironmentProblem(
            f"TVM's runtime for CUDA cannot be loaded: {trouble}",
            fix="its wheels for Linux have it; `nvidia-smi` tells whether the driver works",
        ) from None


def packaged(pattern: str) -> Path | None:
    """A file or folder of CUDA 13 as NVIDIA's packages for Python install it, wherever they are; the first in order."""
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(folder, "cu13").glob(pattern))
        if found:
            return found[0]
    return None
