"""The time budget of a remote cache."""

from __future__ import annotations

import math
import threading
import time

import pytest

from tvmflow.store.http_client import Unreachable
from tvmflow.store.remote.connection import CircuitBreaker, TimeBudget


def test_the_budget_is_a_part_of_the_work_that_may_be_saved() -> None:
    """Half of it, at least a second; and what was saved may be spent, too."""
    budget = TimeBudget()
    assert budget.remaining_s == math.inf
    budget.limit(60.0, 10.0)
    assert budget.allowed_s == 30.0
    budget.limit(0.1, 10.0)
    assert budget.allowed_s == 1.0
    budget.limit(None, 10.0)
    budget.add_saved(5.0)
    assert budget.allowed_s == 15.0


def test_threads_that_wait_at_once_count_once() -> None:
    """The budget is about how long the run takes."""
    budget = TimeBudget()
    both = threading.Barrier(2)

    def wait() -> None:
        with budget.waiting():
            both.wait()
            time.sleep(0.2)
            both.wait()

    threads = [threading.Thread(target=wait) for _ in range(2)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.2 <= budget.spent_s <= time.monotonic() - started
    assert budget.requests == 2


def test_a_request_ends_with_the_budget() -> None:
    """The reason says how many requests took how long; the next request is not sent."""
    reasons: list[str] = []
    circuit_breaker = CircuitBreaker(reasons.append, 60.0)
    circuit_breaker.budget.limit(None, 0.2)
    ended = threading.Event()
    assert circuit_breaker.call(lambda: True, 30.0)
    with pytest.raises(Unreachable, match=r"it is slow: 2 requests took \d+\.\d s"):
        circuit_breaker.call(lambda: ended.wait(60), 30.0)
    ended.set()
    assert circuit_breaker.open and len(reasons) == 1
    with pytest.raises(Unreachable, match="not used any more"):
        circuit_breaker.call(lambda: True)
