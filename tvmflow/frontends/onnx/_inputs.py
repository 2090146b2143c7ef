"""The inputs of a recipe against those of an ONNX model: names, dtypes, shapes. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.suggestions import did_you_mean
from tvmflow.core.types import TensorSpec
from tvmflow.frontends._base import MAX_ELEMENTS, InputProblem

MAX_SIGNATURE: Final = 10_000
"""The most inputs and outputs of a model; no exporter makes more."""

ELEMENT_TYPES: Final[Mapping[int, str]] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
"""The dtype of each number of `TensorProto.DataType` that an input can have."""


class ModelInput(NamedTuple):
    """An input of a model.

    Attributes:
        name: Its name.
        dtype: Its dtype; empty for one that is not supported, None when it is not a tensor.
        dims: Fixed sizes, and names of free dimensions (which may be empty); None without a shape.
    """

    name: str
    dtype: str | None
    dims: tuple[int | str, ...] | None


def find_input_problems(
    inputs: Sequence[ModelInput], specs: Sequence[TensorSpec]
) -> Iterator[InputProblem]:
    """Give everything in which the recipe's inputs do not fit the model's.

    Args:
        inputs: The model's inputs.
        specs: The recipe's inputs; may be empty when all shapes of the model are fixed.
    """
    if len(inputs) > MAX_SIGNATURE:
        text = (
            f"the model has {len(inputs):,} inputs, and tvmflow imports at most {MAX_SIGNATURE:,}"
        )
        yield InputProblem("", "", text)
        return
    by_name = {spec.name: spec for spec in specs}
    names = [value.name for value in inputs]
    for name in sorted(by_name.keys() - set(names)):
        valid = f"; its inputs are {names_text(names)}" if names else "; it has no inputs"
        text = f"the model has no input {quoted(name)}{did_you_mean(name, names) or valid}"
        yield InputProblem(name, "", text)
    for value in inputs:
        spec = by_name.get(value.name)
        if spec is None and specs:
            text = f"the model's input {quoted(value.name)} is missing{_signature(value)}"
            yield InputProblem("", "", text)
        else:
            yield from _input_problems(value, spec)


def _signature(value: ModelInput) -> str:
    """Return dtype and shape of an input as far as they are known: ` (float32, [1, 3, n])`."""
    known = [value.dtype or "", "" if value.dims is None else _shape_text(value.dims)]
    text = ", ".join(part for part in known if part)
    return f" ({text})" if text else ""


def _input_problems(value: ModelInput, spec: TensorSpec | None) -> Iterator[InputProblem]:
    """Give what is wrong with one input of the model, and with the recipe's shape for it."""
    name = quoted(value.name)
    if not value.dtype:
        kind = "is not a tensor" if value.dtype is None else "has a dtype that is not supported"
        yield InputProblem(value.name, "", f"the model's input {name} {kind}")
        return
    if spec is not None and spec.dtype != value.dtype:
        text = f"input {name} has dtype {value.dtype}, not {spec.dtype}"
        yield InputProblem(value.name, "dtype", text)
    if text := _shape_problem(value, spec):
        yield InputProblem(value.name, "shape", text)


def _shape_problem(value: ModelInput, spec: TensorSpec | None) -> str:
    """Return why an input has no shape to compile for, or an empty string."""
    name = quoted(value.name)
    dims = value.dims or ()
    if 0 in dims:
        return f"input {name} has shape {_shape_text(dims)}, which is empty: export the model with another size"
    if spec is None:
        if value.dims is None:
            return f"input {name} has no fixed shape: set it in the recipe"
        free = [index for index, size in enumerate(dims) if _is_free(size)]
        if free:
            which = names_text([str(index) for index in free])
            return f"input {name} has no fixed shape: it is {_shape_text(dims)}; set the size of dimension {which} in the recipe"
        sizes = [int(size) for size in dims]
        if math.prod(sizes) > MAX_ELEMENTS:
            return f"input {name} has shape {_shape_text(dims)}, which has more than 2^31 elements"
        return ""
    fits = len(dims) == len(spec.shape) and all(
        _is_free(size) or size == new for size, new in zip(dims, spec.shape, strict=True)
    )
    if value.dims is not None and not fits:
        return f"input {name} has shape {_shape_text(dims)}, which {list(spec.shape)} does not fit"
    return ""


def _is_free(size: int | str) -> bool:
    """Return whether a recipe chooses a size. ONNX Runtime, too, takes a negative one for unknown."""
    return isinstance(size, str) or size < 0


def _shape_text(dims: Sequence[int | str]) -> str:
    sizes = [quoted(size or "?") if isinstance(size, str) else str(size) for size in dims]
    return f"[{names_text(sizes, 32)}]"
