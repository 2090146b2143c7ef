"""A budget in minutes: it counts what earlier searches spent, and goes to what is new."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.trials import trial
from tests.support.tuning import measure_context, open_ledger, options
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.tuning import search
from tvmflow.tuning.budget import BudgetRules, Task
from tvmflow.tuning.measurer import MeasureJob, Measurer, RecordTrial
from tvmflow.tuning.search import Candidate
from tvmflow.tuning.trials import Trial, timestamp
from tvmflow.tuning.tuning_job import WorkClock


def layers(*names: str) -> list[Task]:
    """Return kernels that take as long untuned as each other."""
    keys = (hashlib.sha256(name.encode()).hexdigest() for name in names)
    return [Task(key, name, 1, 1e6, name) for key, name in zip(keys, names, strict=True)]


class PacedMeasurer(Measurer):
    """Measures nothing: each trial takes one second of a clock that nothing else moves, and has a time by its id."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self.clock = WorkClock(lambda: self._seconds)

    def measure(
        self,
        jobs: Sequence[MeasureJob],
        record: RecordTrial,
        may_continue: Callable[[], bool] = lambda: True,
    ) -> None:
        for index, job in enumerate(jobs):
            if may_continue():
                self._seconds += 1.0
                seconds = 1e-3 if job.trace is None else 1e-4 * (1 + int(job.id[:4], 16) / 0xFFFF)
                made = trial(0, id=job.id, trace=job.trace, run_secs=(seconds,), when=timestamp())
                record(index, made)


class Search(search.Tuning):
    """A search whose kernels have schedules without end, which need no TVM."""

    def _proposals_for(self, key: str) -> Any:
        def propose(count: int) -> list[Candidate]:
            first = len(self._trials[key])
            made = [trial(1000 * int(key[:6], 16) + first + n) for n in range(count)]
            return [Candidate(entry.id, entry.trace, None) for entry in made]

        def learn(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> None:
            return None

        proposals: Any = SimpleNamespace(propose=propose, learn=learn, problems=[])
        return self._proposals.setdefault(key, proposals)


class Tuning:
    """Tunes on one ledger, with a clock that moves by a second for each trial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stopped = ""

    def __call__(
        self, tasks: Sequence[Task], seconds: float | None, trials: int = UNLIMITED_TRIALS
    ) -> dict[str, int]:
        """Return how many trials each kernel has had measured, by its name."""
        minutes = None if seconds is None else seconds / 60
        rules = BudgetRules(trials, min_gain=0.0, minutes=minutes)
        measurer = PacedMeasurer()
        result = Search(
            tasks,
            options(trials)._replace(rules=rules),
            measure_context(self.folder)._replace(clock=measurer.clock),
            open_ledger(self.folder),
            cast(ForkServer, None),
            lambda _: None,
            measurer,
        ).run()
        self.stopped = result.stopped
        return {entry.name: entry.measured for entry in result.workloads}

    def trials(self, task: Task) -> int:
        return len(open_ledger(self.folder).workload(task.key))


@pytest.fixture
def tune(tmp_path: Path) -> Tuning:
    return Tuning(tmp_path)


def test_the_same_minutes_measure_nothing_again(tune: Tuning) -> None:
    """Two untuned kernels and 38 trials take 40 seconds; the second run finds them spent."""
    tasks = layers("a", "b")
    assert sum(tune(tasks, 40).values()) == 38
    assert tune.stopped == "time"
    assert sum(tune(tasks, 40).values()) == 0
    assert tune.stopped == "finished"


def test_the_minutes_of_a_changed_layer_go_to_the_new_one(tune: Tuning) -> None:
    """The kernels that stay have as many trials as before, and the new one what the replaced one had."""
    kept, replaced = layers("a", "b")
    tune([kept, replaced], 60)
    before = {task.name: tune.trials(task) for task in (kept, replaced)}
    [new] = layers("c")
    measured = tune([kept, new], 60)
    assert measured["a"] == 0 and tune.trials(kept) == before["a"] > 16
    # more or less the second of an untuned kernel
    assert abs(measured["c"] - before["b"]) <= 2
    assert sum(tune([kept, new], 60).values()) == 0


def test_a_layer_that_is_added_gets_its_share(tune: Tuning) -> None:
    """Though the others have spent all minutes already."""
    tasks = layers("a", "b")
    tune(tasks, 60)
    measured = tune([*tasks, *layers("c")], 60)
    assert measured["c"] >= 16
    assert (measured["a"], measured["b"]) == (0, 0)


def test_a_larger_budget_goes_on_with_all(tune: Tuning) -> None:
    """The minutes that are new are measured; those that were spent are not spent again."""
    tasks = layers("a", "b")
    first = sum(tune(tasks, 40).values())
    second = tune(tasks, 80)
    assert 36 <= sum(second.values()) <= 42
    assert first + sum(second.values()) == sum(map(tune.trials, tasks))
    assert sum(tune(tasks, 40).values()) == 0


def test_a_kernel_of_a_large_model_is_tuned_in_a_small_one(tune: Tuning) -> None:
    """Its share of the minutes was that of one among many."""
    tasks = layers(*"abcdef")
    tune(tasks, 60)
    alone = min(tasks, key=tune.trials)
    known = tune.trials(alone)
    measured = tune([alone], 60)
    assert measured[alone.name] > known
    assert sum(tune([alone], 60).values()) == 0


def test_an_interrupted_search_goes_on_where_it_was(tune: Tuning) -> None:
    """What it spent is in the ledger, also when the model changes before it goes on."""
    tasks = layers("a", "b")
    # as if the run had been killed after 20 of 60 seconds: no search ended
    tune(tasks, 20)
    for task in tasks:
        ledger = open_ledger(tune.folder).workload(task.key)
        lines = ledger.path.read_text().splitlines(keepends=True)
        ledger.path.write_text("".join(line for line in lines if '"ended"' not in line))
    assert 38 <= sum(tune(tasks, 60).values()) <= 42


def test_a_budget_in_trials_leaves_what_had_its_share(tune: Tuning) -> None:
    """The trials of the replaced kernel go to the new one, whatever the others might still gain."""
    kept, replaced = layers("a", "b")
    tune([kept, replaced], None, 60)
    before = tune.trials(replaced)
    [new] = layers("c")
    # once an inference calls it, and the other ten times
    assert tune([kept._replace(calls=10), new], None, 60) == {"a": 0, "c": before}
