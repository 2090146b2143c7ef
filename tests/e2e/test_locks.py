"""Lock files: the same bytes on other machines, errors for everything that differs, and the diff of two."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import inject_fault
from tests.support.project import Project
from tvmflow.recipe.lock_file import read_lock
from tvmflow.release import lock
from tvmflow.release.reproduce import ENVIRONMENTS
from tvmflow.store import garbage_collection
from tvmflow.store.garbage_collection import Limits
from tvmflow.store.inventory import add_pin
from tvmflow.store.local import LocalStore

DELIVERED = ("tiny.so", "tiny.tvmflow")


def delivered(project: Project) -> dict[str, str]:
    folder = project.folder / "dist/tiny/host"
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in DELIVERED
        if (folder / name).exists()
    }


def copy_to_machine(project: Project, folder: Path) -> Project:
    """Copy recipe, model and lock file to a machine that has built nothing."""
    folder.mkdir(parents=True)
    other = Project(folder)
    for name in ("tiny.yaml", "tiny.onnx", "tiny.lock.yaml"):
        if (project.folder / name).exists():
            (folder / name).write_bytes((project.folder / name).read_bytes())
    return other


@pytest.mark.nightly
@pytest.mark.slow
def test_a_locked_run_gives_the_same_bytes_in_an_empty_store_or_fails(
    project: Project, tmp_path: Path
) -> None:
    locked = project.tvmflow("lock", "tiny.yaml")
    assert locked.code == 0, locked.err
    assert "tiny.lock.yaml (new)" in locked.out
    assert "tiny.lock.yaml (unchanged)" in project.tvmflow("lock", "tiny.yaml").out

    other = copy_to_machine(project, tmp_path / "another/machine")
    other.environment["PYTHONHASHSEED"] = "77"
    # no delivered file has a time
    other.environment["SOURCE_DATE_EPOCH"] = "1700000000"
    again = other.run("--locked", "--jobs", "2")
    assert again.ran == [
        "import",
        "lower/host",
        "extract_tasks/host",
        "build/host",
        "export/host",
        "verify/host",
    ]
    assert delivered(other) == delivered(project) != {}
    assert other.run("--locked").ran == []

    def refused(*arguments: str) -> str:
        run = other.tvmflow("run", "tiny.yaml", "--locked", *arguments)
        assert run.code == 2, run.out
        return run.err

    assert "there is no lock file no.lock.yaml" in refused("--lock", "no.lock.yaml")
    assert "tiny.yaml is a recipe; a lock file is expected here" in refused("--lock", "tiny.yaml")
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

    # When the lock file names other bytes than the build gives, nothing is delivered.
    digest = project.digests("build/host")["build/host/vm/lib0.o"]
    lock.write_text(text.replace(digest, "f" * 64))
    different = other.tvmflow("run", "tiny.yaml", "--locked", "--dist", "different")
    assert different.code == 3
    assert "tiny:build/host: vm/lib0.o has the digest" in different.err
    assert not (other.folder / "different").exists()


RELEASED = """\
pipeline: 1
name: all
stages: [import, build, export]
recipes: [tiny.yaml]
release: {version: "1.0", folder: releases}
"""


@pytest.mark.parametrize("command", [pytest.param("lock", marks=pytest.mark.slow), "run"])
def test_garbage_collection_before_the_pin_keeps_the_results_of_this_run(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """By then the recipe may need other results; until the pin exists, the lease of the run keeps its results."""
    (project.folder / "all.yaml").write_text(RELEASED)
    missing = []
    pin: Callable[..., list[str]] = add_pin

    def after_a_collection(store: LocalStore, *words: Any, **more: Any) -> list[str]:
        shutil.rmtree(Path(store.root, "last"))
        # what was made a moment ago counts as made before
        limits = Limits(max_age_s=0.0, clock_margin_s=0.0)
        garbage_collection.collect_garbage(LocalStore(store.root), limits)
        missing.append(pin(store, *words, **more))
        return missing[-1]

    monkeypatch.setattr(lock, "add_pin", after_a_collection)
    assert project.call(command, "all.yaml").code == 0
    assert missing == [[]]


@pytest.mark.slow
def test_a_tuned_release_is_locked_with_its_schedules(project: Project, tmp_path: Path) -> None:
    """A locked run measures no trial and uses the recorded schedules."""
    project.spend_whole_budget()
    # on one core: a kernel as small as this gains nothing from two
    project.write_recipe(trials=8, targets=("{name: host, preset: host, num_cores: 1}",))
    project.write_model(channels=64)
    # a convolution without a schedule by rule, which is slower than with any that a search finds
    project.edit_recipe("trials: 8", "trials: 8, only: [conv2d]")
    project.edit_recipe("tune:", "kernels: {schedules: none}\ntune:")
    # long enough to be told apart beside another worker
    project.edit_recipe("repeat: 2, min_repeat_ms: 2", "repeat: 6, min_repeat_ms: 8")
    assert project.tvmflow("lock", "tiny.yaml").code == 0
    lock = (project.folder / "tiny.lock.yaml").read_text()
    if "trace: " not in lock:
        # with AVX2, LLVM's code for these loops may be as fast as any that 8 trials find
        pytest.skip("no trial was faster than the kernel without a schedule on this machine")
    shown_lock = project.tvmflow("inspect", "tiny.lock.yaml")
    assert "a lock" in shown_lock.out and "tiny 0 for host" in shown_lock.out, shown_lock.err
    other = copy_to_machine(project, tmp_path / "other")
    again = other.run("--locked")
    assert "tune/host" not in again.stages
    assert delivered(other) == delivered(project)
    assert other.trials() == []
    rules = again.stages["build/host"]["facts"]["schedule_rules"]
    assert rules["tuned"]
    assert other.tvmflow("verify", "dist").code == 0
    (shown,) = other.tvmflow("inspect", "dist/tiny/host/tiny.so", "--json").events
    kernels = shown["provenance"]["kernels"]
    tuned = {kernel["name"]: kernel["record"]["trial"] for kernel in kernels if "record" in kernel}
    assert sorted(tuned) == rules["tuned"]
    measured = {trial.partition("/")[2] for trial in project.trials()}
    assert set(tuned.values()) <= measured

    (other.folder / "broken.lock.yaml").write_text(lock.replace('"GetSBlock"', '"GetBlock"', 1))
    broken = other.tvmflow("run", "tiny.yaml", "--locked", "--lock", "broken.lock.yaml")
    assert broken.code == 2
    assert "trace: is not the trace of this trial" in broken.err

    check_update(other)
    third = copy_to_machine(project, tmp_path / "third")
    seeded = third.tvmflow("records", "import", "tiny.lock.yaml")
    assert seeded.code == 0, seeded.err
    searched = third.run("--until", "tune")
    assert "the machine of a lock file" in json.dumps(searched.stages["tune/host"]["facts"])

    project.write_model(seed=5, channels=8)
    assert project.tvmflow("lock", "tiny.yaml", "--lock", "next.lock.yaml").code == 0
    changed = project.tvmflow("diff", "tiny.lock.yaml", "next.lock.yaml")
    assert changed.code == 1
    assert "weights     changed" in changed.out
    assert "kernels     " in changed.out
    assert "latency" in changed.out
    difference = json.loads(
        project.tvmflow("diff", "--json", "tiny.lock.yaml", "next.lock.yaml").out
    )
    assert {change["place"] for change in difference["changes"]} == {"tiny", "tiny/host"}
    same = project.tvmflow("diff", "next.lock.yaml", "next.lock.yaml")
    assert (same.code, same.out) == (0, "no difference\n")


TUNED = RELEASED.replace(
    "[import, build, export]", "[import, extract_tasks, tune, pick_best, build, export, verify]"
)


def contents_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_a_locked_release_has_the_same_files_and_bytes_as_the_one_that_made_the_lock(
    project: Project, tmp_path: Path
) -> None:
    """In another folder, at another time, with another store, environment, umask and previous release.

    What is measured has files of its own, in the release as in dist; they exist on both sides.
    """
    project.write_recipe(trials=4, targets=("host", "x86-64-v2"))
    (project.folder / "all.yaml").write_text(TUNED)
    first = project.tvmflow("run", "all.yaml")
    assert first.code == 0, first.err

    place = tmp_path / "another" / "place"
    place.mkdir(parents=True)
    other = Project(place)
    for name in ("tiny.yaml", "tiny.onnx", "all.yaml"):
        (other.folder / name).write_bytes((project.folder / name).read_bytes())
    lock = project.folder / "releases/all-1.0/release.lock.yaml"
    # A release before this one, which the first one did not have.
    text = TUNED.replace('"1.0"', '"0.9"').replace("[tiny.yaml]", "[old.yaml]")
    (other.folder / "all.yaml").write_text(text)
    other.write_recipe(targets=("host",), name="old.yaml")
    other.edit_recipe("name: tiny", "name: old", "old.yaml")
    older = other.tvmflow("run", "all.yaml")
    assert older.code == 0, older.err
    (other.folder / "all.yaml").write_text(
        TUNED.replace("folder: releases", "folder: releases, drop: [old]")
    )
    shutil.rmtree(other.folder / "dist")
    other.environment |= {**ENVIRONMENTS[0].variables, "PYTHONHASHSEED": "7"}
    command = shlex.join(other.command("run", "all.yaml", "--locked", "--lock", str(lock)))
    again = subprocess.run(
        ["sh", "-c", f"umask 077; exec {command} --store elsewhere"],
        cwd=other.folder,
        env=other.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr

    for folder, measured in (
        (
            "releases/all-1.0",
            {"measurements.json", "measurements.html", "measurements.intoto.jsonl"},
        ),
        (
            "dist/tiny",
            {
                f"{target}/{name}"
                for target in ("host", "x86-64-v2")
                for name in ("measurements.json", "tiny.measurements.intoto.jsonl")
            },
        ),
    ):
        made, made_again = (contents_below(one.folder / folder) for one in (project, other))
        assert made.keys() == made_again.keys()
        assert {name for name in made if made[name] != made_again[name]} == measured
        assert any(name.endswith("roofline.svg") for name in made)
    # The checksums cover everything but the statements, which may be signed later, and the measurements.
    release = project.folder / "releases/all-1.0"
    names = contents_below(release).keys()
    sums = (release / "SHA256SUMS").read_text().splitlines()
    covered = {line.partition("  ")[2] for line in sums}
    assert covered == {
        name
        for name in names
        if not name.endswith((".intoto.jsonl", "SHA256SUMS"))
        and not name.startswith("measurements.")
    }
    assert (
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=release).returncode
        == 0
    )
    assert other.tvmflow("verify", "releases/all-1.0", "dist").code == 0
    shown = other.tvmflow("inspect", "dist/tiny/host/tiny.so").out
    assert "passed against ONNX Runtime" in shown and " per call" in shown
    compared = other.tvmflow("diff", str(lock), "releases/all-1.0/release.lock.yaml")
    assert "latency" in compared.out


def check_update(machine: Project) -> None:
    """Check that new weights get the locked schedules on a machine without a ledger, and that new kernels are named."""
    path = machine.folder / "tiny.lock.yaml"
    before = read_lock(path).recipes["tiny"]
    machine.write_model(seed=5, channels=64)
    updated = machine.tvmflow("lock", "tiny.yaml", "--update")
    assert updated.code == 0, updated.err
    assert "does not cover" not in updated.out
    assert machine.trials() == []
    after = read_lock(path).recipes["tiny"]
    assert after.targets["host"].kernels == before.targets["host"].kernels
    assert after.stages["import"].inputs != before.stages["import"].inputs
    assert after.stages["build/host"].outputs.keys() == before.stages["build/host"].outputs.keys()
    assert machine.run("--locked").ran == []
    assert "(unchanged)" in machine.tvmflow("lock", "tiny.yaml", "--update").out

    machine.write_model(seed=5, channels=8)
    changed = machine.tvmflow("lock", "tiny.yaml", "--update")
    assert changed.code == 0, changed.err
    assert "tiny for host: tiny.lock.yaml does not cover " in changed.out
    assert "`tvmflow lock` without --update tunes them" in changed.out
    kernels = read_lock(path).recipes["tiny"].targets["host"].kernels.values()
    assert any(not kernel.trial for kernel in kernels)
    assert machine.run("--locked").code == 0

    path.unlink()
    missing = machine.tvmflow("lock", "tiny.yaml", "--update")
    assert missing.code == 2 and "there is no lock file tiny.lock.yaml" in missing.err


@contextlib.contextmanager
def one_cpu() -> Iterator[None]:
    """Let commands run on one CPU alone, as in a smaller container."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one CPU")
def test_host_is_one_build_whatever_cpus_the_shell_leaves(project: Project, tmp_path: Path) -> None:
    """Untuned, and with the schedules of one lock file: the same libraries, and no stage before verify runs again."""
    project.write_model(channels=64)
    project.run()
    alone = copy_to_machine(project, tmp_path / "alone")
    with one_cpu():
        alone.run()
        again = project.run("--dist", "again")
    assert delivered(alone) == delivered(project)
    assert again.ran == ["verify/host"]
    project.spend_whole_budget()
    project.edit_recipe("trials: 0", "trials: 24, only: [conv2d]")
    project.edit_recipe("tune:", "kernels: {schedules: none}\ntune:")
    with one_cpu():
        # on one core: a kernel as small as this gains nothing from two
        assert project.tvmflow("lock", "tiny.yaml").code == 0
    assert "trace: " in (project.folder / "tiny.lock.yaml").read_text()
    other = copy_to_machine(project, tmp_path / "other")
    locked = other.run("--locked")
    assert locked.stages["build/host"]["facts"]["schedule_rules"]["tuned"]
    assert delivered(other) == delivered(project)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_reproducibility_check_builds_again_and_names_the_first_difference(
    project: Project,
) -> None:
    good = project.tvmflow("run", "tiny.yaml", "--check-reproducible")
    assert good.code == 0, good.err
    assert "reproducible: " in good.out
    # A second check builds again, though everything is up to date.
    again = project.tvmflow("run", "tiny.yaml", "--check-reproducible", "--json")
    assert json.loads(again.out.splitlines()[-1])["event"] == "reproduced"

    inject_fault(project, "build", "vary-output")
    bad = project.tvmflow("run", "tiny.yaml", "--check-reproducible")
    assert bad.code == 3
    assert (
        "NOT REPRODUCIBLE: build 1 of 2 gave a different vm/lib0.o for tiny:build/host" in bad.out
    )
    assert "first difference: section .text, symbol " in bad.out
