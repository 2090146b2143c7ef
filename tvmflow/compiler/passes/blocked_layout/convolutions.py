"""Convolutions on blocked layouts: direct, depthwise, and Winograd."""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import blocked, winograd
from tvmflow.compiler.operators.blocked import Groups
from tvmflow.compiler.operators.winograd import Geometry
from tvmflow.compiler.passes.blocked_layout import (
    direct_convolutions,
    few_channels,
    integer_convolutions,
    taps,
)
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.blocked_layout.taps import Image, Window
from tvmflow.compiler.passes.quantization import integer_weight_dtype

_log = logging.getLogger(__name__)

# The share of a direct convolution's time that one of Winograd's takes.
_WINOGRAD_SHARE: Final = 0.5


def rewrite_conv(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any
) -> relax.Expr | None:
    """Rewrite a convolution over sequences, images or volumes."""
    if not is_supported(rewriter, call, "OI"):
        return None
    window = Window.of(call)
    image = Image(ir.known_shape(data)[2:], ir.known_shape(call)[2:])
    kernel, window = taps.crop_kernel(rewriter, image, kernel, window)
    dtype = integer_weight_dtype(rewriter.flow, call.args[1]) or rewriter.context.weight_dtype
    quantized = integer_convolutions.find_data(rewriter, call)
    name = f"conv{len(window.strides)}d_NCHWc"
    groups = int(call.attrs.groups)
    inputs, outputs = (ir.known_shape(expr)[1] for expr in (data, call))
    if ir.is_depthwise(call) or (
        inputs == groups and not direct_convolutions.is_plain_data(rewriter, data)
    ):
        x = rewriter.to_blocked(data if quantized is None else quantized.integers)
        x = _repeat(rewriter, x, inputs, outputs // groups)
        weights = rewriter.cast(pack_depthwise_kernel(rewriter, kernel), dtype)
        if quantized is not None:
            quantized = quantized._replace(integers=x)
            return integer_convolutions.emit_depthwise(rewriter, quantized, weights, window, name)
        return rewriter.kernel(
            lambda x, w: blocked.depthwise_conv(x, w, *window), f"depthwise_{name}", x, weights
        )
    if quantized is not None:
        x, lanes = integer_convolutions.block_data(rewriter, quantized.integers)
        reads = Groups(inputs // groups, outputs // groups, lanes, rewriter.block, groups)
        packed = pack_kernel(rewriter, kernel, reads)
        quantized = quantized._replace(integers=x)
        return integer_convolutions.emit(rewriter, quantized, kernel, packed, window, reads, name)
    return _emit_convolution(rewriter, call, data, kernel, window, dtype)


def _emit_convolution(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any, window: Window, dtype: str
) -> Any:
    """Emit a convolution that is neither quantized nor depthwise."""
    image = Image(ir.known_shape(data)[2:], ir.known_shape(call)[2:])
    groups, name = int(call.attrs.groups), f"conv{len(window.strides)}d_NCHWc"
    x, lanes = direct_convolutions.block_data(rewriter, data, dtype)
    terms = direct_convolutions.count_terms(rewriter, dtype)
    geometry = (
        _find_winograd(rewriter, call, kernel, window, terms) if lanes == rewriter.block else None
    )
    shape = ir.known_shape(kernel)
    share = _WINOGRAD_SHARE if geometry is not None else 1.0
    phases = None
    if groups == terms == 1 and dtype == rewriter.context.weight_dtype:
        phases = few_channels.choose_phases(image, shape, window, rewriter.block, share)

    def emit_direct(kernel: Any, window: Window, image: Image | None = None) -> Any:
        outputs, inputs = ir.known_shape(kernel)[:2]
        reads = Groups(inputs, outputs // groups, lanes, rewriter.block, groups)
        packed = pack_kernel(rewriter, kernel, reads)
        return direct_convolutions.emit(rewriter, name, x, packed, window, reads, dtype, image)

    if phases is not None:
        pixels = emit_direct(*few_channels.pad_kernel(rewriter, kernel, window, image, phases))
        places = (pixels, shape[0], phases, [0] * len(phases), image.result)
        return rewriter.kernel(blocked.interleave_channels, "interleave", *places, pattern=None)
    if geometry is not None:
        return _emit_winograd(rewriter, name, x, kernel, geometry)
    return emit_direct(kernel, window, image)


def is_supported(rewriter: LayoutRewriter, call: relax.Call, kernel: str) -> bool:
    """Return whether a convolution of float32 has static shapes, the frontends' layouts (`kernel` names the first axes of its weights), and weights."""
    return (
        all(ir.shape_of(argument) is not None for argument in call.args)
        and not rewriter.context.is_plain(ir.convolution_kind(call))
        and rewriter.flow.is_weight(call.args[1])
        and ir.has_default_layouts(call, kernel)
        and ir.is_float32(call.args[0])
    )


def pack_depthwise_kernel(rewriter: LayoutRewriter, kernel: Any) -> Any:
    """Emit weights (o, 1, …) as (o/b, …, b)."""
    block = rewriter.block
    kernel = rewriter.pad_to_multiples(kernel, [block])
    outer, _, *size = ir.known_shape(kernel)
    last = [*range(2, 2 + len(size)), 1]
    return rewriter.rearrange(kernel, [outer // block, block, *size], [0, *last])


def pack_kernel(rewriter: LayoutRewriter, kernel: Any, groups: Groups) -> Any:
    """Emit weights (o, i of a group, …) as (o/b, blocks of data, …, lanes of i, b of o); without the axis of lanes if there is one.

    A block of the result may belong to several groups: the weights of data of other groups are 0.
    """
    block, lanes, width = groups.block, groups.lanes, groups.width
    is_one_group = groups.number == 1 and ir.known_shape(kernel)[0] <= groups.outputs
    kernel = rewriter.pad_to_multiples(kernel, [block, 1])
    o, i, *size = ir.known_shape(kernel)
    blocks = o // block
    if is_one_group:
        spread = rewriter.pad_to_multiples(kernel, [1, width * lanes])
    else:
        kernel = rewriter.pad_to_multiples(kernel, [1, i + 1])
        rows = rewriter.reshape(kernel, [o * (i + 1), *size])
        spread = rewriter.take(rows, _list_weight_rows(groups, blocks), 0)
    inner = [width, lanes] if lanes > 1 else [width]
    split = rewriter.reshape(spread, [blocks, block, *inner, *size])
    first_tap = 2 + len(inner)
    order = [0, 2, *range(first_tap, first_tap + len(size)), *range(3, first_tap), 1]
    return rewriter.emit(relax.op.permute_dims(split, order))


def _list_weight_rows(groups: Groups, blocks: int) -> list[int]:
    """Return, for each output channel and each channel of data that its block reads, the row of its weights.

    Output channel `o` has `inputs` rows from `o·(inputs + 1)`, followed by a row of zeros.
    """
    o = np.arange(blocks * groups.block)
    starts = np.array([groups.first_block(block * groups.phases) for block in range(blocks)])
    channel = (
        np.arange(groups.width * groups.lanes) + groups.lanes * starts[o // groups.block][:, None]
    )
    offset = channel - (o // groups.outputs * groups.inputs)[:, None]
    is_own = (offset >= 0) & (offset < groups.inputs)
    rows = o[:, None] * (groups.inputs + 1) + np.where(is_own, offset, groups.inputs)
    listed: list[int] = rows.ravel().tolist()
    return listed


def _repeat(rewriter: LayoutRewriter, x: Any, channels: int, times: int) -> Any:
    """Emit blocked data with each channel `times` times."""
    if times == 1:
        return x
    return rewriter.kernel(
        lambda x: blocked.repeat_channels(x, channels, times), "repeat_channels", x, pattern=None
    )


def _find_winograd(
    rewriter: LayoutRewriter, call: relax.Call, kernel: Any, window: Window, terms: int
) -> Geometry | None:
    """Return the sizes of a Winograd convolution; None where it is not possible or not profitable.

    An instruction of the direct convolution computes so many `terms` of each result.
    """
    tile = rewriter.context.options.winograd
    out, inner, *edges = ir.known_shape(kernel)
    n, _, *size = ir.known_shape(call)
    if (
        not tile
        or edges[-2:] != [3, 3]
        or not window.strides[-2:] == window.dilation[-2:] == [1, 1]
        or int(call.attrs.groups) != 1
        or min(window.padding) < 0
    ):
        return None
    depth, height, width = [1, *size][-3:]
    front, top, left = [0, *window.padding[: len(size)]][-3:]
    down = [[1, *values][-3] for values in (edges, window.strides, window.dilation)]
    geometry = Geometry(tile, (n, depth, height, width), (front, top, left), *down)
    is_profitable = winograd.is_profitable(geometry, out, inner, rewriter.block, terms)
    _log.debug("%d to %d channels of %s: use Winograd: %s", inner, out, size, is_profitable)
    if not is_profitable:
        return None
    cpu = rewriter.context.cpu
    assert cpu is not None, "layouts are blocked for a CPU model"
    return winograd.pad_columns(geometry, -(-out // rewriter.block), inner, cpu)


def _emit_winograd(
    rewriter: LayoutRewriter, name: str, x: Any, kernel: Any, geometry: Geometry
) -> Any:
    block, edge = rewriter.block, geometry.edge
    kernel = rewriter.pad_to_multiples(kernel, [block, block])
    o, i = ir.known_shape(kernel)[:2]
    matrix = winograd.TRANSFORMS[geometry.tile].weights.astype("float32")
    left = rewriter.emit(relax.op.matmul(relax.const(matrix), kernel))
    both = rewriter.emit(relax.op.matmul(left, relax.const(matrix.T.copy())))
    split = [o // block, block, i // block, block, geometry.taps, edge, edge]
    weights = rewriter.rearrange(both, split, [5, 6, 0, 4, 2, 3, 1])
    weights = rewriter.cast(weights, rewriter.context.weight_dtype)
    return rewriter.kernel(
        lambda x, w: winograd.conv(x, w, geometry), f"winograd_{name}", x, weights
    )
