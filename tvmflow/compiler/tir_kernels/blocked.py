"""Convolutions and matrix products on blocked layouts, of floats and of dot product instructions.

A blocked tensor of `c` channels (n, ⌈c/b⌉, …, b) has `b` channels in its last axis: one vector. The lanes beyond `c`
hold what the operators computed from zeros; their weights are zeros. Weights may have a narrower dtype than the data,
in whose dtype everything is computed. `…` stands for the spatial axes of a sequence, image or volume.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tvm import relax, te, tirx, topi

from tvmflow.compiler.contraction.candidates import pad_dot_rows
from tvmflow.graph import bfloat16
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    divide_up,
    is_dynamic,
    plain,
    same_size,
    same_sizes,
    simplify,
)

Sizes = Sequence[int]


class Window(NamedTuple):
    """Strides, padding and dilation of a convolution.

    `padding` has the padding before each axis, then after each axis (as in ONNX); negative padding skips data.
    """

    strides: Sizes
    padding: Sequence[IrSize]
    dilation: Sizes

    @classmethod
    def of(cls, call: relax.Call) -> Window:
        """Return the window of a convolution."""
        return cls(*([int(n) for n in getattr(call.attrs, name)] for name in cls._fields))

    def read(self, pixel: Any, kernel_axes: Any) -> list[Any]:
        """Return the pixel of the padded data that a kernel position reads for a pixel of the result."""
        before = self.padding[: len(self.strides)]
        axes = zip(pixel, kernel_axes, self.strides, self.dilation, before, strict=True)
        return [y * step + offset * gap + max(-width, 0) for y, offset, step, gap, width in axes]

    def result_shape(self, x: Any, kernel: Sizes, blocks: int, block: int) -> tuple[IrSize, ...]:
        """Return the shape of a convolution's result over data that are already padded."""
        rank = len(kernel)
        pairs = zip(self.padding[:rank], self.padding[rank:], strict=True)
        skipped = [min(before, 0) + min(after, 0) for before, after in pairs]
        extents = x.shape[2 : 2 + rank]
        axes = zip(extents, skipped, kernel, self.strides, self.dilation, strict=True)
        spatial = [
            simplify((plain(extent) + skip - (size - 1) * gap - 1) // step + 1)
            for extent, skip, size, step, gap in axes
        ]
        return (plain(x.shape[0]), blocks, *spatial, block)


class Groups(NamedTuple):
    """The channels of data that the blocks of a convolution's result read.

    Attributes:
        inputs: The channels of data in a group.
        outputs: The channels of the result in a group.
        lanes: The channels in a block of data; 1 for plain data.
        block: The channels in a block of the result.
        number: The number of groups.
        phases: How many consecutive blocks of the result have the same channels.
        run: The length of the runs of channels that are multiplied instead of whole blocks of data; 0 for blocks.
    """

    inputs: int
    outputs: int
    lanes: int
    block: int
    number: int
    phases: int = 1
    run: int = 0

    @property
    def result_blocks(self) -> int:
        """The number of blocks of the result, of one phase."""
        return -(-self.outputs * self.number // self.block)

    @property
    def width(self) -> int:
        """The number of blocks of data, or of runs of channels, that every block of the result reads."""
        blocks = range(self.result_blocks)
        read = max(self._end(block) - int(self._start(block)) for block in blocks)
        return -(-read // self.run) if self.run else read

    @property
    def depth(self) -> int:
        """The number of channels that every block of the result reads."""
        return self.width * (self.run or self.lanes)

    def first(self, block: Any) -> Any:
        """Return the first block of data, or with runs the first channel, that a block of the result reads."""
        if self.number == 1:
            return 0
        start = self._start(block // self.phases)
        blocks = -(-self.inputs * self.number // self.lanes)
        limit = blocks * self.lanes - self.depth if self.run else blocks - self.width
        if isinstance(block, int):
            return min(start, limit)
        last = self.result_blocks - 1
        return tirx.min(start, limit) if self._start(last) > limit else start

    def _start(self, block: Any) -> Any:
        """Return where the data begin that the groups of a block of the result read."""
        channel = (block * self.block // self.outputs) * self.inputs
        return channel if self.run else channel // self.lanes

    def _end(self, block: int) -> int:
        """Return where the data end that the groups of a block of the result read."""
        last = min((block + 1) * self.block, self.outputs * self.number) - 1
        channel = (last // self.outputs + 1) * self.inputs
        return channel if self.run else -(-channel // self.lanes)


# Runs must save this share of the multiplications of whole blocks. Separate blocks for each group must save more,
# because the result is copied once more.
_MAX_RUN_SHARE: Final = 0.95
_MAX_APART_SHARE: Final = 0.8


def shorten(groups: Groups, *, joins: bool) -> Groups:
    """Return groups that multiply fewer empty lanes or channels of other groups, where possible.

    If a kernel `joins` them, each group may have blocks of the result of its own: `outputs` is a multiple of the
    block then, and `join_groups` makes the result.
    """
    if groups.lanes < groups.block:
        return groups
    shared = _with_runs(groups)
    if not joins or groups.number == 1 or 2 * groups.outputs < groups.block:
        return shared
    whole = -(-groups.outputs // groups.block) * groups.block
    apart = _with_runs(groups._replace(outputs=whole))
    limit = _MAX_APART_SHARE * shared.result_blocks * shared.depth
    return apart if apart.result_blocks * apart.depth <= limit else shared


def _with_runs(groups: Groups) -> Groups:
    """Return groups that read runs of channels instead of blocks, where these are fewer channels."""
    runs = range(groups.block, groups.block // 2 - 1, -1)
    channels = -(-groups.inputs * groups.number // groups.lanes) * groups.lanes
    # no run may leave the data
    fitting = [each for run in runs if (each := groups._replace(run=run)).depth <= channels]
    best = min(fitting, key=lambda each: each.depth, default=groups)
    return best if best.depth <= _MAX_RUN_SHARE * groups.depth else groups


# ---------------------------------------------------------------- moved channels


def pack(x: Any, block: int) -> Any:
    """Return data (n, c, …) as (n, ⌈c/b⌉, …, b), padded with zero channels."""
    n, channels, *size = map(plain, x.shape)
    return _block_channels("pack", x.dtype, (n, channels, *size), block, x)


def _block_channels(
    name: str, dtype: str, shape: Sequence[IrSize], block: int, read: Callable[..., Any]
) -> Any:
    """Return plain data of a shape (n, c, …), which a function reads, as (n, ⌈c/b⌉, …, b)."""
    n, channels, *size = shape

    def element(i: Any, outer: Any, *position: Any) -> Any:
        *pixel, inner = position
        channel = outer * block + inner
        value = read(i, channel, *pixel)
        if channels % block == 0:
            return value
        return tirx.if_then_else(channel < channels, value, tirx.const(0, dtype))

    return _compute(name, (n, -(-channels // block), *size, block), element)


def _compute(name: str, shape: Sequence[IrSize], element: Callable[..., Any]) -> Any:
    """Return a tensor whose elements are each one of another tensor, or a function of few."""
    return te.compute(tuple(shape), element, name=name, tag="injective")


def _read_channel(x: Any, i: Any, channel: Any, pixel: Any) -> Any:
    """Return an element of blocked data."""
    block = int(x.shape[-1])
    return x(i, channel // block, *pixel, channel % block)


def unpack(x: Any, channels: int) -> Any:
    """Return blocked data (n, ⌈c/b⌉, …, b) as (n, c, …)."""
    n, _, *size, _ = map(plain, x.shape)
    shape = (n, channels, *size)
    return _compute("unpack", shape, lambda i, c, *pixel: _read_channel(x, i, c, pixel))


def repeat_channels(x: Any, channels: int, times: int) -> Any:
    """Return blocked data of `channels` channels with each of them `times` times."""
    n, _, *size, block = map(plain, x.shape)
    return _compute(
        "repeat",
        (n, -(-channels * times // block), *size, block),
        lambda i, outer, *at: _read_channel(x, i, (outer * block + at[-1]) // times, at[:-1]),
    )


def join_groups(x: Any, outputs: int, number: int) -> Any:
    """Return blocked data without the empty lanes after each group of this many channels (`outputs`)."""
    n, blocks, *size, block = map(plain, x.shape)

    def read(i: Any, channel: Any, *pixel: Any) -> Any:
        group, own = channel // outputs, channel % outputs
        return x(i, group * (blocks // number) + own // block, *pixel, own % block)

    return _block_channels("join_groups", x.dtype, (n, outputs * number, *size), block, read)


def add_parts(whole: Sizes, corners: Sequence[Sizes], *parts: Any) -> Any:
    """Return the sum of parts of an image (n, o, …, b) of some extents, each at its first pixel."""

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        total = tirx.const(0, parts[0].dtype)
        for corner, part in zip(corners, parts, strict=True):
            axes = list(zip(pixel, corner, map(int, part.shape[2:-1]), whole, strict=True))
            inside = [
                condition
                for y, start, extent, edge in axes
                if extent < edge
                for condition in (y >= start, y < start + extent)
            ]
            value = part(n, o, *(y - start for y, start, _, _ in axes), inner)
            if inside:
                value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, part.dtype))
            total = total + value
        return total

    n, blocks, *_, block = map(plain, parts[0].shape)
    return _compute("add_parts", (n, blocks, *whole, block), element)


def with_sizes(x: Any, shape: Sizes) -> Any:
    """Return a tensor whose sizes are the same values, but other expressions of dimensions."""
    return _compute("with_sizes", shape, lambda *position: x(*position))


def interleave(x: Any, strides: Sizes, offsets: Sizes, shape: Sizes) -> Any:
    """Return channel blocks (n, o·s·t, h, w, b) rearranged into an image (n, o, height, width, b).

    This is the periodic shuffling of Shi et al. 2016, arXiv:1609.05158: pixel (y, x) of the image comes from block
    (y mod s, x mod t). The offsets are the pixels to skip from the top and from the left.
    """
    n, blocks, *_, block = map(plain, x.shape)

    def element(i: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        source, phase = _find_source(o, pixel, strides, offsets)
        return x(i, phase, *source, inner)

    return _compute("interleave", (n, blocks // math.prod(strides), *shape, block), element)


def _find_source(block: Any, pixel: Any, strides: Sizes, offsets: Sizes) -> tuple[list[Any], Any]:
    """Return the position of a pixel of an interleaved image, and the block that it comes from."""
    shifted = [y + offset for y, offset in zip(pixel, offsets, strict=True)]
    for y, step in zip(shifted, strides, strict=True):
        block = block * step + y % step
    return [y // step for y, step in zip(shifted, strides, strict=True)], block


def interleave_channels(x: Any, channels: int, strides: Sizes, offsets: Sizes, shape: Sizes) -> Any:
    """Return a plain image of few channels, those of the pixels (y mod s, x mod t) after each other."""

    def element(i: Any, c: Any, *pixel: Any) -> Any:
        source, phase = _find_source(0, pixel, strides, offsets)
        return _read_channel(x, i, phase * channels + c, source)

    return _compute("interleave", (x.shape[0], channels, *shape), element)


def interleave_parts(strides: Sizes, shape: Sizes, *parts: Any) -> Any:
    """Return an image whose pixel (y, x) comes from the part (y mod s, x mod t) of several images."""
    n, blocks, *_, block = map(plain, parts[0].shape)
    sizes = zip(strides, shape, strict=True)
    counts = (range(step if is_dynamic(extent) else min(step, extent)) for step, extent in sizes)
    *turns, _ = itertools.product(*counts)

    def element(i: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = [y // step for y, step in zip(pixel, strides, strict=True)]
        *others, value = (part(i, o, *source, inner) for part in parts)
        for turn, own in zip(turns, others, strict=True):
            axes = zip(pixel, strides, turn, strict=True)
            is_turn = tirx.all(*(tirx.EQ(y % step, rest) for y, step, rest in axes))
            value = tirx.if_then_else(is_turn, own, value)
        return value

    return _compute("interleave", (n, blocks, *shape, block), element)


# ---------------------------------------------------------------- products of floats


def conv(x: Any, w: Any, window: Window, groups: Groups, tile_columns: int = 1) -> Any:
    """Return a convolution (n, o/b, …, b of o) of data (n, i/b, …, b), or plain (n, i, …).

    Weights are (o/b, blocks of data of its groups, …, b of i, b of o), without the axis `b of i` for plain data. They
    may lack the empty last lanes of a single block. If `groups` has runs of channels, weights are (o/b, runs, …, i of a
    run, b of o). Extra columns, up to a multiple of `tile_columns`, repeat the last one and are cropped.
    """
    rank = len(window.strides)
    x = pad(x, window.padding)
    blocks, read, *kernel = (int(extent) for extent in w.shape[: rank + 2])
    channel, kernel_axes = te.reduce_axis((0, read), "ic"), _make_kernel_axes(kernel)
    lane = [te.reduce_axis((0, int(n)), "ib") for n in w.shape[rank + 2 : -1]]
    shape = window.result_shape(x, kernel, blocks, int(w.shape[-1]))
    *outer, columns, lanes = shape
    computed = simplify(divide_up(columns, tile_columns) * tile_columns)

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        pixel[-1] = _limit(pixel[-1], columns, computed)
        source, inside = groups.first(o) + channel, lane
        if groups.run:
            number = groups.first(o) + channel * groups.run + lane[0]
            source, inside = number // groups.lanes, [number % groups.lanes]
        value = x(n, source, *window.read(pixel, kernel_axes), *inside)
        weight = w(o, channel, *kernel_axes, *lane, inner).astype(x.dtype)
        return te.sum(value * weight, axis=[channel, *kernel_axes, *lane])

    padded = (*outer, columns if same_size(columns, computed) else computed, lanes)
    return _crop(shape, te.compute(padded, element, name=f"conv{rank}d"), "unpadded")


def dense(x: Any, w: Any, columns: int, padded_rows: int | None = None) -> Any:
    """Return the product (…, rows, columns) of a matrix (…, rows, k) and weights (⌈columns/b⌉, k, b).

    This many `padded_rows` are computed, the last one again where there are more; None for those of the matrix, whose
    number may be dynamic.
    """
    *outer, rows, depth = map(plain, x.shape)
    blocks, _, block = (int(extent) for extent in w.shape)
    computed = rows if padded_rows is None else padded_rows
    k = te.reduce_axis((0, depth), "k")

    def element(*index: Any) -> Any:
        *batch, row, column = index
        weight = w[column // block, k, column % block].astype(x.dtype)
        return te.sum(x(*batch, _limit(row, rows, computed), k) * weight, axis=[k])

    product = te.compute((*outer, computed, blocks * block), element, name="dense")
    return _crop((*outer, rows, columns), product, "unpadded")


def quantized_depthwise_conv(x: Any, w: Any, window: Window, zero: Any) -> Any:
    """Return `depthwise_conv` of 8-bit values minus their zero point (an int or expression), as float32."""
    zero_point = tirx.const(zero, "int32") if isinstance(zero, int) else zero.astype("int32")
    promoted = te.compute(
        x.shape,
        lambda *index: (x(*index).astype("int32") - zero_point).astype("float32"),
        name="widened",
        tag="elemwise",
    )
    return depthwise_conv(promoted, w, window)


def pad(x: Any, padding: Sequence[IrSize], value: Any = 0) -> Any:
    """Return data with a number or an expression around each image; negative padding changes nothing."""
    padding = [max(width, 0) for width in padding]
    if not any(padding):
        return x
    rank = len(padding) // 2
    rest = [0] * (len(x.shape) - 2 - rank)
    before, after = padding[:rank], padding[rank:]
    number = tirx.const(value, x.dtype) if isinstance(value, int) else value
    return topi.nn.pad(x, [0, 0, *before, *rest], [0, 0, *after, *rest], number, name="pad")


def _make_kernel_axes(kernel: Sizes) -> list[Any]:
    """Return the reduction axes over the positions of a kernel."""
    names = ("kd", "kh", "kw")[-len(kernel) :]
    return [te.reduce_axis((0, size), name) for size, name in zip(kernel, names, strict=True)]


def _limit(point: Any, points: IrSize, computed: IrSize) -> Any:
    """Return a point limited to the last one; points beyond are computed from that, and dropped."""
    return point if same_size(computed, points) else tirx.min(point, points - 1)


def _crop(shape: Sequence[IrSize], computed: Any, name: str) -> Any:
    """Return the first elements of a tensor along each axis."""
    if same_sizes(shape, list(map(plain, computed.shape))):
        return computed
    return te.compute(tuple(shape), lambda *index: computed(*index), name=name)


# ---------------------------------------------------------------- products of dot product instructions
# Instructions such as `vpdpbusd` and `vdpbf16ps` multiply some neighboring values of data, 32 bits of them, with as
# many weights, and add the products to one accumulator of 32 bits. So weights end in an axis of these terms, after
# that of the vector's results. Data have the dtype that the instruction takes.

_DYNAMIC_TILE: Final = 8
"""How many rows of a dynamic number make a tile."""


class Products(NamedTuple):
    """The products that an instruction adds up.

    Attributes:
        name: The name of the blocks that add them, by which the schedule rule finds them.
        terms: The products for one accumulator.
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
"""All products, by the name of the blocks that add them."""


def dot_conv(
    products: Products, x: Any, w: Any, window: Window, groups: Groups, zero: Any = 0
) -> Any:
    """Return the accumulators (n, o/b, …, b) of a convolution, t of whose products an instruction adds up.

    Data are (n, i/c, …, c), c being a multiple of t, weights (o/b, blocks of data of its groups, …, c/t, b of o, t of
    c). The data around the image are `zero`, a number or an expression.
    """
    x = pad(x, window.padding, zero)
    blocks, width, *kernel, parts, block, terms = (int(extent) for extent in w.shape)
    channel, kernel_axes = te.reduce_axis((0, width), "ic"), _make_kernel_axes(kernel)
    part, term = te.reduce_axis((0, parts), "ip"), te.reduce_axis((0, terms), "it")
    shape = window.result_shape(x, kernel, blocks, block)
    *outer, points, _ = shape
    computed = _round_up(points)

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = groups.first(o) + channel
        pixel[-1] = _limit(pixel[-1], points, computed)
        value = x(n, source, *window.read(pixel, kernel_axes), part * terms + term)
        weight = w(o, channel, *kernel_axes, part, inner, term)
        product = products.to_accumulator(value) * products.to_accumulator(weight)
        return te.sum(product, axis=[channel, *kernel_axes, part, term])

    accumulators = te.compute((*outer, computed, block), element, name=products.name)
    return _crop(shape, accumulators, "take")


def matrix_conv(x: Any, w: Any, padding: Sizes, points: int, zero: Any = 0) -> Any:
    """Return the accumulators (n, o/4, …, 4) of a convolution by products of matrices.

    Data are (n, i/4, …, 4), with an even number of blocks; weights are (o/4, i/8, …, 4 of o, 2 blocks of i, 4 of i).
    With the padding, an even number of points is computed; the last axis of the result has this many `points`.
    """
    x = pad(x, padding, zero)
    blocks, pairs, *kernel, block, halves, terms = (int(extent) for extent in w.shape)
    ones = [1] * len(kernel)
    window = Window(ones, padding, ones)
    channel, kernel_axes = te.reduce_axis((0, pairs), "ic"), _make_kernel_axes(kernel)
    half, term = te.reduce_axis((0, halves), "ih"), te.reduce_axis((0, terms), "it")

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        value = x(n, channel * halves + half, *window.read(pixel, kernel_axes), term)
        weight = w(o, channel, *kernel_axes, inner, half, term)
        product = MATRICES.to_accumulator(value) * MATRICES.to_accumulator(weight)
        return te.sum(product, axis=[channel, *kernel_axes, half, term])

    shape = window.result_shape(x, kernel, blocks, block)
    accumulators = te.compute(shape, element, name=MATRICES.name)
    return _crop((*shape[:-2], points, block), accumulators, "take")


def depthwise_conv(
    x: Any, w: Any, window: Window, products: Products | None = None, zero: Any = 0
) -> Any:
    """Return a depthwise convolution (n, m·c/b, …, b) of data (n, c/b, …, b) and weights (m·c/b, …, b).

    With products of t terms, the last spatial axis of the weights has words of t kernel positions, and they end with
    an axis t. The padding after the last axis is for all these positions, and the data around the image are `zero`.
    """
    rank = len(window.strides)
    x = pad(x, window.padding, zero)
    blocks, *words, block = (int(extent) for extent in w.shape[: rank + 2])
    multiplier = blocks // int(x.shape[1])
    kernel_axes = _make_kernel_axes(words)
    name, kernel, positions, term = f"depthwise_conv{rank}d", words, kernel_axes, []
    if products is not None:
        name, kernel = products.name, [*words[:-1], words[-1] * products.terms]
        term = [te.reduce_axis((0, products.terms), "it")]
        positions = [*kernel_axes[:-1], kernel_axes[-1] * products.terms + term[0]]

    def convert(value: Any) -> Any:
        return value.astype(x.dtype) if products is None else products.to_accumulator(value)

    def element(n: Any, c: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = c if multiplier == 1 else c // multiplier
        value = x(n, source, *window.read(pixel, positions), inner)
        product = convert(value) * convert(w(c, *kernel_axes, inner, *term))
        return te.sum(product, axis=[*kernel_axes, *term])

    return te.compute(window.result_shape(x, kernel, blocks, block), element, name=name)


def dot_dense(products: Products, x: Any, w: Any, results: int, rows: int = 0) -> Any:
    """Return the accumulators (…, n) of a matrix (…, k) and weights (⌈n/b⌉, ⌈k/t⌉, b, t); n is `results`.

    Instructions add t products. Where they multiply matrices, this many `rows`, an even number, are computed at
    least.
    """
    *outer, own, depth = map(plain, x.shape)
    blocks, parts, block, terms = (int(extent) for extent in w.shape)
    computed = rows if products.has_matrices else _round_up(own)
    if products.has_matrices and (rows > own or parts * terms > depth):
        none = [0] * len(outer)
        after = [*none, rows - own, parts * terms - depth]
        x = topi.nn.pad(x, [*none, 0, 0], after, tirx.const(0, x.dtype), name="pad")
    part, term = te.reduce_axis((0, parts), "kp"), te.reduce_axis((0, terms), "kt")

    def element(*index: Any) -> Any:
        *matrix, row, column = index
        row = row if products.has_matrices else _limit(row, own, computed)
        value = products.to_accumulator(x(*matrix, row, part * terms + term))
        weight = products.to_accumulator(w(column // block, part, column % block, term))
        return te.sum(value * weight, axis=[part, term])

    accumulators = te.compute((*outer, computed, blocks * block), element, name=products.name)
    return _crop((*outer, own, results), accumulators, "take")


def _round_up(points: IrSize) -> IrSize:
    """Return the next number that tiles of registers divide: no instruction computes a part of a tile."""
    if is_dynamic(points):
        return divide_up(points, _DYNAMIC_TILE) * _DYNAMIC_TILE
    return pad_dot_rows(points)
