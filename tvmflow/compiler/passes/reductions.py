"""CPU kernels for reductions, scans and scatters, for which TVM has no schedule or a slow one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_ELEMENTS
from tvmflow.compiler.contraction.packed import allocate_registers, iterate_vectors, loop_over
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, same_sizes, sizes_of
from tvmflow.graph.rewriter import MainRewriter

# ---------------------------------------------------------------- reductions of whole tensors

# Reductions that can be computed for rows of equal length first, and then over the results of the rows. The means of
# rows of integers would be rounded. A row's product of floats may overflow where the product of all elements does not.
_FLOATS: Final = ("float32", "float64")
_INTEGERS: Final = ("int32", "int64")
_SPLIT_DTYPES: Final = {
    **dict.fromkeys(("relax.max", "relax.min", "relax.sum"), _FLOATS + _INTEGERS),
    "relax.mean": _FLOATS,
    "relax.prod": _INTEGERS,
}
_MIN_ELEMENTS: Final = 2048
# Up to this length, the schedule for rows reduces a single row as fast.
_MAX_SINGLE_ROW: Final = 1 << 16
_MIN_ROW: Final = 64
_MAX_ROW: Final = 8192
_GOOD_ROW: Final = 1024
_WHOLE_VECTORS: Final = 64


class ReductionSplitter(MainRewriter):
    """Splits reductions of a large tensor to one value: rows on all cores first, then their results."""

    OPERATORS = tuple(_SPLIT_DTYPES)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        name = ir.operator_name(call)
        shape, results = self.tuning_sizes.shape(call.args[0]), ir.shape_of(call)
        if ir.dtype_of(call.args[0]) not in _SPLIT_DTYPES[name] or shape is None or results is None:
            return None
        elements, last = math.prod(shape), len(shape) - 1
        reduced = [int(axis) % len(shape) for axis in call.attrs.axis or ()]
        is_single_row = last > 0 and reduced == [last] and shape[-1] <= _MAX_SINGLE_ROW
        if math.prod(results) != 1 or elements < _MIN_ELEMENTS or is_single_row:
            return None
        [data] = rewritten.args
        axes = _choose_axes(shape)
        if axes is None:
            row = _choose_row(elements) if ir.shape_of(call.args[0]) is not None else None
            if row is None:
                return None
            data, axes = self.reshape(data, [elements // row, row]), [1]
        reduce = getattr(relax.op, name.removeprefix("relax."))
        result = self.emit(reduce(self.emit(reduce(data, axes))))
        return relax.op.reshape(result, results) if results else result


def _choose_axes(shape: Sequence[int]) -> list[int] | None:
    """Return the last axes if they form rows, so that earlier kernels can fuse with it; else None."""
    for first in reversed(range(1, len(shape))):
        row = math.prod(shape[first:])
        if row >= _MIN_ROW:
            is_split = row <= _MAX_ROW and math.prod(shape[:first]) > 1
            return list(range(first, len(shape))) if is_split else None
    return None


def _choose_row(elements: int) -> int | None:
    """Return a row length that divides the elements, of whole vectors if possible, or None."""

    def rate(row: int) -> tuple[bool, float]:
        return row % _WHOLE_VECTORS != 0, abs(math.log(row / _GOOD_ROW))

    rows = range(_MIN_ROW, min(_MAX_ROW, elements // 2) + 1)
    return min((row for row in rows if elements % row == 0), key=rate, default=None)


# ---------------------------------------------------------------- argmax and argmin
# TVM reduces (index, value) pairs one value at a time. Here, each lane keeps its first maximum so far, and its index.
# The last vector of a row may overlap the vector before it, since a value in two lanes has the same index in both.

# Operator -> whether it returns the index of the maximum.
ARGREDUCTIONS: Final = {"relax.argmax": True, "relax.argmin": False}
COMPARED_DTYPES: Final = {"float32": "float32", "int32": "int32", "int8": "int32", "uint8": "int32"}
"""The dtype of data -> the dtype in which they are compared."""
# For shorter rows, LLVM unrolls the comparisons and vectorizes them itself.
_MIN_LENGTH: Final = 16
# The bits of a float32 value without the sign, and the bits of infinity.
_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITY: Final = 0x7F800000
# A step compares up to `_MAX_WIDTH` vectors, each with its own accumulator, if a row then has at least `_MIN_STEPS`
# steps.
_MAX_WIDTH: Final = 4
_MIN_STEPS: Final = 4


class ArgReduceRewriter(TargetRewriter):
    """Vectorizes `argmax` and `argmin` along the last axis, or along all axes, of fixed length.

    `maximum(indices, 0)` is dropped: no index is negative.
    """

    OPERATORS = (*ARGREDUCTIONS, "relax.maximum")

    def __init__(self, mod: tvm.IRModule, context: Any) -> None:
        super().__init__(mod, context)
        self._indices = self.new_memo()

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        name, result = ir.operator_name(call), sizes_of(call)
        if name not in ARGREDUCTIONS:
            indices = self.resolve(rewritten.args[0]) if ir.is_zero(call.args[1]) else None
            is_alone = result == sizes_of(call.args[0])
            return indices if is_alone and indices in self._indices else None
        reduction = self._find(call, is_largest=ARGREDUCTIONS[name])
        if reduction is None or result is None:
            return None
        kernel = make_argreduce_kernel(reduction, result, self._cpu.cores, self._cpu.lanes)
        args = [rewritten.args[0]]
        indices = self.call_function(kernel, name[6:], args, result, ir.dtype_of(call))
        self._indices[indices] = True
        return indices

    def _find(self, call: Any, *, is_largest: bool) -> ArgReduction | None:
        data, axis = call.args[0], call.attrs.axis
        shape, typical = sizes_of(data), self.tuning_sizes.shape(data)
        if not shape or not typical or 0 in typical or self.flow.is_weight(data):
            return None
        last = len(shape) - 1
        is_last = axis is None or int(axis) % len(shape) == last
        if not is_last or ir.dtype_of(data) not in COMPARED_DTYPES:
            return None
        first = 0 if axis is None else last
        length = math.prod(typical[first:])
        if any(map(is_dynamic, shape[first:])) or not has_vectors(length, self._cpu.lanes):
            return None
        return ArgReduction(
            shape=shape,
            rows=math.prod(shape[:first]),
            length=length,
            typical=math.prod(typical),
            dtype=ir.dtype_of(data),
            result_dtype=ir.dtype_of(call),
            is_largest=is_largest,
        )


def has_vectors(length: int, lanes: int) -> bool:
    """Return whether rows of this length are compared in vectors of `lanes`."""
    return max(_MIN_LENGTH, lanes) <= length < 1 << 31


class ArgReduction(NamedTuple):
    """An argmax (`is_largest`) or argmin of rows, with the indices, the values, or both as results.

    Attributes:
        shape: The shape of the data; all but the length of rows may be dynamic.
        rows: The number of rows, which may be dynamic.
        typical: The number of elements, with tuning sizes in place of dynamic ones.
        result_dtype: The dtype of the indices; None if they are not a result.
        has_values: Whether the values are a result, before the indices.
        orders_nan: Whether NaN is greater than every other value; otherwise it is skipped.
    """

    shape: tuple[IrSize, ...]
    rows: IrSize
    length: int
    typical: int
    dtype: str
    result_dtype: str | None
    is_largest: bool
    has_values: bool = False
    orders_nan: bool = False

    @property
    def compared_dtype(self) -> str:
        """The dtype of the keys that are compared."""
        return "int32" if self.orders_nan else COMPARED_DTYPES[self.dtype]

    def key(self, value: Any) -> Any:
        """Return the key by which a value is compared."""
        if not self.orders_nan or self.dtype != "float32":
            return tirx.Cast(self.compared_dtype, value)
        # without bindings, which a vectorized loop must not have if shapes are dynamic
        bits = tirx.reinterpret("int32", value)
        magnitude = bits & _MAGNITUDE
        signed = tirx.Select(bits < 0, 0 - magnitude, magnitude)
        return tirx.Select(magnitude > _INFINITY, tirx.const(_MAGNITUDE, "int32"), signed)

    def is_beyond(self, a: Any, b: Any) -> Any:
        """Return whether key `a` is strictly better than key `b`: greater for argmax, less for argmin."""
        return a > b if self.is_largest else a < b


def make_argreduce_kernel(
    reduction: ArgReduction, result: tuple[IrSize, ...], cores: int, lanes: int
) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the data, then the values and indices, of shape `result`.

    The first of equal values wins. The index for a row of only NaN is 0. Vectors have `lanes` of 32 bits.
    """
    parameters = {"data": (reduction.shape, reduction.dtype)}
    if reduction.has_values:
        parameters["values"] = (result, reduction.dtype)
    if reduction.result_dtype:
        parameters["out"] = (result, reduction.result_dtype)
    with define_flat_kernel("place_reduction", parameters) as (builder, buffers):
        data, *results = buffers
        with parallel_loop(reduction.rows, cores, reduction.typical) as row:
            index = T.Bind(_emit_row(reduction, data, row, lanes))
            if reduction.has_values:
                results[0][row] = data[row * reduction.length + index]
            if reduction.result_dtype:
                results[-1][row] = tirx.Cast(reduction.result_dtype, index)
    return builder.get()


def _emit_row(reduction: ArgReduction, data: Any, row: Any, lanes: int) -> Any:
    """Emit the search of a row; return the index of its maximum or minimum."""
    length, dtype = reduction.length, reduction.compared_dtype
    width = lanes
    while width < _MAX_WIDTH * lanes and length >= 2 * _MIN_STEPS * width:
        width *= 2
    best, indices = (allocate_registers(width, dtype=kind) for kind in (dtype, "int32"))
    limit = tirx.min_value(dtype) if reduction.is_largest else tirx.max_value(dtype)
    if dtype == "float32":
        limit = tirx.const(-math.inf if reduction.is_largest else math.inf, dtype)
    with T.vectorized(width) as lane:
        best[lane] = limit
    with T.vectorized(width) as lane:
        indices[lane] = lane

    def compare(start: Any) -> None:
        with T.vectorized(width) as lane:
            value, before = reduction.key(data[row * length + start + lane]), best[lane]
            is_beyond = reduction.is_beyond(value, before)
            indices[lane] = tirx.Select(is_beyond, start + lane, indices[lane])
            best[lane] = tirx.Select(is_beyond, value, before)

    with T.serial(length // width) as step:
        compare(step * width)
    if length % width:
        compare(length - width)
    while width > 1:
        width //= 2
        with T.vectorized(width) as lane:
            a, b = best[lane], best[lane + width]
            x, y = indices[lane], indices[lane + width]
            is_beyond = reduction.is_beyond(b, a)
            is_second = tirx.Or(is_beyond, tirx.And(tirx.EQ(a, b), y < x))
            indices[lane] = tirx.Select(is_second, y, x)
            best[lane] = tirx.Select(is_beyond, b, a)
    return indices[0]


# ---------------------------------------------------------------- scans
# Cumulative sums and products, with the other axes in vectors.

_SCANS: Final[Mapping[str, tuple[Callable[[Any, Any], Any], int]]] = {
    "relax.cumsum": (tirx.Add, 0),
    "relax.cumprod": (tirx.Mul, 1),
}
"""Operator -> its binary operation and identity element."""
# The running totals of a part are held in this many vector registers.
_SCAN_VECTORS: Final = 4


class ScanRewriter(TargetRewriter):
    """Rewrites prefix scans (cumsum, cumprod) whose inner axes have fixed sizes."""

    OPERATORS = tuple(_SCANS)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        data, attrs = call.args[0], call.attrs
        shape, typical, dtype = sizes_of(call), self.tuning_sizes.shape(call), ir.dtype_of(call)
        if attrs.axis is None or ir.dtype_of(data) != dtype or self.flow.is_weight(data):
            return None
        axis = int(attrs.axis) % len(shape) if shape else 0
        if not shape or not typical or 0 in typical or any(map(is_dynamic, shape[axis + 1 :])):
            return None
        outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        function, initial = _SCANS[ir.operator_name(call)]
        lanes = self._cpu.lanes

        def emit_columns(buffers: Sequence[Any], start: Any, count: int) -> None:
            """Emit the scan of `count` adjacent columns from `start` on."""
            source, out = buffers
            totals = allocate_registers(count, dtype=dtype)
            for column in iterate_vectors(count, lanes):
                totals[column] = tirx.const(initial, dtype)
            with T.serial(length) as k:
                for column in iterate_vectors(count, lanes):
                    offset, before = start + k * inner + column, totals[column]
                    total = function(before, source[offset])
                    if attrs.exclusive:
                        out[offset] = before
                    totals[column] = total
                    if not attrs.exclusive:
                        out[offset] = totals[column]

        width = _SCAN_VECTORS * lanes
        whole = inner // width
        parameters = {"data": (shape, dtype), "out": (shape, dtype)}
        with define_flat_kernel("scan", parameters) as (builder, buffers):
            cores, elements = self._cpu.cores, math.prod(typical)
            if whole:
                with parallel_loop(outer * whole, cores, elements) as part:
                    start = part // whole * (length * inner) + part % whole * width
                    emit_columns(buffers, start, width)
            if inner % width:
                with parallel_loop(outer, cores, elements) as row:
                    emit_columns(buffers, row * (length * inner) + whole * width, inner % width)
        return self.call_function(builder.get(), "scan", [rewritten.args[0]], shape, dtype)


def parallel_loop(extent: IrSize, cores: int, elements: int) -> Any:
    """Emit a loop that several cores share if there is enough work."""
    return loop_over(extent, cores > 1 and elements >= MIN_PARALLEL_ELEMENTS)


# ---------------------------------------------------------------- scatters
# Rows of a tensor, at computed indices, are replaced by updates or combined with them.

_COMBINATIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "update": lambda _, update: update,
    "add": tirx.Add,
    "mul": tirx.Mul,
    "min": tirx.min,
    "max": tirx.max,
}
"""The name of a reduction -> the operation on an element and its update."""


class ScatterRewriter(TargetRewriter):
    """Rewrites scatters of rows of fixed length."""

    OPERATORS = ("relax.scatter_nd",)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        data, indices, updates = call.args
        shape, index_shape, updated = map(sizes_of, (data, indices, updates))
        typical = [self.tuning_sizes.shape(tensor) or () for tensor in (data, indices)]
        dtype, index_dtype = map(ir.dtype_of, (data, indices))
        combine = _COMBINATIONS.get(str(call.attrs.reduction))
        if not shape or not index_shape or updated is None or combine is None:
            return None
        if not all(sizes and 0 not in sizes for sizes in typical) or is_dynamic(index_shape[-1]):
            return None
        depth, lanes = int(index_shape[-1]), self._cpu.lanes
        has_rows = not any(map(is_dynamic, shape[depth:]))
        if not has_rows or not same_sizes(updated, (*index_shape[:-1], *shape[depth:])):
            return None
        is_supported = index_dtype in ("int32", "int64") and ir.dtype_of(updates) == dtype
        if not is_supported or all(map(self.flow.is_weight, call.args)):
            return None
        rows, width = math.prod(shape[:depth]), math.prod(shape[depth:])
        is_large = width * math.prod(typical[1][:-1]) >= MIN_PARALLEL_ELEMENTS
        # columns are divided among cores in whole vectors
        counts = range(self._cpu.cores if is_large else 1, 0, -1)
        parts = next(n for n in counts if n == 1 or not width % (n * lanes))
        parameters = {
            "data": (shape, dtype),
            "indices": (index_shape, index_dtype),
            "updates": ((*index_shape[:-1], *shape[depth:]), dtype),
            "out": (shape, dtype),
        }
        with (
            define_flat_kernel("scatter", parameters) as (builder, buffers),
            # each core applies all updates to its own columns, so that no atomic operations are needed
            loop_over(parts, parts > 1) as part,
        ):
            source, positions, new, out = buffers
            start, count = part * (width // parts), width // parts
            # without a division of columns, all rows are contiguous and copied as one
            row_count, row = (1, rows * width) if count == width else (rows, count)
            with T.serial(row_count) as i:
                for column in iterate_vectors(row, lanes):
                    out[i * width + start + column] = source[i * width + start + column]
            with T.serial(math.prod(index_shape[:-1])) as i:
                target: Any = tirx.const(0, "int64")
                for axis in range(depth):
                    target = target * shape[axis] + positions[i * depth + axis].astype("int64")
                for column in iterate_vectors(count, lanes):
                    offset = target * width + start + column
                    out[offset] = combine(out[offset], new[i * width + start + column])
        return self.call_function(builder.get(), "scatter", rewritten.args, shape, dtype)
