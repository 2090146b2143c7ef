"""What can be done for a target on this machine: built, linked, run, measured; each yes, or why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tvmflow.targets import cuda, linking
from tvmflow.targets.emulation import machine_of
from tvmflow.targets.features import why_not_halves
from tvmflow.targets.gpu import CUDA, INSTALL
from tvmflow.targets.platforms import host_triple, platform_of
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.values import Json

# TVM's wheel works with CUDA 13, whose compilers begin here.
_OLDEST_CUDA: Final = 75
_GPUS: Final = frozenset({"hexagon", "metal", "nvptx", "opencl", "rocm", "vulkan", "webgpu"})


class Abilities(NamedTuple):
    """For each thing, empty where it can be done, else why it cannot."""

    built: str
    linked: str
    runs_here: str
    measured_here: str


def why_not_built(tvm: Mapping[str, Json]) -> str:
    """Why the stages cannot make object code for TVM's mapping, or empty."""
    kind, arch = str(tvm["kind"]), str(tvm.get("arch", ""))
    number = arch.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")
    if kind == CUDA and number.isdigit() and int(number) < _OLDEST_CUDA:
        return f"CUDA 13, which TVM 0.27 works with, makes no code for {arch}; the oldest is sm_{_OLDEST_CUDA}"
    if kind == CUDA:
        return "" if cuda.is_installed() else f"CUDA's compiler is not installed: {INSTALL}"
    if kind in _GPUS:
        return f"its kind is {kind}, and kernels are built for CPUs (kind: llvm) and NVIDIA GPUs (kind: cuda)"
    return ""


def why_not_linked(tvm: Mapping[str, Json], toolchain: Json) -> str:
    """Why its object code cannot become a library, or empty."""
    return "" if toolchain else linking.why_not(host_triple(tvm))


def why_not_mixed(target: ResolvedTarget) -> str:
    """Why weights of float16 would only make a library slow, or empty."""
    if target.tvm["kind"] != "llvm":
        return ""
    return why_not_halves(platform_of(str(target.tvm["mtriple"])).arch, target.features)


def emulated_by(target: ResolvedTarget) -> str:
    """What would run a target that this machine does not, whether it is there or not; empty where nothing does."""
    machine = machine_of(str(target.tvm.get("mtriple", ""))) if target.why_not else None
    return f"qemu-{machine.qemu}" if machine else ""


def abilities_of(target: ResolvedTarget) -> Abilities:
    """What can be done for this target."""
    built = why_not_built(target.tvm)
    linked = "nothing is built" if built else why_not_linked(target.tvm, target.toolchain)
    measured = target.why_not_tuned if not built else "nothing is built"
    return Abilities(built, linked, target.why_not, measured)
