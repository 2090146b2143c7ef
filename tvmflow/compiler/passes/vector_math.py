"""Vectorized float32 exp, sigmoid, tanh, erf, (inverse) trigonometry, logs, powers and quotients.

LLVM would call libm for each lane. The error is at most 8 ULP over the whole range (2 for `exp`, `log`, and `sin` and
`cos` below 2³¹; 3 for `asin`, `acos` and `atan`). This is not fast-math: infinities and NaN follow IEEE 754, and so do
denormals, except for `exp`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.tir_kernels.definitions import ROUNDING
from tvmflow.graph import ir

_FLOAT: Final = "float32"
_INFINITY: Final = math.inf
_INFINITY_BITS: Final = 0x7F800000


def vectorize_math(
    mod: tvm.IRModule, *, has_few_units: bool = False, divides_slowly: bool = False
) -> tvm.IRModule:
    """Replace float32 functions in kernels by arithmetic.

    Args:
        mod: The kernels.
        has_few_units: Whether divisions by constants become multiplications, as on 64-bit Arm, which has few units for
            division.
        divides_slowly: Whether these functions multiply by reciprocals instead of dividing. The model's divisions stay.
    """
    if has_few_units:
        mod = ir.rewrite_kernels(mod, _multiply_by_inverses)
    functions = _functions(_multiply_by_reciprocal if divides_slowly else operator.truediv)
    return ir.rewrite_kernel_calls(mod, lambda call: _expand(call, functions))


# Functions that turn an error of one ULP into a step of 1, as conversions to integers do.
_ROUNDINGS: Final = frozenset(
    f"tirx.{name}" for name in ("ceil", "floor", "nearbyint", "round", "trunc")
)


def _multiply_by_inverses(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel in which divisions by constants are multiplications by their inverses.

    A division takes as long as 14 multiplications. Products may be off by one ULP, so kernels that round keep divisions.
    """

    def multiply(quotient: Any) -> Any:
        divisor = quotient.b
        if str(quotient.ty.dtype) != _FLOAT or not isinstance(divisor, tirx.FloatImm):
            return quotient
        size = abs(float(divisor))
        # the inverses of other divisors may not be normal numbers
        if not _MIN_NORMAL <= size <= 1 / _MIN_NORMAL:
            return quotient
        return quotient.a * _const(1 / float(divisor))

    roundings: list[bool] = []
    rounds = (tvm.ir.Call, lambda call: roundings.append(ir.operator_name(call) in _ROUNDINGS))
    casts = (tirx.Cast, lambda cast: roundings.append("float" not in str(cast.ty.dtype)))
    tvm_ffi.structural_walk(kernel.body, (rounds, casts))
    return kernel if any(roundings) else ir.rewrite_nodes(kernel, tirx.Div, multiply)


def _expand(call: Any, functions: Mapping[str, Callable[[Any], Any]]) -> Any:
    name = ir.operator_name(call)
    if str(getattr(call.ty, "dtype", "")) != _FLOAT:
        return call
    if name == "tirx.pow" and isinstance(call.args[1], tirx.FloatImm):
        return _constant_power(call, float(call.args[1]))
    return functions[name](call.args[0]) if name in functions else call


def _const(value: float) -> Any:
    return tirx.const(value, _FLOAT)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Return a polynomial evaluated by Horner's method; `coefficients` begin with the highest power."""
    value = _const(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _const(coefficient)
    return value


def _is_nan(x: Any) -> Any:
    """Return whether a value is NaN by its bits: TVM does not vectorize `isnan`, and folds x ≠ x to false."""
    return _magnitude(x) > _INFINITY_BITS


def _magnitude(x: Any) -> Any:
    """Return the bits of float32s without signs, as int32s that order like the magnitudes, NaN last."""
    return tirx.reinterpret("int32", x) & 0x7FFFFFFF


class _Lets:
    """Names of values that an expression uses more than once."""

    def __init__(self) -> None:
        self._values: list[tuple[Any, Any]] = []

    def __call__(self, value: Any, dtype: str = _FLOAT) -> Any:
        """Return the name of a value, which may use earlier names."""
        self._values.append((tirx.Var("m", dtype), value))
        return self._values[-1][0]

    def within(self, body: Any) -> Any:
        """Return an expression that uses the names, wrapped in their definitions."""
        for var, value in reversed(self._values):
            body = tirx.Let(var, value, body)
        return body


# The coefficients of eʳ for |r| ≤ ln 2 / 2 from r⁶ to r², with the smallest error: 3.1e-9.
_EXP_SERIES: Final = (1.3814540e-3, 8.3687451e-3, 4.1668391e-2, 1.6666520e-1, 4.9999993e-1)
# ln 2 in two parts; the first has few bits, so that its products with exponents are exact.
_LN2: Final = (0.693359375, -2.12194440e-4)
# The logarithm of the smallest normal number, rounded up.
_MIN_EXPONENT: Final = -87.33654
# The logarithm of the greatest value, rounded down.
_GREATEST_EXPONENT: Final = 88.72283172607422
_GREATEST: Final = (2 - 2.0**-23) * 2.0**127


def _exp(x: Any) -> Any:
    """Return eˣ = 2ⁿ·eʳ with |r| ≤ ln 2 / 2; results below 2⁻¹²⁶ are 0.

    Adding 1.5·2²³ rounds x / ln 2 to n, which is added to the exponent of eʳ: not all CPUs round and convert as fast as
    they add. Without zeros, exponentials of masked scores would be denormals, which CPUs compute slowly.
    """
    outer, inner = _Lets(), _Lets()
    x = outer(x)
    v = inner(tirx.max(tirx.min(x, _const(_GREATEST_EXPONENT)), _const(_MIN_EXPONENT)))
    # reinterpreted as bits, because TVM would simplify (a + b) - b to a
    power = v * _const(math.log2(math.e)) + _const(ROUNDING)
    bits = inner(tirx.reinterpret("int32", power), "int32")
    n = inner(tirx.reinterpret(_FLOAT, bits) - _const(ROUNDING))
    rest = v - n * _const(_LN2[0]) - n * _const(_LN2[1])
    value = ir.let(rest, lambda r: _polynomial(r, (*_EXP_SERIES, 1.0, 1.0)))
    scaled = tirx.reinterpret(_FLOAT, tirx.reinterpret("int32", value) + (bits << 23))
    # infinity as a product that overflows, because TVM cannot write infinity in C
    beyond = x * _const(_GREATEST)
    value = tirx.Select(x > _const(_GREATEST_EXPONENT), beyond, inner.within(scaled))
    value = tirx.Select(x < _const(_MIN_EXPONENT), _const(0.0), value)
    return outer.within(tirx.Select(_is_nan(x), x, value))


# The exponent for which eˣ, rounded to a power of two, is 2⁻¹²⁷.
_VANISHING_EXPONENT: Final = -88.0


def exp_of_negative(x: Any) -> Any:
    """Return eˣ for x ≤ 0 or NaN, with half the instructions of `exp`, and an error of at most 1.5 ULP.

    Results below 2⁻¹²⁶ are 0.
    """
    lets, least = _Lets(), _const(_VANISHING_EXPONENT)
    x = lets(x)
    # with the operands in this order, NaN stays NaN
    v = lets(tirx.Select(x < least, least, x))
    # n + 127 is the biased exponent of a float; it is read from bits, because TVM would simplify (a + b) - b to a
    rounding = _const(ROUNDING + 127)
    bits = lets(tirx.reinterpret("int32", v * _const(math.log2(math.e)) + rounding), "int32")
    n = tirx.reinterpret(_FLOAT, bits) - rounding
    rest = ir.let(n, lambda n: v - n * _const(_LN2[0]) - n * _const(_LN2[1]))
    value = ir.let(rest, lambda r: _polynomial(r, (*_EXP_SERIES, 1.0, 1.0)))
    return lets.within(value * tirx.reinterpret(_FLOAT, bits << 23))


# Cephes' logf: ln(1 + m) = m - m²/2 + m³·P(m) for m from √½ - 1 to √2 - 1.
_LOG_SERIES: Final = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_MIN_NORMAL: Final = 2.0**-126


def _log(x: Any) -> Any:
    """Return ln x = e·ln 2 + ln m with x = m·2ᵉ, as Cephes' logf does."""
    outer, inner = _Lets(), _Lets()
    x = outer(x)
    is_denormal = x < _const(_MIN_NORMAL)
    scaled = tirx.Select(is_denormal, x * _const(2.0**25), x)
    shift = tirx.Select(is_denormal, _const(-151.0), _const(-126.0))
    bits = inner(tirx.reinterpret("int32", scaled), "int32")
    m = inner(tirx.reinterpret(_FLOAT, (bits & 0x007FFFFF) | 0x3F000000))
    e = inner(tirx.Cast(_FLOAT, bits >> 23) + shift)
    is_low = m < _const(math.sqrt(0.5))
    low_e = tirx.Select(is_low, e - _const(1.0), e)
    m = inner(tirx.Select(is_low, m + m, m) - _const(1.0))
    e = inner(low_e)
    z = inner(m * m)
    small = _polynomial(m, _LOG_SERIES) * m * z - _const(2.12194440e-4) * e
    finite = inner.within((m + (small - _const(0.5) * z)) + _const(0.693359375) * e)
    at_most_zero = tirx.Select(x < _const(0.0), _const(math.nan), _const(-_INFINITY))
    is_normal = tirx.all(x > _const(0.0), x < _const(_INFINITY))
    other = tirx.Select(x > _const(0.0), x, tirx.Select(_is_nan(x), x, at_most_zero))
    return outer.within(tirx.Select(is_normal, finite, other))


def _log1p(x: Any) -> Any:
    """Return ln(1 + x) = ln u · x / (u − 1) with u = 1 + x; the rounding error of u cancels.

    Source: Goldberg, "What Every Computer Scientist Should Know About Floating-Point Arithmetic", theorem 4.
    """
    lets = _Lets()
    x = lets(x)
    u = lets(x + _const(1.0))
    is_exact = tirx.any(x > _const(1e8), u <= _const(0.0))
    ratio = tirx.Select(is_exact, _const(1.0), x / (u - _const(1.0)))
    return lets.within(tirx.Select(u == _const(1.0), x, _log(u) * ratio))


_MAX_PRODUCTS: Final = 8


def _constant_power(call: Any, exponent: float) -> Any:
    """Return xⁿ as products for small integers n, as roots for ±½ and ±¾; the call itself for other n."""
    if abs(exponent) == 0.5:
        value = tirx.sqrt(call.args[0])
    elif abs(exponent) == 0.75:
        value = ir.let(call.args[0], _root_of_cube)
    elif exponent == int(exponent) and 1 <= abs(exponent) <= _MAX_PRODUCTS:
        value = ir.let(call.args[0], lambda x: _integer_power(x, int(abs(exponent))))
    else:
        return call
    return value if exponent > 0 else _const(1.0) / value


def _root_of_cube(x: Any) -> Any:
    """Return x^¾ = √x·√√x, with an error of at most 3 ULP; ∞ for -∞."""
    positive = tirx.Select(x == _const(-_INFINITY), _const(_INFINITY), x)
    return ir.let(tirx.sqrt(positive), lambda root: root * tirx.sqrt(root))


def _integer_power(x: Any, exponent: int) -> Any:
    if exponent == 1:
        return x
    rest = x if exponent % 2 else None
    square = ir.let(_integer_power(x, exponent // 2), lambda half: half * half)
    return square if rest is None else square * rest


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


Divide = Callable[[Any, Any], Any]
"""Dividend, divisor -> their quotient."""

# This constant minus the bits of a value gives the bits of its reciprocal, with a relative error of at most 1/8.
_RECIPROCAL_BITS: Final = 0x7EF311C3
# Each step of Newton's method squares the error: 0.12, 0.015, 2e-4, 5e-8.
_RECIPROCAL_STEPS: Final = 3
# The reciprocals of larger values are not normal numbers; they are taken as 0.
_GREATEST_DIVISOR: Final = 2.0**126


def _multiply_by_reciprocal(dividend: Any, divisor: Any) -> Any:
    """Return a quotient with an error of at most 2 ULP; the divisor is NaN or at least 2⁻¹²⁵ in size."""
    lets = _Lets()
    d = lets(divisor)
    bits = tirx.const(_RECIPROCAL_BITS, "int32") - tirx.reinterpret("int32", d)
    r = lets(tirx.reinterpret(_FLOAT, bits))
    for _ in range(_RECIPROCAL_STEPS):
        r = lets(r + r * (_const(1.0) - d * r))
    return lets.within(tirx.Select(d > _const(_GREATEST_DIVISOR), _const(0.0), dividend * r))


def _rational(
    limit: float, numerator: tuple[float, ...], denominator: tuple[float, ...], divide: Divide
) -> Callable[[Any], Any]:
    """Return x·P(x²)/Q(x²) with Eigen's coefficients, clamped at ±`limit`, where it reaches ±1."""

    def function(x: Any) -> Any:
        outer, inner = _Lets(), _Lets()
        x = outer(x)
        v = inner(tirx.max(tirx.min(x, _const(limit)), _const(-limit)))

        def evaluate(s: Any) -> Any:
            return v * divide(_polynomial(s, numerator), _polynomial(s, denominator))

        value = ir.let(v * v, evaluate)
        # exactly ±1 from the limit on: the quotient's rounding error times a large value would be large
        value = tirx.Select(v <= _const(-limit), _const(-1.0), value)
        value = tirx.Select(v >= _const(limit), _const(1.0), value)
        return outer.within(tirx.Select(_is_nan(x), x, inner.within(value)))

    return function


# π/2 in three parts; the first two have 22 bits, so that their products with integers up to 2³¹ are exact.
_HALF_PI: Final = (1.570796012878418, 3.139164164167596e-07, 6.223372171896613e-14)
_SINE: Final = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE: Final = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_FLOAT64: Final = "float64"
_LARGE_BITS: Final = 0x4F000000


def _sine(quarters: int) -> Callable[[Any], Any]:
    """Return the function sin(x + quarters·π/2).

    x is reduced to r = x − n·π/2 with |r| ≤ π/4 in float64, after Cody and Waite, "Software Manual for the Elementary
    Functions"; sin r or cos r are the series of Cephes' sinf. From 2³¹ on, where float32 values are 256 apart, r is 0.
    """

    def function(x: Any) -> Any:
        lets = _Lets()
        x = lets(x)
        rest = wide = tirx.Cast(_FLOAT64, x)
        n = lets(tirx.floor(wide * number(2 / math.pi) + number(0.5)), _FLOAT64)
        for part in _HALF_PI:
            rest = rest - n * number(part)
        turned = n + number(quarters)
        size = _magnitude(x)
        large = tirx.Select(size < _INFINITY_BITS, _const(0.0), _const(math.nan))
        r = lets(tirx.Select(size < _LARGE_BITS, tirx.Cast(_FLOAT, rest), large))
        quarter = turned - number(4) * tirx.floor(turned * number(0.25))
        quarter = lets(tirx.Cast(_FLOAT, quarter))

        def series(z: Any) -> Any:
            # r times a factor, so that the sine of -0 is -0
            sine = r * (_const(1.0) + z * _polynomial(z, _SINE))
            cosine = _const(1.0) - (z * _const(0.5) - z * z * _polynomial(z, _COSINE))
            is_odd = tirx.any(quarter == _const(1.0), quarter == _const(3.0))
            return tirx.Select(is_odd, cosine, sine)

        sign = tirx.Select(quarter >= _const(2.0), _const(-1.0), _const(1.0))
        return lets.within(ir.let(r * r, series) * sign)

    def number(value: float) -> Any:
        return tirx.const(value, _FLOAT64)

    return function


# ---------------------------------------------------------------- inverse functions
# After Cephes' asinf and atanf: functions of |x|, whose result gets the sign of x.

_ASIN_SERIES: Final = (
    *(4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1),
)
_ATAN_SERIES: Final = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
# π/2 as float32, and by how much that is larger than π/2. For π, both are twice as large.
_HALF_TURN: Final = (1.5707963705062866, 4.371139000186241e-8)


def _with_sign_of(x: Any, size: Any) -> Any:
    """Return the nonnegative `size` with the sign bit of `x`, as C's copysign does."""
    sign = tirx.reinterpret("int32", x) & tirx.const(-(2**31), "int32")
    return tirx.reinterpret(_FLOAT, tirx.reinterpret("int32", size) | sign)


def _arc(combine: Callable[[Any, Any, Any], Any]) -> Callable[[Any], Any]:
    """Return the function combine(x, |x| > ½, angle), where the angle is asin |x|, or asin of a root.

    For |x| > ½, asin |x| = π/2 − 2·asin √((1 − |x|) / 2); the angle is the asin of this root. Beyond 1 the root is NaN.
    """

    def function(x: Any) -> Any:
        lets = _Lets()
        x = lets(x)
        size = lets(tirx.reinterpret(_FLOAT, _magnitude(x)))
        is_large = size > _const(0.5)
        z = lets(tirx.Select(is_large, _const(0.5) * (_const(1.0) - size), size * size))
        root = lets(tirx.Select(is_large, tirx.sqrt(z), size))
        angle = lets(_polynomial(z, _ASIN_SERIES) * z * root + root)
        return lets.within(combine(x, is_large, angle))

    return function


def _combine_asin(x: Any, is_large: Any, angle: Any) -> Any:
    half, excess = map(_const, _HALF_TURN)
    return _with_sign_of(x, tirx.Select(is_large, half - (angle + angle + excess), angle))


def _combine_acos(x: Any, is_large: Any, angle: Any) -> Any:
    half, excess = map(_const, _HALF_TURN)
    twice, is_negative = angle + angle, x < _const(0.0)
    mirrored = (half + half) - (twice + (excess + excess))
    near_zero = half - (_with_sign_of(x, angle) + excess)
    return tirx.Select(is_large, tirx.Select(is_negative, mirrored, twice), near_zero)


def _atan(x: Any) -> Any:
    """Return atan x: atan |x| = b + atan t, |t| ≤ tan π/8 and b = 0, π/4 or π/2, with the sign of x."""

    def evaluate(size: Any) -> Any:
        def choose(large: Any, middle: Any, small: Any) -> Any:
            is_middle = size > _const(math.tan(math.pi / 8))
            rest = tirx.Select(is_middle, middle, small)
            return tirx.Select(size > _const(math.tan(math.pi * 3 / 8)), large, rest)

        one = _const(1.0)
        base = choose(_const(math.pi / 2), _const(math.pi / 4), _const(0.0))

        def series(t: Any) -> Any:
            return base + (ir.let(t * t, lambda z: _polynomial(z, _ATAN_SERIES) * z * t) + t)

        # numerator and denominator are chosen first, so that one division is enough
        return ir.let(
            choose(_const(-1.0), size - one, size) / choose(size, size + one, one), series
        )

    def function(x: Any) -> Any:
        size = tirx.reinterpret(_FLOAT, _magnitude(x))
        return _with_sign_of(x, ir.let(size, evaluate))

    return ir.let(x, function)


def _functions(divide: Divide) -> Mapping[str, Callable[[Any], Any]]:
    """Return operator -> function; `divide` computes the quotients in the functions."""
    return {
        "tirx.exp": _exp,
        "tirx.log": _log,
        "tirx.log1p": _log1p,
        "tirx.sigmoid": lambda x: divide(_const(1.0), _const(1.0) + _exp(_const(0.0) - x)),
        "tirx.tanh": _rational(7.90531110763549805, _TANH_NUMERATOR, _TANH_DENOMINATOR, divide),
        "tirx.sin": _sine(0),
        "tirx.cos": _sine(1),
        "tirx.asin": _arc(_combine_asin),
        "tirx.acos": _arc(_combine_acos),
        "tirx.atan": _atan,
        "tirx.erf": _rational(3.925, _ERF_NUMERATOR, _ERF_DENOMINATOR, divide),
    }
