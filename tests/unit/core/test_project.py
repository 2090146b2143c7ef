"""The root of a project, its folders, and mistakes in its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tvmflow.core.errors import EXIT_USAGE, RecipeError
from tvmflow.core.project import find_project, shortest_path


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder two levels below `tmp_path`, which is the current one."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_without_a_marker_the_current_folder_is_the_root(deep: Path) -> None:
    """Store and deliveries lie in it, as for somebody who has a recipe and nothing else."""
    project = find_project()
    assert (project.root, project.marker) == (str(deep), "")
    assert project.store == str(deep / "cache")
    assert project.dist == str(deep / "dist")
    assert project.releases == str(deep / "releases")


@pytest.mark.parametrize("marker", ["tvmflow.toml", "pyproject.toml", ".git"])
def test_each_marker_makes_its_folder_the_root(deep: Path, tmp_path: Path, marker: str) -> None:
    """However deep one stands below it; `.git` may be a file, as in a worktree."""
    (tmp_path / marker).write_text("[tool.tvmflow]\n" if marker == "pyproject.toml" else "")
    project = find_project()
    assert (project.root, project.marker) == (str(tmp_path), str(tmp_path / marker))
    assert project.store == str(tmp_path / "cache")


def test_the_nearest_marker_counts(deep: Path, tmp_path: Path) -> None:
    """A project in a repository has a store of its own."""
    (tmp_path / ".git").mkdir()
    (deep.parent / "tvmflow.toml").touch()
    assert find_project().root == str(deep.parent)


def test_a_pyproject_of_others_is_no_marker(deep: Path, tmp_path: Path) -> None:
    """Only one with a table of tvmflow; a dependency on tvmflow is none."""
    (tmp_path / ".git").mkdir()
    (deep / "pyproject.toml").write_text('[project]\ndependencies = ["tvmflow"]\n[tool.ruff]\n')
    assert find_project().marker == str(tmp_path / ".git")


@pytest.mark.parametrize(
    "text",
    ['[tool.tvmflow]\nstore="s"', "[ tool . 'tvmflow' ]\nstore='s'", '[tool]\ntvmflow.store="s"', 'tool.tvmflow.store="s"', 'tool = {tvmflow = {store = "s"}}'],
)  # fmt: skip
def test_every_spelling_of_the_table_in_pyproject_counts(deep: Path, text: str) -> None:
    """TOML has several for one table."""
    (deep / "pyproject.toml").write_text(text)
    assert find_project().store == str(deep / "s")


def test_the_table_names_folders_from_the_root(deep: Path, tmp_path: Path) -> None:
    """Also such that lie elsewhere."""
    text = 'store = "/big/disk"\ndist = "out/dist"\nreleases = "../releases"\n'
    (tmp_path / "tvmflow.toml").write_text(text)
    project = find_project()
    assert project.store == "/big/disk"
    assert project.dist == str(tmp_path / "out" / "dist")
    assert project.releases == str(tmp_path.parent / "releases")
    assert project.origin("store") == f"`store` in {tmp_path / 'tvmflow.toml'}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('# a store\nstor = "x"\n', "tvmflow.toml:2:1: stor: there is no such setting; did you mean 'store'?"),
        ("dist = 3\n", "tvmflow.toml:1:1: dist: must be a string, the path of a folder, not 3"),
        ('\nreleases = ""\n', "tvmflow.toml:2:1: releases: '' is not the path of a folder"),
        ("store = cache\n", "tvmflow.toml:1:9: this is not TOML: Invalid value"),
        ('store = "a"\nstore = "b"\n', "tvmflow.toml:2:12: this is not TOML: Cannot overwrite a value"),
        ("[store]\nx = 1\n", "tvmflow.toml:1:1: store: must be a string, the path of a folder, not {'x': 1}"),
    ],
)  # fmt: skip
def test_a_mistake_has_its_line_and_a_remedy(
    deep: Path, tmp_path: Path, text: str, message: str
) -> None:
    """All mistakes of a table are reported together, as those of a recipe are."""
    (tmp_path / "tvmflow.toml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        find_project()
    assert caught.value.problems == [f"{tmp_path}/{message}"]
    assert caught.value.fix
    assert caught.value.exit_code == EXIT_USAGE


def test_mistakes_in_pyproject_are_those_of_its_table(deep: Path) -> None:
    """Other tables may have settings of the same name."""
    (deep / "pyproject.toml").write_text(
        "[tool.other]\nstor = 1\n[tool.tvmflow]\nstor = 1\ndist = 2\n"
    )
    with pytest.raises(RecipeError) as caught:
        find_project()
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "pyproject.toml:4:1",
        "pyproject.toml:5:1",
    ]


def test_a_ceiling_ends_the_search(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for git."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert find_project().root == str(deep)


def test_a_path_is_shown_relative_only_inside_the_current_folder(deep: Path) -> None:
    """It can be pasted, and the same message stands wherever a checkout lies."""
    assert shortest_path(str(deep / "dist")) == "dist"
    assert shortest_path(str(deep)) == "."
    assert shortest_path(str(deep / "..dist")) == "..dist"
    outside = str(deep.parent.parent / "dist")
    assert shortest_path(outside) == outside
    assert shortest_path("/x") == "/x"


def test_a_project_without_settings_needs_no_reader_of_toml(tmp_path: Path) -> None:
    """An up-to-date run pays for a table only where there is one."""
    (tmp_path / "tvmflow.toml").write_text("# the root of the project\n")
    code = "import sys; from tvmflow.core.project import find_project; find_project(); print([n for n in ('tomllib', 're', 'typing', 'tvmflow.core.errors') if n in sys.modules])"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
