"""Parts of the header and code of a C library for dynamic shapes and for devices.

`device.h` is the interface between `device.c`, which all libraries have whose kernels run on a device, such
as a GPU, and the executor of one driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tvmflow.core.dimensions import ranges_text
from tvmflow.core.generated_text import c_string, identifier
from tvmflow.core.types import Dimension, Json, Size

FUNCTIONS: Final = (
    *("dimensions", "set_dimension", "get_dimension", "set_input_shape"),
    *("input_shape", "input_bytes", "output_bytes"),
)
"""The functions of a library with dimensions."""

STATUSES: Final = """\

/* What functions return for dimensions. */
enum {
  %(NAME)s_WRONG_DIMENSION = 18 /* a dimension has a size that it cannot have: %(ranges)s */
};
"""
"""Its part of the header about statuses, as a template."""
DECLARATIONS: Final = """\
/* The dimensions: sizes of inputs that each call chooses, and that sizes of outputs follow. There are %(NAME)s_DIMENSIONS of
 * them, in the order of their places. Sizes are from `min` to `max`, and multiples of `multiple_of`.
 *
 * In the descriptions of tensors, a size that depends on them is -1, and `bytes` is that of the largest tensor. */
typedef struct {
  const char *name;
  int64_t min;
  int64_t max;
  int64_t multiple_of;
} %(name)s_dimension;
%(NAME)s_API const %(name)s_dimension *%(name)s_dimensions(void);

/* Choose the size of a dimension for the next calls of a context; a new context has the smallest ones. The memory of the
 * context grows in the next call, where that needs more than all before, and never shrinks: a call with sizes that the
 * context has seen allocates nothing. */
%(NAME)s_API int %(name)s_set_dimension(%(name)s_context *context, size_t dimension, int64_t size);

/* The size of a dimension; -1 where there is no such dimension. */
%(NAME)s_API int64_t %(name)s_get_dimension(const %(name)s_context *context, size_t dimension);

/* Choose the sizes of all dimensions of an input by its shape. */
%(NAME)s_API int %(name)s_set_input_shape(
    %(name)s_context *context, size_t input, const int64_t *shape, size_t rank);

/* Write the shape that an input must have in the next call, as many sizes as the description has. That of an output is
 * known before the call as well: %(name)s_output_shape writes it. */
%(NAME)s_API int %(name)s_input_shape(%(name)s_context *context, size_t input, int64_t *shape);

/* Write the bytes that an input or output has in the next call. */
%(NAME)s_API int %(name)s_input_bytes(%(name)s_context *context, size_t input, size_t *bytes);
%(NAME)s_API int %(name)s_output_bytes(%(name)s_context *context, size_t output, size_t *bytes);

"""


_LOADER_VALUES: Final[Mapping[str, str]] = {
    "dimensions_title": """
 *
 * `dimensions` are the sizes that each call chooses: name, min, max, multipleOf and size, the smallest at first. After
 * `setDimensions`, the shapes in `inputs` and `outputs` are those of the next calls.""",
    "dimensions_read": """\
    this.dimensions = this.#describeDimensions();
    this.#measure();
""",
    "dimensions_methods": """\
  /**
   * Choose the sizes of dimensions for the next calls.
   *
   * @param {Object<string, number>} sizes The sizes by name; other dimensions keep theirs.
   */
  setDimensions(sizes) {
    if (!this.#context) throw new Error("the model was destroyed");
    const chosen = Object.entries(sizes).map(([name, size]) => {
      const place = this.dimensions.findIndex((dimension) => dimension.name === name);
      if (place < 0) throw new TypeError(`the model has no dimension ${name}`);
      const { min, max, multipleOf } = this.dimensions[place];
      if (!Number.isInteger(size) || size < min || size > max || size %% multipleOf)
        throw new RangeError(`the dimension ${name} is ${size}, and its sizes are ${min} to ${max}${multipleOf > 1 ? `, multiples of ${multipleOf}` : ""}`);
      return [place, size];
    });
    for (const [place, size] of chosen) {
      this.#check(this.#exports.%(name)s_set_dimension(this.#context, place, BigInt(size)));
      this.dimensions[place].size = size;
    }
    this.#measure();
    this.#resize("inputs");
    this.#resize("outputs");
  }

  /* Read %(name)s_dimension[], which ends with a dimension without a name. */
  #describeDimensions() {
    const view = this.#view();
    const dimensions = [];
    for (let address = this.#exports.%(name)s_dimensions(); view.getUint32(address, true); address += 32) {
      const [min, max, multipleOf] = [8, 16, 24].map((at) => Number(view.getBigInt64(address + at, true)));
      dimensions.push({ name: this.#text(view.getUint32(address, true)), min, max, multipleOf, size: min });
    }
    return dimensions;
  }

  /* Give all tensors the shapes and bytes of the next call. */
  #measure() {
    const rank = Math.max(0, ...[...this.inputs, ...this.outputs].map((tensor) => tensor.shape.length));
    const start = this.#exports.malloc(8 * rank + 8);
    if (!start) throw new RangeError("there is no memory for shapes");
    for (const direction of ["input", "output"]) {
      this[`${direction}s`].forEach((tensor, index) => {
        this.#check(this.#exports[`%(name)s_${direction}_shape`](this.#context, index, start + 8));
        this.#check(this.#exports[`%(name)s_${direction}_bytes`](this.#context, index, start));
        const view = this.#view();
        tensor.bytes = view.getUint32(start, true);
        tensor.shape = tensor.shape.map((_, axis) => Number(view.getBigInt64(start + 8 + 8 * axis, true)));
      });
    }
    this.#exports.free(start);
  }

  /* Have memory for the tensors of the next calls: what there is, where it is large enough. */
  #resize(direction) {
    const place = this.#places[direction];
    this[direction].forEach((tensor, index) => {
      if (tensor.bytes > (place.capacity?.[index] ?? 0)) {
        place.capacity ??= [];
        place.starts ??= [];
        if (place.starts[index]) this.#exports.free(place.starts[index]);
        place.capacity[index] = 0;
        place.starts[index] = this.#exports.malloc(tensor.bytes + ALIGNMENT);
        if (!place.starts[index]) throw new RangeError(`there is no memory for ${tensor.bytes} bytes`);
        place.capacity[index] = tensor.bytes;
        place.data[index] = Math.ceil(place.starts[index] / ALIGNMENT) * ALIGNMENT;
      }
      const view = this.#view();
      view.setUint32(place.buffers + 8 * index, place.data[index], true);
      view.setUint32(place.buffers + 8 * index + 4, tensor.bytes, true);
    });
  }

""",
}


def loader_values(values: Mapping[str, str], dimensions: Sequence[Dimension]) -> dict[str, str]:
    """Return the values of the template of the module of JavaScript about dimensions."""
    return {name: text % values if dimensions else "" for name, text in _LOADER_VALUES.items()}


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

DEVICE_STATUSES: Final = """\

/* What functions return for the device. */
enum {
  %(NAME)s_NO_DRIVER = 20,      /* the driver of the device is not installed, or too old */
  %(NAME)s_NO_DEVICE = 21,      /* there is no such device, or it is none that the library was built for */
  %(NAME)s_KERNEL_REFUSED = 22, /* the driver does not build or start a kernel of the library */
  %(NAME)s_DEVICE_LOST = 23     /* the device does not work any more, or the process was forked: make another context */
};
"""
"""Its part of the header about statuses, as a template."""
DEVICE_DECLARATIONS: Final = """\
/* The device that a context is on: the one of a number, GPUs first, in the order of the driver; or the program's own one,
 * where `context` is not NULL. The driver's library is loaded when the first context is made. Contexts on one device share
 * the weights there. */
typedef struct {
  uint32_t number;
%(members)s} %(name)s_device;

/* Make a context on a device; `create` takes the first one. The first context of a process on a device has to wait until the
 * driver has built the kernels. */
%(NAME)s_API int %(name)s_create_on(
    const %(name)s_options *options, const %(name)s_device *device, %(name)s_context **context);

/* Let the next calls read an input, or write an output, in the program's own memory on the device, without a copy: %(memory)s,
 * of at least the tensor's bytes. Inputs come first, then outputs: input 0 is the tensor 0, output 0 the tensor
 * %(NAME)s_INPUTS. What `run` is given for it is then not used. NULL: the memory that `run` is given, as before. */
%(NAME)s_API int %(name)s_use_device_memory(%(name)s_context *context, size_t tensor, void *memory);

/* Start a call all of whose inputs and outputs are on the device, and return before its end (steps on the CPU wait for what
 * they read). Calls of one context are done in their order; `wait` waits for the end of all. */
%(NAME)s_API int %(name)s_enqueue(%(name)s_context *context);
%(NAME)s_API int %(name)s_wait(%(name)s_context *context);

/* What the driver said of the last error that a function returned on this thread; empty for nothing. */
%(NAME)s_API const char *%(name)s_device_error(void);

"""
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
