"""The CPU backend: LLVM code that runs in the process that loads it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tvmflow.targets import features as cpu_features
from tvmflow.targets.backends.backend import Backend
from tvmflow.targets.host import Host
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple, target_kind

# TVM's target kinds whose code needs a device without a backend here.
_UNSUPPORTED_KINDS: Final = frozenset({"hexagon", "metal", "nvptx", "rocm", "vulkan"})
_INTRINSICS: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("x86",),
    "i386": ("x86",),
    "aarch64": ("arm_cpu",),
    "armv7": ("arm_cpu",),
    "riscv64": ("riscv_cpu",),
}


class CpuBackend(Backend):
    """CPUs: LLVM checks the targets, and there is no separate device."""

    KIND = "llvm"
    DEVICE = "cpu"
    # kDLCPU in dlpack.h
    DLPACK_DEVICE_TYPE = 1
    RUNS_ON_HOST_CPU = True

    def device(self, tvm: TvmTarget, host: Host, *, runs_here: bool) -> dict[str, str]:
        """Return this machine's CPU if it has the target's architecture."""
        if target_kind(tvm) == self.KIND and _arch(tvm, host.arch) == host.arch:
            return {"kind": self.DEVICE, "class": host.model}
        return {"kind": target_kind(tvm)}

    def has_device(self) -> bool:
        """Return True, because every machine has a CPU."""
        return True

    def unbuildable_reason(self, tvm: TvmTarget) -> str:
        """Return the problem that TVM's kind is not a CPU; otherwise an empty string."""
        kind = target_kind(tvm)
        if kind in _UNSUPPORTED_KINDS:
            return f"its kind is {kind}, and kernels are built for CPUs (kind: llvm), NVIDIA GPUs (kind: cuda) and OpenCL (kind: opencl)"
        return ""

    def unrunnable_reason(self, tvm: TvmTarget, *, in_this_process: bool) -> str:
        """Return the problem that no CPU runs code of this kind; otherwise an empty string."""
        kind = target_kind(tvm)
        if kind == self.KIND:
            return ""
        return f"its kind is {kind}, and this machine runs libraries for CPUs, NVIDIA GPUs and OpenCL only"

    def slow_float16_reason(self, tvm: TvmTarget, features: Iterable[str]) -> str:
        """Return why the CPU would convert float16 one element at a time."""
        is_cpu = target_kind(tvm) == self.KIND
        return cpu_features.slow_float16_reason(_arch(tvm), features) if is_cpu else ""

    def no_float16_reason(self, tvm: TvmTarget, features: Iterable[str]) -> str:
        """Return which instruction the CPU lacks."""
        return cpu_features.no_float16_reason(_arch(tvm), features)

    def no_bfloat16_reason(self, tvm: TvmTarget, features: Iterable[str]) -> str:
        """Return which instruction the CPU lacks."""
        return cpu_features.no_bfloat16_reason(_arch(tvm), features)

    def tensor_intrinsics(self, tvm: TvmTarget) -> tuple[str, ...]:
        """Return the modules with intrinsics for the CPU's architecture."""
        return _INTRINSICS.get(_arch(tvm, os.uname().machine), ())

    def no_tvm_runtime_reason(self, tvm: TvmTarget) -> str:
        """Return an empty string: TVM's runtime runs on every CPU."""
        return ""

    def generate_device_code(self, mod: Any, target: Any) -> bytes:
        """Return nothing, because a CPU has no separate device code."""
        return b""


def _arch(tvm: TvmTarget, default: str = "") -> str:
    return parse_triple(cpu_triple(tvm) or default).arch
