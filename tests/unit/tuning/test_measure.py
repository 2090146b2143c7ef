"""One trial: a schedule is applied, built and timed, and whatever goes wrong is its own failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import DEVICE, TARGET
from tests.support.tuning import TIMING, dense, model, relu, task_of
from tvmflow.executors.nursery import Nursery, Outcome
from tvmflow.targets import devices
from tvmflow.tuning.search import Task

NO_DECISIONS: list[Any] = [[], []]
DOES_NOT_APPLY = [[["GetSBlock", [], ["no such block", "main"], ["b9"]]], []]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery.start(["tvmflow.tuning.measure"]) as server:
        yield server


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(model(dense(16), relu))


def measure(nursery: Nursery, mod: str, trace: Any, **changes: Any) -> Outcome:
    payload = {
        "mod": mod,
        "trace": trace,
        "target": TARGET,
        "schedules": 0,
        "timing": TIMING._asdict(),
        "best_s": None,
        **changes,
    }
    return nursery.call(
        "tvmflow.tuning.measure:measure_one", payload, timeout_s=30, emit=lambda _: None
    )


def test_a_trial_gives_the_seconds_of_every_repeat(nursery: Nursery, task: Task) -> None:
    """Two repeats were asked for, or more if they differ; where the time went is said as well."""
    value = measure(nursery, task.mod, NO_DECISIONS).value
    assert len(value["run_secs"]) in (2, 4, 6)
    assert all(0 < seconds < 1 for seconds in value["run_secs"])
    assert set(value["spent"]) == {"apply", "build", "device", "run"}


def test_a_hopeless_candidate_is_not_repeated(nursery: Nursery, task: Task) -> None:
    """One repeat shows that it is far behind the best; one that may win gets them all."""
    hopeless = measure(nursery, task.mod, NO_DECISIONS, best_s=1e-12).value
    assert len(hopeless["run_secs"]) == 1
    winner = measure(nursery, task.mod, NO_DECISIONS, best_s=1.0).value
    assert len(winner["run_secs"]) >= 2


def test_a_candidate_runs_when_it_may(nursery: Nursery, task: Task) -> None:
    """It is built at once, then asks; what it asks is answered before it runs."""
    asked = []
    nursery.call(
        "tvmflow.tuning.measure:measure_one",
        {
            "mod": task.mod,
            "trace": NO_DECISIONS,
            "target": TARGET,
            "timing": TIMING._asdict(),
            "best_s": None,
        },
        timeout_s=30,
        emit=lambda event: asked.append((event["phase"], event["ask"])),
    )
    assert asked == [("apply", False), ("build", False), ("device", True), ("run", False)]


def test_a_trace_that_does_not_apply_is_a_failure_of_that_phase(
    nursery: Nursery, task: Task
) -> None:
    """The message is one sentence, not a trace of TVM's internals."""
    value = measure(nursery, task.mod, DOES_NOT_APPLY).value
    assert value["failure"]["phase"] == "apply"
    assert "\n" not in value["failure"]["message"]


def test_a_target_that_llvm_refuses_is_a_failure_of_the_build(nursery: Nursery, task: Task) -> None:
    """Nothing was run then."""
    value = measure(nursery, task.mod, NO_DECISIONS, target={**TARGET, "mtriple": "nonsense"}).value
    assert value["failure"]["phase"] == "build"
    assert set(value["spent"]) == {"apply", "build"}


def test_finalists_are_timed_in_turns_beside_the_untuned_kernel(
    nursery: Nursery, task: Task
) -> None:
    """A sample a round for each that applies, and the baseline in the first and the last round."""
    outcome = nursery.call(
        "tvmflow.tuning.measure:measure_finalists",
        {
            "mod": task.mod,
            "traces": [NO_DECISIONS, DOES_NOT_APPLY, NO_DECISIONS],
            "target": TARGET,
            "schedules": 0,
            "timing": TIMING._asdict(),
            "rounds": 4,
        },
        timeout_s=30,
        emit=lambda _: None,
    )
    assert [len(samples) for samples in outcome.value["secs"]] == [4, 0, 4]
    assert len(outcome.value["untuned"]) == 1 + 3 + 3


def test_a_device_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    """Whoever comes second waits until the first has let go."""
    order: list[str] = []

    def second() -> None:
        with devices.exclusive(tmp_path, DEVICE):
            order.append("second")

    with devices.exclusive(tmp_path, DEVICE):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
