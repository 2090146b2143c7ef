"""Spreads a tuning budget over recipes and targets, round by round, to those whose models gain most by it.

Each round gives one of them more trials and looks at what that bought: how much faster its model
became, in the estimate that the search itself has (calls times the best time of each kernel). The
next round goes to the one that bought most when it last had one, a greedy bandit: the gains of a
search fall as it goes on, so that the last gain of each says what the next one may be. One that
has nothing left to try is out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.recipe import Retune
from tvmflow.values import Plan, StageSpec

Tune = Callable[[StageSpec], Mapping[str, Any] | None]
"""Runs a `tune` stage with what it needs; its facts, or None when it did not succeed."""


# How often a round is begun again because the ledger had all of its trials.
_LOOKS: Final = 8


class Standing(NamedTuple):
    """Where the tuning of a recipe's target stands: trials it may have, µs a call by its kernels' best times."""

    spec: StageSpec
    trials: int
    measured: int = 0
    rounds: int = 0
    first_us: float | None = None
    us: float | None = None
    gain: float = math.inf
    ended: str = ""

    @property
    def bought(self) -> float:
        """How many times as fast the estimate became."""
        return self.first_us / self.us if self.first_us and self.us else 1.0


def spread(
    specs: Sequence[StageSpec],
    budget: Retune,
    tune: Tune,
    on_round: Callable[[Standing], None],
) -> list[Standing]:
    """Tune until the budget is spent or nothing gains any more; where each then stands, in the order of `specs`."""
    standings = {spec.id: Standing(spec, spec.settings["tune"]["trials"]) for spec in specs}
    started = time.monotonic()
    while True:
        left = _left(standings.values(), budget, time.monotonic() - started)
        following = _next(list(standings.values()), budget.min_gain)
        if left <= 0 or following is None:
            return list(standings.values())
        standing = _round(following, min(budget.round, left), tune)
        standings[standing.spec.id] = standing
        on_round(standing)


def _left(standings: Iterable[Standing], budget: Retune, seconds: float) -> int:
    """Trials that may still be measured."""
    if budget.minutes is not None and seconds >= budget.minutes * 60:
        return 0
    if budget.trials is None:
        return budget.round
    return budget.trials - sum(each.measured for each in standings)


def _next(standings: Sequence[Standing], min_gain: float) -> Standing | None:
    """Who is given the next round: first everyone once, then whoever bought most for a trial the last time."""
    able = [each for each in standings if not each.ended]
    best = max(able, key=lambda each: each.gain, default=None)
    return None if best is None or best.gain < min_gain else best


def _round(standing: Standing, trials: int, tune: Tune) -> Standing:
    wanted, facts = standing.trials, None
    for _ in range(_LOOKS):
        wanted += trials
        facts = tune(with_trials(standing.spec, wanted))
        if facts is None or facts["measured"] or facts["stopped"] != "budget":
            break
        # all of that was in the ledger: a round begins where it ends
        wanted = max(wanted, facts.get("known", 0))
    if facts is None:
        return standing._replace(ended="failed")
    now, untuned = _estimate(facts, "best_us"), _estimate(facts, None)
    # without an earlier round, the way from no tuning at all is what it bought
    before = standing.us if standing.us is not None else untuned
    gain = 0.0 if not before or now is None else max(0.0, 1 - now / before)
    ended = "nothing is left to try" if facts["stopped"] == "end" else ""
    return standing._replace(
        trials=wanted,
        measured=standing.measured + facts["measured"],
        rounds=standing.rounds + 1,
        first_us=standing.first_us if standing.first_us is not None else untuned,
        us=now,
        gain=gain,
        ended=ended,
    )


def _estimate(facts: Mapping[str, Any], field: str | None) -> float | None:
    """µs of one inference in the kernels that have a time: with the best schedule known, or untuned."""
    total = 0.0
    for each in facts["workloads"]:
        times = [each.get("untuned_us"), each.get(field) if field else None]
        known = [value for value in times if value is not None]
        if known:
            total += each.get("calls", 1) * min(known)
    return total or None


def with_trials(spec: StageSpec, trials: int) -> StageSpec:
    """The same tuning with another budget."""
    tune = {**spec.settings["tune"], "trials": trials}
    return spec._replace(settings={**spec.settings, "tune": tune})


def with_standings(plan: Plan, standings: Sequence[Standing]) -> Plan:
    """The plan with the budgets that were spent."""
    budgets = {each.spec.id: each.trials for each in standings}
    stages = (
        with_trials(spec, budgets[spec.id]) if spec.id in budgets else spec for spec in plan.stages
    )
    return plan._replace(stages=tuple(stages))


def up_to(plan: Plan, last: StageSpec) -> Plan:
    """Only `last`, in place of the stage of its name, and those that it needs; nothing is delivered."""
    stages = {spec.id: spec for spec in plan.stages}
    wanted, open_ = {last.id}, [last]
    for spec in open_:
        open_ += [stages[need.stage_id] for need in spec.needs if need.stage_id not in wanted]
        wanted |= {need.stage_id for need in spec.needs}
    kept = (last if spec.id == last.id else spec for spec in plan.stages if spec.id in wanted)
    return Plan(tuple(kept), ())
