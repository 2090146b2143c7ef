"""The comparison of a tuned library with the untuned one: what stays tuned, with stand-ins for libraries."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.support.trials import DEVICE, TARGET
from tvmflow.core.fork_server import Outcome
from tvmflow.core.statistics import PairedTimes
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.libraries import (
    CHOICES,
    TUNED,
    LibraryTimes,
    is_slower,
    read_or_compare,
    time_members,
)
from tvmflow.tuning.measurer import run_rounds

GAINS, LOSES, EQUAL = "a" * 64, "b" * 64, "c" * 64
KERNELS = {GAINS: {"conv": 1.0}, LOSES: {"dense": 1.0, "dense1": 1.0}, EQUAL: {"pool": 1.0}}
MEMBERS = {name: (kernels, kernels) for name, kernels in KERNELS.items()}


def profile(**seconds: float) -> Mapping[str, float]:
    """A profile on a busy machine."""
    return {name: value * random.uniform(1.0, 1.2) for name, value in seconds.items()}


def test_kernels_that_lose_in_the_library_are_found() -> None:
    """All calls of a workload count together; what cannot be told apart is not a loss."""
    random.seed(0)
    times = time_members(
        lambda: profile(conv=1.0, dense=0.5, dense1=4.0, pool=1.0),
        lambda: profile(conv=2.0, dense=1.0, dense1=2.0, pool=1.0),
        MEMBERS,
        TUNED,
        clock=lambda: 0.0,
    )
    assert [name for name, pairs in times.items() if is_slower([pairs], TUNED)] == [LOSES]
    uncalled = [PairedTimes((0.0,) * 9, (0.0,) * 9)]
    assert not is_slower(uncalled, TUNED)


def test_an_alternative_that_is_not_faster_in_the_library_is_dropped() -> None:
    """Its shortest time decides, because other processes disturb it least; a share of a kernel counts in part."""
    members = {"half": ({"conv": 0.5}, {"conv": 1.0}), "lost": ({"dense": 1.0}, {"dense": 0.5})}
    changed, original = {"conv": 1.9, "dense": 1.0}, {"conv": 1.0, "dense": 1.9}
    times = time_members(lambda: changed, lambda: original, members, CHOICES, clock=lambda: 0.0)
    assert times["half"] == PairedTimes((0.95,) * 16, (1.0,) * 16)
    assert [is_slower([pairs], CHOICES) for pairs in times.values()] == [False, True]


def test_of_a_few_profiles_of_a_slow_library_nothing_is_concluded() -> None:
    """The time is limited, and three rounds may all lie on one side by chance."""
    ticks = itertools.count(step=100)
    rounds = itertools.count()

    def profile_tuned() -> Mapping[str, float]:
        next(rounds)
        return {"conv": 2.0}

    members = {GAINS: MEMBERS[GAINS]}
    times = time_members(
        profile_tuned, lambda: {"conv": 1.0}, members, TUNED, clock=lambda: float(next(ticks))
    )
    # the first profile is a warm-up
    assert (is_slower([times[GAINS]], TUNED), next(rounds)) == (False, 1 + 3)


def test_the_faster_library_is_kept() -> None:
    """If it is faster beyond the noise; without a comparison the kernels' own times decide."""
    untuned = (2.0,) * 20
    assert LibraryTimes((), (*(1.0,) * 19, 9.0), untuned).keeps_tuned
    assert not LibraryTimes((), (1.9, 2.1) * 10, untuned).keeps_tuned
    assert not LibraryTimes((), (2.0, 2.0), (1.0, 1.0)).keeps_tuned
    assert not LibraryTimes((), (1.0, 1.0), (1.0, 1.0)).keeps_tuned
    assert not LibraryTimes((LOSES,)).keeps_tuned
    assert LibraryTimes(error="it crashed").keeps_tuned


def test_a_comparison_is_made_once(tmp_path: Path) -> None:
    """The ledger keeps it: the same libraries have the same choice, also where it is carried; an error is not kept."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    asked: list[list[str]] = []
    outcomes = [
        Outcome("crashed", 0.0, "it crashed"),
        Outcome("ok", 0.0, value={"slower": [LOSES], "tuned": [], "untuned": []}),
        Outcome("ok", 0.0, value={"slower": [], "tuned": [1.0], "untuned": [2.0]}),
    ]

    def measure(members: Collection[str]) -> Outcome:
        asked.append(list(members))
        return outcomes[len(asked) - 1]

    results = [
        read_or_compare(ledger.workload("d" * 64), "e" * 64, [GAINS, LOSES], measure)
        for _ in range(3)
    ]
    # without the slower member, the library is measured again
    assert asked == [[GAINS, LOSES], [GAINS, LOSES], [GAINS]]
    assert [times.error for times in results] == ["it crashed", "", ""]
    assert results[1] == results[2] == LibraryTimes((LOSES,), (1.0,), (2.0,))


def test_an_undecided_comparison_is_kept_only_on_request(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE).workload("d" * 64)
    answer = {"slower": [], "tuned": [1.0], "untuned": [2.0]}
    outcome = Outcome("ok", 0.0, value=answer)
    read_or_compare(ledger, "e" * 64, [GAINS], lambda _: outcome, keeps_undecided=False)
    assert not ledger.libraries


def test_finalists_take_turns_until_the_fastest_is_settled() -> None:
    """Nine rounds where it is clear, or none is faster; then the fastest alone goes on. A broken one has no times."""
    clear = run_rounds([3.0, 1.0, None, 2.0], lambda kernel: kernel, 9, clock=lambda: 0.0)
    assert clear == {"untuned": [3.0] * 9, "samples": [[1.0] * 9, [], [2.0] * 9]}
    noise = random.Random(0)
    unclear = run_rounds(
        [1.0, 0.9, 3.0], lambda kernel: kernel * noise.uniform(1, 2), 9, clock=lambda: 0.0
    )
    assert [len(times) for times in (unclear["untuned"], *unclear["samples"])] == [36, 36, 9]
    slower = run_rounds(
        [1.0, 1.1, 3.0], lambda kernel: kernel * noise.uniform(1, 2), 9, clock=lambda: 0.0
    )
    assert [len(times) for times in (slower["untuned"], *slower["samples"])] == [9, 9, 9]
    late = itertools.count(step=100)
    ended = run_rounds(
        [1.0, 0.9], lambda kernel: kernel * noise.uniform(1, 2), 9, clock=lambda: float(next(late))
    )
    assert len(ended["untuned"]) == 9


def test_a_slow_untuned_kernel_is_timed_once() -> None:
    """A single call can take seconds; each sample of a finalist is compared with that time."""
    times = run_rounds([None, 1.0], lambda kernel: kernel, 9, [5.0], clock=lambda: 0.0)
    assert times == {"untuned": [5.0], "samples": [[1.0] * 9]}
