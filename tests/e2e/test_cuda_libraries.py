"""C libraries for NVIDIA GPUs, on a machine with a GPU (the strict stand-in): they need its driver and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import gpu
from tests.support.gpu import ptxas
from tests.support.project import Project
from tests.support.recipes import ROOT

pytestmark = pytest.mark.skipif(
    ptxas.ASSEMBLER is None, reason="needs the package nvidia-cuda-nvcc-cu12"
)

# A process without TVM: two contexts, and two calls of each.
PROGRAM = """
import sys
import numpy as np
import tvmflow
images = np.load(sys.argv[2])["data"][:2, None]
models = [tvmflow.load(sys.argv[1]) for _ in range(2)]
rows = [[*model.run({"data": image}).values()] for model in models for image in images]
assert "tvm" not in sys.modules
assert np.array_equal(rows[:2], rows[2:]) and not np.array_equal(rows[0], rows[1])
del models
"""


def write_digits(project: Project, target: str) -> None:
    text = (ROOT / "recipes/digits.yaml").read_text()
    for old, new in (
        ("  - host", f"  - {target}"),
        ("trials: 64", "trials: 0"),
        ("models/", f"{ROOT}/recipes/models/"),
    ):
        assert old in text
        text = text.replace(old, new)
    (project.folder / "tiny.yaml").write_text(text)


def call(bundle: Path, environment: Mapping[str, str]) -> str:
    """Return the end of what a process wrote that loads a bundle and calls it."""
    images = ROOT / "recipes/models/digits-test.npz"
    command = [sys.executable, "-c", PROGRAM, str(bundle), str(images)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stderr.strip()


def test_digits_are_read_with_the_driver_alone(project: Project, tmp_path: Path) -> None:
    """By a GPU of 2016, whose PTX LLVM writes; what is wrong with a GPU is said, and nothing is left on it."""
    gpu.make_driver(tmp_path)
    project.environment.update(gpu.environment(tmp_path, 61))
    write_digits(project, "cuda-sm61")
    ran = project.run()
    assert ran.code == 0, ran.out
    assert ran.stages["build/cuda-sm61"]["facts"]["runtime"] == "c"
    verdict = ran.stages["verify/cuda-sm61"]["facts"]
    assert verdict["samples"] == 360
    assert verdict["accuracy"] == verdict["reference_accuracy"] > 0.95

    bundle = project.folder / "dist/digits/cuda-sm61/digits.tvmflow"
    environment = {**project.environment, "STAND_IN_REPORT": "1"}
    nothing = "left 0 blocks, 0 modules, 0 streams, 0 events, 0 contexts, 0 entered"
    # PTX is for later GPUs, too
    assert call(bundle, {**environment, "STAND_IN_GPU": "86"}) == f"stand-in GPU: {nothing}"
    for change, message in (
        ({"STAND_IN_MEMORY": "0"}, "the GPU has no memory of "),
        ({"STAND_IN_LAUNCHES": "3"}, "NVIDIA's driver cannot start a kernel"),
        ({"STAND_IN_GPU": "53"}, "the kernels are not for this GPU, which is sm_53"),
    ):
        assert message in call(bundle, {**environment, **change})
