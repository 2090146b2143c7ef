"""A stage is one module and one line in the registry: all other code reads its declarations."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.support.engine import planned, recipe, target
from tests.support.small_runs import store_in
from tvmflow.core.codec import to_json
from tvmflow.core.types import Plan, RunTraits, StageCall, StageResult
from tvmflow.engine import session
from tvmflow.engine.plan_text import explain_stage
from tvmflow.engine.summary import summary
from tvmflow.executors import cluster_worker
from tvmflow.executors.stage_worker import run_stage
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.plan import make_plan
from tvmflow.recipe import Recipe
from tvmflow.stages import STAGES, pipeline_stages, required_stages
from tvmflow.stages.base import Files, KnownFacts, StageContext, StageSettings, StageTraits
from tvmflow.targets.resolve import ResolvedTarget

TRAITS = StageTraits(
    version=7,
    scope="machine",
    needs={"origin": ("number.txt",)},
    tools=("psutil",),
    timeout_s=120.0,
    run=RunTraits(measures=True),
)


class ToySettings(StageSettings):
    """The number of cores."""

    cores: int
    note: str = ""

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """This machine's CPU."""
        return ("cpu",)


def settings(recipe: Recipe, target: ResolvedTarget) -> ToySettings:
    return ToySettings(cores=target.threads)


class ToyFacts(NamedTuple):
    """What was computed."""

    product: int


class OriginFacts(NamedTuple):
    """What it is computed from."""

    number: int


def run(settings: ToySettings, context: StageContext) -> ToyFacts:
    """Multiply the number of another stage by that of cores."""
    product = int(context.inputs["origin/number.txt"].read_text()) * settings.cores
    (context.out / "product.txt").write_text(str(product))
    return ToyFacts(product)


def describe(facts: ToyFacts, inputs: KnownFacts) -> list[str]:
    origin = inputs.get(OriginFacts)
    assert origin is not None
    return [f"{origin.number} times the cores is {facts.product}"]


def explain(facts: ToyFacts) -> list[str]:
    return [f"the product is {facts.product}"]


def deliveries(recipe: Recipe, target: ResolvedTarget) -> Files:
    return (("product.txt", f"{recipe.name}.txt"),)


class _Origin(ModuleType):
    """A second stage, which the first needs."""

    TRAITS = StageTraits(version=1, scope="model", tools=(), timeout_s=60.0)

    @staticmethod
    def settings(recipe: Recipe, target: Any) -> StageSettings:
        return StageSettings()

    @staticmethod
    def run(settings: StageSettings, context: StageContext) -> OriginFacts:
        (context.out / "number.txt").write_text("21")
        return OriginFacts(21)

    @staticmethod
    def describe(facts: OriginFacts, inputs: KnownFacts) -> list[str]:
        return []

    @staticmethod
    def explain(facts: OriginFacts) -> list[str]:
        return []

    @staticmethod
    def deliveries(recipe: Recipe, target: Any) -> Files:
        return ()


class InThisProcess:
    """An executor that runs stages as a worker does, in this process."""

    slots = 1
    cancelled = False

    def start(self) -> None:
        return

    def execute(self, call: StageCall, log: Path, on_event: Any) -> StageResult:
        return StageResult("ok", "", "", run_stage(to_json(call), on_event), 0.1, str(log))

    def cancel(self) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan with the two stages, after they were added."""
    monkeypatch.setitem(STAGES, "origin", _Origin("origin"))
    monkeypatch.setitem(STAGES, "toy", sys.modules[__name__])
    return make_plan([planned(recipe(), target(threads=2), stages=("origin", "toy"))])


def test_a_pipeline_may_name_it(plan: Plan) -> None:
    """After the stage that it needs."""
    assert pipeline_stages()[-2:] == ("origin", "toy")
    assert required_stages("toy") == ("origin",)


def test_it_is_planned_with_all_that_it_declares(plan: Plan) -> None:
    """Version, settings, needs, tools, time limit, traits, devices and deliveries."""
    origin, toy = plan.stages
    assert (origin.id, toy.id) == ("net:origin", "net:toy/host")
    assert [(need.stage_id, need.files) for need in toy.needs] == [("net:origin", ("number.txt",))]
    assert (toy.version, toy.settings, toy.tools) == (7, {"cores": 2}, ("psutil",))
    assert (toy.timeout_s, toy.traits, toy.devices) == (120.0, TRAITS.run, ("cpu",))
    (delivery,) = plan.deliveries
    assert (delivery.stage_id, delivery.files) == ("net:toy/host", (("product.txt", "net.txt"),))


def test_it_runs_is_reported_delivered_and_explained(plan: Plan, tmp_path: Path) -> None:
    """As every other stage."""
    store, dist = store_in(tmp_path / "store"), tmp_path / "dist"
    options = session.SessionOptions(1, False, str(dist))
    report = session.run_plan(plan, store, InThisProcess(), lambda event: None, options)
    assert [stage.outcome for stage in report.stages] == ["ran", "ran"]
    assert "net:toy/host: 21 times the cores is 42" in summary(report, verbose=True).splitlines()
    assert (dist / "net" / "host" / "net.txt").read_text() == "42"
    state = evaluate_plan(plan, store)
    artifact = state.artifacts["net:toy/host"]
    decision, key = state.decisions["net:toy/host"], state.keys["net:toy/host"]
    lines = explain_stage(decision, key, artifact.facts).splitlines()
    assert "  the product is 42" in lines
    assert lines[0] == "toy/host: up to date"


def test_a_cluster_gives_it_to_a_worker_with_its_tools_and_its_cpu(plan: Plan) -> None:
    """By the resources of dask."""
    host = cluster_worker.describe_this_host()
    toy = plan.stages[1]
    call = StageCall(
        "toy", {}, {}, "", "", "", "", 1.0, dict.fromkeys(toy.tools, "1+x"), toy.traits, toy.devices
    )
    required = cluster_worker.required_resources(call, host)
    assert f"psutil:{host.tools['psutil']}" in required
    assert f"cpu:{host.cpu}" in required
    assert required.keys() <= cluster_worker.offered_resources(host).keys()
