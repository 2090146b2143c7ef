"""Atomic files: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tvmflow.core import files


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    """Text and bytes; nothing else is left in the folder."""
    path = tmp_path / "note"
    files.write_atomically(path, "one")
    files.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert names_in(tmp_path) == ["note"]


def test_a_failure_leaves_the_old_content(tmp_path: Path) -> None:
    """The new file is removed."""
    path = tmp_path / "note"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.replacing(path) as temporary:
        Path(temporary).write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["note"]


def test_a_failure_before_anything_is_written_is_raised_as_it_is(tmp_path: Path) -> None:
    """There is no temporary file to remove then."""
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "note"):
        raise ZeroDivisionError
    assert names_in(tmp_path) == []


def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    """It stays as it is."""
    (tmp_path / "note" / "inner").mkdir(parents=True)
    with pytest.raises(OSError):
        files.write_atomically(tmp_path / "note", "text")
    assert names_in(tmp_path) == ["note"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    """Other users of a shared store can read it."""
    before = os.umask(0o022)
    try:
        files.write_atomically(tmp_path / "note", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "note").stat().st_mode & 0o777 == 0o644


def test_readers_see_whole_contents_only(tmp_path: Path) -> None:
    """While another thread writes again and again."""
    path = tmp_path / "note"
    contents = ["a" * 50_000, "b" * 70_000]
    files.write_atomically(path, contents[0])
    stop = threading.Event()

    def write() -> None:
        for number in range(200):
            files.write_atomically(path, contents[number % 2])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not stop.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(contents)


def test_names_of_temporary_files_are_unique() -> None:
    """Also within one process."""
    assert len({files.temporary_name() for _ in range(1000)}) == 1000


def test_files_and_folders_can_be_synced(tmp_path: Path) -> None:
    """A path that does not exist is an error."""
    (tmp_path / "file").touch()
    files.sync(str(tmp_path / "file"))
    files.sync(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        files.sync(str(tmp_path / "none"))


def test_a_pipe_that_a_user_names_is_written_to(tmp_path: Path) -> None:
    """As root, replacing what /dev/stdout or /dev/null names would take it from every program."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files.write_output(path, "text")
    content = os.read(reader, 100)
    os.close(reader)
    assert content == b"text"
    assert path.is_fifo()


def test_an_open_file_that_a_user_names_is_written_to(tmp_path: Path) -> None:
    """What `--output /dev/fd/3 3> file` writes is in that file, which stays the one that is open."""
    with (tmp_path / "file").open("wb") as stream:
        files.write_output(f"/dev/fd/{stream.fileno()}", "text")
        assert os.fstat(stream.fileno()).st_size == 4


def test_a_file_that_a_user_names_is_replaced(tmp_path: Path) -> None:
    """A reader sees the old content or the new one."""
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as reader:
        files.write_output(path, "new")
        assert (reader.read(), path.read_text()) == ("old", "new")


def test_a_digest_follows_changed_files(tmp_path: Path) -> None:
    """What was digested before is read again once its stamp differs."""
    path = tmp_path / "a.c"
    path.write_text("int a;")
    first = files.digest_files([path])
    assert files.digest_files([path]) == first
    files.write_atomically(str(path), "int b;")
    assert files.digest_files([path]) != first


def refuse(number: int) -> Any:
    def call(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_that_cannot_be_asked_to_flush_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of folders and files; that the disk fails or is full is one."""
    assert files.sync(str(tmp_path))
    monkeypatch.setattr(os, "fsync", refuse(number))
    assert not files.sync(str(tmp_path))
    for other in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr(os, "fsync", refuse(other))
        with pytest.raises(OSError, match=os.strerror(other)):
            files.sync(str(tmp_path))
    monkeypatch.setattr(os, "open", refuse(errno.EACCES))
    assert not files.sync(str(tmp_path))
    with pytest.raises(PermissionError):
        files.sync(str(tmp_path / "file"))


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EINVAL, errno.EPERM, errno.ENOSYS])
def test_what_a_disk_lacks_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A read-only mode is left out; a link is a copy; what cannot be mapped is read."""
    map_memory = mmap.mmap
    monkeypatch.setattr(
        mmap,
        "mmap",
        lambda file, *args, **_: refuse(number)() if args[0] == 0 else map_memory(file, *args),
    )
    monkeypatch.setattr(os, "chmod", refuse(number))
    monkeypatch.setattr(os, "symlink", refuse(number))
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"content")
    with path.open("rb") as stream:
        assert files.map_file(stream)[:] == b"content"
    assert not files.protect(str(path))
    files.symlink_or_copy(path, link)
    assert link.read_bytes() == b"content" and not link.is_symlink()
