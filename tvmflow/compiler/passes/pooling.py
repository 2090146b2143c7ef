"""Gives pooling of plain images kernels, where windows overlap or reach beyond the image.

Each row of a result is computed in two steps: its windows are first reduced along columns, whose
neighbors are the lanes of vectors, and then along rows. So 3×3 numbers take four operations, not eight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import MIN_LANES, MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.compiler.vector_code import MAX_STRIDE

_FLOAT: Final = "float32"
_KINDS: Final = {"relax.nn.avg_pool2d": "avg", "relax.nn.max_pool2d": "max"}
_MAX_ELEMENTS: Final = 1 << 31
# So many numbers are reduced along columns before the first of them is read along a row: what was just stored in
# two vectors is not yet to be loaded as one.
_STRIP: Final = 2048
# Windows of more rows are no sequence of additions, but a loop.
_MAX_UNROLLED: Final = 16


def split_pools(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace the pooling operators that `find_pool` finds."""
    return mod if context.cpu is None else rewrite_main(mod, _PoolRewriter, context)


class _PoolRewriter(TargetRewriter):
    """Rewrites pooling of plain data."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        pool = find_pool(call)
        if pool is None or self.flow.is_weight(call.args[0]):
            return rewritten
        args = [rewritten.args[0]]
        if pool.counts_inside:
            args.append(relax.const(pool.inverse_counts()))
        kernel = make_kernel(pool, self._cpu)
        return self.call_function(kernel, f"{pool.kind}_pool2d", args, pool.result_shape)


class Window(NamedTuple):
    """The windows along one axis.

    Attributes:
        extent: The length of the data.
        results: The number of windows.
        size: The length of a window.
        stride: The distance of two windows.
        before: The padding before the data.
    """

    extent: int
    results: int
    size: int
    stride: int
    before: int

    @property
    def after(self) -> int:
        """The number of places behind the data that the last window reads."""
        return max(0, (self.results - 1) * self.stride + self.size - self.before - self.extent)

    @property
    def padded(self) -> int:
        """The length of the data with its padding."""
        return self.before + self.extent + self.after

    def counts(self) -> np.ndarray[Any, Any]:
        """Return how many numbers of the data each window has."""
        start = np.arange(self.results) * self.stride - self.before
        counts: np.ndarray[Any, Any]
        counts = np.minimum(start + self.size, self.extent) - np.maximum(start, 0)
        return counts


class Pool(NamedTuple):
    """A pooling operator.

    Attributes:
        kind: `avg` or `max`.
        outer: The lengths of the axes of samples and channels.
        rows: The windows along columns.
        columns: The windows along rows.
        counts_inside: Whether an average is one of the numbers inside of the image.
    """

    kind: str
    outer: tuple[int, int]
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

    def inverse_counts(self) -> np.ndarray[Any, Any]:
        """Return by what the sums of whole columns are multiplied, for each window along a row."""
        inverse: np.ndarray[Any, Any] = 1.0 / (self.rows.size * self.columns.counts())
        return inverse.astype(np.float32)


def find_pool(call: relax.Call) -> Pool | None:
    """Return the pooling operator that a call is.

    None for other calls, and for those that TVM's kernels compute as fast: of windows that neither
    overlap nor reach beyond the image.
    """
    name = ir.operator_name(call)
    if name not in _KINDS or not ir.is_float32(call):
        return None
    source, target, attrs = ir.shape_of(call.args[0]), ir.shape_of(call), call.attrs
    layouts = {str(attrs.layout), str(attrs.out_layout) or "NCHW"}
    if source is None or target is None or layouts != {"NCHW"}:
        return None
    if any(int(n) != 1 for n in attrs.dilation) or 0 in target:
        return None
    pads, sizes, strides = (
        list(map(int, n)) for n in (attrs.padding, attrs.pool_size, attrs.strides)
    )
    rows, columns = (
        Window(source[axis + 2], target[axis + 2], sizes[axis], strides[axis], pads[axis])
        for axis in range(2)
    )
    is_average = _KINDS[name] == "avg"
    counts_inside = is_average and not attrs.count_include_pad
    pool = Pool(
        kind=_KINDS[name],
        outer=(source[0], source[1]),
        rows=rows,
        columns=columns,
        counts_inside=counts_inside,
    )
    return pool if _is_supported(pool, has_ceil=bool(attrs.ceil_mode)) else None


def _is_supported(pool: Pool, *, has_ceil: bool) -> bool:
    rows, columns = pool.rows, pool.columns
    windows = (rows, columns)
    if math.prod(pool.shape) >= _MAX_ELEMENTS or columns.stride > MAX_STRIDE:
        return False
    # few results are no vectors
    if columns.results < MIN_LANES or columns.size > _MAX_UNROLLED:
        return False
    if any(min(window.counts()) <= 0 for window in windows):
        return False
    # what sizes are rounded up for is no padding, which counts
    if has_ceil and pool.kind == "avg" and not pool.counts_inside:
        return False
    overlaps = rows.size > 1 and any(window.stride < window.size for window in windows)
    return overlaps or any(window.before or window.after for window in windows)


def make_kernel(pool: Pool, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the data, inverse counts if it has any, and the result."""
    parameters = {"data": (pool.shape, _FLOAT)}
    if pool.counts_inside:
        parameters["inverse"] = ((pool.columns.results,), _FLOAT)
    parameters["out"] = (pool.result_shape, _FLOAT)
    with define_flat_kernel("pool", parameters) as (builder, buffers):
        _PoolEmitter(pool, cpu, dict(zip(parameters, buffers, strict=True))).emit()
    return builder.get()


class _PoolEmitter:
    """Emits the kernel of a pooling operator.

    Args:
        pool: The operator.
        cpu: The CPU.
        buffers: The parameters of the kernel by name, each with one index.
    """

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
        is_parallel = self._cpu.cores > 1 and work >= MIN_PARALLEL_ELEMENTS
        with (T.parallel if is_parallel else T.serial)(planes * strips) as part:
            plane, first = part // strips, part % strips * height
            rows = height if results % height == 0 else tirx.min(height, results - first)
            strip = T.alloc_buffer((height * pool.columns.padded,), _FLOAT, scope="local")
            self._pad(strip, height)
            with T.serial(rows) as row:
                self._reduce_columns(plane, first + row, strip, row * pool.columns.padded)
            with T.serial(rows) as row:
                self._reduce_row(plane, first + row, strip, row * pool.columns.padded)

    def _pad(self, strip: Any, height: int) -> None:
        """Emit what is beyond the image, on both sides of each row."""
        columns = self._pool.columns
        for start, count in ((0, columns.before), (columns.padded - columns.after, columns.after)):
            if count:
                with T.serial(height) as row, T.serial(count) as place:
                    T.buffer_store(strip, self._initial, [row * columns.padded + start + place])

    def _reduce_columns(self, plane: Any, row: Any, strip: Any, target: Any) -> None:
        """Emit the reduction of a row's windows along columns."""
        rows, columns = self._pool.rows, self._pool.columns
        start = row * rows.stride - rows.before

        def load(y: Any, column: Any) -> Any:
            place = (plane * rows.extent + y) * columns.extent + column
            return tirx.BufferLoad(self._buffers["data"], [place])

        def reduce_whole() -> None:
            for column in self._iterate(columns.extent):
                value = load(start, column)
                for k in range(1, rows.size):
                    value = self._combine(value, load(start + k, column))
                T.buffer_store(strip, value, [target + columns.before + column])

        def reduce_part() -> None:
            lowest, end = tirx.max(start, 0), tirx.min(start + rows.size, rows.extent)
            for column in self._iterate(columns.extent):
                place = target + columns.before + column
                T.buffer_store(strip, load(lowest, column), [place])
            with T.serial(end - lowest - 1) as k:
                for column in self._iterate(columns.extent, overlaps=False):
                    place = target + columns.before + column
                    value = self._combine(
                        tirx.BufferLoad(strip, [place]), load(lowest + 1 + k, column)
                    )
                    T.buffer_store(strip, value, [place])

        if rows.size > _MAX_UNROLLED:
            reduce_part()
        elif not rows.before and not rows.after:
            reduce_whole()
        else:
            is_whole = tirx.all(start >= 0, start + rows.size <= rows.extent)
            with T.If(is_whole):
                with T.Then():
                    reduce_whole()
                with T.Else():
                    reduce_part()

    def _reduce_row(self, plane: Any, row: Any, strip: Any, source: Any) -> None:
        """Emit the results of a row."""
        pool = self._pool
        rows, columns = pool.rows, pool.columns
        first = (plane * rows.results + row) * columns.results
        factor = None
        if pool.counts_inside and (rows.before or rows.after):
            start = row * rows.stride - rows.before
            count = tirx.min(start + rows.size, rows.extent) - tirx.max(start, 0)
            factor = T.Bind(T.float32(rows.size) / tirx.Cast(_FLOAT, count))
        for column in self._iterate(columns.results):
            value = None
            for k in range(columns.size):
                loaded = tirx.BufferLoad(strip, [source + column * columns.stride + k])
                value = loaded if value is None else self._combine(value, loaded)
            if pool.counts_inside:
                inverse = tirx.BufferLoad(self._buffers["inverse"], [column])
                value = value * (inverse if factor is None else inverse * factor)
            elif pool.kind == "avg":
                value = value * T.float32(1 / (rows.size * columns.size))
            T.buffer_store(self._buffers["out"], value, [first + column])

    def _iterate(self, length: int, *, overlaps: bool = True) -> Iterator[Any]:
        """Emit a loop over vectors of a row; yield the places of one.

        Args:
            length: The length of the row.
            overlaps: Whether the last vector may compute numbers of the one before it again, or else has fewer.
        """
        width = min(self._cpu.lanes, 1 << length.bit_length() - 1)
        whole, rest = divmod(length, width)
        with ExitStack() as loop:
            count = whole + bool(rest and overlaps)
            start: Any = 0
            if count > 1:
                start = loop.enter_context(T.serial(count)) * width
                start = tirx.min(start, length - width) if rest and overlaps else start
            yield start + loop.enter_context(T.vectorized(width))
        if rest and not overlaps:
            with T.serial(rest) as place:
                yield whole * width + place
