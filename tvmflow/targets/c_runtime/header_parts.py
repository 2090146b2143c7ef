"""Parts of the header and code of a C library for dynamic shapes and for devices.

`device.h` is the interface between `device.c`, which all libraries have whose kernels run on a device, such
as a GPU, and the executor of one driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.dimensions import ranges_text
from tvmflow.core.generated_text import c_string, identifier
from tvmflow.core.types import Dimension, Json, Size

FUNCTIONS: Final = (
    *("dimensions", "set_dimension", "get_dimension", "set_input_shape"),
    *("input_shape", "input_bytes", "output_bytes"),
)
"""The functions of a library with dimensions."""

DIMENSIONS: Final = "dimensions.h"
"""The template of its part of the header: about statuses, then about functions."""
LOADER: Final = "dimensions.js"
_LOADER_PARTS: Final = ("dimensions_title", "dimensions_read", "dimensions_methods")
_SEPARATOR: Final = "//----\n"


def read_parts(name: str) -> list[str]:
    """Return the parts of a file of templates in this folder."""
    return Path(__file__).with_name(name).read_text().split(_SEPARATOR)


def loader_values(values: Mapping[str, str], dimensions: Sequence[Dimension]) -> dict[str, str]:
    """Return the values of the template of the module of JavaScript about dimensions."""
    parts = zip(_LOADER_PARTS, read_parts(LOADER), strict=True)
    return {name: text % values if dimensions else "" for name, text in parts}


def list_dimensions(signature: Mapping[str, Json]) -> list[Dimension]:
    """Return the dimensions of a signature, in the order of their places in C."""
    return sorted(Dimension.list_of(signature), key=lambda dimension: dimension.name)


def write_places(name: str, dimensions: Sequence[Dimension]) -> list[str]:
    """Return the macros with the number of dimensions, and with their places."""
    if not dimensions:
        return []
    words = [identifier(f"_{dimension.name}").upper() for dimension in dimensions]
    return [
        f"#define {name}_DIMENSIONS {len(dimensions)}",
        *(
            f"#define {name}_DIMENSION{word} {index}"
            for index, word in enumerate(words)
            if words.count(word) == 1
        ),
    ]


def write_code(dimensions: Sequence[Dimension]) -> list[str]:
    """Return the lines of C that a library with dimensions begins with."""
    if not dimensions:
        return []
    text = f"a dimension has a size that it cannot have: {ranges_text(dimensions)}"
    return [f"#define TF_DIMENSIONS {len(dimensions)}", f"#define TF_RANGES {c_string(text)}"]


def describe_shape(tensor: Mapping[str, Json]) -> list[str]:
    """Return the sizes of a tensor as a description in C has them: -1 where they are open."""
    sizes: Sequence[Size] = tensor.get("sizes") or tensor["shape"]
    return [str(size) if isinstance(size, int) else "-1" for size in sizes]


# ---------------------------------------------------------------- devices

DEVICE_FUNCTIONS: Final = ("create_on", "device_error", "use_device_memory", "enqueue", "wait")
"""The functions that only such a library has."""
DEVICE_SOURCES: Final = ("device.c", "device.h")
"""The files that are compiled into such a library besides its executor."""
DEVICE: Final = "device_functions.h"
"""The template of its part of the header: about statuses, then about functions."""
# Executor -> the members of a device that are the driver's own.
_MEMBERS: Final[Mapping[str, str]] = {
    "opencl.c": """\
  void *context; /* a cl_context, which the library retains */
  void *device;  /* a cl_device_id of it */
  void *queue;   /* a cl_command_queue of both, in order, that all is done on; NULL for one of the library's own */
  const char *cache; /* a folder of your own for what the driver builds; NULL for that in %(NAME)s_DEVICE_CACHE, if any */
""",
    "cuda.c": """\
  void *context; /* a CUcontext */
  void *device;  /* not used */
  void *queue;   /* a CUstream that all is done on; NULL for one of the library's own */
""",
}

_MEMORY: Final[Mapping[str, str]] = {
    "opencl.c": "a cl_mem of the context that create_on was given",
    "cuda.c": "a CUdeviceptr",
}
"""Executor -> what a program has memory on the device as."""


def describe_device(values: Mapping[str, str], executor: str) -> dict[str, str]:
    """Return what the templates of an executor have besides the names in the header."""
    return {"members": _MEMBERS[executor] % values, "memory": _MEMORY[executor]}
