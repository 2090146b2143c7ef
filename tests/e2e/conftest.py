"""A fresh project for each story."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder with a small ONNX model and its recipe."""
    return Project(tmp_path)
