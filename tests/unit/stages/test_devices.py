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
