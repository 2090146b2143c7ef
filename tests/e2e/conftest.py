"""A fresh project for each story."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A folder with a small ONNX model and its recipe."""
    made = Project(tmp_path)
    yield made
    made.close()
