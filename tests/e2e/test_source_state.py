"""The state of sources: what git and the files say of a recipe."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tvmflow.core.errors import UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.types import RecipeOrigin
from tvmflow.provenance import delivered
from tvmflow.provenance.delivered import SourceState, read_source_state


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a recipe and a pipeline, committed."""
    root = tmp_path / "repository"
    (root / "recipes").mkdir(parents=True)
    (root / "recipes/net.yaml").write_text("recipe")
    (root / "tune.yaml").write_text("pipeline")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


def origin(root: Path) -> RecipeOrigin:
    return RecipeOrigin("net", str(root / "recipes/net.yaml"), str(root / "tune.yaml"))


def state_of(root: Path) -> SourceState:
    state = read_source_state(origin(root))
    assert state is not None
    return state


def test_files_are_named_in_their_repository(repository: Path) -> None:
    """With their digests, the commit, and the command that builds them."""
    state = state_of(repository)
    assert [tuple(file) for file in state.files] == [
        ("recipe", "recipes/net.yaml", hash_file(repository / "recipes/net.yaml")),
        ("pipeline", "tune.yaml", hash_file(repository / "tune.yaml")),
    ]
    assert (state.commit, state.clean) == (git(repository, "rev-parse", "HEAD"), "yes")
    assert state.invocation("host") == [
        "tvmflow", "run", "recipes/net.yaml", "--pipeline", "tune.yaml", "--target", "host",
    ]  # fmt: skip
    assert state._replace(variant="b8", locked=True).invocation("host")[-3:] == [
        "--variant", "b8", "--locked",
    ]  # fmt: skip


def test_the_same_commit_has_the_same_state_in_every_checkout(
    repository: Path, tmp_path: Path
) -> None:
    """A clone, a further worktree, a detached commit, packed references."""
    expected = state_of(repository)
    git(tmp_path, "clone", "-q", str(repository), "clone")
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "worktree"))
    assert state_of(tmp_path / "clone") == state_of(tmp_path / "worktree") == expected
    git(repository, "pack-refs", "--all")
    assert state_of(repository) == expected
    git(repository, "checkout", "-q", "--detach")
    assert state_of(repository) == expected


def test_an_edit_is_not_clean_and_another_commit_is_another_state(repository: Path) -> None:
    """Other files do not matter: only those whose digests are given."""
    before = state_of(repository)
    (repository / "other.txt").write_text("new")
    assert state_of(repository) == before
    (repository / "tune.yaml").write_text("edited")
    assert state_of(repository).clean == "no"
    git(repository, "commit", "-qam", "two")
    after = state_of(repository)
    assert after.clean == "yes" and after.commit != before.commit
    watched = delivered.list_repository_files(origin(repository))
    assert str(repository / ".git/refs/heads/main") in watched


def test_an_untracked_or_ignored_recipe_is_not_clean(repository: Path) -> None:
    """The commit does not have it."""
    git(repository, "rm", "-q", "--cached", "recipes/net.yaml")
    git(repository, "commit", "-qm", "two")
    assert state_of(repository).clean == "no"
    (repository / ".gitignore").write_text("recipes/\n")
    assert state_of(repository).clean == "no"


def test_without_git_it_says_so(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is known all the same."""
    monkeypatch.setenv("PATH", str(repository))
    delivered._read_source_state.cache_clear()
    state = state_of(repository)
    assert state.clean == "unknown: git is not installed"
    assert len(state.commit) == 40


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    """Nor in one without commits; a file that disappeared gives no state."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/net.yaml").touch()
    (tmp_path / "tune.yaml").touch()
    state = state_of(tmp_path)
    assert (state.commit, state.clean, state.files[0].name) == ("", "", "net.yaml")
    git(tmp_path, "init", "-q")
    assert state_of(tmp_path).commit == ""
    (tmp_path / "tune.yaml").unlink()
    assert read_source_state(origin(tmp_path)) is None


@pytest.mark.parametrize("value", ["ci", "https://me:pw@example.org/ci", "urn:a b", "https://"])
def test_a_builder_is_a_uri(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a password: it is for the public."""
    monkeypatch.setenv("TVMFLOW_BUILDER_ID", value)
    with pytest.raises(UsageError, match="TVMFLOW_BUILDER_ID is not a URI"):
        delivered.read_builder_id()
