"""Rules of operators for dynamic shapes: compute sizes, and convert nodes with dynamic results.

A function `evaluate_…` returns the elements of a small value. A function `follow_…` converts a node whose result
has a dynamic shape; it returns None if it leaves the node to the importer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
from onnx import NodeProto, helper, numpy_helper
from tvm import relax, tirx, topi

from tvmflow.frontends._dynamic_shapes import NO_END, DynamicShapeProblem, SizeRanges, shape_text
from tvmflow.frontends.onnx._arithmetic import read_interpolation
from tvmflow.frontends.onnx.graph import attributes_of, dtype_of, set_entries
from tvmflow.frontends.onnx.sizes import (
    Call,
    Quotient,
    SizeRule,
    Sizes,
    SizeValue,
    Unknown,
    are_fixed,
    as_array,
    map_elements,
    plain_expr,
    read_number,
    read_same_padding,
    shape_expr,
)
from tvmflow.graph.dynamic_shapes import same_size
from tvmflow.graph.resize import Interpolation, is_computed, resize_image

# ---------------------------------------------------------------- values


def evaluate_shape(call: Call) -> Any:
    shape = call.array(0)
    return shape[call.attributes.get("start", 0) : call.attributes.get("end", len(shape))]


def evaluate_gather(call: Call) -> Any:
    indices = np.array(call.array(1).tolist(), np.int64)
    return np.take(call.array(0), indices, int(call.attributes.get("axis", 0)))


def evaluate_concat(call: Call) -> Any:
    parts = [call.array(position) for position in range(len(call.operands))]
    return np.concatenate(parts, int(call.attributes["axis"]))


def evaluate_slice(call: Call) -> Any:
    data, starts, ends = call.array(0), call.integers(1, "starts"), call.integers(2, "ends")
    axes = call.optional(3, "axes") or range(len(starts))
    steps = call.optional(4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut = [slice(None)] * data.ndim
        cut[axis] = slice(start, end, step)
        data = data[tuple(cut)]
    return data


def evaluate_squeeze(call: Call) -> Any:
    axes = call.optional(1, "axes")
    return np.squeeze(call.array(0), None if axes is None else tuple(axes))


def evaluate_reshape(call: Call) -> Any:
    data = call.array(0)
    shape = [data.shape[axis] if n == 0 else n for axis, n in enumerate(call.integers(1))]
    return data.reshape(shape)


def evaluate_cast(call: Call) -> SizeValue:
    dtype = dtype_of(call.attributes["to"])
    if dtype == "bool":
        raise Unknown
    return SizeValue(elementwise(floor)(call) if "int" in dtype else call.array(0), dtype)


def ceil(sizes: SizeRanges, value: Any) -> Any:
    if not isinstance(value, Quotient):
        return value
    return sizes.simplify(0 - floor(sizes, Quotient(value.expr, -value.factor)))


def floor(sizes: SizeRanges, value: Any) -> Any:
    if not isinstance(value, Quotient):
        return value
    return sizes.simplify(value.expr * value.factor.numerator // value.factor.denominator)


def elementwise(function: Callable[[SizeRanges, Any], Any]) -> SizeRule:
    """Return the rule of a unary elementwise operator, given the function of one element."""
    return lambda call: map_elements(functools.partial(function, call.sizes), call.array(0))


def pairwise(compute: Callable[[Call, Any, Any], Any]) -> SizeRule:
    """Return the rule of a binary elementwise operator, given the function of two elements."""

    def rule(call: Call) -> Any:
        if len(call.operands) != 2:
            raise Unknown
        return map_elements(functools.partial(compute, call), call.array(0), call.array(1))

    return rule


def pairwise_integers(function: Callable[[Any, Any], Any]) -> SizeRule:
    """Return the rule of a binary operator on integers and sizes."""

    def compute(call: Call, left: Any, right: Any) -> Any:
        _refuse_quotients(left, right)
        return call.sizes.simplify(function(left, right))

    return pairwise(compute)


def extreme(of_numbers: Callable[..., Any], of_sizes: Callable[..., Any]) -> SizeRule:
    """Return the rule of Max or Min: one function for integers, and one for symbolic sizes."""
    return pairwise_integers(lambda x, y: (of_numbers if are_fixed(x, y) else of_sizes)(x, y))


def comparison(
    *opposites: Callable[[Any, Any], Any], holds: Callable[[Any, Any], Any] | None = None
) -> SizeRule:
    """Return the rule of a comparison, given `holds` (None: equality) and the comparisons that exclude it."""

    def compare(call: Call, left: Any, right: Any) -> bool:
        _refuse_quotients(left, right)
        sizes = call.sizes
        if sizes.is_certain(holds(left, right)) if holds else sizes.is_equal(left, right):
            return True
        if any(sizes.is_certain(opposite(left, right)) for opposite in opposites):
            return False
        raise Unknown

    rule = pairwise(compare)
    return lambda call: SizeValue(rule(call), "bool")


def _refuse_quotients(*values: Any) -> None:
    if any(isinstance(value, Quotient) for value in values):
        raise Unknown


def multiply(call: Call, left: Any, right: Any) -> Any:
    (left, left_factor), (right, right_factor) = _split(left), _split(right)
    return _joined(call.sizes, call.sizes.simplify(left * right), left_factor * right_factor)


def divide(call: Call, left: Any, right: Any) -> Any:
    if "float" not in call.dtype():
        if isinstance(left, int) and isinstance(right, int):
            return math.trunc(Fraction(left, right))
        return _divided(call, left, right, tirx.floordiv)
    (expr, factor), (divisor, right_factor) = _split(left), _split(right)
    if isinstance(divisor, int):
        return _joined(call.sizes, expr, factor / (right_factor * divisor))
    if call.sizes.is_equal(expr, divisor):
        return _joined(call.sizes, 1, factor / right_factor)
    raise Unknown


def modulo(call: Call, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return left % right
    return _divided(call, left, right, tirx.floormod)


def _divided(call: Call, left: Any, right: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return the result of dividing sizes, which are never negative."""
    if not call.sizes.is_certain(left >= 0) or not call.sizes.is_certain(right > 0):
        raise Unknown
    return call.sizes.simplify(function(left, right))


def _split(value: Any) -> tuple[Any, Fraction]:
    return tuple(value) if isinstance(value, Quotient) else (value, Fraction(1))


def _joined(sizes: SizeRanges, expr: Any, factor: Fraction) -> Any:
    if isinstance(expr, int):
        factor, expr = factor * expr, 1
    if factor.denominator == 1:
        return sizes.simplify(expr * factor.numerator)
    return Quotient(expr, factor)


def evaluate_where(call: Call) -> SizeValue:
    operands = (call.array(n) for n in range(3))
    chosen = map_elements(lambda condition, one, other: one if condition else other, *operands)
    return SizeValue(chosen, call.dtype(1))


def evaluate_constant_of_shape(call: Call) -> SizeValue:
    value = _value_of_shape(call.attributes)
    return SizeValue(
        map_elements(read_number, np.full(call.small_shape(0), value)), str(value.dtype)
    )


def _value_of_shape(attributes: Mapping[str, Any]) -> Any:
    """Return the NumPy value with which a ConstantOfShape fills its result."""
    value = attributes.get("value")
    return np.float32(0) if value is None else numpy_helper.to_array(value).ravel()[0]


def evaluate_expand(call: Call) -> Any:
    data, shape = call.array(0), call.small_shape(1)
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, shape))


def evaluate_reduce_prod(call: Call) -> Any:
    data = call.array(0)
    if data.ndim != 1 or call.optional(1, "axes") not in (None, [0], [-1]):
        raise Unknown
    result = as_array(call.sizes.simplify(math.prod(data)))
    return result.reshape(1) if call.attributes.get("keepdims", 1) else result


# ---------------------------------------------------------------- operators that take sizes


def follow_reshape(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    old, new = sizes.shape_of(data), sizes.operand(node, 1)
    if new is None or are_fixed(*old, *new):
        return None
    if not attributes_of(node).get("allowzero", 0):
        new = [old[axis] if _is(size, 0) else size for axis, size in enumerate(new)]
    total = sizes.simplify(math.prod(old))
    for axis, size in enumerate(new):
        if _is(size, -1):
            rest = math.prod([*new[:axis], *new[axis + 1 :]])
            new[axis] = sizes.simplify(total // sizes.simplify(rest))
    elements = sizes.simplify(math.prod(new))
    sizes.check_equal(total, elements, "the elements of its operand and result")
    return relax.op.reshape(data, shape_expr(new))


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def follow_expand(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    old, new = sizes.shape_of(data), sizes.operand(node, 1)
    if new is None or are_fixed(*old, *new):
        return None
    rank = max(len(old), len(new))
    old, new = [1] * (rank - len(old)) + old, [1] * (rank - len(new)) + new
    shape = []
    for size, other in zip(old, new, strict=True):
        is_kept = _is(other, 1) or _is(other, -1)
        if not is_kept and not _is(size, 1) and not sizes.is_equal(size, other):
            raise DynamicShapeProblem(
                f"a size of {size} cannot become one of {other} for all sizes of the dimensions"
            )
        shape.append(size if is_kept else other)
    return relax.op.broadcast_to(data, shape_expr(shape))


def follow_constant_of_shape(sizes: Sizes, node: NodeProto) -> Any:
    shape = sizes.dynamic_operand(node, 0)
    if shape is None:
        return None
    value = _value_of_shape(attributes_of(node))
    dtype = str(value.dtype)
    return relax.op.full(shape_expr(shape), relax.const(value, dtype), dtype)


def follow_range(sizes: Sizes, node: NodeProto) -> Any:
    bounds = [bound for name in node.input if (bound := sizes.find(name)) is not None]
    if len(bounds) < len(node.input):
        raise DynamicShapeProblem("its bounds depend on values, not only on dimensions")
    dtype = bounds[0].dtype
    start, limit, step = (bound.values.item() for bound in bounds)
    if are_fixed(start, limit, step):
        return None
    if not isinstance(step, int) or any(isinstance(v, Quotient) for v in (start, limit)):
        raise DynamicShapeProblem("its step is not a whole number")
    distance = limit - start if step > 0 else start - limit
    count = sizes.at_least(sizes.divide_up(distance, abs(step)), 0)
    values = sizes.emit(relax.op.arange(0, plain_expr(count, "int64"), 1, "int64"))
    if step != 1:
        values = sizes.emit(values * relax.const(step, "int64"))
    if not _is(start, 0):
        values = sizes.emit(values + sizes.tensor(SizeValue(as_array(start), "int64")))
    return values if dtype == "int64" else relax.op.astype(values, dtype)


def follow_slice(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    shape = sizes.shape_of(data)
    starts, ends, axes, steps = (sizes.operand(node, position) for position in (1, 2, 3, 4))
    if starts is None or ends is None:
        return None
    axes = list(range(len(starts))) if axes is None else [axis % len(shape) for axis in axes]
    steps = [1] * len(starts) if steps is None else steps
    if are_fixed(*starts, *ends, *(shape[axis] for axis in axes)):
        return None
    begins, stops = [], []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        extent = shape[axis]
        if not isinstance(step, int) or step < 1:
            if step == -1 and isinstance(extent, int):
                return None
            is_whole = _is(start, -1) and isinstance(end, int) and end <= -NO_END
            if step == -1 and is_whole and len(starts) == 1:
                return relax.op.flip(data, axis)
            raise DynamicShapeProblem("a step below 1 along a dynamic dimension is not supported")
        begin = sizes.clamp(start, extent)
        stop = sizes.at_least(sizes.clamp(end, extent), begin)
        count = sizes.divide_up(sizes.simplify(stop - begin), step)
        if not same_size(seen := sizes.as_seen(count), count):
            # Equal to `count`, but in the form in which an earlier shape has this size.
            stop = sizes.simplify(begin + seen * step - (step - 1))
        begins.append(begin)
        stops.append(stop)
    return relax.op.strided_slice(
        data, axes, _exprs(begins), _exprs(stops), steps, assume_inbound=True
    )


def _exprs(values: Sequence[Any]) -> list[Any]:
    return [plain_expr(value, "int64") for value in values]


def follow_tile(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    shape, repeats = sizes.shape_of(data), sizes.dynamic_operand(node, 1)
    if repeats is None:
        return None
    pairs = list(zip(repeats, shape, strict=True))
    split = [size for extent in shape for size in (1, extent)]
    wide = list(itertools.chain.from_iterable(pairs))
    whole = [sizes.simplify(repeat * extent) for repeat, extent in pairs]
    data = relax.op.reshape(data, shape_expr(split))
    data = relax.op.broadcast_to(data, shape_expr(wide))
    return relax.op.reshape(data, shape_expr(whole))


def follow_split(sizes: Sizes, node: NodeProto) -> Any:
    lengths = sizes.dynamic_operand(node, 1)
    if lengths is None:
        return None
    data = sizes.data(node.input[0])
    axis = int(attributes_of(node).get("axis", 0)) % len(sizes.shape_of(data))
    parts, begin = [], 0
    for length in lengths:
        end = sizes.simplify(begin + length)
        bounds = [axis], _exprs([begin]), _exprs([end])
        parts.append(sizes.emit(relax.op.strided_slice(data, *bounds, assume_inbound=True)))
        begin = end
    return parts


def follow_pad(sizes: Sizes, node: NodeProto) -> Any:
    widths = sizes.dynamic_operand(node, 1)
    if widths is None:
        return None
    if attributes_of(node).get("mode", "constant") != "constant":
        raise DynamicShapeProblem("widths can depend on dimensions only in constant mode")
    data = sizes.data(node.input[0])
    rank = len(sizes.shape_of(data))
    axes = sizes.operand(node, 3) or list(range(rank))
    before: list[Any] = [0] * rank
    after = list(before)
    for position, axis in enumerate(axes):
        before[axis], after[axis] = widths[position], widths[len(axes) + position]
    for width in (*before, *after):
        if not sizes.is_certain(width >= 0):
            raise DynamicShapeProblem(f"a width of {shape_text([width])} may be negative")
    value = sizes.find_operand(node, 2)
    number = 0 if value is None else value.values.item()
    if isinstance(number, Quotient):
        number = float(number.factor)
    fill = tirx.const(number, str(data.ty.dtype))
    return sizes.kernel(topi.nn.pad, data, _exprs(before), _exprs(after), fill)


def follow_space_to_depth(sizes: Sizes, node: NodeProto) -> None:
    """Check that height and width are multiples of the block."""
    block = int(attributes_of(node)["blocksize"])
    for size in sizes.shape_of(sizes.data(node.input[0]))[2:]:
        if not sizes.is_equal(size // block * block, size):
            text = f"{size} may not be a multiple of {block}; set `multiple_of` in `dimensions`"
            raise DynamicShapeProblem(text)


def follow_top_k(sizes: Sizes, node: NodeProto) -> Any:
    """Convert a TopK whose K follows from the dimensions, such as a sort of a whole axis."""
    counts = sizes.dynamic_operand(node, 1)
    if counts is None:
        return None
    data, attributes = sizes.data(node.input[0]), attributes_of(node)
    if data.ty.dtype not in _SORTED_DTYPES:
        raise DynamicShapeProblem(
            f"its K is {shape_text(counts)}, and its data are {data.ty.dtype}"
        )
    shape = sizes.shape_of(data)
    axis = int(attributes.get("axis", -1)) % len(shape)
    count = sizes.clamp(counts[0], shape[axis])
    indices = sizes.emit(
        relax.op.argsort(data, axis, bool(attributes.get("largest", 1)), dtype="int64")
    )
    if not sizes.is_equal(count, shape[axis]):
        bounds = [axis], _exprs([0]), _exprs([sizes.as_seen(count)])
        indices = sizes.emit(relax.op.strided_slice(indices, *bounds, assume_inbound=True))
    return [sizes.emit(relax.op.gather_elements(data, indices, axis)), indices]


# TVM's runtime sorts rows of dynamic length of these types.
_SORTED_DTYPES: Final = ("float32", "float64", "int32", "int64")


_COORDINATES: Final = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
_ROUNDINGS: Final = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def follow_resize(sizes: Sizes, node: NodeProto) -> Any:
    """Convert a Resize whose output height and width follow from the dimensions."""
    data = sizes.data(node.input[0])
    shape = sizes.shape_of(data)
    lengths = sizes.operand(node, 3)
    scales: list[float | None] = [None] * len(shape)
    if lengths is None:
        value = sizes.find_operand(node, 2)
        if value is None:
            text = "its scales depend on values, not only on dimensions"
            raise DynamicShapeProblem(text)
        factors = [_split(factor) for factor in value.values.ravel().tolist()]
        scales = [float(n) if n != 1 and _is(expr, 1) else None for expr, n in factors]
        products = [
            _joined(sizes, sizes.simplify(expr * extent), factor)
            for (expr, factor), extent in zip(factors, shape, strict=True)
        ]
        lengths = [floor(sizes, product) for product in products]
    if are_fixed(*shape, *lengths):
        return None
    lengths = list(map(sizes.as_seen, lengths))
    attributes = attributes_of(node)
    mode = read_interpolation(attributes)
    is_image = len(shape) == 4 and all(map(sizes.is_equal, shape[:2], lengths[:2]))
    odd = {"antialias", "axes", "keep_aspect_ratio_policy"} & attributes.keys()
    if not is_image or odd or mode.coordinates not in _COORDINATES:
        raise DynamicShapeProblem("only height and width of images of dynamic shape can be resized")
    if any(scales[2:]) and mode.coordinates != "align_corners":
        return _resize_by_fractions(sizes, data, lengths[2:], scales[2:], mode)
    is_nearest = mode.method == "nearest_neighbor"
    if is_nearest and mode.rounding not in _ROUNDINGS:
        raise ValueError(f"its nearest_mode is {mode.rounding}")
    return relax.op.image.resize2d(
        data,
        shape_expr(lengths[2:]),
        layout="NCHW",
        method=mode.method,
        coordinate_transformation_mode=mode.coordinates,
        rounding_method=mode.rounding if is_nearest else "",
        cubic_alpha=mode.cubic_alpha,
        cubic_exclude=int(mode.excludes_outside),
    )


def _resize_by_fractions(
    sizes: Sizes, data: Any, lengths: Any, scales: Sequence[float | None], mode: Interpolation
) -> Any:
    """Return images resized by fractional scales; pixel positions follow the scales, not rounded sizes."""
    dtype = str(data.ty.dtype.dtype)
    if not is_computed(mode) or dtype == "float64":
        text = f"mode {mode.method} by a scale that is not a whole number needs a fixed size"
        raise DynamicShapeProblem(
            f"{text}; `sizes` in place of `scales`, or mode linear, can follow"
        )
    wide = sizes.emit(relax.op.astype(data, "float32")) if dtype != "float32" else data
    function = functools.partial(resize_image, mode=mode, scales=scales)
    resized = sizes.emit(sizes.kernel(function, wide, *_exprs(lengths)))
    return relax.op.astype(resized, dtype) if dtype != "float32" else resized


def follow_windows(sizes: Sizes, node: NodeProto) -> None:
    """Replace SAME padding by explicit padding that is right for all sizes of the image."""
    attributes = attributes_of(node)
    if not attributes.get("auto_pad", "").startswith("SAME"):
        return
    extents = sizes.shape_of(sizes.data(node.input[0]))[2:]
    if are_fixed(*extents):
        return
    kernel = attributes.get("kernel_shape") or sizes.shape_of(sizes.data(node.input[1]))[2:]
    pads = read_same_padding(attributes, extents, kernel, sizes)
    kept = [a for a in node.attribute if a.name not in ("auto_pad", "pads")]
    set_entries(node.attribute, [*kept, helper.make_attribute("pads", pads)])


def follow_matrix_product(sizes: Sizes, node: NodeProto) -> None:
    """Check that the operands of a matmul have equal reduction lengths."""
    shapes = [sizes.shape_of(sizes.data(name)) for name in node.input[:2]]
    # For vector operands, TVM compares the lengths itself.
    if min(map(len, shapes)) < 2:
        return
    attributes = attributes_of(node)
    left = shapes[0][-2 if attributes.get("transA", 0) else -1]
    right = shapes[1][-1 if attributes.get("transB", 0) else -2]
    sizes.check_equal(left, right, "the terms of its operands")
