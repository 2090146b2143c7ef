"""How a budget is spread: to whoever gains most, and never beyond what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support import engine
from tvmflow.recipe import Retune
from tvmflow.retune import Standing, spread, up_to, with_standings, with_trials
from tvmflow.values import Plan, StageSpec


def plan(*names: str) -> Plan:
    tuned = [engine.recipe(name, tune={"trials": 4, "repeat": 1}) for name in names]
    return engine.plan_of(*(engine.planned(each) for each in tuned))


def tunes(made: Plan) -> list[StageSpec]:
    return [spec for spec in made.stages if spec.stage == "tune"]


class Ledger:
    """A search whose model takes 100 µs, and `rate` less for each hundred trials, down to `floor`."""

    def __init__(self, rates: Mapping[str, float], floor: float = 10.0, known: int = 0) -> None:
        self.rates, self.floor = rates, floor
        self.had = dict.fromkeys(rates, known)
        self.asked: list[str] = []

    def tune(self, spec: StageSpec) -> Mapping[str, Any]:
        trials, name = spec.settings["tune"]["trials"], spec.recipe
        measured = max(trials - self.had[name], 0)
        self.had[name] += measured
        self.asked.append(name)
        us = max(self.floor, 100 - self.rates[name] * self.had[name] / 100)
        work = [{"calls": 2, "untuned_us": 50.0, "best_us": us / 2}]
        return {
            "measured": measured,
            "stopped": "budget",
            "workloads": work,
            "known": self.had[name],
        }


def run(made: Plan, ledger: Ledger, **budget: Any) -> dict[str, Standing]:
    found = spread(tunes(made), Retune.model_validate(budget), ledger.tune, lambda _: None)
    return {each.spec.recipe: each for each in found}


def test_whoever_gains_more_is_given_more() -> None:
    ledger = Ledger({"slow": 1.0, "fast": 40.0})
    found = run(plan("slow", "fast"), ledger, trials=300, round=20)
    assert found["fast"].measured > 3 * found["slow"].measured
    assert {"slow", "fast"} == {*ledger.asked[:2]}
    assert found["fast"].bought > 1.5


def test_no_more_is_measured_than_the_budget_has() -> None:
    ledger = Ledger({"a": 10.0, "b": 10.0})
    found = run(plan("a", "b"), ledger, trials=101, round=25)
    # each begins with its recipe's own four
    assert sum(each.measured for each in found.values()) <= 101 + 2 * 4
    assert sum(each.measured for each in found.values()) >= 101


def test_it_ends_when_nothing_gains_any_more() -> None:
    ledger = Ledger({"a": 100.0}, floor=60.0)
    found = run(plan("a"), ledger, trials=10_000, round=20)
    assert found["a"].measured < 100


def test_a_round_begins_where_the_ledger_ends() -> None:
    ledger = Ledger({"a": 10.0}, known=500)
    found = run(plan("a"), ledger, trials=40, round=20)
    assert found["a"].measured == 40
    assert ledger.had["a"] == 540


def test_one_that_fails_is_given_no_other_round() -> None:
    found = spread(tunes(plan("a")), Retune(trials=10), lambda _: None, lambda _: None)
    assert found[0].ended == "failed"


def test_no_time_is_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 61.0, 62.0])
    monkeypatch.setattr("tvmflow.retune.time.monotonic", lambda: next(moments))
    ledger = Ledger({"a": 10.0})
    assert run(plan("a"), ledger, minutes=1.0)["a"].rounds == 1


def test_a_tuning_is_run_with_what_it_needs_alone() -> None:
    made = plan("a", "b")
    wanted = with_trials(tunes(made)[1], 99)
    part = up_to(made, wanted)
    assert [spec.id for spec in part.stages] == ["b:import", "b:extract_tasks/host", "b:tune/host"]
    assert part.stages[-1].settings["tune"]["trials"] == 99
    assert part.deliveries == ()


def test_the_plan_then_has_what_was_spent() -> None:
    made = plan("a", "b")
    after = with_standings(made, [Standing(tunes(made)[0], 77)])
    assert [spec.settings["tune"]["trials"] for spec in tunes(after)] == [77, 4]
    assert tunes(made)[0].settings["tune"]["trials"] == 4
