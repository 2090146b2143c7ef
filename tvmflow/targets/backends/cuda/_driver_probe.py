"""A probe of NVIDIA's driver for the first GPU.

Also run as a program, by its path, with nothing but the standard library.
"""

import ctypes
import json
import sys

DRIVER = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h
_MAJOR = 75
_MINOR = 76
# CUDA_ERROR_NO_DEVICE in cuda.h
NO_DEVICE = 100


def probe() -> tuple[int, int, str, int, int]:
    """Return what the driver reports of the first GPU.

    Starts the driver in this process, which must not be forked afterwards.

    Returns:
        CUDA's error code (0: there is a GPU), the driver's version, and the GPU's name and
        compute capability (major, minor).

    Raises:
        OSError: when there is no driver.
    """
    driver = ctypes.CDLL(DRIVER)
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
