"""Capabilities: what can be done for a target on this machine, and the reason where not.

Libraries are built, linked, run and measured.
"""

from __future__ import annotations

from typing import NamedTuple

from tvmflow.core.types import Json
from tvmflow.targets import c_runtime, linking
from tvmflow.targets.backends import backend_for
from tvmflow.targets.emulation import find_emulated_arch
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

_NOT_BUILT = "nothing is built"


class Capabilities(NamedTuple):
    """For each capability an empty string, or the reason why it is missing."""

    built: str
    linked: str
    runs_here: str
    measured_here: str


def unlinkable_reason(tvm: TvmTarget, toolchain: Json) -> str:
    """Return why object code for a target cannot become a library, or an empty string."""
    triple = cpu_triple(tvm)
    if toolchain or not c_runtime.unsupported_reason(triple):
        return ""
    return linking.unlinkable_reason(triple)


def has_schedule_rules(triple: str) -> bool:
    """Return whether kernels for a CPU can have a schedule: there are rules for CPUs with vectors only."""
    return not parse_triple(triple).arch.startswith("thumb")


def emulator_name(target: ResolvedTarget) -> str:
    """Return the emulator of a target that this machine does not run, installed or not; empty for none."""
    if not target.unrunnable_reason:
        return ""
    arch = find_emulated_arch(str(target.tvm.get("mtriple", "")))
    return arch.program if arch else ""


def find_capabilities(target: ResolvedTarget) -> Capabilities:
    """Return the capabilities of this machine for a target."""
    unbuildable = backend_for(target.tvm).unbuildable_reason(target.tvm)
    if unbuildable:
        return Capabilities(unbuildable, _NOT_BUILT, target.unrunnable_reason, _NOT_BUILT)
    return Capabilities(
        "",
        unlinkable_reason(target.tvm, target.toolchain),
        target.unrunnable_reason,
        target.unmeasurable_reason,
    )
