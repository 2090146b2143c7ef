"""One trial: a schedule is applied, built and timed, and its errors are recorded as its failure."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import DEVICE, TARGET
from tests.support.tuning import TIMING, dense, model, relu, task_of
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.targets import devices
from tvmflow.tuning.budget import Task
from tvmflow.tuning.measurer import FinalistsRequest, TrialRequest, measure_trial, time_finalists

NO_DECISIONS: list[Any] = [[], []]
DOES_NOT_APPLY = [[["GetSBlock", [], ["no such block", "main"], ["b9"]]], []]


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(model(dense(16), relu))


def trial_request(mod: str, trace: Any) -> TrialRequest:
    return TrialRequest(mod=mod, trace=trace, target=TARGET, rules_version=0, timing=TIMING)


def measure(fork_server: ForkServer, mod: str, trace: Any, **changes: Any) -> Outcome:
    request = replace(trial_request(mod, trace), **changes)
    return fork_server.call(measure_trial, request.to_json(), timeout_s=30, emit=lambda _: None)


def test_a_trial_gives_the_seconds_of_every_repeat(fork_server: ForkServer, task: Task) -> None:
    """Two repeats are the least, more if they differ; the seconds of each phase are reported."""
    value = measure(fork_server, task.mod, NO_DECISIONS).value
    assert len(value["run_secs"]) in (2, 4, 6)
    assert all(0 < seconds < 1 for seconds in value["run_secs"])
    assert set(value["phase_secs"]) == {"apply", "build", "device", "run"}


def test_a_slow_candidate_is_not_repeated(fork_server: ForkServer, task: Task) -> None:
    """One repeat shows that it is much slower than the best; one that may win gets all repeats."""
    hopeless = measure(fork_server, task.mod, NO_DECISIONS, best_s=1e-12).value
    assert len(hopeless["run_secs"]) == 1
    winner = measure(fork_server, task.mod, NO_DECISIONS, best_s=1.0).value
    assert len(winner["run_secs"]) >= 2


def test_a_candidate_asks_before_it_runs(fork_server: ForkServer, task: Task) -> None:
    """It is built at once, and waits for permission before it uses the device."""
    phases = []
    fork_server.call(
        measure_trial,
        trial_request(task.mod, NO_DECISIONS).to_json(),
        timeout_s=30,
        emit=lambda event: phases.append((event["phase"], event["ask"])),
    )
    assert phases == [("apply", False), ("build", False), ("device", True), ("run", False)]


def test_a_trace_that_does_not_apply_is_a_failure_of_that_phase(
    fork_server: ForkServer, task: Task
) -> None:
    """The message is one sentence, not a trace of TVM's internals."""
    value = measure(fork_server, task.mod, DOES_NOT_APPLY).value
    assert value["failure"]["phase"] == "apply"
    assert "\n" not in value["failure"]["message"]


def test_a_target_that_llvm_refuses_is_a_failure_of_the_build(
    fork_server: ForkServer, task: Task
) -> None:
    """Nothing is run."""
    value = measure(
        fork_server, task.mod, NO_DECISIONS, target={**TARGET, "mtriple": "nonsense"}
    ).value
    assert value["failure"]["phase"] == "build"
    assert set(value["phase_secs"]) == {"apply", "build"}


def test_finalists_are_timed_interleaved_with_the_untuned_kernel(
    fork_server: ForkServer, task: Task
) -> None:
    """One sample a round for each that applies; the fastest and the untuned kernel go on until it is decided."""
    outcome = fork_server.call(
        time_finalists,
        FinalistsRequest(
            mod=task.mod,
            traces=[NO_DECISIONS, DOES_NOT_APPLY, NO_DECISIONS],
            target=TARGET,
            rules_version=0,
            timing=TIMING,
            rounds=4,
        ).to_json(),
        timeout_s=30,
        emit=lambda _: None,
    )
    first, broken, second = map(len, outcome.value["samples"])
    assert (broken, min(first, second)) == (0, 4)
    assert 4 <= max(first, second) == len(outcome.value["untuned"]) <= 16


def test_a_device_is_locked_by_one_process_at_a_time(tmp_path: Path) -> None:
    """The second one waits until the first has released it."""
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
