"""Files of other users, and limits of a user: what cannot be used is named with its remedy, and nothing is lost."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.other_user import GROUP, needs_other_users, own, run_as
from tests.support.project import Project

pytestmark = pytest.mark.faults

USERS: Final = (65_001, 65_002)
FEW: Final = "allow more open files (ulimit -n 4096)"
NO_MORE: Final = "the system starts no more processes or threads for this user"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others may enter, unlike those of pytest."""
    needs_other_users()
    with tempfile.TemporaryDirectory(prefix="tvmflow-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def ann(folder: Path) -> Project:
    """The project of a user without a home."""
    (folder / "ann").mkdir()
    project = Project(folder / "ann")
    own(project.folder, USERS[0])
    project.environment.pop("XDG_RUNTIME_DIR", None)
    return project


def test_files_of_another_user_are_named(ann: Project, first_run: tuple[Path, object]) -> None:
    """Store, deliveries, ledger, and single files of a store: exit code 4, and what to do; then all goes on."""
    shutil.copytree(first_run[0], ann.folder, dirs_exist_ok=True)
    ann.folder.chmod(0o755)
    own(ann.folder, USERS[0])
    ann.edit_recipe("samples: 2", "samples: 3")
    places = ("cache", "dist", "cache/actions", "cache/last", "cache/history")
    for name in places:
        own(ann.folder / name, 0)
        for path in (ann.folder / name).rglob("*") if name == "cache/actions" else ():
            if path.is_file():
                path.chmod(0o600)
        ended = run_as(USERS[0], ann, "run", "tiny.yaml")
        assert "Traceback" not in ended.out + ended.err
        assert ended.code == 4 or name == "cache/history", (name, ended.out, ended.err)
        if ended.code:
            assert "Permission denied" in ended.out + ended.err, name
            assert "let this user read and write it" in ended.out + ended.err, name
        own(ann.folder, USERS[0])
    assert run_as(USERS[0], ann, "run", "tiny.yaml").code == 0


def test_two_users_share_a_store(ann: Project, folder: Path) -> None:
    """A group and a umask that lets it write: each finds the results of the other, and may collect them."""
    store, home = folder / "store", folder / "bob"
    for path, mode in ((store, 0o2775), (home, 0o755)):
        path.mkdir()
        path.chmod(mode)
    os.chown(store, 0, GROUP)
    bob = Project(home)
    own(home, USERS[1])
    for project in (ann, bob):
        project.environment["TVMFLOW_STORE"] = str(store)
    first = run_as(USERS[0], ann, "run", "tiny.yaml", umask=0o002)
    assert first.code == 0, first.out + first.err
    second = run_as(USERS[1], bob, "run", "tiny.yaml", umask=0o002)
    assert (second.code == 0 and "0 ran" in second.out) or "nothing to run" in second.out, (
        second.out
    )
    collected = run_as(USERS[1], bob, "cache", "gc", "--max-age", "0", umask=0o002)
    assert collected.code == 0, collected.err
    assert run_as(USERS[0], ann, "cache", "verify", umask=0o002).code == 0
    for path in (store, *store.rglob("*")):
        if path.is_dir():
            path.chmod(0o2755)
    refused = run_as(USERS[1], bob, "cache", "gc")
    assert (refused.code, "Permission denied" in refused.err) == (4, True), refused.err


def test_a_user_with_few_processes(ann: Project) -> None:
    """The command says so with exit code 4, and with more of them, the run goes on where it stopped."""
    codes = {}
    for processes in (1, 2, 4, 6):
        ended = run_as(USERS[0], ann, "run", "tiny.yaml", limits=[f"--nproc={processes}"])
        text = ended.out + ended.err
        codes[processes] = ended.code
        assert "Traceback" not in text and "a bug" not in text, (processes, text)
        assert ended.code in (0, 4), (processes, text)
    assert codes[1] == 4
    assert NO_MORE in run_as(USERS[0], ann, "run", "tiny.yaml", limits=["--nproc=1"]).err
    assert run_as(USERS[0], ann, "run", "tiny.yaml").code == 0


def limited(project: Project, files: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        project.command(*words),
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )


def test_few_open_files(project: Project) -> None:
    """A plan and a run say what to allow, with exit code 4; the next run goes on where the last one stopped."""
    project.environment["TVMFLOW_REMOTE"] = "http://127.0.0.1:9"
    for files in (5, 6, 8):
        ended = limited(project, files, "plan", "tiny.yaml")
        assert "Traceback" not in ended.stderr, (files, ended.stderr)
        assert ended.returncode in (0, 4), (files, ended.stderr)
        assert FEW in ended.stderr or not ended.returncode, (files, ended.stderr)
    for files in (11, 14, 32):
        ended = limited(project, files, "run", "tiny.yaml", "--jobs", "3")
        text = ended.stdout + ended.stderr
        assert "Traceback" not in text, (files, text)
        assert ended.returncode in (0, 4), (files, text)
        assert FEW in text or not ended.returncode, (files, text)
    assert ended.returncode == 0
    for words in (("cache", "gc"), ("run-model", "dist/tiny/host/tiny.tvmflow")):
        assert limited(project, 16, *words).returncode == 0
