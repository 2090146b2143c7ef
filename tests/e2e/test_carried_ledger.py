"""A ledger that was carried into an empty store knows as much: nothing is measured again, and the library is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.support.cache_server import cache_server
from tests.support.project import Project, Ran
from tvmflow.store.local import LocalStore

TRIALS = 40
STORE = "carried"


def by_export(project: Project) -> None:
    assert project.tvmflow("records", "export", "trials.jsonl.gz").code == 0
    taken = project.tvmflow("records", "import", "trials.jsonl.gz", "--check", "--store", STORE)
    assert taken.code == 0, taken.out + taken.err
    trials = len(project.trials())
    assert (
        taken.out.splitlines()[-1] == f"{trials} trials taken, 0 known already, 0 records refused"
    )


def by_merge(project: Project) -> None:
    assert project.tvmflow("records", "merge", "cache", "--store", STORE).code == 0


def by_remote_cache(project: Project) -> None:
    with cache_server() as cache:
        remote = ("--remote", cache.url)
        pushed = project.tvmflow("cache", "push", "--ledger", *remote)
        assert pushed.code == 0, pushed.err
        pulled = project.tvmflow(
            "cache", "pull", "tiny.yaml", "--ledger", "--check", *remote, "--store", STORE
        )
        assert pulled.code == 0, pulled.err


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Ran]]:
    """A project whose small search spaces are exhausted before the budget is spent."""
    project = Project(tmp_path_factory.mktemp("tuned"))
    project.spend_whole_budget()
    project.write_recipe(trials=TRIALS)
    ran = project.run("--until", "build")
    assert ran.code == 0, ran.err
    yield project, ran


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("carry", [by_export, by_merge, by_remote_cache])
def test_a_carried_ledger_measures_nothing_again(
    tuned: tuple[Project, Ran], carry: Callable[[Project], None]
) -> None:
    """The same trials, the same choice among finalists, and the same bytes of the library."""
    project, first = tuned
    shutil.rmtree(project.folder / STORE, ignore_errors=True)
    carry(project)
    again = project.run("--until", "build", "--store", STORE)
    assert again.code == 0, again.err
    facts, trials = again.stages["tune/host"]["facts"], len(project.trials())
    assert trials == first.stages["tune/host"]["facts"]["measured"] > 0
    assert (facts["measured"], facts["reused"]) == (0, trials)
    assert facts["exhausted"] == first.stages["tune/host"]["facts"]["exhausted"] != []
    for stage in ("tune/host", "build/host"):
        assert result(project, STORE, stage) == result(project, "cache", stage), stage


def result(project: Project, store: str, stage: str) -> tuple[str, dict[str, str]]:
    """Return the key of a stage's last result, and the digests of its files."""
    opened = LocalStore(str(project.folder / store))
    key = opened.last_key("tiny", stage) or ""
    artifact = opened.find(key)
    assert artifact is not None
    return key, {file.name: file.digest for file in artifact.files}
