"""Ranges: histograms are the same in any order, methods find what is worth a step, scales are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmflow.compiler.quantize.ranges import (
    METHODS,
    Histogram,
    Method,
    QuantizedType,
    choose_range,
    error_of,
    scale_of,
)

_SIGNED = QuantizedType(signed=True, symmetric=True)
_UNSIGNED = QuantizedType(signed=False)
_TYPES = (_SIGNED, _UNSIGNED, QuantizedType(bits=7, signed=False), QuantizedType(bits=4))
_FLOATS = st.floats(width=32)


def _count(*samples: Any) -> Histogram:
    histogram = Histogram()
    for sample in samples:
        histogram.add(np.asarray(sample, np.float32))
    return histogram


def _state(histogram: Histogram) -> Any:
    middles, counts = histogram.list_bins()
    kinds = (histogram.total, histogram.not_a_number, histogram.infinite)
    return kinds, histogram.low, histogram.high, middles.tobytes(), counts.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(_FLOATS, max_size=40), st.integers(0, 40))
def test_a_histogram_is_the_same_in_any_order_and_division(values: list[float], cut: int) -> None:
    """Neither the order of samples, nor which of them were merged, changes a bit."""
    whole = _count(values)
    parts = _count(values[cut:], values[:cut])
    merged = _count(values[:cut])
    merged.merge(_count(values[cut:]))
    assert _state(whole) == _state(parts) == _state(merged)


@settings(max_examples=60, deadline=None)
@given(st.lists(_FLOATS.filter(np.isfinite), min_size=1, max_size=40))
@pytest.mark.parametrize("method", METHODS)
def test_ranges_hold_zero_and_lie_in_the_values(method: Method, values: list[float]) -> None:
    """Any values give a range with 0, within the values and 0, and a scale that is a normal number."""
    histogram = _count(values)
    for kind in _TYPES:
        low, high = choose_range(histogram, method, kind)
        assert low <= 0 <= high
        if kind.symmetric:
            assert high == -low <= max(-histogram.low, histogram.high, 0.0)
        else:
            assert min(histogram.low, 0.0) <= low and high <= max(histogram.high, 0.0)
        scale, zero_point = scale_of(low, high, kind)
        assert scale.dtype == np.float32 and 2.0**-100 <= scale <= 2.0**100
        assert kind.low <= zero_point <= kind.high
    error = error_of(histogram, *choose_range(histogram, "mse", _UNSIGNED), _UNSIGNED)
    assert error <= error_of(histogram, *choose_range(histogram, "minmax", _UNSIGNED), _UNSIGNED)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0, -0.0], (0.0, 0.0)),
        ([3.5], (0.0, 3.5)),
        ([3.5] * 1000, (0.0, 3.5)),
        ([-2.0, -1.0], (-2.0, 0.0)),
        ([1e-45], (0.0, float(np.float32(1e-45)))),
        ([-3e38, 3e38], (float(np.float32(-3e38)), float(np.float32(3e38)))),
    ],
)
def test_minmax_keeps_all_values(values: list[float], expected: tuple[float, float]) -> None:
    """Zeros, one sample, a constant, negative ones, denormals and huge ones have their own limits."""
    assert choose_range(_count(values), "minmax", _UNSIGNED) == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_keeps_its_value(method: Method) -> None:
    """A tensor of one value is represented nearly exactly by all methods."""
    for value in (3.5, -0.25, 1e-45, 1e30):
        histogram = _count(np.full(100, value))
        scale, zero_point = scale_of(*choose_range(histogram, method, _UNSIGNED), _UNSIGNED)
        integer = np.clip(np.rint(value / float(scale)) + zero_point, 0, 255)
        assert abs((integer - zero_point) * float(scale) - value) <= max(
            abs(value) * 0.01, 2.0**-100
        )


def test_nan_and_infinite_values_are_counted_and_left_out() -> None:
    """They change no range; without any finite value there is none."""
    histogram = _count([1.0, np.nan, np.inf, -np.inf, np.nan, 2.0])
    histogram.add(np.array([1e300]))
    assert (histogram.total, histogram.not_a_number, histogram.infinite) == (2, 2, 3)
    assert choose_range(histogram, "minmax", _UNSIGNED) == (0.0, 2.0)
    for empty in (_count(), _count([np.nan, np.inf])):
        with pytest.raises(ValueError, match="no finite value"):
            choose_range(empty, "minmax", _UNSIGNED)


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
@pytest.mark.parametrize("kind", [_SIGNED, _UNSIGNED], ids=["signed", "unsigned"])
def test_one_outlier_does_not_take_the_steps_of_all_others(
    method: Method, kind: QuantizedType
) -> None:
    """One value of 30 beside many normal ones is cut off; most of the others are kept."""
    values = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    low, high = choose_range(_count(values, [30.0]), method, kind)
    assert 2 < high < 10 and -10 < low < -2
    plain = choose_range(_count(values), "minmax", kind)
    assert choose_range(_count(values), method, kind)[1] <= plain[1]


def test_entropy_ignores_how_many_zeros_there_are() -> None:
    """What ReLU cut to 0 is exact with any threshold."""
    values = np.abs(np.random.default_rng(1).standard_normal(100_000)).astype(np.float32)
    ranges = {
        choose_range(_count(values, np.zeros(zeros)), "entropy", _UNSIGNED)
        for zeros in (1, 100_000, 3_000_000)
    }
    assert len(ranges) == 1


def test_scales_are_exact_to_the_bit() -> None:
    """The digits of scales and zero points, which must be the same on any machine."""
    random = np.random.default_rng(7)
    values = (random.integers(-(1 << 20), 1 << 20, 50_000) ** 3 / 2.0**58).astype(np.float32)
    found = {
        (method, kind.signed): scale_of(*choose_range(_count(values, [37.0]), method, kind), kind)
        for method in METHODS
        for kind in (_SIGNED, _UNSIGNED)
    }
    assert {key: (scale.tobytes().hex(), zero) for key, (scale, zero) in found.items()} == {
        ("minmax", True): ("552a953e", 0),
        ("minmax", False): ("d5a3243e", 25),
        ("percentile", True): ("552a953e", 0),
        ("percentile", False): ("d5a3243e", 25),
        ("entropy", True): ("0402013d", 0),
        ("entropy", False): ("417d003d", 127),
        ("mse", True): ("6fb77b3e", 0),
        ("mse", False): ("8c5a1b3e", 26),
    }


def test_types_of_seven_and_four_bits_have_their_limits() -> None:
    """Symmetric signed integers leave the lowest one out."""
    assert [(kind.low, kind.high) for kind in _TYPES] == [(-127, 127), (0, 255), (0, 127), (-8, 7)]
    assert scale_of(-1.0, 3.0, QuantizedType(bits=7, signed=False)) == (np.float32(4 / 127), 32)
    assert scale_of(-1.0, 3.0, QuantizedType(signed=False, symmetric=True))[1] == 128
    assert scale_of(0.0, 0.0, _UNSIGNED) == (np.float32(1), 0)
