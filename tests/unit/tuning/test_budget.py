"""Who gets how many trials."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from tvmflow.tuning.budget import BATCH, FLOOR, Budget, Rules, Share

SHARES = st.lists(
    st.builds(
        Share, st.text("abcdef", min_size=1, max_size=3), st.integers(1, 50), st.floats(0, 1e12)
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda share: share.key,
)


def outcome(key: str, number: int) -> float:
    """What a workload's trial gives: some fail, most are slower than the best before."""
    draw = random.Random(f"{key}/{number}")
    return math.inf if draw.random() < 0.1 else draw.lognormvariate(-7, 1)


def deal(shares: list[Share], rules: Rules, known: dict[str, int] | None = None) -> dict[str, int]:
    """Trials by workload when all that is asked for is measured; `known` are the most that a space has."""
    budget = Budget(shares, rules)
    given: dict[str, int] = dict.fromkeys([share.key for share in shares], 0)
    while step := budget.next():
        for key, number in step.items():
            first = given[key]
            most = (known or {}).get(key, rules.trials)
            last = min(first + number, most)
            budget.spend(
                key, [outcome(key, n) for n in range(first, last)], end=last < first + number
            )
            given[key] = last
    return given


def test_every_workload_gets_its_floor_before_any_gets_a_batch() -> None:
    """Three each, however little work they do."""
    shares = [Share("small", 1, 1.0), Share("none", 1, 0.0), Share("large", 9, 1e9)]
    assert deal(shares, Rules(9)) == {"small": FLOOR, "none": FLOOR, "large": FLOOR}
    assert deal(shares, Rules(9 + BATCH))["large"] == FLOOR + BATCH


def test_with_fewer_trials_than_workloads_the_heaviest_get_one_each() -> None:
    """Nobody gets a second trial while another has none."""
    shares = [Share("a", 1, 1.0), Share("b", 1, 3.0), Share("c", 1, 2.0)]
    assert deal(shares, Rules(2)) == {"a": 0, "b": 1, "c": 1}


def test_a_batch_goes_where_it_saves_most() -> None:
    """What counts is the time of an inference: how often a kernel runs, and how long."""
    budget = Budget([Share("often", 50, 1e6), Share("once", 1, 1e6)], Rules(100))
    for key, number in {**budget.next()}.items():
        budget.spend(key, [1e-3] * number)
    for key, number in {**budget.next()}.items():
        budget.spend(key, [1e-3] * number)
    assert budget.next() == {"often": BATCH}


def test_what_is_fast_without_tuning_promises_little() -> None:
    """A kernel whose schedules are slower than none leaves its turn to one that they help."""
    shares = [Share("pool", 1, 1e6, untuned_s=1e-6), Share("conv", 1, 1e6, untuned_s=1e-3)]
    budget = Budget(shares, Rules(100))
    for _ in range(2):
        for key, number in {**budget.next()}.items():
            budget.spend(key, [5e-6] * number)
    assert budget.next() == {"conv": BATCH}


def test_a_workload_that_stays_where_it_is_gives_way() -> None:
    """After batches without a gain, one of the same weight gets its turn."""
    budget = Budget([Share("a", 1, 1e6), Share("b", 1, 1e6)], Rules(1000))
    order = []
    for _ in range(6):
        step = budget.next()
        order += [key for key, number in step.items() if number == BATCH]
        for key, number in step.items():
            budget.spend(key, [1e-3] * number)
    assert {"a", "b"} == set(order[:2])


def test_patience_ends_a_workload_and_then_the_tuning() -> None:
    """So many trials without a gain, and the rest of the budget is not spent."""
    budget = Budget([Share("a", 1, 1e6)], Rules(1000, patience=20))
    while step := budget.next():
        budget.spend("a", [1e-3] * step["a"])
    assert 20 < budget.spent <= 20 + 2 * BATCH


def test_a_gain_below_min_gain_does_not_count() -> None:
    """Half a per cent now and then is a plateau."""
    slow = Budget([Share("a", 1, 1e6)], Rules(400, patience=20, min_gain=0.01))
    seconds = 1e-3
    while step := slow.next():
        for _ in range(step["a"]):
            seconds *= 0.9999
            slow.spend("a", [seconds])
    assert slow.spent < 60


def test_what_an_exhausted_workload_leaves_goes_to_the_others() -> None:
    """The total stays what was asked for."""
    shares = [Share("large", 1, 1e9), Share("small", 1, 1e3)]
    assert deal(shares, Rules(40), {"large": 5}) == {"large": 5, "small": 35}


def test_a_task_may_be_capped() -> None:
    """Nothing is spent beyond the caps."""
    shares = [Share("a", 1, 1e6), Share("b", 1, 1e6)]
    assert deal(shares, Rules(100, trials_per_task=7)) == {"a": 7, "b": 7}


@given(SHARES, st.integers(0, 80), st.integers(0, 80))
def test_a_larger_budget_takes_nothing_away(shares: list[Share], smaller: int, more: int) -> None:
    """Raising the budget asks for exactly the difference."""
    before = deal(shares, Rules(smaller))
    after = deal(shares, Rules(smaller + more))
    assert sum(before.values()) == smaller
    assert sum(after.values()) == smaller + more
    assert all(before[key] <= after[key] for key in before)


@given(SHARES, st.integers(0, 80))
def test_the_order_of_the_workloads_does_not_matter(shares: list[Share], trials: int) -> None:
    """The same workloads and budget give the same split, however they are listed."""
    assert deal(shares, Rules(trials)) == deal(shares[::-1], Rules(trials))
