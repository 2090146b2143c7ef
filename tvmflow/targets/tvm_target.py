"""TVM's description of a target, and the one place that reads its fields."""

from __future__ import annotations

from collections.abc import Mapping

from tvmflow.core.types import Json

TvmTarget = Mapping[str, Json]
"""A target as `tvm.target.Target` takes it: `kind`, and `mtriple`, `mcpu`, `mattr`, `num-cores`, `arch`, `host`."""


def target_kind(tvm: TvmTarget) -> str:
    """Return TVM's target kind, such as `llvm` or `cuda`."""
    return str(tvm.get("kind", "llvm"))


def cpu_target(tvm: TvmTarget) -> TvmTarget:
    """Return the target of the CPU: the target itself, or the host of a GPU."""
    host: TvmTarget = tvm.get("host", tvm)
    return host


def cpu_triple(tvm: TvmTarget) -> str:
    """Return the LLVM triple of the CPU, or an empty string where the target names none."""
    return str(cpu_target(tvm).get("mtriple", ""))


def gpu_arch(tvm: TvmTarget) -> str:
    """Return the GPU's architecture, such as `sm_90`, or an empty string where the target names none."""
    return str(tvm.get("arch", ""))
