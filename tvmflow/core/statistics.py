"""Summary statistics of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """Repeated measurements of one quantity, in their own unit.

    `std` is the standard deviation of a sample (with Bessel's correction); 0 for one measurement.
    """

    mean: float
    median: float
    max: float
    min: float
    std: float


def summarize(values: Sequence[float]) -> Summary:
    """Return the summary of one or more measurements.

    Raises:
        ValueError: when there are none.
    """
    if not values:
        raise ValueError("no measurements to summarize")
    return Summary(
        mean=statistics.fmean(values),
        median=statistics.median(values),
        max=max(values),
        min=min(values),
        std=statistics.stdev(values) if len(values) > 1 else 0.0,
    )
