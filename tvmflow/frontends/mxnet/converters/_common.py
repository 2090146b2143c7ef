"""Helpers of several converters."""

from __future__ import annotations

from typing import Final

from tvm import relax

from tvmflow.core.formatting import count_text
from tvmflow.frontends.mxnet._op import Expr, Op

R = relax.op


def broadcast_along(value: Expr, axis: int, rank: int) -> Expr:
    """Return a vector, reshaped so that it broadcasts along `axis` of `rank` dimensions."""
    others = [position for position in range(rank) if position != axis]
    return R.expand_dims(value, others) if others else value


_DATA_LAYOUTS: Final = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def spatial_rank(op: Op) -> int:
    """Return the number of spatial dimensions of the data, which must have the layout N C spatial."""
    dims = op.rank() - 2
    if dims not in _DATA_LAYOUTS:
        op.refuse(f"its data has {op.rank()} dimensions, 3 to 5 are supported")
    layout = _DATA_LAYOUTS[dims]
    op.require("layout", layout, f"data must be {layout}")
    return dims


def per_axis(op: Op, key: str, dims: int, default: int) -> tuple[int, ...]:
    """Return an attribute with one value for each spatial dimension; an empty tuple counts as not set."""
    values = op.integers(key, ()) or (default,) * dims
    if len(values) != dims:
        values_text = count_text(len(values), "value")
        op.refuse(f"{key} has {values_text}, but the data has {dims} spatial dimensions")
    return values


DTYPES: Final = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""The data types that an attribute can choose for a result."""


def first_input(op: Op) -> Expr:
    """Convert an operator that only copies its first input."""
    return op[0]


def identity(value: Expr) -> Expr:
    """Return the value itself."""
    return value
