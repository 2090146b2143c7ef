"""The compiler's own names, which other folders import (import-linter holds this)."""

from __future__ import annotations

import ast
import inspect

import pytest

from tvmflow import compiler

DECLARED = [
    alias.name
    for node in ast.walk(ast.parse(inspect.getsource(compiler)))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(compiler.__name__)
    for alias in node.names
]


@pytest.mark.parametrize("name", DECLARED)
def test_each_declared_name_can_be_imported(name: str) -> None:
    """Type checkers see imports that do not run; a table has the same names for Python."""
    assert getattr(compiler, name) is not None


def test_there_are_no_other_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'compile_model'"):
        compiler.compile_model  # noqa: B018
    assert sorted(DECLARED) == sorted(
        name for names in compiler._MODULES.values() for name in names
    )
