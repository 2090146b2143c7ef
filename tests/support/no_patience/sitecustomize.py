"""Imported by every Python process of a command: every step is a slow one."""

from __future__ import annotations

from types import ModuleType

from tests.support.importing import after_import


def _have_no_patience(module: ModuleType) -> None:
    vars(module)["_PATIENCE_S"] = 0.0


after_import("tvmflow.core.logs", _have_no_patience)
