"""Operators of ONNX that Relax lacks, as tensor expressions."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvm import te, tirx

MAX_WINDOW: Final = 1 << 24
"""The maximum number of elements in a window whose maximum has an index: exact in float32."""

MAX_DETERMINANT_ROWS: Final = 16
"""The maximum number of rows of a matrix with a determinant: each row adds four loops to the kernel."""


def _limit(index: Any, size: Any) -> Any:
    """Return an index as int32, clamped to 0 … size − 1."""
    wide, last = index.astype("int64"), tirx.Cast("int64", size - 1)
    return tirx.Cast("int32", tirx.Max(tirx.Min(wide, last), tirx.const(0, "int64")))


# ---------------------------------------------------------------- windows


class Windows(NamedTuple):
    """The windows of a pooling operator, per spatial axis; `padding` is only the padding before the data."""

    sizes: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    padding: Sequence[int]
    after: Sequence[int]

    @classmethod
    def read(cls, attributes: Mapping[str, Any], sizes: Sequence[int]) -> Windows:
        rank = len(sizes)
        defaults = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank}
        strides, dilations, pads = (
            list(map(int, attributes.get(name, default))) for name, default in defaults.items()
        )
        return cls(sizes, strides, dilations, pads[:rank], pads[rank:])

    def make_axes(self) -> list[Any]:
        return [te.reduce_axis((0, size), name=f"tap{n}") for n, size in enumerate(self.sizes)]


def add_blocks(columns: Any, image: Sequence[int], counts: Sequence[int], windows: Windows) -> Any:
    """Return images (N, C, …); each pixel is the sum of the block elements that cover it (col2im).

    The columns (N, C · elements of a block, blocks) are flattened blocks; there are `counts` blocks along each axis.
    """
    batch, depth, _ = columns.shape
    channels = int(depth) // math.prod(windows.sizes)
    kernel_axes = windows.make_axes()
    zero = tirx.const(0, columns.dtype)

    def pixel(n: Any, channel: Any, *indices: Any) -> Any:
        row, column, conditions = channel, 0, []
        for axis, (position, offset) in enumerate(zip(indices, kernel_axes, strict=True)):
            stride = windows.strides[axis]
            # The start of the block in which this kernel position falls on this pixel.
            start = position + windows.padding[axis] - offset * windows.dilations[axis]
            conditions += [
                start >= 0,
                tirx.truncmod(start, stride) == 0,
                tirx.truncdiv(start, stride) < counts[axis],
            ]
            row = row * windows.sizes[axis] + offset
            column = column * counts[axis] + tirx.truncdiv(start, stride)
        return te.sum(
            tirx.if_then_else(tirx.all(*conditions), columns[n, row, column], zero),
            axis=kernel_axes,
        )

    return te.compute((batch, channels, *image), pixel, name="add_blocks")


def find_maxima(data: Any, maxima: Any, windows: Windows, *, counts_columns: bool) -> Any:
    """Return the indices (int64) of the windows' maxima (N, C, …) in the flattened data (N, C, …).

    Of equal elements, the first one counts. If the maximum is not in the window (padding or NaN), the index is that
    of the window's last element, perhaps beyond the data. With `counts_columns`, the first spatial axis is contiguous.
    """
    sizes = list(data.shape[2:])
    order = list(range(len(sizes)))

    def position(image: Any, channel: Any, spatial: Sequence[Any]) -> Any:
        index = image * data.shape[1] + channel
        for axis in reversed(order) if counts_columns else order:
            index = index * sizes[axis] + spatial[axis]
        return index.astype("int64")

    def reads(window: Sequence[Any], offset: Sequence[Any]) -> list[Any]:
        return [
            window[axis] * windows.strides[axis]
            + offset[axis] * windows.dilations[axis]
            - windows.padding[axis]
            for axis in order
        ]

    kernel_axes = windows.make_axes()
    last = tirx.const(math.prod(windows.sizes) - 1, "int32")

    def find(image: Any, channel: Any, *window: Any) -> Any:
        spatial = reads(window, kernel_axes)
        is_within = tirx.all(
            *(tirx.all(at >= 0, at < n) for at, n in zip(spatial, sizes, strict=True))
        )
        is_greatest = tirx.if_then_else(
            is_within,
            data(image, channel, *spatial) == maxima(image, channel, *window),
            tirx.const(False, "bool"),
        )
        number: Any = tirx.const(0, "int32")
        for axis in order:
            number = number * windows.sizes[axis] + tirx.Cast("int32", kernel_axes[axis])
        # float32, because GPU schedules lack cross-thread integer max reductions
        before_last = tirx.Cast("float32", last - number)
        return te.max(
            tirx.Select(is_greatest, before_last, tirx.const(0, "float32")), axis=kernel_axes
        )

    first = te.compute(maxima.shape, find, name="find_first")

    def locate(image: Any, channel: Any, *window: Any) -> Any:
        number = last - first(image, channel, *window).astype("int32")
        offset: list[Any] = []
        for size in reversed(windows.sizes):
            offset.insert(0, number % size)
            number = number // size
        return position(image, channel, reads(window, offset))

    return te.compute(maxima.shape, locate, name="find_maxima")


def clamp_indices(indices: Any, count: Any) -> Any:
    """Clamp indices (…) to `count` elements, and cast them to int64."""
    return te.compute(
        indices.shape,
        lambda *index: _limit(indices(*index), count).astype("int64"),
        name="limit_places",
    )


def infer_unpooled_shape(shape: Sequence[int], windows: Windows) -> list[int]:
    """Return the shape of the data of MaxUnpool, given the shape of its input, the windows' maxima."""
    spatial = [
        (size - 1) * stride + edge - front - back
        for size, stride, edge, front, back in zip(
            shape[2:], windows.strides, windows.sizes, windows.padding, windows.after, strict=True
        )
    ]
    if any(isinstance(size, int) and size < 1 for size in spatial):
        raise ValueError(f"its result would have the sizes {spatial}")
    return [*shape[:2], *spatial]


# ---------------------------------------------------------------- sequences


def reverse_sequences(data: Any, lengths: Any, batch_axis: int, time_axis: int) -> Any:
    """Return data with the first steps of each sequence reversed; lengths are clamped to the steps."""
    steps = data.shape[time_axis]

    def read(*position: Any) -> Any:
        step = position[time_axis]
        length = _limit(lengths(_limit(position[batch_axis], lengths.shape[0])), steps + 1)
        last = (length - 1).astype(step.ty.dtype)
        source = tirx.Select(step <= last, last - step, step)
        return data(*position[:time_axis], source, *position[time_axis + 1 :])

    return te.compute(data.shape, read, name="reverse_sequences")


# ---------------------------------------------------------------- determinants


def determinant(matrices: Any) -> Any:
    """Return the determinants of square matrices (…, n, n), by Gaussian elimination with pivots."""
    *batch, rows, _ = matrices.shape
    dtype, count = matrices.dtype, int(rows)
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
    axes = len(batch)
    product = te.compute(batch, lambda *_: one, name="product")
    left = matrices
    for size in range(count, 0, -1):
        left, product = _eliminate(left, product, axes, size, zero, one)
    return product


def _eliminate(
    matrix: Any, product: Any, axes: int, size: int, zero: Any, one: Any
) -> tuple[Any, Any]:
    """Return each matrix without one row and column, and the product of the pivots so far."""
    batch = matrix.shape[:axes]
    row = te.reduce_axis((0, size), name="row")
    greatest = te.compute(
        batch, lambda *b: te.max(te.abs(matrix(*b, row, 0)), axis=row), name="greatest"
    )

    def find_pivot(*b: Any) -> Any:
        result: Any = tirx.const(0, "int32")
        for index in reversed(range(size)):
            is_greatest = te.abs(matrix(*b, index, 0)) == greatest(*b)
            result = tirx.Select(is_greatest, tirx.const(index, "int32"), result)
        return result

    position = te.compute(batch, find_pivot, name="pivot")
    signed = te.compute(
        batch,
        lambda *b: (
            product(*b)
            * matrix(*b, position(*b), 0)
            * tirx.Select(position(*b) == 0, one, zero - one)
        ),
        name="product",
    )
    if size == 1:
        return matrix, signed

    def rest(*index: Any) -> Any:
        b, (i, j) = index[:axes], index[axes:]
        pivot = matrix(*b, position(*b), 0)
        # The first row takes the place of the pivot's row.
        own = tirx.Select(tirx.Cast("int32", i) + 1 == position(*b), 0, tirx.Cast("int32", i) + 1)
        factor = tirx.Select(pivot == zero, zero, matrix(*b, own, 0) / pivot)
        return matrix(*b, own, j + 1) - factor * matrix(*b, position(*b), j + 1)

    return te.compute([*batch, size - 1, size - 1], rest, name="rest"), signed


# ---------------------------------------------------------------- regions


class Regions(NamedTuple):
    """The samples of a region in RoiAlign.

    Attributes:
        height: The number of bins of a region from top to bottom; `width`: from left to right.
        samples: The number of samples of a bin along each axis; 0 for one sample per pixel that the bin covers.
        scale: The factor from coordinates of regions to pixels.
        is_aligned: Whether the center of the first pixel is at 0.5; otherwise it is at 0, and regions have
            at least one pixel.
        takes_greatest: Whether a bin is the maximum of its samples, not their mean. In this mode ONNX defines a
            sample as the maximum of the four weighted pixels around it.
    """

    height: int
    width: int
    samples: int
    scale: float
    is_aligned: bool
    takes_greatest: bool


class _Samples:
    """The sampling positions in regions (R, 4); a region is left, top, right, bottom."""

    def __init__(self, boxes: Any, sizes: Sequence[Any], regions: Regions) -> None:
        self._boxes, self._sizes, self._regions = boxes, sizes, regions
        self.dtype = boxes.dtype
        self._bins = (regions.height, regions.width)

    def _number(self, value: float) -> Any:
        return tirx.const(value, self.dtype)

    def _side(self, box: Any, column: int) -> Any:
        offset = self._number(0.5 if self._regions.is_aligned else 0.0)
        return self._boxes(box, column) * self._number(self._regions.scale) - offset

    def _step(self, box: Any, axis: int) -> Any:
        length = self._side(box, 3 - axis) - self._side(box, 1 - axis)
        if not self._regions.is_aligned:
            length = te.max(length, self._number(1))
        return length / self._number(self._bins[axis])

    def count(self, box: Any, axis: int) -> Any:
        if self._regions.samples > 0:
            return tirx.const(self._regions.samples, "int32")
        return te.ceil(self._step(box, axis)).astype("int32")

    def position(self, box: Any, axis: int, cell: Any, sample: Any) -> Any:
        step = self._step(box, axis)
        part = (tirx.Cast(self.dtype, sample) + self._number(0.5)) * step
        within = part / tirx.Cast(self.dtype, self.count(box, axis))
        return self._side(box, 1 - axis) + step * tirx.Cast(self.dtype, cell) + within

    def is_outside(self, at: Any, axis: int) -> Any:
        size = tirx.Cast(self.dtype, self._sizes[axis])
        return tirx.any(at < self._number(-1), at > size)

    def pixels(self, at: Any, axis: int) -> list[tuple[Any, Any]]:
        """Return the two pixels around a coordinate, and their weights."""
        last = self._sizes[axis] - 1
        # With the operands in this order, NaN becomes 0.
        at = tirx.Min(tirx.Max(at, self._number(0)), tirx.Cast(self.dtype, last))
        low = at.astype("int32")
        rest = at - tirx.Cast(self.dtype, low)
        return [(low, self._number(1) - rest), (te.min(low + 1, last), rest)]


def find_samples(boxes: Any, sizes: Sequence[Any], regions: Regions) -> list[Any]:
    """Return tables (R, bins · samples) of the pixels around each sample of regions (R, 4).

    For each axis there are four tables: first pixel, its weight, second pixel, its weight.
    """
    samples = _Samples(boxes, sizes, regions)

    def table(axis: int, part: int) -> Any:
        def find(box: Any, index: Any) -> Any:
            at = samples.position(box, axis, index // regions.samples, index % regions.samples)
            pixel, weight = samples.pixels(at, axis)[part // 2]
            zero = tirx.const(0, samples.dtype)
            is_weight = part % 2 == 1
            return tirx.Select(samples.is_outside(at, axis), zero, weight) if is_weight else pixel

        bins = (regions.height, regions.width)[axis]
        return te.compute([boxes.shape[0], bins * regions.samples], find, name="samples")

    return [table(axis, part) for axis in range(2) for part in range(4)]


def combine_samples(data: Any, images: Any, *tables: Any, regions: Regions) -> Any:
    """Return the bins (R, height, width, C) of regions in images (N, H, W, C).

    `find_samples` makes the tables. `images` (R,) is the image index of each region, and is clamped.
    """
    per_axis, count = len(tables) // 2, regions.samples
    combine = te.max if regions.takes_greatest else operator.add

    def element(box: Any, *position: Any) -> Any:
        *cells, channel = position
        image = _limit(images(_limit(box, images.shape[0])), data.shape[0])
        values = []
        for sample in itertools.product(range(count), repeat=2):
            sides = [
                [(first(box, at), weight(box, at)), (second(box, at), other(box, at))]
                for (first, weight, second, other), at in zip(
                    (tables[:per_axis], tables[per_axis:]),
                    (cell * count + step for cell, step in zip(cells, sample, strict=True)),
                    strict=True,
                )
            ]
            values += [
                data(image, y, x, channel) * (down * across).astype(data.dtype)
                for (y, down), (x, across) in itertools.product(*sides)
            ]
        result = functools.reduce(combine, values)
        return result if regions.takes_greatest else result / tirx.const(count**2, data.dtype)

    shape = [tables[0].shape[0], regions.height, regions.width, data.shape[3]]
    return te.compute(shape, element, name="combine_samples")


def align_regions(data: Any, boxes: Any, images: Any, regions: Regions) -> Any:
    """Return the bins (R, C, height, width) of regions (R, 4) in images (N, C, H, W).

    `images` (R,) is the image index of each region, and is clamped. Bins without a sample are 0.
    """
    samples = _Samples(boxes, data.shape[2:], regions)
    zero = tirx.const(0, data.dtype)

    def element(box: Any, channel: Any, *position: Any) -> Any:
        counts = [samples.count(box, axis) for axis in range(2)]
        steps = [te.reduce_axis((0, counts[axis]), name=f"sample{axis}") for axis in range(2)]
        coordinates = [samples.position(box, n, position[n], steps[n]) for n in range(2)]
        is_outside = tirx.any(*(samples.is_outside(at, n) for n, at in enumerate(coordinates)))
        image = _limit(images(_limit(box, images.shape[0])), data.shape[0])
        around = itertools.product(*(samples.pixels(at, n) for n, at in enumerate(coordinates)))
        values = [
            data(image, channel, y, x) * (down * across).astype(data.dtype)
            for (y, down), (x, across) in around
        ]
        combine, reduce = (te.max, te.max) if regions.takes_greatest else (operator.add, te.sum)
        sample = tirx.if_then_else(is_outside, zero, functools.reduce(combine, values))
        if not regions.takes_greatest:
            sample = sample / tirx.Cast(data.dtype, counts[0] * counts[1])
        return reduce(sample, axis=steps)

    shape = [boxes.shape[0], data.shape[1], regions.height, regions.width]
    result = te.compute(shape, element, name="align_regions")

    # TVM's reduction leaves the result unset if its loop has no iterations.
    def without_samples(box: Any, *position: Any) -> Any:
        is_empty = tirx.any(*(samples.count(box, axis) <= 0 for axis in range(2)))
        return tirx.Select(is_empty, zero, result(box, *position))

    return te.compute(shape, without_samples, name="without_samples")
