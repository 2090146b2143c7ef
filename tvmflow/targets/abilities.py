"""What can be done for a target on this machine: built, linked, run, measured; each yes, or why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tvmflow.targets import linking
from tvmflow.targets.emulation import find_qemu, machine_of
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.values import Json

# TVM's wheel works with CUDA 13, whose compilers begin here.
_OLDEST_CUDA: Final = 75
_GPUS: Final = frozenset(
    {"cuda", "hexagon", "metal", "nvptx", "opencl", "rocm", "vulkan", "webgpu"}
)


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
    if kind == "cuda" and number.isdigit() and int(number) < _OLDEST_CUDA:
        return f"CUDA 13, which TVM 0.27 works with, makes no code for {arch}; the oldest is sm_{_OLDEST_CUDA}"
    if kind in _GPUS:
        return f"its kind is {kind}, and kernels are built for CPUs (kind: llvm) only"
    return ""


def why_not_linked(tvm: Mapping[str, Json], toolchain: Json) -> str:
    """Why its object code cannot become a library, or empty."""
    return "" if toolchain else linking.why_not(str(tvm.get("mtriple", "")))


def emulator(target: ResolvedTarget) -> str:
    """How a target that does not run here can be run all the same, or empty."""
    machine = machine_of(str(target.tvm.get("mtriple", "")))
    if machine is None:
        return ""
    is_there = find_qemu(machine) is not None
    return "under emulation (verify.run_on: qemu)" if is_there else "qemu would run it"


def abilities_of(
    target: ResolvedTarget, emulator: Callable[[ResolvedTarget], str] = emulator
) -> Abilities:
    """What can be done for this target; `emulator` says how else it might be run here."""
    built = why_not_built(target.tvm)
    linked = "nothing is built" if built else why_not_linked(target.tvm, target.toolchain)
    remark = emulator(target) if target.why_not else ""
    runs = "; ".join(filter(None, (target.why_not, remark)))
    measured = target.why_not_tuned if not built else "nothing is built"
    return Abilities(built, linked, runs, measured)
