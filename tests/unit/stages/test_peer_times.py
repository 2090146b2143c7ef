"""Other runtimes beside a library: which are timed, and why others are not."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from tests.support.engine import joined_target, plan_of, planned, recipe, target
from tvmflow.core import packages
from tvmflow.core.errors import RecipeError, StageError
from tvmflow.core.types import TensorSpec
from tvmflow.frontends.peers import PEERS
from tvmflow.runtime.samples import Samples
from tvmflow.stages import verify
from tvmflow.stages.base import StageContext
from tvmflow.stages.verify import compare_settings, latency
from tvmflow.stages.verify.comparison import tolerance_for
from tvmflow.stages.verify.inputs import ImportedModel, ReferenceOutputs, read_imported_model
from tvmflow.stages.verify.latency import (
    add_compared,
    add_reference_time,
    make_latency,
)
from tvmflow.stages.verify.reference_run import Case, ReferenceRun
from tvmflow.stages.verify.verdict import FLOAT32, ComparedRuntime, Verdict

HERE = "/recipes/net.yaml"
MXNET = {
    "model": {"mxnet": {"prefix": "net", "epoch": 0}},
    "inputs": {"data": {"shape": [1, 3]}},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The distributions that are installed: those of ONNX Runtime."""
    names = {"numpy", "onnx", "onnxruntime"}

    def find_package(distribution: str) -> None:
        if distribution not in names:
            raise packages.NotInstalled(f"{distribution} is not installed", fix="")

    monkeypatch.setattr(packages, "find_package", find_package)
    return names


def requests(compare: Any, **fields: Any) -> Any:
    return recipe(verify={"compare": compare}, **fields)


def problems(made: Any, *targets: Any) -> list[str]:
    try:
        plan_of(planned(made, *targets))
    except RecipeError as error:
        return str(error).splitlines()
    return []


def verify_spec(made: Any) -> Any:
    return next(spec for spec in plan_of(planned(made)).stages if spec.stage == "verify")


def test_all_that_are_installed_or_those_with_a_name(installed: set[str]) -> None:
    """`auto` names the others that could run the model; a list is taken as it is."""
    assert compare_settings(recipe(), target()) is None
    automatic = compare_settings(requests("auto"), target())
    assert automatic is not None
    assert (automatic.runtimes, automatic.missing) == (("onnxruntime",), ("openvino",))
    installed.add("openvino")
    automatic = compare_settings(requests("auto"), target())
    assert automatic is not None
    assert (automatic.runtimes, automatic.missing) == (("onnxruntime", "openvino"), ())
    named = compare_settings(requests(["openvino"]), joined_target())
    assert named is not None and named.runtimes == ("openvino",)


def test_tensorrt_is_for_gpus(installed: set[str]) -> None:
    installed.add("tensorrt")
    gpu = target()._replace(device={"kind": "cuda", "class": "any"})
    automatic = compare_settings(requests("auto"), gpu)
    assert automatic is not None and "tensorrt" in automatic.runtimes


def test_keys_hold_what_is_compared_and_its_version(installed: set[str]) -> None:
    """A recipe that compares nothing has the key that it had before there was anything to compare."""
    plain = verify_spec(recipe())
    assert "compare" not in plain.settings
    assert "compare" not in plain.settings["verify"]
    compared = verify_spec(requests("auto"))
    assert compared.settings["compare"] == {"runtimes": ["onnxruntime"], "missing": ["openvino"]}
    installed.add("openvino")
    assert set(verify_spec(requests("auto")).tools) - set(plain.tools) == {"openvino"}


def test_a_runtime_with_a_name_must_be_able_to_run_the_model(installed: set[str]) -> None:
    """With the place in the recipe, and the command that installs it."""
    assert problems(requests(["onnxruntime"])) == []
    assert problems(requests("auto", **MXNET)) == []
    assert problems(requests(["onnxruntime", "openvino"])) == [
        f"{HERE}:verify.compare.1: verify.compare.1: OpenVINO is not installed (pip install openvino)"
    ]
    installed.update({"openvino", "tensorrt", "torch"})
    assert problems(requests(["openvino"], **MXNET)) == [
        f"{HERE}:verify.compare.0: verify.compare.0: OpenVINO runs ONNX models, and this one is of MXNet"
    ]
    assert problems(requests(["tensorrt"])) == [
        f"{HERE}:verify.compare.0: verify.compare.0: TensorRT runs only on NVIDIA GPUs"
    ]
    assert problems(requests(["pytorch"])) == [
        f"{HERE}:verify.compare.0: verify.compare.0: PyTorch runs PyTorch models, and this one is of ONNX"
    ]
    [problem] = problems(requests(["onnxruntime", "fixed"]))
    assert problem.startswith(f"{HERE}:verify.compare.1: verify.compare.1: a library of one size")
    assert "name sizes under `dimensions`" in problem


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["onnxruntme"], "'onnxruntme' is not a runtime; did you mean 'onnxruntime'?"),
        (["openvino", "openvino"], "duplicate runtime 'openvino'"),
        (["auto", "openvino"], "must be the only entry: it means all installed runtimes"),
    ],
)
def test_names_that_make_no_sense(value: list[str], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        requests(value)
    assert text in str(caught.value)


DATA = Samples([{"x": np.full(2, value, np.float32)} for value in (1, 2)], 2, None, 0)


class Untimed:
    timed = None


@pytest.mark.parametrize(("place", "text"), [("qemu", "an emulated CPU"), ("rpc", "each part")])
def test_where_the_library_runs_elsewhere_nothing_is_timed(
    place: str, text: str, installed: set[str]
) -> None:
    """That is said, and no error."""
    made = recipe(verify={"compare": ["openvino"], "run_on": place})
    settings = verify.settings(made, target())
    verdict: Verdict = {"passed": True, "against": "reference"}
    case = Case(settings, cast(Any, None), ImportedModel({}, (), (), (), {}), DATA, None)
    add_compared(verdict, cast(Any, Untimed()), case)
    [runtime] = verdict["compared"].values()
    assert runtime["name"] == "OpenVINO"
    assert runtime["not_timed"].startswith(text)


class Timed:
    """A library that answers at once."""

    inputs = (TensorSpec("x", (2,), "float32"),)

    @property
    def timed(self) -> Timed:
        return self

    def latency(self, feed: Any, *, repeat: int, min_seconds: float) -> list[float]:
        return [1e-3] * repeat


class Peer(Timed):
    """A runtime that takes twice as long, and wants the inputs that the recipe binds."""

    name, note = "Peer 1.0", ""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error

    def run_as_timed(self, feed: Any) -> dict[str, Any]:
        assert set(feed) == {"x", "rate"}
        return {"y": feed["x"] + self.error}

    def latency(self, feed: Any, *, repeat: int, min_seconds: float) -> list[float]:
        assert set(feed) == {"x", "rate"}
        return [2e-3] * repeat


def compare_with(
    opened: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: ReferenceRun | None = None,
) -> ComparedRuntime:
    @contextlib.contextmanager
    def open_peer(_: str, files: Any, *__: Any, **___: Any) -> Iterator[Any]:
        assert files == {"model": tmp_path / "model.onnx"}
        if isinstance(opened, Exception):
            raise opened
        yield opened

    monkeypatch.setattr(latency, "open_peer", open_peer)
    monkeypatch.setattr(latency, "settle", lambda: None)
    # samples are not the model's
    files = {role: tmp_path / role for role in ("data", "data/cat.png")}
    files["model"] = tmp_path / "model.onnx"
    context = StageContext(files, tmp_path, tmp_path, tmp_path, tmp_path, lambda event: None)
    signature = {
        "inputs": [TensorSpec("x", (2,), "float32").to_json()],
        "bound": [{**TensorSpec("rate", (), "int64").to_json(), "value": 16000}],
    }
    verdict: Verdict = {"passed": True, "against": "reference"}
    settings = verify.settings(requests(["openvino"]), target())
    model = read_imported_model(signature, files)
    add_compared(verdict, cast(Any, Timed()), Case(settings, context, model, DATA, reference))
    return verdict["compared"]["openvino"]


def test_a_runtime_is_measured_interleaved_with_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both latencies, and how much faster the library is."""
    compared = compare_with(Peer(), tmp_path, monkeypatch)
    assert compared["name"] == "Peer 1.0"
    assert (compared["library"]["median"], compared["latency"]["median"]) == (1e-3, 2e-3)
    assert compared["speedup"]["median"] == 2
    # without a reference there is nothing to compare it with
    assert "outputs" not in compared


def test_a_runtime_is_compared_with_the_reference_as_the_library_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all samples, with the same tolerance; one that differs is still timed."""
    outputs: list[Any] = [{"y": feed["x"]} for feed in DATA.batches]
    tolerance = tolerance_for(FLOAT32, rtol=None, atol=None)
    results = ReferenceOutputs(DATA, outputs, {})
    reference = ReferenceRun("Ref 1", "", results, tolerance, None, None)
    right = compare_with(Peer(), tmp_path, monkeypatch, reference)
    assert (right["outputs"]["y"]["passed"], right["outputs"]["y"]["elements"]) == (True, 4)
    wrong = compare_with(Peer(0.5), tmp_path, monkeypatch, reference)
    assert (wrong["outputs"]["y"]["passed"], wrong["outputs"]["y"]["mismatched"]) == (False, 4)
    assert wrong["speedup"]["median"] == 2


def test_a_runtime_that_rejects_a_model_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason is in the verdict, as is that of one that stands in for another."""
    rejected = compare_with(StageError("OpenVINO cannot run the model: Det"), tmp_path, monkeypatch)
    assert rejected == {"name": "OpenVINO", "not_timed": "OpenVINO cannot run the model: Det"}
    stand_in = Peer()
    stand_in.note = "it refuses this model"
    compared = compare_with(stand_in, tmp_path, monkeypatch)
    assert compared == {"name": "OpenVINO", "not_timed": "it refuses this model"}


class Turns(Timed):
    """A subject that writes down when it is called."""

    name, note = "Ref 1.0", ""

    def __init__(self, letter: str, seconds: float, calls: list[str]) -> None:
        self.letter, self.seconds, self.calls = letter, seconds, calls

    def run_as_timed(self, feed: Any) -> dict[str, Any]:
        return {"y": feed["x"]}

    def latency(self, feed: Any, *, repeat: int, min_seconds: float) -> list[float]:
        assert repeat == 1
        self.calls.append(self.letter)
        return [self.seconds]


@pytest.mark.parametrize("compare", [None, ["onnxruntime"]])
def test_the_reference_is_measured_interleaved_with_the_library(
    compare: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule for other runtimes, also where it is one of these: then once, in the process that runs already."""
    monkeypatch.setattr(latency, "settle", lambda: None)
    monkeypatch.setattr(latency, "open_peer", None)
    calls: list[str] = []
    library, timed = Turns("l", 1e-3, calls), cast(Any, Turns("r", 20e-3, calls))
    results = ReferenceOutputs(DATA, [{"y": feed["x"]} for feed in DATA.batches], {})
    tolerance, model = (
        tolerance_for(FLOAT32, rtol=None, atol=None),
        ImportedModel({}, (), (), (), {}),
    )
    reference = ReferenceRun("Ref 1.0", "", results, tolerance, timed, None)
    verdict: Verdict = {
        "passed": True,
        "against": "reference",
        "latency": {"library": make_latency([1e-3])},
    }
    context = StageContext({}, tmp_path, tmp_path, tmp_path, tmp_path, lambda event: None)
    settings = verify.settings(requests(compare) if compare else recipe(), target())
    case = Case(settings, context, model, DATA, reference)
    add_reference_time(verdict, cast(Any, library), case)
    add_compared(verdict, cast(Any, library), case)
    assert "".join(calls) == ("lrrl" * 4 if compare else "lrrl" * 2 + "lr")
    found = (
        verdict["compared"]["onnxruntime"]["speedup"] if compare else verdict["reference_speedup"]
    )
    assert found["median"] == 20
    reference_latency = verdict["latency"].get("reference")
    assert (reference_latency and reference_latency["median"]) == (None if compare else 20e-3)


def test_every_runtime_says_how_to_install_it() -> None:
    for peer in PEERS.values():
        assert peer.traits.install.startswith("pip install ")
        assert peer.traits.tools


class _Alternating:
    """A runtime whose calls take turns to be fast and slow."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = itertools.cycle(seconds)

    def latency(self, feed: Any, *, repeat: int, min_seconds: float) -> list[float]:
        return [next(self._seconds)]


@pytest.mark.parametrize(("is_requested", "pairs"), [(True, 64), (False, 12)])
def test_a_reference_that_nobody_asked_for_is_timed_briefly(
    monkeypatch: pytest.MonkeyPatch, is_requested: bool, pairs: int
) -> None:
    """Although it is not decided which is faster."""
    monkeypatch.setattr(latency, "settle", lambda: None)
    library, peer = _Alternating(1.0), _Alternating(0.5, 2.0)
    times = latency.measure_peer(library, {}, peer, {}, is_requested=is_requested)
    assert len(times.first) == pairs


@pytest.mark.parametrize(("ratio", "pairs"), [(1.3, 5), (0.7, 5), (1.1, 8)])
def test_a_reference_that_nobody_asked_for_is_timed_until_it_is_clear_which_is_faster(
    monkeypatch: pytest.MonkeyPatch, ratio: float, pairs: int
) -> None:
    """A small difference needs as many pairs as one that somebody asked for."""
    monkeypatch.setattr(latency, "settle", lambda: None)
    library, peer = _Alternating(1.0), _Alternating(ratio)
    times = latency.measure_peer(library, {}, peer, {}, is_requested=False)
    assert len(times.first) == pairs
    requested = latency.measure_peer(library, {}, peer, {})
    assert len(requested.first) == 8


class Child:
    """A process whose threads spin for some of the times that it is asked."""

    def __init__(self, spins: int) -> None:
        self.spins, self.seconds = spins, 7.0

    def cpu_times(self) -> tuple[float, float]:
        self.seconds += 0.01 * (self.spins > 0)
        self.spins -= 1
        return self.seconds, 0.0


def test_a_measurement_begins_when_no_child_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of asking, which is this thread's, is not a thread that spins; children are listed once."""
    clock = itertools.count()
    waits: list[float] = []
    child, lists = Child(4), itertools.count()

    class Process:
        def children(self, recursive: bool) -> list[Child]:
            next(lists)
            return [child]

    def work() -> float:
        return next(clock) // 2 * 0.1

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(time, "process_time", work)
    monkeypatch.setattr(time, "thread_time", work)
    monkeypatch.setattr(time, "sleep", waits.append)
    latency.settle()
    assert (len(waits), next(lists)) == (4, 1)
