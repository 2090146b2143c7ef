"""File locks: exclusive or shared, and released when their process dies."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tvmflow.core import file_locks
from tvmflow.core.errors import Interrupted
from tvmflow.core.file_locks import Locked, held, lock, open_lock_file

HOLDER = """
import sys, time
from tvmflow.core.file_locks import held
with held(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


def is_free(path: Path, *, shared: bool = False) -> bool:
    try:
        with held(path, shared=shared, wait=False):
            return True
    except Locked:
        return False


def test_an_exclusive_lock_keeps_all_others_out(tmp_path: Path) -> None:
    """Until its block ends, however it ends."""
    path = tmp_path / "lock"
    with pytest.raises(ZeroDivisionError), held(path):
        assert not is_free(path)
        assert not is_free(path, shared=True)
        raise ZeroDivisionError
    assert is_free(path)


def test_shared_locks_allow_each_other(tmp_path: Path) -> None:
    """And keep an exclusive one out."""
    path = tmp_path / "lock"
    with held(path, shared=True):
        assert is_free(path, shared=True)
        assert not is_free(path)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """Nothing has to be cleaned up."""
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert not is_free(path)
        holder.send_signal(signal.SIGKILL)
    assert is_free(path)


def test_a_thread_waits_for_the_holder(tmp_path: Path) -> None:
    """It gets the lock when the other one has ended."""
    path = tmp_path / "lock"
    order: list[str] = []

    def wait() -> None:
        with held(path):
            order.append("waited")

    with held(path):
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.1)
        order.append("held")
    waiter.join()
    assert order == ["held", "waited"]


def test_a_descriptor_holds_its_lock_until_it_is_closed(tmp_path: Path) -> None:
    """`held` gives its descriptor; others can be locked directly."""
    path = tmp_path / "lock"
    descriptor = open_lock_file(path, mode=0o600)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        lock(descriptor)
        assert not is_free(path)
    finally:
        os.close(descriptor)
    assert is_free(path)


def test_a_lock_file_in_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    """The caller creates the folder."""
    with pytest.raises(FileNotFoundError), held(tmp_path / "none" / "lock"):
        pass


def test_a_lock_is_taken_when_its_holder_lets_others_in(tmp_path: Path) -> None:
    """A wait ends with the lock, which then belongs to who has waited."""
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with held(path):
            order.append("second")

    thread = threading.Thread(target=wait)
    with held(path):
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    with held(path, wait=False):
        pass


def test_a_signal_ends_a_wait_and_leaves_the_lock_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that nobody waits for any more is not kept when it is given at last."""
    path = tmp_path / "lock"
    with held(path):
        monkeypatch.setattr("tvmflow.core.termination.signal_number", lambda: 15)
        with (
            pytest.raises(Interrupted, match="stopped while waiting for the device"),
            held(path, subject="the device"),
        ):
            pass
    deadline = time.monotonic() + 10
    while not is_free(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_free(path)


def test_who_waits_says_for_whom(tmp_path: Path) -> None:
    """After a second, once for all threads, with the process that holds the lock and since when."""
    path, notices = tmp_path / "lock", list[str]()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )

    def wait() -> None:
        with held(path, subject="the device"):
            pass

    with pytest.MonkeyPatch.context() as patch, holder:
        patch.setattr(file_locks, "_notify", print)
        file_locks.report_waits(notices.append)
        assert holder.stdout is not None
        holder.stdout.readline()
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 40
        while not notices and time.monotonic() < deadline:
            time.sleep(0.01)
        # a second notice would follow soon
        time.sleep(0.5)
        holder.kill()
        for thread in threads:
            thread.join(10)
    assert len(notices) == 1
    expected = rf"waiting for the device, held by pid {holder.pid} \(.+\) since \d\d:\d\d:\d\d"
    assert re.fullmatch(expected, notices[0], re.DOTALL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_disk_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever its file system answers."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(OSError, match="files cannot be locked there") as raised,
        held(tmp_path / "run.lock"),
    ):
        pass
    assert raised.value.errno == errno.ENOLCK
    assert raised.value.filename == str(tmp_path / "run.lock")
