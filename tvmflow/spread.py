"""What the repeats of a measurement say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread_of(times: Sequence[float]) -> dict[str, float]:
    """How they lie, in their own unit; `std` is that of a sample (Bessel's correction), and 0 of one time alone."""
    return {
        "mean": statistics.fmean(times),
        "median": statistics.median(times),
        "max": max(times),
        "min": min(times),
        "std": statistics.stdev(times) if len(times) > 1 else 0.0,
    }
