"""File locks: exclusive or shared, and released when their process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

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
