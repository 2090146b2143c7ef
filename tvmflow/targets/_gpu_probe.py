"""Asks NVIDIA's driver for the first GPU. Also run as a program, by its path, with nothing but the standard library."""

import ctypes
import json
import sys

DRIVER = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, by their numbers in CUDA's header
_MAJOR = 75
_MINOR = 76


def probe() -> tuple[int, int, str, int, int]:
    """CUDA's error code (0: there is a GPU), the driver's version, and the GPU's name and compute capability.

    Starts the driver in this process, which must not be forked any more.
    """
    driver = ctypes.CDLL(DRIVER)
    version, count, device, major, minor = (ctypes.c_int() for _ in range(5))
    name = ctypes.create_string_buffer(256)
    refer = ctypes.byref
    driver.cuDriverGetVersion(refer(version))
    code = driver.cuInit(0) or driver.cuDeviceGetCount(refer(count))
    # CUDA_ERROR_NO_DEVICE
    code = code or (0 if count.value else 100)
    code = (
        code
        or driver.cuDeviceGet(refer(device), 0)
        or driver.cuDeviceGetName(name, len(name), device)
        or driver.cuDeviceGetAttribute(refer(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(refer(minor), _MINOR, device)
    )
    return code, version.value, name.value.decode(errors="replace"), major.value, minor.value


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
