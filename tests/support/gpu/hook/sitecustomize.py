"""Imported by every Python process with the stand-in GPU: its tools replace CUDA's."""

from __future__ import annotations

from types import ModuleType

from tests.support.importing import after_import


def _take_over(module: ModuleType) -> None:
    from tests.support.gpu import kernels

    kernels.take_over(module)


def _take_over_llvm(module: ModuleType) -> None:
    from tests.support.gpu import kernels

    kernels.take_over_llvm(module)


after_import("tvmflow.targets.backends.cuda", _take_over)
after_import("tvmflow.targets.backends.cuda.device_code", _take_over_llvm)
