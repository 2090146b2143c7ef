"""A node of an ONNX model that a converter of tvmflow's turns into Relax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler.ir import dtype_of
from tvmflow.compiler.open_sizes import plain
from tvmflow.compiler.tir_kernels.resize import Interpolation
from tvmflow.frontends.onnx.graph import attribute_text


class NodeToConvert(NamedTuple):
    """A node to convert.

    Attributes:
        builder: The builder of the model.
        inputs: The operands; None for missing ones.
        attributes: The attributes; strings are bytes.
        opset: The version of the operator set.
        convert_by_tvm: Converts the node as TVM does, with other operands.
        counts_rows: Whether a number of rows that is known only when the model runs is a count, and no size.
    """

    builder: relax.BlockBuilder
    inputs: Sequence[Any]
    attributes: Mapping[str, Any]
    opset: int
    convert_by_tvm: Callable[[Sequence[Any]], Any]
    counts_rows: bool = True

    def emit(self, expr: Any) -> Any:
        """Return an expression with a type."""
        return self.builder.normalize(expr)


Converter = Callable[[NodeToConvert], Any]

_METHODS: Final = {"nearest": "nearest_neighbor", "linear": "linear", "cubic": "cubic"}


def read_interpolation(attributes: Mapping[str, Any]) -> Interpolation:
    """Return how a Resize finds the values of pixels."""
    return Interpolation(
        method=_METHODS[attribute_text(attributes, "mode", "nearest")],
        coordinates=attribute_text(attributes, "coordinate_transformation_mode", "half_pixel"),
        rounding=attribute_text(attributes, "nearest_mode", "round_prefer_floor"),
        cubic_alpha=float(attributes.get("cubic_coeff_a", -0.75)),
        excludes_outside=bool(attributes.get("exclude_outside", 0)),
    )


def constant(value: float, like: Any) -> Any:
    return relax.const(value, dtype_of(like))


def is_float(expr: Any) -> bool:
    return "float" in dtype_of(expr)


def list_sizes(expr: Any) -> list[Any]:
    """Return the sizes of a tensor: ints where they are fixed."""
    return [plain(extent) for extent in expr.ty.shape]


def known_array(expr: Any, name: str) -> np.ndarray[Any, Any]:
    """Return the value of a constant operand."""
    if not isinstance(expr, tvm.ir.Constant):
        raise ValueError(f"{name} depends on the inputs, which is not supported")
    return np.asarray(expr.value.numpy())
