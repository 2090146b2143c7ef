"""Operators on blocked layouts, as tensor expressions: NCHW[b]c data with weights whose last axis is a vector.

A blocked tensor of `c` channels has ⌈c/b⌉ blocks; the lanes beyond `c` hold whatever the
operators made of zeros, and meet weights that are zero. Weights may be kept in a narrower
dtype than the data's, in which everything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx, topi

Pair = Sequence[int]


def pack(x: Any, block: int) -> Any:
    """(n, c, h, w) as (n, ⌈c/b⌉, h, w, b), filled up with zeros."""
    n, channels, height, width = (int(extent) for extent in x.shape)
    blocks = -(-channels // block)

    def at(i: Any, outer: Any, y: Any, z: Any, inner: Any) -> Any:
        channel = outer * block + inner
        value = x[i, channel, y, z]
        if channels % block == 0:
            return value
        return tirx.if_then_else(channel < channels, value, tirx.const(0, x.dtype))

    return te.compute((n, blocks, height, width, block), at, name="pack", tag="injective")


def unpack(x: Any, channels: int) -> Any:
    """(n, ⌈c/b⌉, h, w, b) as (n, c, h, w)."""
    n, _, height, width, block = (int(extent) for extent in x.shape)
    return te.compute(
        (n, channels, height, width),
        lambda i, c, y, z: x[i, c // block, y, z, c % block],
        name="unpack",
        tag="injective",
    )


def conv2d(x: Any, w: Any, strides: Pair, padding: Pair, dilation: Pair, groups: int) -> Any:
    """A convolution with a blocked result.

    `x` is (n, i/b, h, w, b) with `w` (o/b, i/b per group, kh, kw, b of i, b of o), or plain
    (n, i, h, w) with `w` (o/b, i, kh, kw, b of o). `padding` is top, left, bottom, right.
    """
    x = _padded(x, padding)
    blocks, _, height, width = (int(extent) for extent in w.shape[:4])
    per_group = int(w.shape[1])
    share = blocks // groups
    is_blocked = len(x.shape) == 5
    channel = te.reduce_axis((0, per_group), "ic")
    row, column = te.reduce_axis((0, height), "kh"), te.reduce_axis((0, width), "kw")
    lane = [te.reduce_axis((0, int(x.shape[4])), "ib")] if is_blocked else []

    def at(n: Any, o: Any, y: Any, z: Any, inner: Any) -> Any:
        source = channel if groups == 1 else (o // share) * per_group + channel
        place = (y * strides[0] + row * dilation[0], z * strides[1] + column * dilation[1])
        value = x(n, source, *place, *lane)
        weight = w(o, channel, row, column, *lane, inner).astype(x.dtype)
        return te.sum(value * weight, axis=[channel, row, column, *lane])

    shape = _result_shape(x, (height, width), strides, dilation, blocks, int(w.shape[-1]))
    return te.compute(shape, at, name="conv2d")


def depthwise_conv2d(x: Any, w: Any, strides: Pair, padding: Pair, dilation: Pair) -> Any:
    """A convolution of each channel by itself: `x` is (n, c/b, h, w, b), `w` (m·c/b, kh, kw, b), for m results of each block."""
    x = _padded(x, padding)
    blocks, height, width, block = (int(extent) for extent in w.shape)
    share = blocks // int(x.shape[1])
    row, column = te.reduce_axis((0, height), "kh"), te.reduce_axis((0, width), "kw")

    def at(n: Any, c: Any, y: Any, z: Any, inner: Any) -> Any:
        place = (y * strides[0] + row * dilation[0], z * strides[1] + column * dilation[1])
        source = c if share == 1 else c // share
        weight = w[c, row, column, inner].astype(x.dtype)
        return te.sum(x(n, source, *place, inner) * weight, axis=[row, column])

    shape = _result_shape(x, (height, width), strides, dilation, blocks, block)
    return te.compute(shape, at, name="depthwise_conv2d")


def interleave(x: Any, strides: Pair, offsets: Pair, shape: Pair) -> Any:
    """Blocks (n, o·s·t, h, w, b) as one image (n, o, *shape, b): pixel (y, x) comes from block (y mod s, x mod t).

    The image begins `offsets` pixels in. This is the periodic shuffling of Shi et al. 2016, arXiv:1609.05158.
    """
    s, t = strides
    n, blocks, _, _, block = (int(extent) for extent in x.shape)

    def at(i: Any, o: Any, y: Any, z: Any, inner: Any) -> Any:
        y, z = y + offsets[0], z + offsets[1]
        return x[i, (o * s + y % s) * t + z % t, y // s, z // t, inner]

    return te.compute((n, blocks // (s * t), *shape, block), at, name="interleave", tag="injective")


def dense(x: Any, w: Any, columns: int) -> Any:
    """A matrix product with packed weights: `x` is (…, k), `w` (⌈columns/b⌉, k, b), the result (…, columns)."""
    *outer, depth = (int(extent) for extent in x.shape)
    block = int(w.shape[2])
    k = te.reduce_axis((0, depth), "k")

    def at(*place: Any) -> Any:
        *row, column = place
        weight = w[column // block, k, column % block].astype(x.dtype)
        return te.sum(x(*row, k) * weight, axis=[k])

    return te.compute((*outer, columns), at, name="dense")


def rounded(x: Any, scale: float, least: int, most: int) -> Any:
    """The whole multiples of `scale` next to `x`, the least and the most of them `least` and `most` times it."""

    def at(*place: Any) -> Any:
        whole = tirx.round(x(*place) / tirx.const(scale, x.dtype))
        low, high = (tirx.const(each, x.dtype) for each in (least, most))
        return tirx.max(tirx.min(whole, high), low) * tirx.const(scale, x.dtype)

    return te.compute(x.shape, at, name="rounded", tag="elemwise")


def _padded(x: Any, padding: Pair) -> Any:
    if not any(padding):
        return x
    top, left, bottom, right = padding
    rest = [0] * (len(x.shape) - 4)
    return topi.nn.pad(x, [0, 0, top, left, *rest], [0, 0, bottom, right, *rest], name="pad")


def _result_shape(
    x: Any, kernel: Pair, strides: Pair, dilation: Pair, blocks: int, block: int
) -> tuple[int, ...]:
    """Of a convolution over data that is padded already."""
    extents = [int(extent) for extent in x.shape[2:4]]
    spatial = [
        (extent - (size - 1) * apart - 1) // step + 1
        for extent, size, step, apart in zip(extents, kernel, strides, dilation, strict=True)
    ]
    return (int(x.shape[0]), blocks, *spatial, block)
