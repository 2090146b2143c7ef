"""What a plan will cost: from the history in the store, and never invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import plan_of, planned, recipe, target
from tests.support.facts import tune_facts
from tests.support.fake_executor import FakeExecutor
from tvmflow.core import packages
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.core.types import Decision, Plan
from tvmflow.engine.plan_text import (
    Estimate,
    add_up,
    estimate_search,
    estimate_stages,
    find_hits_with_new_weights,
    format_plan,
    range_text,
)
from tvmflow.engine.session import SessionOptions, run_plan
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.store.local import ActionRecord, LocalStore, Origin
from tvmflow.tuning.budget import TrialForecast


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "identity", lambda name: f"{name} 1")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def plan_for(*targets: str, **tune: Any) -> Plan:
    fields: dict[str, Any] = {"tune": tune} if tune else {}
    return plan_of(planned(recipe(**fields), *map(target, targets or ("host",))))


def remember(store: LocalStore, label: str, took_s: float, **facts: Any) -> None:
    """Leave the record of a past run of a stage of `net`."""
    origin = facts.pop("origin", None)
    preimage = {"stage": label, "seconds": took_s}
    record = ActionRecord((), facts, preimage, took_s, "2024-01-01T00:00:00Z", origin=origin)
    store.adopt(digest_of(preimage), record)
    store.remember("net", label, digest_of(preimage))


def undone(store: LocalStore, plan: Plan) -> PlanState:
    """Return the state of a plan whose model was never imported."""
    state = PlanState(store)
    state.decisions[plan.stages[0].id] = Decision(plan.stages[0].id, "run", "never ran")
    for spec in plan.stages[1:]:
        state.decide(spec)
    return state


def estimate(store: LocalStore, plan: Plan) -> dict[str, Estimate]:
    """Return the estimates of all stages by label, where none of them is up to date."""
    estimates = estimate_stages(plan, undone(store, plan))
    return {stage_id.partition(":")[2]: value for stage_id, value in estimates.items()}


def test_without_history_nothing_is_known(store: LocalStore) -> None:
    """Neither seconds nor bytes are made up."""
    estimates = estimate(store, plan_for())
    assert {entry.seconds for entry in estimates.values()} == {None}
    total = add_up(estimates.values())
    assert (total.stages, total.seconds, len(total.unknown)) == (0, None, 8)


def test_a_stage_takes_as_long_as_it_last_did(store: LocalStore) -> None:
    """A new target as long as the others; what another machine made says nothing."""
    remember(store, "build/host", 10.0)
    remember(store, "build/edge", 20.0)
    remember(store, "verify/host", 5.0, origin=Origin("a folder"))
    estimates = estimate(store, plan_for("host", "new"))
    assert estimates["build/host"][1:3] == ((10.0, 10.0), "same stage")
    assert estimates["build/new"][1:3] == ((10.0, 20.0), "other targets")
    assert estimates["verify/host"].seconds is None
    total = add_up(estimates.values())
    assert (total.stages, total.seconds) == (2, (20.0, 30.0))


def test_targets_that_differ_too_much_say_nothing(store: LocalStore) -> None:
    """A range from 1 s to 100 s is not an estimate."""
    remember(store, "build/a", 1.0)
    remember(store, "build/b", 100.0)
    assert estimate(store, plan_for("host"))["build/host"].seconds is None


def test_a_search_takes_its_trials_at_the_pace_of_the_last_one(store: LocalStore) -> None:
    """And what it took beside them; the kernels are not known before `extract_tasks`."""
    remember(store, "tune/host", 12.0, **tune_facts(seconds=4.0, measured=8, trials=8))
    tune = estimate(store, plan_for(trials=40))["tune/host"]
    assert tune.seconds == (8.0 + 40 * 0.5, 8.0 + 40 * 0.5)
    assert tune.trials == TrialForecast(40)


def test_a_limit_in_minutes_is_the_most(store: LocalStore) -> None:
    """It is known without any history, and holds against it."""
    tune = estimate(store, plan_for(minutes=4.0))["tune/host"]
    assert (tune.seconds, tune.basis) == ((240.0, 240.0), "time limit")
    remember(store, "tune/host", 12.0, **tune_facts(seconds=4.0, measured=8, trials=8))
    tune = estimate(store, plan_for(minutes=4.0, trials=10_000))["tune/host"]
    assert (tune.seconds, tune.basis) == ((240.0, 240.0), "time limit")
    tune = estimate(store, plan_for(minutes=4.0, trials=40))["tune/host"]
    assert (tune.seconds, tune.basis) == ((28.0, 28.0), "same stage")


def test_the_text_says_about_and_what_is_not_known(store: LocalStore) -> None:
    """A line for each stage, the trials, and the sum."""
    remember(store, "build/host", 10.4)
    plan = plan_for(trials=40)
    state = undone(store, plan)
    decisions = [state.decisions[spec.id] for spec in plan.stages]
    lines = format_plan(decisions, estimate_stages(plan, state), store.root)
    assert lines[5] == (
        "net:build/host          may run     about 10 s  after import and lower and extract_tasks and pick_best"
    )
    assert lines[8:] == [
        "net:tune/host: measures up to 40 trials; its kernels are known after the stages before it",
        "about 10 s for 1 stage one after the other, based on their last runs; no history yet for 7 more",
    ]


@pytest.mark.parametrize(
    ("trials", "text"),
    [
        (TrialForecast(40, None, ("a", "b"), ("b",), 10, 30), "measures up to 30 trials (10 more are in the ledger); 1 of 2 kernels new: b"),
        (TrialForecast(40, None, ("a",), ("a",), 0, 40), "measures up to 40 trials; 1 kernel, none with trials in the ledger"),
        (TrialForecast(40, None, ("a", "b"), (), 40, 0), "nothing to measure, 40 trials are in the ledger; 2 kernels, all with trials in the ledger"),
        (TrialForecast(10_000_000, 4.0, ("a",), ("a",), 0, 10_000_000), "measures as many trials as fit in 4 min; 1 kernel, none with trials in the ledger"),
    ],
)  # fmt: skip
def test_a_search_is_described_by_its_trials(trials: TrialForecast, text: str) -> None:
    """What it measures, what the ledger has, and which kernels are new."""
    lines = format_plan([], {"tune": Estimate("net:tune/host", trials=trials)}, "/")
    assert lines[0] == f"net:tune/host: {text}"


def test_estimates_have_no_digits_that_they_do_not_know() -> None:
    """Seconds below a minute, five seconds above it."""
    assert range_text((12.31, 12.31)) == "about 12 s"
    assert range_text((0.2, 0.2)) == "about 1 s"
    assert range_text((71.0, 183.0)) == "1 min 10 s to 3 min 05 s"
    assert range_text((119.0, 121.0)) == "about 2 min"
    assert range_text((7300.0, 7300.0)) == "about 2 h 01 min"


def undelivered(folder: Path, **fields: Any) -> Plan:
    """Return the plan of a recipe in a folder, whose results stay in the store."""
    plan = plan_of(planned(recipe(**fields), target("host"), folder=str(folder)))
    return plan._replace(deliveries=())


def test_what_new_weights_keep_is_known_before_anything_runs(
    store: LocalStore, tmp_path: Path
) -> None:
    """Import makes the same architecture again, so that the search is a hit; what needs the weights runs."""
    model = tmp_path / "net.onnx"
    plan = undelivered(tmp_path)
    executor = FakeExecutor()

    def run() -> list[str]:
        executor.ran.clear()
        run_plan(plan, store, executor, lambda _: None, SessionOptions())
        return [name.partition("/")[2].replace("+", "/") for name in executor.ran]

    model.write_text("weights 1")
    assert len(run()) == 8
    model.write_text("weights 2")
    kept = find_hits_with_new_weights(plan, evaluate_plan(plan, store))
    labels = {stage_id.partition(":")[2] for stage_id in kept}
    assert labels == {"lower/host", "extract_tasks/host", "tune/host", "pick_best/host"}

    state = evaluate_plan(plan, store)
    decisions = [state.decisions[spec.id] for spec in plan.stages]
    lines = format_plan(decisions, estimate_stages(plan, state), store.root, kept)
    assert [line for line in lines if line.endswith("; kept if only the weights changed")] == lines[
        1:5
    ]
    assert any(" 4 stages if only the weights of the model changed" in line for line in lines)
    assert any(line.startswith("otherwise about ") and " 8 stages" in line for line in lines)


def test_another_shape_is_no_change_of_weights(store: LocalStore, tmp_path: Path) -> None:
    """Nothing is promised where more than the content of the model changed."""
    (tmp_path / "net.onnx").write_text("weights")
    run_plan(undelivered(tmp_path), store, FakeExecutor(), lambda _: None, SessionOptions())
    second = undelivered(tmp_path, inputs={"x": {"shape": [1, 2]}})
    assert find_hits_with_new_weights(second, evaluate_plan(second, store)) == frozenset()


def test_a_search_that_was_interrupted_takes_what_is_left_of_its_minutes() -> None:
    """And the line about it says what was spent."""
    trials = TrialForecast(
        UNLIMITED_TRIALS, 5.0, ("a", "b"), (), 40, UNLIMITED_TRIALS, 3.0, ("a",), 120.0
    )
    estimate = estimate_search(Estimate("net:tune/host"), trials, [])
    assert (estimate.seconds, estimate.basis) == ((180.0, 180.0), "time limit")
    assert format_plan([], {"tune": estimate._replace(trials=trials)}, "/")[0] == (
        "net:tune/host: measures as many trials as fit in 3 min (40 more are in the ledger, 2 min of the "
        "budget); 2 kernels, all with trials in the ledger; 1 kernel had a share of this budget before"
    )
