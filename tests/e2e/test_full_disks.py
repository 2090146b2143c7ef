"""Full disks: every command ends with exit code 4, names what is full, and loses nothing that was finished."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.disks import fill, grow, small_disk
from tests.support.project import Project, Ran

PLACES = ("store", "dist", "temporary files", "locks", "IR dump")


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


def test_a_linker_without_space_is_told_from_a_linker_that_fails(
    project: Project, tmp_path: Path
) -> None:
    """It is killed while it writes to mapped memory; with more space the next run goes on from there."""
    with small_disk(tmp_path / "disk", 300 << 10) as disk:
        failed = project.run("--store", str(disk))
        assert_reported(failed, disk)
        assert failed.outcome("build/host") == "blocked"
        grow(disk)
        assert project.run("--store", str(disk)).ran == ["build/host", "export/host", "verify/host"]


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


def attempt(project: Project, place: str, disk: Path) -> str:
    """Run on a small disk, then with more space; return how the first run ended."""
    words = place_on(project, place, disk)
    first = project.run(*words)
    if first.code:
        assert_reported(first, disk)
    done = (
        [label for label, stage in first.stages.items() if stage["outcome"] == "ran"]
        if (first.events and "stages" in first.events[-1])
        else []
    )
    grow(disk)
    second = project.run(*words)
    assert second.code == 0, messages(second)
    assert not set(done) & set(second.ran), "what was finished ran again"
    return f"exit {first.code}"


@pytest.mark.faults
def test_fifty_full_disks(project: Project, tmp_path: Path) -> None:
    """Of all sizes, without bytes or without files, in every place, tuned: reported, and finished with more space."""
    project.write_recipe(trials=2)
    assert project.run().code == 0
    cases = [("store", 12 + 26 * step, 0) for step in range(22)]
    cases += [("store", 4096, 8 + 9 * step) for step in range(12)]
    cases += [("dist", 4 + 8 * step, 0) for step in range(5)]
    cases += [("dist", 4096, 1 + step) for step in range(3)]
    cases += [("temporary files", 4 << step, 0) for step in range(3)]
    cases += [("locks", 4096, 1 + step) for step in range(3)]
    cases += [("IR dump", 8 << (2 * step), 0) for step in range(2)]
    ends: Counter[str] = Counter()
    for number, (place, kilobytes, files) in enumerate(cases):
        run = Project(tmp_path / f"run{number}")
        run.environment = dict(run.environment)
        run.write_recipe(trials=2)
        with small_disk(tmp_path / f"disk{number}", kilobytes << 10, files=files) as disk:
            ends[f"{place}: {attempt(run, place, disk)}"] += 1
    print(f"{len(cases)} full disks: {dict(sorted(ends.items()))}")
    assert len(cases) == 50
    assert sum(number for end, number in ends.items() if end.endswith("exit 4")) > 30
