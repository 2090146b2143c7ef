"""The GPU of this machine: what is said where there is none, an old driver, or another one."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import pytest

from tvmflow.targets.gpu import fits

NO_DRIVER = "this machine has no driver for NVIDIA GPUs"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"STAND_IN_GPU": "92"}, ""),
        (
            {"STAND_IN_GPU": "86"},
            "it is for sm_90, and this machine's GPU (Stand-in GPU) is sm_86",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "no NVIDIA GPU can be seen here (CUDA_VISIBLE_DEVICES may hide them)",
        ),
        (
            {"STAND_IN_DRIVER": "12040"},
            "its driver is for CUDA 12.4, and TVM's runtime needs 13 or later",
        ),
        ({"LD_LIBRARY_PATH": ""}, NO_DRIVER),
    ],
)
def test_what_cannot_run_on_a_gpu_says_why(
    gpu: dict[str, str], changes: dict[str, str], said: str
) -> None:
    """As the driver answers, asked by a process that does not start it itself."""
    if said == NO_DRIVER and ctypes.util.find_library("cuda"):
        pytest.skip("there is a real driver")
    code = "from tvmflow.targets.gpu import *; print(why_not_run('sm_90', read_gpu()), why_not_run('sm_90', start_gpu()), sep='|')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **gpu, **changes},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().split("|") == [said, said]


@pytest.mark.parametrize(
    ("code", "gpu_arch", "runs"),
    [
        ("sm_90", "sm_90", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_75", "sm_80", False),
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_92", False),
        ("sm_86", "sm_87", False),
        ("sm_87", "sm_87", True),
        ("sm_100", "sm_103", True),
        ("sm_100", "sm_120", False),
    ],
)
def test_machine_code_runs_on_its_generation(code: str, gpu_arch: str, runs: bool) -> None:
    """On later GPUs of the same major version; what is for one alone, on that one."""
    assert fits(code, gpu_arch) is runs
