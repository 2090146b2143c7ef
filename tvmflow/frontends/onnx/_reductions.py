"""Converters of reductions, sorting and norms; float16 and bfloat16 are accumulated in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler.ir import dtype_of
from tvmflow.frontends.onnx._conversion import (
    Converter,
    NodeToConvert,
    constant,
    is_float,
    known_array,
    list_sizes,
)
from tvmflow.frontends.onnx._expressions import Windows

_NARROW: Final = ("float16", "bfloat16")
_WIDE: Final = "float32"


def in_float32(convert: Converter) -> Converter:
    """Return a converter that computes operators on narrower floats in float32, as ONNX Runtime does."""

    @functools.wraps(convert)
    def wide(node: NodeToConvert) -> Any:
        dtypes = [None if x is None else dtype_of(x) for x in node.inputs]
        dtype = dtypes[0]
        if dtype not in _NARROW:
            return convert(node)
        inputs = [
            node.emit(relax.op.astype(x, _WIDE)) if x_dtype in _NARROW else x
            for x, x_dtype in zip(node.inputs, dtypes, strict=True)
        ]
        result = node.emit(convert(node._replace(inputs=inputs)))
        if not isinstance(result, relax.Tuple):
            return relax.op.astype(result, dtype)
        fields = [node.emit(field) for field in result.fields]
        return relax.Tuple(
            [relax.op.astype(x, dtype) if dtype_of(x) == _WIDE else x for x in fields]
        )

    return wide


def _by_tvm(node: NodeToConvert) -> Any:
    return node.convert_by_tvm(node.inputs)


# ---------------------------------------------------------------- reductions


class _Reduction(NamedTuple):
    """A reduction.

    Attributes:
        reduce: The reduction itself, of data, axes and whether these stay with one element.
        before: The function of each element.
        after: The function of each result.
        alone: What both do to an element that is not reduced; None for one after the other.
        has_float_result: Whether integers are computed as float64.
        empty: The reduction of no elements; that of integers is the nearest one.
    """

    reduce: Callable[[Any, Sequence[int] | None, bool], Any]
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    alone: Callable[[Any], Any] | None = None
    has_float_result: bool = False
    empty: float = 0.0


def _convert_reduction(node: NodeToConvert, reduction: _Reduction) -> Any:
    """Return reduced data; without axes all axes, or none with `noop_with_empty_axes`."""
    data, dtype = node.inputs[0], dtype_of(node.inputs[0])
    axes = [int(axis) for axis in node.attributes.get("axes", ())]
    operand = node.inputs[1] if len(node.inputs) > 1 else None
    if operand is not None and 0 not in list_sizes(operand):
        axes = [int(axis) for axis in known_array(operand, "axes").reshape(-1)]
    keeps = bool(node.attributes.get("keepdims", 1))
    is_wide = dtype in _NARROW
    if is_wide or (reduction.has_float_result and not is_float(data)):
        data = node.emit(relax.op.astype(data, _WIDE if is_wide else "float64"))
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        steps = [reduction.alone] if reduction.alone else [reduction.before, reduction.after]
    else:
        reduce = functools.partial(_reduce, node, reduction, axes=axes, keeps=keeps)
        steps = [reduction.before, reduce, reduction.after]
    for step in steps:
        data = data if step is None else node.emit(step(data))
    return data if dtype_of(data) == dtype else relax.op.astype(data, dtype)


def _reduce(
    node: NodeToConvert, reduction: _Reduction, data: Any, *, axes: Sequence[int], keeps: bool
) -> Any:
    """Return data reduced along axes, or all of them; a scalar is its own reduction."""
    sizes = list_sizes(data)
    reduced = {axis % len(sizes) for axis in axes} or set(range(len(sizes)))
    if any(_is_empty(sizes[axis]) for axis in reduced):
        kept = [1 if n in reduced else size for n, size in enumerate(sizes)]
        shape = kept if keeps else [size for n, size in enumerate(sizes) if n not in reduced]
        # TVM divides by the number of elements, and has no kernel of a loop that never runs
        return relax.op.broadcast_to(constant(_limit(reduction.empty, data), data), shape)
    return reduction.reduce(data, axes or None, keeps) if sizes else node.emit(data)


def _is_empty(size: Any) -> bool:
    return isinstance(size, int) and size == 0


def _limit(value: float, like: Any) -> float:
    """Return a number that the dtype of a tensor has: the smallest or largest one for an infinity."""
    if is_float(like) or math.isfinite(value):
        return value
    limits = np.iinfo(dtype_of(like))
    return int(limits.max if value > 0 else limits.min)


def _square(x: Any) -> Any:
    return relax.op.multiply(x, x)


def _log_sum_exp(x: Any, axes: Sequence[int] | None, keeps: bool) -> Any:
    """Return ln Σ eˣ, computed less the largest element where that is finite."""
    largest = relax.op.max(x, axes, True)
    shift = relax.op.where(relax.op.isfinite(largest), largest, relax.op.zeros_like(largest))
    total = relax.op.sum(relax.op.exp(relax.op.subtract(x, shift)), axes, True)
    result = relax.op.add(relax.op.log(total), shift)
    return result if keeps else relax.op.squeeze(result, axes)


def _extreme(reduce: Callable[..., Any]) -> Callable[[Any, Sequence[int] | None, bool], Any]:
    """Return the reduction to maxima or minima, also of rows of nothing but infinities.

    TVM's start with the lowest or highest finite number; half of any number is within it, and only
    the double of the start itself is infinite.
    """

    def function(x: Any, axes: Sequence[int] | None, keeps: bool) -> Any:
        if not is_float(x):
            return reduce(x, axes, keeps)
        halves = relax.op.multiply(x, constant(0.5, x))
        return relax.op.multiply(reduce(halves, axes, keeps), constant(2.0, x))

    return function


def _reduce_mean(node: NodeToConvert) -> Any:
    """Return means; of integers by way of int64.

    TVM computes those of int32 as int64, which it does not say.
    """
    data, *rest = node.inputs
    dtype = dtype_of(data)
    if is_float(data) or dtype == "int64":
        return _convert_reduction(node, _Reduction(relax.op.mean))
    wide = node._replace(inputs=[node.emit(relax.op.astype(data, "int64")), *rest])
    return relax.op.astype(_convert_reduction(wide, _Reduction(relax.op.mean)), dtype)


def _reduce_extreme(node: NodeToConvert, reduce: Callable[..., Any], empty: float) -> Any:
    """Return maxima or minima, also of booleans."""
    data, *rest = node.inputs
    reduction = _Reduction(_extreme(reduce), empty=empty)
    if dtype_of(data) != "bool":
        return _convert_reduction(node, reduction)
    narrow = node._replace(inputs=[node.emit(relax.op.astype(data, "uint8")), *rest])
    return relax.op.astype(_convert_reduction(narrow, reduction), "bool")


# ---------------------------------------------------------------- norms


def _lp_normalization(node: NodeToConvert) -> Any:
    """Return data divided by its norm along an axis; zeros stay zeros."""
    [x], axis = node.inputs, int(node.attributes.get("axis", -1))
    if int(node.attributes.get("p", 2)) == 1:
        norm = node.emit(relax.op.sum(relax.op.abs(x), axis, True))
    else:
        norm = node.emit(relax.op.sqrt(relax.op.sum(_square(x), axis, True)))
    is_zero = relax.op.equal(norm, constant(0, x))
    return relax.op.divide(x, relax.op.where(is_zero, relax.op.ones_like(norm), norm))


def _batch_norm(node: NodeToConvert) -> Any:
    """Return a batch norm, whose parameters may be wider floats than the data."""
    dtypes = {dtype_of(x) for x in node.inputs}
    dtype = dtype_of(node.inputs[0])
    if dtypes == {dtype} or dtype not in _NARROW:
        return node.convert_by_tvm(node.inputs)
    return in_float32(_first_result)(node)


def _first_result(node: NodeToConvert) -> Any:
    """Return the first result of TVM's converter; the others are those of training."""
    results = node.builder.emit(node.convert_by_tvm(node.inputs))
    zero = relax.const(np.zeros(0, np.float32))
    return relax.Tuple([node.emit(relax.TupleGetItem(results, 0)), zero, zero])


def _mean_variance_norm(node: NodeToConvert) -> Any:
    """Return data less its mean, divided by its deviation, which loses no digits as a difference would."""
    [x], axes = node.inputs, [int(axis) for axis in node.attributes.get("axes", (0, 2, 3))]
    centred = node.emit(relax.op.subtract(x, relax.op.mean(x, axes, True)))
    variance = node.emit(relax.op.mean(_square(centred), axes, True))
    raised = node.emit(relax.op.add(relax.op.sqrt(variance), constant(1e-9, x)))
    return relax.op.divide(centred, raised)


def _global_pool(convert: Converter) -> Converter:
    """Return a converter that refuses images without pixels, as ONNX Runtime does."""

    @functools.wraps(convert)
    def checked(node: NodeToConvert) -> Any:
        shape = list_sizes(node.inputs[0])
        if any(map(_is_empty, shape[1:])):
            raise ValueError(f"its data of shape {shape} has no pixels")
        return convert(node)

    return checked


def _global_lp_pool(node: NodeToConvert) -> Any:
    """Return the norms of all pixels of a channel."""
    [x], p = node.inputs, int(node.attributes.get("p", 2))
    axes = list(range(2, len(list_sizes(x))))
    return _root(node.emit(relax.op.sum(_power(x, p), axes, True)), p)


def _lp_pool(node: NodeToConvert) -> Any:
    """Return the norms of windows, from the means of their powers in the padded data.

    TVM counts all pixels of a window that ends beyond the padded data.
    """
    [x], p, attributes = node.inputs, int(node.attributes.get("p", 2)), node.attributes
    sizes = list_sizes(x)[2:]
    window, strides, dilations, before, after = Windows.read(
        attributes, [int(size) for size in attributes["kernel_shape"]]
    )
    ends = list(after)
    if attributes.get("ceil_mode", 0):
        # what the last windows read beyond the data is 0
        for axis, (size, step) in enumerate(zip(sizes, strides, strict=True)):
            reach = (window[axis] - 1) * dilations[axis] + 1
            if not isinstance(size, int):
                raise ValueError("ceil_mode needs a known size of the data")
            room = size + before[axis] + ends[axis] - reach
            count = -(-room // step) + 1
            # a window that begins behind the data is none
            count -= (count - 1) * step >= size + before[axis]
            ends[axis] += max(0, (count - 1) * step - room)
    pool = getattr(relax.op.nn, f"avg_pool{len(sizes)}d")
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise ValueError("auto_pad needs a known size of the data")
    powers, pads = node.emit(_power(x, p)), [*before, *ends]
    means = node.emit(pool(powers, window, strides, pads, dilations, count_include_pad=True))
    sums = relax.op.multiply(means, constant(float(math.prod(window)), x))
    return _root(node.emit(sums), p)


def _power(x: Any, p: int) -> Any:
    """Return |x| to a power."""
    if p in (1, 2):
        return relax.op.abs(x) if p == 1 else _square(x)
    return relax.op.power(relax.op.abs(x), constant(float(p), x))


def _root(x: Any, p: int) -> Any:
    if p in (1, 2):
        return x if p == 1 else relax.op.sqrt(x)
    return relax.op.power(x, constant(1 / p, x))


# ---------------------------------------------------------------- positions, orders, running sums


def _arg_extreme(node: NodeToConvert) -> Any:
    """Return indices of maxima or minima, also in rows of nothing but the lowest or highest value.

    TVM starts with that value and the index -1, which stays where no element beats it.
    """
    extent = list_sizes(node.inputs[0])[int(node.attributes.get("axis", 0))]
    if isinstance(extent, int) and extent == 0:
        raise ValueError("its data has no elements along the axis")
    result = node.emit(node.convert_by_tvm(node.inputs))
    if not node.attributes.get("select_last_index", 0):
        return relax.op.maximum(result, constant(0, result))
    # TVM counts from the end then.
    return relax.op.minimum(result, constant(extent - 1, result))


def _top_k(node: NodeToConvert) -> Any:
    """Return the largest or smallest values, and their indices; TVM sorts integers of 32 and 64 bits."""
    data, count = node.inputs
    dtype = dtype_of(data)
    if is_float(data) or dtype in ("int32", "int64"):
        return node.convert_by_tvm(node.inputs)
    if dtype == "uint64":
        raise ValueError("uint64 cannot be sorted")
    wide = node.emit(relax.op.astype(data, "int64" if dtype == "uint32" else "int32"))
    found = node.emit(node.convert_by_tvm([wide, count]))
    values = node.emit(relax.op.astype(relax.TupleGetItem(found, 0), dtype))
    return relax.Tuple([values, node.emit(relax.TupleGetItem(found, 1))])


def _cum_sum(node: NodeToConvert) -> Any:
    """Return sums up to each element along an axis, which TVM has to know."""
    known_array(node.inputs[1], "axis")
    return node.convert_by_tvm(node.inputs)


def _cum_prod(node: NodeToConvert) -> Any:
    """Return products of all elements before another along an axis."""
    x, axis = node.inputs
    axis = int(known_array(axis, "axis").reshape(())) % len(list_sizes(x))
    is_reversed = bool(node.attributes.get("reverse", 0))
    data = node.emit(relax.op.flip(x, axis)) if is_reversed else x
    exclusive = bool(node.attributes.get("exclusive", 0))
    product = node.emit(relax.op.cumprod(data, axis, dtype_of(x), exclusive))
    return relax.op.flip(product, axis) if is_reversed else product


def _layer_norm(node: NodeToConvert) -> Any:
    """Return a layer norm of any float; TVM lacks that of float64."""
    data, scale, *shift = node.inputs
    if dtype_of(data) != "float64":
        return node.convert_by_tvm(node.inputs)
    rank = len(list_sizes(data))
    axes = list(range(int(node.attributes.get("axis", -1)) % rank, rank))
    mean = node.emit(relax.op.mean(data, axes, keepdims=True))
    centred = node.emit(relax.op.subtract(data, mean))
    variance = node.emit(relax.op.mean(relax.op.multiply(centred, centred), axes, keepdims=True))
    epsilon = constant(float(node.attributes.get("epsilon", 1e-5)), data)
    deviation = node.emit(relax.op.sqrt(node.emit(relax.op.add(variance, epsilon))))
    scaled = node.emit(relax.op.multiply(relax.op.divide(centred, deviation), scale))
    return relax.op.add(scaled, shift[0]) if shift and shift[0] is not None else scaled


_REDUCTIONS: Final[Mapping[str, _Reduction]] = {
    "ReduceL1": _Reduction(relax.op.sum, before=relax.op.abs),
    "ReduceL2": _Reduction(
        relax.op.sum, _square, relax.op.sqrt, alone=relax.op.abs, has_float_result=True
    ),
    "ReduceLogSum": _Reduction(relax.op.sum, after=relax.op.log, has_float_result=True),
    "ReduceLogSumExp": _Reduction(
        _log_sum_exp, alone=lambda x: x, has_float_result=True, empty=-math.inf
    ),
    "ReduceProd": _Reduction(relax.op.prod, empty=1.0),
    "ReduceSum": _Reduction(relax.op.sum),
    "ReduceSumSquare": _Reduction(relax.op.sum, before=_square),
}

REDUCTION_CONVERTERS: Final[Mapping[str, Converter]] = {
    "ArgMax": _arg_extreme,
    "ArgMin": _arg_extreme,
    "CumProd": _cum_prod,
    "CumSum": _cum_sum,
    "LayerNormalization": _layer_norm,
    "TopK": _top_k,
    **{
        name: functools.partial(_convert_reduction, reduction=reduction)
        for name, reduction in _REDUCTIONS.items()
    },
    "BatchNormalization": _batch_norm,
    "GlobalAveragePool": _global_pool(_by_tvm),
    "GlobalLpPool": _global_pool(in_float32(_global_lp_pool)),
    "GlobalMaxPool": _global_pool(_by_tvm),
    "InstanceNormalization": in_float32(_by_tvm),
    "LRN": in_float32(_by_tvm),
    "LpNormalization": in_float32(_lp_normalization),
    "LpPool": in_float32(_lp_pool),
    "MeanVarianceNormalization": in_float32(_mean_variance_norm),
    "ReduceMax": functools.partial(_reduce_extreme, reduce=relax.op.max, empty=-math.inf),
    "ReduceMean": _reduce_mean,
    "ReduceMin": functools.partial(_reduce_extreme, reduce=relax.op.min, empty=math.inf),
}
"""Operator -> its converter."""
