"""Backends: the kinds of code that tvmflow builds, measures and loads, and their properties.

May import the rest of targets, store and core. To add a backend, write a module with a subclass of
`backend.Backend`, and list it here.
"""

from __future__ import annotations

from typing import Final

from tvmflow.targets.backends.backend import Backend
from tvmflow.targets.backends.cpu import CpuBackend
from tvmflow.targets.backends.cuda import CudaBackend
from tvmflow.targets.backends.opencl import OpenclBackend
from tvmflow.targets.backends.webgpu import WebgpuBackend
from tvmflow.targets.tvm_target import TvmTarget, target_kind

BACKENDS: Final[dict[str, Backend]] = {
    backend.KIND: backend
    for backend in (CpuBackend(), CudaBackend(), OpenclBackend(), WebgpuBackend())
}
"""TVM's target kind -> its backend."""


def is_supported(kind: str) -> bool:
    """Return whether libraries of a target kind can be run and measured."""
    return kind in BACKENDS


def backend_for(tvm: TvmTarget) -> Backend:
    """Return the backend of a target; the CPU backend for a kind that has none (`c`)."""
    return BACKENDS.get(target_kind(tvm), BACKENDS[CpuBackend.KIND])


def has_host_kernels(tvm: TvmTarget) -> bool:
    """Return whether a library also contains CPU kernels that run between its device's kernels."""
    backend = backend_for(tvm)
    return bool(backend.EXECUTOR and backend.no_tvm_runtime_reason(tvm))
