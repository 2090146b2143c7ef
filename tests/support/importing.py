"""Changes a module when a process imports it, for the `sitecustomize` of processes that tests start."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` once with the module of this name, after it has been executed."""
    sys.meta_path.insert(0, _Hook(name, change))


class _Hook(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            plain(module)
            self._change(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
