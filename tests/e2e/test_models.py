"""Published models, built into libraries that agree with their framework."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.project import Project
from tests.support.shared import MODELS, needs_models

needs_mxnet = pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is None, reason="the extra tvmflow[mxnet] is not installed"
)


def deliver(project: Project, model: str, inputs: str, verify: str) -> dict[str, Any]:
    """Build a model without tuning; the verdict that is delivered beside its library."""
    (project.folder / "real.yaml").write_text(
        f"recipe: 1\nname: real\nmodel: {model}\ninputs: {inputs}\nverify: {verify}\npipeline: compile\n"
    )
    done = project.tvmflow("run", "real.yaml", "--json")
    assert done.code == 0, done.out + done.err
    verdict: dict[str, Any] = json.loads(
        (project.folder / "dist/real/host/measurements.json").read_text()
    )
    assert verdict["passed"]
    return verdict


def load(project: Project, *, code: str) -> str:
    """What a program prints that knows nothing of tvmflow but `tvmflow.load`."""
    program = (
        f"import numpy as np, tvmflow\nm = tvmflow.load('dist/real/host/real.tvmflow')\n{code}"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=project.folder, env=project.environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


@pytest.mark.nightly
@pytest.mark.models
@pytest.mark.slow
@needs_models
def test_partitioned_ultraface_agrees_with_the_unpartitioned_model(project: Project) -> None:
    """Features for one CPU, box decoding for another: the boxes are those of the unpartitioned model."""
    (project.folder / "real.yaml").write_text(
        f"""\
recipe: 1
name: real
model: {{onnx: {MODELS}/ultraface/version-RFB-320.onnx}}
inputs: {{input: {{shape: [1, 3, 240, 320], range: [-1, 1]}}}}
targets:
  - host
  - name: split
    parts:
      - {{name: features, until: [scores, "460"], preset: host}}
      - {{name: decode, preset: x86-64-v2}}
verify: {{samples: 2, repeat: 2}}
pipeline: compile
"""
    )
    done = project.tvmflow("run", "real.yaml", "--json")
    assert done.code == 0, done.out + done.err
    (handed,) = done.stages["join/split"]["facts"]["transfers"]
    assert (handed["tensor"], handed["to"]) == ("460", "decode")
    printed = load(
        project,
        code="s = tvmflow.load('dist/real/split/real.tvmflow')\n"
        "x = {'input': np.random.default_rng(0).uniform(-1, 1, (1, 3, 240, 320)).astype('float32')}\n"
        "a, b = m.run(x), s.run(x)\n"
        "print(sorted(a), sorted(b), max(abs(a[n] - b[n]).max() for n in a) < 1e-5)",
    )
    assert printed == "['boxes', 'scores'] ['boxes', 'scores'] True\n"


@pytest.mark.models
@needs_models
@pytest.mark.slow
@pytest.mark.parametrize(
    "cut", ["", pytest.param("_without_postprocessing", marks=pytest.mark.nightly)]
)
def test_ultraface_agrees_with_onnx_runtime(project: Project, cut: str) -> None:
    """A face detector with depthwise and dilated convolutions, with and without its box decoding."""
    verdict = deliver(
        project,
        f"{{onnx: {MODELS}/ultraface/version-RFB-320{cut}.onnx}}",
        "{input: {shape: [1, 3, 240, 320], range: [-1, 1]}}",
        "{samples: 2, repeat: 2}",
    )
    assert verdict["reference"].startswith("ONNX Runtime")
    assert sorted(verdict["outputs"]) == ["boxes", "scores"]


@pytest.mark.models
@pytest.mark.slow
@needs_models
@pytest.mark.parametrize("sampling_rate", [8000, 16000])
@pytest.mark.parametrize("name", ["16k_op15", "op18_ifless"])
def test_silero_agrees_with_onnx_runtime(project: Project, name: str, sampling_rate: int) -> None:
    """A voice detector with an LSTM, and an If that the shapes decide, or the sampling rate when it runs."""
    random = np.random.default_rng(0)
    np.savez(
        project.folder / "data.npz",
        input=random.normal(size=(1, 576)).astype(np.float32),
        state=random.normal(size=(2, 1, 128)).astype(np.float32),
        sr=np.array(sampling_rate),
    )
    verdict = deliver(
        project,
        f"{{onnx: {MODELS}/silero/silero_vad_{name}.onnx}}",
        "{input: {shape: [1, 576]}, state: {shape: [2, 1, 128]}, sr: {shape: [], dtype: int64}}",
        "{data: data.npz, repeat: 2}",
    )
    assert len(verdict["outputs"]) == 2


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.mxnet
@needs_models
@needs_mxnet
def test_lffd_agrees_with_mxnet_and_recorded_outputs(project: Project) -> None:
    """An MXNet 1.5 detector agrees with MXNet on this machine, and with recorded outputs."""
    shutil.copy(f"{MODELS}/lffd/plate_small_io.npz", project.folder / "io.npz")
    recorded = np.load(project.folder / "io.npz")
    np.savez(project.folder / "data.npz", data=recorded["x"])
    verdict = deliver(
        project,
        f"{{mxnet: {{prefix: {MODELS}/lffd/plate_small, epoch: 0}}}}",
        "{data: {shape: [1, 3, 128, 128]}}",
        "{data: data.npz, repeat: 2}",
    )
    assert len(verdict["outputs"]) == 6
    error = load(
        project,
        code=(
            "io = np.load('io.npz')\n"
            "actual = m.run({'data': io['x']})\n"
            "print(max(abs(actual[spec.name] - io[f'y{i}']).max() for i, spec in enumerate(m.outputs)))"
        ),
    )
    assert float(error) < 1e-5


@pytest.mark.slow
@pytest.mark.mxnet
@needs_mxnet
def test_digits_keeps_its_accuracy(project: Project) -> None:
    """The shipped model, compiled, has the accuracy of MXNet on the test set."""
    models = ROOT / "recipes/models"
    verdict = deliver(
        project,
        f"{{mxnet: {{prefix: {models}/digits, epoch: 10}}}}",
        "{data: {shape: [1, 1, 8, 8]}}",
        f"{{data: {models}/digits-test.npz, min_accuracy: 0.95, repeat: 2}}",
    )
    assert verdict["samples"] == 360
    assert verdict["accuracy"] == verdict["reference_accuracy"] > 0.97


def test_squeezenet_and_resnet_recipes_can_be_planned(project: Project) -> None:
    """The shipped recipes are valid; missing files are reported with their position."""
    unmade = shutil.ignore_patterns("squeezenet1.1-*")
    shutil.copytree(ROOT / "recipes", project.folder / "recipes", ignore=unmade)
    assert project.call("plan", "recipes/resnet50.yaml").code == 0
    missing = project.call("plan", "recipes/squeezenet-mxnet.yaml")
    assert missing.code == 2
    assert "recipes/squeezenet-mxnet.yaml:" in missing.err
    models = project.folder / "recipes/models"
    for stand_in, name in (
        ("digits-symbol.json", "squeezenet1.1-symbol.json"),
        ("digits-0010.params", "squeezenet1.1-0000.params"),
    ):
        shutil.copy(models / stand_in, models / name)
    assert project.call("plan", "recipes/squeezenet-mxnet.yaml").code == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.mxnet
@needs_mxnet
def test_squeezenet_from_the_gluon_zoo_agrees_with_mxnet(project: Project) -> None:
    """The shipped recipe, on a checkpoint that MXNet wrote."""
    unmade = shutil.ignore_patterns("squeezenet1.1-*")
    shutil.copytree(ROOT / "recipes", project.folder / "recipes", ignore=unmade)
    made = subprocess.run(
        [sys.executable, "recipes/models/make_squeezenet.py"],
        cwd=project.folder, env=project.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = project.tvmflow("run", "recipes/squeezenet-mxnet.yaml", "--json")
    assert done.code == 0, done.out + done.err
