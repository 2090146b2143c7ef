"""Digests of outside files: remembered while unchanged, and never believed too long."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tvmflow.stores import filestat, local
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were really read, in order."""
    paths: list[str] = []
    plain = local.hash_file

    def recording(path: str) -> str:
        paths.append(path)
        return plain(path)

    monkeypatch.setattr(filestat, "hash_file", recording)
    return paths


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ten seconds pass."""
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)


def test_an_unchanged_file_is_read_once(
    tmp_path: Path, store: LocalStore, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run takes the digest from the store's memory."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    settle(monkeypatch)
    digests = [FileDigests(store).digest(str(path)) for _ in range(3)]
    assert digests == [hashlib.sha256(b"weights").hexdigest()] * 3
    assert hashed == [str(path)]


def test_a_file_written_just_now_is_read_again(
    tmp_path: Path, store: LocalStore, hashed: list[str]
) -> None:
    """A coarse clock could hide a second write: what is younger than two seconds is not remembered."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    FileDigests(store).digest(str(path))
    FileDigests(store).digest(str(path))
    assert hashed == [str(path)] * 2


def test_a_restored_modification_time_does_not_hide_a_change(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, same modification time, other content: the change time gives it away."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    settle(monkeypatch)
    before = FileDigests(store).digest(str(path))
    times = path.stat()
    time.sleep(0.01)
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert FileDigests(store).digest(str(path)) != before


def test_a_broken_memory_is_no_obstacle(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store remembers is a convenience: when it is damaged, the file is read."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    settle(monkeypatch)
    right = FileDigests(store).digest(str(path))
    for note in Path(store.root, "stats").iterdir():
        note.write_text("{ torn")
    assert FileDigests(store).digest(str(path)) == right
