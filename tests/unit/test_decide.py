"""Which stages are up to date, and why not: the one truth behind plan, explain and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import COMPILE, plan_of, planned, recipe
from tvmflow.decide import Survey
from tvmflow.errors import RecipeError
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.values import Plan, StageSpec


class World:
    """A store, a recipe of four stages, and a pretence of running them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        (folder / "net.onnx").write_bytes(b"one")
        self.fields: dict[str, Any] = {}

    def plan(self) -> Plan:
        made = recipe(**self.fields)
        return plan_of(planned(made, stages=COMPILE, folder=str(self.folder)))

    def survey(self) -> Survey:
        return Survey(self.store, FileDigests(self.store))

    def run(self) -> list[str]:
        """Make what is not there; the stages that were made."""
        survey, made = self.survey(), []
        for spec in self.plan().stages:
            if survey.decide(spec).kind == "run":
                self._make(survey, spec)
                made.append(spec.stage)
            key = survey.keys[spec.id].digest
            self.store.remember(spec.recipe, spec.label, key)
        return made

    def _make(self, survey: Survey, spec: StageSpec) -> None:
        key = survey.keys[spec.id]
        with self.store.claim(key.digest) as slot:
            names = {
                "import": ("model.json", "params.safetensors", "signature.json"),
                "build": ("kernels.json", "lib0.o"),
                "export": ("module.tvmflow", "net.tvmflow"),
                "verify": ("verdict.json",),
            }[spec.stage]
            content = (self.folder / "net.onnx").read_bytes().strip()
            for name in names:
                # a stage's output depends on the model's meaning and on its settings
                Path(slot.out, name).write_bytes(content + repr(spec.settings).encode())
            survey.artifacts[spec.id] = self.store.publish(slot, key, {}, 0.1)

    def reasons(self) -> dict[str, str]:
        survey = self.survey()
        survey.look(self.plan())
        return {name.partition(":")[2]: each.reason for name, each in survey.decisions.items()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_first_nothing_is_there_then_everything(world: World) -> None:
    """Stages behind one that must run cannot be told yet."""
    assert world.reasons() == {
        "import": "never ran",
        "build/host": "after import",
        "export/host": "after import and build",
        "verify/host": "after import and build and export",
    }
    assert world.run() == list(COMPILE)
    assert set(world.reasons().values()) == {"unchanged"}
    assert world.run() == []


def test_a_change_stops_where_its_effect_stops(world: World) -> None:
    """The model's file has another byte and the same meaning: import runs, and nothing below."""
    world.run()
    (world.folder / "net.onnx").write_bytes(b"one ")
    assert world.reasons()["import"].startswith("the content of file 'model' changed")
    assert world.run() == ["import"]
    (world.folder / "net.onnx").write_bytes(b"two")
    assert world.run() == list(COMPILE)


def test_going_back_runs_nothing(world: World) -> None:
    """Both results are kept: A, B, A is two runs."""
    world.run()
    world.fields = {"verify": {"rtol": 0.5}}
    assert world.reasons()["verify/host"] == "verify.rtol null -> 0.5"
    assert world.run() == ["verify"]
    world.fields = {}
    assert world.run() == []


def test_a_result_that_is_gone_is_made_again(world: World) -> None:
    """A lost file is a reason of its own, and what was below it stays."""
    world.run()
    for path in Path(world.store.root, "actions").rglob("*"):
        if path.is_file() and '"build"' in path.read_text():
            path.unlink()
    assert world.reasons()["build/host"] == "its result is no longer in the store"
    assert world.run() == ["build"]


def test_another_package_is_a_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old and new identity are told."""
    world.run()
    monkeypatch.setattr(Survey, "_tool", lambda _, name: f"9.9+{name}")
    assert "apache-tvm" in world.reasons()["import"]
    assert "9.9+apache-tvm" in world.reasons()["import"]


def test_many_causes_are_cut_short_and_kept(world: World) -> None:
    """A line names three; the decision holds all."""
    world.run()
    world.fields = {"verify": {"rtol": 0.5, "atol": 0.5, "samples": 9, "seed": 9, "repeat": 9}}
    survey = world.survey()
    survey.look(world.plan())
    decision = survey.decisions["net:verify/host"]
    assert decision.reason.endswith("; and 2 more")
    assert len(decision.causes) == 5


def test_a_missing_file_is_told_with_its_place(world: World) -> None:
    """It may vanish between planning and deciding."""
    world.run()
    (world.folder / "net.onnx").unlink()
    with pytest.raises(RecipeError, match=r"net\.yaml:model\.onnx: .*net\.onnx: No such file"):
        world.reasons()
