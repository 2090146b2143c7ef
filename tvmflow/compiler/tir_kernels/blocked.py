"""Convolutions and matmuls on blocked layouts, in floats or with dot product instructions.

A blocked tensor of `c` channels (n, ⌈c/b⌉, …, b) has `b` channels in its last axis: one vector. Lanes beyond `c` are
computed from zeros and may hold any value; their weights are zeros. Weights may have a smaller dtype than the data;
all is computed in the dtype of the data. `…` stands for the spatial axes of a sequence, image or volume.
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

    `padding` lists the padding before each axis, then after each axis (as in ONNX); negative padding skips data.
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
        """Return the shape of the result; the data `x` are already padded."""
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
    """Which channels of data each block of a convolution's result reads.

    Attributes:
        inputs: The number of data channels in a group.
        outputs: The number of result channels in a group.
        lanes: The number of channels in a block of data; 1 for plain data.
        block: The number of channels in a block of the result.
        number: The number of groups.
        phases: The number of consecutive result blocks that have the same channels.
        run: The number of channels in a run (runs are multiplied instead of whole blocks of data); 0 for whole blocks.
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
        """The number of blocks of the result in one phase."""
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
        """Return the first block of data (with runs, the first channel) that a block of the result reads."""
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
        """Return the first block or channel of data that the groups of a block of the result read."""
        channel = (block * self.block // self.outputs) * self.inputs
        return channel if self.run else channel // self.lanes

    def _end(self, block: int) -> int:
        """Return the end of the blocks or channels of data that the groups of a block of the result read."""
        last = min((block + 1) * self.block, self.outputs * self.number) - 1
        channel = (last // self.outputs + 1) * self.inputs
        return channel if self.run else -(-channel // self.lanes)


# Runs may need at most this share of the multiplications of whole blocks. Separate blocks for each group must save
# more, because the result is copied once more.
_MAX_RUN_SHARE: Final = 0.95
_MAX_APART_SHARE: Final = 0.8


def shorten(groups: Groups, *, joins: bool) -> Groups:
    """Return groups that multiply fewer empty lanes or channels of other groups, if possible.

    If the kernel `joins` groups, each may get its own blocks of the result: then `outputs` is a multiple of the block,
    and `join_groups` makes the result.
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
    """Return groups that read runs of channels instead of blocks, if that reads fewer channels."""
    runs = range(groups.block, groups.block // 2 - 1, -1)
    channels = -(-groups.inputs * groups.number // groups.lanes) * groups.lanes
    # runs must not read beyond the data
    fitting = [each for run in runs if (each := groups._replace(run=run)).depth <= channels]
    best = min(fitting, key=lambda each: each.depth, default=groups)
    return best if best.depth <= _MAX_RUN_SHARE * groups.depth else groups


# ---------------------------------------------------------------- layout changes


def pack(x: Any, block: int) -> Any:
    """Return data (n, c, …) as (n, ⌈c/b⌉, …, b), padded with zero channels."""
    n, channels, *size = map(plain, x.shape)
    return _block_channels("pack", x.dtype, (n, channels, *size), block, x)


def _block_channels(
    name: str, dtype: str, shape: Sequence[IrSize], block: int, read: Callable[..., Any]
) -> Any:
    """Return data of shape (n, c, …) as (n, ⌈c/b⌉, …, b); `read` returns an element of the data."""
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
    """Return a tensor computed elementwise, which TVM may fuse as injective."""
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
    """Return blocked data with each of its `channels` channels repeated `times` times."""
    n, _, *size, block = map(plain, x.shape)
    return _compute(
        "repeat",
        (n, -(-channels * times // block), *size, block),
        lambda i, outer, *at: _read_channel(x, i, (outer * block + at[-1]) // times, at[:-1]),
    )


def join_groups(x: Any, outputs: int, number: int) -> Any:
    """Return blocked data without the empty lanes after each group of `outputs` channels."""
    n, blocks, *size, block = map(plain, x.shape)

    def read(i: Any, channel: Any, *pixel: Any) -> Any:
        group, own = channel // outputs, channel % outputs
        return x(i, group * (blocks // number) + own // block, *pixel, own % block)

    return _block_channels("join_groups", x.dtype, (n, outputs * number, *size), block, read)


def add_parts(whole: Sizes, corners: Sequence[Sizes], *parts: Any) -> Any:
    """Return the sum of parts, each placed at its corner in zeros of shape (n, o, *whole, b)."""

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
    """Return a tensor with the same sizes in other symbolic expressions."""
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
    """Return a plain image whose pixel (y, x) comes from channel group (y mod s, x mod t) of `x`."""

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


# ---------------------------------------------------------------- float arithmetic


def conv(x: Any, w: Any, window: Window, groups: Groups, tile_columns: int = 1) -> Any:
    """Return a convolution (n, o/b, …, b of o) of data (n, i/b, …, b), or plain (n, i, …).

    Weights are (o/b, blocks of data of its groups, …, b of i, b of o), without the axis `b of i` for plain data. A
    single block may omit its empty last lanes. If `groups` holds runs of channels, weights are (o/b, runs, …, i of a
    run, b of o). Columns are padded to a multiple of `tile_columns` by repeating the last one, then cropped.
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
    """Return the matmul (…, rows, columns) of a matrix (…, rows, k) and weights (⌈columns/b⌉, k, b).

    `padded_rows` rows are computed; the extra rows repeat the last row. If it is None, there are no extra rows, and the
    number of rows may be dynamic.
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
    """Return `depthwise_conv` of dequantized 8-bit values: minus `zero` (int or expression), as float32."""
    zero_point = tirx.const(zero, "int32") if isinstance(zero, int) else zero.astype("int32")
    promoted = te.compute(
        x.shape,
        lambda *index: (x(*index).astype("int32") - zero_point).astype("float32"),
        name="widened",
        tag="elemwise",
    )
    return depthwise_conv(promoted, w, window)


def pad(x: Any, padding: Sequence[IrSize], value: Any = 0) -> Any:
    """Return data padded with a constant or an expression; negative padding is ignored."""
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
    """Clamp a point to the last one; points beyond it repeat its result and are cropped."""
    return point if same_size(computed, points) else tirx.min(point, points - 1)


def _crop(shape: Sequence[IrSize], computed: Any, name: str) -> Any:
    """Return the first elements of a tensor along each axis."""
    if same_sizes(shape, list(map(plain, computed.shape))):
        return computed
    return te.compute(tuple(shape), lambda *index: computed(*index), name=name)


# ---------------------------------------------------------------- dot product instructions
# Instructions such as `vpdpbusd` and `vdpbf16ps` multiply 32 bits of adjacent data values with as many weights, and
# add the products to one 32-bit accumulator. So the last axis of weights has these terms, and the axis before it has
# the lanes of the result. Data have the dtype that the instruction takes.

_DYNAMIC_TILE: Final = 8
"""The number of rows in a tile if the number of rows is dynamic."""


class Products(NamedTuple):
    """A kind of dot product instruction.

    Attributes:
        name: The name of the blocks that use it, by which the schedule rule finds them.
        terms: The number of products for one accumulator.
        to_accumulator: Converts a value of the data or the weights to the dtype of the accumulators.
        has_matrices: Whether the instruction multiplies matrices; the data matrix has two points as rows.
    """

    name: str
    terms: int
    to_accumulator: Callable[[Any], Any]
    has_matrices: bool = False


INTEGERS: Final = Products("integer_dot", 4, lambda value: value.astype("int32"))
"""int8 products with exact int32 accumulation."""
PAIRS: Final = Products("integer_pairs", 2, INTEGERS.to_accumulator)
"""The same for CPUs that add two int8 products at a time."""
MATRICES: Final = Products("integer_matrices", 8, INTEGERS.to_accumulator, has_matrices=True)
"""int8 matrix multiply (smmla): eight terms of two pixels and two results at once."""
ROWS: Final = Products("integer_rows", 8, INTEGERS.to_accumulator, has_matrices=True)
"""int8 matrix multiply of two rows of a matrix, whose terms are contiguous."""
DEPTHWISE: Final = Products("integer_taps", 4, INTEGERS.to_accumulator)
"""int8 dot products of neighboring pixels and a channel's kernel positions, accumulated exactly."""
BFLOAT16: Final = Products("bfloat16_dot", 2, bfloat16.to_float32)
"""Products of bfloat16, which are exact in float32."""
PRODUCTS: Final = {
    products.name: products for products in (INTEGERS, PAIRS, DEPTHWISE, MATRICES, ROWS, BFLOAT16)
}
"""All kinds, by the name of their blocks."""


def dot_conv(
    products: Products, x: Any, w: Any, window: Window, groups: Groups, zero: Any = 0
) -> Any:
    """Return the accumulators (n, o/b, …, b) of a convolution with dot products of t terms.

    Data are (n, i/c, …, c) with c a multiple of t; weights are (o/b, blocks of data of its groups, …, c/t, b of o, t
    of c). The image is padded with `zero`, a constant or an expression.
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
    """Return the accumulators (n, o/4, …, 4) of a convolution with matrix instructions.

    Data are (n, i/4, …, 4), with an even number of blocks; weights are (o/4, i/8, …, 4 of o, 2 blocks of i, 4 of i).
    The padding makes the number of computed points even; the result is cropped to `points` along its last spatial axis.
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

    For dot products of t terms (`products`), the last spatial axis of the weights has words of t kernel positions, and
    a last axis t follows. The padding after the last axis must cover all these positions. The image is padded with
    `zero`.
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

    An instruction adds t products. Matrix instructions compute at least `rows` rows, an even number.
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
    """Return the points padded to whole register tiles, because instructions compute only whole tiles."""
    if is_dynamic(points):
        return divide_up(points, _DYNAMIC_TILE) * _DYNAMIC_TILE
    return pad_dot_rows(points)
