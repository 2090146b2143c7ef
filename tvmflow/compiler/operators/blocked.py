"""Operators on blocked layouts: `NCHW[b]c` data, and weights whose last axis is one vector.

A blocked tensor of `c` channels has ⌈c/b⌉ blocks. The lanes beyond `c` hold what the
operators computed from zeros, and are multiplied with zero weights. Weights may have a
narrower dtype than the data, in whose dtype everything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx, topi

Pair = Sequence[int]


def pack(x: Any, block: int) -> Any:
    """Return data (n, c, h, w) as (n, ⌈c/b⌉, h, w, b), padded with zero channels."""
    n, channels, height, width = (int(extent) for extent in x.shape)
    blocks = -(-channels // block)

    def element(i: Any, outer: Any, y: Any, z: Any, inner: Any) -> Any:
        channel = outer * block + inner
        value = x[i, channel, y, z]
        if channels % block == 0:
            return value
        return tirx.if_then_else(channel < channels, value, tirx.const(0, x.dtype))

    return te.compute((n, blocks, height, width, block), element, name="pack", tag="injective")


def unpack(x: Any, channels: int) -> Any:
    """Return blocked data (n, ⌈c/b⌉, h, w, b) as (n, c, h, w)."""
    n, _, height, width, block = (int(extent) for extent in x.shape)
    return te.compute(
        (n, channels, height, width),
        lambda i, c, y, z: x[i, c // block, y, z, c % block],
        name="unpack",
        tag="injective",
    )


def conv2d(x: Any, w: Any, strides: Pair, padding: Pair, dilation: Pair, groups: int) -> Any:
    """Return a convolution with a blocked result.

    Args:
        x: Data (n, i/b, h, w, b), or plain (n, i, h, w).
        w: Weights (o/b, i/b of a group, kh, kw, b of i, b of o), or (o/b, i, kh, kw, b of o) for plain data.
        strides: Down and across.
        padding: Top, left, bottom, right.
        dilation: Down and across.
        groups: The number of groups.

    Returns:
        The result (n, o/b, h, w, b of o).
    """
    x = _pad(x, padding)
    blocks, _, height, width = (int(extent) for extent in w.shape[:4])
    group_inputs = int(w.shape[1])
    group_outputs = blocks // groups
    is_blocked = len(x.shape) == 5
    channel = te.reduce_axis((0, group_inputs), "ic")
    row, column = te.reduce_axis((0, height), "kh"), te.reduce_axis((0, width), "kw")
    lane = [te.reduce_axis((0, int(x.shape[4])), "ib")] if is_blocked else []

    def element(n: Any, o: Any, y: Any, z: Any, inner: Any) -> Any:
        source = channel if groups == 1 else (o // group_outputs) * group_inputs + channel
        pixel = (y * strides[0] + row * dilation[0], z * strides[1] + column * dilation[1])
        value = x(n, source, *pixel, *lane)
        weight = w(o, channel, row, column, *lane, inner).astype(x.dtype)
        return te.sum(value * weight, axis=[channel, row, column, *lane])

    shape = convolution_shape(x, (height, width), strides, dilation, blocks, int(w.shape[-1]))
    return te.compute(shape, element, name="conv2d")


def depthwise_conv2d(x: Any, w: Any, strides: Pair, padding: Pair, dilation: Pair) -> Any:
    """Return a depthwise convolution with a blocked result.

    Args:
        x: Data (n, c/b, h, w, b).
        w: Weights (m·c/b, kh, kw, b), for m results of each channel block.
        strides: Down and across.
        padding: Top, left, bottom, right.
        dilation: Down and across.

    Returns:
        The result (n, m·c/b, h, w, b).
    """
    x = _pad(x, padding)
    blocks, height, width, block = (int(extent) for extent in w.shape)
    multiplier = blocks // int(x.shape[1])
    row, column = te.reduce_axis((0, height), "kh"), te.reduce_axis((0, width), "kw")

    def element(n: Any, c: Any, y: Any, z: Any, inner: Any) -> Any:
        pixel = (y * strides[0] + row * dilation[0], z * strides[1] + column * dilation[1])
        source = c if multiplier == 1 else c // multiplier
        weight = w[c, row, column, inner].astype(x.dtype)
        return te.sum(x(n, source, *pixel, inner) * weight, axis=[row, column])

    shape = convolution_shape(x, (height, width), strides, dilation, blocks, block)
    return te.compute(shape, element, name="depthwise_conv2d")


def interleave(x: Any, strides: Pair, offsets: Pair, shape: Pair) -> Any:
    """Return channel blocks rearranged into an image: the periodic shuffling of Shi et al. 2016, arXiv:1609.05158.

    Args:
        x: Data (n, o·s·t, h, w, b); pixel (y, x) of the image comes from block (y mod s, x mod t).
        strides: s and t.
        offsets: How many pixels of the image to skip, from the top and from the left.
        shape: Height and width of the result.

    Returns:
        The image (n, o, height, width, b).
    """
    s, t = strides
    n, blocks, _, _, block = (int(extent) for extent in x.shape)

    def element(i: Any, o: Any, y: Any, z: Any, inner: Any) -> Any:
        y, z = y + offsets[0], z + offsets[1]
        return x[i, (o * s + y % s) * t + z % t, y // s, z // t, inner]

    return te.compute(
        (n, blocks // (s * t), *shape, block), element, name="interleave", tag="injective"
    )


def dense(x: Any, w: Any, columns: int) -> Any:
    """Return the product (…, columns) of a matrix (…, k) and packed weights (⌈columns/b⌉, k, b)."""
    *outer, depth = (int(extent) for extent in x.shape)
    block = int(w.shape[2])
    k = te.reduce_axis((0, depth), "k")

    def element(*index: Any) -> Any:
        *row, column = index
        weight = w[column // block, k, column % block].astype(x.dtype)
        return te.sum(x(*row, k) * weight, axis=[k])

    return te.compute((*outer, columns), element, name="dense")


def fake_quantize(x: Any, scale: float, low: int, high: int) -> Any:
    """Return `x` rounded to multiples of `scale` and clamped to [low·scale, high·scale]."""

    def element(*index: Any) -> Any:
        rounded = tirx.round(x(*index) / tirx.const(scale, x.dtype))
        lower, upper = tirx.const(low, x.dtype), tirx.const(high, x.dtype)
        return tirx.max(tirx.min(rounded, upper), lower) * tirx.const(scale, x.dtype)

    return te.compute(x.shape, element, name="rounded", tag="elemwise")


def _pad(x: Any, padding: Pair) -> Any:
    if not any(padding):
        return x
    top, left, bottom, right = padding
    rest = [0] * (len(x.shape) - 4)
    return topi.nn.pad(x, [0, 0, top, left, *rest], [0, 0, bottom, right, *rest], name="pad")


def convolution_shape(
    x: Any, kernel: Pair, strides: Pair, dilation: Pair, blocks: int, block: int
) -> tuple[int, ...]:
    """Return the shape of a convolution's result over data that are already padded."""
    extents = [int(extent) for extent in x.shape[2:4]]
    spatial = [
        (extent - (size - 1) * spacing - 1) // step + 1
        for extent, size, step, spacing in zip(extents, kernel, strides, dilation, strict=True)
    ]
    return (int(x.shape[0]), blocks, *spatial, block)
