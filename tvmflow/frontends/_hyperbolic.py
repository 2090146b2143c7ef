"""Hyperbolic functions of which LLVM has no vectors, from those that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tvm import relax

_TERMS: Final = 8


def make_cosh(x: Any, constant: Callable[[float], Any]) -> Any:
    """Return `(eˣ + e⁻ˣ)/2`.

    Args:
        x: A tensor of floats.
        constant: Returns a constant of its dtype.
    """
    half = constant(0.5)
    return half * relax.op.exp(x) + half * relax.op.exp(relax.op.negative(x))


def make_sinh(x: Any, constant: Callable[[float], Any], emit: Callable[[Any], Any]) -> Any:
    """Return `(eˣ − e⁻ˣ)/2`, and the Taylor series below 1, where the difference would lose most of its bits.

    Args:
        x: A tensor of floats.
        constant: Returns a constant of its dtype.
        emit: Binds a value to a variable.
    """
    half, one = constant(0.5), constant(1.0)
    large = half * relax.op.exp(x) - half * relax.op.exp(relax.op.negative(x))
    square, series = emit(x * x), one
    for n in range(_TERMS, 0, -1):
        factor = constant(1 / (2 * n * (2 * n + 1)))
        series = emit(one + square * factor * series)
    return relax.op.where(relax.op.less(square, one), x * series, large)
