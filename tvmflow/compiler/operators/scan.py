"""Cumulative sums and products, with the other axes in vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.cpu_model import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.operators.definitions import declare_buffer, define_kernel, flatten
from tvmflow.compiler.operators.tiles import iterate_vectors

# The totals of a part stay in so many vector registers.
_VECTORS: Final = 4


class Scan(NamedTuple):
    """A cumulative operation.

    Attributes:
        shape: The shape of data and result.
        dtype: Their dtype.
        axis: The axis along which elements are combined.
        function: The operation on two elements.
        initial: Its neutral element.
        is_exclusive: True if an element of the result leaves out the element of the data at its place.
    """

    shape: tuple[int, ...]
    dtype: str
    axis: int
    function: Callable[[Any, Any], Any]
    initial: int
    is_exclusive: bool


def make_kernel(scan: Scan, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the data and the result."""
    with define_kernel("scan") as builder:
        arguments = [
            T.arg(name, declare_buffer(scan.shape, scan.dtype)) for name in ("data", "out")
        ]
        # TVM looks for copies among functions of one argument, and only into blocks.
        with T.sblock("root"):
            data, out = (flatten(argument, scan.shape, scan.dtype) for argument in arguments)
            _emit(scan, data, out, cpu)
    return builder.get()


def _emit(scan: Scan, data: Any, out: Any, cpu: CpuModel) -> None:
    length, inner = scan.shape[scan.axis], math.prod(scan.shape[scan.axis + 1 :])
    outer = math.prod(scan.shape[: scan.axis])
    width = _VECTORS * cpu.lanes
    is_parallel = cpu.cores > 1 and outer * length * inner >= MIN_PARALLEL_ELEMENTS
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
