"""Convolutions of quantized data on blocked layouts, with dot product instructions where the CPU has them."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import blocked, integer
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.quantization import (
    QuantizedData,
    find_integer_weights,
    scale_sums,
    to_dot_data,
)


def rewrite_conv2d(
    rewriter: LayoutRewriter,
    call: relax.Call,
    data: QuantizedData,
    window: tuple[Any, ...],
) -> Any:
    """Emit a convolution of integers.

    Args:
        rewriter: The rewriter.
        call: The convolution of float32; each of its groups fills blocks.
        data: The integers from which its data were converted.
        window: Strides, padding and dilation.

    Returns:
        The blocked result, without the scale of the weights.
    """
    x, lanes = _block_data(rewriter, data.integers)
    x, zero = to_dot_data(rewriter, x, data.zero_point, rewriter.context.dot_dtype)
    source = find_integer_weights(rewriter.flow, call.args[1])
    assert source is not None, "the weights were converted from int8"
    integers = rewriter.visit_expr(source.call.args[0])
    weights = rewriter.pad_to_multiples(integers, [rewriter.block, lanes])
    packed = _pack_kernel(rewriter, weights, lanes)
    groups = int(call.attrs.groups)
    name = "quantized_conv2d_NCHWc"
    sums = rewriter.kernel(integer.conv2d, name, x, packed, *window, groups, zero)
    shape = [1, -1, 1, 1, rewriter.block]
    return scale_sums(rewriter, sums, weights, [1, 2, 3], shape, data._replace(zero_point=zero))


def rewrite_depthwise_conv2d(
    rewriter: LayoutRewriter, data: QuantizedData, weights: Any, window: tuple[Any, ...]
) -> Any:
    """Emit a depthwise convolution of integers, computed in float32; return it without the scale of the weights."""
    x, name = rewriter.to_blocked(data.integers), "quantized_depthwise_conv2d_NCHWc"
    sums = rewriter.kernel(integer.depthwise_conv2d, name, x, weights, *window, data.zero_point)
    return rewriter.emit(relax.op.multiply(sums, relax.const(data.scale, "float32")))


def _block_data(rewriter: LayoutRewriter, integers: Any) -> tuple[Any, int]:
    """Return blocked data and the channels of their blocks, which are few for few channels."""
    channels = ir.known_shape(integers)[1]
    if channels > rewriter.block // 2 or rewriter.blocked_form(integers) is not None:
        return rewriter.to_blocked(integers), rewriter.block
    lanes = channels + -channels % integer.DOT
    return rewriter.kernel(blocked.pack, "pack", integers, lanes, pattern=None), lanes


def _pack_kernel(rewriter: LayoutRewriter, weights: Any, lanes: int) -> Any:
    """Emit weights OIHW as (o/b, i/lanes, h, w, lanes/4 of i, b of o, 4 of i)."""
    block, dot = rewriter.block, integer.DOT
    o, i, height, width = ir.known_shape(weights)
    split = [o // block, block, i // lanes, lanes // dot, dot, height, width]
    return rewriter.rearrange(weights, split, [0, 2, 5, 6, 3, 1, 4])
