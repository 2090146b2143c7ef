"""Convolutions on blocked layouts: direct, depthwise, and Winograd."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import blocked, winograd
from tvmflow.compiler.passes._rewriter import OPAQUE
from tvmflow.compiler.passes.blocked_layout import integer_convolutions
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.quantization import (
    QuantizedData,
    find_quantized_data,
    integer_weight_dtype,
)

_log = logging.getLogger(__name__)


class Window(NamedTuple):
    """The movement of a convolution's kernel over data: strides and dilation down and across, padding top, left, bottom, right."""

    strides: list[int]
    padding: list[int]
    dilation: list[int]

    @classmethod
    def of(cls, call: relax.Call) -> Window:
        """Return the window of a convolution."""
        names = ("strides", "padding", "dilation")
        return cls(*([int(n) for n in getattr(call.attrs, name)] for name in names))


def rewrite_conv2d(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any
) -> relax.Expr | None:
    """Rewrite a convolution; a grouped one only if the channels of each group fill blocks."""
    window = Window.of(call)
    if not is_supported(rewriter, call, "OIHW"):
        return None
    dtype = integer_weight_dtype(rewriter.flow, call.args[1]) or rewriter.context.weight_dtype
    quantized = _find_quantized_data(rewriter, call)
    if ir.is_depthwise(call):
        weights = rewriter.cast(_pack_depthwise_kernel(rewriter, kernel), dtype)
        if quantized is not None:
            return integer_convolutions.rewrite_depthwise_conv2d(
                rewriter, quantized, weights, window
            )
        x, name = rewriter.to_blocked(data), "depthwise_conv2d_NCHWc"
        return rewriter.kernel(blocked.depthwise_conv2d, name, x, weights, *window)
    if not has_full_groups(rewriter, call):
        return None
    if quantized is not None:
        return integer_convolutions.rewrite_conv2d(rewriter, call, quantized, window)
    x, lanes = block_data(rewriter, data)
    if lanes > 1 and _is_winograd(rewriter, call, window):
        return _emit_winograd(rewriter, call, x, kernel, window)
    weights = rewriter.cast(_pack_kernel(rewriter, kernel, lanes), dtype)
    groups = int(call.attrs.groups)
    return rewriter.kernel(blocked.conv2d, "conv2d_NCHWc", x, weights, *window, groups)


def _find_quantized_data(rewriter: LayoutRewriter, call: relax.Call) -> QuantizedData | None:
    """Return the integers that were converted to the data of a convolution with int8 weights, where the CPU has dot products."""
    if not rewriter.context.has_dot_products() or not integer_weight_dtype(
        rewriter.flow, call.args[1]
    ):
        return None
    quantized = find_quantized_data(rewriter.flow, call.args[0])
    if quantized is None:
        return None
    integers = ir.resolve_alias(rewriter.visit_expr(quantized.integers), rewriter.lookup_binding)
    return quantized._replace(integers=integers)


def is_supported(rewriter: LayoutRewriter, call: relax.Call, kernel_layout: str) -> bool:
    """Return whether a convolution of float32 has static shapes, the frontends' layouts, and weights."""
    return (
        all(ir.shape_of(argument) is not None for argument in call.args)
        and not rewriter.context.is_plain(ir.convolution_kind(call))
        and rewriter.flow.is_weight(call.args[1])
        and ir.layouts_of(call) == ("NCHW", kernel_layout, "NCHW")
        and ir.is_float32(call.args[0])
    )


def has_full_groups(rewriter: LayoutRewriter, call: relax.Call) -> bool:
    """Return whether the channels of each group fill blocks, or there is one group."""
    groups = int(call.attrs.groups)
    channels = [ir.known_shape(expr)[1] // groups for expr in (call, call.args[0])]
    return groups == 1 or not any(count % rewriter.block for count in channels)


def block_data(rewriter: LayoutRewriter, data: Any) -> tuple[Any, int]:
    """Return a convolution's data and their lanes: 1 for data that stay plain because they have few channels."""
    if ir.known_shape(data)[1] <= rewriter.block // 2 and rewriter.blocked_form(data) is None:
        return data, 1
    return rewriter.to_blocked(data), rewriter.block


def _pack_depthwise_kernel(rewriter: LayoutRewriter, kernel: Any) -> Any:
    """Emit weights (o, 1, h, w) as (o/b, h, w, b)."""
    block = rewriter.block
    kernel = rewriter.pad_to_multiples(kernel, [block])
    outer, _, height, width = ir.known_shape(kernel)
    return rewriter.rearrange(kernel, [outer // block, block, height, width], [0, 2, 3, 1])


def _pack_kernel(rewriter: LayoutRewriter, kernel: Any, lanes: int) -> Any:
    """Emit weights OIHW as (o/b, i/lanes, h, w, lanes of i, b of o); without the axis of lanes if there is one."""
    block = rewriter.block
    kernel = rewriter.pad_to_multiples(kernel, [block, lanes])
    o, i, height, width = ir.known_shape(kernel)
    if lanes == 1:
        return rewriter.rearrange(kernel, [o // block, block, i, height, width], [0, 2, 3, 4, 1])
    split = [o // block, block, i // lanes, lanes, height, width]
    return rewriter.rearrange(kernel, split, [0, 2, 4, 5, 3, 1])


def _is_winograd(rewriter: LayoutRewriter, call: relax.Call, window: Window) -> bool:
    """Return whether a convolution has the kernel of the transforms, and they are profitable."""
    tile = rewriter.context.options.winograd
    out, inner, *kernel = ir.known_shape(call.args[1])
    n, _, *size = ir.known_shape(call)
    is_supported_window = (kernel, window.strides, window.dilation) == ([3, 3], [1, 1], [1, 1])
    if not tile or not is_supported_window or int(call.attrs.groups) != 1:
        return False
    is_profitable = winograd.is_profitable(tile, out, inner, (n, *size), rewriter.block)
    _log.debug("%d to %d channels of %s: use Winograd: %s", inner, out, size, is_profitable)
    return is_profitable


def _emit_winograd(
    rewriter: LayoutRewriter, call: relax.Call, x: Any, kernel: Any, window: Window
) -> Any:
    n, _, *result_size = ir.known_shape(call)
    block, tile = rewriter.block, rewriter.context.options.winograd
    kernel = rewriter.pad_to_multiples(kernel, [block, block])
    o, i = ir.known_shape(kernel)[:2]
    matrix = winograd.TRANSFORMS[tile].weights.astype("float32")
    size = len(matrix)
    left = rewriter.emit(relax.op.matmul(relax.const(matrix), kernel))
    both = rewriter.emit(relax.op.matmul(left, relax.const(matrix.T.copy())))
    split = [o // block, block, i // block, block, size, size]
    weights = rewriter.rearrange(both, split, [4, 5, 0, 2, 3, 1])
    weights = rewriter.cast(weights, rewriter.context.weight_dtype)
    names = [f"{name}_NCHWc" for name in (winograd.DATA, winograd.PRODUCT, winograd.IMAGE)]
    arguments = (x, tile, window.padding)
    data = rewriter.kernel(winograd.transform_data, names[0], *arguments, pattern=OPAQUE)
    product = rewriter.kernel(winograd.multiply, names[1], data, weights, pattern=OPAQUE)
    shape = (n, *result_size)
    return rewriter.kernel(winograd.transform_product, names[2], product, tile, shape)
