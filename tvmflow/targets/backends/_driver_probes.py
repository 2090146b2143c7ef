"""Probes of the OpenCL and NVIDIA drivers for the first device.

This file is also run as a program, by its path and with only the standard library. A process that has started a
driver must not be forked, so the probes need a process of their own.
"""

import ctypes
import json
import sys
from typing import Any

OPENCL_LIBRARY = {
    "darwin": "/System/Library/Frameworks/OpenCL.framework/OpenCL",
    "win32": "OpenCL.dll",
}.get(sys.platform, "libOpenCL.so.1")
# CL_DEVICE_TYPE_GPU, _ACCELERATOR and _CPU, in the same order as in opencl.c.
_TYPES = (1 << 2, 1 << 3, 1 << 1)
# CL_DEVICE_NAME, CL_DEVICE_MAX_WORK_GROUP_SIZE and CL_DEVICE_LOCAL_MEM_SIZE in cl.h
_NAME = 0x102B
_THREADS = 0x1004
_SHARED_MEMORY = 0x1023
_MOST = 16


def probe_opencl() -> tuple[int, str, int, int]:
    """Return the number of platforms, and the first device's name, threads and shared bytes.

    This starts the driver, so the process must not be forked afterwards; OSError without OpenCL.
    """
    library = ctypes.CDLL(OPENCL_LIBRARY)
    platforms, devices = (ctypes.c_void_p * _MOST)(), (ctypes.c_void_p * _MOST)()
    count, found = ctypes.c_uint(), ctypes.c_uint()
    pointer = ctypes.byref
    if library.clGetPlatformIDs(_MOST, platforms, pointer(count)) != 0:
        return 0, "", 0, 0
    for kind in _TYPES:
        for platform in platforms[: min(count.value, _MOST)]:
            handle = ctypes.c_void_p(platform)
            flags = ctypes.c_uint64(kind)
            if library.clGetDeviceIDs(handle, flags, _MOST, devices, pointer(found)) == 0:
                return count.value, *_describe(library, ctypes.c_void_p(devices[0]))
    return count.value, "", 0, 0


def _describe(library: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[str, int, int]:
    name, threads, shared = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_uint64()
    for key, value in ((_NAME, name), (_THREADS, threads), (_SHARED_MEMORY, shared)):
        size = ctypes.c_size_t(ctypes.sizeof(value))
        library.clGetDeviceInfo(device, ctypes.c_uint(key), size, ctypes.byref(value), None)
    return name.value.decode(errors="replace"), threads.value, shared.value


CUDA_DRIVER = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h
_MAJOR = 75
_MINOR = 76
# CUDA_ERROR_NO_DEVICE in cuda.h
NO_DEVICE = 100


def probe_cuda() -> tuple[int, int, str, int, int]:
    """Return CUDA's error code, the driver's version, and the first GPU's name and compute capability.

    This starts the driver, so the process must not be forked afterwards; OSError without a driver.
    """
    driver = ctypes.CDLL(CUDA_DRIVER)
    version, count, device, major, minor = (ctypes.c_int() for _ in range(5))
    name = ctypes.create_string_buffer(256)
    pointer = ctypes.byref
    driver.cuDriverGetVersion(pointer(version))
    code = driver.cuInit(0) or driver.cuDeviceGetCount(pointer(count))
    code = code or (0 if count.value else NO_DEVICE)
    code = (
        code
        or driver.cuDeviceGet(pointer(device), 0)
        or driver.cuDeviceGetName(name, len(name), device)
        or driver.cuDeviceGetAttribute(pointer(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(pointer(minor), _MINOR, device)
    )
    return code, version.value, name.value.decode(errors="replace"), major.value, minor.value


_PROBES = {"cuda": (CUDA_DRIVER, probe_cuda), "opencl": (OPENCL_LIBRARY, probe_opencl)}


def probe_in_process(kind: str, timeout_s: float) -> list[Any] | None:
    """Run the probe `cuda` or `opencl` in another process; return its answer, or None without a driver.

    Raises:
        OSError: The probe fails, or does not end in time.
    """
    # Planning on a machine without a device does not need this import.
    import subprocess

    try:
        # Loading the library does not start the driver.
        ctypes.CDLL(_PROBES[kind][0])
    except OSError:
        return None
    command = [sys.executable, "-I", "-S", __file__, kind]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=timeout_s
        )
        answer = json.loads(done.stdout)
    except (ValueError, subprocess.SubprocessError) as error:
        raise OSError(str(error)) from error
    if not isinstance(answer, list):
        raise OSError(f"it says {answer}")
    return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_PROBES[sys.argv[1]][1]()))
