"""Found by every Python process that has the stand-in GPU: its tools take the place of CUDA's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _Hook(importlib.abc.MetaPathFinder):
    """Exchanges the tools as their module is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "tvmflow.targets.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            from tests.support.gpu import kernels

            plain(module)
            kernels.take_over(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Hook())
