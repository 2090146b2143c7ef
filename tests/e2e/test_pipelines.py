"""Pipelines that name their recipes: releases with gates, targets of their own, and mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.project import Project, Ran
from tvmflow.cli import main

RELEASE = """\
pipeline: 1
name: all
stages: [import, build, export, verify]
recipes: [tiny.yaml]
release:
  version: "1.0"
  folder: releases
  gates: {max_growth: 0.5, max_slowdown: 50}
"""


def pipeline(project: Project, text: str) -> None:
    (project.folder / "all.yaml").write_text(text)


def released(project: Project, *arguments: str) -> tuple[Ran, Path]:
    return project.tvmflow("run", "all.yaml", *arguments), project.folder / "releases"


@pytest.mark.slow
def test_a_version_is_released_once_and_compared_with_the_previous_release(
    project: Project,
) -> None:
    pipeline(project, RELEASE)
    first, releases = released(project)
    assert first.code == 0, first.err
    folder = releases / "all-1.0"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"SHA256SUMS", "release.lock.yaml", "report.html", "tiny/host/tiny.so"} <= names
    assert "already released with the same files" in released(project)[0].out
    checked = project.tvmflow("verify", str(folder))
    assert checked.code == 0, checked.out
    assert "release.intoto.jsonl" in checked.out and "report.html" in checked.out

    # With the lock file in the folder, an empty store gives the same files.
    options = ("--locked", "--lock", "releases/all-1.0/release.lock.yaml", "--store", "empty")
    again = project.tvmflow("run", "all.yaml", *options)
    assert again.code == 0, again.err
    assert "already released with the same files" in again.out

    project.write_model(seed=3)
    other, _ = released(project)
    assert other.code == 3
    assert "a version is released once" in other.err

    pipeline(project, RELEASE.replace('"1.0"', '"1.10"'))
    second, _ = released(project, "--json")
    event = json.loads(second.out.splitlines()[-1])
    assert (event["event"], event["previous"]) == ("released", "all-1.0")
    assert event["failed_gates"] == []
    assert event["comparisons"][0]["latencies"], event
    assert "all-1.0" in (releases / "all-1.10/measurements.html").read_text()

    project.write_model(seed=3, channels=400)
    pipeline(
        project, RELEASE.replace('"1.0"', '"1.9"').replace("folder", "against: '1.10'\n  folder")
    )
    missed, _ = released(project)
    assert missed.code == 3
    assert "tiny/host: max_growth: tiny." in missed.out
    assert "NOT RELEASED" in missed.out
    assert sorted(path.name for path in releases.iterdir()) == ["all-1.0", "all-1.10"]


@pytest.mark.slow
def test_a_release_loses_nothing_in_silence(project: Project) -> None:
    """Not with an option, not by an edit, and not because the last release is damaged; and no version is spent."""
    targets = RELEASE.replace("release:", "targets: [host, x86-64-v2]\nrelease:")
    pipeline(project, targets)
    fewer, releases = released(project, "--target", "host")
    assert fewer.code == 3
    assert "tiny/x86-64-v2: content: it is in all.yaml, and not in this release" in fewer.err
    assert (released(project, "--until", "build")[0].code, releases.exists()) == (2, False)
    assert not (project.folder / "dist").exists()
    assert released(project)[0].code == 0

    next_text = RELEASE.replace('"1.0"', '"1.1"')
    pipeline(project, next_text)
    project.edit_recipe("outputs: [shared-library, bundle]", "outputs: [bundle]")
    lost, _ = released(project, "--store", "empty")
    assert lost.code == 3
    assert lost.err.count("it is in all-1.0, and not in this release") == 2
    assert "drop: [tiny/host/shared-library, tiny/x86-64-v2]" in lost.err
    assert not list((project.folder / "empty").rglob("*.so"))

    names = "drop: [tiny/host/shared-library, tiny/x86-64-v2]"
    pipeline(project, f"{next_text}  {names}\n")
    lock = releases / "all-1.0/release.lock.yaml"
    good = lock.read_text()
    lock.write_text(good + "\n")
    damaged, _ = released(project, "--store", "empty")
    assert damaged.code == 3
    assert "release.lock.yaml: it was changed after the release" in damaged.err
    assert not list((project.folder / "empty").rglob("*.so"))
    assert [path.name for path in releases.iterdir()] == ["all-1.0"]

    lock.write_text(good)
    declared, _ = released(project)
    assert declared.code == 0, declared.err
    assert "tiny/x86-64-v2: no longer in this release, as release.drop says" in declared.out
    assert "No longer in it" in (releases / "all-1.1/measurements.html").read_text()


def test_targets_of_a_pipeline_replace_those_of_its_recipes(project: Project) -> None:
    text = "pipeline: 1\nname: all\nstages: [import]\nrecipes: [tiny.yaml]\ntargets: [x86-64-v2, hots]\n"
    pipeline(project, text)
    wrong = project.call("plan", "all.yaml")
    assert wrong.code == 2
    assert "all.yaml:5:22: targets.1: 'hots' is not a target" in wrong.err
    pipeline(project, text.replace(", hots", "").replace("[import]", "[import, build]"))
    plan = project.call("plan", "all.yaml")
    assert "tiny:build/x86-64-v2" in plan.out
    assert "host" not in plan.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("recipes: [tony.yaml]", "all.yaml:4:11: recipes.0: "),
        ("recipes: [tiny.yaml, tiny.yaml]", "recipes.1: 'tiny.yaml' is listed twice"),
        ("targets: [host]", "targets: is for pipelines that name their recipes"),
        ("description: no recipes", "this pipeline names no recipes"),
        ("recipes: [tiny.yaml]\nretune: {trials: 5}", "retune: needs the stage 'tune'"),
        ("recipes: [tiny.yaml]\nrelease: {version: x}", "release.version: must be a version"),
        (
            "recipes: [tiny.yaml]\nrelease: {version: '1', gates: {max_speed: 1}}",
            "release.gates.max_speed: unknown field",
        ),
    ],
)
def test_a_mistake_in_a_pipeline_is_reported_with_its_position(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
    message: str,
) -> None:
    pipeline(project, f"pipeline: 1\nname: all\nstages: [import, build, export]\n{change}\n")
    monkeypatch.chdir(project.folder)
    assert main.main(["plan", "all.yaml"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tuning_budget_is_spent_on_all_recipes_and_can_be_locked(project: Project) -> None:
    project.spend_whole_budget()
    project.write_recipe(trials=2)
    stages = "[import, extract_tasks, tune, pick_best, build, export, verify]"
    pipeline(
        project,
        f"pipeline: 1\nname: all\nstages: {stages}\nrecipes: [tiny.yaml]\nretune: {{trials: 6, round: 3}}\n",
    )
    done = project.tvmflow("lock", "all.yaml")
    assert done.code == 0, done.err
    assert "trials spent:\n  tiny:tune/host: " in done.out
    measured = len(project.trials())
    assert 2 < measured <= 8
    assert (project.folder / "all.lock.yaml").is_file()
    again = project.tvmflow("run", "all.yaml", "--locked", "--store", "empty")
    assert again.code == 0, again.err
    assert "tune/host" not in again.out
