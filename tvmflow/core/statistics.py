"""Summary statistics of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

# Two times whose ratio is known no better than this are called equal, if it may be 1.
_NEARLY_EQUAL: Final = 0.1

Judgement = Literal["more", "less", "equal", "unclear"]
"""What measurements say of a ratio: it is more or less than 1, about 1 within the noise, or they are too noisy to say."""

NOISE_TEXTS: Final[Mapping[Judgement, str]] = {
    "equal": "within the noise",
    "unclear": "too noisy to compare",
}
"""What is said of a ratio that is not known to differ from 1."""


def judge_ratio(ratio: float, low: float, high: float) -> Judgement:
    """Return what may be said of a measured ratio; the one definition of what lies within the noise.

    Args:
        ratio: The ratio that is shown.
        low: The lower limit of what it may be in truth.
        high: The upper limit.
    """
    if low > 1:
        return "more"
    if high < 1:
        return "less"
    return "equal" if 1 - _NEARLY_EQUAL <= ratio <= 1 + _NEARLY_EQUAL else "unclear"


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
