"""Digests of files outside the store, remembered for as long as the file system says that they are unchanged.

A file counts as unchanged while its size, modification time, change time, inode and device are.
The change time catches tools that restore the modification time. A file that was written in the
last two seconds is hashed again next time, because a coarse clock could hide a second write (the
"racy git" problem).
"""

import hashlib
import json
import os
import time

from tvmflow.core.files import hash_file
from tvmflow.store.local import LocalStore

_RACY_NS = 2_000_000_000


def stamp(path: str) -> list[int]:
    """Return what the file system knows of a file's content.

    Raises:
        OSError: when the file does not exist.
    """
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def note_name(path: str) -> str:
    """Return the name of the note that remembers the stamp of a file at `path`."""
    return os.path.abspath(path).strip("/").replace("/", "+")[-200:]


class FileDigests:
    """The sha256 of files by path, from the store's notes where the stamp is unchanged."""

    def __init__(self, store: LocalStore, *, rehash: bool = False) -> None:
        self._store = store
        self._rehash = rehash
        self._digests: dict[str, str] = {}

    def digest(self, path: str) -> str:
        """Return the sha256 (hex) of a file's content.

        Raises:
            OSError: when it cannot be read.
        """
        if path in self._digests:
            return self._digests[path]
        name = hashlib.sha256(path.encode()).hexdigest()[:32]
        before = stamp(path)
        note = None if self._rehash else self._store.notes.read("stats", name)
        digest = _remembered_digest(note, before)
        if digest is None:
            digest = hash_file(path)
            is_stable = time.time_ns() - max(before[1], before[2]) > _RACY_NS
            if is_stable and stamp(path) == before:
                text = json.dumps({"path": path, "stamp": before, "digest": digest})
                self._store.notes.write(text, "stats", name)
        self._digests[path] = digest
        return digest


def _remembered_digest(text: str | None, current_stamp: list[int]) -> str | None:
    """Return the digest in a note; None when there is none, or the file has another stamp now."""
    try:
        note = json.loads(text or "null")
        return str(note["digest"]) if note["stamp"] == current_stamp else None
    except (ValueError, KeyError, TypeError):
        return None
