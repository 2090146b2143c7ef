"""MXNet as the reference: what it computes, how it is timed, and how it fails."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.mxnet_runs import checkpoint, compute, specs, write_checkpoint
from tvmflow.errors import EnvironmentProblem, ImportFailed, StageError
from tvmflow.frontends import mxnet as frontend
from tvmflow.values import TensorSpec

DIGITS = Path(__file__).resolve().parents[4] / "recipes" / "models"
FILES = checkpoint(DIGITS, "digits", 10)
INPUTS = (TensorSpec("data", (4, 1, 8, 8), "float32"),)
OUTPUTS = (TensorSpec("softmax_output", (4, 10), "float32"),)
INNER = "pool_output"


@pytest.fixture
def mxnet() -> None:
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("MXNet is not installed (pip install 'tvmflow[mxnet]')")


@pytest.mark.mxnet
def test_the_reference_agrees_with_the_import(mxnet: None, tmp_path: Path) -> None:
    """Both give the shipped digits the same scores, under the same name; a call takes time."""
    feed = {"data": np.load(DIGITS / "digits-test.npz")["data"][:4]}
    model = frontend.load(FILES, specs(feed), {})
    with frontend.reference(
        FILES, model.inputs, model.outputs, {}, threads=1, scratch=tmp_path
    ) as reference:
        assert reference.name == "MXNet 1.9.1"
        answer = reference.run(feed)
        seconds = reference.latency(feed, repeat=3, min_seconds=0.01)
    assert list(answer) == ["softmax_output"]
    [own] = compute(model, feed)
    np.testing.assert_allclose(answer["softmax_output"], own, rtol=1e-5, atol=1e-6)
    assert len(seconds) == 3
    assert all(0 < value < 1 for value in seconds)


@pytest.mark.mxnet
def test_a_crash_is_told_and_does_not_hang(mxnet: None, tmp_path: Path) -> None:
    """When MXNet's process dies, the next question is answered with a sentence."""
    feed = {"data": np.zeros((4, 1, 8, 8), "float32")}
    others = set(psutil.Process().children())
    with frontend.reference(FILES, INPUTS, OUTPUTS, {}, threads=1, scratch=tmp_path) as reference:
        [child] = set(psutil.Process().children()) - others
        child.send_signal(signal.SIGKILL)
        with pytest.raises(StageError, match="MXNet's process was ended by SIGKILL"):
            reference.run(feed)


@pytest.mark.mxnet
def test_a_model_that_mxnet_cannot_run_is_told(mxnet: None, tmp_path: Path) -> None:
    """MXNet's own reason is in the message, without its stack trace."""
    nodes: list[dict[str, Any]] = [
        {"op": "null", "name": "data"},
        {"op": "Convolution", "name": "c", "inputs": [0, 0, 0], "attrs": {"kernel": "(9, 9)"}},
    ]
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    with (
        pytest.raises(StageError, match=r"MXNet cannot run the model: .*num_filter"),
        frontend.reference(files, INPUTS, OUTPUTS, {}, threads=1, scratch=tmp_path),
    ):
        pass


@pytest.mark.mxnet
def test_the_process_ends_with_its_parent(mxnet: None, tmp_path: Path) -> None:
    """A parent that is killed leaves no MXNet behind."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tvmflow.frontends import mxnet\n"
        "from tvmflow.values import TensorSpec\n"
        "base, scratch = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "files = {'symbol': base / 'digits-symbol.json', 'params': base / 'digits-0010.params'}\n"
        "with mxnet.reference(files, (TensorSpec('data', (4, 1, 8, 8), 'float32'),),\n"
        "                     (TensorSpec('softmax_output', (4, 10), 'float32'),), {},\n"
        "                     threads=1, scratch=scratch):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(DIGITS), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(DIGITS.parents[1])},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        [child] = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "MXNet's process outlives its parent"
            time.sleep(0.05)


def test_without_mxnet_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MXNet is not installed, the reference says how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(EnvironmentProblem) as caught,
        frontend.reference(FILES, INPUTS, OUTPUTS, {}, threads=1, scratch=tmp_path),
    ):
        pass
    assert caught.value.fix == "pip install 'tvmflow[mxnet]'"


@pytest.mark.mxnet
def test_inner_tensors_are_what_the_import_has(mxnet: None, tmp_path: Path) -> None:
    """By the names of `get_internals`, beside the outputs, from the import and from MXNet."""
    feed = {"data": np.load(DIGITS / "digits-test.npz")["data"][:4]}
    model = frontend.load(FILES, specs(feed), {}, (INNER, "softmax_output"))
    assert [spec.name for spec in model.outputs] == ["softmax_output"]
    assert [spec.name for spec in model.tensors] == [INNER]
    with frontend.reference(
        FILES, model.inputs, model.outputs, {}, tensors=model.tensors, threads=1, scratch=tmp_path
    ) as reference:
        theirs = reference.run(feed)
    ours = compute(model, feed)
    for name, values in zip(("softmax_output", INNER), ours, strict=True):
        np.testing.assert_allclose(theirs[name], values, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_is_not_there_is_told() -> None:
    """With those of nearly that name; the name of a node is not that of what it gives."""
    with pytest.raises(ImportFailed, match=f"has no tensor '{INNER[:-7]}'.*nearest: {INNER}"):
        frontend.load(FILES, INPUTS, {}, (INNER.removesuffix("_output"),))
