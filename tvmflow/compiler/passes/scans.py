"""Gives cumulative sums and products kernels that compute other axes than theirs in vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.contraction.packed import iterate_vectors
from tvmflow.compiler.open_sizes import IrSize, is_open, sizes_of
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel

_FUNCTIONS: Final[Mapping[str, tuple[Callable[[Any, Any], Any], int]]] = {
    "relax.cumsum": (tirx.Add, 0),
    "relax.cumprod": (tirx.Mul, 1),
}
"""The operator -> the operation on two elements, and its neutral element."""


def vectorize_scans(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace cumulative sums and products, for which TVM has no schedule on CPUs."""
    return mod if context.cpu is None else rewrite_main(mod, _ScanRewriter, context)


class _ScanRewriter(TargetRewriter):
    """Rewrites cumulative operations; the axes behind theirs have fixed sizes."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        functions = _FUNCTIONS.get(ir.operator_name(call))
        if functions is None or not self._is_supported(call):
            return rewritten
        shape, typical = sizes_of(call), self.numbers.shape(call)
        if not shape or not typical or 0 in typical:
            return rewritten
        axis, dtype = int(call.attrs.axis) % len(shape), ir.dtype_of(call)
        if any(map(is_open, shape[axis + 1 :])):
            return rewritten
        is_exclusive = bool(call.attrs.exclusive)
        kernel = make_kernel(Scan(shape, typical, dtype, axis, *functions, is_exclusive), self._cpu)
        return self.call_function(kernel, "scan", [rewritten.args[0]], shape, dtype)

    def _is_supported(self, call: Any) -> bool:
        data = call.args[0]
        return (
            call.attrs.axis is not None
            and ir.dtype_of(data) == ir.dtype_of(call)
            and not self.flow.is_weight(data)
        )


# ---------------------------------------------------------------- scan
# Cumulative sums and products, with the other axes in vectors.


# The totals of a part stay in so many vector registers.
_VECTORS: Final = 4


class Scan(NamedTuple):
    """A cumulative operation.

    Attributes:
        shape: The shape of data and result, in which the axis and those before it may be open.
        typical: The same with numbers in place of open sizes.
        dtype: Their dtype.
        axis: The axis along which elements are combined.
        function: The operation on two elements.
        initial: Its neutral element.
        is_exclusive: True if an element of the result leaves out the element of the data at its place.
    """

    shape: tuple[IrSize, ...]
    typical: tuple[int, ...]
    dtype: str
    axis: int
    function: Callable[[Any, Any], Any]
    initial: int
    is_exclusive: bool


def make_kernel(scan: Scan, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the data and the result."""
    kind = (scan.shape, scan.dtype)
    with define_flat_kernel("scan", {"data": kind, "out": kind}) as (builder, (data, out)):
        _emit(scan, data, out, cpu)
    return builder.get()


def _emit(scan: Scan, data: Any, out: Any, cpu: CpuModel) -> None:
    length, inner = scan.shape[scan.axis], math.prod(scan.shape[scan.axis + 1 :])
    outer = math.prod(scan.shape[: scan.axis])
    width = _VECTORS * cpu.lanes
    is_parallel = cpu.cores > 1 and math.prod(scan.typical) >= MIN_PARALLEL_ELEMENTS
    loop = T.parallel if is_parallel else T.serial
    whole = inner // width
    if whole:
        with loop(outer * whole) as part:
            start = part // whole * (length * inner) + part % whole * width
            _emit_columns(scan, (data, out), start, (inner, width), cpu.lanes)
    if inner % width:
        with loop(outer) as row:
            start = row * (length * inner) + whole * width
            _emit_columns(scan, (data, out), start, (inner, inner % width), cpu.lanes)


def _emit_columns(
    scan: Scan, buffers: tuple[Any, Any], start: Any, columns: tuple[int, int], lanes: int
) -> None:
    """Emit the operation on columns next to each other.

    Args:
        scan: The operation.
        buffers: The data and the result.
        start: The place of the first element of the first column.
        columns: The distance of two elements of a column, and the number of columns.
        lanes: The numbers of a vector.
    """
    (data, out), (distance, count) = buffers, columns
    totals = T.alloc_buffer((count,), scan.dtype, scope="local")
    for column in iterate_vectors(count, lanes):
        T.buffer_store(totals, tirx.const(scan.initial, scan.dtype), [column])
    with T.serial(scan.shape[scan.axis]) as k:
        for column in iterate_vectors(count, lanes):
            place, before = start + k * distance + column, tirx.BufferLoad(totals, [column])
            total = scan.function(before, tirx.BufferLoad(data, [place]))
            if scan.is_exclusive:
                T.buffer_store(out, before, [place])
            T.buffer_store(totals, total, [column])
            if not scan.is_exclusive:
                T.buffer_store(out, tirx.BufferLoad(totals, [column]), [place])
