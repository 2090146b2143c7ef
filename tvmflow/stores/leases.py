"""Who uses a store: a file for each run, locked for as long as it lives, and one lock for an instant.

    runs/<name>   held by a run until it ends; its modification time is when the run began
    use.lock      shared while a result is found, taken in or made known; alone while one goes

Times are those that the store's file system writes, so that they compare with those of its
other files. `collect` says why nothing that a run needs can go.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator


@contextlib.contextmanager
def held(root: str) -> Iterator[int]:
    """While this is open, a run is known to live; when it began (ns, by the store's file system)."""
    path, descriptor = _take(f"{root}/runs")
    try:
        yield os.fstat(descriptor).st_mtime_ns
    finally:
        # gone before it is free, so that nobody takes it for one that a kill left
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _take(folder: str) -> tuple[str, int]:
    """A lease of our own: its path, and the descriptor that locks it."""
    while True:
        os.makedirs(folder, exist_ok=True)
        path = f"{folder}/{os.getpid()}-{time.monotonic_ns()}-{os.urandom(4).hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # whoever looked before it was locked may have taken it for one that a kill left
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return path, descriptor
        os.close(descriptor)


def living(root: str, *, tidy: bool = False) -> list[int]:
    """When each living run began (ns). With `tidy`, what kills left of others is removed."""
    folder = f"{root}/runs"
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = f"{folder}/{name}"
        try:
            descriptor = os.open(path, os.O_RDWR if tidy else os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            began = os.fstat(descriptor).st_mtime_ns
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if tidy:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        except BlockingIOError:
            found.append(began)
        finally:
            os.close(descriptor)
    return found


@contextlib.contextmanager
def briefly(root: str, *, alone: bool = False) -> Iterator[None]:
    """Hold `use.lock` for an instant, with others or alone."""
    # one descriptor a call: threads that shared one would let go of each other's lock
    descriptor = os.open(f"{root}/use.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)
