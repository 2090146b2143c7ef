"""The making of lock files: what of a finished run they record, and with which text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.support import engine
from tests.support.facts import kernel_facts, pick_best_facts, seconds, verify_facts
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Json, Plan
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.recipes import PlannedRecipe
from tvmflow.recipe.lock_file import LockedTarget, Measurements, read_lock
from tvmflow.release.lock import lock_text, make_lock, pin_lock
from tvmflow.store.inventory import list_pins
from tvmflow.store.local import LocalStore

WORKLOAD = "ab" * 32
TASKS = [{"key": WORKLOAD, "names": ["conv", "conv1"], "weight": 2}]
TENSOR = {"name": "data", "shape": [1, 3], "dtype": "float32"}
FACTS: dict[str, dict[str, Json]] = {
    "import": {"inputs": [TENSOR], "outputs": [], "operators": {"nn.conv2d": 2}},
    "pick_best": pick_best_facts(
        coverage=0.5,
        kernels=[kernel_facts("conv", untuned_us=9.5, tuned_us=None, flops=None)],
        peak_gflops=None,
    ),
    "export": {"files": {"net.so": 1200}},
    "verify": {
        **verify_facts(),
        "accuracy": 0.97,
        "outputs": {"a": {"max_abs_error": 1e-6}, "b": {"max_abs_error": 2e-6}},
        "latency": {"library": seconds(1.23456789e-4)},
        "compared": {
            "onnxruntime": {"name": "ONNX Runtime 1.31.1", "latency": seconds(2e-4)},
            "openvino": {"name": "OpenVINO", "not_timed": "it is not installed"},
        },
    },
}
OUTPUTS = {
    "import": ("model.json", "params.safetensors", "signature.json"),
    "lower": ("lowered.json",),
    "extract_tasks": ("tasks.json", "workloads.json"),
    "tune": ("records.json",),
    "pick_best": ("chosen.json", "finalists.json", "roofline.svg"),
    "build": ("kernels.json", "lib0.o"),
    "export": ("module.tvmflow", "net.so"),
    "verify": ("verdict.json",),
}
JSON_CONTENT = {"tasks.json": TASKS, "chosen.json": {}}


class FinishedRun:
    """A recipe of which every stage has a result with these facts."""

    def __init__(self, folder: Path, facts: dict[str, dict[str, Json]] = FACTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "net.onnx").write_bytes(b"a model")
        self.path = folder / "net.lock.yaml"
        self.store = LocalStore(str(folder / "cache"))
        self.store.create()
        made = engine.recipe(tune={"trials": 4})
        self.planned: PlannedRecipe = engine.planned(made, folder=str(folder))
        self.plan: Plan = engine.plan_of(self.planned)
        self.state = PlanState(self.store)
        for spec in self.plan.stages:
            self.state.decide(spec)
            key = self.state.keys[spec.id]
            with self.store.claim(key.digest) as claim:
                for name in OUTPUTS[spec.stage]:
                    content = json.dumps(JSON_CONTENT.get(name, f"{spec.id} {name}"))
                    Path(claim.out, name).write_text(content)
                stage_facts = facts.get(spec.stage, {})
                self.state.artifacts[spec.id] = self.store.publish(claim, key, stage_facts, 0.0)

    def lock(self) -> str:
        return lock_text(
            make_lock([self.planned], self.plan, self.state, self.store, self.path.parent)
        )

    def locked_target(self) -> LockedTarget:
        self.path.write_text(self.lock())
        return read_lock(self.path).recipes["net"].targets["host"]


@pytest.fixture
def finished(tmp_path: Path) -> FinishedRun:
    return FinishedRun(tmp_path / "run")


def test_measurements_come_from_the_facts_of_the_stages(finished: FinishedRun) -> None:
    """The largest error of all outputs; the latency in µs with three decimals."""
    assert finished.locked_target().measured == Measurements(
        accuracy=0.97,
        max_abs_error=2e-6,
        latency_us=123.457,
        compared_us={"ONNX Runtime 1.31.1": 200.0},
        coverage=0.5,
        bytes={"net.so": 1200},
    )


def test_values_that_were_not_measured_are_absent(tmp_path: Path) -> None:
    finished = FinishedRun(tmp_path / "run", {})
    assert finished.locked_target().measured == Measurements()
    assert "measured:" not in finished.lock()


def test_a_kernel_has_its_calls_and_times(finished: FinishedRun) -> None:
    (kernel,) = finished.locked_target().kernels.values()
    assert (kernel.names, kernel.calls) == (["conv", "conv1"], 2)
    assert (kernel.untuned_us, kernel.tuned_us, kernel.trial) == (9.5, None, "")


def test_the_signature_of_the_model_is_recorded(finished: FinishedRun) -> None:
    finished.path.write_text(finished.lock())
    recipe = read_lock(finished.path).recipes["net"]
    assert (recipe.inputs, recipe.outputs) == ({"data": "float32[1×3]"}, {})
    assert (recipe.operators, recipe.recipe) == ({"nn.conv2d": 2}, "net.yaml")


@pytest.mark.parametrize("text", ["", "null", "# nothing"])
def test_an_empty_lock_file_is_written_again(text: str, tmp_path: Path) -> None:
    """It is not a recipe, which would start with another line."""
    path = tmp_path / "net.lock.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="the file is empty") as caught:
        read_lock(path)
    assert caught.value.fix == "write it again with `tvmflow lock`"


def test_stages_that_search_are_absent_and_measuring_ones_have_no_outputs(
    finished: FinishedRun,
) -> None:
    finished.path.write_text(finished.lock())
    stages = read_lock(finished.path).recipes["net"].stages
    names = {label.partition("/")[0] for label in stages}
    assert names == {"import", "lower", "extract_tasks", "build", "export", "verify"}
    assert stages["verify/host"].outputs == {}
    content = json.dumps("net:build/host lib0.o").encode()
    assert stages["build/host"].outputs["lib0.o"] == hashlib.sha256(content).hexdigest()


def test_the_same_results_give_the_same_text_in_another_folder(
    finished: FinishedRun, tmp_path: Path
) -> None:
    other = FinishedRun(tmp_path / "another" / "place")
    assert other.lock() == finished.lock()
    assert "not enforced" in finished.lock().splitlines()[1]


def test_a_pin_keeps_the_results_of_a_lock_file(finished: FinishedRun) -> None:
    finished.path.write_text(finished.lock())
    pin_lock(finished.store, finished.path, finished.state)
    (pin,) = [pin for pin in list_pins(finished.store) if pin.name.startswith("lock:")]
    assert pin.name == f"lock:{finished.path}"
    assert set(pin.keys) == {key.digest for key in finished.state.keys.values()}
