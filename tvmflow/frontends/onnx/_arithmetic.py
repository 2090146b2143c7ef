"""Converters of activations and arithmetic, in the dtype of their data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.ir import dtype_of
from tvmflow.frontends._emission import make_cosh, make_sinh
from tvmflow.frontends.onnx import graph
from tvmflow.frontends.onnx._conversion import (
    Converter,
    NodeToConvert,
    constant,
    is_float,
    list_sizes,
)


def _exponential_below(x: Any, scaled: Any, alpha: float) -> Any:
    """Return x, but α·(eˢ - 1) where the scaled value s is not above 0."""
    below = constant(alpha, x) * (relax.op.exp(scaled) - constant(1, x))
    return relax.op.where(relax.op.greater(scaled, constant(0, x)), x, below)


def _elu(node: NodeToConvert) -> Any:
    [x] = node.inputs
    return _exponential_below(x, x, float(node.attributes.get("alpha", 1.0)))


def _selu(node: NodeToConvert) -> Any:
    [x] = node.inputs
    alpha = float(node.attributes.get("alpha", 1.67326319217681884765625))
    gamma = float(node.attributes.get("gamma", 1.05070102214813232421875))
    return constant(gamma, x) * node.emit(_exponential_below(x, x, alpha))


def _celu(node: NodeToConvert) -> Any:
    [x], alpha = node.inputs, float(node.attributes.get("alpha", 1.0))
    return _exponential_below(x, node.emit(x / constant(alpha, x)), alpha)


def _thresholded_relu(node: NodeToConvert) -> Any:
    """Return values above a threshold, and 0 for others; a product with 0 would be NaN for infinities."""
    [x] = node.inputs
    is_above = relax.op.greater(x, constant(float(node.attributes.get("alpha", 1.0)), x))
    return relax.op.where(is_above, x, relax.op.zeros_like(x))


def _shrink(node: NodeToConvert) -> Any:
    [x] = node.inputs
    limit, bias = (
        float(node.attributes.get(name, value)) for name, value in (("lambd", 0.5), ("bias", 0.0))
    )
    above = relax.op.where(
        relax.op.greater(x, constant(limit, x)), x - constant(bias, x), relax.op.zeros_like(x)
    )
    is_below = relax.op.less(x, constant(-limit, x))
    return relax.op.where(is_below, x + constant(bias, x), above)


def _swish(node: NodeToConvert) -> Any:
    [x], alpha = node.inputs, float(node.attributes.get("alpha", 1.0))
    return x * relax.op.sigmoid(x if alpha == 1 else constant(alpha, x) * x)


def _sign(node: NodeToConvert) -> Any:
    """Return -1, 0 and 1; TVM compares with -1, which no unsigned integer is."""
    [x] = node.inputs
    if dtype_of(x).startswith("uint"):
        return relax.op.minimum(x, constant(1, x))
    # NaN is neither, and stays what it is
    zero, ones = constant(0, x), relax.op.ones_like(x)
    negative = relax.op.where(relax.op.less(x, zero), relax.op.negative(ones), x)
    return relax.op.where(relax.op.greater(x, zero), ones, negative)


def _hardmax(node: NodeToConvert) -> Any:
    """Return 1 at the first maximum along an axis, and 0 elsewhere, also in rows of the lowest value."""
    [x] = node.inputs
    sizes = list_sizes(x)
    axis = int(node.attributes.get("axis", -1)) % len(sizes)
    if not isinstance(sizes[axis], int):
        raise ValueError("its axis needs a fixed size")
    places = node.emit(relax.op.argmax(x, axis=axis, keepdims=True))
    places = relax.op.maximum(places, relax.const(0, "int64"))
    shape = [sizes[axis] if n == axis else 1 for n in range(len(sizes))]
    columns = relax.const(np.arange(sizes[axis]).reshape(shape), "int64")
    return relax.op.astype(relax.op.equal(places, columns), dtype_of(x))


def _bit_shift(node: NodeToConvert) -> Any:
    """Return shifted bits, none of which are left after as many places as the type has, or more."""
    x, places = node.inputs
    shifted = node.emit(node.convert_by_tvm(node.inputs))
    bits = np.iinfo(dtype_of(x)).bits
    is_short = relax.op.less(places, relax.const(bits, dtype_of(places)))
    return relax.op.where(is_short, shifted, relax.op.zeros_like(shifted))


def _dynamic_quantize_linear(node: NodeToConvert) -> Any:
    """Return data as uint8 with a scale and a zero point for its range; the scale of zeros is 1."""
    [x] = node.inputs
    zero, most = constant(0, x), constant(255, x)
    largest = node.emit(relax.op.maximum(relax.op.max(x), zero))
    smallest = node.emit(relax.op.minimum(relax.op.min(x), zero))
    scale = node.emit(relax.op.divide(relax.op.subtract(largest, smallest), most))
    is_zero = relax.op.equal(scale, zero)
    scale = node.builder.emit(relax.op.where(is_zero, relax.op.ones_like(scale), scale))
    place = relax.op.clip(relax.op.divide(relax.op.negative(smallest), scale), 0, 255)
    zero_point = node.builder.emit(relax.op.astype(relax.op.round(place), "uint8"))
    quantized = relax.op.quantize(x, scale, zero_point, axis=0, out_dtype="uint8")
    return relax.Tuple([node.emit(quantized), scale, zero_point])


# ---------------------------------------------------------------- arithmetic


def _equal(node: NodeToConvert) -> Any:
    """Return where operands are equal; TVM generates no code that compares bools."""
    left, right = node.inputs
    is_tensor = all(isinstance(x.ty, relax.TensorType) for x in node.inputs)
    if not is_tensor or dtype_of(left) != "bool":
        return node.convert_by_tvm(node.inputs)
    return relax.op.logical_not(node.emit(relax.op.logical_xor(left, right)))


def _prelu(node: NodeToConvert) -> Any:
    """Return `max(x, 0) + slope · min(x, 0)`.

    A vector of slopes that only fits the channels counts as one slope for each channel, as in
    opset 6: old exports of MXNet and PyTorch have such slopes in newer opsets too.
    """
    x, slope = node.inputs
    sizes, slopes = list_sizes(x), list_sizes(slope)
    if len(slopes) == 1 and len(sizes) > 1 and slopes[0] not in (1, sizes[-1]):
        if slopes[0] != sizes[1]:
            raise ValueError(f"slopes of shape {slopes} do not fit data of shape {sizes}")
        slope = relax.op.reshape(slope, [slopes[0], *[1] * (len(sizes) - 2)])
    zero = constant(0, x)
    return relax.op.maximum(x, zero) + slope * relax.op.minimum(x, zero)


def _clip(node: NodeToConvert) -> Any:
    """Return maximum and minimum with constant bounds: layout passes support them."""
    bounds = _clip_bounds(node.inputs, node.attributes)
    if bounds is None:
        return node.convert_by_tvm(node.inputs)
    value = node.inputs[0]
    for bound, operator in zip(bounds, (relax.op.maximum, relax.op.minimum), strict=True):
        value = value if bound is None else node.emit(operator(value, bound))
    return value


def _clip_bounds(inputs: Any, attrs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return minimum and maximum of a Clip, None for a missing one; None when they are not constant."""
    if "min" in attrs or "max" in attrs:
        values = [attrs.get(name) for name in ("min", "max")]
        bounds = [None if v is None else constant(float(v), inputs[0]) for v in values]
    else:
        bounds = [inputs[index] if index < len(inputs) else None for index in (1, 2)]
    if any(bound is not None and not isinstance(bound, tvm.ir.Constant) for bound in bounds):
        return None
    # A NaN bound counts as missing, as in ONNX Runtime.
    low, high = (
        None if bound is None or np.isnan(bound.value.numpy()).any() else bound for bound in bounds
    )
    return low, high


def _pow(node: NodeToConvert) -> Any:
    """Return powers in the dtype of the base; those of integers are computed as float64."""
    base, exponent = node.inputs
    if dtype_of(base) == dtype_of(exponent) and is_float(base):
        return node.convert_by_tvm(node.inputs)
    if is_float(base):
        return relax.op.power(base, relax.op.astype(exponent, dtype_of(base)))
    wide = [node.emit(relax.op.astype(operand, "float64")) for operand in (base, exponent)]
    power = node.emit(relax.op.power(*wide))
    # A power of integers is an integer, except for rounding errors of the C library.
    power = power if is_float(exponent) else node.emit(relax.op.round(power))
    return relax.op.astype(power, dtype_of(base))


def _mod(node: NodeToConvert) -> Any:
    """Return remainders with the sign of the divisor, also by infinity; `a − ⌊a/b⌋·b` would be NaN there."""
    left, right = node.inputs
    if node.attributes.get("fmod", 0) or not is_float(left):
        return node.convert_by_tvm(node.inputs)
    rest, zero = node.emit(relax.op.mod(left, right)), constant(0, left)
    differs = relax.op.logical_xor(relax.op.less(rest, zero), relax.op.less(right, zero))
    moves = relax.op.logical_and(relax.op.not_equal(rest, zero), differs)
    return relax.op.where(moves, relax.op.add(rest, right), rest)


def _is_inf(node: NodeToConvert) -> Any:
    """Return which values are infinite, or only those of one sign."""
    [x] = node.inputs
    signs = {"detect_negative": relax.op.less, "detect_positive": relax.op.greater}
    comparisons = [compare for name, compare in signs.items() if node.attributes.get(name, 1)]
    infinite = node.emit(relax.op.isinf(x))
    if len(comparisons) == len(signs):
        return infinite
    if not comparisons:
        return relax.op.zeros_like(infinite)
    return relax.op.logical_and(infinite, comparisons[0](x, constant(0, x)))


def _pairwise(node: NodeToConvert, operator: Callable[[Any, Any], Any]) -> Any:
    """Return one operand after the other combined.

    TVM copies all into one tensor, and reduces that from a finite start.
    """
    if all(isinstance(operand, tvm.ir.Constant) for operand in node.inputs):
        return node.convert_by_tvm(node.inputs)
    return functools.reduce(lambda left, right: node.emit(operator(left, right)), node.inputs)


def _mean(node: NodeToConvert) -> Any:
    total = _pairwise(node, relax.op.add)
    return relax.op.divide(total, constant(float(len(node.inputs)), total))


def _bit_cast(node: NodeToConvert) -> Any:
    """Return the bits of numbers as numbers of another dtype of the same size."""
    [x] = node.inputs
    dtype = graph.dtype_of(node.attributes["to"])
    if "bool" in (dtype, dtype_of(x)):
        return relax.op.astype(x, dtype)

    def reinterpret(data: Any) -> Any:
        return te.compute(data.shape, lambda *i: tirx.reinterpret(dtype, data(*i)), name="bit_cast")

    return node.builder.emit_te(reinterpret, x, primfunc_name_hint="bit_cast")


ARITHMETIC_CONVERTERS: Final[Mapping[str, Converter]] = {
    "BitCast": _bit_cast,
    "BitShift": _bit_shift,
    "Celu": _celu,
    "Clip": _clip,
    "Cosh": lambda node: make_cosh(node.inputs[0]),
    "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "Elu": _elu,
    "Equal": _equal,
    "Hardmax": _hardmax,
    "IsInf": _is_inf,
    "Max": functools.partial(_pairwise, operator=relax.op.maximum),
    "Mean": _mean,
    "Min": functools.partial(_pairwise, operator=relax.op.minimum),
    "Mod": _mod,
    "PRelu": _prelu,
    "Pow": _pow,
    "Selu": _selu,
    "Shrink": _shrink,
    "Sign": _sign,
    "Sinh": lambda node: make_sinh(node.inputs[0], node.emit),
    "Sum": functools.partial(_pairwise, operator=relax.op.add),
    "Swish": _swish,
    "ThresholdedRelu": _thresholded_relu,
}
"""Operator -> its converter."""
