"""Delivered files rebuilt from their statement of provenance and its materials alone.

Nothing of the engine takes part: no store, no plan, no recipe, no key. What a statement leaves out
would be found here, and not by a build that finds its own records again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import rebuild
from tests.support.project import Project
from tvmflow.recipe.lock_file import read_lock
from tvmflow.stages import pick_best


def check_rebuilt(project: Project, materials: Path, folder: Path) -> None:
    """Rebuild the files of a target from their statement, and compare every byte of what `export` made."""
    dist, out = project.folder / "dist/tiny/host", folder / "rebuilt"
    statement = folder / "statement.intoto.jsonl"
    statement.write_bytes((dist / "tiny.intoto.jsonl").read_bytes())
    command = [
        sys.executable,
        str(Path(rebuild.__file__)),
        str(statement),
        str(materials),
        str(out),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**project.environment, "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "results are the same" in done.stdout
    names = {path.name for path in dist.iterdir() if path.suffix in (".so", ".tvmflow")}
    assert names == {"tiny.so", "tiny.tvmflow"}
    for name in names:
        made_again = (out / "export/host" / name).read_bytes()
        assert made_again == (dist / name).read_bytes(), name


def make_materials(project: Project, folder: Path) -> Path:
    """Return a folder with the model under another name: a material is known by its digest."""
    materials = folder / "materials"
    materials.mkdir()
    (materials / "a file").write_bytes((project.folder / "tiny.onnx").read_bytes())
    return materials


@pytest.mark.nightly
@pytest.mark.slow
def test_an_untuned_library_is_rebuilt_from_its_statement(project: Project, tmp_path: Path) -> None:
    assert project.run("--pipeline", "compile").code == 0
    check_rebuilt(project, make_materials(project, tmp_path), tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tuned_library_is_rebuilt_from_its_statement_and_its_schedules(
    project: Project, tmp_path: Path
) -> None:
    """The schedules are a material whose digest the statement has; the lock file has their text."""
    project.spend_whole_budget()
    # A convolution that is slower without a schedule than with any that a search finds.
    project.write_recipe(trials=24, targets=("{name: host, preset: host, threads: 1}",))
    project.write_model(channels=64)
    project.edit_recipe("trials: 24", "trials: 24, only: [conv2d]")
    project.edit_recipe("tune:", "kernels: {schedules: none}\ntune:")
    assert project.tvmflow("lock", "tiny.yaml").code == 0
    target = read_lock(project.folder / "tiny.lock.yaml").recipes["tiny"].targets["host"]
    assert target.choice
    materials = make_materials(project, tmp_path)
    text = pick_best.choice_text(target.choice)
    (materials / hashlib.sha256(text.encode()).hexdigest()).write_text(text)
    check_rebuilt(project, materials, tmp_path)
