"""The forecast of a search: the trials that its budget finds in the ledger, and those that are left to measure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.tuning.budget import Budget, BudgetRules, WorkloadShare
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.tuning_job import Task
from tvmflow.tuning.workload_records import WorkloadRecords

# Between two trials of one search there is never as much time.
_LONGEST_PAUSE_S: Final = 60.0
# The least number of intervals that say how long a trial takes.
_FEWEST_INTERVALS: Final = 8


class TrialForecast(NamedTuple):
    """The part of a search's budget that the ledger has, and what it lacks.

    Attributes:
        budget: The trials that it may have; `UNLIMITED_TRIALS` where only time limits them.
        minutes: The time that it may take; None without a limit.
        kernels: The kernels that it is for; None as long as they are not known.
        new_kernels: Those without a trial in the ledger.
        reused: The trials of the budget that the ledger has.
        at_most: The trials that may have to be measured; fewer when the search converges.
        seconds_per_trial: As the trials in the ledger took; None where these are too few.
    """

    budget: int
    minutes: float | None = None
    kernels: tuple[str, ...] | None = None
    new_kernels: tuple[str, ...] = ()
    reused: int = 0
    at_most: int = 0
    seconds_per_trial: float | None = None

    @property
    def is_unlimited(self) -> bool:
        """True if only time limits the trials."""
        return self.budget >= UNLIMITED_TRIALS


def workload_share(task: Task, records: WorkloadRecords, schedules: int) -> WorkloadShare:
    """Return a workload as the budget sees it: as it was when its first trial was decided on.

    Args:
        task: The workload.
        records: Its records in the ledger.
        schedules: The version of the schedule rules.
    """
    baseline = records.baseline_before_trials(schedules)
    times = (baseline.seconds, baseline.least_s) if baseline else (math.inf, 0.0)
    return WorkloadShare(task.key, task.calls, task.flops, *times)


def forecast_trials(
    tasks: Sequence[Task],
    records: Mapping[str, WorkloadRecords],
    rules: BudgetRules,
    schedules: int,
    search: str,
) -> TrialForecast:
    """Replay the budget on the ledger as a search does, up to the first round that needs a measurement.

    Args:
        tasks: The workloads.
        records: The records of each by its key.
        rules: The limits of the budget.
        schedules: The version of the schedule rules.
        search: The name of the search (see `search_name`).
    """
    budget = Budget([workload_share(task, records[task.key], schedules) for task in tasks], rules)
    reused, at_most = 0, 0
    while planned := budget.next_round():
        is_complete = True
        for key, count in planned.items():
            first = budget.spent_on(key)
            trials = records[key].in_order()[first : first + count]
            reused += len(trials)
            is_exhausted = len(trials) < count and records[key].is_exhausted(search)
            is_complete = is_complete and (len(trials) == count or is_exhausted)
            budget.record(key, [trial.seconds for trial in trials], exhausted=is_exhausted)
        if not is_complete:
            at_most = _count_missing(tasks, records, rules, reused)
            break
    trials = [trial for task in tasks for trial in records[task.key].trials.values()]
    return TrialForecast(
        rules.trials,
        None,
        tuple(task.name for task in tasks),
        tuple(task.name for task in tasks if not records[task.key].trials),
        reused,
        at_most,
        measure_pace(trials),
    )


def _count_missing(
    tasks: Sequence[Task], records: Mapping[str, WorkloadRecords], rules: BudgetRules, reused: int
) -> int:
    """Return how many trials may be left to measure, by the limits of all and of each workload."""
    left = rules.trials - reused
    if rules.trials_per_task is None:
        return left
    room = (max(rules.trials_per_task - len(records[task.key]), 0) for task in tasks)
    return min(left, sum(room))


def measure_pace(trials: Iterable[Trial]) -> float | None:
    """Return the seconds from one trial of a search to the next, as the clock of the ledger has them."""
    times = sorted(datetime.fromisoformat(trial.when).timestamp() for trial in trials)
    intervals = [after - before for before, after in itertools.pairwise(times)]
    intervals = [seconds for seconds in intervals if seconds < _LONGEST_PAUSE_S]
    # Trials end in batches: their mean counts, and not the median of a few long and many short intervals.
    return sum(intervals) / len(intervals) if len(intervals) >= _FEWEST_INTERVALS else None
