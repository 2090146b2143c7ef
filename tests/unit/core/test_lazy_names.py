"""Packages with one door: names that other folders import (import-linter holds this)."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest

from tvmflow import compiler, provenance, release
from tvmflow.core.lazy_names import lazy_names

DOORS = (compiler, provenance, release)


def declared(package: ModuleType) -> dict[str, str]:
    """The names that type checkers see, and their modules."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(package)))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith(f"{package.__name__}.")
        for alias in node.names
    }


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in DOORS for name in declared(package)]
)
def test_each_declared_name_can_be_imported(package: ModuleType, name: str) -> None:
    """Type checkers see imports that do not run; a table has the same names for Python."""
    assert getattr(package, name) is not None


@pytest.mark.parametrize("package", DOORS)
def test_there_are_no_other_names(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        package.unknown  # noqa: B018
    (table,) = (
        ast.literal_eval(node.args[1])
        for node in ast.walk(ast.parse(inspect.getsource(package)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == lazy_names.__name__
    )
    assert declared(package) == {
        name: f"{package.__name__}.{module}"
        for module, names in table.items()
        for name in names.split()
    }
