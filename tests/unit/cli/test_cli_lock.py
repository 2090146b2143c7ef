"""`tvmflow diff`: the differences of two lock files as lines, as JSON, and as exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvmflow.cli import main
from tvmflow.recipe.lock_file import LockedRecipe, LockedTarget, LockFile, Measurements
from tvmflow.recipe.yaml_files import write_yaml


@pytest.fixture
def locks(tmp_path: Path) -> tuple[str, str]:
    """Two lock files: the later one has another version, a faster library and one more target."""
    paths = []
    for name, version, latency_us, targets in (
        ("a.lock.yaml", "1.0", 1000.0, ("host",)),
        ("b.lock.yaml", "1.1", 800.0, ("host", "edge")),
    ):
        measured = Measurements(latency_us=latency_us)
        target = LockedTarget(tvm={"kind": "llvm"}, cores=2, measured=measured)
        recipe = LockedRecipe(
            recipe="net.yaml", version=version, stages={}, targets=dict.fromkeys(targets, target)
        )
        lock = LockFile(lock=1, machine="x", tools={"tvm": "1"}, recipes={"net": recipe})
        path = tmp_path / name
        path.write_text(write_yaml(lock.model_dump(exclude_defaults=True)))
        paths.append(str(path))
    return paths[0], paths[1]


def test_changes_are_grouped_by_place(
    locks: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["diff", *locks]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "net",
        "  version     1.0 -> 1.1",
        "net/edge",
        "  target      added",
        "net/host",
        "  latency     1 ms -> 800 µs (-20.0%)",
    ]


def test_changes_are_available_as_json(
    locks: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["diff", "--json", *locks]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes[0] == {"place": "net", "what": "version", "text": "1.0 -> 1.1"}
    assert len(changes) == 3


def test_equal_lock_files_have_no_difference(
    locks: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["diff", locks[0], locks[0]]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_no_recipe_becomes_a_lock_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`lock A --lock B` with a recipe B is a mistake, and must not cost the recipe."""
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("recipe: 1\n")
    assert main.main(["lock", str(tmp_path / "a.yaml"), "--lock", str(tmp_path / "b.yaml")]) == 2
    assert "b.yaml is a recipe; a lock file is expected here" in capsys.readouterr().err
    assert (tmp_path / "b.yaml").read_text() == "recipe: 1\n"


def test_a_file_that_is_no_lock_file_is_an_error(
    locks: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text("recipe: 1\n")
    assert main.main(["diff", locks[0], str(tmp_path / "recipe.yaml")]) == 2
    assert "recipe.yaml is a recipe; a lock file is expected" in capsys.readouterr().err
