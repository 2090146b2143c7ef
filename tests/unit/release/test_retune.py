"""A tuning budget goes to the recipe that gains most, and is never exceeded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support import engine
from tests.support.facts import tune_facts, workload_facts
from tvmflow.core.codec import from_json
from tvmflow.core.types import Plan, StageSpec
from tvmflow.recipe import Retune
from tvmflow.release.retune import (
    TuningProgress,
    select_stage,
    spend_budget,
    with_spent_trials,
    with_trials,
)
from tvmflow.tuning.tuning_job import TuneFacts


def plan(*names: str) -> Plan:
    tuned = [engine.recipe(name, tune={"trials": 4, "repeat": 1}) for name in names]
    return engine.plan_of(*(engine.planned(recipe) for recipe in tuned))


def tunes(made: Plan) -> list[StageSpec]:
    return [spec for spec in made.stages if spec.stage == "tune"]


class Ledger:
    """A search whose model takes 100 µs, and `rate` less for each hundred trials, down to `floor`."""

    def __init__(self, rates: Mapping[str, float], floor: float = 10.0, known: int = 0) -> None:
        self.rates, self.floor = rates, floor
        self.trials = dict.fromkeys(rates, known)
        self.requests: list[str] = []

    def tune(self, spec: StageSpec) -> TuneFacts:
        trials, name = spec.settings["tune"]["trials"], spec.recipe
        measured = max(trials - self.trials[name], 0)
        self.trials[name] += measured
        self.requests.append(name)
        us = max(self.floor, 100 - self.rates[name] * self.trials[name] / 100)
        workload = workload_facts("conv", calls=2, untuned_us=50.0, best_us=us / 2)
        facts = tune_facts(measured=measured, known=self.trials[name], workloads=[workload])
        return from_json(TuneFacts, facts)


def run(made: Plan, ledger: Ledger, **budget: Any) -> dict[str, TuningProgress]:
    rows = spend_budget(tunes(made), Retune.model_validate(budget), ledger.tune, lambda _: None)
    return {row.spec.recipe: row for row in rows}


def test_the_recipe_that_gains_more_gets_more_trials() -> None:
    ledger = Ledger({"slow": 1.0, "fast": 40.0})
    progress = run(plan("slow", "fast"), ledger, trials=300, round=20)
    assert progress["fast"].measured > 3 * progress["slow"].measured
    assert {"slow", "fast"} == {*ledger.requests[:2]}
    assert progress["fast"].speedup > 1.5


def test_the_budget_is_not_exceeded() -> None:
    ledger = Ledger({"a": 10.0, "b": 10.0})
    progress = run(plan("a", "b"), ledger, trials=101, round=25)
    # Every recipe starts with its own four trials.
    assert sum(row.measured for row in progress.values()) <= 101 + 2 * 4
    assert sum(row.measured for row in progress.values()) >= 101


def test_retuning_ends_when_no_recipe_gains() -> None:
    ledger = Ledger({"a": 100.0}, floor=60.0)
    progress = run(plan("a"), ledger, trials=10_000, round=20)
    assert progress["a"].measured < 100


def test_a_round_starts_where_the_ledger_ends() -> None:
    ledger = Ledger({"a": 10.0}, known=500)
    progress = run(plan("a"), ledger, trials=40, round=20)
    assert progress["a"].measured == 40
    assert ledger.trials["a"] == 540


def test_a_failed_stage_gets_no_further_round() -> None:
    (row,) = spend_budget(tunes(plan("a")), Retune(trials=10), lambda _: None, lambda _: None)
    assert row.stop_reason == "failed"


def test_no_round_starts_after_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 61.0, 62.0])
    monkeypatch.setattr("tvmflow.release.retune.time.monotonic", lambda: next(moments))
    ledger = Ledger({"a": 10.0})
    assert run(plan("a"), ledger, minutes=1.0)["a"].rounds == 1


def test_a_selected_stage_is_run_with_only_the_stages_that_it_needs() -> None:
    made = plan("a", "b")
    part = select_stage(made, with_trials(tunes(made)[1], 99))
    assert [spec.id for spec in part.stages] == [
        "b:import",
        "b:lower/host",
        "b:extract_tasks/host",
        "b:tune/host",
    ]
    assert part.stages[-1].settings["tune"]["trials"] == 99
    assert part.deliveries == ()


def test_the_plan_gets_the_spent_trials() -> None:
    made = plan("a", "b")
    after = with_spent_trials(made, [TuningProgress(tunes(made)[0], 77)])
    assert [spec.settings["tune"]["trials"] for spec in tunes(after)] == [77, 4]
    assert tunes(made)[0].settings["tune"]["trials"] == 4
