"""Depthwise convolutions of quantized data."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.blocked import Sizes


def depthwise_conv(
    x: Any, w: Any, strides: Sizes, padding: Sizes, dilation: Sizes, zero: Any
) -> Any:
    """Return a depthwise convolution of data minus their zero point.

    It is computed in float32, whose sums are exact up to 2²⁴: more than 500 products.

    Args:
        x: Data of bytes (n, c/b, …, b).
        w: Weights (m·c/b, …, b), for m results of each channel block.
        strides: Along each spatial axis.
        padding: Before and after each spatial axis.
        dilation: Along each spatial axis.
        zero: The zero point of the data, a number or an expression.

    Returns:
        The sums (n, m·c/b, …, b) of float32.
    """
    zero_point = tirx.const(zero, "int32") if isinstance(zero, int) else zero.astype("int32")
    widened = te.compute(
        x.shape,
        lambda *index: (x(*index).astype("int32") - zero_point).astype("float32"),
        name="widened",
        tag="elemwise",
    )
    return blocked.depthwise_conv(widened, w, strides, padding, dilation)
