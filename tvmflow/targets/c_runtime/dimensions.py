"""Sizes that each call chooses: what the header and the code of a C library say about its dimensions."""

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
_FUNCTIONS: Final = """\
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
    """Return the macros with the number of dimensions, and with their places.

    Args:
        name: The prefix of macros.
        dimensions: The dimensions; none for a model of fixed sizes.
    """
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


def header_values(values: Mapping[str, str], dimensions: Sequence[Dimension]) -> dict[str, str]:
    """Return the values of the header's template about dimensions; empty texts without any."""
    if not dimensions:
        return {"dimension_statuses": "", "dimension_functions": ""}
    named = {**values, "ranges": ranges_text(dimensions)}
    return {"dimension_statuses": STATUSES % named, "dimension_functions": _FUNCTIONS % named}


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
