"""Operators on blocked layouts: `NCHW[b]c` data, and weights whose last axis is one vector.

A blocked tensor of `c` channels has ⌈c/b⌉ blocks. The lanes beyond `c` hold what the
operators computed from zeros, and are multiplied with zero weights. Weights may have a
narrower dtype than the data, in whose dtype everything is computed. Sequences, images and
volumes differ only in the number of spatial axes, which are written `…` below; padding is that
before each axis, followed by that after each; negative padding skips data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tvm import te, tirx, topi

from tvmflow.graph.dynamic_shapes import IrSize, divide_up, is_dynamic, plain, same_size, simplify

Sizes = Sequence[int]


class Groups(NamedTuple):
    """The channels of data that the blocks of a convolution's result read.

    Attributes:
        inputs: The channels of data in a group.
        outputs: The channels of the result in a group.
        lanes: The channels in a block of data; 1 for plain data.
        block: The channels in a block of the result.
        number: The number of groups.
        phases: How many blocks of the result after each other belong to the same channels.
        run: How many channels are multiplied after each other, beginning at the first of a group; 0 for whole
            blocks of data.
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


# Runs must save so much of the multiplications of whole blocks, and blocks for each group so much of others:
# the result is copied once more.
_MAX_RUN_SHARE: Final = 0.95
_MAX_APART_SHARE: Final = 0.8


def shorten(groups: Groups, *, joins: bool) -> Groups:
    """Return groups that multiply fewer empty lanes, or channels of other groups, where there are such.

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
    is_less = apart.result_blocks * apart.depth <= (
        _MAX_APART_SHARE * shared.result_blocks * shared.depth
    )
    return apart if is_less else shared


def _with_runs(groups: Groups) -> Groups:
    """Return groups that read runs of channels in place of blocks, where these are fewer channels."""
    runs = range(groups.block, groups.block // 2 - 1, -1)
    channels = -(-groups.inputs * groups.number // groups.lanes) * groups.lanes
    # no run may leave the data
    fitting = [each for run in runs if (each := groups._replace(run=run)).depth <= channels]
    best = min(fitting, key=lambda each: each.depth, default=groups)
    return best if best.depth <= _MAX_RUN_SHARE * groups.depth else groups


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


def conv(
    x: Any,
    w: Any,
    strides: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: Groups,
    tile_columns: int = 1,
) -> Any:
    """Return a convolution (n, o/b, …, b of o) of data (n, i/b, …, b), or plain (n, i, …).

    Weights are (o/b, blocks of data of its groups, …, b of i, b of o), without the axis `b of i` for plain data. Of
    the last lanes of a single block, which are empty, they may have none. Of groups with runs, they are (o/b, runs,
    …, i of a run, b of o). Columns of the result are computed up to a multiple of `tile_columns`, the last one again.
    """
    rank = len(strides)
    x = pad(x, padding)
    blocks, read, *kernel = (int(extent) for extent in w.shape[: rank + 2])
    channel = te.reduce_axis((0, read), "ic")
    kernel_axes = make_kernel_axes(kernel)
    lane = [te.reduce_axis((0, int(n)), "ib") for n in w.shape[rank + 2 : -1]]
    lanes = int(w.shape[-1])
    shape = convolution_shape(x, kernel, strides, padding, dilation, blocks, lanes)
    columns = shape[-2]
    padded_columns = pad_to_tiles(columns, tile_columns)
    is_padded = not same_size(padded_columns, columns)

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        if is_padded:
            pixel[-1] = tirx.min(pixel[-1], columns - 1)
        source, inside = groups.first(o) + channel, lane
        if groups.run:
            number = groups.first(o) + channel * groups.run + lane[0]
            source, inside = number // groups.lanes, [number % groups.lanes]
        value = x(n, source, *read_window(pixel, kernel_axes, strides, dilation, padding), *inside)
        weight = w(o, channel, *kernel_axes, *lane, inner).astype(x.dtype)
        return te.sum(value * weight, axis=[channel, *kernel_axes, *lane])

    if not is_padded:
        return te.compute(shape, element, name=f"conv{rank}d")
    padded = (*shape[:-2], padded_columns, lanes)
    result = te.compute(padded, element, name=f"conv{rank}d")
    return te.compute(shape, lambda *index: result(*index), name="unpadded")


def depthwise_conv(x: Any, w: Any, strides: Sizes, padding: Sizes, dilation: Sizes) -> Any:
    """Return a depthwise convolution (n, m·c/b, …, b) of data (n, c/b, …, b) and weights (m·c/b, …, b)."""
    x = pad(x, padding)
    blocks, *kernel, block = (int(extent) for extent in w.shape)
    multiplier = blocks // int(x.shape[1])
    kernel_axes = make_kernel_axes(kernel)

    def element(n: Any, c: Any, *position: Any) -> Any:
        *pixel, inner = position
        source = c if multiplier == 1 else c // multiplier
        weight = w(c, *kernel_axes, inner).astype(x.dtype)
        value = x(n, source, *read_window(pixel, kernel_axes, strides, dilation, padding), inner)
        return te.sum(value * weight, axis=kernel_axes)

    shape = convolution_shape(x, kernel, strides, padding, dilation, blocks, block)
    return te.compute(shape, element, name=f"depthwise_conv{len(strides)}d")


def add_parts(whole: Sizes, corners: Sequence[Sizes], *parts: Any) -> Any:
    """Return the sum of parts of an image (n, o, …, b) of some extents, each at its first pixel."""

    def element(n: Any, o: Any, *position: Any) -> Any:
        *pixel, inner = position
        total = tirx.const(0, parts[0].dtype)
        for corner, part in zip(corners, parts, strict=True):
            size = [int(extent) for extent in part.shape[2:-1]]
            inside = [
                condition
                for y, start, extent, edge in zip(pixel, corner, size, whole, strict=True)
                for condition in ((y >= start, y < start + extent) if extent < edge else ())
            ]
            source = [y - start for y, start in zip(pixel, corner, strict=True)]
            value = part(n, o, *source, inner)
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
        values = [part(i, o, *source, inner) for part in parts]
        value = values[-1]
        for turn, own in zip(turns, values[:-1], strict=True):
            axes = zip(pixel, strides, turn, strict=True)
            is_turn = tirx.all(*(tirx.EQ(y % step, rest) for y, step, rest in axes))
            value = tirx.if_then_else(is_turn, own, value)
        return value

    return _compute("interleave", (n, blocks, *shape, block), element)


def dense(x: Any, w: Any, columns: int, padded_rows: int | None = None) -> Any:
    """Return the product (…, rows, columns) of a matrix (…, rows, k) and weights (⌈columns/b⌉, k, b).

    This many `padded_rows` are computed, the last one again where there are more; None for those of the matrix, whose
    number may be dynamic.
    """
    *outer, rows, depth = map(plain, x.shape)
    blocks, _, block = (int(extent) for extent in w.shape)
    is_padded = padded_rows not in (None, rows)
    padded_rows = padded_rows if is_padded else rows
    k = te.reduce_axis((0, depth), "k")

    def element(*index: Any) -> Any:
        *batch, row, column = index
        existing = tirx.min(row, rows - 1) if is_padded else row
        weight = w[column // block, k, column % block].astype(x.dtype)
        return te.sum(x(*batch, existing, k) * weight, axis=[k])

    product = te.compute((*outer, padded_rows, blocks * block), element, name="dense")
    if not is_padded and blocks * block == columns:
        return product
    return te.compute((*outer, rows, columns), lambda *index: product(*index), name="unpadded")


def pad(x: Any, padding: Sizes, value: Any = 0) -> Any:
    """Return data with a number or an expression around each image; negative padding changes nothing."""
    padding = [max(width, 0) for width in padding]
    if not any(padding):
        return x
    rank = len(padding) // 2
    rest = [0] * (len(x.shape) - 2 - rank)
    before, after = padding[:rank], padding[rank:]
    number = tirx.const(value, x.dtype) if isinstance(value, int) else value
    return topi.nn.pad(x, [0, 0, *before, *rest], [0, 0, *after, *rest], number, name="pad")


def pad_to_tiles(extent: IrSize, tile: int) -> IrSize:
    """Return the least multiple of a tile that is not less than an extent."""
    return simplify(divide_up(extent, tile) * tile)


def make_kernel_axes(kernel: Sizes) -> list[Any]:
    """Return the reduction axes over the positions of a kernel."""
    names = ("kd", "kh", "kw")[-len(kernel) :]
    return [te.reduce_axis((0, size), name) for size, name in zip(kernel, names, strict=True)]


def read_window(
    pixel: Any, kernel_axes: Any, strides: Sizes, dilation: Sizes, padding: Sizes
) -> list[Any]:
    """Return the pixel of the padded data that a kernel position reads for a pixel of the result."""
    before = padding[: len(strides)]
    axes = zip(pixel, kernel_axes, strides, dilation, before, strict=True)
    return [y * step + offset * gap + max(-width, 0) for y, offset, step, gap, width in axes]


def convolution_shape(
    x: Any,
    kernel: Sizes,
    strides: Sizes,
    padding: Sizes,
    dilation: Sizes,
    blocks: int,
    block: int,
) -> tuple[IrSize, ...]:
    """Return the shape of a convolution's result over data that are already padded."""
    rank = len(kernel)
    skipped = [min(before, 0) for before in padding[:rank]]
    skipped = [skip + min(after, 0) for skip, after in zip(skipped, padding[rank:], strict=True)]
    axes = zip(x.shape[2 : 2 + rank], skipped, kernel, strides, dilation, strict=True)
    spatial = [
        simplify((plain(extent) + skip - (size - 1) * gap - 1) // step + 1)
        for extent, skip, size, step, gap in axes
    ]
    return (plain(x.shape[0]), blocks, *spatial, block)


# ---------------------------------------------------------------- quantized data


def quantized_depthwise_conv(
    x: Any, w: Any, strides: Sizes, padding: Sizes, dilation: Sizes, zero: Any
) -> Any:
    """Return `depthwise_conv` of 8-bit values minus their zero point (a number or expression), as float32.

    Sums are exact up to 2²⁴: more than 500 products.
    """
    zero_point = tirx.const(zero, "int32") if isinstance(zero, int) else zero.astype("int32")
    promoted = te.compute(
        x.shape,
        lambda *index: (x(*index).astype("int32") - zero_point).astype("float32"),
        name="widened",
        tag="elemwise",
    )
    return depthwise_conv(promoted, w, strides, padding, dilation)
