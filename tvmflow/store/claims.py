"""Claims: the lock on a key while one process makes its result, and the work folder that belongs to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tvmflow.core import file_locks
from tvmflow.core.disk_errors import disk_errors
from tvmflow.store.disk import StoreFolder, remove_tree


class Claim:
    """A claimed key.

    Attributes:
        folder: The work folder.
        out: An empty folder for the output files.
        work: A folder as the last attempt left it, to resume from.
    """

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
    """Wait until no other process works on a key, then hold its claim while the block runs.

    Raises:
        StoreError: when the disk is full or not writable.
    """
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
    """Return a descriptor that locks a work folder, which its last holder may have removed while we waited."""
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
