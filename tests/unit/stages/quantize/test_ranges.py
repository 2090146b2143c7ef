"""Ranges: histograms are the same in any order, methods find what is worth a step, scales are exact."""

from __future__ import annotations

from typing import Any, Final, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tvmflow.stages.quantize.ranges import (
    Histogram,
    Method,
    choose_range,
    scale_of,
)

_SIGNED: Final = "int8"
_UNSIGNED: Final = "uint8"
_COMPARED: Final[tuple[Method, ...]] = ("mse", "minmax")
_FLOATS = st.floats(width=32)


def _count(*samples: Any) -> Histogram:
    histogram = Histogram()
    for sample in samples:
        histogram.add(np.asarray(sample, np.float32))
    return histogram


def _scale(histogram: Histogram, method: Method, kind: str) -> tuple[float, int]:
    low, high = choose_range(histogram, method, kind)
    return scale_of(low, high, kind)


def _error_of(histogram: Histogram, scale: float, zero_point: int) -> float:
    middles, counts = histogram.list_bins()
    integers = np.clip(np.rint(middles / scale) + zero_point, 0, 255)
    return float((np.square(middles - (integers - zero_point) * scale) * counts).mean())


def _state(histogram: Histogram) -> Any:
    middles, counts = histogram.list_bins()
    kinds = (histogram.total, histogram.not_finite)
    return kinds, histogram.low, histogram.high, middles.tobytes(), counts.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(_FLOATS, max_size=40), st.integers(0, 40))
def test_a_histogram_is_the_same_in_any_order_and_division(values: list[float], cut: int) -> None:
    """The order of samples changes no bit."""
    whole = _count(values)
    parts = _count(values[cut:], values[:cut])
    assert _state(whole) == _state(parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(_FLOATS, max_size=40))
@example([-1e-45, 1.0, 3e38])
def test_values_have_the_same_bins_as_float64(values: list[float]) -> None:
    """Denormal numbers, too, beside numbers of any size."""
    wide = Histogram()
    wide.add(np.asarray(values, np.float32).astype(np.float64))
    assert _state(_count(values)) == _state(wide)


@settings(max_examples=12, deadline=None)
@given(st.lists(_FLOATS.filter(np.isfinite), min_size=1, max_size=40))
@pytest.mark.parametrize("method", get_args(Method))
def test_ranges_hold_zero_and_lie_in_the_values(method: Method, values: list[float]) -> None:
    """Any values give a range with 0, within the values and 0, and a scale that is a normal number."""
    histogram = _count(values)
    for kind in (_SIGNED, _UNSIGNED):
        low, high = choose_range(histogram, method, kind)
        assert low <= 0 <= high
        assert min(histogram.low, 0.0) <= low and high <= max(histogram.high, 0.0)
        scale, zero_point = scale_of(low, high, kind)
        assert float(np.float32(scale)) == scale and 2.0**-100 <= scale <= 2.0**100
        assert np.iinfo(kind).min <= zero_point <= np.iinfo(kind).max
    best, widest = (
        _error_of(histogram, scale, zero_point)
        for scale, zero_point in (_scale(histogram, way, _UNSIGNED) for way in _COMPARED)
    )
    assert best <= widest


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


@pytest.mark.parametrize("method", get_args(Method))
def test_a_constant_keeps_its_value(method: Method) -> None:
    """A tensor of one value is represented nearly exactly by all methods."""
    for value in (3.5, -0.25, 1e-45, 1e30):
        histogram = _count(np.full(100, value))
        scale, zero_point = _scale(histogram, method, _UNSIGNED)
        integer = np.clip(np.rint(value / float(scale)) + zero_point, 0, 255)
        assert abs((integer - zero_point) * float(scale) - value) <= max(
            abs(value) * 0.01, 2.0**-100
        )


def test_nan_and_infinite_values_are_counted_and_left_out() -> None:
    """They change no range; without any finite value there is none."""
    histogram = _count([1.0, np.nan, np.inf, -np.inf, np.nan, 2.0])
    histogram.add(np.array([1e300]))
    assert (histogram.total, histogram.not_finite) == (2, 5)
    assert choose_range(histogram, "minmax", _UNSIGNED) == (0.0, 2.0)
    for empty in (_count(), _count([np.nan, np.inf])):
        with pytest.raises(ValueError, match="no finite value"):
            choose_range(empty, "minmax", _UNSIGNED)


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
@pytest.mark.parametrize("kind", [_SIGNED, _UNSIGNED], ids=["signed", "unsigned"])
def test_one_outlier_does_not_take_the_steps_of_all_others(method: Method, kind: str) -> None:
    """One value of 30 beside many normal ones is cut off, by `mse` as far as its own error allows."""
    values = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    low, high = choose_range(_count(values, [30.0]), method, kind)
    most = 25 if method == "mse" else 10
    assert 2 < high < most and -most < low < -2
    plain = choose_range(_count(values), "minmax", kind)
    assert choose_range(_count(values), method, kind)[1] <= plain[1]


@pytest.mark.parametrize("method", ["mse", "minmax"])
@pytest.mark.parametrize("outliers", [0, 1, 20, 2000])
def test_a_part_of_the_values_tells_as_good_a_range(method: Method, outliers: int) -> None:
    """The range of rare large numbers is chosen as if all values were counted, or next to."""
    random = np.random.default_rng(outliers)
    values = np.maximum(random.standard_normal(1 << 22), 0).astype(np.float32)
    values[random.integers(0, values.size, outliers)] = 40.0
    whole, part = _count(values), Histogram()
    for place, sample in enumerate(np.split(values, 64)):
        part.add_some(sample, place % 3, 3)
    assert abs(part.total - values.size) <= values.size / 1_000
    assert (part.low, part.high) == (whole.low, whole.high)
    errors = []
    for own in (whole, part):
        scale, zero_point = _scale(own, method, _UNSIGNED)
        errors.append(_error_of(whole, scale, zero_point))
    assert errors[1] <= errors[0] * 1.02


def test_what_is_not_finite_is_found_in_a_part_of_the_values() -> None:
    """It may be beside those that are counted; an empty tensor has none."""
    part = Histogram()
    part.add_some(np.array([1, 2, np.nan, 4, np.inf], np.float32), 0, 3)
    part.add_some(np.array([], np.float32), 2, 3)
    assert (part.not_finite, part.high) == (2, 4.0)


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
        (method, kind): _scale(_count(values, [37.0]), method, kind)
        for method in get_args(Method)
        for kind in (_SIGNED, _UNSIGNED)
    }
    assert {key: (scale.hex(), zero) for key, (scale, zero) in found.items()} == {
        ("minmax", "int8"): ("0x1.4960000000000p-3", -103),
        ("minmax", "uint8"): ("0x1.4960000000000p-3", 25),
        ("percentile", "int8"): ("0x1.4960000000000p-3", -103),
        ("percentile", "uint8"): ("0x1.4960000000000p-3", 25),
        ("entropy", "int8"): ("0x1.0100000000000p-5", -1),
        ("entropy", "uint8"): ("0x1.0100000000000p-5", 127),
        ("mse", "int8"): ("0x1.36c0000000000p-3", -102),
        ("mse", "uint8"): ("0x1.36c0000000000p-3", 26),
    }


def test_scales_fit_their_integers() -> None:
    """Scales are rounded up to 12 bits."""
    for low, high, dtype, exact, middle in (
        (-1.0, 3.0, _UNSIGNED, 4 / 255, 64),
        (-1.0, 3.0, _SIGNED, 4 / 255, -64),
        (0.0, 255 / 4096, _UNSIGNED, 2.0**-12, 0),
        (0.0, 0.0, _UNSIGNED, 1.0, 0),
    ):
        scale, zero_point = scale_of(low, high, dtype)
        assert exact <= scale <= exact * (1 + 2.0**-11) and zero_point == middle
