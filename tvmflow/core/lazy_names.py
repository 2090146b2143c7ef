"""Lazy imports: a package's names that import their modules on first access."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package; `modules` maps a module to its names, separated by spaces."""
    owners = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{owners[name]}"), name)

    return load
