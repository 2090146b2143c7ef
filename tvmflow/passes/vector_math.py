"""Exponentials and their like as arithmetic that vectors can do: LLVM would call libm for each lane.

Every function here stays within eight units in the last place of float32 over its whole range
(`exp` within two), with infinities, denormals and NaN where they belong: no fast-math.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
from tvm import tirx

from tvmflow.passes._function import with_calls

_FLOAT: Final = "float32"


def vectorise_math(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with `exp`, `sigmoid`, `tanh` and `erf` of float32 in its kernels written out."""
    return with_calls(mod, _written_out)


def _written_out(call: Any) -> Any:
    name = getattr(call.op, "name", "")
    if name not in _FUNCTIONS or str(call.ty.dtype) != _FLOAT:
        return call
    return _FUNCTIONS[name](call.args[0])


def _const(value: float) -> Any:
    return tirx.const(value, _FLOAT)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """By Horner's rule, the highest power first."""
    value = _const(coefficients[0])
    for each in coefficients[1:]:
        value = value * x + _const(each)
    return value


def _let(value: Any, use: Callable[[Any], Any]) -> Any:
    """A value that is used more than once."""
    var = tirx.Var("m", _FLOAT)
    return tirx.Let(var, value, use(var))


def _exp(x: Any) -> Any:
    """eˣ = 2ⁿ·eʳ with |r| ≤ ln 2 / 2, after Cephes' expf; 2ⁿ in two factors, so that it may end in denormals and infinity."""

    def clamped(x: Any) -> Any:
        # -104 gives 0 and 89 infinity
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
    """2ⁿ for a whole number from -126 to 127, as the bits of a float."""
    bits = (tirx.Cast("int32", n) + 127) << 23
    return tirx.reinterpret(_FLOAT, bits)


def _sigmoid(x: Any) -> Any:
    return _const(1.0) / (_const(1.0) + _exp(_const(0.0) - x))


_TANH_ABOVE: Final = (
    *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
    *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
)
_TANH_BELOW: Final = (
    *(1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)
_ERF_ABOVE: Final = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_BELOW: Final = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03),
    *(-7.37332916720468e-03, -1.42647390514189e-02),
)


def _rational(
    limit: float, above: tuple[float, ...], below: tuple[float, ...]
) -> Callable[[Any], Any]:
    """x·P(x²)/Q(x²) within ±`limit`, where the function has come to ±1; the coefficients are Eigen's."""

    def function(x: Any) -> Any:
        def inside(v: Any) -> Any:
            return _let(v * v, lambda s: v * (_polynomial(s, above) / _polynomial(s, below)))

        clamped = tirx.max(tirx.min(x, _const(limit)), _const(-limit))
        return tirx.Select(tirx.isnan(x), x, _let(clamped, inside))

    return lambda x: _let(x, function)


_FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _rational(7.90531110763549805, _TANH_ABOVE, _TANH_BELOW),
    "tirx.erf": _rational(3.925, _ERF_ABOVE, _ERF_BELOW),
}
