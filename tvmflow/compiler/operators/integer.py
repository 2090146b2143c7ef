"""Products of integers on layouts for dot product instructions, such as VNNI's `vpdpbusd`.

These multiply four neighboring bytes of data with four of the weights and add them to one sum of
32 bits. So weights end in an axis of four inputs, after that of the vector's results. Data have the
dtype that the instruction takes; the sums are exact.
"""

from __future__ import annotations

from typing import Any, Final

from tvm import te, tirx, topi

from tvmflow.compiler.operators import blocked
from tvmflow.compiler.operators.blocked import Pair, convolution_shape

DOT: Final = 4
"""The number of products that an instruction adds up."""
NAME: Final = "integer_dot"
"""The name of the blocks that sum products, by which the schedule rule finds them."""


def pad(x: Any, padding: Pair, value: int) -> Any:
    """Return blocked data with a number around each image."""
    if not any(padding):
        return x
    top, left, bottom, right = padding
    value = tirx.const(value, x.dtype)
    return topi.nn.pad(x, [0, 0, top, left, 0], [0, 0, bottom, right, 0], value, name="pad")


def conv2d(
    x: Any, w: Any, strides: Pair, padding: Pair, dilation: Pair, groups: int, zero: int
) -> Any:
    """Return the sums of a convolution of integers.

    Args:
        x: Data (n, i/c, h, w, c), c being a multiple of 4.
        w: Weights of int8 (o/b, i/c of a group, kh, kw, c/4, b of o, 4 of c).
        strides: Down and across.
        padding: Top, left, bottom, right.
        dilation: Down and across.
        groups: The number of groups.
        zero: The value of the data around the image.

    Returns:
        The sums (n, o/b, h, w, b) of int32.
    """
    x = pad(x, padding, zero)
    blocks, group_inputs, height, width, parts, block, _ = (int(extent) for extent in w.shape)
    group_outputs = blocks // groups
    channel = te.reduce_axis((0, group_inputs), "ic")
    row, column = te.reduce_axis((0, height), "kh"), te.reduce_axis((0, width), "kw")
    part, term = te.reduce_axis((0, parts), "ip"), te.reduce_axis((0, DOT), "it")

    def element(n: Any, o: Any, y: Any, z: Any, inner: Any) -> Any:
        source = channel if groups == 1 else (o // group_outputs) * group_inputs + channel
        pixel = (y * strides[0] + row * dilation[0], z * strides[1] + column * dilation[1])
        value = x(n, source, *pixel, part * DOT + term).astype("int32")
        weight = w(o, channel, row, column, part, inner, term).astype("int32")
        return te.sum(value * weight, axis=[channel, row, column, part, term])

    shape = convolution_shape(x, (height, width), strides, dilation, blocks, block)
    return te.compute(shape, element, name=NAME)


def depthwise_conv2d(
    x: Any, w: Any, strides: Pair, padding: Pair, dilation: Pair, zero: int
) -> Any:
    """Return a depthwise convolution of data minus their zero point.

    It is computed in float32, whose sums are exact up to 2²⁴: more than 500 products.

    Args:
        x: Data of bytes (n, c/b, h, w, b).
        w: Weights (m·c/b, kh, kw, b), for m results of each channel block.
        strides: Down and across.
        padding: Top, left, bottom, right.
        dilation: Down and across.
        zero: The zero point of the data.

    Returns:
        The sums (n, m·c/b, h, w, b) of float32.
    """
    n, blocks, height, width, block = (int(extent) for extent in x.shape)
    top, left, bottom, right = padding

    def widen(i: Any, c: Any, y: Any, z: Any, inner: Any) -> Any:
        y, z = y - top, z - left
        value = (x[i, c, y, z, inner].astype("int32") - zero).astype("float32")
        if not any(padding):
            return value
        inside = tirx.all(y >= 0, y < height, z >= 0, z < width)
        return tirx.if_then_else(inside, value, tirx.const(0, "float32"))

    shape = (n, blocks, height + top + bottom, width + left + right, block)
    widened = te.compute(shape, widen, name="pad")
    return blocked.depthwise_conv2d(widened, w, strides, (0, 0, 0, 0), dilation)


def dense(x: Any, w: Any) -> Any:
    """Return the sums (…, n) of a matrix (…, k) and int8 weights (n/b, k/4, b, 4)."""
    *outer, _ = (int(extent) for extent in x.shape)
    blocks, depth, block, _ = (int(extent) for extent in w.shape)
    part, term = te.reduce_axis((0, depth), "kp"), te.reduce_axis((0, DOT), "kt")

    def element(*index: Any) -> Any:
        *row, column = index
        value = x(*row, part * DOT + term).astype("int32")
        weight = w(column // block, part, column % block, term).astype("int32")
        return te.sum(value * weight, axis=[part, term])

    return te.compute((*outer, blocks * block), element, name=NAME)
