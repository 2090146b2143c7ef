"""A fresh project for each story."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import Project, Ran
from tests.support.shared import shared_folder


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A folder with a small ONNX model and its recipe."""
    made = Project(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The folder of a project with 4 trials, and its first run, which all tests share."""

    def make(folder: Path) -> None:
        (folder / "project").mkdir()
        project = Project(folder / "project")
        project.spend_whole_budget()
        project.write_recipe(trials=4)
        first = project.run()
        assert first.code == 0, first.out + first.err
        (folder / "ran.json").write_text(json.dumps(first))

    folder = shared_folder(tmp_path_factory, "finished", make)
    return folder / "project", Ran(*json.loads((folder / "ran.json").read_text()))


@pytest.fixture
def finished_project(first_run: tuple[Path, Ran], project: Project) -> Project:
    """A copy of that project after its first run."""
    shutil.copytree(first_run[0], project.folder, dirs_exist_ok=True)
    return project
