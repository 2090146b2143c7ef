"""Gives scatters of rows kernels that combine them in vectors, and on several cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.contraction.packed import iterate_vectors
from tvmflow.compiler.open_sizes import IrSize, is_open, same_sizes, sizes_of
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel

_INDICES: Final = ("int32", "int64")


def vectorize_scatters(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace `scatter_nd`, for which TVM has no schedule on CPUs."""
    return mod if context.cpu is None else rewrite_main(mod, _ScatterRewriter, context)


class _ScatterRewriter(TargetRewriter):
    """Rewrites scatters of rows of fixed length."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.operator_name(call) != "relax.scatter_nd" or all(map(self.flow.is_weight, call.args)):
            return rewritten
        data, indices, updates = call.args
        shape, index_shape, updated = map(sizes_of, (data, indices, updates))
        typical = [self.numbers.shape(tensor) for tensor in (data, indices)]
        if not all(typical) or not shape or not index_shape or updated is None:
            return rewritten
        if any(0 in (numbers or ()) for numbers in typical) or is_open(index_shape[-1]):
            return rewritten
        if any(map(is_open, shape[index_shape[-1] :])):
            return rewritten
        described = Scatter(
            shape=shape,
            updates=math.prod((typical[1] or ())[:-1]),
            dtype=ir.dtype_of(data),
            index_shape=index_shape,
            index_dtype=ir.dtype_of(indices),
            reduction=str(call.attrs.reduction),
        )
        is_supported = (
            described.index_dtype in _INDICES
            and described.reduction in FUNCTIONS
            and ir.dtype_of(updates) == described.dtype
            and same_sizes(updated, described.update_shape)
        )
        if not is_supported:
            return rewritten
        kernel = make_kernel(described, self._cpu)
        return self.call_function(kernel, "scatter", rewritten.args, shape, described.dtype)


# ---------------------------------------------------------------- scatter
# Rows of a tensor that are replaced, or combined with others, at computed indices.


FUNCTIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "update": lambda _, update: update,
    "add": tirx.Add,
    "mul": tirx.Mul,
    "min": tirx.min,
    "max": tirx.max,
}
"""The name of a reduction -> the operation on an element and its update."""


class Scatter(NamedTuple):
    """A scatter of rows.

    Attributes:
        shape: The shape of data and result, in which the axes that indices choose may be open.
        updates: How many updates there are; about how many, where their number is open.
        dtype: Their dtype, and that of the updates.
        index_shape: The shape of the indices; the last axis has those of the first axes of the data.
        index_dtype: Their dtype.
        reduction: A name in `FUNCTIONS`.
    """

    shape: tuple[IrSize, ...]
    updates: int
    dtype: str
    index_shape: tuple[IrSize, ...]
    index_dtype: str
    reduction: str

    @property
    def depth(self) -> int:
        """The number of axes of the data that an update has indices of."""
        return int(self.index_shape[-1])

    @property
    def width(self) -> int:
        """The number of elements of an update."""
        return math.prod(self.shape[self.depth :])

    @property
    def update_shape(self) -> tuple[IrSize, ...]:
        """The shape of the updates."""
        return (*self.index_shape[:-1], *self.shape[self.depth :])


def make_kernel(scatter: Scatter, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are data, indices, updates and the result.

    Updates are applied in their order, as many columns of all of them at a time as a core has:
    several of one row need no atomic operations.
    """
    parameters = {
        "data": (scatter.shape, scatter.dtype),
        "indices": (scatter.index_shape, scatter.index_dtype),
        "updates": (scatter.update_shape, scatter.dtype),
        "out": (scatter.shape, scatter.dtype),
    }
    with define_flat_kernel("scatter", parameters) as (builder, buffers):
        parts = _count_parts(scatter, cpu)
        with T.parallel(parts) if parts > 1 else T.serial(1) as part:
            columns = (part * (scatter.width // parts), scatter.width // parts)
            _emit_columns(scatter, buffers, columns, cpu.lanes)
    return builder.get()


def _count_parts(scatter: Scatter, cpu: CpuModel) -> int:
    """Return into how many parts of whole vectors the columns are divided."""
    if scatter.width * scatter.updates < MIN_PARALLEL_ELEMENTS:
        return 1
    return next(n for n in range(cpu.cores, 0, -1) if n == 1 or not scatter.width % (n * cpu.lanes))


def _emit_columns(
    scatter: Scatter, buffers: Sequence[Any], columns: tuple[Any, int], lanes: int
) -> None:
    """Emit the copy of some columns of the data, and all updates of them.

    Args:
        scatter: The scatter.
        buffers: Data, indices, updates and the result.
        columns: The first column, and how many follow each other.
        lanes: The numbers of a vector.
    """
    (data, indices, updates, out), (start, count), width = buffers, columns, scatter.width
    rows = math.prod(scatter.shape[: scatter.depth])
    # all columns of all rows follow each other
    row_count, row = (1, rows * width) if count == width else (rows, count)
    with T.serial(row_count) as i:
        for column in iterate_vectors(row, lanes):
            place = i * width + start + column
            T.buffer_store(out, tirx.BufferLoad(data, [place]), [place])
    combine = FUNCTIONS[scatter.reduction]
    with T.serial(math.prod(scatter.index_shape[:-1])) as i:
        target: Any = tirx.const(0, "int64")
        for axis in range(scatter.depth):
            index = tirx.BufferLoad(indices, [i * scatter.depth + axis]).astype("int64")
            target = target * scatter.shape[axis] + index
        for column in iterate_vectors(count, lanes):
            place = target * width + start + column
            update = tirx.BufferLoad(updates, [i * width + start + column])
            T.buffer_store(out, combine(tirx.BufferLoad(out, [place]), update), [place])
