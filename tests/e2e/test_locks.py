"""Locks: the same bytes elsewhere, refusals of everything that is not what was locked, and what changed between two."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_failures import sabotage
from tests.support.project import Project
from tvmflow import cli
from tvmflow.stores import collect
from tvmflow.stores.local import LocalStore

DELIVERED = ("tiny.so", "tiny.tvmflow")


def delivered(project: Project) -> dict[str, str]:
    folder = project.folder / "dist/tiny/host"
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in DELIVERED
        if (folder / name).exists()
    }


def elsewhere(project: Project, folder: Path) -> Project:
    """The same recipe, model and lock on a machine that has built nothing."""
    folder.mkdir(parents=True)
    other = Project(folder)
    for name in ("tiny.yaml", "tiny.onnx", "tiny.lock.yaml"):
        (folder / name).write_bytes((project.folder / name).read_bytes())
    return other


def test_a_lock_gives_its_bytes_on_an_empty_store_and_refuses_all_else(
    project: Project, tmp_path: Path
) -> None:
    locked = project.tvmflow("lock", "tiny.yaml")
    assert locked.code == 0, locked.err
    assert "tiny.lock.yaml (written)" in locked.out
    assert "tiny.lock.yaml (as it was)" in project.tvmflow("lock", "tiny.yaml").out

    other = elsewhere(project, tmp_path / "another/machine")
    other.environment["PYTHONHASHSEED"] = "77"
    again = other.run("--locked", "--jobs", "2")
    assert again.ran == ["import", "extract_tasks/host", "build/host", "export/host", "verify/host"]
    assert delivered(other) == delivered(project) != {}
    assert other.run("--locked").ran == []

    def refused(*words: str) -> str:
        found = other.tvmflow("run", "tiny.yaml", "--locked", *words)
        assert found.code == 2, found.out
        return found.err

    assert "there is no lock no.lock.yaml" in refused("--lock", "no.lock.yaml")
    assert "tiny.yaml:1:1: this is no lock" in refused("--lock", "tiny.yaml")
    other.edit_recipe("atol: 1.0e-4", "atol: 0.1")
    assert "tiny:verify/host is not what was locked: verify.atol 0.0001 -> 0.1" in refused()
    other.edit_recipe("atol: 0.1", "atol: 1.0e-4")
    other.write_model(seed=1)
    assert "the content of file 'model' changed" in refused()
    other.write_model()
    lock = other.folder / "tiny.lock.yaml"
    text = lock.read_text()
    lock.write_text(text.replace("apache-tvm: 0.27", "apache-tvm: 0.26"))
    assert refused().count('apache-tvm "0.26') == 1

    # a lock that names other bytes than come out: said, and nothing is delivered
    digest = project.digests("build/host")["build/host/lib0.o"]
    lock.write_text(text.replace(digest, "f" * 64))
    parted = other.tvmflow("run", "tiny.yaml", "--locked", "--dist", "parted")
    assert parted.code == 3
    assert "tiny:build/host: lib0.o has the digest" in parted.err
    assert not (other.folder / "parted").exists()


RELEASED = """\
pipeline: 1
name: all
stages: [import, build, export]
recipes: [tiny.yaml]
release: {version: "1.0", folder: releases}
"""


@pytest.mark.parametrize("word", ["lock", "run"])
def test_a_collection_before_the_pin_takes_nothing_that_was_just_made(
    project: Project, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """The recipe is up to date with something else by then: until the pin is there the run holds its results."""
    (project.folder / "all.yaml").write_text(RELEASED)
    missing = []
    pin: Callable[..., list[str]] = LocalStore.pin

    def after_a_collection(store: LocalStore, *words: Any, **more: Any) -> list[str]:
        shutil.rmtree(Path(store.root, "last"))
        collect.collect(LocalStore(store.root), collect.Limits(max_age_s=0.0), do=True)
        missing.append(pin(store, *words, **more))
        return missing[-1]

    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("TVMFLOW_STORE", "cache")
    # what was made a moment ago counts as made before
    monkeypatch.setattr(collect, "_SLACK_NS", 0)
    monkeypatch.setattr(LocalStore, "pin", after_a_collection)
    assert cli.main([word, "all.yaml"]) == 0
    assert missing == [[]]


@pytest.mark.slow
def test_a_tuned_release_is_locked_with_its_schedules(project: Project, tmp_path: Path) -> None:
    """No trial is measured where the lock is kept to, and the schedules are those that were found."""
    # on one core: a kernel as small as this gains nothing from two
    project.write_recipe(trials=24, targets=("{name: host, preset: host, num_cores: 1}",))
    project.write_model(channels=64)
    # a convolution without a schedule by rule, which is slower than with any that a search finds
    project.edit_recipe("trials: 24", "trials: 24, only: [conv2d]")
    project.edit_recipe("tune:", "kernels: {schedules: none}\ntune:")
    assert project.tvmflow("lock", "tiny.yaml").code == 0
    lock = (project.folder / "tiny.lock.yaml").read_text()
    assert "trace: " in lock
    shown_lock = project.tvmflow("inspect", "tiny.lock.yaml")
    assert "a lock" in shown_lock.out and "tiny 0 for host" in shown_lock.out, shown_lock.err
    other = elsewhere(project, tmp_path / "other")
    again = other.run("--locked")
    assert "tune/host" not in again.stages
    assert delivered(other) == delivered(project)
    assert other.trials() == []
    roads = again.stages["build/host"]["facts"]["roads"]
    assert roads["tuned"]
    assert other.tvmflow("verify", "dist").code == 0
    (shown,) = other.tvmflow("inspect", "dist/tiny/host/tiny.so", "--json").events
    kernels = shown["provenance"]["kernels"]
    tuned = {each["name"]: each["record"]["trial"] for each in kernels if "record" in each}
    assert sorted(tuned) == roads["tuned"]
    measured = {trial.partition("/")[2] for trial in project.trials()}
    assert set(tuned.values()) <= measured

    (other.folder / "broken.lock.yaml").write_text(lock.replace('"GetSBlock"', '"GetBlock"', 1))
    broken = other.tvmflow("run", "tiny.yaml", "--locked", "--lock", "broken.lock.yaml")
    assert broken.code == 2
    assert "trace: is not the trace of this trial" in broken.err

    project.write_model(seed=5, channels=8)
    assert project.tvmflow("lock", "tiny.yaml", "--lock", "next.lock.yaml").code == 0
    changed = project.tvmflow("diff", "tiny.lock.yaml", "next.lock.yaml")
    assert changed.code == 1
    assert "weights     changed" in changed.out
    assert "kernels     " in changed.out
    assert "latency" in changed.out
    told = json.loads(project.tvmflow("diff", "--json", "tiny.lock.yaml", "next.lock.yaml").out)
    assert {each["place"] for each in told["changes"]} == {"tiny", "tiny/host"}
    same = project.tvmflow("diff", "next.lock.yaml", "next.lock.yaml")
    assert (same.code, same.out) == (0, "no difference\n")


@pytest.mark.slow
def test_a_build_is_repeated_by_itself_and_its_first_difference_named(project: Project) -> None:
    good = project.tvmflow("run", "tiny.yaml", "--check-reproducible")
    assert good.code == 0, good.err
    assert "reproducible: " in good.out
    # asked again it looks again, though everything is up to date
    again = project.tvmflow("run", "tiny.yaml", "--check-reproducible", "--json")
    assert json.loads(again.out.splitlines()[-1])["event"] == "reproduced"

    sabotage(project, "build", "scribble")
    bad = project.tvmflow("run", "tiny.yaml", "--check-reproducible")
    assert bad.code == 3
    assert "NOT REPRODUCIBLE: build 1 of 2 gave another lib0.o for tiny:build/host" in bad.out
    assert "first difference: section .text, symbol " in bad.out
