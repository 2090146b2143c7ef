"""The budget: decide from the trials so far which workload gets the next ones; and forecast it.

It is a pure function: the same measurements always lead to the same decisions. If a run was killed, or its budget was
raised, the ledger replays it from the beginning. The trials that the ledger lacks are exactly the ones left to measure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.tuning.ledger import WorkloadRecords
from tvmflow.tuning.trials import Trial

WARMUP_TRIALS: Final = 3
"""Trials per workload before any gets a batch; a smaller budget serves the heaviest workloads first."""

BATCH_SIZE: Final = 16
"""The number of trials in a batch: after the warm-up, a workload gets this many at a time."""

ROOFLINE_SHARE: Final = 0.95
"""A workload at this share of its roofline speed has nothing more to gain."""

# A batch that is expected to save less than this share of an inference is not worth its time.
_MIN_BATCH_GAIN: Final = 0.001
# Workloads whose next batches together save less than this share of an inference get none: a comparison of libraries
# would not show such a gain, and finalists that gain less of a kernel are not kept.
_MIN_SHOWN_GAIN: Final = 0.02
# After each this many trials, the gain that still seems possible (down to the roofline) halves; slow trials reduce it
# further. If no trial beats the schedule rule, the rule's kernel is near its limit, even if that is far from the
# machine's peak.
_HALVING_TRIALS: Final = 2
# On a busy machine, noise may make a trial faster than the untuned kernel by up to this share.
_NOISE: Final = 0.1

# The weight of a workload's recent gain against the gain that is still possible: alpha of Ansor (Zheng et al., OSDI
# 2020, section 6.2).
_RECENT_GAIN_WEIGHT: Final = 0.2
# In the estimate of the further gain, a trial without a gain counts as this many additional trials.
_NO_GAIN_WEIGHT: Final = 4.0
# The assumed speed of a workload without any known time.
_ASSUMED_FLOPS_PER_S: Final = 1e9


class Task(NamedTuple):
    """A workload to tune.

    Attributes:
        calls: The number of calls per inference.
        flops: The number of arithmetic operations of one call.
        sizes: A description of each combination of sizes at which schedules are measured; empty if shapes are fixed.
    """

    key: str
    name: str
    calls: int
    flops: float
    mod: str
    sizes: tuple[str, ...] = ()


class WorkloadShare(NamedTuple):
    """A workload as the budget sees it.

    Attributes:
        untuned_s: Seconds of one untuned call; infinity if unknown.
        least_s: Seconds of one call at the machine's roofline; 0 if unknown.
        seconds_per_trial: The seconds of the budget that each trial from the ledger counts for.
        finished_after: How many trials it had when an earlier search with this budget ended: it gets no more. None if
            there was no such search.
    """

    key: str
    calls: int
    flops: float
    untuned_s: float = math.inf
    least_s: float = 0.0
    seconds_per_trial: float = 0.0
    finished_after: int | None = None


class BudgetRules(NamedTuple):
    """The limits that a recipe sets.

    Attributes:
        trials: The maximum number of trials of all workloads together.
        trials_per_task: The maximum number of trials of one workload; None without a limit.
        patience: The tuning of a workload ends after this many trials without a gain. If None, it ends when the
            estimated further gain is too small.
        min_gain: The relative improvement that counts as a gain.
        minutes: The limit in minutes for all workloads together, including earlier searches; None without a limit.
    """

    trials: int
    trials_per_task: int | None = None
    patience: int | None = None
    min_gain: float = 0.01
    minutes: float | None = None

    @property
    def seconds(self) -> float:
        """The time limit in seconds; infinity without a limit."""
        return math.inf if self.minutes is None else self.minutes * 60


class _WorkloadHistory:
    def __init__(self, share: WorkloadShare) -> None:
        self.share = share
        self.spent = 0
        # A schedule that is slower than the untuned kernel is not a gain.
        self.best_s = share.untuned_s
        self.best_trial_s = math.inf
        self.best_after: list[float] = []
        self.last_gain = 0
        self.exhausted = False

    def add(self, seconds: float, min_gain: float) -> None:
        self.spent += 1
        if seconds < self.best_s * (1 - min_gain):
            self.last_gain = self.spent
        self.best_s = min(self.best_s, seconds)
        self.best_trial_s = min(self.best_trial_s, seconds)
        self.best_after.append(self.best_s)

    @property
    def trials_since_gain(self) -> int:
        return self.spent - self.last_gain

    @property
    def is_at_roofline(self) -> bool:
        return self.share.least_s >= ROOFLINE_SHARE * self.best_s

    @property
    def possible_gain(self) -> float:
        """Seconds per inference that the workload could save down to the roofline."""
        best = self.best_s
        if math.isinf(best):
            best = max(self.share.flops, 1.0) / _ASSUMED_FLOPS_PER_S
        return self.share.calls * max(best - self.share.least_s, 0.0)

    @property
    def inference_s(self) -> float:
        """Seconds per inference in the workload's fastest kernel so far."""
        return self.share.calls * self.best_s

    @property
    def plausible_gain(self) -> float:
        """The part of `possible_gain` that still seems possible, judged by the trials so far."""
        possible = self.possible_gain
        found = self.share.calls * max((1 - _NOISE) * self.share.untuned_s - self.best_s, 0.0)
        left = possible * math.pow(0.5, self.spent / _HALVING_TRIALS)
        if math.isfinite(self.best_trial_s):
            left *= self.best_s / self.best_trial_s
        return min(possible, found + left)

    def expected_gain(self, *, by_trials: bool = True) -> float:
        """Return the seconds per inference that the next batch is expected to save.

        With `by_trials`, at most `plausible_gain`; otherwise at most `possible_gain`.
        """
        limit = self.plausible_gain if by_trials else self.possible_gain
        if not self.spent:
            return limit
        earlier = self.best_after[-min(BATCH_SIZE, self.spent)]
        recent = 0.0 if math.isinf(earlier) else self.share.calls * (earlier - self.best_s)
        trials = self.spent + _NO_GAIN_WEIGHT * self.trials_since_gain
        further = BATCH_SIZE * limit / trials
        expected = _RECENT_GAIN_WEIGHT * recent + (1 - _RECENT_GAIN_WEIGHT) * further
        return min(expected, limit)


class Budget:
    """Assigns trials in rounds: call `next_round` and `record` its results until there is no next round.

    Attributes:
        reused_s: Seconds that earlier searches took for the reused trials.
    """

    def __init__(self, shares: Sequence[WorkloadShare], rules: BudgetRules) -> None:
        self._rules = rules
        ordered = sorted(shares, key=lambda share: (-share.calls * share.flops, share.key))
        histories = [_WorkloadHistory(share) for share in ordered]
        times = [share.calls * share.untuned_s for share in ordered]
        # If the time of an inference is unknown, every expected gain is worth a batch.
        self._is_timed = 0 < sum(times) < math.inf
        # If a roofline is unknown, the possible gain is overestimated and does not show when to end.
        is_limited = self._is_timed and all(share.least_s for share in shares)
        self._ends_by_trials = is_limited and rules.patience is None
        if self._is_timed:
            histories.sort(key=lambda history: -history.possible_gain)
        self._histories = {history.share.key: history for history in histories}
        self._least_gain = self._find_least_gain()
        self.reused_s = 0.0

    @property
    def spent(self) -> int:
        """Trials that were assigned and recorded."""
        return sum(history.spent for history in self._histories.values())

    def spent_on(self, key: str) -> int:
        """Return the number of trials that one workload has had."""
        return self._histories[key].spent

    @property
    def left_out(self) -> list[str]:
        """The workloads that get no more trials only because they promise no gain."""
        return [
            key
            for key, history in self._histories.items()
            if self._room(history) > 0 and not self._is_worthwhile(history)
        ]

    @property
    def finished(self) -> list[str]:
        """The workloads that promise a gain, but get no more trials, because an earlier search finished them."""
        return [
            key
            for key, history in self._histories.items()
            if history.share.finished_after is not None
            and history.spent >= history.share.finished_after
            and not history.exhausted
            and self._is_worthwhile(history)
        ]

    def is_at_roofline(self, key: str) -> bool:
        """Return whether a workload, tuned or not, is near the machine's roofline."""
        return self._histories[key].is_at_roofline

    def next_round(self) -> dict[str, int]:
        """Return how many trials each workload gets in the next round; empty if tuning is over."""
        left = self._rules.trials - self.spent
        return self._warmup_round(left) or self._batch_round(left)

    def record(
        self, key: str, seconds: Sequence[float], *, reused: int = 0, exhausted: bool = False
    ) -> None:
        """Record the seconds of a workload's trials in the order of the ledger; infinity for failures.

        The ledger had `reused` of them already. A workload is `exhausted` if no schedule is left to try.
        """
        history = self._histories[key]
        self.reused_s += reused * history.share.seconds_per_trial
        for value in seconds:
            history.add(value, self._rules.min_gain)
        history.exhausted = history.exhausted or exhausted
        self._least_gain = self._find_least_gain()

    def _room(self, history: _WorkloadHistory) -> int:
        rules = self._rules
        out_of_patience = rules.patience is not None and history.trials_since_gain >= max(
            rules.patience, WARMUP_TRIALS
        )
        if history.exhausted or out_of_patience:
            return 0
        limits = [rules.trials_per_task or rules.trials]
        limits += [] if history.share.finished_after is None else [history.share.finished_after]
        return max(min(limits) - history.spent, 0)

    def _is_worthwhile(self, history: _WorkloadHistory) -> bool:
        return not history.is_at_roofline and self._expected_gain(history) >= self._least_gain

    def _find_least_gain(self) -> float:
        """Return the seconds per inference that a batch must be expected to save.

        Without `patience`, workloads with the smallest gains get no batch if these gains together are too small.
        """
        if not self._is_timed:
            return 0.0
        inference_s = sum(history.inference_s for history in self._histories.values())
        least_gain = _MIN_BATCH_GAIN * inference_s
        if not self._ends_by_trials:
            return least_gain
        gains = sorted(
            self._expected_gain(history)
            for history in self._histories.values()
            if self._room(history) > 0 and not history.is_at_roofline
        )
        together = zip(gains, itertools.accumulate(gains), strict=True)
        shown = (gain for gain, total in together if total >= _MIN_SHOWN_GAIN * inference_s)
        return max(least_gain, next(shown, math.inf))

    def _expected_gain(self, history: _WorkloadHistory) -> float:
        return history.expected_gain(by_trials=self._ends_by_trials)

    def _warmup_round(self, left: int) -> dict[str, int]:
        """Return one trial for each workload, or if all have one, the remaining warm-up trials."""
        for goal in (1, WARMUP_TRIALS):
            trials: dict[str, int] = {}
            for _ in range(goal):
                for key, history in self._histories.items():
                    extra = trials.get(key, 0)
                    if not self._is_worthwhile(history):
                        continue
                    if left and history.spent + extra < goal and self._room(history) > extra:
                        trials[key] = extra + 1
                        left -= 1
            if trials:
                return trials
        return {}

    def _batch_round(self, left: int) -> dict[str, int]:
        unfinished = [
            history
            for history in self._histories.values()
            if left > 0 and self._room(history) > 0 and self._is_worthwhile(history)
        ]
        if not unfinished:
            return {}
        # Of several equal gains, the first one wins, because histories are sorted.
        chosen = max(unfinished, key=self._expected_gain)
        return {chosen.share.key: min(BATCH_SIZE, left, self._room(chosen))}


# Longer intervals between two trials separate two searches.
_LONGEST_PAUSE_S: Final = 60.0
# The minimum number of intervals between trials from which their pace is estimated.
_MIN_INTERVALS: Final = 8
# A workload is searched again if its share of the model's time grew by more than this factor since its search ended:
# the earlier search was for a larger model.
_MAX_SHARE_GROWTH: Final = 2.0


# ---------------------------------------------------------------- forecast


class TrialForecast(NamedTuple):
    """How much of a search's budget the ledger already has, and how much it lacks.

    Attributes:
        budget: The number of trials of the search; `UNLIMITED_TRIALS` if only time limits it.
        minutes: The time limit of the search; None without a limit.
        kernels: The kernels of the search; None while they are unknown.
        reused: The number of trials of the budget that the ledger has.
        at_most: The maximum number of trials left to measure; fewer if the search converges.
        seconds_per_trial: The pace of the trials in the ledger; None if there are too few.
        finished_kernels: The kernels that get no trial, because an earlier search finished them.
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
        """The remaining seconds of `minutes`; None without a limit."""
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
    """Return the workloads for a budget, each in the state before its first trial.

    `schedules` is the version of the schedule rules, `search` the name of the search (see `search_name`).
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
            and time_shares[task.key] <= _MAX_SHARE_GROWTH * end.share
        )
        finished_after = len(known) if is_finished else None
        shares.append(
            WorkloadShare(task.key, task.calls, task.flops, *times, trial_s, finished_after)
        )
    return shares


def find_time_shares(
    tasks: Sequence[Task], records: Mapping[str, WorkloadRecords], schedules: int
) -> dict[str, float]:
    """Return each workload's share of the known untuned time; 1 if its own time is unknown."""
    known = {task.key: records[task.key].untuned_seconds(schedules) for task in tasks}
    times = {task.key: task.calls * (known[task.key] or 0.0) for task in tasks}
    total = sum(times.values())
    return {key: seconds / total if seconds else 1.0 for key, seconds in times.items()}


def end_name(search: str, rules: BudgetRules) -> str:
    """Return the key of a finished search in the ledger: its name and limits, without its budget."""
    limits = (rules.trials_per_task, rules.patience, rules.min_gain)
    return "/".join([search, *("-" if limit is None else f"{limit:g}" for limit in limits)])


def forecast_trials(
    tasks: Sequence[Task],
    records: Mapping[str, WorkloadRecords],
    rules: BudgetRules,
    schedules: int,
    search: str,
) -> TrialForecast:
    """Replay the budget on the ledger's trials, as a search does, but without measuring."""
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
    """Return the maximum number of trials left to measure, by the limits in all and per workload."""
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
    """Return the mean seconds between trials, by their times in the ledger; None if there are too few."""
    times = sorted(datetime.fromisoformat(trial.when).timestamp() for trial in trials)
    intervals = [after - before for before, after in itertools.pairwise(times)]
    intervals = [seconds for seconds in intervals if seconds < _LONGEST_PAUSE_S]
    # Trials end in batches, with few long and many short intervals: take the mean, not the median.
    return sum(intervals) / len(intervals) if len(intervals) >= _MIN_INTERVALS else None
