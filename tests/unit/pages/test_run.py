"""The page of a run: from its record, beside the last run that measured the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tvmflow.core.types import RecipeOrigin
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import RunRecord, list_runs, record_run
from tvmflow.pages.collect import describe_run, find_previous
from tvmflow.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def record(store: LocalStore, folder: Path, latency_s: float | None, **fields: Any) -> RunRecord:
    """Record a run of one recipe, and return the record."""
    recipe = folder / "net.yaml"
    recipe.write_text("recipe: 1\n")
    verdict: dict[str, Any] = {"passed": True, "against": "reference", "outputs": {}}
    if latency_s is not None:
        fields_of_latency = ("mean", "median", "min", "max", "std")
        verdict["latency"] = {"library": dict.fromkeys(fields_of_latency, latency_s)}
    stage = StageReport("net-half:verify/host", "ran", "never ran", 2.0, verdict)._replace(**fields)
    origin = RecipeOrigin("net-half", str(recipe), str(recipe), "half")
    with record_run(store, ["run", "net.yaml"]) as recording:
        recording.report = RunReport((stage,), (), (), 2.0, origins=(origin,))
        recording.exit_code = 0
    return list_runs(store).runs[0]


def test_a_page_is_about_the_recipe_of_its_variants(store: LocalStore, tmp_path: Path) -> None:
    page = describe_run(record(store, tmp_path, 1e-3), store)
    (library,) = page.libraries
    assert (library.recipe, library.label, library.state) == ("net", "net-half/host", "verified")
    assert page.title == "net" and dict(page.about)["command"] == "tvmflow run net.yaml"


def test_the_last_run_is_the_last_one_that_measured_the_same(
    store: LocalStore, tmp_path: Path
) -> None:
    first = record(store, tmp_path, 2e-3)
    record(store, tmp_path, None)
    assert find_previous(record(store, tmp_path, 1e-3), store) == first
    assert find_previous(first, store) is None


def test_the_recipe_is_as_the_run_read_it(store: LocalStore, tmp_path: Path) -> None:
    run = record(store, tmp_path, 1e-3)
    path = tmp_path / "net.yaml"
    assert [recipe.note for recipe in describe_run(run, store).recipes] == [""]
    path.write_text("recipe: 1 # edited\n")
    (edited,) = describe_run(run, store).recipes
    assert edited.text == "recipe: 1\n"
    assert edited.note == "The file has changed since: this is what the run read."
    path.unlink()
    assert describe_run(run, store).recipes[0].note == "The file is no longer there."


def test_what_went_wrong_has_a_line(store: LocalStore, tmp_path: Path) -> None:
    run = record(store, tmp_path, None, outcome="rejected", message="wrong numbers")
    page = describe_run(run._replace(message="it ended", damage=("cas/ab",)), store)
    assert page.notes == (
        "it ended",
        "net-half/host: wrong numbers",
        "A damaged file was set aside: cas/ab",
    )


def test_what_many_builds_say_has_one_line(store: LocalStore, tmp_path: Path) -> None:
    run = record(store, tmp_path, 1e-3)
    builds = tuple(
        run.builds[0]._replace(target=target, warnings=("NOT VERIFIED",)) for target in "abcde"
    )
    assert describe_run(run._replace(builds=builds), store).notes == (
        "net-half/a, net-half/b, net-half/c and 2 more: NOT VERIFIED",
    )


def test_results_that_are_gone_are_counted(store: LocalStore, tmp_path: Path) -> None:
    """Of what was rejected, the store never had one."""
    rejected = record(store, tmp_path, None, outcome="rejected", message="wrong", key="ab" * 32)
    assert "note" not in dict(describe_run(rejected, store).provenance[0][1])
    page = describe_run(record(store, tmp_path, 1e-3, key="ab" * 32), store)
    assert dict(page.provenance[0][1])["note"] == "1 result of this run no longer in the store"
