"""One project, several working directories: one store, one folder of deliveries."""

from __future__ import annotations

import pytest

from tests.support.project import Project


@pytest.mark.slow
def test_a_folder_below_has_the_store_of_its_project(project: Project) -> None:
    """What ran in the root is up to date below it, and paths outside the current folder are printed whole."""
    (project.folder / "tvmflow.toml").touch()
    first = project.tvmflow("run", "tiny.yaml", "--until", "import")
    assert first.code == 0, first.err
    below = project.folder / "a" / "b"
    below.mkdir(parents=True)
    again = project.tvmflow("run", "../../tiny.yaml", "--until", "import", cwd=below)
    assert "up to date, nothing to run" in again.out, again.err
    assert not (below / "cache").exists()
    cleaned = project.tvmflow("clean", "--dry-run", cwd=below)
    assert cleaned.out.startswith(f"{project.folder}/cache: "), cleaned.out + cleaned.err


@pytest.mark.slow
def test_the_table_of_a_project_counts_for_cached_answers(project: Project) -> None:
    """The answer of the same command line with another `dist` would name other files."""
    table = project.folder / "tvmflow.toml"
    table.write_text('store = "s"\n')
    command = ("run", "tiny.yaml", "--until", "import")
    for _ in range(2):
        assert project.tvmflow(*command).code == 0
    assert (project.folder / "s" / "actions").is_dir()
    assert not (project.folder / "cache").exists()
    table.write_text('stroe = "s"\n')
    wrong = project.tvmflow(*command)
    assert wrong.code == 2
    assert "tvmflow.toml:1:1: stroe: there is no such setting; did you mean 'store'?" in wrong.err
