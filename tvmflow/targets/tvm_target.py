"""TVM's description of a target; no other module reads its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvmflow.core.types import Json

if TYPE_CHECKING:
    import tvm as tvm_module

TvmTarget = Mapping[str, Json]
"""A target as `tvm.target.Target` takes it: `kind`, and `mtriple`, `mcpu`, `mattr`, `num-cores`, `arch`, `host`."""

_THREADS = "num-cores"
"""The field of TVM's target with the number of threads that parallel loops of a search use."""


def make_target(mapping: TvmTarget) -> tvm_module.target.Target:
    """Return TVM's target for a mapping."""
    import tvm

    return tvm.target.Target(dict(mapping))


def split_threads(tvm: TvmTarget) -> tuple[dict[str, Json], int | None]:
    """Return a target without its number of threads, and this number (None if it has none)."""
    rest = {name: value for name, value in tvm.items() if name != _THREADS}
    return rest, int(tvm[_THREADS]) if _THREADS in tvm else None


def with_threads(tvm: TvmTarget, threads: int | None) -> dict[str, Json]:
    """Return the target for a search whose candidates run with this many threads (None: unchanged)."""
    return dict(tvm) if threads is None else {**tvm, _THREADS: threads}


def target_kind(tvm: TvmTarget) -> str:
    """Return TVM's target kind, such as `llvm` or `cuda`."""
    return str(tvm.get("kind", "llvm"))


def target_words(tvm: TvmTarget) -> list[str]:
    """Return a target's kind, triple, CPU and architecture, as far as it states them."""
    return [str(tvm[field]) for field in ("kind", "mtriple", "mcpu", "arch") if field in tvm]


def cpu_target(tvm: TvmTarget) -> TvmTarget:
    """Return the target of the CPU: the target itself, or the host of a GPU."""
    host: TvmTarget = tvm.get("host", tvm)
    return host


def cpu_triple(tvm: TvmTarget) -> str:
    """Return the CPU's LLVM triple; empty if the target names none."""
    return str(cpu_target(tvm).get("mtriple", ""))


def gpu_arch(tvm: TvmTarget) -> str:
    """Return the GPU's architecture, such as `sm_90`; empty if the target names none."""
    return str(tvm.get("arch", ""))
