"""File locks: held by the operating system for one process, and released when that process dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator


class Locked(Exception):
    """Another process holds the lock, and `wait` was not set."""


def open_lock_file(path: str | os.PathLike[str], *, mode: int = 0o644) -> int:
    """Return a descriptor of the lock file at `path`, made if it is not there. Its folder must exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file until its descriptor is closed.

    Args:
        descriptor: Of an open file. A lock belongs to the descriptor: threads that share one share its lock.
        shared: Allow others that lock it `shared`, too.
        wait: Wait for whoever holds it.

    Raises:
        Locked: when another process holds it and `wait` is not set.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, operation if wait else operation | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked from None


@contextlib.contextmanager
def held(
    path: str | os.PathLike[str], *, shared: bool = False, wait: bool = True, mode: int = 0o644
) -> Iterator[int]:
    """Hold the lock of the file at `path` while the block runs, and give its descriptor.

    Raises:
        Locked: when another process holds it and `wait` is not set.
        OSError: when the lock file cannot be made.
    """
    descriptor = open_lock_file(path, mode=mode)
    try:
        lock(descriptor, shared=shared, wait=wait)
        yield descriptor
    finally:
        os.close(descriptor)
