"""Transposed convolutions on blocked layouts.

A transposed convolution with strides (s, t) is computed as a convolution that gives the s·t
pixels between two pixels of its data as channels of one pixel, which are then interleaved:
rows s·q to s·q + s − 1 of the result read the same ⌈k/s⌉ rows of data, each with other rows
of the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import blocked
from tvmflow.compiler.passes.blocked_layout import convolutions
from tvmflow.compiler.passes.blocked_layout.convolutions import Window
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter


class _Geometry(NamedTuple):
    """The convolution behind a transposed one, down and across.

    Attributes:
        strides: The strides of the transposed convolution.
        kernel: The size of the convolution's kernel.
        padding: Its padding: top, left, bottom, right.
        rows: The size of its result.
        offsets: How many pixels of the interleaved image to skip.
    """

    strides: list[int]
    kernel: list[int]
    padding: list[int]
    rows: list[int]
    offsets: list[int]


def rewrite_conv2d_transpose(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any
) -> relax.Expr | None:
    """Rewrite a transposed convolution without dilation; a grouped one only if its groups fill blocks."""
    window = Window.of(call)
    if not convolutions.is_supported(rewriter, call, "IOHW") or window.dilation != [1, 1]:
        return None
    size = list(ir.known_shape(call)[2:])
    geometry = _analyze(ir.known_shape(data)[2:], ir.known_shape(kernel)[2:], size, window)
    inner_window = Window([1, 1], geometry.padding, [1, 1])
    groups, dtype = int(call.attrs.groups), rewriter.context.weight_dtype
    if ir.is_depthwise(call):
        weights = rewriter.cast(_pack_depthwise_kernel(rewriter, kernel, geometry), dtype)
        x, name = rewriter.to_blocked(data), "depthwise_conv2d_transpose_NCHWc"
        pixels = rewriter.kernel(blocked.depthwise_conv2d, name, x, weights, *inner_window)
    elif convolutions.has_full_groups(rewriter, call):
        x, lanes = convolutions.block_data(rewriter, data)
        weights = rewriter.cast(_pack_kernel(rewriter, kernel, geometry, groups, lanes), dtype)
        name = "conv2d_transpose_NCHWc"
        pixels = rewriter.kernel(blocked.conv2d, name, x, weights, *inner_window, groups)
    else:
        return None
    if window.strides == [1, 1] and not any(geometry.offsets) and geometry.rows == size:
        return pixels
    arguments = (pixels, window.strides, geometry.offsets, size)
    return rewriter.kernel(blocked.interleave, "interleave", *arguments, pattern=None)


def _analyze(
    data: tuple[int, ...], kernel: tuple[int, ...], result: list[int], window: Window
) -> _Geometry:
    """Return the convolution behind a transposed one; all sizes are down and across."""
    axes = []
    # The padding at the bottom and at the right is in the size of the result.
    sizes = zip(data, kernel, result, window.strides, window.padding[:2], strict=True)
    for size, edge, out, step, pad in sizes:
        length = -(-edge // step)
        # Padding of whole strides only skips rows of data.
        skipped = min(pad // step, length - 1)
        offset = pad - skipped * step
        count = max(-(-(out + offset) // step), size - skipped)
        axes.append((length, length - 1 - skipped, count - size + skipped, count, offset))
    inner_kernel, before, after, rows, offsets = map(list, zip(*axes, strict=True))
    return _Geometry(window.strides, inner_kernel, before + after, rows, offsets)


def _pack_depthwise_kernel(rewriter: LayoutRewriter, kernel: Any, geometry: _Geometry) -> Any:
    """Emit weights (i, 1, h, w) as those of the inner depthwise convolution: (i/b·s·t, h, w, b).

    The kernel is flipped: a transposed convolution scatters what a convolution gathers.
    """
    block, (s, t), (h, w) = rewriter.block, geometry.strides, geometry.kernel
    kernel = rewriter.pad_to_multiples(kernel, [block, 1, s * h, t * w])
    blocks = ir.known_shape(kernel)[0] // block
    split = rewriter.rearrange(kernel, [blocks, block, h, s, w, t], [0, 3, 5, 2, 4, 1], (2, 4))
    return rewriter.reshape(split, [blocks * s * t, h, w, block])


def _pack_kernel(
    rewriter: LayoutRewriter, kernel: Any, geometry: _Geometry, groups: int, lanes: int
) -> Any:
    """Emit weights IOHW as those of the inner convolution: (o/b·s·t, i/lanes, h, w, lanes of i, b of o).

    The kernel is flipped, as for a depthwise convolution. The axis of lanes is missing if there is one.
    """
    block, (s, t), (h, w) = rewriter.block, geometry.strides, geometry.kernel
    kernel = rewriter.pad_to_multiples(kernel, [lanes, block, s * h, t * w])
    i, o = ir.known_shape(kernel)[:2]
    i, o = i // groups // lanes, o // block
    split = [groups, i, lanes, o, block, h, s, w, t]
    packed = rewriter.rearrange(kernel, split, [0, 3, 6, 8, 1, 5, 7, 2, 4], (5, 7))
    inner = [lanes, block] if lanes > 1 else [block]
    return rewriter.reshape(packed, [groups * o * s * t, i, h, w, *inner])
