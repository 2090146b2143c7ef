"""Digests of files outside the store, remembered while the file system says they are unchanged.

A file counts as unchanged while its size, modification time, change time, inode and device are.
The change time catches tools that restore the modification time. A file that was written in the
last two seconds is hashed again next time, because a coarse clock could hide a second write (the
"racy git" problem). A time more than a day ahead is no time of a write: an archive or a wrong clock gave it.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence

from tvmflow.core.files import RACY_NS, hash_file
from tvmflow.store.local import LocalStore

_AHEAD_NS = 86_400 * 10**9


def stamp(path: str) -> list[int]:
    """Return what the file system knows of a file's content."""
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
        self._folders: dict[tuple[str, tuple[str, ...]], str] = {}

    def digest(self, path: str) -> str:
        """Return the sha256 (hex) of a file's content."""
        if path in self._digests:
            return self._digests[path]
        name = _note_name(path)
        before = stamp(path)
        digest = _remembered_digest(self._read_note(name), before)
        if digest is None:
            digest, is_stable = _hash_stable(path, before)
            if is_stable:
                text = json.dumps({"path": path, "stamp": before, "digest": digest})
                self._store.notes.keep(text, "stats", name)
        self._digests[path] = digest
        return digest

    def digest_folder(self, folder: str, names: Sequence[str]) -> str:
        """Return one sha256 (hex) of files in a folder: of their names, and the sha256 of the content of each.

        Stamps and digests of all of them are in one note, so that only those that changed are read.
        """
        ordered = tuple(sorted(names))
        if (folder, ordered) in self._folders:
            return self._folders[folder, ordered]
        note = _note_name(f"{folder}/")
        known = _remembered_files(self._read_note(note))
        lines, new = [], {}
        for name in ordered:
            path = f"{folder}/{name}"
            before = stamp(path)
            remembered, digest = known.get(name, ([], ""))
            if remembered != before:
                digest, is_stable = _hash_stable(path, before)
                if is_stable:
                    new[name] = (before, digest)
            lines.append(f"{digest}  {name}")
        if new:
            text = json.dumps({"path": folder, "files": {**known, **new}})
            self._store.notes.keep(text, "stats", note)
        digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
        self._folders[folder, ordered] = digest
        return digest

    def _read_note(self, name: str) -> str | None:
        return None if self._rehash else self._store.notes.read("stats", name)


def find_files(store: LocalStore, digest: str) -> list[str]:
    """Return the paths of files that had a digest when they were last read, and are unchanged since."""
    paths = []
    for name in store.notes.list("stats"):
        note = store.notes.read("stats", name)
        if not note or digest not in note:
            continue
        try:
            path = str(json.loads(note)["path"])
            if _remembered_digest(note, stamp(path)) == digest:
                paths.append(path)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(paths)


def _note_name(path: str) -> str:
    """Return the name of the note about a file, or about the files in a folder, which ends with a slash."""
    return hashlib.sha256(path.encode()).hexdigest()[:32]


def _hash_stable(path: str, before: list[int]) -> tuple[str, bool]:
    """Return the digest of a file, and whether its stamp tells from now on that it is unchanged."""
    digest = hash_file(path)
    now_ns = time.time_ns()
    is_recent = any(-_AHEAD_NS < now_ns - changed_ns <= RACY_NS for changed_ns in before[1:3])
    return digest, not is_recent and stamp(path) == before


def _remembered_files(text: str | None) -> dict[str, tuple[list[int], str]]:
    """Return the stamp and the digest of each file in a note about a folder; empty when there is none."""
    try:
        files = json.loads(text or "null")["files"]
        return {name: (list(stamp), str(digest)) for name, (stamp, digest) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remembered_digest(text: str | None, current_stamp: list[int]) -> str | None:
    """Return the digest in a note; None when there is none, or the file has another stamp now."""
    try:
        note = json.loads(text or "null")
        return str(note["digest"]) if note["stamp"] == current_stamp else None
    except (ValueError, KeyError, TypeError):
        return None
