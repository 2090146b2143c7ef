"""The machine class: the TVM build and the class of device that decide which trials are comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tvmflow.core import packages
from tvmflow.targets.host import read_host


class MachineClass(NamedTuple):
    """A TVM build and a class of devices: `kind` (`cpu`, `cuda`, `rpc`) and `class` (its model)."""

    tvm: str
    device: Mapping[str, str]


def this_machine_class() -> MachineClass:
    """Return the class of the trials that this machine's CPU makes with the installed TVM."""
    return MachineClass(
        packages.identity("apache-tvm"), {"kind": "cpu", "class": read_host().model}
    )
