"""A probe of OpenCL's drivers for the first device.

Also run as a program, by its path, with nothing but the standard library.
"""

import ctypes
import json
import sys

LIBRARY = {
    "darwin": "/System/Library/Frameworks/OpenCL.framework/OpenCL",
    "win32": "OpenCL.dll",
}.get(sys.platform, "libOpenCL.so.1")
# GPUs, accelerators and CPUs, in the order of opencl.c
_TYPES = (1 << 2, 1 << 3, 1 << 1)
# CL_DEVICE_NAME, CL_DEVICE_MAX_WORK_GROUP_SIZE and CL_DEVICE_LOCAL_MEM_SIZE in cl.h
_NAME = 0x102B
_THREADS = 0x1004
_SHARED_MEMORY = 0x1023
_MOST = 16


def probe() -> tuple[int, str, int, int]:
    """Return what OpenCL reports of its first device.

    Starts its driver in this process, which must not be forked afterwards.

    Returns:
        The number of platforms, and the device's name, the most threads of a block, and the bytes of
        its shared memory; the name is empty where there is no device.

    Raises:
        OSError: when OpenCL is not installed.
    """
    library = ctypes.CDLL(LIBRARY)
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
