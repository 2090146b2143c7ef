"""Full disks: every command ends with exit code 4, names what is full, and loses nothing that was finished."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Count
from tests.support.disks import fill, grow, small_disk
from tests.support.project import Project, Ran


def place_on(project: Project, place: str, disk: Path) -> list[str]:
    """Have a run use a disk for one of its folders; return the words that its command line needs for that."""
    if place == "temporary files":
        project.environment["TMPDIR"] = str(disk)
    if place == "locks":
        project.environment["XDG_RUNTIME_DIR"] = str(disk)
    return {
        "store": ["--store", str(disk)],
        "dist": ["--dist", str(disk)],
        "IR dump": ["--dump-ir", str(disk)],
    }.get(place, [])


def messages(ran: Ran) -> str:
    """Return everything that a run said to the user."""
    stages = ran.stages.values() if ran.events and "stages" in ran.events[-1] else ()
    problems = [event.get("problem", "") for event in ran.events]
    return "\n".join([ran.err, *(stage["message"] for stage in stages), *map(str, problems)])


def assert_reported(ran: Ran, disk: Path) -> None:
    """Exit code 4, and a message that names the disk that is full."""
    assert ran.code == 4, messages(ran)
    assert f"tmpfs at {disk}" in messages(ran), messages(ran)
    assert "no space left on the disk of" in messages(ran)


@pytest.mark.slow
@pytest.mark.parametrize("size", [340 << 10, pytest.param(400 << 10, marks=pytest.mark.nightly)])
def test_a_linker_without_space_is_told_from_a_linker_that_fails(
    size: int, project: Project, tmp_path: Path
) -> None:
    """Compiler and linker are killed while they write to mapped memory; with more space the run goes on from there."""
    with small_disk(tmp_path / "disk", size) as disk:
        failed = project.run("--store", str(disk))
        assert_reported(failed, disk)
        last = ["build/host", "export/host", "verify/host"]
        blocked = [label for label in last if failed.outcome(label) == "blocked"]
        assert blocked in (["build/host"], ["export/host"])
        grow(disk)
        assert project.run("--store", str(disk)).ran == last[last.index(blocked[0]) :]


@pytest.mark.slow
def test_whatever_writes_outside_the_store_names_the_full_disk(
    project: Project, tmp_path: Path
) -> None:
    """Deliveries, dumps of IR, lock files, trials, keys and redirected output; with more space they succeed."""
    project.write_recipe(trials=1)
    assert project.run().code == 0
    with small_disk(tmp_path / "disk", 64 << 10, files=500) as disk:
        commands = [
            ("run", "tiny.yaml", "--json", "--dist", str(disk / "dist")),
            ("run", "tiny.yaml", "--json", "--dump-ir", str(disk / "ir")),
            ("lock", "tiny.yaml", "--lock", str(disk / "tiny.lock.yaml")),
            ("records", "export", str(disk / "pack.gz")),
            ("keygen", str(disk / "key")),
        ]
        for words in commands:
            fill(disk)
            ended = project.tvmflow(*words)
            assert ended.code == 4, (words, ended.out, ended.err)
            assert f"tmpfs at {disk}" in messages(ended), (words, messages(ended))
        with (disk / ".filling").open("ab") as output:
            shown = subprocess.run(
                project.command("targets"),
                cwd=project.folder,
                env=project.environment,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (shown.returncode, f"tmpfs at {disk}" in shown.stderr) == (4, True), shown.stderr
        grow(disk)
        assert [project.tvmflow(*words).code for words in (commands[0], commands[-1])] == [0, 0]


# Places, and the sizes of their disks from run to run: bytes and files.
SIZES: Final = {
    "store": [((12 + 44 * step) << 10, 100_000) for step in range(20)],
    "store without files": [(4 << 20, 8 + 9 * step) for step in range(12)],
    "dist": [((4 + 8 * step) << 10, 100_000) for step in range(6)],
    "dist without files": [(4 << 20, 1 + step) for step in range(3)],
    "temporary files": [(4096 << step, 100_000) for step in range(3)],
    "locks": [(4 << 20, 1 + step) for step in range(3)],
    "IR dump": [(8192 << (2 * step), 100_000) for step in range(3)],
}


@pytest.mark.faults
@pytest.mark.parametrize("place", SIZES)
def test_fifty_full_disks(project: Project, tmp_path: Path, place: str, count: Count) -> None:
    """Runs on a disk that grows a little from one to the next: each is reported, and none does again what another finished."""
    assert sum(map(len, SIZES.values())) == 50
    project.write_recipe(trials=2)
    ends: Counter[str] = Counter()
    (size, files), *larger = SIZES[place]
    with small_disk(tmp_path / "disk", size, files=files) as disk:
        words = place_on(project, place.removesuffix(" without files"), disk)
        done: set[str] = set()
        for size, files in [*larger, (256 << 20, 100_000)]:
            ran = project.run(*words)
            if ran.code:
                assert_reported(ran, disk)
            finished = ran.ran if ran.events and "stages" in ran.events[-1] else []
            assert not done & set(finished), "what was finished ran again"
            done |= set(finished)
            ends[f"exit {ran.code}"] += 1
            grow(disk, size, files)
        ran = project.run(*words)
        assert ran.code == 0, messages(ran)
        assert not done & set(ran.ran)
    count("small disks", ends.total())
    for end, number in ends.items():
        count(f"small disks: {end}", number)
    assert ends.total() == len(SIZES[place])
    assert ends["exit 4"] or place == "temporary files"
