"""Digests of files outside the store, remembered as long as the file system shows no change.

A file counts as unchanged while its size, modification time, change time, inode and device are the same. Tools that
restore the modification time are revealed by the change time. A file written in the last two seconds is hashed again
next time, because a coarse clock could hide a second write ("racy git"). Times more than a day in the future come from
archives or wrong clocks.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence

from tvmflow.core.files import RACY_NS, hash_file
from tvmflow.store.local import LocalStore

_AHEAD_NS = 86_400 * 10**9
# The entry's name in a note about a single file.
_ALONE = ""


def stamp(path: str) -> list[int]:
    """Return the attributes of a file that change whenever its content does."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def note_name(path: str) -> str:
    """Return the name of the note that remembers the stamp of a file at `path`."""
    return os.path.abspath(path).strip("/").replace("/", "+")[-200:]


class FileDigests:
    """The sha256 of files by path, cached in the store's notes until a file's stamp changes."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._digests: dict[str, str] = {}
        self._folders: dict[tuple[str, tuple[str, ...]], str] = {}

    def digest(self, path: str) -> str:
        """Return the sha256 (hex) of a file's content."""
        if path not in self._digests:
            [self._digests[path]] = self._list_digests(path, {_ALONE: path}).values()
        return self._digests[path]

    def digest_folder(self, folder: str, names: Sequence[str]) -> str:
        """Return one sha256 (hex) for files in a folder, covering each file's name and content digest."""
        ordered = tuple(sorted(names))
        if (folder, ordered) not in self._folders:
            paths = {name: f"{folder}/{name}" for name in ordered}
            digests = self._list_digests(f"{folder}/", paths)
            lines = [f"{digest}  {name}" for name, digest in digests.items()]
            digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
            self._folders[folder, ordered] = digest
        return self._folders[folder, ordered]

    def _list_digests(self, subject: str, paths: Mapping[str, str]) -> dict[str, str]:
        """Return each path's digest by name; paths in one note are hashed only if their stamps changed."""
        note = hashlib.sha256(subject.encode()).hexdigest()[:32]
        _, known = _read_note(self._store.notes.read("stats", note))
        digests, new = {}, {}
        for name, path in paths.items():
            before = stamp(path)
            remembered, digests[name] = known.get(name, ([], ""))
            if remembered != before:
                digests[name] = hash_file(path)
                now_ns = time.time_ns()
                is_recent = any(-_AHEAD_NS < now_ns - at_ns <= RACY_NS for at_ns in before[1:3])
                if not is_recent and stamp(path) == before:
                    new[name] = (before, digests[name])
        if new:
            text = json.dumps({"path": subject.rstrip("/"), "files": {**known, **new}})
            self._store.notes.keep(text, "stats", note)
        return digests


def find_files(store: LocalStore, digest: str) -> list[str]:
    """Return the paths of files that had this digest when last read, and have not changed since."""
    paths = []
    for name in store.notes.list("stats"):
        path, known = _read_note(store.notes.read("stats", name))
        with contextlib.suppress(OSError):
            if _ALONE in known and known[_ALONE] == (stamp(path), digest):
                paths.append(path)
    return sorted(paths)


def _read_note(text: str | None) -> tuple[str, dict[str, tuple[list[int], str]]]:
    """Return a note's path, and its stamps and digests by name; empty for another kind of note."""
    try:
        note = json.loads(text or "null")
        files = {
            name: (list(stamp), str(digest)) for name, (stamp, digest) in note["files"].items()
        }
        return str(note["path"]), files
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", {}
