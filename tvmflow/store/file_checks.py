"""Checks of the files of a store, folder by folder: each is of the right kind, in its place, and has its content.

Results and blobs are read by `integrity`, measured trials by `tuning.ledger_check`; a log is for
people, and any text may be in it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.files import hash_file, read_regular
from tvmflow.store.disk import is_damage
from tvmflow.store.local import FILES, FOLDERS, LocalStore
from tvmflow.store.notes import DamagedNote, unseal

# Gets the path of a regular file; returns whether its content is what was written.
ContentCheck = Callable[[Path], bool]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-f]{2}")
# Folders whose files come and go, or are nobody's business.
_UNCHECKED: Final = frozenset({"tmp", "damaged"})
_TRIALS_SUFFIX: Final = ".jsonl"
# How many folders are above a file; 1 where the table has none.
_DEPTHS: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("cas", "actions", "last", "failures", "spool"), (2,)),
    "logs": (1, 2),
}
_KINDS: Final[Mapping[str, str]] = {
    "cas": "blob", "actions": "result", "pins": "pin", "locks": "lock", "runs": "lease",
    "work": "claim", "logs": "log", "downloads": "download", "plans": "answer",
    "ledger": "trials", "spool": "upload", "locked": "schedules",
    "history": "run record",
}  # fmt: skip


class DamagedFile(NamedTuple):
    """A file or folder of a store that is not what it should be.

    Attributes:
        kind: What it should be: `note`, `pin`, `lock`, `folder`, `format`, ….
        name: Its path in the store.
        reason: What is wrong with it.
    """

    kind: str
    name: str
    reason: str


def find_damaged_files(
    store: LocalStore, checks: Mapping[str, ContentCheck]
) -> Iterator[DamagedFile]:
    """Yield what is not as it should be, apart from the contents of results, blobs and trials. Changes nothing.

    Args:
        store: The store.
        checks: How the files of further folders are checked, by the name of the folder.
    """
    root = Path(store.root)
    if store.condition() == "damaged":
        yield DamagedFile("format", "format", "it does not name the format of this store")
    for path in sorted(root.iterdir()):
        if path.name in FOLDERS:
            if not path.is_dir():
                yield DamagedFile("folder", path.name, "it is not a folder")
            elif path.name not in _UNCHECKED:
                yield from _check_folder(store, path, {**_CONTENT_CHECKS, **checks})
        elif path.name not in FILES:
            yield DamagedFile("file", path.name, "it is not part of a store")
        elif path.name != "format" and not path.is_file():
            yield DamagedFile("lock", path.name, "it is not a file")


def _check_folder(
    store: LocalStore, folder: Path, checks: Mapping[str, ContentCheck]
) -> Iterator[DamagedFile]:
    kind = _KINDS.get(folder.name, "note")
    check = checks.get(folder.name)
    for path in _list_files(folder):
        name = str(path.relative_to(store.root))
        if reason := _find_fault(folder, path, check):
            yield DamagedFile(kind, name, reason)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder that is no folder, and folders where files should be."""
    if folder.name == "work":
        # what a stage keeps there is its own
        for path in sorted(folder.iterdir()):
            yield path / "claim" if path.is_dir() else path
        return
    depths = _DEPTHS.get(folder.name, (1,))
    is_deep = folder.name == "ledger"
    for parent, folders, names in os.walk(folder):
        folders.sort()
        level = len(Path(parent).relative_to(folder).parts) + 1
        if is_deep:
            # a folder in the place of the trials of a workload
            misplaced = [name for name in folders if name.endswith(_TRIALS_SUFFIX)]
            names += misplaced
            folders[:] = [name for name in folders if name not in misplaced]
        if not is_deep and level == max(depths):
            names += folders
            folders.clear()
        yield from (Path(parent, name) for name in sorted(names))


def _find_fault(folder: Path, path: Path, check: ContentCheck | None) -> str:
    """Return what is wrong with a file; nothing when it is as it should be."""
    depth = len(path.relative_to(folder).parts)
    if folder.name not in ("ledger", "work") and depth not in _DEPTHS.get(folder.name, (1,)):
        return "it is not where a file should be"
    if folder.name == "work" and not os.path.lexists(path):
        # a run removes its claim, and makes that of a killed one again
        return ""
    if folder.name in ("cas", "actions") and not _is_named_well(path):
        return "its name is not a digest, or belongs to another folder"
    if not path.is_file():
        return "it is a link to nothing" if path.is_symlink() else "it is not a file"
    if check is None:
        return ""
    try:
        return "" if check(path) else "its content is damaged"
    except FileNotFoundError:
        # removed meanwhile, by a run or a collection
        return ""
    except OSError as error:
        if not is_damage(error, str(path)):
            raise
        return f"it cannot be read: {error.strerror}"


def _is_named_well(path: Path) -> bool:
    is_prefix = _PREFIX.fullmatch(path.parent.name) and path.name.startswith(path.parent.name)
    return bool(is_prefix and _DIGEST.fullmatch(path.name))


# ---------------------------------------------------------------- contents


def _unseal(path: Path, *names: str) -> str | None:
    """Return the text of a note, empty for an outdated one; None when it is damaged."""
    try:
        return unseal(read_regular(path), *names) or ""
    except DamagedNote:
        return None


def _is_note(path: Path) -> bool:
    return _unseal(path, path.parent.name, path.name) is not None


def _is_last_key(path: Path) -> bool:
    key = _unseal(path, "last", path.parent.name, path.name)
    return bool(_DIGEST.fullmatch(key or ""))


def _is_pin(path: Path) -> bool:
    try:
        note = json.loads(_unseal(path, "pins", path.name) or "")
        return all(isinstance(note[name], list) for name in ("keys", "digests")) and (
            str(note["name"]).replace("/", "+") == path.name and isinstance(note["file"], str)
        )
    except (ValueError, KeyError, TypeError):
        return False


def _is_download(path: Path) -> bool:
    # one that is not complete yet may have any content
    return bool(path.suffix) or not _DIGEST.fullmatch(path.name) or hash_file(path) == path.name


def _is_named_by_content(path: Path) -> bool:
    return hash_file(path) == path.name


def _is_note_in_folder(path: Path) -> bool:
    return _unseal(path, path.parent.parent.name, path.parent.name, path.name) is not None


_CONTENT_CHECKS: Final[Mapping[str, ContentCheck]] = {
    **dict.fromkeys(("stats", "facts", "delivered"), _is_note),
    "last": _is_last_key,
    "pins": _is_pin,
    "downloads": _is_download,
    "locked": _is_named_by_content,
    **dict.fromkeys(("failures", "spool"), _is_note_in_folder),
}
