"""Retuning: a tuning budget for several recipes and targets, spent in rounds where it gains most.

Each round gives one `tune` stage more trials and compares its estimated latency: calls times the best time of each
kernel. The next round goes to the stage with the largest gain in its last round (a greedy bandit), because gains
decrease and the last gain predicts the next. An exhausted search gets no more rounds.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.types import Plan, StageSpec
from tvmflow.engine.session import select_stages
from tvmflow.recipe import Retune
from tvmflow.tuning.tuning_job import TuneFacts, WorkloadFacts

_log = logging.getLogger(__name__)

# Limit of extensions of a round whose trials are all in the ledger already.
_MAX_EXTENSIONS: Final = 8

_STOP_REASONS: Final[Mapping[str, str]] = {
    "exhausted": "its search spaces are exhausted",
    "converged": "nothing is left to gain",
}

TuneStage = Callable[[StageSpec], TuneFacts | None]
"""Runs a `tune` stage with its inputs; returns None if it fails."""


class TuningProgress(NamedTuple):
    """The progress of one recipe and target, with its `tune` stage.

    `trials` is the budget of all rounds, `measured` the spent part. `first_us` and `estimated_us` are estimated
    latencies before the first round and now. `gain` is the share of the latency that the last round saved.
    """

    spec: StageSpec
    trials: int
    measured: int = 0
    rounds: int = 0
    first_us: float | None = None
    estimated_us: float | None = None
    gain: float | None = None
    stop_reason: str = ""

    @property
    def speedup(self) -> float:
        """The first estimate divided by the current estimate; 1 if either is unknown."""
        return self.first_us / self.estimated_us if self.first_us and self.estimated_us else 1.0


def spend_budget(
    specs: Sequence[StageSpec],
    budget: Retune,
    tune: TuneStage,
    on_round: Callable[[TuningProgress], None],
) -> list[TuningProgress]:
    """Tune in rounds until the budget is spent or gains are too small; return each stage's progress."""
    progress = {spec.id: TuningProgress(spec, spec.settings["tune"]["trials"]) for spec in specs}
    started = time.monotonic()
    while True:
        trials = _trials_left(progress.values(), budget, time.monotonic() - started)
        chosen = _choose_next(list(progress.values()), budget.min_gain)
        if trials <= 0 or chosen is None:
            return list(progress.values())
        _log.debug("next round: %s, whose last gain is %s", chosen.spec.id, chosen.gain)
        current = _run_round(chosen, min(budget.round, trials), tune)
        progress[current.spec.id] = current
        on_round(current)


def _trials_left(progress: Iterable[TuningProgress], budget: Retune, seconds: float) -> int:
    if budget.minutes is not None and seconds >= budget.minutes * 60:
        return 0
    if budget.trials is None:
        return budget.round
    return budget.trials - sum(row.measured for row in progress)


def _choose_next(progress: Sequence[TuningProgress], min_gain: float) -> TuningProgress | None:
    """Return the stage of the next round: each stage once, then the stage with the largest last gain."""
    running = [row for row in progress if not row.stop_reason]
    gains = [math.inf if row.gain is None else row.gain for row in running]
    best = max(gains, default=-math.inf)
    return running[gains.index(best)] if running and best >= min_gain else None


def _run_round(progress: TuningProgress, trials: int, tune: TuneStage) -> TuningProgress:
    total, facts = progress.trials, None
    for _ in range(_MAX_EXTENSIONS):
        total += trials
        facts = tune(with_trials(progress.spec, total))
        if facts is None or facts.measured or facts.stopped not in ("budget", "finished"):
            break
        # The ledger had all trials of this budget, so the round continues beyond them.
        total = max(total, facts.known)
    if facts is None:
        return progress._replace(stop_reason="failed")
    current = _estimate_us(facts, lambda workload: workload.best_us)
    untuned = _estimate_us(facts, lambda workload: None)
    # The first round is compared with the untuned model.
    previous = progress.estimated_us if progress.estimated_us is not None else untuned
    return progress._replace(
        trials=total,
        measured=progress.measured + facts.measured,
        rounds=progress.rounds + 1,
        first_us=progress.first_us if progress.first_us is not None else untuned,
        estimated_us=current,
        gain=0.0 if not previous or current is None else max(0.0, 1 - current / previous),
        stop_reason=_STOP_REASONS.get(facts.stopped, ""),
    )


def _estimate_us(
    facts: TuneFacts, tuned_us: Callable[[WorkloadFacts], float | None]
) -> float | None:
    """Return the µs per inference in kernels with known times, or None."""
    total = 0.0
    for workload in facts.workloads:
        times = [us for us in (workload.untuned_us, tuned_us(workload)) if us is not None]
        if times:
            total += workload.calls * min(times)
    return total or None


def with_trials(spec: StageSpec, trials: int) -> StageSpec:
    """Return a `tune` stage with another budget."""
    tune = {**spec.settings["tune"], "trials": trials}
    return spec._replace(settings={**spec.settings, "tune": tune})


def with_spent_trials(plan: Plan, progress: Sequence[TuningProgress]) -> Plan:
    """Set the spent budgets in a plan."""
    budgets = {row.spec.id: row.trials for row in progress}
    stages = (
        with_trials(spec, budgets[spec.id]) if spec.id in budgets else spec for spec in plan.stages
    )
    return plan._replace(stages=tuple(stages))


def select_stage(plan: Plan, stage: StageSpec) -> Plan:
    """Return a plan of `stage`, which replaces the planned stage with its id, and its inputs."""
    stages = tuple(stage if spec.id == stage.id else spec for spec in plan.stages)
    return select_stages(Plan(stages, ()), [stage.id])
