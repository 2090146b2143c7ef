"""Gives `argmax` and `argmin` of rows kernels that compare vectors.

TVM's reductions of pairs of number and place compare one number at a time.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_ELEMENTS
from tvmflow.compiler.open_sizes import IrSize, is_open, sizes_of
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel

# Whether it is the largest number whose place an operator returns.
_OPERATORS: Final = {"relax.argmax": True, "relax.argmin": False}
COMPARED_DTYPES: Final = {
    "float32": "float32",
    "int32": "int32",
    "int8": "int32",
    "uint8": "int32",
}
"""The dtype of data -> that in which they are compared."""


def vectorize_place_reductions(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace `argmax` and `argmin` along the last axis, or along all axes, of fixed length."""
    return mod if context.cpu is None else rewrite_main(mod, _PlaceRewriter, context)


class _PlaceRewriter(TargetRewriter):
    """Rewrites reductions to places, and drops maxima of these and 0, which no place is below."""

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod, context)
        self._places = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        name = ir.operator_name(call)
        if name == "relax.maximum" and _is_zero(call.args[1]):
            places = ir.resolve_alias(rewritten.args[0], self.lookup_binding)
            is_alone = sizes_of(call) == sizes_of(call.args[0])
            return places if is_alone and places in self._places else rewritten
        if name not in _OPERATORS:
            return rewritten
        reduction = self._find(call, is_largest=_OPERATORS[name])
        result = sizes_of(call)
        if reduction is None or result is None:
            return rewritten
        kernel = make_kernel(reduction, result, self._cpu.cores, self._cpu.lanes)
        dtype = ir.dtype_of(call)
        places = self.call_function(kernel, name[6:], [rewritten.args[0]], result, dtype)
        self._places[places] = True
        return places

    def _find(self, call: relax.Call, *, is_largest: bool) -> PlaceReduction | None:
        """Return the reduction that a call computes; None for one that has no kernel here."""
        data, axis = call.args[0], call.attrs.axis
        shape, typical = sizes_of(data), self.numbers.shape(data)
        if not shape or not typical or 0 in typical or self.flow.is_weight(data):
            return None
        if ir.dtype_of(data) not in COMPARED_DTYPES:
            return None
        if axis is not None and int(axis) % len(shape) != len(shape) - 1:
            return None
        first = 0 if axis is None else len(shape) - 1
        length = math.prod(typical[first:])
        if any(map(is_open, shape[first:])) or not has_vectors(length, self._cpu.lanes):
            return None
        return PlaceReduction(
            shape=shape,
            rows=math.prod(shape[:first]),
            length=length,
            typical=math.prod(typical),
            dtype=ir.dtype_of(data),
            result_dtype=ir.dtype_of(call),
            is_largest=is_largest,
        )


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, tvm.ir.Constant) and not expr.value.numpy().any()


# ---------------------------------------------------------------- kernel
# Each lane keeps the first of the largest numbers that it has seen, and its place. The last vector
# of a row overlaps the one before it: a number that two lanes have seen has one place in both.


# LLVM makes vectors of the unrolled comparisons of shorter rows.
_MIN_LENGTH: Final = 16
# The bits of a float32 number but its sign, and of infinity.
_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITY: Final = 0x7F800000
# So many vectors are compared side by side, if a row has some times as many.
_MAX_WIDTH: Final = 4
_MIN_STEPS: Final = 4


def has_vectors(length: int, lanes: int) -> bool:
    """Return whether rows of this length are compared in vectors of so many lanes."""
    return max(_MIN_LENGTH, lanes) <= length < 1 << 31


class PlaceReduction(NamedTuple):
    """The places of the largest or smallest numbers of rows, and these themselves.

    Attributes:
        shape: The shape of the data, which may be open but for the rows' length.
        rows: The number of rows, which may be open.
        length: The numbers of a row.
        typical: About how many numbers there are.
        dtype: Their dtype.
        result_dtype: The dtype of the places; None if these are no result.
        is_largest: Whether the largest numbers are looked for.
        has_values: Whether the numbers are a result, before their places.
        orders_nan: Whether NaN is greater than every number; else it is passed over.
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
        """The dtype of what is compared."""
        return "int32" if self.orders_nan else COMPARED_DTYPES[self.dtype]

    def key(self, number: Any) -> Any:
        """Return what is compared in place of a number of the data."""
        if not self.orders_nan or self.dtype != "float32":
            return tirx.Cast(self.compared_dtype, number)
        # no names for them: a loop that becomes a vector may have no bindings where sizes are open
        bits = tirx.reinterpret("int32", number)
        magnitude = bits & _MAGNITUDE
        signed = tirx.Select(bits < 0, 0 - magnitude, magnitude)
        return tirx.Select(magnitude > _INFINITY, tirx.const(_MAGNITUDE, "int32"), signed)

    def is_beyond(self, a: Any, b: Any) -> Any:
        """Return whether the first of two keys is found rather than the second."""
        return a > b if self.is_largest else a < b


def make_kernel(
    reduction: PlaceReduction, result: tuple[IrSize, ...], cores: int, lanes: int
) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the data, and the numbers and places of shape `result`.

    Of equal numbers the first one is found. The place in a row of nothing but NaN is 0.

    Args:
        reduction: The reduction.
        result: The shape of each result.
        cores: The cores that the work is divided for.
        lanes: The numbers of 32 bits in a vector.
    """
    parameters = {"data": (reduction.shape, reduction.dtype)}
    if reduction.has_values:
        parameters["values"] = (result, reduction.dtype)
    if reduction.result_dtype:
        parameters["out"] = (result, reduction.result_dtype)
    with define_flat_kernel("place_reduction", parameters) as (builder, (data, *results)):
        is_parallel = cores > 1 and reduction.typical >= MIN_PARALLEL_ELEMENTS
        with (T.parallel if is_parallel else T.serial)(reduction.rows) as row:
            place = T.Bind(_emit_row(reduction, data, row, lanes))
            if reduction.has_values:
                number = tirx.BufferLoad(data, [row * reduction.length + place])
                T.buffer_store(results[0], number, [row])
            if reduction.result_dtype:
                T.buffer_store(results[-1], tirx.Cast(reduction.result_dtype, place), [row])
    return builder.get()


def _emit_row(reduction: PlaceReduction, data: Any, row: Any, lanes: int) -> Any:
    """Emit the search of a row; return the place of the number that is found."""
    length, dtype = reduction.length, reduction.compared_dtype
    width = lanes
    while width < _MAX_WIDTH * lanes and length >= 2 * _MIN_STEPS * width:
        width *= 2
    best = T.alloc_buffer((width,), dtype, scope="local")
    places = T.alloc_buffer((width,), "int32", scope="local")

    def load(start: Any, lane: Any) -> Any:
        return reduction.key(tirx.BufferLoad(data, [row * length + start + lane]))

    limit = tirx.min_value(dtype) if reduction.is_largest else tirx.max_value(dtype)
    if dtype == "float32":
        limit = tirx.const(-math.inf if reduction.is_largest else math.inf, dtype)
    with T.vectorized(width) as lane:
        T.buffer_store(best, limit, [lane])
    with T.vectorized(width) as lane:
        T.buffer_store(places, lane, [lane])

    def compare(start: Any) -> None:
        with T.vectorized(width) as lane:
            number, before = load(start, lane), tirx.BufferLoad(best, [lane])
            is_beyond = reduction.is_beyond(number, before)
            place = tirx.Select(is_beyond, start + lane, tirx.BufferLoad(places, [lane]))
            T.buffer_store(places, place, [lane])
            T.buffer_store(best, tirx.Select(is_beyond, number, before), [lane])

    with T.serial(length // width) as step:
        compare(step * width)
    if length % width:
        compare(length - width)
    while width > 1:
        width //= 2
        with T.vectorized(width) as lane:
            first, second = lane, lane + width
            a, b = tirx.BufferLoad(best, [first]), tirx.BufferLoad(best, [second])
            x, y = tirx.BufferLoad(places, [first]), tirx.BufferLoad(places, [second])
            is_beyond = reduction.is_beyond(b, a)
            is_second = tirx.Or(is_beyond, tirx.And(tirx.EQ(a, b), y < x))
            T.buffer_store(places, tirx.Select(is_second, y, x), [first])
            T.buffer_store(best, tirx.Select(is_beyond, b, a), [first])
    return tirx.BufferLoad(places, [0])
