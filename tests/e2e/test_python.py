"""The Python interface, from a recipe to its library, as a notebook uses it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.notebook import code_cells
from tests.support.project import Project

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/digits.ipynb"


@pytest.mark.slow
def test_the_notebook_prints_what_is_in_it(project: Project) -> None:
    """Every cell, in a process of its own; and the command line continues from there."""
    shutil.copytree(ROOT / "recipes", project.folder / "recipes")
    copy = project.folder / "digits.ipynb"
    shutil.copy(NOTEBOOK, copy)
    command = [sys.executable, "-m", "tests.e2e.notebook", str(copy)]
    environment = {**project.environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for before, after in zip(code_cells(NOTEBOOK), code_cells(copy), strict=True):
        assert after["outputs"] == before["outputs"]
    planned = project.tvmflow("plan", "recipes/digits.yaml", "--pipeline", "compile", "--check")
    assert planned.code == 0, planned.out
