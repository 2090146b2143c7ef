"""The search measures what the budget has and the ledger lacks: never more, never twice."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.dynamic_networks import dynamic_rows
from tests.support.trials import TARGET
from tests.support.tuning import (
    dense,
    model,
    open_ledger,
    options,
    relu,
    softmax,
    tasks_of,
)
from tvmflow.compiler import lowering
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.statistics import geometric_means
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.budget import BATCH_SIZE, WARMUP_TRIALS, Task
from tvmflow.tuning.measure import apply_chosen
from tvmflow.tuning.trials import Trial, trial_id
from tvmflow.tuning.tuning_job import SearchOptions
from tvmflow.tuning.workloads import extract_workloads


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """A matrix product that can be scheduled in many ways, and a softmax."""
    return tasks_of(model(dense(32), relu, softmax, shape=(32, 32)))


def payload(
    folder: Path, tasks: Sequence[Task], chosen: SearchOptions, threads: int = 2
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "threads": threads,
        "tasks": [list(task) for task in tasks],
        "options": chosen._asdict(),
    }


class Tuning:
    """Tunes in a worker, on one ledger."""

    def __init__(self, fork_server: ForkServer, folder: Path, threads: int = 2) -> None:
        self._fork_server = fork_server
        self._threads = threads
        self.folder = folder
        self.events: list[dict[str, Any]] = []

    def __call__(
        self, tasks: Sequence[Task], chosen: SearchOptions, **more: float
    ) -> dict[str, dict[str, Any]]:
        self.events = []
        outcome = self._fork_server.call(
            "tests.support.tuning:tune_in_worker",
            {**payload(self.folder, tasks, chosen, self._threads), **more},
            timeout_s=120,
            log=self.folder / "log",
            emit=self.events.append,
        )
        assert outcome.kind == "ok", outcome.message + (self.folder / "log").read_text()
        return {entry["name"]: entry for entry in outcome.value}

    def measured(self, tasks: Sequence[Task], chosen: SearchOptions) -> int:
        return sum(entry["measured"] for entry in self(tasks, chosen).values())

    def trials(self, task: Task) -> list[Trial]:
        return list(open_ledger(self.folder, self._threads).workload(task.key).trials.values())


@pytest.fixture
def tune(fork_server: ForkServer, tmp_path: Path) -> Tuning:
    return Tuning(fork_server, tmp_path)


def test_a_budget_is_spent_once(tune: Tuning, tasks: list[Task]) -> None:
    """Four trials are measured; the same budget again measures none; six measure two."""
    assert tune.measured(tasks, options(4)) == 4
    assert tune.measured(tasks, options(4)) == 0
    assert tune.measured(tasks, options(6)) == 2
    assert sum(len(tune.trials(task)) for task in tasks) == 6


def test_every_trial_is_recorded_with_all_fields(tune: Tuning, tasks: list[Task]) -> None:
    """Times of each repeat, the trace that its id stands for, the build, the host, the load, the seed."""
    tune(tasks, options(2, seed=7))
    for trial in tune.trials(tasks[0]):
        assert 1 <= len(trial.run_secs) <= 6 and trial.failure is None
        assert trial.id == trial_id(trial.trace)
        assert (trial.tvm, trial.host, trial.seed) == ("test", {"model": "any"}, 7)
        assert len(trial.load) == 3 and trial.when.endswith("+00:00")


def test_schedules_of_dynamic_shapes_are_measured_at_each_size_to_tune_at(tune: Tuning) -> None:
    """They are those of the rules, each computes the same at every size, and none is measured again."""
    network, target = dynamic_rows(4, 16), make_target(TARGET)
    lowered = network.lower(TARGET)
    [workload] = extract_workloads(lowered.mod)
    fields = (workload.names[0], workload.weight, workload.flops, workload.mod)
    task = Task(workload.key, *fields, ("rows=4", "rows=16"))
    [result] = tune([task], options(2), rules=1).values()
    assert (result["measured"], result["failed"]) == (2, 0)
    [again] = tune([task], options(2), rules=1).values()
    assert (again["measured"], again["trials"]) == (0, 2)
    for trial in tune.trials(task):
        assert len(trial.size_secs) == 2
        assert list(trial.run_secs) == pytest.approx(geometric_means(trial.size_secs))
    chosen = {task.key: tune.trials(task)[0].trace}
    tuned, _ = apply_chosen(lowered.mod, chosen, {task.key: task.mod}, target)
    weights = lowered.compute_weights(network.weights)
    machine = relax.VirtualMachine(
        lowering.ScheduledModel(tuned, weights, target).compile(), tvm.cpu()
    )
    for rows in (1, 7, 16, 40):
        [x] = network.draw({"rows": rows}).values()
        result = machine["main"](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_allclose(result, x @ network.weights["w"], rtol=1e-4, atol=1e-4)


def test_progress_is_reported_after_every_trial(tune: Tuning, tasks: list[Task]) -> None:
    """Done counts to the total, and the best of the workload never gets worse."""
    tune(tasks[:1], options(4))
    assert [(event["done"], event["total"]) for event in tune.events] == [
        (done, 4) for done in range(1, 5)
    ]
    best = [event["best_us"] for event in tune.events]
    assert best == sorted(best, reverse=True)


@pytest.mark.slow
def test_a_workload_that_another_model_measured_is_not_measured_again(
    tune: Tuning, tasks: list[Task]
) -> None:
    """Its trials count in the budget and are not measured again."""
    tune(tasks[:1], options(10))
    results = tune(tasks, options(2 * WARMUP_TRIALS))
    assert (results[tasks[0].name]["trials"], results[tasks[0].name]["measured"]) == (
        WARMUP_TRIALS,
        0,
    )
    assert (results[tasks[1].name]["trials"], results[tasks[1].name]["measured"]) == (
        WARMUP_TRIALS,
        WARMUP_TRIALS,
    )


@pytest.mark.slow
def test_the_best_schedules_for_another_number_of_threads_are_measured_first(
    tune: Tuning, fork_server: ForkServer, tasks: list[Task]
) -> None:
    """They are in the budget and get times of their own; the ledger that they are from stays as it is."""
    tune(tasks[:1], options(6))
    known = {trial.id: trial for trial in tune.trials(tasks[0])}
    alone = Tuning(fork_server, tune.folder, threads=1)
    [result] = alone(tasks[:1], options(9)).values()
    assert (result["measured"], result["starting_points"]) == (9, 6)
    assert ["2 threads" in text for text in result["near_targets"]] == [True]
    first = alone.trials(tasks[0])[:6]
    by_speed = sorted(known.values(), key=lambda trial: trial.seconds)
    assert [trial.id for trial in first] == [trial.id for trial in by_speed]
    assert all(trial.when > known[trial.id].when for trial in first)
    assert len(tune.trials(tasks[0])) == 6
    [again] = alone(tasks[:1], options(9)).values()
    assert (again["measured"], again["starting_points"]) == (0, 0)


def test_a_task_may_be_capped(tune: Tuning, tasks: list[Task]) -> None:
    """No workload gets more than trials_per_task, and nothing is spent beyond that."""
    assert tune.measured(tasks, options(20, trials_per_task=1)) == 2


@pytest.mark.slow
def test_evolution_continues_from_the_ledger(tune: Tuning, tasks: list[Task]) -> None:
    """A first batch is random; a later run mutates the trials of the first."""
    evolve: dict[str, Any] = {"strategy": "evolutionary", "cost_model": "xgb"}
    assert tune.measured(tasks[:1], options(BATCH_SIZE, **evolve)) == BATCH_SIZE
    assert tune.measured(tasks[:1], options(BATCH_SIZE + 3, **evolve)) == 3
    assert len({trial.id for trial in tune.trials(tasks[0])}) == BATCH_SIZE + 3


def test_failed_trials_count(tune: Tuning, tasks: list[Task]) -> None:
    """Failures are counted in the budget, each with its kind."""
    results = tune(tasks[:1], options(3), timeout_s=0.001)
    assert results[tasks[0].name]["failed"] == 3
    assert results[tasks[0].name]["best_us"] is None
    assert {trial.failure.kind for trial in tune.trials(tasks[0]) if trial.failure} == {"timeout"}
    assert tune.measured(tasks[:1], options(3)) == 0


def test_an_exhausted_space_ends_the_search_and_leaves_the_rest_to_others(
    tune: Tuning, tasks: list[Task]
) -> None:
    """A kernel with few schedules stops when all are known; the next run does not search again."""
    small = tasks_of(model(relu, shape=(4,)))
    search_options = options(60)
    first = tune(small, search_options)["relu"]
    assert first["exhausted"] and 0 < first["measured"] < 60
    again = tune([*small, *tasks[1:]], options(first["measured"] + 2))
    assert again["relu"]["measured"] == 0
    assert again["relu"]["trials"] == first["measured"]
    assert again[tasks[1].name]["measured"] == 2


def test_a_trial_that_no_longer_applies_is_quarantined_and_replaced(
    tune: Tuning, tasks: list[Task]
) -> None:
    """The search continues with the others, and measures one more instead."""
    tune(tasks[:1], options(2))
    records = open_ledger(tune.folder).workload(tasks[0].key)
    broken = [[["GetSBlock", [], ["no such block", "main"], ["b9"]]], []]
    records.append(records.valid()[0]._replace(id=trial_id(broken), trace=broken))
    assert tune.measured(tasks[:1], options(4)) == 2
    assert len(tune.trials(tasks[0])) == 4
    assert trial_id(broken) not in {trial.id for trial in tune.trials(tasks[0])}
    assert len(records.quarantine_path.read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_trial_that_would_crash_the_search_is_quarantined(
    tune: Tuning, tasks: list[Task]
) -> None:
    """A trace that no search wrote, such as a tile of size 0, crashes TVM: it crashes a child only."""
    tune(tasks[:1], options(3))
    records = open_ledger(tune.folder).workload(tasks[0].key)
    good = records.valid()[0]
    instructions, decisions = good.trace
    tiles = next(entry for entry in decisions if isinstance(entry[1], list) and len(entry[1]) > 1)
    crashing = [
        instructions,
        [[entry[0], [0] * len(entry[1])] if entry is tiles else entry for entry in decisions],
    ]
    records.append(good._replace(id=trial_id(crashing), trace=crashing))
    assert tune.measured(tasks[:1], options(6)) == 3
    assert trial_id(crashing) not in {trial.id for trial in tune.trials(tasks[0])}


def start(folder: Path, tasks: Sequence[Task], chosen: SearchOptions) -> subprocess.Popen[str]:
    """The same search in a process of its own, which has begun when this returns."""
    (folder / "payload.json").write_text(json.dumps(payload(folder, tasks, chosen)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.tuning", str(folder / "payload.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str]) -> int:
    """How many trials it has reported when it has ended by itself."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return len(out.splitlines())


@pytest.mark.slow
def test_two_runs_at_once_share_the_work(tmp_path: Path, tasks: list[Task]) -> None:
    """The budget is measured once in all, and never two trials at one time."""
    runs = [start(tmp_path, tasks, options(12)) for _ in range(2)]
    reported = [finish(run) for run in runs]
    ledger = open_ledger(tmp_path)
    assert sum(reported) == 12
    ran = sorted(trial.ran for task in tasks for trial in ledger.workload(task.key).trials.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ran))
    assert sum(len(ledger.workload(task.key)) for task in tasks) == 12
    for task in tasks:
        assert not ledger.workload(task.key).quarantine_path.exists()


@pytest.mark.parametrize(
    "kills",
    [pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.faults)],
)
def test_a_tuning_that_is_killed_at_any_moment_resumes(
    tmp_path: Path, tasks: list[Task], kills: int
) -> None:
    """After kills at random instants the ledger has exactly the budget, each trial once, and all reported ones."""
    rng = random.Random(kills)
    chosen = options(4 * kills)
    reported = 0
    for _ in range(kills):
        process = start(tmp_path, tasks, chosen)
        assert process.stdout is not None
        for _ in range(rng.randrange(3)):
            reported += bool(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        reported += sum(1 for line in out.splitlines(keepends=True) if line.endswith("\n"))
        held = sum(len(open_ledger(tmp_path).workload(task.key)) for task in tasks)
        assert reported <= held <= chosen.rules.trials
    finish(start(tmp_path, tasks, chosen))
    lines = [
        json.loads(line)
        for task in tasks
        for line in open_ledger(tmp_path).workload(task.key).path.read_text().splitlines()
        if "run_secs" in line
    ]
    assert len(lines) == chosen.rules.trials
    assert len({line["id"] for line in lines}) == chosen.rules.trials
