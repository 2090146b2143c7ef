"""Gates of a recipe: limits of latency, memory and size, and what is measured and said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import tvmflow
from tests.support.engine import joined_target, plan_of, planned, recipe, target
from tvmflow.core.errors import RecipeError
from tvmflow.runtime import bundles
from tvmflow.runtime.samples import Samples
from tvmflow.stages import verify
from tvmflow.stages.base import KnownFacts, StageContext
from tvmflow.stages.verify import latency, verdict_text
from tvmflow.stages.verify.inputs import ImportedModel
from tvmflow.stages.verify.latency import check_gates
from tvmflow.stages.verify.libraries import LocalLibrary
from tvmflow.stages.verify.reference_run import Case
from tvmflow.stages.verify.verdict import GateResult, Verdict, verdict_without_measurements

FEED = {"x": np.ones((2, 3), np.float32)}


class Timed:
    """A library whose calls take what is in a list, again and again."""

    inputs = ()

    def __init__(self, seconds: Sequence[float]) -> None:
        self.timed, self.seconds, self.calls = self, seconds, 0

    def latency(self, feed: Any, *, repeat: int, min_seconds: float) -> list[float]:
        self.calls += 1
        return [self.seconds[min(self.calls, len(self.seconds)) - 1]]


def check(
    checks: dict[str, Any],
    library: Any,
    tmp_path: Path,
    bundle: Path | None = None,
    **verdict: Any,
) -> tuple[dict[str, GateResult], Verdict]:
    """The results of a recipe's gates, and the verdict with them."""
    inputs = {"export/module.tvmflow": bundle} if bundle else {}
    context = StageContext(inputs, tmp_path, tmp_path, tmp_path, tmp_path, lambda event: None)
    settings = verify.settings(recipe(verify=checks), target())
    made: Any = {"passed": True, "against": "none", "latency": {}, **verdict}
    case = Case(
        settings=settings,
        context=context,
        model=cast(ImportedModel, None),
        data=Samples([FEED], 1, None, 1),
        reference=None,
    )
    made["gates"] = check_gates(made, library, case)
    return made["gates"], made


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "settle", lambda: None)


NOISY = [8e-3 * factor for factor in (0.9, 1.1, 0.95, 1.05)] * 40


@pytest.mark.parametrize(
    ("seconds", "state", "calls"),
    [
        ([2e-3], "passed", 8),
        ([9e-3], "failed", 16),
        # what disturbs the first measurement alone
        ([20e-3] * 8 + [2e-3], "passed", 16),
        (NOISY, "within the noise", 64),
    ],
)
def test_a_latency_fails_only_beyond_the_noise(
    seconds: list[float], state: str, calls: int, tmp_path: Path
) -> None:
    """It is measured until the limit is on one side of the interval, and again before it fails."""
    library = Timed(seconds)
    checked, verdict = check({"max_latency": "8 ms"}, library, tmp_path)
    assert (checked["max_latency"]["state"], library.calls) == (state, calls)
    median = verdict["latency"]["library"]["median"]
    assert median == checked["max_latency"]["value"]


def test_what_is_said_of_gates(tmp_path: Path) -> None:
    """Figure, limit and remedy of one that fails; one within the noise passes with a warning."""
    speedup = {"median": 0.8, "low": 0.75, "high": 0.85, "pairs": 12, "is_slower": True}
    compared = {"onnxruntime": {"name": "ONNX Runtime 1.31.1", "speedup": speedup}}
    checks = {"max_latency": "8 ms", "max_vs": {"onnxruntime": 1.0}}
    _, verdict = check(checks, Timed(NOISY), tmp_path, compared=compared)
    assert verdict_text.list_exceeded(verdict) == [
        "latency relative to ONNX Runtime 1.31.1 1.25 (1.18 to 1.33, 12 pairs) is above "
        "verify.max_vs.onnxruntime 1"
    ]
    settings = verify.settings(recipe(verify=checks), target())
    [warning] = verdict_text.list_warnings(verdict, settings.verify)
    assert warning == (
        "latency 8 ms (7.6 ms to 8.4 ms, 64 repeats) is within the noise of verify.max_latency 8 ms, "
        "which passes"
    )
    assert verdict_text.describe_fix(verdict).startswith("a longer search finds faster kernels")
    assert verdict_without_measurements(verdict)["gates"]["max_latency"] == {"limit": 0.008}


def test_what_was_not_measured_fails(tmp_path: Path) -> None:
    """A runtime that rejects the model is not a reason to deliver what nobody compared."""
    compared = {"openvino": {"name": "OpenVINO", "not_timed": "OpenVINO cannot run the model: Det"}}
    checks = {"max_vs": {"openvino": 1.0}}
    _, verdict = check(checks, SimpleNamespace(), tmp_path, compared=compared)
    [failure] = verdict_text.list_exceeded(verdict)
    assert failure == (
        "verify.max_vs.openvino 1 is not measured: OpenVINO is not timed: OpenVINO cannot run the model: Det"
    )
    assert "leave a gate out" in verdict_text.describe_fix(verdict)


def test_memory_is_the_library_and_what_a_context_allocates(
    small_bundle: Path, tmp_path: Path
) -> None:
    """A real library, whose allocations are counted; its file alone is the size."""
    library = LocalLibrary(tvmflow.load(small_bundle))
    checks = {"max_memory": "1 MB", "max_size": "1 kB"}
    checked, verdict = check(checks, library, tmp_path, small_bundle)
    size = len(bundles.read_bundle(small_bundle).library)
    memory = checked["max_memory"]
    assert size + 100 < memory["value"] < size + 100_000
    assert memory["state"] == "passed"
    assert (checked["max_size"]["value"], checked["max_size"]["state"]) == (size, "failed")
    [line] = [line for line in verify.describe(verdict, KnownFacts()) if "memory" in line]
    assert line.endswith("is within verify.max_memory 1.0 MB")


def test_a_gate_runs_nothing_again_but_verify() -> None:
    """It is in the key of `verify` alone, under its name in the recipe."""
    before, after = (
        {spec.stage: spec for spec in plan_of(planned(made)).stages}
        for made in (recipe(), recipe(verify={"max_latency": "8 ms"}))
    )
    changed = [name for name, spec in after.items() if spec.settings != before[name].settings]
    assert changed == ["verify"]
    old, new = before["verify"].settings, after["verify"].settings
    assert new["verify"] == {**old["verify"], "max_latency": "8 ms"}


@pytest.mark.parametrize(
    ("checks", "problem"),
    [
        (
            {"max_latency": "8 ms", "run_on": "qemu"},
            "verify.max_latency: it cannot be measured for the target 'host': an emulated CPU says nothing about the speed "
            "of a real one; write `verify: {max_latency: ~}` into this target",
        ),
        (
            {"max_vs": {"onnxruntime": 1.0}, "run_on": "rpc"},
            "the library does not run in a program of this machine (verify.run_on); write `verify: {max_vs: {}}`",
        ),
        ({"max_memory": "8 MB", "run_on": "rpc"}, "verify.max_memory: it cannot be measured"),
        (
            {"max_vs": {"tensorrt": 1.0}},
            "verify.max_vs.tensorrt: TensorRT runs only on NVIDIA GPUs",
        ),
    ],
)
def test_planning_refuses_what_cannot_be_measured(checks: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(planned(recipe(verify=checks)))
    assert problem in str(caught.value)


def test_a_target_that_runs_nowhere_has_gates_of_size_alone() -> None:
    """The library of a target that this machine cannot run still has a size."""
    elsewhere = target(why_not="it is imagined")
    checks = {"against": "none", "max_size": "5 MB"}
    plan_of(planned(recipe(verify=checks), elsewhere))
    with pytest.raises(RecipeError, match="it is imagined"):
        plan_of(planned(recipe(verify={**checks, "max_latency": "1 ms"}), elsewhere))
    with pytest.raises(RecipeError, match="session of its own"):
        made = recipe(verify={"max_latency": "1 ms", "run_on": "rpc"})
        plan_of(planned(made, joined_target()))
