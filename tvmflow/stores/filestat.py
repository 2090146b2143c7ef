"""Digests of files outside the store, remembered for as long as their file system says they are unchanged.

A file counts as unchanged when size, modification time, change time, inode and device are.
Change time is what catches a tool that restores the modification time. A file that was
written in the last two seconds is hashed again next time, because a coarse clock could
hide a second write (the "racy git" problem).
"""

import hashlib
import json
import os
import time

from tvmflow.stores.local import LocalStore, hash_file

_RACY_NS = 2_000_000_000


def stamp(path: str) -> list[int]:
    """What the file system knows of a file's content. Raises OSError when there is no such file."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


class FileDigests:
    """sha256 of files by path, from the store's memory where the stamp still fits."""

    def __init__(self, store: LocalStore, *, rehash: bool = False) -> None:
        self._store = store
        self._rehash = rehash
        self._known: dict[str, str] = {}

    def digest(self, path: str) -> str:
        """sha256 (hex) of the file's content. Raises OSError when it cannot be read."""
        if path in self._known:
            return self._known[path]
        name = hashlib.sha256(path.encode()).hexdigest()[:32]
        before = stamp(path)
        note = None if self._rehash else self._store.read_note("stats", name)
        found = _parse(note)
        if found is not None and found["stamp"] == before:
            digest = str(found["digest"])
        else:
            digest = hash_file(path)
            now = time.time_ns()
            settled = now - max(before[1], before[2]) > _RACY_NS
            if settled and stamp(path) == before:
                self._store.write_note(
                    json.dumps({"path": path, "stamp": before, "digest": digest}), "stats", name
                )
        self._known[path] = digest
        return digest


def _parse(note: str | None) -> dict[str, object] | None:
    try:
        found = json.loads(note or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"stamp", "digest"} <= found.keys() else None
