"""Converters of activations, arithmetic, reductions, sorting and norms, and helpers of all converters.

Operators compute in the dtype of their data; float16 and bfloat16 are accumulated in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.core.types import Array
from tvmflow.frontends.onnx import graph
from tvmflow.frontends.onnx._expressions import Windows
from tvmflow.frontends.onnx.graph import attribute_text
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import plain
from tvmflow.graph.ir import dtype_of
from tvmflow.graph.resize import Interpolation


class NodeToConvert(NamedTuple):
    """A node that a converter turns into Relax.

    Attributes:
        inputs: The operands; None for missing ones.
        attributes: The attributes; strings are bytes.
        convert_by_tvm: Converts the node as TVM does, with other operands.
        counts_rows: Whether a result with data-dependent rows is padded to its upper bound, with a row count.
    """

    builder: relax.BlockBuilder
    inputs: Sequence[Any]
    attributes: Mapping[str, Any]
    opset: int
    convert_by_tvm: Callable[[Sequence[Any]], Any]
    counts_rows: bool = True

    def emit(self, expr: Any) -> Any:
        """Return the normalized expression, whose type is then known."""
        return self.builder.normalize(expr)

    def cast(self, expr: Any, dtype: str) -> Any:
        return self.emit(relax.op.astype(expr, dtype))

    def by_tvm(self) -> Any:
        return self.convert_by_tvm(self.inputs)

    def operand(self, position: int) -> Any:
        return self.inputs[position] if position < len(self.inputs) else None

    def integer(self, name: str, default: int) -> int:
        return int(self.attributes.get(name, default))

    def number(self, name: str, default: float) -> float:
        return float(self.attributes.get(name, default))

    def text(self, name: str, default: str) -> str:
        return attribute_text(self.attributes, name, default)

    def count_outputs(self) -> int:
        return int(self.attributes["tvm_custom"]["num_outputs"])

    def is_set(self, name: str, default: int = 0) -> bool:
        return bool(self.attributes.get(name, default))

    def kernel(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Emit a TE kernel named after its function."""
        name = str(getattr(function, "func", function).__name__)
        return self.builder.emit_te(function, *operands, primfunc_name_hint=name)

    def refuse_auto_pad(self) -> None:
        """Refuse an `auto_pad` that `rewrite_windows` left because the size of the data is unknown."""
        if self.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise ValueError("auto_pad needs a known size of the data")


Converter = Callable[[NodeToConvert], Any]

_METHODS: Final = {"nearest": "nearest_neighbor", "linear": "linear", "cubic": "cubic"}


def read_interpolation(attributes: Mapping[str, Any]) -> Interpolation:
    return Interpolation(
        method=_METHODS[attribute_text(attributes, "mode", "nearest")],
        coordinates=attribute_text(attributes, "coordinate_transformation_mode", "half_pixel"),
        rounding=attribute_text(attributes, "nearest_mode", "round_prefer_floor"),
        cubic_alpha=float(attributes.get("cubic_coeff_a", -0.75)),
        excludes_outside=bool(attributes.get("exclude_outside", 0)),
    )


def constant(value: float, like: Any) -> Any:
    return relax.const(value, dtype_of(like))


def is_float(expr: Any) -> bool:
    return "float" in dtype_of(expr)


def are_tensors(exprs: Iterable[Any]) -> bool:
    """Return whether all expressions are tensors, rather than shapes."""
    return all(isinstance(expr.ty, relax.TensorType) for expr in exprs)


def list_sizes(expr: Any) -> list[Any]:
    """Return the sizes of a tensor: ints where they are fixed."""
    return [plain(extent) for extent in expr.ty.shape]


def known_array(expr: Any, name: str) -> Array:
    if not isinstance(expr, tvm.ir.Constant):
        raise ValueError(f"{name} depends on the inputs, which is not supported")
    return np.asarray(expr.value.numpy())


def known_integer(expr: Any, name: str) -> int:
    return int(known_array(expr, name).reshape(()))


# ---------------------------------------------------------------- activations


def _exponential_below(x: Any, scaled: Any, alpha: float) -> Any:
    """Return x if x > 0, else α·(eˢ - 1) with s, the `scaled` x; α may be negative."""
    below = constant(alpha, x) * (relax.op.exp(scaled) - constant(1, x))
    return relax.op.where(relax.op.greater(x, constant(0, x)), x, below)


def convert_elu(node: NodeToConvert) -> Any:
    [x] = node.inputs
    return _exponential_below(x, x, node.number("alpha", 1.0))


def convert_selu(node: NodeToConvert) -> Any:
    [x] = node.inputs
    alpha = node.number("alpha", 1.67326319217681884765625)
    gamma = node.number("gamma", 1.05070102214813232421875)
    return constant(gamma, x) * node.emit(_exponential_below(x, x, alpha))


def convert_celu(node: NodeToConvert) -> Any:
    [x], alpha = node.inputs, node.number("alpha", 1.0)
    return _exponential_below(x, node.emit(x / constant(alpha, x)), alpha)


def convert_thresholded_relu(node: NodeToConvert) -> Any:
    """Return values above a threshold, and 0 for others; multiplying infinity by 0 would give NaN."""
    [x] = node.inputs
    is_above = relax.op.greater(x, constant(node.number("alpha", 1.0), x))
    return relax.op.where(is_above, x, relax.op.zeros_like(x))


def convert_shrink(node: NodeToConvert) -> Any:
    [x], limit, bias = node.inputs, node.number("lambd", 0.5), node.number("bias", 0.0)
    is_above = relax.op.greater(x, constant(limit, x))
    is_below = relax.op.less(x, constant(-limit, x))
    above = relax.op.where(is_above, x - constant(bias, x), relax.op.zeros_like(x))
    return relax.op.where(is_below, x + constant(bias, x), above)


def convert_swish(node: NodeToConvert) -> Any:
    [x], alpha = node.inputs, node.number("alpha", 1.0)
    return x * relax.op.sigmoid(x if alpha == 1 else constant(alpha, x) * x)


def convert_sign(node: NodeToConvert) -> Any:
    """Return -1, 0 or 1; TVM compares with -1, which an unsigned dtype cannot represent."""
    [x] = node.inputs
    if dtype_of(x).startswith("uint"):
        return relax.op.minimum(x, constant(1, x))
    # Both comparisons are false for NaN, which stays NaN.
    zero = constant(0, x)
    negative = relax.op.where(relax.op.less(x, zero), constant(-1, x), x)
    return relax.op.where(relax.op.greater(x, zero), constant(1, x), negative)


def convert_hardmax(node: NodeToConvert) -> Any:
    """Return 1 at the first maximum along an axis, else 0; even if all values are the dtype's lowest."""
    [x] = node.inputs
    sizes = list_sizes(x)
    axis = node.integer("axis", -1) % len(sizes)
    if not isinstance(sizes[axis], int):
        raise ValueError("its axis needs a fixed size")
    indices = node.emit(relax.op.argmax(x, axis=axis, keepdims=True))
    indices = relax.op.maximum(indices, relax.const(0, "int64"))
    columns = count_along(axis, sizes[axis], len(sizes))
    return relax.op.astype(relax.op.equal(indices, columns), dtype_of(x))


def count_along(axis: int, count: int, rank: int) -> Any:
    """Return the constant 0 … count − 1 along an axis, with one element along the others."""
    shape = [count if n == axis else 1 for n in range(rank)]
    return relax.const(np.arange(count).reshape(shape), "int64")


def convert_bit_shift(node: NodeToConvert) -> Any:
    """Return shifted integers: 0 if the shift is at least the number of bits of the dtype."""
    x, indices = node.inputs
    shifted = node.emit(node.by_tvm())
    bits = np.iinfo(dtype_of(x)).bits
    is_short = relax.op.less(indices, relax.const(bits, dtype_of(indices)))
    return relax.op.where(is_short, shifted, relax.op.zeros_like(shifted))


def convert_dynamic_quantize_linear(node: NodeToConvert) -> Any:
    """Quantize data to uint8 by its range; return data, scale (1 if all are 0) and zero point."""
    [x] = node.inputs
    zero, most = constant(0, x), constant(255, x)
    # The range always includes 0; for data without elements it is 0 to 0.
    highest, lowest = (
        _reduce(node, Reduction(reduce), x, axes=(), keeps=False)
        for reduce in (relax.op.max, relax.op.min)
    )
    largest = node.emit(relax.op.maximum(highest, zero))
    smallest = node.emit(relax.op.minimum(lowest, zero))
    scale = node.emit(relax.op.divide(relax.op.subtract(largest, smallest), most))
    is_zero = relax.op.equal(scale, zero)
    scale = node.builder.emit(relax.op.where(is_zero, relax.op.ones_like(scale), scale))
    exact = relax.op.clip(relax.op.divide(relax.op.negative(smallest), scale), 0, 255)
    zero_point = node.builder.emit(relax.op.astype(relax.op.round(exact), "uint8"))
    quantized = relax.op.quantize(x, scale, zero_point, axis=0, out_dtype="uint8")
    return relax.Tuple([node.emit(quantized), scale, zero_point])


# ---------------------------------------------------------------- hyperbolic functions
# LLVM cannot vectorize the C library's functions.


_TERMS: Final = 8


def convert_cosh(node: NodeToConvert) -> Any:
    """Return `(eˣ + e⁻ˣ)/2`."""
    [x] = node.inputs
    half = constant(0.5, x)
    return half * relax.op.exp(x) + half * relax.op.exp(relax.op.negative(x))


def convert_sinh(node: NodeToConvert) -> Any:
    """Return `(eˣ − e⁻ˣ)/2`; for |x| < 1 the Taylor series, because the difference loses most bits."""
    [x] = node.inputs
    half, one = constant(0.5, x), constant(1.0, x)
    large = half * relax.op.exp(x) - half * relax.op.exp(relax.op.negative(x))
    square, series = node.emit(x * x), one
    for n in range(_TERMS, 0, -1):
        factor = constant(1 / (2 * n * (2 * n + 1)), x)
        series = node.emit(one + square * factor * series)
    return relax.op.where(relax.op.less(square, one), x * series, large)


# ---------------------------------------------------------------- arithmetic


def convert_equal(node: NodeToConvert) -> Any:
    """Return where operands are equal; TVM cannot generate code that compares bools."""
    if not are_tensors(node.inputs) or dtype_of(node.inputs[0]) != "bool":
        return node.by_tvm()
    return relax.op.logical_not(node.emit(relax.op.logical_xor(*node.inputs)))


def convert_prelu(node: NodeToConvert) -> Any:
    """Return `max(x, 0) + slope · min(x, 0)`.

    A vector of slopes that can only be broadcast to the channels has one slope for each channel, as in opset 6.
    Old exports of MXNet and PyTorch have such slopes in newer opsets, too.
    """
    x, slope = node.inputs
    sizes, slopes = list_sizes(x), list_sizes(slope)
    if len(slopes) == 1 and len(sizes) > 1 and slopes[0] not in (1, sizes[-1]):
        if slopes[0] != sizes[1]:
            raise ValueError(f"slopes of shape {slopes} do not fit data of shape {sizes}")
        slope = relax.op.reshape(slope, [slopes[0], *[1] * (len(sizes) - 2)])
    zero = constant(0, x)
    return relax.op.maximum(x, zero) + slope * relax.op.minimum(x, zero)


def convert_clip(node: NodeToConvert) -> Any:
    """Return maximum and minimum with constant bounds: layout passes support them."""
    value, bounds = node.inputs[0], [node.operand(1), node.operand(2)]
    limits = [node.attributes.get(name) for name in ("min", "max")]
    if limits != [None, None]:
        bounds = [None if v is None else constant(float(v), value) for v in limits]
    if any(bound is not None and not isinstance(bound, tvm.ir.Constant) for bound in bounds):
        return node.by_tvm()
    for bound, operator in zip(bounds, (relax.op.maximum, relax.op.minimum), strict=True):
        # A NaN bound counts as missing, as in ONNX Runtime.
        if bound is not None and not np.isnan(bound.value.numpy()).any():
            value = node.emit(operator(value, bound))
    return value


def convert_pow(node: NodeToConvert) -> Any:
    """Return powers in the dtype of the base; an integer base is computed as float64.

    Squares and cubes are products: `pow` of the C library takes 50 times as long, and float64 has 53 bits.
    """
    base, exponent = node.inputs
    known = ir.constant_array(exponent)
    is_scalar = known is not None and known.size == 1 and known.ndim <= len(list_sizes(base))
    if known is not None and is_scalar and known.item() in (2, 3):
        squares = square(base)
        return squares if known.item() == 2 else relax.op.multiply(node.emit(squares), base)
    if dtype_of(base) == dtype_of(exponent) and is_float(base):
        return node.by_tvm()
    if is_float(base):
        return relax.op.power(base, relax.op.astype(exponent, dtype_of(base)))
    power = node.emit(relax.op.power(*(node.cast(x, "float64") for x in (base, exponent))))
    # With integer exponents the power is an integer; rounding removes the C library's error.
    power = power if is_float(exponent) else node.emit(relax.op.round(power))
    return relax.op.astype(power, dtype_of(base))


def convert_mod(node: NodeToConvert) -> Any:
    """Return remainders with the sign of the divisor. For an infinite divisor, `a − ⌊a/b⌋·b` would be NaN."""
    left, right = node.inputs
    if node.is_set("fmod") or not is_float(left):
        return node.by_tvm()
    rest, zero = node.emit(relax.op.mod(left, right)), constant(0, left)
    differs = relax.op.logical_xor(relax.op.less(rest, zero), relax.op.less(right, zero))
    moves = relax.op.logical_and(relax.op.not_equal(rest, zero), differs)
    return relax.op.where(moves, relax.op.add(rest, right), rest)


def convert_is_inf(node: NodeToConvert) -> Any:
    """Return which values are infinite; attributes may restrict this to one sign."""
    [x] = node.inputs
    signs = {"detect_negative": relax.op.less, "detect_positive": relax.op.greater}
    comparisons = [compare for name, compare in signs.items() if node.is_set(name, 1)]
    infinite = node.emit(relax.op.isinf(x))
    if len(comparisons) == len(signs):
        return infinite
    if not comparisons:
        return relax.op.zeros_like(infinite)
    return relax.op.logical_and(infinite, comparisons[0](x, constant(0, x)))


def convert_pairwise(node: NodeToConvert, operator: Callable[[Any, Any], Any]) -> Any:
    """Combine operands pairwise; TVM would stack copies of them, and reduce from a finite start value."""
    if all(isinstance(operand, tvm.ir.Constant) for operand in node.inputs):
        return node.by_tvm()
    return functools.reduce(lambda left, right: node.emit(operator(left, right)), node.inputs)


def convert_mean(node: NodeToConvert) -> Any:
    total = convert_pairwise(node, relax.op.add)
    return relax.op.divide(total, constant(float(len(node.inputs)), total))


def convert_bit_cast(node: NodeToConvert) -> Any:
    [x] = node.inputs
    dtype = graph.dtype_of(node.attributes["to"])
    if "bool" in (dtype, dtype_of(x)):
        return relax.op.astype(x, dtype)

    def bit_cast(data: Any) -> Any:
        return te.compute(data.shape, lambda *i: tirx.reinterpret(dtype, data(*i)), name="bit_cast")

    return node.kernel(bit_cast, x)


_NARROW: Final = ("float16", "bfloat16")
_WIDE: Final = "float32"


def in_float32(convert: Converter) -> Converter:
    """Return a converter that computes float16 and bfloat16 in float32, as ONNX Runtime does."""

    @functools.wraps(convert)
    def wide(node: NodeToConvert) -> Any:
        dtypes = [None if x is None else dtype_of(x) for x in node.inputs]
        dtype = dtypes[0]
        if dtype not in _NARROW:
            return convert(node)
        inputs = [
            node.cast(x, _WIDE) if x_dtype in _NARROW else x
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


# ---------------------------------------------------------------- reductions


class Reduction(NamedTuple):
    """A reduction.

    Attributes:
        reduce: The reduction, a function of data, axes and `keepdims`.
        alone: The function used if no axis is reduced; None for `before`, then `after`.
        has_float_result: Whether integers are reduced as float64.
        empty: The result for no elements; an integer dtype without this value has the nearest one.
    """

    reduce: Callable[[Any, Sequence[int] | None, bool], Any]
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    alone: Callable[[Any], Any] | None = None
    has_float_result: bool = False
    empty: float = 0.0


def convert_reduction(node: NodeToConvert, reduction: Reduction) -> Any:
    """Return reduced data; without axes all axes, or none with `noop_with_empty_axes`."""
    data, dtype = node.inputs[0], dtype_of(node.inputs[0])
    axes = [int(axis) for axis in node.attributes.get("axes", ())]
    if node.operand(1) is not None and 0 not in list_sizes(node.operand(1)):
        axes = [int(axis) for axis in known_array(node.operand(1), "axes").reshape(-1)]
    keeps = node.is_set("keepdims", 1)
    is_wide = dtype in _NARROW
    if is_wide or (reduction.has_float_result and not is_float(data)):
        data = node.cast(data, _WIDE if is_wide else "float64")
    if not axes and node.is_set("noop_with_empty_axes"):
        steps = [reduction.alone] if reduction.alone else [reduction.before, reduction.after]
    else:
        reduce = functools.partial(_reduce, node, reduction, axes=axes, keeps=keeps)
        steps = [reduction.before, reduce, reduction.after]
    for step in steps:
        data = data if step is None else node.emit(step(data))
    return data if dtype_of(data) == dtype else relax.op.astype(data, dtype)


def _reduce(
    node: NodeToConvert, reduction: Reduction, data: Any, *, axes: Sequence[int], keeps: bool
) -> Any:
    """Return data reduced along axes, or along all if there are none; a scalar is returned unchanged."""
    sizes = list_sizes(data)
    reduced = {axis % len(sizes) for axis in axes} or set(range(len(sizes)))
    if has_no_elements(sizes[axis] for axis in reduced):
        kept = [1 if n in reduced else size for n, size in enumerate(sizes)]
        shape = kept if keeps else [size for n, size in enumerate(sizes) if n not in reduced]
        # TVM would divide by 0 elements, and has no kernel for a loop without iterations.
        return relax.op.broadcast_to(constant(_limit(reduction.empty, data), data), shape)
    return reduction.reduce(data, axes or None, keeps) if sizes else node.emit(data)


def has_no_elements(sizes: Iterable[Any]) -> bool:
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _limit(value: float, like: Any) -> float:
    """Return a value; for an infinity that the tensor's dtype lacks, its largest or smallest value."""
    if is_float(like) or math.isfinite(value):
        return value
    limits = np.iinfo(dtype_of(like))
    return int(limits.max if value > 0 else limits.min)


def square(x: Any) -> Any:
    return relax.op.multiply(x, x)


def log_sum_exp(x: Any, axes: Sequence[int] | None, keeps: bool) -> Any:
    """Return ln Σ eˣ, shifted by the largest element where that is finite."""
    largest = relax.op.max(x, axes, True)
    shift = relax.op.where(relax.op.isfinite(largest), largest, relax.op.zeros_like(largest))
    result = relax.op.log(relax.op.sum(relax.op.exp(x - shift), axes, True)) + shift
    return result if keeps else relax.op.squeeze(result, axes)


def _extreme(reduce: Callable[..., Any]) -> Callable[[Any, Sequence[int] | None, bool], Any]:
    """Return a maximum or minimum reduction that is correct for infinities, too.

    TVM's reductions start with the lowest or highest finite value. Elements are halved before and doubled after:
    the start value is returned only where all elements are infinite, and doubled, it is infinite again.
    """

    def function(x: Any, axes: Sequence[int] | None, keeps: bool) -> Any:
        if not is_float(x):
            return reduce(x, axes, keeps)
        return reduce(x * constant(0.5, x), axes, keeps) * constant(2.0, x)

    return function


def convert_reduce_mean(node: NodeToConvert) -> Any:
    """Return means; integers are averaged as int64, as TVM does for int32, but TVM does not cast the data."""
    dtype = dtype_of(node.inputs[0]) if is_float(node.inputs[0]) else "int64"
    return _convert_as(node, Reduction(relax.op.mean), dtype)


def convert_reduce_extreme(node: NodeToConvert, reduce: Callable[..., Any], empty: float) -> Any:
    dtype = dtype_of(node.inputs[0])
    reduction = Reduction(_extreme(reduce), empty=empty)
    return _convert_as(node, reduction, "uint8" if dtype == "bool" else dtype)


def _convert_as(node: NodeToConvert, reduction: Reduction, dtype: str) -> Any:
    data, *rest = node.inputs
    if dtype_of(data) == dtype:
        return convert_reduction(node, reduction)
    other = node._replace(inputs=[node.cast(data, dtype), *rest])
    return relax.op.astype(convert_reduction(other, reduction), dtype_of(data))


# ---------------------------------------------------------------- norms


def convert_lp_normalization(node: NodeToConvert) -> Any:
    """Return data divided by its norm along an axis; zeros stay zeros."""
    [x], axis = node.inputs, node.integer("axis", -1)
    p = 1 if node.integer("p", 2) == 1 else 2
    norm = node.emit(_root(relax.op.sum(_power(x, p), axis, True), p))
    is_zero = relax.op.equal(norm, constant(0, x))
    return relax.op.divide(x, relax.op.where(is_zero, relax.op.ones_like(norm), norm))


def convert_batch_norm(node: NodeToConvert) -> Any:
    """Return a batch norm; its parameters may have a wider float dtype than the data."""
    dtype = dtype_of(node.inputs[0])
    if dtype not in _NARROW or all(dtype_of(x) == dtype for x in node.inputs):
        return node.by_tvm()
    return in_float32(_first_result)(node)


def _first_result(node: NodeToConvert) -> Any:
    """Return the first result of TVM's converter; the other results are for training only."""
    results = node.builder.emit(node.by_tvm())
    zero = relax.const(np.zeros(0, np.float32))
    return relax.Tuple([node.emit(relax.TupleGetItem(results, 0)), zero, zero])


def convert_mean_variance_norm(node: NodeToConvert) -> Any:
    """Return (x − mean) / deviation; computing the variance as mean(x²) − mean(x)² would lose digits."""
    [x], axes = node.inputs, [int(axis) for axis in node.attributes.get("axes", (0, 2, 3))]
    centred, variance = _center(node, x, axes)
    return centred / (relax.op.sqrt(variance) + constant(1e-9, x))


def _center(node: NodeToConvert, x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """Return data minus its mean, and its variance."""
    centred = node.emit(x - relax.op.mean(x, axes, True))
    return centred, node.emit(relax.op.mean(square(centred), axes, True))


def refuse_empty_images(convert: Converter) -> Converter:
    """Return a converter that refuses images without pixels, as ONNX Runtime does."""

    @functools.wraps(convert)
    def checked(node: NodeToConvert) -> Any:
        shape = list_sizes(node.inputs[0])
        if has_no_elements(shape[1:]):
            raise ValueError(f"its data of shape {shape} has no pixels")
        return convert(node)

    return checked


def convert_global_lp_pool(node: NodeToConvert) -> Any:
    [x], p = node.inputs, node.integer("p", 2)
    axes = list(range(2, len(list_sizes(x))))
    return _root(node.emit(relax.op.sum(_power(x, p), axes, True)), p)


def convert_lp_pool(node: NodeToConvert) -> Any:
    [x], p = node.inputs, node.integer("p", 2)
    powers = node.emit(_power(x, p))
    return _root(node.emit(_sum_windows(node, powers)), p)


def convert_average_pool(node: NodeToConvert) -> Any:
    """Return means of windows; TVM counts too many pixels for a dilated window that ends beyond the data."""
    if node.integer("count_include_pad", 0) or set(node.attributes.get("dilations", (1,))) == {1}:
        return node.by_tvm()
    return _average_with_gaps(node)


@in_float32
def _average_with_gaps(node: NodeToConvert) -> Any:
    [x] = node.inputs
    shape = relax.ShapeExpr([1, 1, *list_sizes(x)[2:]])
    counts = node.emit(_sum_windows(node, node.emit(relax.op.ones(shape, dtype_of(x)))))
    return node.emit(_sum_windows(node, x)) / counts


def _sum_windows(node: NodeToConvert, x: Any) -> Any:
    """Return the sums of windows: TVM's means of padded data, whose divisor counts all pixels."""
    attributes, sizes = node.attributes, list_sizes(x)[2:]
    window, strides, dilations, before, after = Windows.read(
        attributes, [int(size) for size in attributes["kernel_shape"]]
    )
    ends = list(after)
    if node.is_set("ceil_mode"):
        # The last windows may end beyond the data, and read zeros there.
        for axis, (size, step) in enumerate(zip(sizes, strides, strict=True)):
            reach = (window[axis] - 1) * dilations[axis] + 1
            if not isinstance(size, int):
                raise ValueError("ceil_mode needs a known size of the data")
            room = size + before[axis] + ends[axis] - reach
            count = -(-room // step) + 1
            # A window that would start behind the data is left out.
            count -= (count - 1) * step >= size + before[axis]
            ends[axis] += max(0, (count - 1) * step - room)
    pool = getattr(relax.op.nn, f"avg_pool{len(sizes)}d")
    node.refuse_auto_pad()
    means = pool(x, window, strides, [*before, *ends], dilations, count_include_pad=True)
    return means * constant(float(math.prod(window)), x)


def _power(x: Any, p: int) -> Any:
    if p in (1, 2):
        return relax.op.abs(x) if p == 1 else square(x)
    return relax.op.power(relax.op.abs(x), constant(float(p), x))


def _root(x: Any, p: int) -> Any:
    if p in (1, 2):
        return x if p == 1 else relax.op.sqrt(x)
    return relax.op.power(x, constant(1 / p, x))


# ---------------------------------------------------------------- positions, orders, running sums


def convert_arg_extreme(node: NodeToConvert) -> Any:
    """Return indices of maxima or minima, even in rows of only the lowest or highest value.

    TVM starts with this value and the index -1, and keeps -1 if no element is better.
    """
    extent = list_sizes(node.inputs[0])[node.integer("axis", 0)]
    if has_no_elements([extent]):
        raise ValueError("its data has no elements along the axis")
    result = node.emit(node.by_tvm())
    if not node.is_set("select_last_index"):
        return relax.op.maximum(result, constant(0, result))
    # TVM counts from the end of the axis then, so its start index -1 becomes `extent`.
    return relax.op.minimum(result, constant(extent - 1, result))


def convert_top_k(node: NodeToConvert) -> Any:
    """Return the largest or smallest values and their indices; TVM sorts only 32- and 64-bit integers."""
    data, count = node.inputs
    dtype = dtype_of(data)
    if is_float(data) or dtype in ("int32", "int64"):
        return node.by_tvm()
    if dtype == "uint64":
        raise ValueError("uint64 cannot be sorted")
    wide = node.cast(data, "int64" if dtype == "uint32" else "int32")
    found = node.emit(node.convert_by_tvm([wide, count]))
    values = node.emit(relax.op.astype(relax.TupleGetItem(found, 0), dtype))
    return relax.Tuple([values, node.emit(relax.TupleGetItem(found, 1))])


def convert_cum_sum(node: NodeToConvert) -> Any:
    known_array(node.inputs[1], "axis")
    return node.by_tvm()


def convert_cum_prod(node: NodeToConvert) -> Any:
    x, axis = node.inputs
    axis = known_integer(axis, "axis") % len(list_sizes(x))
    data = node.emit(relax.op.flip(x, axis)) if node.is_set("reverse") else x
    product = node.emit(relax.op.cumprod(data, axis, dtype_of(x), node.is_set("exclusive")))
    return relax.op.flip(product, axis) if node.is_set("reverse") else product


def convert_layer_norm(node: NodeToConvert) -> Any:
    """Return a layer norm for any float dtype; TVM's does not support float64."""
    data, scale, *shift = node.inputs
    if dtype_of(data) != "float64":
        return node.by_tvm()
    rank = len(list_sizes(data))
    centred, variance = _center(node, data, list(range(node.integer("axis", -1) % rank, rank)))
    epsilon = constant(node.number("epsilon", 1e-5), data)
    scaled = node.emit(centred / relax.op.sqrt(variance + epsilon) * scale)
    return scaled + shift[0] if shift and shift[0] is not None else scaled
