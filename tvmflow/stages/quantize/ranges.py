"""Histograms of tensors in bounded memory, and ranges and scales from them.

Scales are computed from integer counts with basic float64 arithmetic in a fixed order. So the same samples, in any
order, give the same bits on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final, Literal

import numpy as np

from tvmflow.core.types import Array

Method = Literal["minmax", "percentile", "entropy", "mse"]

# The number of bins of a histogram: 64 KiB for each tensor, independent of its size and the number of samples.
_BINS: Final = 8192
# The binary exponent of the narrowest bin: the smallest denormal float32 has a bin of its own.
_MIN_EXPONENT: Final = -149
# The number of bits in a float32 mantissa: near the largest value, narrower bins would not separate any values.
_PRECISION_BITS: Final = 24
# Larger values are infinity in float32.
_LARGEST: Final = float(np.finfo(np.float32).max)
# This many values are counted at once, so that they stay in a core's cache.
_CHUNK: Final = 1 << 16
# For widths between these powers of two, the bins of float32 values are computed in float32; otherwise in float64.
# The first is the exponent of the smallest normal float32.
_SMALLEST_WIDTH: Final = -126
_LARGEST_WIDTH: Final = 0
# Scales are limited to this range, in which reciprocals and products with 8-bit integers are normal float32 values.
_MIN_SCALE: Final = 2.0**-100
_MAX_SCALE: Final = 2.0**100
# The method `percentile` cuts off one in this many values: ONNX Runtime's default of 99.999 %.
_ONE_IN: Final = 100_000
# The method `entropy` has as many bins as TensorRT, and tries every eighth threshold of TensorRT's.
_ENTROPY_BINS: Final = 2048
_ENTROPY_STEP: Final = 8
# Large values are rare if at most one of this many values is large.
_RARE: Final = 16
# The method `mse` first tries two limits in each of `_OCTAVES` octaves, then `_REFINED` limits between the
# neighbors of the best one. It repeats this for both ends up to `_ROUNDS` times.
_OCTAVES: Final = 12
_REFINED: Final = 16
_ROUNDS: Final = 2
# The number of terms in the logarithm's series: further ones are below the precision of float64.
_LOG_TERMS: Final = 12
_LN2: Final = 0.6931471805599453
_ROOT_HALF: Final = 0.7071067811865476


class Histogram:
    """A histogram of the values of one tensor, with a fixed number of bins.

    The bin width is a power of two, and the bin limits are its multiples. If a value lies outside, the width doubles
    until all values have a bin. So a histogram depends neither on the order of the values nor on their batches.

    Attributes:
        total: The number of counted finite values.
        not_finite: The number of values that were NaN, infinite, or too large for float32.
        low: The smallest finite value; 0 without values.
        high: The largest finite value; 0 without values.
    """

    def __init__(self) -> None:
        self._exponent = _MIN_EXPONENT
        self._first = 0
        self._counts = np.zeros(_BINS, np.int64)
        self.total = 0
        self.not_finite = 0
        self.low = 0.0
        self.high = 0.0

    @property
    def width(self) -> float:
        """The width of a bin."""
        return float(np.ldexp(1.0, self._exponent))

    def add(self, values: Array, weight: int = 1) -> None:
        """Count the values of a tensor of any real dtype, each `weight` times."""
        flat = np.asarray(values).reshape(-1)
        dtype = np.float32 if flat.dtype == np.float32 else np.float64
        for start in range(0, flat.size, _CHUNK):
            self._add_chunk(flat[start : start + _CHUNK].astype(dtype, copy=False), weight)

    def add_some(self, values: Array, first: int, step: int) -> None:
        """Count every `step`-th value of a tensor, from index `first` on, each `step` times.

        `low` and `high` consider all values. If values above half of the largest one are rare, each of them is
        counted, because rare values decide the range.
        """
        flat = np.asarray(values).reshape(-1)
        if step == 1 or not flat.size:
            self.add(flat)
            return
        low, high = float(flat.min()), float(flat.max())
        if not (low >= -_LARGEST and high <= _LARGEST):
            # count all values, so that `not_finite` is exact
            self.add(flat)
            return
        limit = flat.dtype.type(max(-low, high) / 2)
        large = flat[(flat > limit) | (flat < -limit)]
        some = flat[first::step]
        if large.size <= flat.size // _RARE:
            some = some[(some <= limit) & (some >= -limit)]
            self.add(large)
        self.add(some, step)
        if self.total:
            self._widen(low, high)

    def list_bins(self) -> tuple[Array, Array]:
        """Return the middles of the nonempty bins, in ascending order, and their counts."""
        held = np.flatnonzero(self._counts)
        middles = (held + self._first).astype(np.float64) + 0.5
        return np.ldexp(middles, self._exponent), self._counts[held]

    def count_magnitudes(self) -> tuple[Array, float]:
        """Return the counts of absolute values in `_ENTROPY_BINS` bins, and the width of a bin."""
        held = np.flatnonzero(self._counts)
        indices = held + self._first
        indices = np.where(indices < 0, -indices - 1, indices)
        exponent = self._exponent
        while indices.size and int(indices.max()) >> (exponent - self._exponent) >= _ENTROPY_BINS:
            exponent += 1
        counts = np.zeros(_ENTROPY_BINS, np.int64)
        np.add.at(counts, indices >> (exponent - self._exponent), self._counts[held])
        return counts, float(np.ldexp(1.0, exponent))

    def _add_chunk(self, values: Array, weight: int) -> None:
        low, high = float(values.min()), float(values.max())
        # In this form, NaN fails the comparison, too.
        if not (low >= -_LARGEST and high <= _LARGEST):
            finite = np.abs(values) <= _LARGEST
            self.not_finite += int(values.size - finite.sum())
            values = values[finite]
            if not values.size:
                return
            low, high = float(values.min()), float(values.max())
        self._widen(low, high)
        self._counts += np.bincount(self._place(values), minlength=_BINS) * weight
        self.total += values.size * weight

    def _place(self, values: Array) -> Array:
        """Return the bins of values: multiplying by a power of two is exact, except for denormal results."""
        if not _SMALLEST_WIDTH <= self._exponent <= _LARGEST_WIDTH:
            values = values.astype(np.float64)
        steps = values * values.dtype.type(np.ldexp(1.0, -self._exponent))
        np.floor(steps, out=steps)
        steps -= values.dtype.type(self._first)
        return np.asarray(steps.astype(np.int32))

    def _widen(self, low: float, high: float) -> None:
        if self.total:
            if self.low <= low and high <= self.high:
                return
            low, high = min(low, self.low), max(high, self.high)
        # turn −0 into 0
        self.low, self.high = low + 0.0, high + 0.0
        largest = max(-low, high)
        exponent = max(self._exponent, int(np.frexp(largest)[1]) - _PRECISION_BITS)
        while _bin_of(high, exponent) - _bin_of(low, exponent) >= _BINS:
            exponent += 1
        first = _bin_of(low, exponent)
        if (exponent, first) == (self._exponent, self._first):
            return
        held = np.flatnonzero(self._counts)
        indices = (held + self._first) >> (exponent - self._exponent)
        counts = np.zeros_like(self._counts)
        np.add.at(counts, indices - first, self._counts[held])
        self._exponent, self._first, self._counts = exponent, first, counts


def _bin_of(value: float, exponent: int) -> int:
    return int(np.floor(np.ldexp(value, -exponent)))


def choose_range(histogram: Histogram, method: Method, dtype: str) -> tuple[float, float]:
    """Return the range (low, high) that the integers of a dtype represent; it contains 0.

    The method weighs the clipping of values outside the range against larger rounding steps within. NaN and
    infinity are ignored.

    Raises:
        ValueError: if no finite value was counted.
    """
    if not histogram.total:
        raise ValueError("no finite value was counted")
    widest = (min(histogram.low, 0.0), max(histogram.high, 0.0))
    low, high = _METHODS[method](histogram, dtype, widest)
    return max(low, widest[0]), min(high, widest[1])


def scale_of(low: float, high: float, dtype: str) -> tuple[float, int]:
    """Return the scale and the zero point of the integers of a dtype for a range, extended to contain 0.

    A scale has 12 significant bits, so that last-bit differences of the values seldom change it. It is 1 for an empty
    range, such as a channel of zeros, and between 2⁻¹⁰⁰ and 2¹⁰⁰ otherwise.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return 1.0, 0
    limits = np.iinfo(dtype)
    # The scale is computed from half of the range, because the range itself may overflow.
    half = (high / 2 - low / 2) / (limits.max - limits.min)
    bounded = min(max(2 * min(half, _MAX_SCALE), _MIN_SCALE), _MAX_SCALE)
    # round up to 12 significant bits
    mantissa, exponent = np.frexp(bounded)
    scale = float(np.ldexp(np.ceil(mantissa * 4096) / 4096, exponent))
    zero_point = limits.min - int(np.rint(max(low / scale, -(2.0**31))))
    return scale, min(max(zero_point, limits.min), limits.max)


def _cut_percentile(
    histogram: Histogram, dtype: str, widest: tuple[float, float]
) -> tuple[float, float]:
    cut = histogram.total // _ONE_IN
    middles, counts = histogram.list_bins()
    half = histogram.width / 2
    low = middles[np.flatnonzero(np.cumsum(counts) > cut // 2)[0]] - half
    high = middles[np.flatnonzero(np.cumsum(counts[::-1])[::-1] > cut // 2)[-1]] + half
    return min(float(low), 0.0), max(float(high), 0.0)


def _least_divergence(
    histogram: Histogram, dtype: str, widest: tuple[float, float]
) -> tuple[float, float]:
    """Return the symmetric range of least Kullback–Leibler divergence.

    TensorRT's method: S. Migacz, 8-bit inference with TensorRT, GPU Technology Conference 2017. As in NVIDIA's
    pytorch-quantization, the count of the first bin is replaced by that of the second: zeros, frequent after a
    ReLU, are exact with any threshold.
    """
    magnitudes, width = histogram.count_magnitudes()
    counts = magnitudes.astype(np.float64)
    counts[0] = counts[1]
    levels = 1 << (np.iinfo(dtype).bits - (0 not in widest))
    occupied = np.flatnonzero(counts)
    last = int(occupied[-1]) + 1 if occupied.size else 0
    if last <= levels:
        return widest
    starts = np.append(np.arange(levels, last, _ENTROPY_STEP), last)
    divergences = [_divergence(counts, int(kept), levels, last) for kept in starts]
    # the widest of several equally good thresholds
    best = len(starts) - 1 - int(np.argmin(divergences[::-1]))
    threshold = float(starts[best]) * width
    return -threshold, threshold


def _divergence(counts: Array, kept: int, levels: int, last: int) -> float:
    """Return the Kullback–Leibler divergence between the first `kept` bins and their quantization.

    Values beyond these bins count for the last kept bin.
    """
    inside = counts[:kept]
    reference = inside.copy()
    reference[-1] += sum_in_order(counts[kept:last]) if kept < last else 0.0
    held = inside > 0
    # each level has the same number of bins; the last one also has the remainder
    group = np.minimum(np.arange(kept) // (kept // levels), levels - 1)
    sums = np.zeros(levels)
    np.add.at(sums, group, inside)
    sizes = np.zeros(levels)
    np.add.at(sizes, group, held.astype(np.float64))
    spread = np.where(held, sums[group] / np.maximum(sizes[group], 1.0), 0.0)
    if reference[-1] > 0 and not held[-1]:
        return float("inf")
    total, mass = sum_in_order(reference), sum_in_order(spread)
    if not mass:
        return float("inf")
    p, q = reference[held] / total, spread[held] / mass
    return float(sum_in_order(p * _log(p / q)))


def _least_error(
    histogram: Histogram, dtype: str, widest: tuple[float, float]
) -> tuple[float, float]:
    """Return the range of least mean squared error; the two limits are optimized in turn.

    Choukroun et al. 2019, Low-bit quantization of neural networks for efficient inference (arXiv:1902.06822), for a
    whole tensor.
    """
    middles, counts = histogram.list_bins()

    def measure(low: float, high: float) -> float:
        scale, zero_point = scale_of(low, high, dtype)
        limits = np.iinfo(dtype)
        integers = np.clip(np.rint(middles / scale) + zero_point, limits.min, limits.max)
        difference = middles - (integers - zero_point) * scale
        return sum_in_order(difference * difference * counts)

    def measure_below(high: float, limit: float) -> float:
        return measure(-limit, high)

    low, high = widest
    for _ in range(_ROUNDS):
        before = low, high
        high = _search(widest[1], functools.partial(measure, low))
        low = -_search(-widest[0], functools.partial(measure_below, high))
        if (low, high) == before:
            break
    return low, high


def _search(widest: float, measure: Callable[[float], float]) -> float:
    """Return the limit with the smallest error: try two per octave, then some around the best one."""
    if not widest:
        return 0.0
    coarse = [widest * part / (1 << octave) for octave in range(_OCTAVES) for part in (1.0, 0.75)]
    errors = [measure(limit) for limit in coarse]
    best = int(np.argmin(errors))
    above, below = coarse[max(best - 1, 0)], coarse[min(best + 1, len(coarse) - 1)]
    step = (above - below) / _REFINED
    fine = [coarse[best], *(above - step * index for index in range(1, _REFINED))]
    return fine[int(np.argmin([errors[best], *(measure(limit) for limit in fine[1:])]))]


def sum_in_order(values: Array) -> float:
    """Return the sum in index order: the order in `numpy.sum` may depend on the CPU."""
    return float(np.add.accumulate(values)[-1]) if values.size else 0.0


def sum_rows_in_order(values: Array) -> Array:
    """Return the sum of each row, accumulated in index order."""
    return np.asarray(np.add.accumulate(values.reshape(len(values), -1), axis=1)[:, -1])


def _log(values: Array) -> Array:
    """Return logarithms of positive values, from a series: C libraries differ in the last bits."""
    mantissas, exponents = np.frexp(values)
    is_small = mantissas < _ROOT_HALF
    mantissas = np.where(is_small, mantissas * 2, mantissas)
    exponents = exponents - is_small
    ratio = (mantissas - 1) / (mantissas + 1)
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for term in reversed(range(_LOG_TERMS)):
        series = series * square + 1 / (2 * term + 1)
    return exponents * _LN2 + 2 * ratio * series


_METHODS: Final[
    Mapping[Method, Callable[[Histogram, str, tuple[float, float]], tuple[float, float]]]
] = {
    "minmax": lambda _histogram, _dtype, widest: widest,
    "percentile": _cut_percentile,
    "entropy": _least_divergence,
    "mse": _least_error,
}
