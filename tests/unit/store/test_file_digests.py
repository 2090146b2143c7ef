"""Digests of outside files: remembered while the files are unchanged, and no longer."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tests.support.file_edits import write_with_old_times
from tvmflow.core import files
from tvmflow.store import file_digests
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that were really read, in order."""
    paths: list[str] = []
    plain = files.hash_file

    def recording(path: str) -> str:
        paths.append(path)
        return plain(path)

    monkeypatch.setattr(file_digests, "hash_file", recording)
    return paths


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ten seconds pass."""
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)


def test_an_unchanged_file_is_read_once(
    tmp_path: Path, store: LocalStore, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run takes the digest from a note of the store."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    settle(monkeypatch)
    digests = [FileDigests(store).digest(str(path)) for _ in range(3)]
    assert digests == [hashlib.sha256(b"weights").hexdigest()] * 3
    assert hashed == [str(path)]


def test_a_file_written_just_now_is_read_again(
    tmp_path: Path, store: LocalStore, hashed: list[str]
) -> None:
    """A coarse clock could hide a second write: a file that is younger than two seconds is not remembered."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    FileDigests(store).digest(str(path))
    FileDigests(store).digest(str(path))
    assert hashed == [str(path)] * 2


def test_a_restored_modification_time_does_not_hide_a_change(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same size and modification time and another content, the change time shows the difference."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    settle(monkeypatch)
    before = FileDigests(store).digest(str(path))
    write_with_old_times(path, b"WEIGHTS")
    assert FileDigests(store).digest(str(path)) != before


def test_a_damaged_note_is_ignored(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a note is damaged, the file is read."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    settle(monkeypatch)
    right = FileDigests(store).digest(str(path))
    for note in Path(store.root, "stats").iterdir():
        note.write_text("{ torn")
    assert FileDigests(store).digest(str(path)) == right


def test_files_of_a_folder_have_one_digest_and_one_note(
    tmp_path: Path, store: LocalStore, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of names and content; only what has changed is read again, in whatever order the names are."""
    folder, names = tmp_path / "images", ["cat/a.png", "dog/b.png", "dog/c.png"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    settle(monkeypatch)
    before = FileDigests(store).digest_folder(str(folder), names)
    assert FileDigests(store).digest_folder(str(folder), names[::-1]) == before
    assert hashed == [str(folder / name) for name in names]
    assert len(list(store.notes.list("stats"))) == 1
    other_store = LocalStore(str(tmp_path / "other"))
    assert FileDigests(other_store).digest_folder(str(folder), names) == before
    hashed.clear()
    (folder / names[1]).write_bytes(b"other")
    settle(monkeypatch)
    changed = FileDigests(store).digest_folder(str(folder), names)
    assert hashed == [str(folder / names[1])]
    fewer = FileDigests(store).digest_folder(str(folder), names[:2])
    (folder / names[2]).rename(folder / "dog/d.png")
    renamed = FileDigests(store).digest_folder(str(folder), [*names[:2], "dog/d.png"])
    assert len({before, changed, fewer, renamed}) == 4
    with pytest.raises(FileNotFoundError, match=r"c\.png"):
        FileDigests(store).digest_folder(str(folder), names)


def test_a_damaged_note_about_a_folder_is_no_digest(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    settle(monkeypatch)
    before = FileDigests(store).digest_folder(str(tmp_path), ["a.png"])
    [name] = store.notes.list("stats")
    for text in (
        "[]",
        "{",
        '{"files": []}',
        '{"files": {"a.png": 3}}',
        '{"files": {"a.png": [[], 1]}}',
    ):
        store.notes.write(text, "stats", name)
        assert FileDigests(store).digest_folder(str(tmp_path), ["a.png"]) == before


def test_a_file_from_the_future_is_read_once(
    tmp_path: Path, store: LocalStore, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive, or a clock that was wrong, gave it that time; a write would give it another."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    os.utime(path, (2**31, 2**31))
    settle(monkeypatch)
    for _ in range(3):
        FileDigests(store).digest(str(path))
    assert hashed == [str(path)]
