"""The backend of GPUs and other devices with an OpenCL driver: kernels are OpenCL C."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

from tvmflow.core.types import Json
from tvmflow.targets.backends._driver_probes import probe_in_process, probe_opencl
from tvmflow.targets.backends.backend import Backend, find_host_problem
from tvmflow.targets.host import Host
from tvmflow.targets.tvm_target import TvmTarget

_MIN_THREADS: Final = 16
# Expressions that are frequent in TVM's code -> macros that shorten them.
_MACROS: Final[Mapping[str, str]] = {
    f"(convert_int(get_{kind}_id({axis})))": f"tf_{kind}{axis}"
    for kind in ("group", "local")
    for axis in range(3)
}


class OpenclBackend(Backend):
    """OpenCL: TVM's wheel has no runtime for it, so libraries have a runtime of their own."""

    KIND = "opencl"
    DEVICE = "opencl"
    # kDLOpenCL in dlpack.h
    DLPACK_DEVICE_TYPE = 4
    EXECUTOR = "opencl.c"
    ENVIRONMENT_VARIABLES = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "POCL_DEVICES")
    SEARCH_RULES = "cuda"
    INTRINSICS = ("cuda",)
    NO_BFLOAT16 = "OpenCL has only float16 (precision: mixed)"
    NO_RPC = "libraries for OpenCL have a runtime of their own"
    # The limits that OpenCL guaranteed for a GPU of 2012.
    LIMITS: ClassVar[Mapping[str, Json]] = {
        "max_threads_per_block": 256,
        "max_shared_memory_per_block": 32768,
        "thread_warp_size": 1,
    }

    def target_problem(self, tvm: TvmTarget) -> str:
        """Return the problem that the host is missing or a limit is invalid, if there is one."""
        if problem := find_host_problem(tvm):
            return problem
        for limit in self.LIMITS:
            value = tvm.get(limit, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                return f"{limit} must be a number of at least 1"
        if tvm.get("max_threads_per_block", _MIN_THREADS) < _MIN_THREADS:
            return f"max_threads_per_block must be at least {_MIN_THREADS}"
        return ""

    def complete_target(self, tvm: TvmTarget) -> dict[str, Json]:
        """Return the target with the limits of its thread blocks."""
        completed = super().complete_target(tvm)
        # Schedules read this limit.
        completed.setdefault("max_num_threads", completed["max_threads_per_block"])
        return completed

    def device(self, tvm: TvmTarget, host: Host, *, runs_here: bool) -> dict[str, str]:
        """Return a device; with `runs_here`, this machine's first one."""
        found = detect_device() if runs_here else None
        return {"kind": self.DEVICE, "class": found.name} if found else {"kind": self.DEVICE}

    def has_device(self) -> bool:
        """Return whether this machine has a device with an OpenCL driver."""
        return bool(detect_device().name)

    def unrunnable_reason(self, tvm: TvmTarget, *, in_this_process: bool) -> str:
        """Return why this machine cannot run the code: it has no device, or its first device cannot."""
        found = _start_device() if in_this_process else detect_device()
        if found.reason:
            return found.reason
        limits = {
            "max_threads_per_block": found.threads,
            "max_shared_memory_per_block": found.shared_bytes,
        }
        for name, most in limits.items():
            if self.complete_target(tvm)[name] > most:
                return f"this machine's device ({found.name}) has a {name} of {most}"
        return ""

    def generate_device_code(self, mod: Any, target: Any) -> bytes:
        """Return TVM's OpenCL C without indentation, with macros for thread indices."""
        source = super().generate_device_code(mod, target).decode()
        for text, macro in _MACROS.items():
            source = source.replace(text, macro)
        lines = [f"#define {macro} {text}" for text, macro in _MACROS.items()]
        lines += [stripped for line in source.splitlines() if (stripped := line.strip())]
        return "\n".join(lines).encode() + b"\n"


# ---------------------------------------------------------------- the device of this machine


class Detection(NamedTuple):
    """This machine's first OpenCL device, or the reason why none can be used."""

    name: str = ""
    threads: int = 0
    shared_bytes: int = 0
    reason: str = ""


_NO_LIBRARY: Final = Detection(reason="this machine has no OpenCL library (libOpenCL.so.1)")
_PROBE_TIMEOUT_S: Final = 60.0


@functools.cache
def detect_device() -> Detection:
    """Return this machine's first device; a child process queries the driver."""
    try:
        answer = probe_in_process(OpenclBackend.KIND, _PROBE_TIMEOUT_S)
        return _NO_LIBRARY if answer is None else _parse(*answer)
    except (OSError, TypeError) as error:
        return Detection(reason=f"OpenCL's driver does not answer: {error}")


@functools.cache
def _start_device() -> Detection:
    """Return this machine's first device; this starts its driver in this process."""
    try:
        return _parse(*probe_opencl())
    except OSError:
        return _NO_LIBRARY


def _parse(platforms: int, name: str, threads: int, shared_bytes: int) -> Detection:
    if not platforms:
        return Detection(reason="OpenCL has no driver of a device here")
    if not name:
        return Detection(reason="OpenCL's drivers have no device here")
    return Detection(name, threads, shared_bytes)
