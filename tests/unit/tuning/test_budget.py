"""The budget: how many trials each workload gets."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.tuning.budget import (
    BATCH_SIZE,
    WARMUP_TRIALS,
    Budget,
    BudgetRules,
    WorkloadShare,
)

SHARES = st.lists(
    st.builds(
        WorkloadShare,
        st.text("abcdef", min_size=1, max_size=3),
        st.integers(1, 50),
        st.floats(0, 1e12),
        untuned_s=st.just(math.inf),
        least_s=st.just(0.0),
        seconds_per_trial=st.just(0.0),
        finished_after=st.none(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda share: share.key,
)
MEASURED_SHARES = st.lists(
    st.builds(
        WorkloadShare,
        st.text("abcdef", min_size=1, max_size=3),
        st.integers(1, 50),
        st.floats(0, 1e12),
        untuned_s=st.floats(1e-7, 1.0),
        least_s=st.floats(0, 1e-2),
        seconds_per_trial=st.just(0.0),
        finished_after=st.none(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda share: share.key,
)


def outcome(key: str, number: int) -> float:
    """Return the time of a workload's trial: some fail, most are slower than the best before."""
    draw = random.Random(f"{key}/{number}")
    return math.inf if draw.random() < 0.1 else draw.lognormvariate(-7, 1)


def deal(
    shares: list[WorkloadShare], rules: BudgetRules, known: dict[str, int] | None = None
) -> dict[str, int]:
    """Return the trials by workload when all rounds are measured; `known` limits the search spaces."""
    budget = Budget(shares, rules)
    received: dict[str, int] = dict.fromkeys([share.key for share in shares], 0)
    while step := budget.next_round():
        for key, number in step.items():
            first = received[key]
            most = (known or {}).get(key, rules.trials)
            last = min(first + number, most)
            budget.record(
                key, [outcome(key, n) for n in range(first, last)], exhausted=last < first + number
            )
            received[key] = last
    return received


def test_every_workload_is_warmed_up_before_any_gets_a_batch() -> None:
    """Three each, however little work they do."""
    shares = [
        WorkloadShare("small", 1, 1.0),
        WorkloadShare("none", 1, 0.0),
        WorkloadShare("large", 9, 1e9),
    ]
    assert deal(shares, BudgetRules(9)) == {
        "small": WARMUP_TRIALS,
        "none": WARMUP_TRIALS,
        "large": WARMUP_TRIALS,
    }
    assert deal(shares, BudgetRules(9 + BATCH_SIZE))["large"] == WARMUP_TRIALS + BATCH_SIZE


def test_with_fewer_trials_than_workloads_the_heaviest_get_one_each() -> None:
    """No workload gets a second trial while another has none."""
    shares = [WorkloadShare("a", 1, 1.0), WorkloadShare("b", 1, 3.0), WorkloadShare("c", 1, 2.0)]
    assert deal(shares, BudgetRules(2)) == {"a": 0, "b": 1, "c": 1}


def test_a_batch_goes_where_it_saves_most() -> None:
    """The gain is in the time of an inference: calls times seconds."""
    budget = Budget(
        [WorkloadShare("often", 50, 1e6), WorkloadShare("once", 1, 1e6)], BudgetRules(100)
    )
    for key, number in {**budget.next_round()}.items():
        budget.record(key, [1e-3] * number)
    for key, number in {**budget.next_round()}.items():
        budget.record(key, [1e-3] * number)
    assert budget.next_round() == {"often": BATCH_SIZE}


def test_a_kernel_that_is_fast_untuned_has_a_small_expected_gain() -> None:
    """A kernel whose schedules are slower than the untuned one yields to another."""
    shares = [
        WorkloadShare("pool", 1, 1e6, untuned_s=1e-6),
        WorkloadShare("conv", 1, 1e6, untuned_s=1e-3),
    ]
    budget = Budget(shares, BudgetRules(100))
    for _ in range(2):
        for key, number in {**budget.next_round()}.items():
            budget.record(key, [{"pool": 5e-6, "conv": 2e-3}[key]] * number)
    assert budget.next_round() == {"conv": BATCH_SIZE}


def test_a_workload_without_gains_yields_to_others() -> None:
    """After batches without a gain, one of the same weight gets a batch."""
    budget = Budget([WorkloadShare("a", 1, 1e6), WorkloadShare("b", 1, 1e6)], BudgetRules(1000))
    order = []
    for _ in range(6):
        step = budget.next_round()
        order += [key for key, number in step.items() if number == BATCH_SIZE]
        for key, number in step.items():
            budget.record(key, [1e-3] * number)
    assert {"a", "b"} == set(order[:2])


def test_patience_ends_a_workload_and_then_the_tuning() -> None:
    """The rest of the budget is not spent."""
    budget = Budget([WorkloadShare("a", 1, 1e6)], BudgetRules(1000, patience=20))
    while step := budget.next_round():
        budget.record("a", [1e-3] * step["a"])
    assert 20 < budget.spent <= 20 + 2 * BATCH_SIZE


def test_a_gain_below_min_gain_does_not_count() -> None:
    """Gains of half a per cent do not reset the patience."""
    slow = Budget([WorkloadShare("a", 1, 1e6)], BudgetRules(400, patience=20, min_gain=0.01))
    seconds = 1e-3
    while step := slow.next_round():
        for _ in range(step["a"]):
            seconds *= 0.9999
            slow.record("a", [seconds])
    assert slow.spent < 60


def test_the_rest_of_an_exhausted_workload_goes_to_the_others() -> None:
    """The total stays the same."""
    shares = [WorkloadShare("large", 1, 1e9), WorkloadShare("small", 1, 1e3)]
    assert deal(shares, BudgetRules(40), {"large": 5}) == {"large": 5, "small": 35}


def test_a_task_may_be_capped() -> None:
    """Nothing is spent beyond the caps."""
    shares = [WorkloadShare("a", 1, 1e6), WorkloadShare("b", 1, 1e6)]
    assert deal(shares, BudgetRules(100, trials_per_task=7)) == {"a": 7, "b": 7}


@given(SHARES, st.integers(0, 80), st.integers(0, 80))
def test_a_larger_budget_only_adds_trials(
    shares: list[WorkloadShare], smaller: int, more: int
) -> None:
    """Raising the budget adds exactly the difference."""
    before = deal(shares, BudgetRules(smaller))
    after = deal(shares, BudgetRules(smaller + more))
    assert sum(before.values()) == smaller
    assert sum(after.values()) == smaller + more
    assert all(before[key] <= after[key] for key in before)


@given(MEASURED_SHARES, st.integers(0, 80), st.integers(0, 80))
def test_a_larger_budget_only_adds_trials_where_a_gain_is_left(
    shares: list[WorkloadShare], smaller: int, more: int
) -> None:
    """What is left of a budget is not spent; a raised one resumes from the same trials."""
    before = deal(shares, BudgetRules(smaller))
    after = deal(shares, BudgetRules(smaller + more))
    assert sum(before.values()) <= smaller
    assert all(before[key] <= after[key] for key in before)


@given(SHARES, st.integers(0, 80))
def test_the_order_of_the_workloads_does_not_matter(
    shares: list[WorkloadShare], trials: int
) -> None:
    """The same workloads and budget give the same split, however they are listed."""
    assert deal(shares, BudgetRules(trials)) == deal(shares[::-1], BudgetRules(trials))


def test_a_workload_near_its_roofline_gets_no_trial() -> None:
    """Neither before any was measured, nor once one of its trials reaches 95 % of it."""
    shares = [
        WorkloadShare("done", 1, 1e6, untuned_s=1e-3, least_s=0.96e-3),
        WorkloadShare("far", 1, 1e6, untuned_s=1e-3, least_s=0.1e-3),
    ]
    budget = Budget(shares, BudgetRules(100))
    assert budget.is_at_roofline("done") and not budget.is_at_roofline("far")
    assert budget.next_round() == {"far": 1}
    budget.record("far", [0.104e-3])
    assert budget.next_round() == {}
    assert budget.is_at_roofline("far") and budget.left_out == ["far", "done"]


def test_the_budget_goes_to_what_is_far_from_the_roofline_and_carries_time() -> None:
    """Of two kernels that take as long, the one with more to gain; a kernel without weight gets nothing."""
    shares = [
        WorkloadShare("near", 1, 9e6, untuned_s=1e-3, least_s=0.8e-3),
        WorkloadShare("far", 1, 1e6, untuned_s=1e-3, least_s=0.1e-3),
        WorkloadShare("light", 1, 1e3, untuned_s=1e-6),
    ]
    budget = Budget(shares, BudgetRules(100))
    assert list(budget.next_round().items()) == [("far", 1), ("near", 1)]
    for _ in range(2):
        for key, number in {**budget.next_round()}.items():
            budget.record(key, [1e-3] * number)
    assert budget.next_round() == {"far": BATCH_SIZE}


def test_a_search_ends_when_the_next_batch_is_not_worth_its_time() -> None:
    """After many trials without a gain, long before an unlimited budget is spent."""
    budget = Budget([WorkloadShare("a", 1, 1e6, untuned_s=1e-3)], BudgetRules(UNLIMITED_TRIALS))
    while step := budget.next_round():
        budget.record("a", [1e-3] * step["a"])
    assert 1_000 < budget.spent < 5_000 and budget.left_out == ["a"]


def test_a_rule_that_no_trial_beats_ends_the_search_of_its_kernel() -> None:
    """However far it is from the roofline: after its first batch, not after a thousand trials."""
    share = WorkloadShare("a", 1, 1e6, untuned_s=1e-3, least_s=1e-4)
    budget = Budget([share], BudgetRules(UNLIMITED_TRIALS))
    while step := budget.next_round():
        budget.record("a", [0.99e-3] * step["a"])
    assert budget.spent == WARMUP_TRIALS + BATCH_SIZE and budget.left_out == ["a"]


def test_patience_has_a_search_go_on_where_no_trial_beats_the_rule() -> None:
    """Up to that number of trials."""
    share = WorkloadShare("a", 1, 1e6, untuned_s=1e-3, least_s=1e-4)
    budget = Budget([share], BudgetRules(UNLIMITED_TRIALS, patience=300))
    while step := budget.next_round():
        budget.record("a", [1e-3] * step["a"])
    assert 300 <= budget.spent <= 300 + BATCH_SIZE


def test_a_kernel_that_trials_make_faster_is_searched_on() -> None:
    """One without a schedule, and one whose rule leaves a third: as long as batches gain."""
    for untuned_s in (50e-3, 1.5e-3):
        share = WorkloadShare("a", 1, 1e6, untuned_s=untuned_s, least_s=1e-4)
        budget = Budget([share], BudgetRules(200))
        seconds = 1e-3
        while step := budget.next_round():
            seconds *= 0.95
            budget.record("a", [seconds] * step["a"])
        assert budget.spent == 200


def test_kernels_that_could_gain_too_little_together_get_no_trial() -> None:
    """Less than a fiftieth of an inference cannot be shown; those that gain more are tuned."""
    light = [WorkloadShare(f"light{n}", 1, 1e6, untuned_s=1e-6, least_s=1e-7) for n in range(10)]
    heavy = WorkloadShare("heavy", 1, 1e6, untuned_s=1e-3, least_s=0.5e-3)
    budget = Budget([*light, heavy], BudgetRules(100))
    assert budget.next_round() == {"heavy": 1}

    heavy = heavy._replace(least_s=0.99e-3)
    budget = Budget([*light, heavy], BudgetRules(100))
    assert budget.next_round() == {} and budget.spent == 0
    assert len(budget.left_out) == 11


def test_many_kernels_that_could_gain_a_little_each_are_tuned() -> None:
    """Together they could shorten an inference by half."""
    shares = [
        WorkloadShare(f"layer{n:03}", 1, 1e6, untuned_s=1e-4, least_s=0.5e-4) for n in range(100)
    ]
    first = Budget(shares, BudgetRules(1000)).next_round()
    assert 90 < len(first) <= 100
