"""Summaries of repeated measurements."""

from __future__ import annotations

import pytest

from tvmflow.core.statistics import Summary, judge_ratio, summarize


def test_a_summary_has_the_deviation_of_a_sample() -> None:
    """Divided by one less than the number of measurements."""
    summary = summarize([1.0, 2.0, 3.0, 6.0])
    assert summary._replace(std=0.0) == Summary(mean=3.0, median=2.5, max=6.0, min=1.0, std=0.0)
    assert summary.std == pytest.approx((14 / 3) ** 0.5)


def test_one_measurement_has_no_deviation() -> None:
    assert summarize([0.5]) == Summary(0.5, 0.5, 0.5, 0.5, 0.0)


def test_no_measurement_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        summarize([])


@pytest.mark.parametrize(
    ("ratio", "low", "high", "judgement"),
    [
        (2.7, 2.5, 3.0, "more"),
        (1.01, 1.001, 1.02, "more"),
        (0.5, 0.4, 0.6, "less"),
        (1.05, 0.9, 1.3, "equal"),
        (0.95, 0.7, 1.2, "equal"),
        (2.7, 0.9, 3.0, "unclear"),
        (0.4, 0.2, 1.1, "unclear"),
    ],
)
def test_a_ratio_is_within_the_noise_only_near_1(
    ratio: float, low: float, high: float, judgement: str
) -> None:
    """What is said of it cannot contradict the number beside it."""
    assert judge_ratio(ratio, low, high) == judgement
