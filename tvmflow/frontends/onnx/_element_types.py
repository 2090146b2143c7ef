"""The dtypes that an input of an ONNX model can have. Imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.frontends._base import ModelInput

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
    problem = "is not a tensor" if element_type is None else "has a dtype that is not supported"
    return ModelInput(name, dtype, dims, is_required, "" if dtype else problem)
