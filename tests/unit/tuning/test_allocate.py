"""Who gets how many trials."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tvmflow.tuning.allocate import FLOOR, allocate

SHARES = st.lists(
    st.tuples(st.text("abcdef", min_size=1, max_size=3), st.floats(0, 1e12)),
    min_size=1,
    max_size=12,
    unique_by=lambda share: share[0],
)


def test_every_workload_gets_its_floor_and_the_rest_follows_the_work() -> None:
    """Three each, then nearly all to the one that does nearly all the work."""
    assert allocate([("small", 1.0), ("none", 0.0), ("large", 1000.0)], 40) == {
        "large": 34,
        "small": FLOOR,
        "none": FLOOR,
    }


def test_with_fewer_trials_than_workloads_the_heaviest_get_one_each() -> None:
    """Nobody gets a second trial while another has none."""
    assert allocate([("a", 1.0), ("b", 3.0), ("c", 2.0)], 2) == {"a": 0, "b": 1, "c": 1}


def test_what_a_capped_workload_cannot_use_goes_to_the_others() -> None:
    """An exhausted search keeps what it has, and the total stays what was asked for."""
    assert allocate([("large", 100.0), ("small", 1.0)], 20, {"large": 5}) == {
        "large": 5,
        "small": 15,
    }


def test_a_budget_beyond_all_caps_is_not_spent() -> None:
    """When every workload is capped, the rest of the budget is left over."""
    assert allocate([("a", 1.0), ("b", 1.0)], 100, {"a": 4, "b": 2}) == {"a": 4, "b": 2}


@given(SHARES, st.integers(0, 60), st.integers(0, 60))
def test_a_larger_budget_takes_nothing_away(
    shares: list[tuple[str, float]], smaller: int, more: int
) -> None:
    """Raising the budget asks for exactly the difference."""
    before = allocate(shares, smaller)
    after = allocate(shares, smaller + more)
    assert sum(before.values()) == smaller
    assert sum(after.values()) == smaller + more
    assert all(before[key] <= after[key] for key in before)


@given(SHARES, st.integers(0, 60))
def test_the_order_of_the_workloads_does_not_matter(
    shares: list[tuple[str, float]], trials: int
) -> None:
    """The same workloads and budget give the same split, however they are listed."""
    assert allocate(shares, trials) == allocate(shares[::-1], trials)
