"""The dtypes that an input of an ONNX model can have. Imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.frontends.base import ModelInput, unsupported_dtype

_ELEMENT_TYPES: Final[Mapping[int, str]] = {
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

_OTHER_TYPES: Final[Mapping[int, str]] = {
    8: "string",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8e4m3fn",
    18: "float8e4m3fnuz",
    19: "float8e5m2",
    20: "float8e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4e2m1",
    24: "float8e8m0",
    25: "uint2",
    26: "int2",
}
"""The dtype of each number that an input cannot have, as ONNX names it."""

NARROW_TYPES: Final = frozenset(range(17, 27))
"""The numbers of float8, and of the types of less than a byte."""


def name_of(element_type: int) -> str:
    """Return the name of an element type."""
    known = {**_ELEMENT_TYPES, **_OTHER_TYPES}
    return known.get(element_type, f"number {element_type} of ONNX")


def model_input(
    name: str, element_type: int | None, dims: tuple[int | str, ...] | None, *, is_required: bool
) -> ModelInput:
    """Return an input of a graph.

    Args:
        name: Its name.
        element_type: The number of its dtype; None for one that is not a tensor.
        dims: Fixed sizes, and names of free dimensions; None without a shape.
        is_required: False for one that an initializer gives a default.
    """
    dtype = _ELEMENT_TYPES.get(element_type or 0)
    problem = "is not a tensor"
    if element_type is not None:
        problem = unsupported_dtype(name_of(element_type))
    return ModelInput(name, dtype, dims, is_required, "" if dtype else problem)
