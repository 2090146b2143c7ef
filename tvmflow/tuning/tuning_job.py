"""The request for a tuning, its options, and its result."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tvmflow.tuning.budget import BudgetRules
from tvmflow.tuning.measure import Timing

StopReason = Literal["budget", "time", "exhausted", "converged", "finished", "no search"]


class Task(NamedTuple):
    """A workload to tune.

    Attributes:
        key: The workload.
        name: The name of its kernel in the model.
        calls: Calls in one inference.
        flops: Arithmetic operations of one call.
        mod: The saved module of the workload.
    """

    key: str
    name: str
    calls: int
    flops: float
    mod: str


def search_name(strategy: str, seed: int) -> str:
    """Return the name of a search in the ledger's mark of an exhausted space."""
    return f"{strategy}/{seed}"


class SearchOptions(NamedTuple):
    """The options of a search.

    Attributes:
        rules: The limits of the budget.
        seed: The seed of the search.
        strategy: `evolutionary` or `replay-trace`.
        cost_model: `xgb`, `mlp` or `random`.
        timing: How to time a candidate.
        trial_timeout_s: Seconds after which a trial is given up.
    """

    rules: BudgetRules
    seed: int
    strategy: str
    cost_model: str
    timing: Timing
    trial_timeout_s: float

    @property
    def name(self) -> str:
        """The search in the ledger's mark of an exhausted space."""
        return search_name(self.strategy, self.seed)


class WorkloadResult(NamedTuple):
    """The outcome for one workload.

    Attributes:
        trials: Trials of the budget that it has had.
        measured: How many of them this run measured; the ledger had the others.
        failed: Failures among all its trials in the ledger.
        best_s: Seconds of its fastest trial; None when none worked.
        spread: The spread of that trial.
        exhausted: No schedule is left to try.
        first_failure: Phase and message of its first failure; otherwise empty.
        seconds: Time that this run spent on it.
        untuned_s: Seconds of one untuned call; None when that could not be measured.
        known: All its trials in the ledger.
        least_s: Seconds of one call at the roofline of the machine; 0 when not known.
        at_roofline: It is about as fast as the machine allows, tuned or not.
        finished: It got no trial, because it had its share of the budget in an earlier search.
    """

    key: str
    name: str
    calls: int
    flops: float
    trials: int
    measured: int
    failed: int
    best_s: float | None
    spread: float
    exhausted: bool
    first_failure: str
    seconds: float
    untuned_s: float | None = None
    known: int = 0
    least_s: float = 0.0
    at_roofline: bool = False
    finished: bool = False


class TuningResult(NamedTuple):
    """The outcome of a tuning.

    Attributes:
        workloads: The outcome for each workload, those with most work per inference first.
        stopped: What ended it: the budget, the time, that all search spaces are exhausted, that
            nothing worth a trial is left to gain, that the workloads which are left had their share of
            the budget in an earlier search, or that nothing was to be measured.
        drift: See `DriftMonitor`.
        repairs: A sentence for each repair of the ledger and each search that failed.
        starting_points: How many schedules were measured first because they are good on near targets.
        near_targets: These targets, for people.
        spent_s: Seconds of the budget that are spent, by earlier searches on what is reused of them too.
    """

    workloads: list[WorkloadResult]
    stopped: StopReason
    drift: float
    repairs: list[str]
    starting_points: int = 0
    near_targets: tuple[str, ...] = ()
    spent_s: float = 0.0
