"""Vectorized exp, sigmoid, tanh and erf of float32: LLVM would call libm for each lane.

The error is at most 8 units in the last place over the whole range (2 for `exp`). Infinities,
denormals and NaN are those of IEEE 754: this is no fast-math.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
from tvm import tirx

from tvmflow.compiler import ir

_FLOAT: Final = "float32"


def vectorize_math(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace `exp`, `sigmoid`, `tanh` and `erf` of float32 in kernels by arithmetic."""
    return ir.rewrite_kernel_calls(mod, _expand)


def _expand(call: Any) -> Any:
    name = ir.operator_name(call)
    if name not in _FUNCTIONS or str(call.ty.dtype) != _FLOAT:
        return call
    return _FUNCTIONS[name](call.args[0])


def _const(value: float) -> Any:
    return tirx.const(value, _FLOAT)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Return a polynomial in Horner's form; `coefficients` begin with the highest power."""
    value = _const(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _const(coefficient)
    return value


def _let(value: Any, body: Callable[[Any], Any]) -> Any:
    """Return `body` of a value that it uses more than once."""
    var = tirx.Var("m", _FLOAT)
    return tirx.Let(var, value, body(var))


def _exp(x: Any) -> Any:
    """Return eˣ = 2ⁿ·eʳ with |r| ≤ ln 2 / 2, as Cephes' expf does.

    2ⁿ is computed in two factors, so that results may be denormals and infinity.
    """

    def clamped(x: Any) -> Any:
        # The result is 0 at -104 and infinity at 89.
        return _let(
            tirx.max(tirx.min(x, _const(89.0)), _const(-104.0)),
            lambda v: _let(
                tirx.floor(v * _const(math.log2(math.e)) + _const(0.5)),
                lambda n: _scaled(v - n * _const(0.693359375) - n * _const(-2.12194440e-4), n),
            ),
        )

    def _scaled(r: Any, n: Any) -> Any:
        series = (
            *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
            *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
        )
        value = _let(r, lambda r: _polynomial(r, series) * r * r + r + _const(1.0))
        return _let(
            tirx.floor(n * _const(0.5)), lambda half: value * _power(half) * _power(n - half)
        )

    return _let(x, lambda x: tirx.Select(tirx.isnan(x), x, clamped(x)))


def _power(n: Any) -> Any:
    """Return 2ⁿ for an integer from -126 to 127, made from the bits of a float."""
    bits = (tirx.Cast("int32", n) + 127) << 23
    return tirx.reinterpret(_FLOAT, bits)


def _sigmoid(x: Any) -> Any:
    return _const(1.0) / (_const(1.0) + _exp(_const(0.0) - x))


_TANH_NUMERATOR: Final = (
    *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
    *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
)
_TANH_DENOMINATOR: Final = (
    *(1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)
_ERF_NUMERATOR: Final = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_DENOMINATOR: Final = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03),
    *(-7.37332916720468e-03, -1.42647390514189e-02),
)


def _rational(
    limit: float, numerator: tuple[float, ...], denominator: tuple[float, ...]
) -> Callable[[Any], Any]:
    """Return the function x·P(x²)/Q(x²), clamped at ±`limit`, where it reaches ±1. The coefficients are Eigen's."""

    def function(x: Any) -> Any:
        def evaluate(v: Any) -> Any:
            return _let(
                v * v, lambda s: v * (_polynomial(s, numerator) / _polynomial(s, denominator))
            )

        clamped = tirx.max(tirx.min(x, _const(limit)), _const(-limit))
        return tirx.Select(tirx.isnan(x), x, _let(clamped, evaluate))

    return lambda x: _let(x, function)


_FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _rational(7.90531110763549805, _TANH_NUMERATOR, _TANH_DENOMINATOR),
    "tirx.erf": _rational(3.925, _ERF_NUMERATOR, _ERF_DENOMINATOR),
}
