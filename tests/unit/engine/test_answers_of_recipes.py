"""Cached answers of real recipes: whatever their plan was made from, a change of it is noticed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
import pytest
from PIL import Image

from tests.support.fake_executor import FakeExecutor
from tests.support.file_edits import write_with_old_times
from tests.support.onnx_models import classifier
from tvmflow.core.codec import to_json
from tvmflow.core.types import Json
from tvmflow.engine import answers, session, up_to_date
from tvmflow.planning.prepare import RunRequest, prepare_run
from tvmflow.store.local import LocalStore
from tvmflow.targets.llvm_query import TargetFacts

ARGV = ["run", "net.yaml"]
RECIPE = """recipe: 1
name: net
model: {onnx: current/net.onnx}
inputs: {data: {shape: [1, 3, 8, 8], image: {}}}
labels: labels.txt
targets: [{name: edge, preset: x86-64-v2, toolchain: {linker: linker}}]
outputs: [bundle]
verify: {data: images}
pipeline: mine
"""
PIPELINE = "pipeline: 1\nname: mine\nstages: [import, build, export, verify]\n"


def query(targets: Sequence[Json]) -> list[Json]:
    """Answer as LLVM does, whatever the target."""
    facts = TargetFacts("x86_64-linux-gnu", "x86-64-v2", "x86_64", ("sse4.2",))
    return [to_json(facts) for _ in targets]


def run() -> None:
    """Bring the recipe up to date, and deliver."""
    store = LocalStore(str(Path("cache").absolute()))
    store.create()
    plan = prepare_run(RunRequest(("net.yaml",)), store, None, query).plan
    options = session.SessionOptions(dist="dist")
    report = session.run_plan(plan, store, FakeExecutor(), lambda event: None, options)
    assert report.exit_code == 0


def confirm() -> bool:
    """Plan, and save the answer if all is up to date, as a run does that begins three seconds later."""
    store = LocalStore(str(Path("cache").absolute()))
    prepared = prepare_run(RunRequest(("net.yaml",)), store, None, query)
    prepared = prepared._replace(started_ns=time.time_ns() + 3 * 10**9)
    confirmed = up_to_date.confirm_run(ARGV, prepared, store, "dist", as_json=False, quiet=False)
    return confirmed is not None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with a recipe, and all files and links that it names: what a test changes, others leave alone."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("PATH", f"{folder}/bin:{folder}/late:{os.environ['PATH']}")
        patch.chdir(folder)
        for name in ("bin", "late", "pipelines", "images/cat", "releases/1"):
            Path(name).mkdir(parents=True)
        model, weights = "releases/1/net.onnx", "net.data"
        onnx.save(
            classifier(), model, save_as_external_data=True, location=weights, size_threshold=0
        )
        shutil.copytree("releases/1", "releases/2")
        Path("current").symlink_to("releases/1")
        for name in "abcd":
            Image.new("RGB", (8, 8)).save(f"images/cat/{name}.png")
        Path("labels.txt").write_text("cat\ndog\nfox\nowl\n")
        Path("net.yaml").write_text(RECIPE)
        Path("pipelines/mine.yaml").write_text(PIPELINE)
        Path("late/linker").write_text("#!/bin/sh\necho 1\n")
        Path("late/linker").chmod(0o755)
        yield


def edit(name: str) -> Callable[[], object]:
    """Return what changes a file of that name and restores its modification time, as a backup may."""
    return lambda: write_with_old_times(Path(name), Path(name).read_bytes() + b"\n")


def copy(name: str) -> Callable[[], object]:
    """Return what puts a copy in the place of a folder, with the modification times of its files."""

    def restore() -> None:
        shutil.copytree(name, "copy")
        shutil.rmtree(name)
        Path("copy").rename(name)

    return restore


def move_link() -> None:
    """Have the link to the folder of the model name another one with an equal model, which is as old."""
    Path("current").unlink()
    Path("current").symlink_to("releases/2")


CHANGES: dict[str, Callable[[], object]] = {
    "the recipe": edit("net.yaml"),
    "its pipeline": edit("pipelines/mine.yaml"),
    "the weights of the model, in a file of their own": edit("releases/1/net.data"),
    "a link to the folder of another model": move_link,
    "the labels": edit("labels.txt"),
    "an image": edit("images/cat/a.png"),
    "one more image": lambda: shutil.copy("images/cat/a.png", "images/cat/z.png"),
    "one image less": lambda: Path("images/cat/b.png").unlink(),
    "an image of another name": lambda: Path("images/cat/c.png").rename("images/cat/y.png"),
    "the linker": edit("late/linker"),
    "a linker that is found first": lambda: shutil.copy("late/linker", "bin/linker"),
    "a delivered file that is gone": lambda: Path("dist/net/edge/net.tvmflow").unlink(),
    "a folder of delivered files that is gone": lambda: shutil.rmtree("dist/net"),
    "delivered files from a backup": copy("dist"),
    "a cleaned store": lambda: shutil.rmtree("cache/cas"),
    "records from a backup": copy("cache/actions"),
}


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_a_recipe_reads_makes_the_answer_invalid(change: str) -> None:
    """Even one that keeps size or modification time, or that only adds a file."""
    run()
    assert confirm()
    assert answers.find_answer(ARGV) is not None
    CHANGES[change]()
    assert answers.find_answer(ARGV) is None
