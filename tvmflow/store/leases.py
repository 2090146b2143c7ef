"""Leases and claims: which runs use a store, which of them makes a result, and their locks.

    run.lock      shared by all runs; held exclusively by `clean`, and by the run that sweeps
    runs/<name>   the lease of a run, locked until the run ends; its modification time is when the run began,
                  or the earliest time that the clock has had since, should it be set back
    use.lock      shared while a result is found, added or published; exclusive while one is removed

Times are those of the store's file system, so that they compare with those of its other files.
`garbage_collection` explains why nothing that a run needs can be removed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from tvmflow.core import file_locks
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import StoreError
from tvmflow.core.file_locks import Locked, lock
from tvmflow.core.files import temporary_name
from tvmflow.store.disk import StoreFolder, remove_tree


@contextlib.contextmanager
def use_lock(root: str, *, exclusive: bool = False) -> Iterator[None]:
    """Hold `use.lock` for an instant, shared with other runs or exclusively."""
    # each call opens the file: threads that shared a descriptor would release each other's lock
    descriptor = StoreFolder(root).open_lock(f"{root}/use.lock")
    try:
        lock(descriptor, shared=not exclusive)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_lease(root: str) -> Iterator[int]:
    """Hold the lease of a run while the block runs, and give the descriptor of its file."""
    path, descriptor = _create_lease(f"{root}/runs")
    try:
        yield descriptor
    finally:
        # removed before it is unlocked, so that nobody takes it for a stale one
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _create_lease(folder: str) -> tuple[str, int]:
    while True:
        os.makedirs(folder, exist_ok=True)
        path = f"{folder}/{temporary_name()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock(descriptor)
        # before it was locked, another process may have removed it as a stale one
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return path, descriptor
        os.close(descriptor)


def active_runs(root: str, *, remove_stale: bool = False) -> list[int]:
    """Return when each active run began (ns), after removing leases of killed processes if asked to."""
    folder = f"{root}/runs"
    began = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = f"{folder}/{name}"
        # a lease may be gone by now, and what is not a file is none: the next run removes it
        if not os.path.isfile(path):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR if remove_stale else os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            run_began = os.fstat(descriptor).st_mtime_ns
            lock(descriptor, wait=False)
            if remove_stale:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        except Locked:
            began.append(run_began)
        finally:
            os.close(descriptor)
    return began


def exclude_runs(root: str) -> contextlib.AbstractContextManager[None]:
    """Keep every run out of a store while the block runs."""
    return exclude_others(root, "run.lock", f"a run is using the store {root}")


@contextlib.contextmanager
def exclude_others(root: str, name: str, refusal: str) -> Iterator[None]:
    """Hold the lock of a file in a store while the block runs.

    Raises:
        StoreError: with the text `refusal` when another process holds it.
    """
    folder, path = StoreFolder(root), f"{root}/{name}"
    with contextlib.ExitStack() as stack:
        try:
            with disk_errors(root):
                folder.make_folder(os.path.dirname(path))
                descriptor = folder.open_lock(path)
                stack.callback(os.close, descriptor)
                lock(descriptor, wait=False)
        except Locked:
            raise StoreError(refusal, fix="wait for it to end, then try again") from None
        yield


class SharedLease:
    """The one lease of all runs of this process on a store, held until the last of them ends.

    `began_ns` is when the first of them began; None while there is none.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._holders = 0
        self._mutex = threading.Lock()
        self._held = contextlib.ExitStack()
        self._descriptor = -1
        self.began_ns: int | None = None

    def follow_clock(self, now_ns: int) -> None:
        """Move the lease to an earlier time: the clock was set back, and uses count from the lease on."""
        with self._mutex:
            if self.began_ns is not None and now_ns < self.began_ns:
                with contextlib.suppress(OSError):
                    os.utime(self._descriptor, ns=(now_ns, now_ns))
                self.began_ns = now_ns

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the lease while the block runs, and give when it began (ns)."""
        with self._mutex:
            if not self._holders:
                self._held, self._descriptor = self._acquire()
                self.began_ns = os.fstat(self._descriptor).st_mtime_ns
            self._holders += 1
            began_ns = self.began_ns or 0
        try:
            yield began_ns
        finally:
            with self._mutex:
                self._holders -= 1
                if not self._holders:
                    self.began_ns = None
                    self._held.close()

    def _acquire(self) -> tuple[contextlib.ExitStack, int]:
        root = self._folder.root
        with contextlib.ExitStack() as stack:
            with disk_errors(root):
                descriptor = self._folder.open_lock(f"{root}/run.lock")
            stack.callback(os.close, descriptor)
            # the first of several runs sweeps
            with contextlib.suppress(Locked):
                lock(descriptor, wait=False)
                self._folder.sweep()
            lock(descriptor, shared=True)
            with disk_errors(root):
                self._folder.make_folder(f"{root}/runs")
                descriptor = stack.enter_context(hold_lease(root))
            return stack.pop_all(), descriptor


# ---------------------------------------------------------------- claims
# The lock on a key while one process makes its result, and the work folder that belongs to it.


class Claim:
    """A claimed key: its work folder, in it an empty one for output files, and one to resume from."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.out = f"{folder}/out"
        self.work = f"{folder}/work"

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the name (with slashes) and the path of every output file."""
        for parent, _, names in os.walk(self.out):
            for name in names:
                path = f"{parent}/{name}"
                yield os.path.relpath(path, self.out), path


@contextlib.contextmanager
def claim(folder: StoreFolder, key: str) -> Iterator[Claim]:
    """Wait until no other process works on a key, then hold its claim while the block runs."""
    claimed = Claim(f"{folder.root}/work/{key}")
    with disk_errors(folder.root):
        descriptor = _lock_folder(folder, claimed.folder)
        remove_tree(claimed.out)
        folder.make_folder(claimed.out)
        folder.make_folder(claimed.work)
    try:
        yield claimed
    finally:
        os.close(descriptor)


def release(folder: StoreFolder, claimed: Claim) -> None:
    """Remove the work folder of a claim whose result is in the store."""
    # moved away first: whoever waits for this key may fill a folder of the same name at once
    removed = folder.temporary_path()
    with contextlib.suppress(FileNotFoundError):
        os.rename(claimed.folder, removed)
    remove_tree(removed)


def _lock_folder(store: StoreFolder, folder: str) -> int:
    """Return a descriptor that locks a work folder, which may have been removed while we waited."""
    while True:
        try:
            store.make_folder(folder)
            descriptor = store.open_lock(f"{folder}/claim")
        except (FileNotFoundError, FileExistsError):
            # its last holder removed the folder meanwhile
            continue
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            file_locks.lock(descriptor, subject="a result that another run is making")
            with contextlib.suppress(FileNotFoundError):
                if os.stat(f"{folder}/claim").st_ino == os.fstat(descriptor).st_ino:
                    stack.pop_all()
                    return descriptor
