"""`kernels`: how operators become kernels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tvmflow.compiler.options import Precision
from tvmflow.compiler.passes import OPERATORS
from tvmflow.core.schema import ClosedModel, one_of, schema_enum

_Operator = Annotated[
    str, one_of(OPERATORS, "an operator with a blocked layout"), schema_enum(sorted(OPERATORS))
]


Runtime = Literal["auto", "c", "vm"]
"""What executes a library: C code that is part of it, TVM's virtual machine, or whatever the model allows."""


class Kernels(ClosedModel):
    """The way from operators to kernels. Everything except `precision` is for CPUs; the defaults are the fastest, the other values are for comparison."""

    precision: Precision = Field(
        default="model",
        description="`model`: the types of the model. `mixed`: the weights of convolutions and matrix multiplications are "
        "float16, and on a GPU also the data that they are multiplied with; accumulation, inputs and outputs keep "
        "their types. `bfloat16`: weights and data of convolutions and matrix multiplications are rounded to bfloat16, and "
        "accumulated in float32, on CPUs with instructions for that. See [precision.md](precision.md).",
    )
    layout: Literal["blocked", "plain"] = Field(
        default="blocked",
        description="`blocked`: convolutions, and the operators between them, use the layout `NCHW[x]c`, where x is the "
        "vector length of the target. `plain`: they use the layout of the model.",
    )
    weights: Literal["packed", "plain"] = Field(
        default="packed",
        description="`packed`: the weights of matrix multiplications are stored in columns of one vector each when the "
        "library is built. `plain`: they are stored as in the model.",
    )
    plain: list[_Operator] = Field(
        default=[],
        description="Operators that keep the layout and weights of the model, whatever `layout` and `weights` say.",
    )
    winograd: Literal[0, 2, 4] = Field(
        default=2,
        description="Tile size of the Winograd algorithm, for blocked 3×3 convolutions with stride 1. `2`: as accurate as "
        "the direct computation. `4`: faster for large images, and five times less accurate. `0`: computed directly.",
    )
    math: Literal["vector", "libm"] = Field(
        default="vector",
        description="`vector`: exp, log, sigmoid, tanh, erf, sin and cos are computed with vector instructions, accurate to "
        "8 units in the last place; sin and cos of numbers below 2³¹. `libm`: the C library is called.",
    )
    vector_bits: Literal[128, 256, 512] | None = Field(
        default=None,
        description="Width of vectors in bits, at most the widest of the target. Default: the width with which the model's "
        "convolutions and matrix products take the fewest operations, which is narrow for few channels.",
    )
    schedules: Literal["rules", "none"] = Field(
        default="rules",
        description="`rules`: untuned kernels get a schedule that is chosen from their shapes and the target. `none`: "
        "untuned kernels get no schedule, and are slow.",
    )
