"""`tvmflow show kernel`: what is known of a kernel, and the code that is in the library."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.project import Project
from tvmflow.store.local import LocalStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose library is tuned and verified."""
    project = Project(tmp_path_factory.mktemp("kernels"))
    project.write_recipe(trials=8)
    assert project.run().code == 0
    return project


def test_all_that_is_known_of_a_kernel(tuned: Project) -> None:
    """The same for the recipe and for its run."""
    shown = tuned.tvmflow("show", "kernel", "tiny.yaml", "fused_conv", "--record")
    assert shown.code == 0, shown.err
    assert "tiny/host: fused_conv" in shown.out
    for field in ("nodes", "schedule", "time", "roofline", "workload"):
        assert f"\n  {field} " in shown.out
    assert "GFLOPS" in shown.out and "TVM 0.27" in shown.out and " in 1 call" in shown.out
    of_run = tuned.tvmflow("show", "kernel", "latest", "fused_conv", "host", "--record")
    assert of_run.out == shown.out


def list_operations(path: str) -> list[str]:
    """Return the operations in an object file without operands, and without those that only align others."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    operations = re.findall(r"^ *[0-9a-f]+:\t(\S+)", text, re.MULTILINE)
    return [
        name for name in operations if name not in ("nop", "nopw", "nopl", "data16", "cs", "xchg")
    ]


@pytest.mark.skipif(not shutil.which("objdump"), reason="there are no binutils on this machine")
def test_the_assembly_is_that_of_the_library(tuned: Project, tmp_path: Path) -> None:
    """Assembled again, it has the instructions of one of the objects that were linked."""
    shown = tuned.tvmflow("show", "kernel", "tiny.yaml", "fused_conv", "--asm", "--json")
    (kernel,) = json.loads(shown.out).values()
    again = tmp_path / "again.o"
    source = kernel["code"]["assembly"]
    subprocess.run(["as", "-o", str(again), "-"], input=source, text=True, check=True)
    store = LocalStore(str(tuned.folder / "cache"))
    built = store.find(store.last_key("tiny", "build/host") or "")
    assert built is not None
    linked = [
        " ".join(list_operations(store.blobs.path(file.digest)))
        for file in built.files
        if Path(file.name).match("kernels*.o")
    ]
    operations = list_operations(str(again))
    assert len(operations) > 100
    assert any(" ".join(operations) in text for text in linked)


def test_what_a_run_did_not_find_out_is_said_with_its_remedy(project: Project) -> None:
    """Neither trials nor times: the library was only built."""
    assert project.run("--until", "build").code == 0
    shown = project.tvmflow("show", "kernel", "latest", "fused_conv", "--record")
    assert shown.code == 0, shown.err
    assert "not measured: `tvmflow run tiny.yaml` verifies and measures" in shown.out
    assert "no trial: this library was built without a search" in shown.out
    wrong = project.tvmflow("show", "kernel", "tiny.yaml", "fuse_conv")
    assert wrong.code == 2 and "did you mean 'fused_conv" in wrong.err
