"""The devices of this machine that a stage measures on, by its settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import joined_target, recipe, target
from tvmflow.stages import STAGES

GPU = target("gpu")._replace(device={"kind": "cuda", "class": "Some GPU"})
RPC = target("board")._replace(device={"kind": "rpc", "class": "tx2"}, remote={"key": "tx2"})
TUNED = {"tune": {"trials": 5}}


@pytest.mark.parametrize(
    ("stage", "fields", "subject", "devices"),
    [
        ("tune", TUNED, target(), ("cpu",)),
        ("tune", TUNED, GPU, ("cuda",)),
        ("tune", TUNED, RPC, ()),
        ("tune", {}, target(), ()),
        ("pick_best", TUNED, target(), ("cpu",)),
        ("build", TUNED, target(), ()),
        ("verify", {}, target(), ("cpu",)),
        ("verify", {}, target(why_not="it lacks avx512f"), ()),
        ("verify", {"verify": {"run_on": "qemu"}}, target(), ()),
        ("verify", {}, joined_target(), ("cpu",)),
        ("verify", {}, joined_target(why_not="it is for aarch64"), ("cpu",)),
    ],
)
def test_a_stage_names_the_devices_that_it_measures_on(
    stage: str, fields: dict[str, Any], subject: Any, devices: tuple[str, ...]
) -> None:
    """Those of this machine only: not a device behind RPC, nor one that is emulated or cannot run the library."""
    assert STAGES[stage].settings(recipe(**fields), subject).measured_devices == devices


HOST = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
OPENCL = target("gpu")._replace(tvm={"kind": "opencl", "host": HOST}, device={"kind": "opencl"})
CUDA = GPU._replace(tvm={"kind": "cuda", "arch": "sm_90", "host": HOST})
OLD_CUDA = GPU._replace(tvm={"kind": "cuda", "arch": "sm_62", "host": HOST})


@pytest.mark.parametrize("stage", ["tune", "pick_best"])
@pytest.mark.parametrize(
    ("fields", "subject", "by_driver"),
    [
        ({}, target(), False),
        ({}, OPENCL, True),
        ({}, CUDA, True),
        ({}, OLD_CUDA, True),
        ({"runtime": "vm"}, CUDA, False),
        ({}, CUDA._replace(remote={"key": "server"}), False),
    ],
)
def test_kernels_of_gpus_are_measured_by_their_driver(
    stage: str, fields: dict[str, Any], subject: Any, by_driver: bool
) -> None:
    """Not behind RPC, nor for TVM's virtual machine: there, TVM's runtime measures."""
    options: dict[str, Any] = {**TUNED, **fields}
    assert STAGES[stage].settings(recipe(**options), subject).by_driver is by_driver
