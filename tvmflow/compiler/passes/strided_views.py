"""Finds the tensor behind reshapes, transposes, slices, broadcasts and casts, and its strides."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler.tir_kernels.strides import StridedMatrices, StridedView
from tvmflow.core.types import SCALE_BYTES
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, same_size, same_sizes, sizes_of
from tvmflow.graph.evaluation import RULES, list_positions, read_slice, read_split
from tvmflow.graph.ir_operators import UnpackRows

_Array = np.ndarray[Any, Any]

_VIEWS: Final = ir.operators(
    "reshape expand_dims squeeze permute_dims broadcast_to take strided_slice"
)
"""Operators whose results can be read from their operands through strides."""


class MatrixView(NamedTuple):
    """Matrices in a variable or a constant, and (scalar, whether it divides) pairs that scale them."""

    tensor: Any
    matrices: StridedMatrices
    factors: tuple[tuple[Any, bool], ...] = ()


def find_view(
    flow: ir.DataFlow,
    expr: Any,
    batch: Sequence[IrSize],
    *,
    with_factors: bool = False,
    with_casts: bool = False,
) -> MatrixView | None:
    """Return a view of the earliest tensor in the chain of producers that can be read in its place.

    The expression has rank 2 or more; its outer axes are broadcast to `batch`. With `with_factors`, multiplications
    and divisions by scalars become factors of the view. With `with_casts`, the view may be of a float16 tensor that the
    expression casts to float32, or of the int8 values of quantized rows (`ir_operators.PackRows`), if each row of the
    matrices, or each column, is one of them.
    """
    found: list[tuple[Any, list[Any], tuple[Any, ...]]] = [(expr, [], ())]
    while (step := _find_source(flow, found[-1][0], with_factors, with_casts)) is not None:
        source, call, factor = step
        _, calls, factors = found[-1]
        calls = calls if call is None else [*calls, call]
        found.append((source, calls, factors if factor is None else (*factors, factor)))
    for tensor, calls, factors in reversed(found):
        view = _follow(flow, tensor, calls)
        matrices = view.matrices(batch) if view is not None and len(view.axes) > 1 else None
        if matrices is not None and _has_whole_rows(tensor, matrices, expr):
            return MatrixView(tensor, matrices, factors)
    return None


def _has_whole_rows(tensor: Any, matrices: StridedMatrices, expr: Any) -> bool:
    """Return whether rows or columns of matrices are quantized rows; true for other tensors."""
    if ir.dtype_of(tensor) != "int8":
        return True
    extents, width = (sizes_of(expr) or ())[-2:], (sizes_of(tensor) or (0,))[-1]
    strides = zip((matrices.row, matrices.column), extents, strict=True)
    return any(stride == 1 and same_size(size, width - SCALE_BYTES) for stride, size in strides)


def _follow(flow: ir.DataFlow, tensor: Any, calls: Sequence[Any]) -> StridedView | None:
    """Return the view after `calls` (the last one first); None if it has no strides or no elements."""
    shapes = [sizes_of(expr) for expr in (tensor, *reversed(calls))]
    if any(shape is not None and 0 in shape for shape in shapes):
        return None
    view: StridedView | None = StridedView.of_tensor(shapes[0] or ())
    for call, before, after in zip(reversed(calls), shapes, shapes[1:], strict=False):
        if view is None or before is None or after is None:
            return None
        view = _view_of_call(flow, call, view, before, after)
    return view


def _view_of_call(
    flow: ir.DataFlow, call: Any, view: StridedView, before: Any, after: Sequence[IrSize]
) -> StridedView | None:
    """Return the view after a call, given the sizes before and after it; None if it has no strides."""
    if isinstance(call, relax.TupleGetItem):
        split: Any = flow.values[call.tuple_value]
        read = functools.partial(read_split, split, index=call.index)
        return _cut(view, before, int(split.attrs.axis), read)
    match ir.operator_name(call).removeprefix("relax."):
        case "permute_dims":
            axes = call.attrs.axes
            order = reversed(range(len(before))) if axes is None else map(int, axes)
            return view.permute(list(order))
        case "broadcast_to":
            return view.broadcast(after)
        case "take":
            index = _find_integer(flow, call.args[1])
            if index is None or call.attrs.axis is None:
                return None
            axis = int(call.attrs.axis)
            part = _cut(view, before, axis, lambda positions: np.take(positions, [index], axis))
            return None if part is None else part.reshape(after)
        case "strided_slice":
            sliced: StridedView | None = view
            for axis in map(int, getattr(call.args[1], "fields", ())):
                if sliced is not None:
                    sliced = _cut(sliced, before, axis, functools.partial(read_slice, call))
            return sliced
        case UnpackRows.NAME:
            return view.cut(len(before) - 1, 0, 1, int(after[-1]))
        case _:
            return view.reshape(after)


def _cut(
    view: StridedView, sizes: Sequence[IrSize], axis: int, read: Callable[[_Array], _Array | None]
) -> StridedView | None:
    """Return the view of evenly spaced positions that a function selects along an axis, else None."""
    axis %= len(sizes)
    if is_dynamic(sizes[axis]):
        return None
    # other axes keep their sizes, because the function may also select positions along them
    shape = [1 if is_dynamic(size) else size for size in sizes]
    try:
        positions = list_positions(read, shape, axis)
    except IndexError:
        return None
    steps = np.unique(np.diff([] if positions is None else positions))
    if positions is None or len(steps) > 1:
        return None
    step = int(steps[0]) if len(steps) else 1
    return view.cut(axis, int(positions[0]), step, len(positions))


def _find_source(flow: ir.DataFlow, expr: Any, with_factors: bool, with_casts: bool) -> Any:
    """Return the tensor an expression reads, its call or None, its factor or None; None at the end."""
    value: Any = flow.values.get(expr) if isinstance(expr, relax.Var) else None
    if isinstance(value, relax.Var):
        return value, None, None
    if isinstance(value, relax.TupleGetItem):
        split = flow.find_call(value.tuple_value, "relax.split")
        return None if split is None else (split.args[0], value, None)
    name = ir.operator_name(value)
    if name in _VIEWS:
        return value.args[0], value, None
    if with_casts and name == UnpackRows.NAME:
        return value.args[0], value, None
    if with_casts and name == "relax.astype" and ir.is_float32(value):
        return (value.args[0], None, None) if ir.dtype_of(value.args[0]) == "float16" else None
    if with_factors and name in ("relax.multiply", "relax.divide"):
        data, factor = value.args
        if name == "relax.multiply" and is_scalar(data):
            data, factor = factor, data
        before, after = sizes_of(data), sizes_of(value)
        is_alike = before is not None and after is not None and same_sizes(before, after)
        if is_scalar(factor) and is_alike:
            return data, None, (factor, name == "relax.divide")
    return None


def is_scalar(expr: Any) -> bool:
    """Return whether a tensor has one element of float32."""
    shape = ir.shape_of(expr)
    return shape is not None and math.prod(shape) == 1 and ir.is_float32(expr)


# Operators that importers emit for indices.
_INDEX_OPERATORS: Final = ir.operators("add less take where shape_to_tensor")


def _find_integer(flow: ir.DataFlow, expr: Any) -> int | None:
    """Return an index if constants and static shapes determine it, else None."""
    value = _evaluate(flow, expr)
    return int(value.reshape(())) if value is not None and value.size == 1 else None


def _evaluate(flow: ir.DataFlow, expr: Any) -> _Array | None:
    value = flow.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
    name = ir.operator_name(value)
    if name not in _INDEX_OPERATORS:
        return ir.constant_array(value)
    tensors = [argument for argument in value.args if isinstance(argument.ty, relax.TensorType)]
    arrays = [array for t in tensors if (array := _evaluate(flow, t)) is not None]
    return RULES[name](value, arrays) if len(arrays) == len(tensors) else None
