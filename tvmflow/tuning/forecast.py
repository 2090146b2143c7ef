"""The forecast of a search: trials in its budget that the ledger has, and those left to measure."""

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
from tvmflow.tuning.workload_ledger import WorkloadRecords

# Between two trials of one search there is never as much time.
_LONGEST_PAUSE_S: Final = 60.0
# The least number of intervals that say how long a trial takes.
_FEWEST_INTERVALS: Final = 8
# A workload that takes more than so many times the share of the time that it had when its search
# ended is worth a longer search: that was in a larger model.
_MOST_SHARE_GROWTH: Final = 2.0


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
        finished_kernels: Those that get no trial, because they had their share in an earlier search.
        spent_s: Seconds of `minutes` that earlier searches took for the reused trials.
    """

    budget: int
    minutes: float | None = None
    kernels: tuple[str, ...] | None = None
    new_kernels: tuple[str, ...] = ()
    reused: int = 0
    at_most: int = 0
    seconds_per_trial: float | None = None
    finished_kernels: tuple[str, ...] = ()
    spent_s: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds of `minutes` that are left; None without a limit."""
        return None if self.minutes is None else max(self.minutes * 60 - self.spent_s, 0.0)

    @property
    def is_unlimited(self) -> bool:
        """True if only time limits the trials."""
        return self.budget >= UNLIMITED_TRIALS


def workload_shares(
    tasks: Sequence[Task],
    records: Mapping[str, WorkloadRecords],
    rules: BudgetRules,
    schedules: int,
    search: str,
) -> list[WorkloadShare]:
    """Return the workloads as the budget sees them: as each was when its first trial was decided on.

    Args:
        tasks: The workloads.
        records: The records of each by its key.
        rules: The limits of the budget.
        schedules: The version of the schedule rules.
        search: The name of the search (see `search_name`).
    """
    pace = measure_pace(trial for task in tasks for trial in records[task.key].trials.values())
    time_shares = find_time_shares(tasks, records, schedules)
    shares = []
    for task in tasks:
        known = records[task.key]
        baseline, spent = known.baseline_before_trials(schedules), known.search_time
        times = (baseline.seconds, baseline.least_s) if baseline else (math.inf, 0.0)
        trial_s = spent.seconds / spent.trials if spent and spent.trials else pace or 0.0
        end = known.search_ends.get(end_name(search, rules))
        is_finished = (
            end is not None
            and end.budget >= (math.inf if rules.minutes is None else rules.minutes, rules.trials)
            and len(known) >= end.trials
            and time_shares[task.key] <= _MOST_SHARE_GROWTH * end.share
        )
        finished_after = len(known) if is_finished else None
        shares.append(
            WorkloadShare(task.key, task.calls, task.flops, *times, trial_s, finished_after)
        )
    return shares


def find_time_shares(
    tasks: Sequence[Task], records: Mapping[str, WorkloadRecords], schedules: int
) -> dict[str, float]:
    """Return the share of each workload in the untuned time that is known; 1 where its own is not."""
    known = {task.key: records[task.key].untuned_seconds(schedules) for task in tasks}
    times = {task.key: task.calls * (known[task.key] or 0.0) for task in tasks}
    total = sum(times.values())
    return {key: seconds / total if seconds else 1.0 for key, seconds in times.items()}


def end_name(search: str, rules: BudgetRules) -> str:
    """Return a search's name in the ledger's note of its end: of all that shapes it, except its budget."""
    limits = (rules.trials_per_task, rules.patience, rules.min_gain)
    return "/".join([search, *("-" if limit is None else f"{limit:g}" for limit in limits)])


def forecast_trials(
    tasks: Sequence[Task],
    records: Mapping[str, WorkloadRecords],
    rules: BudgetRules,
    schedules: int,
    search: str,
) -> TrialForecast:
    """Replay the budget on the ledger as a search does, without what has to be measured.

    Args:
        tasks: The workloads.
        records: The records of each by its key.
        rules: The limits of the budget.
        schedules: The version of the schedule rules.
        search: The name of the search (see `search_name`).
    """
    shares = workload_shares(tasks, records, rules, schedules, search)
    budget = Budget(shares, rules)
    at_most: int | None = None
    while budget.reused_s < rules.seconds and (planned := budget.next_round()):
        is_complete = True
        for key, count in planned.items():
            first = budget.spent_on(key)
            trials = records[key].in_order()[first : first + count]
            is_missing = len(trials) < count
            is_complete = is_complete and not (is_missing and not records[key].is_exhausted(search))
            times = [trial.seconds for trial in trials]
            budget.record(key, times, reused=len(trials), exhausted=is_missing)
        if not is_complete and at_most is None:
            at_most = _count_missing(shares, records, rules, budget.spent)
    trials = [trial for task in tasks for trial in records[task.key].trials.values()]
    names = {task.key: task.name for task in tasks}
    return TrialForecast(
        budget=rules.trials,
        minutes=rules.minutes,
        kernels=tuple(names.values()),
        new_kernels=tuple(name for key, name in names.items() if not records[key].trials),
        reused=budget.spent,
        at_most=at_most or 0,
        seconds_per_trial=measure_pace(trials),
        finished_kernels=tuple(name for key, name in names.items() if key in budget.finished),
        spent_s=budget.reused_s,
    )


def _count_missing(
    shares: Sequence[WorkloadShare],
    records: Mapping[str, WorkloadRecords],
    rules: BudgetRules,
    reused: int,
) -> int:
    """Return how many trials may be left to measure, by the limits of all and of each workload."""
    left = rules.trials - reused
    if rules.trials_per_task is None:
        return left
    room = (
        max(rules.trials_per_task - len(records[share.key]), 0)
        for share in shares
        if share.finished_after is None
    )
    return min(left, sum(room))


def measure_pace(trials: Iterable[Trial]) -> float | None:
    """Return the seconds from one trial of a search to the next, as the clock of the ledger has them."""
    times = sorted(datetime.fromisoformat(trial.when).timestamp() for trial in trials)
    intervals = [after - before for before, after in itertools.pairwise(times)]
    intervals = [seconds for seconds in intervals if seconds < _LONGEST_PAUSE_S]
    # Trials end in batches: their mean counts, and not the median of a few long and many short intervals.
    return sum(intervals) / len(intervals) if len(intervals) >= _FEWEST_INTERVALS else None
