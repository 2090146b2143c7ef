"""Pooling and resizing of plain images."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.contraction.machine import MIN_LANES, CpuModel
from tvmflow.compiler.passes.reductions import parallel_loop
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel, if_else
from tvmflow.compiler.vector_code import MAX_STRIDE
from tvmflow.graph import ir
from tvmflow.graph import resize as operators
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, known_sizes, same_size, sizes_of
from tvmflow.graph.ir import OPAQUE
from tvmflow.graph.resize import Interpolation, Steps
from tvmflow.graph.rewriter import TAKES_EPILOGUE, MainRewriter

# ---------------------------------------------------------------- resizing
# For each pixel of the result, tables have its source pixels and their weights. Axes are resized one at a time if
# that takes less work.

RESIZES: Final = ("relax.image.resize2d", "relax.image.resize3d")
"""The operators that resize images and volumes."""

# TVM's default rounding of nearest-neighbor resizes, by coordinate mode; "floor" for other modes.
_DEFAULT_ROUNDING: Final = {"align_corners": "round"}
# A resize that repeats pixels at all these sizes does so at every size; the last one is larger than any image.
_CHECKED_SOURCES: Final = (2, 3, 37, 65_536)
_MAX_FACTOR: Final = 8


class Resize(NamedTuple):
    """A resize of a tensor: its mode, the axes that change, and the pixels of the result along them."""

    mode: Interpolation
    axes: tuple[int, ...]
    sizes: tuple[IrSize, ...]


def as_resize(call: relax.Call) -> Resize | None:
    """Return the description of a resize; None for other calls, and for modes without a table."""
    if ir.operator_name(call) not in RESIZES or not all(map(ir.is_float32, (call, call.args[0]))):
        return None
    source, target, attrs = sizes_of(call.args[0]), sizes_of(call), call.attrs
    if source is None or target is None or len(attrs.layout) != len(target):
        return None
    coordinates = attrs.coordinate_transformation_mode
    mode = Interpolation(
        method=attrs.method,
        coordinates=coordinates,
        rounding=attrs.rounding_method or _DEFAULT_ROUNDING.get(coordinates, "floor"),
        cubic_alpha=float(attrs.cubic_alpha),
        excludes_outside=bool(attrs.cubic_exclude),
    )
    axes = tuple(axis for axis, n in enumerate(target) if not same_size(n, source[axis]))
    has_dynamic = any(is_dynamic(source[axis]) or is_dynamic(target[axis]) for axis in axes)
    if not operators.is_supported(mode) or (has_dynamic and not operators.is_computed(mode)):
        return None
    return Resize(mode, axes, tuple(target[axis] for axis in axes))


def emit_resize(rewriter: MainRewriter, data: Any, resize: Resize, is_last: bool = True) -> Any:
    """Emit one kernel that resizes all axes; only the last resize (`is_last`) allows epilogue fusion."""
    steps, tables = _find_steps(rewriter, resize, data), list[Any]()
    sources, sizes = known_sizes(data), dict(zip(resize.axes, resize.sizes, strict=True))
    axes = tuple(axis for axis in resize.axes if axis not in steps)
    for axis in axes:
        source, size = sources[axis], sizes[axis]
        if is_dynamic(source) or is_dynamic(size):
            compute = functools.partial(operators.compute_taps, mode=resize.mode)
            pair = rewriter.kernel(compute, "resize_tables", source, size, pattern=OPAQUE)
            tables += [rewriter.emit(relax.TupleGetItem(pair, position)) for position in range(2)]
        else:
            tables += map(relax.const, operators.find_taps(source, size, resize.mode))
    function = functools.partial(operators.resize, axes=axes, steps=steps)
    pattern = TAKES_EPILOGUE if is_last else OPAQUE
    return rewriter.kernel(function, "resize", data, *tables, pattern=pattern)


def _find_steps(rewriter: MainRewriter, resize: Resize, data: Any) -> dict[int, Steps]:
    """Return axis -> `Steps` for axes with evenly spaced pixels; for dynamic axes, even at all sizes."""
    sources, found = known_sizes(data), dict[int, Steps]()

    def find(source: int, size: int) -> Steps | None:
        return operators.find_steps(operators.find_taps(source, size, resize.mode))

    for axis, size in zip(resize.axes, resize.sizes, strict=True):
        source = sources[axis]
        if not is_dynamic(source) and not is_dynamic(size):
            if (steps := find(source, size)) is not None:
                found[axis] = steps
            continue
        factors = (n for n in range(2, _MAX_FACTOR + 1) if same_size(source * n, size))
        factor, checked = next(factors, 0), {rewriter.tuning_sizes.size(source), *_CHECKED_SOURCES}
        repeats = (find(n, n * factor) == Steps(n * factor, 0, 1, factor) for n in checked)
        if factor and all(repeats):
            found[axis] = Steps(None, 0, 1, factor)
    return found


class ResizeRewriter(MainRewriter):
    """Converts the remaining resizes, of plain float32 data, to kernels with tables."""

    OPERATORS = RESIZES

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        resize = as_resize(call)
        source, target = self.tuning_sizes.shape(call.args[0]), self.tuning_sizes.shape(call)
        if resize is None or source is None or target is None or self.flow.is_weight(call.args[0]):
            return None
        data, last = rewritten.args[0], len(target) - 1
        if not resize.axes:
            return data
        # resizing an axis without tables takes too little work for a separate pass over memory
        is_even = len(_find_steps(self, resize, data)) == len(resize.axes)
        if last not in resize.axes or is_even:
            return emit_resize(self, data, resize)
        sizes = dict(zip(resize.axes, resize.sizes, strict=True))
        # resizing along the innermost axis is not vectorized, so it is done when there are fewest rows
        shrinking = [axis for axis in resize.axes if target[axis] < source[axis]]
        order = shrinking + [axis for axis in reversed(resize.axes) if axis not in shrinking]
        for axis in order:
            step = Resize(resize.mode, (axis,), (sizes[axis],))
            data = emit_resize(self, data, step, axis == order[-1])
        return data


# ---------------------------------------------------------------- pooling
# Pooling with windows that overlap or reach beyond the image. Each row of a result is computed in two steps: windows are
# first reduced along columns, with neighboring columns in the lanes of vectors, and then along rows. So 3×3 values take
# four operations, not eight.

_FLOAT: Final = "float32"
_KINDS: Final = {"relax.nn.avg_pool2d": "avg", "relax.nn.max_pool2d": "max"}
_MAX_ELEMENTS: Final = 1 << 31
# This many values are reduced along columns before the first of them is read along a row. A vector loaded along a row
# spans two stored ones, and would stall if these were stored just before.
_STRIP: Final = 2048
# Windows with more rows are reduced in a loop, which is not unrolled; windows with more columns are not rewritten.
_MAX_UNROLLED: Final = 16


class PoolRewriter(TargetRewriter):
    """Rewrites pooling of plain data for which `find_pool` returns a description."""

    OPERATORS = tuple(_KINDS)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        pool = find_pool(call)
        if pool is None or self.flow.is_weight(call.args[0]):
            return None
        args = [rewritten.args[0]]
        parameters = {"data": (pool.shape, _FLOAT)}
        if pool.counts_inside:
            # 1 / (number of values) for each window of a row, where all rows of windows are inside the image
            inverse = 1.0 / (pool.rows.size * pool.columns.counts())
            args.append(relax.const(inverse.astype(np.float32)))
            parameters["inverse"] = ((pool.columns.results,), _FLOAT)
        parameters["out"] = (pool.result_shape, _FLOAT)
        with define_flat_kernel("pool", parameters) as (builder, buffers):
            named = dict(zip(parameters, buffers, strict=True))
            _PoolEmitter(pool, self._cpu, named).emit()
        name = f"{pool.kind}_pool2d"
        return self.call_function(builder.get(), name, args, pool.result_shape)


class Window(NamedTuple):
    """The pooling windows along one axis; `before` is the padding before the data."""

    extent: int
    results: int
    size: int
    stride: int
    before: int

    @property
    def after(self) -> int:
        """The padding after the data: the positions beyond them that the last window reads."""
        return max(0, (self.results - 1) * self.stride + self.size - self.before - self.extent)

    @property
    def padded(self) -> int:
        """The length of the data with its padding."""
        return self.before + self.extent + self.after

    def counts(self) -> np.ndarray[Any, Any]:
        """Return how many elements of the data each window has."""
        start = np.arange(self.results) * self.stride - self.before
        return np.asarray(np.minimum(start + self.size, self.extent) - np.maximum(start, 0))


class Pool(NamedTuple):
    """A pooling operator.

    Attributes:
        kind: `avg` or `max`.
        outer: The numbers of samples and channels.
        rows: The windows along the height axis.
        columns: The windows along the width axis.
        counts_inside: Whether an average counts only the values inside the image.
    """

    kind: str
    outer: tuple[int, ...]
    rows: Window
    columns: Window
    counts_inside: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return (*self.outer, self.rows.extent, self.columns.extent)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.outer, self.rows.results, self.columns.results)


def find_pool(call: relax.Call) -> Pool | None:
    """Return the pooling of a call; None if unsupported, or as fast in TVM (no overlap, no padding)."""
    kind = _KINDS[ir.operator_name(call)]
    source, target, attrs = ir.shape_of(call.args[0]), ir.shape_of(call), call.attrs
    layouts = {str(attrs.layout), str(attrs.out_layout) or "NCHW"}
    if not ir.is_float32(call) or source is None or target is None or layouts != {"NCHW"}:
        return None
    if any(int(n) != 1 for n in attrs.dilation) or 0 in target:
        return None
    pads, sizes, strides = (map(int, n) for n in (attrs.padding, attrs.pool_size, attrs.strides))
    axes = zip(source[2:], target[2:], sizes, strides, list(pads)[:2], strict=True)
    rows, columns = windows = [Window(*axis) for axis in axes]
    counts_inside = kind == "avg" and not attrs.count_include_pad
    pool = Pool(kind, source[:2], rows, columns, counts_inside=counts_inside)
    if (
        math.prod(pool.shape) >= _MAX_ELEMENTS
        or columns.stride > MAX_STRIDE
        # few results do not fill a vector
        or columns.results < MIN_LANES
        or columns.size > _MAX_UNROLLED
        or any(min(window.counts()) <= 0 for window in windows)
        # here, padding counts, but not positions beyond it, which windows read if sizes are rounded up
        or (attrs.ceil_mode and kind == "avg" and not counts_inside)
    ):
        return None
    overlaps = rows.size > 1 and any(window.stride < window.size for window in windows)
    return pool if overlaps or any(window.before or window.after for window in windows) else None


class _PoolEmitter:
    """Emits the kernel of a pooling operator, whose parameters are buffers with one index."""

    def __init__(self, pool: Pool, cpu: CpuModel, buffers: dict[str, Any]) -> None:
        self._pool, self._cpu, self._buffers = pool, cpu, buffers
        is_average = pool.kind == "avg"
        self._combine = tirx.Add if is_average else tirx.max
        self._initial = T.float32(0 if is_average else -math.inf)

    def emit(self) -> None:
        """Emit a loop over strips of rows."""
        pool = self._pool
        results = pool.rows.results
        height = max(1, min(results, _STRIP // pool.columns.padded))
        strips = -(-results // height)
        height = -(-results // strips)
        planes = math.prod(pool.outer)
        work = math.prod(pool.result_shape) * (pool.rows.size + pool.columns.size)
        with parallel_loop(planes * strips, self._cpu.cores, work) as part:
            plane, first = part // strips, part % strips * height
            rows = height if results % height == 0 else tirx.min(height, results - first)
            size = height * pool.columns.padded
            strip = T.buffer_proxy(T.alloc_buffer((size,), _FLOAT, scope="local"))
            self._pad(strip, height)
            with T.serial(rows) as row:
                self._reduce_columns(plane, first + row, strip, row * pool.columns.padded)
            with T.serial(rows) as row:
                self._reduce_row(plane, first + row, strip, row * pool.columns.padded)

    def _pad(self, strip: Any, height: int) -> None:
        """Emit the padding on both sides of each row."""
        columns = self._pool.columns
        for start, count in ((0, columns.before), (columns.padded - columns.after, columns.after)):
            if count:
                with T.serial(height) as row, T.serial(count) as position:
                    strip[row * columns.padded + start + position] = self._initial

    def _reduce_columns(self, plane: Any, row: Any, strip: Any, target: Any) -> None:
        rows, columns = self._pool.rows, self._pool.columns
        start = row * rows.stride - rows.before

        def load(y: Any, column: Any) -> Any:
            return self._buffers["data"][(plane * rows.extent + y) * columns.extent + column]

        def reduce_whole() -> None:
            for column in self._iterate(columns.extent):
                value = load(start, column)
                for k in range(1, rows.size):
                    value = self._combine(value, load(start + k, column))
                strip[target + columns.before + column] = value

        def reduce_part() -> None:
            lowest, end = tirx.max(start, 0), tirx.min(start + rows.size, rows.extent)
            for column in self._iterate(columns.extent):
                strip[target + columns.before + column] = load(lowest, column)
            with T.serial(end - lowest - 1) as k:
                for column in self._iterate(columns.extent, overlaps=False):
                    position = target + columns.before + column
                    strip[position] = self._combine(strip[position], load(lowest + 1 + k, column))

        if rows.size > _MAX_UNROLLED:
            reduce_part()
        elif not rows.before and not rows.after:
            reduce_whole()
        else:
            is_whole = tirx.all(start >= 0, start + rows.size <= rows.extent)
            if_else(is_whole, reduce_whole, reduce_part)

    def _reduce_row(self, plane: Any, row: Any, strip: Any, source: Any) -> None:
        pool = self._pool
        rows, columns = pool.rows, pool.columns
        first = (plane * rows.results + row) * columns.results
        factor = None
        if pool.counts_inside and (rows.before or rows.after):
            start = row * rows.stride - rows.before
            count = tirx.min(start + rows.size, rows.extent) - tirx.max(start, 0)
            factor = T.Bind(T.float32(rows.size) / tirx.Cast(_FLOAT, count))
        for column in self._iterate(columns.results):
            start = source + column * columns.stride
            value = functools.reduce(self._combine, (strip[start + k] for k in range(columns.size)))
            if pool.counts_inside:
                inverse = self._buffers["inverse"][column]
                value = value * (inverse if factor is None else inverse * factor)
            elif pool.kind == "avg":
                value = value * T.float32(1 / (rows.size * columns.size))
            self._buffers["out"][first + column] = value

    def _iterate(self, length: int, *, overlaps: bool = True) -> Iterator[Any]:
        """Emit a loop over vectors of a row; yield the positions of a vector.

        The last vector may overlap the one before it, and repeat its values. Without `overlaps`, the tail is scalar.
        """
        width = min(self._cpu.lanes, 1 << length.bit_length() - 1)
        whole, tail = divmod(length, width)
        count = whole + bool(tail and overlaps)
        with T.serial(count) if count > 1 else nullcontext(0) as vector:
            start = vector * width
            start = tirx.min(start, length - width) if tail and overlaps else start
            with T.vectorized(width) as lane:
                yield start + lane
        if tail and not overlaps:
            with T.serial(tail) as position:
                yield whole * width + position
