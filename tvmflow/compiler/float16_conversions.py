"""Conversions of float16 with operations on integers, for CPUs without instructions for them.

LLVM calls a function for each number there, and does not end for some vectors of WebAssembly (LLVM 22).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.cpu_model import converts_float16

_NARROW: Final = "float16"
_WIDE: Final = "float32"
_BITS: Final = "int32"

# float16 has a sign, 5 bits of exponent and 10 of mantissa; float32 8 and 23.
_SIGN: Final = 0x8000
_MAGNITUDE: Final = 0x7FFF
_SMALLEST_NORMAL: Final = 0x0400
_INFINITY: Final = 0x7C00
_NAN: Final = 0x7E00
_SHIFT: Final = 23 - 10
# The difference of the exponents of a number, and of infinity.
_REBIAS: Final = (127 - 15) << 23
_REBIAS_INFINITY: Final = (255 - 31) << 23
# The step of numbers below the smallest normal one, and the float32 number whose last bit has this value.
_STEP: Final = 2.0**-24
_WITH_STEP: Final = 0.5
_WITH_STEP_BITS: Final = 0x3F000000
_WIDE_MAGNITUDE: Final = 0x7FFFFFFF
_WIDE_INFINITY: Final = 0x7F800000
_WIDE_SMALLEST_NORMAL: Final = (_SMALLEST_NORMAL << _SHIFT) + _REBIAS


def expand_float16_conversions() -> tvm.transform.Pass:
    """Return a pass that converts float16 with operations on integers, if the CPU of a kernel has no instruction."""

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        target = function.attrs.get("target")
        if target is None or converts_float16(target):
            return function
        return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Cast, _expand)))

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="ExpandFloat16Conversions")


def _expand(cast: tirx.Cast) -> Any:
    source, target = str(cast.value.ty.dtype), str(cast.ty.dtype)
    if source == target or "float64" in (source, target):
        # rounding twice could give another number
        return cast
    if source == _NARROW:
        wide = widen(cast.value)
        return wide if target == _WIDE else tirx.Cast(target, wide)
    if target == _NARROW:
        return narrow(cast.value if source == _WIDE else tirx.Cast(_WIDE, cast.value))
    return cast


def _let(dtype: str, value: Any, body: Callable[[Any], Any]) -> Any:
    """Return `body` of a value that it uses more than once."""
    var = tirx.Var("h", dtype)
    return tirx.Let(var, value, body(var))


def widen(value: Any) -> Any:
    """Return the float32 number that equals a float16 number."""

    def magnitude(bits: Any) -> Any:
        bias = tirx.Select(bits < _INFINITY, tirx.const(_REBIAS, _BITS), _REBIAS_INFINITY)
        normal = tirx.reinterpret(_WIDE, (bits << _SHIFT) + bias)
        # as integers, because some CPUs take such float32 numbers as 0
        small = tirx.Cast(_WIDE, bits) * tirx.const(_STEP, _WIDE)
        return tirx.Select(bits < _SMALLEST_NORMAL, small, normal)

    def signed(bits: Any) -> Any:
        absolute = _let(_BITS, bits & _MAGNITUDE, magnitude)
        return tirx.reinterpret(_WIDE, tirx.reinterpret(_BITS, absolute) | (bits & _SIGN) << 16)

    return _let(_BITS, tirx.Cast(_BITS, tirx.reinterpret("uint16", value)), signed)


def narrow(value: Any) -> Any:
    """Return the float16 number that is nearest to a float32 number, of two the even one."""

    def magnitude(bits: Any) -> Any:
        half = (1 << _SHIFT - 1) - 1
        rounded = (bits - _REBIAS + half + (bits >> _SHIFT & 1)) >> _SHIFT
        # the addition rounds to steps
        steps = tirx.reinterpret(_WIDE, bits) + tirx.const(_WITH_STEP, _WIDE)
        small = tirx.reinterpret(_BITS, steps) - _WITH_STEP_BITS
        finite = tirx.Select(
            bits < _WIDE_SMALLEST_NORMAL, small, tirx.min(rounded, tirx.const(_INFINITY, _BITS))
        )
        return tirx.Select(bits > _WIDE_INFINITY, tirx.const(_NAN, _BITS), finite)

    def signed(bits: Any) -> Any:
        absolute = _let(_BITS, bits & _WIDE_MAGNITUDE, magnitude)
        return tirx.reinterpret(_NARROW, tirx.Cast("uint16", bits >> 16 & _SIGN | absolute))

    return _let(_BITS, tirx.reinterpret(_BITS, value), signed)
