"""Finds the tensor in memory behind reshapes, transposes, slices and broadcasts, and how they read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import IrSize, is_open, same_sizes, sizes_of
from tvmflow.compiler.tir_kernels.strides import StridedMatrices, StridedView

_Array = np.ndarray[Any, Any]

_VIEWS: Final = (
    *("reshape", "expand_dims", "squeeze"),
    *("permute_dims", "broadcast_to", "take", "strided_slice"),
)
"""The operators whose results are read in their operands, where these have strides."""


class MatrixView(NamedTuple):
    """A batch of matrices in a tensor.

    Attributes:
        tensor: The tensor: a variable or a constant.
        matrices: The matrices in it.
        factors: The scalars by which the matrices are multiplied, and whether they are divided by it.
    """

    tensor: Any
    matrices: StridedMatrices
    factors: tuple[tuple[Any, bool], ...] = ()


def find_view(
    flow: ir.DataFlow, expr: Any, batch: Sequence[IrSize], *, with_factors: bool = False
) -> MatrixView | None:
    """Return the tensor that is farthest up from an expression, and can be read in its place.

    Args:
        flow: The data flow of the function.
        expr: A tensor of rank 2 or more.
        batch: The shape to which its outer axes are broadcast.
        with_factors: True to move multiplications with scalars out of the view.
    """
    chain, calls, factors = [expr], [], []
    counts = [0]
    while (step := _find_source(flow, expr, with_factors)) is not None:
        expr, call, factor = step
        calls.append(call)
        factors += [factor] if factor else []
        chain.append(expr)
        counts.append(len(factors))
    for position in reversed(range(len(chain))):
        matrices = _find_matrices(flow, chain[position], calls[:position], batch)
        if matrices is not None:
            return MatrixView(chain[position], matrices, tuple(factors[: counts[position]]))
    return None


def _find_matrices(
    flow: ir.DataFlow, tensor: Any, calls: Sequence[Any], batch: Sequence[IrSize]
) -> StridedMatrices | None:
    """Return how matrices lie in a tensor; None if they have no strides."""
    shapes = [sizes_of(expr) for expr in (tensor, *calls) if expr is not None]
    if any(shape is not None and 0 in shape for shape in shapes):
        return None
    view = _follow(flow, tensor, calls)
    return view.matrices(batch) if view is not None and len(view.axes) > 1 else None


def _follow(flow: ir.DataFlow, tensor: Any, calls: Sequence[Any]) -> StridedView | None:
    """Return a view of a tensor after some calls, the last one first; None if it is not known."""
    view: StridedView | None = StridedView.of_tensor(sizes_of(tensor) or ())
    before = sizes_of(tensor)
    for call in reversed(calls):
        if call is None:
            continue
        after = sizes_of(call)
        if view is None or before is None or after is None:
            return None
        view = _view_of_call(flow, call, view, before, after)
        before = after
    return view


def _view_of_call(
    flow: ir.DataFlow,
    call: Any,
    view: StridedView,
    before: Sequence[IrSize],
    after: Sequence[IrSize],
) -> StridedView | None:
    """Return what a call makes of a view, whose sizes are known before and after it."""
    if isinstance(call, relax.TupleGetItem):
        split: Any = flow.values[call.tuple_value]
        return _cut(
            view,
            before,
            int(split.attrs.axis),
            lambda places: read_split(split, places, call.index),
        )
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
            part = _cut(view, before, axis, lambda places: np.take(places, [index], axis))
            return None if part is None else part.reshape(after)
        case "strided_slice":
            axes = [_integer(field) for field in getattr(call.args[1], "fields", ())]
            if len(axes) != 1 or axes[0] is None:
                return None
            return _cut(view, before, axes[0], lambda places: read_slice(call, places))
        case _:
            return view.reshape(after)


def _cut(
    view: StridedView,
    sizes: Sequence[IrSize],
    axis: int,
    read: Callable[[_Array], _Array | None],
) -> StridedView | None:
    """Return the places along an axis of fixed size that a function selects; None for others."""
    axis %= len(sizes)
    if is_open(sizes[axis]):
        return None
    line = np.arange(sizes[axis]).reshape([-1 if n == axis else 1 for n in range(len(sizes))])
    try:
        places = read(line)
    except IndexError:
        return None
    if places is None or not places.size:
        return None
    places = places.reshape(-1)
    steps = np.unique(np.diff(places))
    if len(steps) > 1:
        return None
    step = int(steps[0]) if len(steps) else 1
    return view.cut(axis, int(places[0]), step, len(places))


def _find_source(flow: ir.DataFlow, expr: Any, with_factors: bool) -> Any:
    """Return the tensor that an expression reads, the call that reads it, and a factor.

    None at the end of a chain.
    """
    value: Any = flow.values.get(expr) if isinstance(expr, relax.Var) else None
    if isinstance(value, relax.Var):
        return value, None, None
    if isinstance(value, relax.TupleGetItem):
        split: Any = flow.values.get(value.tuple_value)
        if ir.operator_name(split) != "relax.split":
            return None
        return split.args[0], value, None
    if value is None:
        return None
    name = ir.operator_name(value)
    if name.removeprefix("relax.") in _VIEWS:
        return value.args[0], value, None
    if with_factors and name in ("relax.multiply", "relax.divide"):
        data, factor = value.args
        if name == "relax.multiply" and is_scalar(data):
            data, factor = factor, data
        shapes = sizes_of(data), sizes_of(value)
        if (
            is_scalar(factor)
            and None not in shapes
            and same_sizes(shapes[0] or (), shapes[1] or ())
        ):
            return data, None, (factor, name == "relax.divide")
    return None


def is_scalar(expr: Any) -> bool:
    """Return whether a tensor has one element of float32."""
    shape = ir.shape_of(expr)
    return shape is not None and math.prod(shape) == 1 and ir.is_float32(expr)


# ---------------------------------------------------------------- rules


def read_slice(call: Any, places: _Array) -> _Array | None:
    """Return a `strided_slice` of an array; None if its limits are unknown."""
    columns = [[_integer(field) for field in getattr(arg, "fields", ())] for arg in call.args[1:]]
    axes, begins, ends, *strides = columns
    steps = strides[0] if strides else [1] * len(axes)
    window: list[slice] = [slice(None)] * places.ndim
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        if None in (axis, begin, end, step):
            return None
        window[axis] = slice(begin, end, step)
    part: _Array = places[tuple(window)]
    return part


def read_split(call: Any, places: _Array, index: int) -> _Array:
    """Return a part of an array that is divided as `split` does."""
    sections = call.attrs.indices_or_sections
    axis = int(call.attrs.axis)
    if isinstance(sections, int | tvm.tirx.IntImm):
        # as TVM: the last section may be shorter
        size = -(-places.shape[axis] // int(sections))
        cuts = list(range(size, places.shape[axis], size))
    else:
        cuts = [int(cut) for cut in sections]
    part: _Array = np.split(places, cuts, axis)[index]
    return part


def _integer(expr: Any) -> Any:
    value = getattr(expr, "value", expr)
    return int(value) if isinstance(value, int | tvm.tirx.IntImm) else None


def _find_integer(flow: ir.DataFlow, expr: Any) -> int | None:
    """Return an index that constants and static shapes determine."""
    value = _evaluate(flow, expr)
    return int(value.reshape(())) if value is not None and value.size == 1 else None


def _evaluate(flow: ir.DataFlow, expr: Any) -> _Array | None:
    """Return the value of an expression of integers as far as importers emit it for indices."""
    value = flow.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
    if isinstance(value, tvm.ir.Constant):
        return value.value.numpy() if isinstance(value.value, tvm.runtime.Tensor) else None
    name = ir.operator_name(value)
    if name == "relax.shape_to_tensor":
        extents = value.args[0].ty.values
        known = extents is not None and all(isinstance(n, tvm.tirx.IntImm) for n in extents)
        return np.array([int(n) for n in extents]) if known else None
    if name not in _INDEX_FUNCTIONS:
        return None
    arguments = [_evaluate(flow, argument) for argument in value.args]
    if any(argument is None for argument in arguments):
        return None
    return np.asarray(_INDEX_FUNCTIONS[name](*arguments))


_INDEX_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "relax.add": np.add,
    "relax.less": np.less,
    "relax.take": np.take,
    "relax.where": np.where,
}
