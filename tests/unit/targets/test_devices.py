"""Device locks: files of this user alone, in a folder that others may have been first at."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tvmflow.core.errors import StoreError
from tvmflow.targets import devices


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "base"))
    return Path(devices.device_locks_folder())


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, with an old time."""
    path = tmp_path / "precious"
    path.write_text("content")
    os.utime(path, (1, 1))
    return path


def lock(folder: Path) -> None:
    with devices.exclusive(folder, devices.CPU):
        pass


def test_device_locks_are_private(locks: Path) -> None:
    """Their folders get mode 0700, also those that existed with another one."""
    locks.parent.mkdir(mode=0o755, parents=True)
    lock(locks)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (locks.parent, locks)] == [0o700, 0o700]
    assert stat.S_IMODE((locks / "cpu.lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("place", ["file", "locks", "folder"])
def test_no_lock_follows_a_link(locks: Path, victim: Path, place: str, exists: bool) -> None:
    """Neither the time of another file changes, nor is one made."""
    target = victim if place == "file" else victim.parent / "elsewhere"
    if place == "file" and not exists:
        victim.unlink()
    if place != "file" and exists:
        target.mkdir()
    path = {"file": locks / "cpu.lock", "locks": locks, "folder": locks.parent}[place]
    path.parent.mkdir(mode=0o700, parents=True)
    path.symlink_to(target)
    with pytest.raises(StoreError, match="cannot be locked") as caught:
        lock(locks)
    assert str(path) in caught.value.message and "XDG_RUNTIME_DIR" in caught.value.fix
    if place == "file":
        assert victim.exists() is exists and (not exists or victim.stat().st_mtime == 1)
    else:
        assert not exists or not list(target.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused(locks: Path, mode: int) -> None:
    """They could replace the locks, or have put hard links there."""
    for path in (locks.parent, locks):
        path.mkdir(parents=True)
        path.chmod(mode)
        with pytest.raises(StoreError, match=f"other users can write to {path}"):
            lock(locks)
        path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_refused(locks: Path) -> None:
    """It was made before this user's."""
    locks.mkdir(parents=True)
    os.chown(locks.parent, 1234, 1234)
    with pytest.raises(StoreError, match="belongs to user 1234, not to 0"):
        lock(locks)
