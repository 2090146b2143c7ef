"""Errors of disks: what is full, where, and what is missing; whatever a library says of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disks import NOEXEC, READ_ONLY, fill, small_disk
from tvmflow.core.disk_errors import (
    check_free_space,
    check_writable,
    disk_errors,
    explain,
    find_disk_problem,
    find_file_system,
    is_disk_full,
    make_folder,
)
from tvmflow.core.errors import EXIT_ENVIRONMENT, StoreError

NUMBERS = (
    "EACCES EPERM EROFS EEXIST EISDIR ELOOP ENOTDIR ENOTEMPTY ENXIO ENAMETOOLONG EFBIG EIO ENODEV "
    "ESTALE EMFILE ENFILE ENOLCK EOPNOTSUPP EBUSY ETXTBSY ENOSPC EDQUOT ENOSYS EINVAL"
).split()


@pytest.mark.parametrize("name", NUMBERS)
def test_every_error_of_a_disk_has_a_message_and_a_fix(name: str, tmp_path: Path) -> None:
    """It ends with the exit code of the environment, whatever else happened."""
    number = getattr(errno, name)
    with pytest.raises(StoreError) as raised, disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "file"))
    assert raised.value.exit_code == EXIT_ENVIRONMENT
    assert str(tmp_path) in raised.value.message and raised.value.fix


def test_a_folder_that_cannot_be_written_is_named_and_not_the_file_that_was_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary file has a name that nobody knows; a file that is there is named itself."""
    monkeypatch.chdir(tmp_path)
    refused = PermissionError(errno.EACCES, "Permission denied", ".1-2-3.tmp")
    problem = explain(refused, "somewhere")
    assert problem is not None and problem.message == f"{tmp_path}: Permission denied"
    refused.filename = str(tmp_path / "store" / "locks")
    problem = explain(refused, "somewhere")
    assert problem is not None and problem.message == f"{tmp_path}: Permission denied"
    (tmp_path / "run.lock").touch()
    refused.filename = str(tmp_path / "run.lock")
    problem = explain(refused, "somewhere")
    assert problem is not None and problem.message == "run.lock: Permission denied"


def test_other_errors_stay_what_they_are() -> None:
    """A file that is not there is for whoever expected it."""
    assert explain(FileNotFoundError(errno.ENOENT, "No such file", "x"), "/store") is None
    assert explain(OSError(errno.EINVAL, "Invalid argument"), "/store") is None
    with pytest.raises(FileNotFoundError), disk_errors("/store"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")


@pytest.mark.parametrize("prepare", [make_folder, check_writable])
def test_a_folder_that_cannot_be_made_is_a_problem_of_the_environment(
    prepare: Callable[[Path], None], tmp_path: Path
) -> None:
    """A file in its place or above it, a link to nowhere, and a file system that takes no folders."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "folder")
    for name in ("file", "file/dist", "link"):
        with pytest.raises(StoreError, match="move the file at that path away"):
            prepare(tmp_path / name)
    with pytest.raises(StoreError, match="/proc/dist cannot be created: No such file") as raised:
        prepare(Path("/proc/dist"))
    assert "choose a folder on a disk" in raised.value.fix


def test_looking_whether_a_folder_can_be_written_leaves_nothing_there(tmp_path: Path) -> None:
    """Whether it exists or not; a disk that may only be read is noticed, also by root."""
    check_writable(tmp_path)
    check_writable(tmp_path / "dist" / "net")
    assert not [*tmp_path.iterdir()]
    with small_disk(tmp_path / "disk", 64 << 10, flags=READ_ONLY) as disk:
        with pytest.raises(StoreError, match="Read-only file system") as raised:
            check_writable(disk / "dist" / "net")
        assert raised.value.message.startswith(f"{disk}: ")


def test_a_full_disk_is_named_with_what_is_missing(tmp_path: Path) -> None:
    """The folder, the file system, what is free, and how much more is needed."""
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        fill(disk)
        with pytest.raises(StoreError) as raised, disk_errors(disk / "lib.so", needed=12_000_000):
            (disk / "lib.so").write_bytes(bytes(8192))
        assert raised.value.message == (
            f"no space left on the disk of {disk / 'lib.so'} (tmpfs at {disk}, 0 B of 65.5 kB free); "
            "12.0 MB are needed, 12.0 MB more"
        )
        assert "free some space there" in raised.value.fix
        assert is_disk_full(raised.value)


def test_a_disk_without_inodes_is_told_from_one_without_bytes(tmp_path: Path) -> None:
    """Space would not help then: files have to go."""
    with small_disk(tmp_path / "disk", 1 << 20, files=3) as disk:
        with pytest.raises(StoreError, match="all of its 3 files in use"), disk_errors(disk):
            for number in range(5):
                (disk / str(number)).touch()
        assert find_file_system(disk).is_full


def test_the_disk_that_is_full_is_named_where_an_error_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that writes temporary files says `No space left`, and not where."""
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        fill(disk)
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        problem = explain(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
        assert problem is not None and f"the disk of {disk} (tmpfs" in problem.message
        assert "$TMPDIR" in problem.fix


@pytest.mark.parametrize(
    "text",
    [
        "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
        "ld.lld: error: failed to write output: No space left on device",
        "error: NoSpaceLeft",
        "Disk quota exceeded",
        "OSError: [Errno 28]",
        "cannot open a.o: Read-only file system",
        "Too many open files",
        "Input/output error",
    ],
)
def test_the_words_of_other_programs_are_understood(text: str, tmp_path: Path) -> None:
    """They keep the number of the error for themselves."""
    assert find_disk_problem([tmp_path], text) is not None


def test_a_program_that_says_nothing_is_understood_by_the_disk(tmp_path: Path) -> None:
    """A linker that writes to mapped memory is killed: only the disk tells why."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        assert find_disk_problem([disk], "-7") is None
        fill(disk)
        problem = find_disk_problem([disk], "-7")
        assert problem is not None and f"tmpfs at {disk}" in problem.message


def test_downloads_leave_a_reserve(tmp_path: Path) -> None:
    """The last part of a disk stays for logs, records and everybody else."""
    with small_disk(tmp_path / "disk", 10 << 20) as disk:
        check_free_space(disk, 9 << 20)
        with pytest.raises(
            StoreError, match=r"no space left .* 11\.0 MB are needed, 524\.3 kB more"
        ):
            check_free_space(disk, 10 << 20)


def test_a_file_system_is_described_by_what_it_allows(tmp_path: Path) -> None:
    """A path that does not exist yet counts as the nearest folder that does."""
    with small_disk(tmp_path / "a b", 1 << 20, flags=READ_ONLY | NOEXEC) as disk:
        described = find_file_system(disk / "not" / "yet")
        assert described[:2] == (str(disk), "tmpfs")
        assert described.is_noexec and not described.is_network


@pytest.mark.parametrize("answers", [True, False])
def test_a_disk_that_does_not_say_what_is_free_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Some file systems in user space have no size, and a sandbox may forbid to ask."""

    def ask(path: object) -> os.statvfs_result:
        if not answers:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return os.statvfs_result([4096, 4096, *[0] * 8])

    monkeypatch.setattr(os, "statvfs", ask)
    check_free_space(tmp_path, 1 << 40)
    assert not find_file_system(tmp_path).is_full
    assert "free space unknown" in str(find_file_system(tmp_path))
    assert find_disk_problem([tmp_path], "-7") is None
