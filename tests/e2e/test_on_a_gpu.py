"""Libraries for NVIDIA GPUs on a machine with a GPU (the strict stand-in): tuned, verified, loaded and profiled."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import rpc
from tests.support.project import Project
from tests.support.recipes import ROOT
from tvmflow.targets.tracker import TRACKER_VARIABLE

pytestmark = pytest.mark.slow


# What of PyTorch TVM looks at. Like PyTorch it starts the driver, which does not work in what is forked then.
_TORCH = """
import ctypes
class Tensor:
    __dlpack_c_exchange_api__ = None
class cuda:
    class Stream:
        __cuda_stream__ = None
    def is_available():
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
"""


@pytest.fixture
def with_gpu(project: Project, gpu: dict[str, str]) -> Project:
    """A project where programs find a GPU and a PyTorch."""
    project.environment.update(gpu)
    package = project.folder / "site/torch/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(_TORCH)
    project.environment["PYTHONPATH"] += f":{package.parents[1]}"
    return project


def test_a_model_is_tuned_verified_and_run_on_the_gpu(with_gpu: Project) -> None:
    """The library agrees with the reference, the tuned one as the untuned; a second run does nothing."""
    project = with_gpu
    project.write_recipe(targets=["cuda-sm90"], trials=6)
    ran = project.run()
    assert ran.code == 0, ran.out
    tuned, verdict = (ran.stages[f"{name}/cuda-sm90"]["facts"] for name in ("tune", "verify"))
    assert (tuned["measured"], tuned["failed"]) == (6, 0)
    assert verdict["outputs"]["scores"]["passed"]
    assert verdict["latency"]["library"]["median"] > 0
    # naive loops of an emulated GPU are so slow that a search always finds something
    assert ran.stages["pick_best/cuda-sm90"]["facts"]["tuned"] > 0
    assert verdict["latency"]["untuned"]["median"] > 0
    assert len(project.trials()) == 6
    assert project.run().ran == []

    bundle = "dist/tiny/cuda-sm90/tiny.tvmflow"
    shown = project.tvmflow("run-model", bundle, "--profile")
    assert shown.code == 0, shown.err
    assert "fused_conv2d_add_relu" in shown.out


@pytest.mark.nightly
def test_digits_are_read_on_the_gpu(with_gpu: Project) -> None:
    """The trained net and its 360 images, as ONNX Runtime reads them."""
    text = (ROOT / "recipes/digits.yaml").read_text()
    for old, new in (
        ("  - host", "  - cuda-sm90"),
        ("trials: 64", "trials: 0"),
        ("[c-library, bundle]", "[bundle]"),
        ("models/", f"{ROOT}/recipes/models/"),
    ):
        assert old in text
        text = text.replace(old, new)
    (with_gpu.folder / "tiny.yaml").write_text(text)
    ran = with_gpu.run()
    assert ran.code == 0, ran.out
    verdict = ran.stages["verify/cuda-sm90"]["facts"]
    assert verdict["samples"] == 360
    assert verdict["accuracy"] == verdict["reference_accuracy"] > 0.95


@pytest.mark.nightly
def test_weights_and_data_of_float16_meet_in_tensor_cores(with_gpu: Project) -> None:
    """Within the tolerance of float16, which is set by itself."""
    project = with_gpu
    project.write_recipe(targets=["cuda-sm90"])
    project.write_products()
    project.edit_recipe("model:", "kernels: {precision: mixed}\nmodel:")
    project.edit_recipe(", rtol: 1.0e-3, atol: 1.0e-4", "")
    ran = project.run()
    assert ran.code == 0, ran.out
    verdict = ran.stages["verify/cuda-sm90"]["facts"]
    assert verdict["outputs"]["scores"]["passed"]
    assert verdict["tolerance"]["for"] == "float16"
    assert len(ran.stages["build/cuda-sm90"]["facts"]["schedule_rules"]["tensor_cores"]) == 2


def test_parts_on_the_gpu_and_the_cpu_exchange_tensors(with_gpu: Project) -> None:
    """Both ways, and the whole agrees with the reference, in a bundle as in a wheel."""
    project = with_gpu
    target = (
        "{name: split, parts: [{name: head, until: [r], preset: x86-64-v2}, "
        "{name: middle, until: [p], preset: cuda-sm90}, {name: tail, preset: x86-64-v2}]}"
    )
    project.write_recipe(targets=[target])
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [bundle, wheel]")
    ran = project.run()
    assert ran.code == 0, ran.out
    verdict = ran.stages["verify/split"]["facts"]
    assert verdict["outputs"]["scores"]["passed"]
    assert set(verdict["parts"]) == {"head", "middle", "tail"}
    assert all(part["latency"]["median"] > 0 for part in verdict["parts"].values())
    transfers = ran.stages["join/split"]["facts"]["transfers"]
    devices = {transfer["tensor"]: transfer["devices"] for transfer in transfers}
    assert devices == {"r": ["cpu", "cuda"], "p": ["cuda", "cpu"]}

    (wheel,) = (project.folder / "dist/tiny/split").glob("*.whl")
    code = (
        "import numpy as np, tiny_model; x = np.load('x.npy'); "
        "a, b = (tiny_model.run({'data': y})['scores'] for y in (x, x + 1)); np.savez('y.npz', a=a, b=b)"
    )
    values = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
    np.save(project.folder / "x.npy", values)
    environment = {**project.environment}
    site = project.folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment["PYTHONPATH"] = f"{site}:{environment['PYTHONPATH']}"
    subprocess.run([sys.executable, "-c", code], cwd=project.folder, env=environment, check=True)
    outputs = np.load(project.folder / "y.npz")
    whole = _on_the_cpu(project, {"a": values, "b": values + 1})
    for name in ("a", "b"):
        np.testing.assert_allclose(outputs[name], whole[name], rtol=1e-4, atol=1e-5)


def _on_the_cpu(project: Project, inputs: dict[str, Any]) -> dict[str, Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(project.folder / "tiny.onnx"))
    return {name: session.run(None, {"data": array})[0] for name, array in inputs.items()}


def test_a_remote_gpu_tunes_and_verifies(
    project: Project, gpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """This machine has none and only compiles; kernels and libraries are sent to the one that has."""
    target = (
        "{name: board, preset: cuda-sm90, remote: {key: orin, timeout_s: 60}, "
        "verify: {run_on: rpc}}"
    )
    project.write_recipe(targets=[target], trials=3)
    project.environment.update({**gpu, "CUDA_VISIBLE_DEVICES": ""})
    with rpc.running_pool(tmp_path_factory.mktemp("pool"), servers=0) as pool:
        project.environment[TRACKER_VARIABLE] = pool.address
        pool.add("orin", tvmflow_server=True, **gpu)
        pool.wait_for(1, "orin")
        ran = project.run()
    assert ran.code == 0, ran.out
    tuned, verdict = (ran.stages[f"{name}/board"]["facts"] for name in ("tune", "verify"))
    assert (tuned["measured"], tuned["failed"]) == (3, 0)
    assert verdict["outputs"]["scores"]["passed"]
    assert verdict["ran_on"].startswith("orin at ")
    assert verdict["latency"]["library"]["median"] > 0


@pytest.mark.nightly
def test_an_unusable_gpu_fails_no_trial(with_gpu: Project) -> None:
    """Another process has its memory: the run fails, and the ledger records nothing."""
    project = with_gpu
    project.write_recipe(targets=["cuda-sm90"], trials=3)
    project.environment["STAND_IN_MEMORY"] = "0"
    ran = project.run()
    assert ran.code == 1
    message = ran.stages["tune/cuda-sm90"]["message"]
    assert "the cuda device of this machine cannot run kernels" in message
    assert "nvidia-smi" in ran.stages["tune/cuda-sm90"]["fix"]
    assert project.trials() == []
    del project.environment["STAND_IN_MEMORY"]
    assert project.run("--until", "tune").stages["tune/cuda-sm90"]["facts"]["measured"] == 3


def test_code_for_another_gpu_is_rejected(with_gpu: Project) -> None:
    """When a recipe verifies it, and when it is loaded; it can be built."""
    project = with_gpu
    project.write_recipe(targets=["cuda-sm90"])
    project.environment["STAND_IN_GPU"] = "86"
    refused = project.tvmflow("run", "tiny.yaml")
    assert refused.code == 2
    reason = "it is for sm_90, and this machine's GPU (Stand-in GPU) is sm_86"
    assert "'cuda-sm90' cannot be verified" in refused.err and reason in refused.err
    listed = json.loads(project.tvmflow("targets", "--json").out)
    rows = {row["name"]: row["capabilities"] for row in listed["targets"]}
    assert rows["cuda-sm90"]["runs_here"] == rows["cuda-sm90"]["measured_here"] == reason
    assert rows["cuda-sm80"]["runs_here"] == rows["cuda-sm80"]["measured_here"] == ""

    project.edit_recipe("verify: {against: reference", "verify: {against: none")
    assert project.run().code == 0
    loaded = project.tvmflow("run-model", "dist/tiny/cuda-sm90/tiny.tvmflow")
    assert loaded.code == 4
    assert "the kernels are not for this GPU, which is sm_86" in loaded.err


def test_a_missing_gpu_is_noticed(with_gpu: Project) -> None:
    """What was verified stays so; a machine without a GPU does not claim to have run it."""
    project = with_gpu
    project.write_recipe(targets=["cuda-sm90"])
    project.edit_recipe("verify: {against: reference", "verify: {against: none")
    first = project.run()
    assert "not_run" not in first.stages["verify/cuda-sm90"]["facts"]
    project.environment["CUDA_VISIBLE_DEVICES"] = ""
    gone = project.run()
    assert gone.ran == ["verify/cuda-sm90"]
    assert "no NVIDIA GPU can be seen here" in gone.stages["verify/cuda-sm90"]["facts"]["not_run"]
    assert Path(project.folder, "dist/tiny/cuda-sm90/tiny.so").exists()
