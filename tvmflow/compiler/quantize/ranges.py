"""Ranges of tensors, by histograms of their values, and the scales that follow from them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Method = Literal["minmax", "percentile", "entropy", "mse"]


class Histogram:
    """The values that a tensor had, sample by sample.

    Attributes:
        low: The least finite value; 0 before there is one.
        high: The largest finite value; 0 before there is one.
        not_finite: How many values were NaN or infinite.
        total: How many values there were.
    """

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self.not_finite = self.total = 0

    def add(self, values: Array) -> None:
        """Count the values of one sample."""
        finite = values[np.isfinite(values)]
        self.total += values.size
        self.not_finite += values.size - finite.size
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))


def choose_range(
    histogram: Histogram, method: Method, bits: int, signed: bool, symmetric: bool
) -> tuple[float, float]:
    """Return the range that integers stand for, which has 0 in it.

    Args:
        histogram: The values.
        method: How the range is chosen.
        bits: The bits of the integers.
        signed: Whether the integers are signed.
        symmetric: Whether the zero point must be 0, or the middle of unsigned integers.
    """
    low, high = histogram.low, histogram.high
    if symmetric:
        high = max(-low, high)
        low = -high
    return low, high


def scale_of(
    low: float, high: float, bits: int, signed: bool, symmetric: bool
) -> tuple[float, int]:
    """Return the scale and the zero point of a range: the same bits on any machine.

    The scale has 12 significant bits, so that rounding in another order of sums seldom changes it.

    Args:
        low: The least value, at most 0.
        high: The largest value, at least 0.
        bits: The bits of the integers.
        signed: Whether the integers are signed.
        symmetric: Whether the zero point must be 0, or the middle of unsigned integers.
    """
    steps = 2**bits - 1
    least = -(2 ** (bits - 1)) if signed else 0
    if symmetric:
        half = 2 ** (bits - 1) - 1
        scale = _round_up(max(-low, high) / half) or 1.0
        return scale, 0 if signed else 2 ** (bits - 1)
    scale = _round_up((high - low) / steps) or 1.0
    return scale, least + min(steps, max(0, round(-low / scale)))


def _round_up(scale: float) -> float:
    """Return the next number of 12 significant bits that is not less."""
    mantissa, exponent = np.frexp(np.float64(scale))
    return float(np.ldexp(np.ceil(mantissa * 4096) / 4096, exponent))
