"""Tools: a run depends on what is imported, wherever that lies."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest

from tests.support.project import Project
from tvmflow.core.processes import module_command


@pytest.fixture
def other_onnx(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ONNX without metadata, in a folder that comes first on PYTHONPATH."""
    folder = project.folder / "packages"
    own = Path(str(onnx.__file__)).parent
    ignored = shutil.ignore_patterns("test", "__pycache__")
    shutil.copytree(own, folder / "onnx", ignore=ignored)
    path = project.environment["PYTHONPATH"]
    project.environment["PYTHONPATH"] = f"{folder}{os.pathsep}{path}"
    project.environment["XDG_CACHE_HOME"] = str(project.folder / "home")
    return folder / "onnx"


@pytest.mark.slow
def test_an_edit_of_a_tool_on_pythonpath_runs_what_depends_on_it(
    project: Project, other_onnx: Path
) -> None:
    """Also right after the same command had nothing to do."""
    assert project.run("--until", "import").code == 0
    before = project.run("--until", "import")
    assert before.ran == []
    helper = other_onnx / "helper.py"
    helper.write_text(f"{helper.read_text()}\n")
    after = project.run("--until", "import")
    assert after.ran == ["import"]
    reason = str(after.stages["import"]["reason"])
    assert reason.startswith('onnx "unversioned+') and " -> " in reason
    explained = project.tvmflow("explain", "tiny.yaml", "import")
    assert "unversioned+" in explained.out


def test_a_file_in_place_of_a_tool_ends_the_run_before_it_begins(project: Project) -> None:
    """With what to do, in one line each, and before anything was built."""
    (project.folder / "onnxruntime.py").write_text("raise SystemExit('imported')\n")
    ran = project.tvmflow("run", "tiny.yaml")
    assert ran.code == 4
    assert "onnxruntime.py would be imported in place of the package onnxruntime" in ran.err
    assert "fix: rename that file" in ran.err
    assert not list((project.folder / "cache").rglob("actions/*/*"))


def test_a_process_imports_what_its_parent_does(tmp_path: Path) -> None:
    """And nothing that happens to lie in the current folder."""
    (tmp_path / "json").mkdir()
    (tmp_path / "json/__init__.py").write_text("raise SystemExit(9)\n")
    command = module_command("json.tool", "--compact")
    done = subprocess.run(command, cwd=tmp_path, input="[1, 2]", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[1,2]\n"), done.stderr
