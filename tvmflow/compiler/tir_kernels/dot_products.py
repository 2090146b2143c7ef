"""Products of small integers on layouts for dot product instructions.

Such are `vpdpbusd` and `vdpbf16ps`.

These multiply some neighboring numbers of data, 32 bits of them, with as many of the weights and add them to one
accumulator of 32 bits. So weights end in an axis of these terms, after that of the vector's results. Data have the
dtype that the instruction takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tvm import te, tirx, topi

from tvmflow.compiler.contraction.candidates import pad_dot_rows
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.blocked import Groups, Sizes
from tvmflow.graph import bfloat16
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, is_dynamic, plain, same_size, same_sizes

_DYNAMIC_TILE: Final = 8
"""How many rows of a dynamic number make a tile."""


class Products(NamedTuple):
    """The products that an instruction adds up.

    Attributes:
        name: The name of the blocks that sum them, by which the schedule rule finds them.
        terms: How many there are in a sum.
        to_accumulator: Converts a value of the data or the weights to the dtype of the accumulators.
        has_matrices: Whether an instruction multiplies matrices, whose rows are two points.
    """

    name: str
    terms: int
    to_accumulator: Callable[[Any], Any]
    has_matrices: bool = False


INTEGERS: Final = Products("integer_dot", 4, lambda value: value.astype("int32"))
"""int8 products with exact int32 accumulation."""
PAIRS: Final = Products("integer_pairs", 2, INTEGERS.to_accumulator)
"""The same for CPUs that add the products of two bytes at a time."""
MATRICES: Final = Products("integer_matrices", 8, INTEGERS.to_accumulator, has_matrices=True)
"""int8 matrix multiply (smmla): eight terms of two pixels and two results at once."""
ROWS: Final = Products("integer_rows", 8, INTEGERS.to_accumulator, has_matrices=True)
"""The same of two rows, whose terms lie together."""
DEPTHWISE: Final = Products("integer_taps", 4, INTEGERS.to_accumulator)
"""int8 products of neighboring pixels by the kernel positions of a channel, accumulated exactly."""
BFLOAT16: Final = Products("bfloat16_dot", 2, bfloat16.to_float32)
"""Products of bfloat16, which are exact in float32."""
PRODUCTS: Final = {
    products.name: products for products in (INTEGERS, PAIRS, DEPTHWISE, MATRICES, ROWS, BFLOAT16)
}
"""All products, by the name of the blocks that sum them."""


def conv(
    products: Products,
    x: Any,
    w: Any,
    strides: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: Groups,
    zero: Any = 0,
) -> Any:
    """Return the accumulators (n, o/b, …, b) of a convolution, t of whose products an instruction adds up.

    Data are (n, i/c, …, c), c being a multiple of t, weights (o/b, blocks of data of its groups, …, c/t, b of o, t of
    c). The data around the image are `zero`, a number or an expression.
    """
    x = blocked.pad(x, padding, zero)
    blocks, width, *kernel, parts, block, _ = (int(extent) for extent in w.shape)
    channel, kernel_axes = te.reduce_axis((0, width), "ic"), blocked.make_kernel_axes(kernel)
    part, term = te.reduce_axis((0, parts), "ip"), te.reduce_axis((0, products.terms), "it")

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = groups.first(o) + channel
        pixel[-1] = _limit(pixel[-1], shape[-2])
        window = blocked.read_window(pixel, kernel_axes, strides, dilation, padding)
        value = products.to_accumulator(x(n, source, *window, part * products.terms + term))
        weight = products.to_accumulator(w(o, channel, *kernel_axes, part, inner, term))
        return te.sum(value * weight, axis=[channel, *kernel_axes, part, term])

    shape = blocked.convolution_shape(x, kernel, strides, padding, dilation, blocks, block)
    *outer, points, _ = shape
    return _take(shape, te.compute((*outer, _round_up(points), block), element, name=products.name))


def matrix_conv(x: Any, w: Any, padding: Sizes, points: int, zero: Any = 0) -> Any:
    """Return the accumulators (n, o/4, …, 4) of a convolution by products of matrices.

    Args:
        x: Data (n, i/4, …, 4), with an even number of blocks.
        w: Weights (o/4, i/8, …, 4 of o, 2 blocks of i, 4 of i).
        padding: Such that an even number of points is computed.
        points: How many of these are the last axis of the result.
        zero: As of `conv`.
    """
    x = blocked.pad(x, padding, zero)
    blocks, pairs, *kernel, block, halves, terms = (int(extent) for extent in w.shape)
    channel, kernel_axes, ones = (
        te.reduce_axis((0, pairs), "ic"),
        blocked.make_kernel_axes(kernel),
        [1] * len(kernel),
    )
    half, term = te.reduce_axis((0, halves), "ih"), te.reduce_axis((0, terms), "it")

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        window = blocked.read_window(pixel, kernel_axes, ones, ones, padding)
        value = MATRICES.to_accumulator(x(n, channel * halves + half, *window, term))
        weight = MATRICES.to_accumulator(w(o, channel, *kernel_axes, inner, half, term))
        return te.sum(value * weight, axis=[channel, *kernel_axes, half, term])

    shape = blocked.convolution_shape(x, kernel, ones, padding, ones, blocks, block)
    accumulators = te.compute(shape, element, name=MATRICES.name)
    return _take((*shape[:-2], points, block), accumulators)


def depthwise_conv(x: Any, w: Any, strides: Sizes, padding: Sizes, zero: Any = 0) -> Any:
    """Return the accumulators (n, m·c/b, …, b) of a depthwise convolution of data (n, c/b, …, b).

    Weights are (m·c/b, …, words of t positions along the last axis, b, t), for m results of each channel block. The
    padding after the last axis is for all kernel positions.
    """
    x = blocked.pad(x, padding, zero)
    blocks, *rows, words, block, terms = (int(extent) for extent in w.shape)
    multiplier, dilation = blocks // int(x.shape[1]), [1] * len(strides)
    kernel_axes = blocked.make_kernel_axes([*rows, words])
    term = te.reduce_axis((0, terms), "it")

    def element(n: Any, c: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = c if multiplier == 1 else c // multiplier
        positions = [*kernel_axes[:-1], kernel_axes[-1] * terms + term]
        window = blocked.read_window(pixel, positions, strides, dilation, padding)
        value = DEPTHWISE.to_accumulator(x(n, source, *window, inner))
        return te.sum(
            value * DEPTHWISE.to_accumulator(w(c, *kernel_axes, inner, term)),
            axis=[*kernel_axes, term],
        )

    kernel = [*rows, words * terms]
    shape = blocked.convolution_shape(x, kernel, strides, padding, dilation, blocks, block)
    return te.compute(shape, element, name=DEPTHWISE.name)


def dense(products: Products, x: Any, w: Any, results: int, rows: int = 0) -> Any:
    """Return the accumulators (…, n) of a matrix (…, k) and weights (⌈n/b⌉, ⌈k/t⌉, b, t); n is `results`.

    Instructions add t products. Where they multiply matrices, this many `rows`, an even number, are computed at
    least.
    """
    *outer, own, depth = map(plain, x.shape)
    blocks, parts, block, terms = (int(extent) for extent in w.shape)
    if products.has_matrices and (rows > own or parts * terms > depth):
        none = [0] * len(outer)
        after = [*none, rows - own, parts * terms - depth]
        x = topi.nn.pad(x, [*none, 0, 0], after, tirx.const(0, x.dtype), name="pad")
    part, term = te.reduce_axis((0, parts), "kp"), te.reduce_axis((0, terms), "kt")

    def element(*index: Any) -> Any:
        *matrix, row, column = index
        row = row if products.has_matrices else _limit(row, own)
        value = products.to_accumulator(x(*matrix, row, part * terms + term))
        weight = products.to_accumulator(w(column // block, part, column % block, term))
        return te.sum(value * weight, axis=[part, term])

    computed = rows if products.has_matrices else _round_up(own)
    accumulators = te.compute((*outer, computed, blocks * block), element, name=products.name)
    return _take((*outer, own, results), accumulators)


def _round_up(points: IrSize) -> IrSize:
    """Return the next number that tiles of registers divide: no instruction computes a part of a tile."""
    if is_dynamic(points):
        return divide_up(points, _DYNAMIC_TILE) * _DYNAMIC_TILE
    return pad_dot_rows(points)


def _limit(point: Any, points: IrSize) -> Any:
    """Return a point limited to the last one; points beyond are computed from that, and dropped."""
    return point if same_size(_round_up(points), points) else tirx.min(point, points - 1)


def _take(shape: Sequence[IrSize], accumulators: Any) -> Any:
    """Return the first accumulators along each axis."""
    if same_sizes(shape, list(map(plain, accumulators.shape))):
        return accumulators
    return te.compute(shape, lambda *index: accumulators(*index), name="take")
