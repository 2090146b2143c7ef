"""Paired times: which of two subjects is faster, with stand-ins for measurements and clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from tvmflow.core.statistics import MIN_PAIRS, PairedTimes, measure_interleaved


def reader(values: Iterator[float]) -> Callable[[], float]:
    return lambda: next(values)


def noisy(seconds: float, seed: int) -> Iterator[float]:
    """Times of a busy machine: most are a little longer than alone, some twice as long."""
    draw = random.Random(seed)
    while True:
        yield seconds * draw.lognormvariate(0, 0.1) * draw.choice([1, 1, 1, 2])


def measure(first: float, second: float, seed: int) -> PairedTimes:
    return measure_interleaved(
        reader(noisy(first, seed)), reader(noisy(second, -seed - 1)), seconds=1, clock=lambda: 0.0
    )


def test_a_clear_difference_is_decided_with_the_fewest_pairs() -> None:
    """Where nothing disturbs, eight pairs are enough."""
    times = measure_interleaved(lambda: 1.0, lambda: 2.0, seconds=1, clock=lambda: 0.0)
    assert (len(times.first), times.ratio, times.limits) == (MIN_PAIRS, 0.5, (0.5, 0.5))
    assert times.is_faster and not times.is_slower
    assert PairedTimes(times.second, times.first).is_slower


def test_a_bound_is_decided_about_in_place_of_which_is_faster() -> None:
    """Clearly slower, and about as slow as allowed: that takes all pairs."""
    first, second = reader(noisy(2.0, 3)), reader(noisy(1.0, 4))
    times = measure_interleaved(first, second, seconds=1, bound=2.0, clock=lambda: 0.0)
    assert len(times.first) == 64 and times.is_slower
    times = measure_interleaved(lambda: 1.5, lambda: 1.0, seconds=1, bound=2.0, clock=lambda: 0.0)
    assert len(times.first) == MIN_PAIRS


def test_noise_is_measured_through() -> None:
    """A quarter less time is found under noise that is larger than that."""
    outcomes = [measure(0.75, 1.0, seed) for seed in range(20)]
    assert all(times.ratio < 1 and not times.is_slower for times in outcomes)
    assert sum(times.is_faster for times in outcomes) >= 15


def test_equal_subjects_are_hardly_ever_told_apart() -> None:
    """Nothing is decided, and all pairs are measured."""
    outcomes = [measure(1.0, 1.0, seed) for seed in range(40)]
    assert sum(times.is_faster or times.is_slower for times in outcomes) <= 4
    assert max(len(times.first) for times in outcomes) == 64


def test_subjects_without_noise_and_difference_end_early() -> None:
    """Within a per cent they are equally fast, for every purpose."""
    times = measure_interleaved(lambda: 1.0, lambda: 1.005, seconds=1, clock=lambda: 0.0)
    assert len(times.first) == MIN_PAIRS and times.is_decided


def test_a_figure_takes_more_pairs_than_a_decision_where_there_is_noise() -> None:
    """A factor of 20 is decided at once; by how much it is 20 is known later, without noise at once, too."""
    for seed in range(5):
        first, second = reader(noisy(1.0, seed)), reader(noisy(20.0, -seed - 1))
        times = measure_interleaved(first, second, seconds=1, precise_pairs=12, clock=lambda: 0.0)
        assert (len(times.first), times.is_faster, times.is_precise) == (12, True, False)
    quiet = measure_interleaved(
        lambda: 1.0, lambda: 20.0, seconds=1, precise_pairs=12, clock=lambda: 0.0
    )
    assert (len(quiet.first), quiet.is_precise) == (MIN_PAIRS, True)


def test_the_time_limit_ends_slow_measurements_after_a_few_pairs() -> None:
    """With so few nothing is beyond the noise, and the limits are all ratios."""
    ticks = itertools.count()
    times = measure_interleaved(
        lambda: 1.0, lambda: 2.0, seconds=0, clock=lambda: float(next(ticks))
    )
    assert len(times.first) == 3 and not times.is_faster
    assert PairedTimes((1.0, 2.0, 3.0), (1.0, 1.0, 1.0)).limits == (1.0, 3.0)


def test_every_second_pair_runs_backwards() -> None:
    """So that neither subject always follows the other."""
    calls: list[str] = []

    def subject(name: str) -> Callable[[], float]:
        def call() -> float:
            calls.append(name)
            return 1.0

        return call

    measure_interleaved(subject("a"), subject("b"), seconds=1, max_pairs=3, clock=lambda: 0.0)
    assert "".join(calls) == "abbaab"


def test_the_limits_leave_out_what_the_median_may_not_be() -> None:
    """Of 8 pairs none at either end, of 16 two, of 64 twenty-one."""
    expected = {8: 0, 16: 2, 64: 21}
    for pairs, left_out in expected.items():
        ratios = tuple(float(index + 1) for index in range(pairs))
        low, high = PairedTimes(ratios, (1.0,) * pairs).limits
        assert (low, high) == (1.0 + left_out, pairs - left_out), pairs
