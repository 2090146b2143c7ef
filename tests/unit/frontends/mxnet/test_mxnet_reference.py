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
from tvmflow.core.errors import EnvironmentProblem, ImportFailed, StageError
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS

frontend = FRONTENDS["mxnet"]

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
def test_the_reference_agrees_with_the_import_until_it_crashes(mxnet: None, tmp_path: Path) -> None:
    """Both return the same scores for the shipped digits, under the same name, and then intermediate tensors, by their names in `get_internals`; a latency is positive.

    When MXNet's process has died, the next request fails with a message.
    """
    feed = {"data": np.load(DIGITS / "digits-test.npz")["data"][:4]}
    model = frontend.load(FILES, specs(feed), (INNER, "softmax_output"))
    assert [spec.name for spec in model.outputs] == ["softmax_output"]
    assert [spec.name for spec in model.tensors] == [INNER]
    others = set(psutil.Process().children())
    with frontend.reference(
        FILES, model.inputs, model.outputs, tensors=model.tensors, threads=1, scratch=tmp_path
    ) as reference:
        assert reference.name == "MXNet 1.9.1"
        answer = reference.run(feed)
        seconds = reference.latency(feed, repeat=3, min_seconds=0.01)
        [child] = set(psutil.Process().children()) - others
        child.send_signal(signal.SIGKILL)
        with pytest.raises(StageError, match="the process of MXNet was killed by SIGKILL"):
            reference.run(feed)
    assert list(answer) == ["softmax_output", INNER]
    scores, inner = compute(model, feed)
    np.testing.assert_allclose(answer["softmax_output"], scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answer[INNER], inner, rtol=1e-4, atol=1e-5)
    assert len(seconds) == 3
    assert all(0 < value < 1 for value in seconds)


@pytest.mark.mxnet
def test_a_model_that_mxnet_rejects_is_reported(mxnet: None, tmp_path: Path) -> None:
    """The message has MXNet's reason, without its stack trace."""
    nodes: list[dict[str, Any]] = [
        {"op": "null", "name": "data"},
        {"op": "Convolution", "name": "c", "inputs": [0, 0, 0], "attrs": {"kernel": "(9, 9)"}},
    ]
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    with (
        pytest.raises(StageError, match=r"MXNet cannot run the model: .*num_filter"),
        frontend.reference(files, INPUTS, OUTPUTS, threads=1, scratch=tmp_path),
    ):
        pass


@pytest.mark.mxnet
def test_the_process_ends_with_its_parent(mxnet: None, tmp_path: Path) -> None:
    """MXNet also ends when its parent is killed."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tvmflow.frontends import FRONTENDS\n"
        "from tvmflow.core.types import TensorSpec\n"
        "base, scratch = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "files = {'symbol': base / 'digits-symbol.json', 'params': base / 'digits-0010.params'}\n"
        "with FRONTENDS['mxnet'].reference(files, (TensorSpec('data', (4, 1, 8, 8), 'float32'),),\n"
        "                     (TensorSpec('softmax_output', (4, 10), 'float32'),),\n"
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


def test_without_mxnet_the_fix_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install MXNet."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(EnvironmentProblem) as caught,
        frontend.reference(FILES, INPUTS, OUTPUTS, threads=1, scratch=tmp_path),
    ):
        pass
    assert caught.value.fix == "pip install 'tvmflow[mxnet]'"


def test_an_unknown_tensor_is_reported() -> None:
    """With the nearest name; names of nodes are not names of tensors."""
    with pytest.raises(ImportFailed, match=f"has no tensor '{INNER[:-7]}'; did you mean '{INNER}'"):
        frontend.load(FILES, INPUTS, (INNER.removesuffix("_output"),))
