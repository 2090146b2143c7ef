"""Names of a package that import their modules when they are first read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package: module -> the names, separated by spaces, that it provides."""
    owners = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{owners[name]}"), name)

    return load
