"""Found by every Python process that has the stand-in GPU: its tools take the place of CUDA's."""

from __future__ import annotations

from types import ModuleType

from tests.support.importing import after_import


def _take_over(module: ModuleType) -> None:
    from tests.support.gpu import kernels

    kernels.take_over(module)


after_import("tvmflow.targets.cuda", _take_over)
