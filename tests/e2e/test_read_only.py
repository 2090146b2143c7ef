"""A project that may only be read: what shows something works, and what writes names the folder that it cannot write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from tests.support.disks import protect, small_disk
from tests.support.project import Project

READERS: Final[tuple[tuple[str, ...], ...]] = (
    ("plan", "tiny.yaml"),
    ("explain", "tiny.yaml", "build"),
    ("targets", "--cpus", "aarch64"),
    ("runs",),
    ("cache", "gc", "--dry-run"),
)


@pytest.mark.slow
@pytest.mark.parametrize("is_built", [True, False])
def test_a_read_only_project_can_be_planned_and_shown(
    is_built: bool, project: Project, tmp_path: Path
) -> None:
    """With a store or without one; a note that would only save time is left out."""
    readers = [*READERS[: None if is_built else 4]]
    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        for name in ("tiny.yaml", "tiny.onnx"):
            shutil.copy(project.folder / name, disk)
        project.folder = disk
        if is_built:
            assert project.run("--pipeline", "compile").code == 0
            # as after a copy: what was delivered has other stamps than the notes say
            shutil.copytree(disk / "dist", disk / "copy")
            shutil.rmtree(disk / "dist")
            (disk / "copy").rename(disk / "dist")
            readers += [("show", "kernels", "tiny.yaml", "--pipeline", "compile"), ("show", "run")]
        protect(disk)
        for words in readers:
            ended = project.tvmflow(*words)
            assert ended.code == 0, (words, ended.err)
            assert not ended.err
        lock = "cache/run.lock" if is_built else str(disk)
        writers = {("run", "tiny.yaml"): lock, ("init", "tiny.onnx", "--force"): str(disk)}
        for writer, place in writers.items():
            ended = project.tvmflow(*writer)
            assert ended.code == 4, (writer, ended.err)
            assert f"{place}: " in ended.err and ".tmp" not in ended.err
            assert "Read-only file system" in ended.err


def test_a_folder_of_device_locks_that_cannot_be_written_is_named_with_its_remedy(
    project: Project,
) -> None:
    """That of another user, for example, which `su` leaves in the environment; it is not a folder of the store."""
    project.environment["XDG_RUNTIME_DIR"] = "/sys"
    stopped = project.run_here("--pipeline", "compile")
    assert (stopped.code, stopped.outcome("import")) == (4, "blocked")
    stage = stopped.stages["import"]
    assert stage["message"].startswith("the devices of this machine cannot be locked: /sys: ")
    assert stage["fix"] == "set $XDG_RUNTIME_DIR to a folder of your own, or unset it"
    assert not (project.folder / "dist").exists()
