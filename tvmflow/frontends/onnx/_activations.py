"""Converters of activations and of operators with corner cases, in the dtype of their data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.compiler.ir import dtype_of
from tvmflow.frontends.onnx._conversion import Converter, NodeToConvert, list_sizes


def _constant(value: float, like: Any) -> Any:
    return relax.const(value, dtype_of(like))


def _exponential_below(x: Any, scaled: Any, alpha: float) -> Any:
    """Return x, but α·(eˢ - 1) where the scaled value s is not above 0."""
    below = _constant(alpha, x) * (relax.op.exp(scaled) - _constant(1, x))
    return relax.op.where(relax.op.greater(scaled, _constant(0, x)), x, below)


def _elu(node: NodeToConvert) -> Any:
    [x] = node.inputs
    return _exponential_below(x, x, float(node.attributes.get("alpha", 1.0)))


def _selu(node: NodeToConvert) -> Any:
    [x] = node.inputs
    alpha = float(node.attributes.get("alpha", 1.67326319217681884765625))
    gamma = float(node.attributes.get("gamma", 1.05070102214813232421875))
    return _constant(gamma, x) * node.emit(_exponential_below(x, x, alpha))


def _celu(node: NodeToConvert) -> Any:
    [x], alpha = node.inputs, float(node.attributes.get("alpha", 1.0))
    return _exponential_below(x, node.emit(x / _constant(alpha, x)), alpha)


def _thresholded_relu(node: NodeToConvert) -> Any:
    """Return values above a threshold, and 0 for others; a product with 0 would be NaN for infinities."""
    [x] = node.inputs
    is_above = relax.op.greater(x, _constant(float(node.attributes.get("alpha", 1.0)), x))
    return relax.op.where(is_above, x, relax.op.zeros_like(x))


def _shrink(node: NodeToConvert) -> Any:
    [x] = node.inputs
    limit, bias = (
        float(node.attributes.get(name, value)) for name, value in (("lambd", 0.5), ("bias", 0.0))
    )
    above = relax.op.where(
        relax.op.greater(x, _constant(limit, x)), x - _constant(bias, x), relax.op.zeros_like(x)
    )
    is_below = relax.op.less(x, _constant(-limit, x))
    return relax.op.where(is_below, x + _constant(bias, x), above)


def _swish(node: NodeToConvert) -> Any:
    [x], alpha = node.inputs, float(node.attributes.get("alpha", 1.0))
    return x * relax.op.sigmoid(x if alpha == 1 else _constant(alpha, x) * x)


def _sign(node: NodeToConvert) -> Any:
    """Return -1, 0 and 1; TVM compares with -1, which no unsigned integer is."""
    [x] = node.inputs
    if dtype_of(x).startswith("uint"):
        return relax.op.minimum(x, _constant(1, x))
    # NaN is neither, and stays what it is
    zero, ones = _constant(0, x), relax.op.ones_like(x)
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
    zero, most = _constant(0, x), _constant(255, x)
    largest = node.emit(relax.op.maximum(relax.op.max(x), zero))
    smallest = node.emit(relax.op.minimum(relax.op.min(x), zero))
    scale = node.emit(relax.op.divide(relax.op.subtract(largest, smallest), most))
    is_zero = relax.op.equal(scale, zero)
    scale = node.builder.emit(relax.op.where(is_zero, relax.op.ones_like(scale), scale))
    place = relax.op.clip(relax.op.divide(relax.op.negative(smallest), scale), 0, 255)
    zero_point = node.builder.emit(relax.op.astype(relax.op.round(place), "uint8"))
    quantized = relax.op.quantize(x, scale, zero_point, axis=0, out_dtype="uint8")
    return relax.Tuple([node.emit(quantized), scale, zero_point])


ACTIVATION_CONVERTERS: Final[Mapping[str, Converter]] = {
    "BitShift": _bit_shift,
    "Celu": _celu,
    "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "Elu": _elu,
    "Hardmax": _hardmax,
    "Selu": _selu,
    "Shrink": _shrink,
    "Sign": _sign,
    "Swish": _swish,
    "ThresholdedRelu": _thresholded_relu,
}
"""Operator -> its converter."""
