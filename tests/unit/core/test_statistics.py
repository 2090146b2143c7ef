"""Summaries of repeated measurements."""

from __future__ import annotations

import pytest

from tvmflow.core.statistics import Summary, summarize


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
