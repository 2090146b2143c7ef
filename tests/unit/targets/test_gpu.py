"""The GPU of this machine: the reason where there is none, an old driver, or another GPU."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import pytest

from tvmflow.targets.backends.cuda.gpu import runs_code_for

NO_DRIVER = "this machine has no driver for NVIDIA GPUs"


@pytest.mark.parametrize(
    ("changes", "reason"),
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
            "its driver is for CUDA 12.4, and code for sm_90 needs 13.0 or later",
        ),
        ({"LD_LIBRARY_PATH": ""}, NO_DRIVER),
    ],
)
def test_unrunnable_code_has_a_reason(
    gpu: dict[str, str], changes: dict[str, str], reason: str
) -> None:
    """As the driver answers, in a process that does not start it itself, and in one that does."""
    if reason == NO_DRIVER and ctypes.util.find_library("cuda"):
        pytest.skip("there is a real driver")
    code = "from tvmflow.targets.backends.cuda.gpu import *; print(unrunnable_reason('sm_90', detect_gpu()), unrunnable_reason('sm_90', start_gpu()), sep='|')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **gpu, **changes},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().split("|") == [reason, reason]


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
        ("sm_62", "sm_90", True),
        ("sm_62", "sm_61", False),
    ],
)
def test_machine_code_runs_on_its_generation(code: str, gpu_arch: str, runs: bool) -> None:
    """On later GPUs of the same major version; code for one architecture alone, on that one; PTX on all later ones."""
    assert runs_code_for(code, gpu_arch) is runs
