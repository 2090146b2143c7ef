"""Decisions: which stages are up to date, and why others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.engine import COMPILE, plan_of, planned, recipe
from tvmflow.core import packages
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Plan, StageSpec
from tvmflow.planning.decisions import PlanState, _describe_kernels, _shorten
from tvmflow.store.local import LocalStore


class FakeRuns:
    """A store, a recipe of four stages, and a fake run of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        (folder / "net.onnx").write_bytes(b"one")
        self.fields: dict[str, Any] = {}
        self.nodes: list[str] = []
        self.shape: tuple[int, ...] = (4,)

    def plan(self) -> Plan:
        made = recipe(**self.fields)
        return plan_of(planned(made, stages=COMPILE, folder=str(self.folder)))

    def new_state(self) -> PlanState:
        return PlanState(self.store)

    def run(self) -> list[str]:
        """Make missing results, and return the stages that were run."""
        state, made = self.new_state(), []
        for spec in self.plan().stages:
            if state.decide(spec).kind == "run":
                self._make(state, spec)
                made.append(spec.stage)
            key = state.keys[spec.id].digest
            self.store.remember(spec.recipe, spec.label, key)
        return made

    def _make(self, state: PlanState, spec: StageSpec) -> None:
        key = state.keys[spec.id]
        with self.store.claim(key.digest) as claim:
            names = {
                "import": ("model.json", "params.safetensors", "signature.json"),
                "lower": ("lowered.json",),
                "build": ("kernels.json", "lib0.o"),
                "export": ("module.tvmflow", "net.tvmflow"),
                "verify": ("verdict.json",),
            }[spec.stage]
            content = (self.folder / "net.onnx").read_bytes().strip()
            facts: dict[str, Any] = {}
            if spec.stage == "import":
                counts = {"weights": 1, "weight_bytes": 4, "operators": {}}
                facts = {**counts, "nodes": self.nodes, "inputs": [], "outputs": []}
            for name in names:
                # The output of a stage depends on the model's meaning and on its settings.
                Path(claim.out, name).write_bytes(content + repr(spec.settings).encode())
            if spec.stage == "import":
                save_file({"w": np.zeros(self.shape)}, Path(claim.out, names[1]))
            state.artifacts[spec.id] = self.store.publish(claim, key, facts, 0.1)

    def reasons(self) -> dict[str, str]:
        state = self.new_state()
        state.decide_all(self.plan())
        return {
            stage_id.partition(":")[2]: decision.reason
            for stage_id, decision in state.decisions.items()
        }


@pytest.fixture
def runs(tmp_path: Path) -> FakeRuns:
    return FakeRuns(tmp_path)


def test_nothing_is_up_to_date_before_the_first_run_and_everything_after_it(runs: FakeRuns) -> None:
    """Stages after one that must run wait for its result."""
    assert runs.reasons() == {
        "import": "never ran",
        "lower/host": "after import",
        "build/host": "after import and lower",
        "export/host": "after import and build",
        "verify/host": "after import and lower and build and export",
    }
    assert runs.run() == ["import", "lower", "build", "export", "verify"]
    assert set(runs.reasons().values()) == {"unchanged"}
    assert runs.run() == []


def test_a_change_runs_no_stage_whose_inputs_stay_the_same(runs: FakeRuns) -> None:
    """Early cutoff: another byte in the file of the same model runs import, and nothing after it."""
    runs.run()
    (runs.folder / "net.onnx").write_bytes(b"one ")
    assert runs.reasons()["import"].startswith("the content of file 'model' changed")
    assert runs.run() == ["import"]
    (runs.folder / "net.onnx").write_bytes(b"two")
    assert runs.run() == ["import", "lower", "build", "export", "verify"]


def test_a_reverted_change_runs_nothing(runs: FakeRuns) -> None:
    """Both results are kept: A, B, A runs twice."""
    runs.run()
    runs.fields = {"verify": {"rtol": 0.5}}
    assert runs.reasons()["verify/host"] == "verify.rtol null -> 0.5"
    assert runs.run() == ["verify"]
    runs.fields = {}
    assert runs.run() == []


def test_a_lost_result_is_made_again(runs: FakeRuns) -> None:
    """The reason says so, and the stages after it stay up to date."""
    runs.run()
    for path in Path(runs.store.root, "actions").rglob("*"):
        if path.is_file() and '"build"' in path.read_text():
            path.unlink()
    assert runs.reasons()["build/host"] == "its result is no longer in the store"
    assert runs.run() == ["build"]


def test_another_version_of_a_package_is_a_reason(
    runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names the old and the new identity."""
    runs.run()
    monkeypatch.setattr(packages, "identity", lambda name: f"9.9+{name}")
    assert "apache-tvm" in runs.reasons()["import"]
    assert "9.9+apache-tvm" in runs.reasons()["import"]


def test_a_reason_names_three_causes_and_the_decision_holds_all(runs: FakeRuns) -> None:
    """One line has no room for more."""
    runs.run()
    runs.fields = {"verify": {"rtol": 0.5, "atol": 0.5, "samples": 9, "seed": 9, "repeat": 9}}
    state = runs.new_state()
    state.decide_all(runs.plan())
    decision = state.decisions["net:verify/host"]
    assert decision.reason.endswith("; and 2 more")
    assert len(decision.causes) == 5


def test_only_a_list_is_cut_from_a_long_cause() -> None:
    """A colon inside JSON or quotes does not end the text."""
    spec = '{"shape": [1, 3, 224, 224], "dtype": "float32", "range": [0.0, 1.0]}'
    causes = (
        f"inputs.attention_mask_of_text {spec} -> (not set)",
        f"the content of file 'a: b{80 * 'c'}' changed (01234567 -> 89abcdef)",
        f"12 settings were added: {', '.join(f'tune.setting_{i}' for i in range(12))}",
    )
    assert _shorten(causes) == f"{causes[0]}; {causes[1]}; 12 settings were added"


def test_a_missing_file_is_reported_with_its_position(runs: FakeRuns) -> None:
    """It may be deleted between planning and deciding."""
    runs.run()
    (runs.folder / "net.onnx").unlink()
    with pytest.raises(RecipeError, match=r"net\.yaml:model\.onnx: .*net\.onnx: No such file"):
        runs.reasons()


@pytest.mark.parametrize(
    ("nodes", "shape", "reason"),
    [
        (["Conv (a)", "Gelu (b)"], (4,), "the model has Gelu (b) in place of Relu (b)"),
        (["Conv (a)"], (4,), "the model lacks Relu (b)"),
        (["Conv (a)", "Relu (b)", "Add (c)"], (8,), "the model also has Add (c)"),
        (["Conv (a)", "Relu (b)"], (8,), "w has a different shape"),
        (["Conv (a)", "Relu (b)"], (4,), "model.json of import changed"),
    ],
)
def test_a_changed_layer_is_named(
    runs: FakeRuns, nodes: list[str], shape: tuple[int, ...], reason: str
) -> None:
    """Nodes that are new or gone, else weights with another shape; a file where neither changed."""
    runs.nodes = ["Conv (a)", "Relu (b)"]
    runs.run()
    (runs.folder / "net.onnx").write_bytes(b"two")
    runs.nodes, runs.shape = nodes, shape
    state = runs.new_state()
    first, lower, *_ = runs.plan().stages
    state.decide(first)
    runs._make(state, first)
    assert state.decide(lower).reason == reason


def test_changed_kernels_are_counted(tmp_path: Path) -> None:
    """The names of those that are new, and how many are as before; nothing where the earlier ones are gone."""
    state = PlanState(LocalStore(str(tmp_path)))
    digests = []
    for keys in ("abc", "bcd"):
        tasks = [{"key": key, "names": [f"conv_{key}"]} for key in keys]
        (tmp_path / "tasks.json").write_text(json.dumps(tasks))
        digests.append(state.store.blobs.add(str(tmp_path / "tasks.json")))
    described = _describe_kernels(*map(state._read_kernels, digests))
    assert described == "1 kernel new (conv_d), 2 reused"
    assert _describe_kernels(state._read_kernels("0" * 64), {"a": "conv"}) == ""
