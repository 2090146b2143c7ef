"""Statistics of repeated measurements, and interleaved (A/B) measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, Literal, NamedTuple, TypeVar

_T = TypeVar("_T")

# If the confidence interval includes 1, two times are called equal within this margin, and else unclear.
_NEARLY_EQUAL: Final = 0.1

Judgement = Literal["more", "less", "equal", "unclear"]
"""The conclusion about a measured ratio: above 1, below 1, about 1 within the noise, or too noisy to tell."""

NOISE_TEXTS: Final[Mapping[Judgement, str]] = {
    "equal": "within the noise",
    "unclear": "too noisy to compare",
}
"""The text for a ratio that does not clearly differ from 1."""


def judge_ratio(ratio: float, low: float, high: float) -> Judgement:
    """Return whether a measured ratio with the confidence interval `low` to `high` differs from 1."""
    if low > 1:
        return "more"
    if high < 1:
        return "less"
    return "equal" if 1 - _NEARLY_EQUAL <= ratio <= 1 + _NEARLY_EQUAL else "unclear"


class Summary(NamedTuple):
    """A summary of repeated measurements; `std` is the sample standard deviation, or 0 for a single value."""

    mean: float
    median: float
    max: float
    min: float
    std: float


def summarize(values: Sequence[float]) -> Summary:
    """Return the summary of one or more measurements."""
    if not values:
        raise ValueError("no measurements to summarize")
    return Summary(
        mean=statistics.fmean(values),
        median=statistics.median(values),
        max=max(values),
        min=min(values),
        std=statistics.stdev(values) if len(values) > 1 else 0.0,
    )


def geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean of each column, so that ratios of means equal means of ratios.

    >>> geometric_means([[1.0, 2.0], [4.0, 8.0]]), geometric_means([[0.1, 0.3]])
    ([2.0, 4.0], [0.1, 0.3])
    """
    if len(rows) == 1:
        return list(rows[0])
    return [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]


# ---------------------------------------------------------------- paired times
#
# On a busy machine, single times say little. In an interleaved measurement, disturbances affect both
# subjects alike, and the ratio of two consecutive times hardly changes.

MIN_PAIRS: Final = 8
"""With fewer pairs, no difference is significant: all pairs could agree by chance."""

FEW_PAIRS_MARGIN: Final = 0.2
"""With fewer than MIN_PAIRS pairs, a difference within this margin may be noise."""

# The significance level of the median's confidence interval, small because it is tested after each pair.
_ERROR: Final = 0.01
# A and B count as equally fast if their ratio is this close to 1.
_EQUAL: Final = 0.01
# A ratio is precise if its upper limit is at most this many times its lower limit.
_PRECISE: Final = 1.1


class PairedTimes(NamedTuple):
    """Paired seconds of an interleaved A/B measurement."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A's time relative to B's, for each pair."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios; below 1, A is faster."""
        return median(self.ratios)

    @property
    def limits(self) -> tuple[float, float]:
        """The 99 % confidence interval of the median ratio; the range of all ratios for few pairs."""
        return median_limits(self.ratios)

    @property
    def is_faster(self) -> bool:
        """True if A is faster beyond the noise."""
        return len(self.first) >= MIN_PAIRS and self.limits[1] < 1

    @property
    def is_slower(self) -> bool:
        """True if A is slower beyond the noise."""
        return len(self.first) >= MIN_PAIRS and self.limits[0] > 1

    @property
    def _trusted_limits(self) -> tuple[float, float]:
        """The limits of the ratio, or 0 and infinity for too few pairs."""
        return self.limits if len(self.first) >= MIN_PAIRS else (0.0, math.inf)

    @property
    def is_decided(self) -> bool:
        """True if no more pairs are needed: one is faster beyond the noise, or both are equally fast."""
        return self.is_decided_about(1.0)

    def is_decided_about(self, bound: float) -> bool:
        """Return whether the pairs suffice to decide if the ratio is below a bound."""
        return is_decided(self._trusted_limits, bound)

    def is_clear_about(self, bound: float) -> bool:
        """Return whether all ratios are on the same side of a bound by at least FEW_PAIRS_MARGIN."""
        margin, ratios = 1 + FEW_PAIRS_MARGIN, self.ratios
        return min(ratios) > bound * margin or max(ratios) * margin < bound

    @property
    def is_precise(self) -> bool:
        """True if the limits of the ratio are close to each other."""
        low, high = self._trusted_limits
        return high <= low * _PRECISE


def median_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the 99 % confidence interval of the median by order statistics, for any distribution.

    It spans all values if there are few. W. J. Conover, Practical Nonparametric Statistics, section 3.2.
    """
    ordered = sorted(values)
    left_out = _count_outer(len(ordered))
    return ordered[left_out], ordered[-1 - left_out]


def is_decided(limits: tuple[float, float], bound: float) -> bool:
    """Return whether an interval is on one side of a bound, or negligibly close to it."""
    low, high = limits[0] / bound, limits[1] / bound
    return low > 1 or high < 1 or 1 - _EQUAL < low <= high < 1 + _EQUAL


def _count_outer(pairs: int) -> int:
    """Return how many extreme ratios the confidence interval excludes at each end."""
    outer, tail = 0, 1 / 2**pairs
    while 2 * (tail := tail + math.comb(pairs, outer + 1) / 2**pairs) <= _ERROR:
        outer += 1
    return outer


def interleave(calls: Sequence[Callable[[], _T]], number: int) -> list[_T]:
    """Return each call's result of round `number`; odd rounds run in reverse order."""
    results = [call() for call in (calls if number % 2 == 0 else reversed(calls))]
    return results if number % 2 == 0 else results[::-1]


def measure_interleaved(
    first: Callable[[], float],
    second: Callable[[], float],
    *,
    seconds: float,
    min_pairs: int = 3,
    precise_pairs: int = 0,
    clear_pairs: int = 0,
    max_pairs: int = 64,
    bound: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> PairedTimes:
    """Measure A and B, which return seconds, interleaved until it is decided which is faster.

    The ratio is compared with `bound`. At least `min_pairs` are measured; after that, no pair begins after `seconds`.
    Up to `precise_pairs`, the ratio must also be precise. `clear_pairs` are enough if all clearly agree; 0 for never.
    """
    started = clock()
    times = PairedTimes((), ())
    while len(times.first) < max_pairs:
        is_enough = times.is_decided_about(bound) and (
            len(times.first) >= precise_pairs or times.is_precise
        )
        if len(times.first) >= min_pairs and (is_enough or clock() - started > seconds):
            break
        if 0 < clear_pairs <= len(times.first) and times.is_clear_about(bound):
            break
        a, b = interleave([first, second], len(times.first))
        times = PairedTimes((*times.first, a), (*times.second, b))
    return times
