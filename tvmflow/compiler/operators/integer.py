"""Products of integers on layouts for dot product instructions, such as VNNI's `vpdpbusd`.

These multiply four neighboring bytes of data with four of the weights and add them to one sum of
32 bits. So weights end in an axis of four inputs, after that of the vector's results. Data have the
dtype that the instruction takes; the sums are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from tvm import te, tirx

from tvmflow.compiler.operators import blocked
from tvmflow.compiler.operators.blocked import Groups, Sizes

DOT: Final = 4
"""The number of products that an instruction adds up."""
_TILES: Final = range(5, 15)
"""How many points a tile of registers may have."""
NAME: Final = "integer_dot"
"""The name of the blocks that sum products, by which the schedule rule finds them."""


def conv(
    x: Any, w: Any, strides: Sizes, padding: Sizes, dilation: Sizes, groups: Groups, zero: int
) -> Any:
    """Return the sums of a convolution of integers.

    Args:
        x: Data (n, i/c, …, c), c being a multiple of 4.
        w: Weights of int8 (o/b, blocks of data of its groups, …, c/4, b of o, 4 of c).
        strides: Along each spatial axis.
        padding: Before and after each spatial axis.
        dilation: Along each spatial axis.
        groups: The blocks of data that each block of the result reads.
        zero: The value of the data around the image.

    Returns:
        The sums (n, o/b, …, b) of int32.
    """
    x = blocked.pad(x, padding, zero)
    blocks, width, *kernel, parts, block, _ = (int(extent) for extent in w.shape)
    channel, taps = te.reduce_axis((0, width), "ic"), blocked.tap_axes(kernel)
    part, term = te.reduce_axis((0, parts), "ip"), te.reduce_axis((0, DOT), "it")

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = groups.first_block(o) + channel
        pixel[-1] = _limit(pixel[-1], shape[-2])
        window = blocked.read_window(pixel, taps, strides, dilation, padding)
        value = x(n, source, *window, part * DOT + term).astype("int32")
        weight = w(o, channel, *taps, part, inner, term).astype("int32")
        return te.sum(value * weight, axis=[channel, *taps, part, term])

    shape = blocked.convolution_shape(x, kernel, strides, padding, dilation, blocks, block)
    *outer, points, _ = shape
    return _take(shape, te.compute((*outer, _round_up(points), block), element, name=NAME))


def depthwise_conv(
    x: Any, w: Any, strides: Sizes, padding: Sizes, dilation: Sizes, zero: int
) -> Any:
    """Return a depthwise convolution of data minus their zero point.

    It is computed in float32, whose sums are exact up to 2²⁴: more than 500 products.

    Args:
        x: Data of bytes (n, c/b, …, b).
        w: Weights (m·c/b, …, b), for m results of each channel block.
        strides: Along each spatial axis.
        padding: Before and after each spatial axis.
        dilation: Along each spatial axis.
        zero: The zero point of the data.

    Returns:
        The sums (n, m·c/b, …, b) of float32.
    """
    widened = te.compute(
        x.shape,
        lambda *index: (x(*index).astype("int32") - zero).astype("float32"),
        name="widened",
        tag="elemwise",
    )
    return blocked.depthwise_conv(widened, w, strides, padding, dilation)


def dense(x: Any, w: Any) -> Any:
    """Return the sums (…, n) of a matrix (…, k) and int8 weights (n/b, k/4, b, 4)."""
    *outer, rows, _ = (int(extent) for extent in x.shape)
    blocks, depth, block, _ = (int(extent) for extent in w.shape)
    part, term = te.reduce_axis((0, depth), "kp"), te.reduce_axis((0, DOT), "kt")

    def element(*index: Any) -> Any:
        *matrix, row, column = index
        value = x(*matrix, _limit(row, rows), part * DOT + term).astype("int32")
        weight = w(column // block, part, column % block, term).astype("int32")
        return te.sum(value * weight, axis=[part, term])

    columns = blocks * block
    sums = te.compute((*outer, _round_up(rows), columns), element, name=NAME)
    return _take((*outer, rows, columns), sums)


def take_columns(x: Any, columns: int) -> Any:
    """Return the first columns of a matrix."""
    return te.compute((*x.shape[:-1], columns), lambda *index: x(*index), name="columns")


def _round_up(points: int) -> int:
    """Return the next number that tiles of registers divide: no instruction computes a part of a tile."""
    if points <= max(_TILES):
        return points
    return next(n for n in itertools.count(points) if any(n % tile == 0 for tile in _TILES))


def _limit(point: Any, points: int) -> Any:
    """Return a point that is among so many; points beyond are computed from the last one, and left out."""
    return point if _round_up(points) == points else tirx.min(point, points - 1)


def _take(shape: Sequence[int], sums: Any) -> Any:
    """Return the first sums along each axis."""
    if list(shape) == [int(extent) for extent in sums.shape]:
        return sums
    return te.compute(shape, lambda *index: sums(*index), name="take")
