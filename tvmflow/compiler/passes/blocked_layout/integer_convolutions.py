"""Convolutions of quantized data on blocked layouts, with dot product instructions where the CPU has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import dot_products, integer
from tvmflow.compiler.operators.blocked import Groups, Sizes
from tvmflow.compiler.operators.dot_products import INTEGERS
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.quantization import (
    QuantizedData,
    find_quantized_data,
    integer_weight_dtype,
    scale_sums,
    to_dot_data,
)


def find_data(rewriter: LayoutRewriter, call: relax.Call) -> QuantizedData | None:
    """Return the integers from which the data of a convolution with int8 weights were converted; None without dot products."""
    if not rewriter.context.has_dot_products():
        return None
    quantized = find_quantized_data(rewriter.flow, call.args[0])
    if quantized is None or not integer_weight_dtype(rewriter.flow, call.args[1]):
        return None
    data = quantized.visit(rewriter)
    return data._replace(integers=ir.resolve_alias(data.integers, rewriter.lookup_binding))


def block_data(rewriter: LayoutRewriter, integers: Any) -> tuple[Any, int]:
    """Return blocked integers and the channels of their blocks, which are few for few channels."""
    channels = ir.known_shape(integers)[1]
    if channels > rewriter.block // 2 or rewriter.blocked_form(integers) is not None:
        return rewriter.to_blocked(integers), rewriter.block
    lanes = channels + -channels % INTEGERS.terms
    return rewriter.pack(integers, lanes), lanes


def emit(
    rewriter: LayoutRewriter,
    data: QuantizedData,
    kernel: Any,
    packed: Any,
    window: tuple[Sizes, Sizes, Sizes],
    groups: Groups,
    name: str,
) -> Any:
    """Emit a convolution of integers.

    Args:
        rewriter: The rewriter.
        data: Blocked integers, with the scale and the zero point of the data.
        kernel: Integral weights (o, i of a group, …).
        packed: The same as (o/b, blocks of data, …, lanes of i, b of o).
        window: Strides, padding and dilation.
        groups: The blocks of data that each block of the result reads.
        name: The name of the kernel of a convolution of floats.

    Returns:
        The blocked result, without the scale of the weights.
    """
    data = to_dot_data(rewriter, data, rewriter.context.dot_dtype)
    *outer, _, block = ir.known_shape(packed)
    weights = rewriter.cast(rewriter.split_terms(packed, INTEGERS.terms), "int8")
    sums = _emit_sums(
        rewriter,
        lambda x, w, zero: dot_products.conv(INTEGERS, x, w, *window, groups, zero),
        f"quantized_{name}",
        data,
        weights,
    )
    totals = rewriter.pad_to_multiples(kernel, [block])
    shape = [1, -1, *[1] * (len(outer) - 2), block]
    return scale_sums(rewriter, sums, totals, shape, data)


def emit_depthwise(
    rewriter: LayoutRewriter,
    data: QuantizedData,
    weights: Any,
    window: tuple[Sizes, Sizes, Sizes],
    name: str,
) -> Any:
    """Emit a depthwise convolution of integers, computed in float32; return it without the scale of the weights."""
    sums = _emit_sums(
        rewriter,
        lambda x, w, zero: integer.depthwise_conv(x, w, *window, zero),
        f"quantized_depthwise_{name}",
        data,
        weights,
    )
    return rewriter.emit(relax.op.multiply(sums, relax.const(data.scale, "float32")))


def _emit_sums(
    rewriter: LayoutRewriter,
    operator: Callable[[Any, Any, Any], Any],
    name: str,
    data: QuantizedData,
    weights: Any,
) -> Any:
    """Emit a kernel of data, weights and the zero point of the data: a number in it, or one of its inputs."""
    zero, tensors = data.zero_point, (data.integers, weights)
    if isinstance(zero, int):
        return rewriter.kernel(lambda x, w: operator(x, w, zero), name, *tensors)
    return rewriter.kernel(lambda x, w, scalar: operator(x, w, scalar()), name, *tensors, zero)
