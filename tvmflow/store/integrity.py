"""Integrity check and repair: files that do not match their names are set aside or made again."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from tvmflow.core.codec import from_json
from tvmflow.core.files import hash_file, read_regular
from tvmflow.store import disk
from tvmflow.store.disk import is_damage, unseal
from tvmflow.store.garbage_collection import exclude_maintenance
from tvmflow.store.inventory import Inventory, Pin, take_inventory
from tvmflow.store.local import FILES, FOLDERS, DamagedBlob, LocalStore

# Gets the number of blobs read so far, and the total number.
Progress = Callable[[int, int], None]


class Finding(NamedTuple):
    """A damaged or missing part of the store.

    The kind is `result`, `blob`, `trials`, or the expected kind of another file: `note`, `pin`, `lock`, `folder`, ….
    The name is a key, a digest, or the path of another file, which then has a `reason`. `affected` lists the results
    that the next run makes again, or the pins that need the part.
    """

    kind: str
    name: str
    fault: Literal["damaged", "missing"] = "damaged"
    affected: tuple[str, ...] = ()
    reason: str = ""


class IntegrityReport(NamedTuple):
    """How many results, blobs and bytes were read, and what was wrong."""

    results: int
    blobs: int
    bytes: int
    findings: tuple[Finding, ...]


def check_integrity(
    store: LocalStore, progress: Progress, checks: Mapping[str, ContentCheck] = MappingProxyType({})
) -> IntegrityReport:
    """Read every file; move damaged results and blobs to `damaged/`. Runs may be active.

    `progress` is called for each blob; `checks` adds to the checks of `find_damaged_files`.
    """
    # This comes first, because the locks taken below may be damaged themselves.
    files = list(find_damaged_files(store, checks))
    with exclude_maintenance(store), store.running():
        inventory = take_inventory(store, skip_damaged_pins=True)
        references: dict[str, tuple[str, ...]] = {}
        for result in inventory.results.values():
            for digest in dict.fromkeys(result.files):
                references[digest] = (*references.get(digest, ()), result.title)
        findings = [
            Finding("result", result.key, affected=(result.title,))
            for result in inventory.results.values()
            if result.damaged and _set_aside_record(store, result.key)
        ]
        total = len(inventory.blobs)
        for done, digest in enumerate(inventory.blobs, 1):
            if _set_aside_blob(store, digest):
                findings.append(Finding("blob", digest, affected=references.get(digest, ())))
            progress(done, total)
        # Search again, because a run may have added the blob while others were read.
        findings += [
            Finding("blob", digest, "missing", titles)
            for digest, titles in references.items()
            if digest not in inventory.blobs and not Path(store.blobs.path(digest)).exists()
        ]
        findings += _find_missing_pinned(store, inventory)
        findings = [*files, *findings]
    size = sum(result.size for result in inventory.results.values())
    size += sum(blob.size for blob in inventory.blobs.values())
    return IntegrityReport(len(inventory.results), total, size, tuple(findings))


def _find_missing_pinned(store: LocalStore, inventory: Inventory) -> Iterator[Finding]:
    """Yield what recipes, lock files and releases need, but the store lacks."""
    for pin in inventory.pins:
        for key in pin.keys:
            # A damaged record has already been reported.
            if key not in inventory.results and not Path(store.action_path(key)).exists():
                yield Finding("result", key, "missing", (pin.reason,))
        if not pin.recipe:
            for digest in pin.digests:
                if not Path(store.blobs.path(digest)).exists():
                    yield Finding("blob", digest, "missing", (pin.reason,))


def _set_aside_record(store: LocalStore, key: str) -> bool:
    """Set aside a record that is still damaged under the exclusive lock; return whether it was."""
    # A separate object, so that its `damage` holds only this record.
    checked = LocalStore(store.root)
    with disk.use_lock(store.root, exclusive=True):
        checked.record(key)
    return bool(checked.damage)


def _set_aside_blob(store: LocalStore, digest: str) -> bool:
    """Set aside a blob that is still damaged under the exclusive lock; return whether it was."""
    with contextlib.suppress(FileNotFoundError):
        if not _has_digest(store.blobs.path(digest), digest):
            with disk.use_lock(store.root, exclusive=True):
                try:
                    # a new object, because `store` would not read a blob again that it has verified
                    LocalStore(store.root).blobs.verified_path(digest)
                except DamagedBlob:
                    return True
    return False


def _has_digest(path: str, digest: str) -> bool:
    try:
        return hash_file(path) == digest
    except OSError as error:
        if not is_damage(error, path):
            raise
        return False


# ---------------------------------------------------------------- repair
# Nothing is deleted: damaged files are set aside, and made again at once if possible.

_BY_NEXT_RUN: Final = "the next run makes it again"
# What the loss of a file that nothing else needs means, where the default text does not apply.
_CONSEQUENCES: Final[Mapping[str, str]] = {
    "log": "the next execution of its stage writes another",
    "run record": "nothing else says what that run did",
}
_RUN: Final = "run its recipe again, or fetch it with `tvmflow cache pull`"
# What the user has to do about a kind of file that no run makes again.
_FIXES: Final[Mapping[str, str]] = {
    "pin": "make the lock file or the release of that name again: until then `gc` may remove what it needs",
    "upload": "upload everything with `tvmflow cache push --all`",
    "trials": "import the trials from another store, if one has them: `tvmflow records import`",
    "file": "move it away, unless you know what it is for",
}
# Repaired in place, as every run does.
_IN_PLACE: Final = frozenset({"format", "folder", "lock"})


class Step(NamedTuple):
    """A repair: the fault (see `Finding`), what was done, and what is left to the user."""

    kind: str
    name: str
    reason: str
    done: str
    fix: str = ""


def repair_store(
    store: LocalStore, progress: Progress, checks: Mapping[str, ContentCheck]
) -> list[Step]:
    """Repair a store as far as possible without a run; `check_integrity` explains the arguments.

    Raises:
        StoreError: while a garbage collection is active, or if the disk is full or not writable.
    """
    damaged = list(find_damaged_files(store, checks))
    store.create()
    steps = [_repair_file(store, file) for file in damaged]
    findings = check_integrity(store, progress, checks).findings
    return steps + [_describe(entry) for entry in findings if entry.kind in ("result", "blob")]


def _repair_file(store: LocalStore, file: Finding) -> Step:
    path, fix = f"{store.root}/{file.name}", _FIXES.get(file.kind, "")
    if file.kind == "file":
        return Step(file.kind, file.name, file.reason, done="", fix=fix)
    if file.kind in _IN_PLACE:
        # A folder in a lock's place is set aside when the lock is taken.
        moved = dict(store.moved).get(path, "")
        if not moved and file.kind == "lock":
            moved = store.set_aside(path)
        done = f"moved to {_shorten(store, moved)}" if moved else "written again"
    else:
        done = f"moved to {_shorten(store, store.set_aside(path))}"
        done += "" if fix else f"; {_CONSEQUENCES.get(file.kind, _BY_NEXT_RUN)}"
    return Step(file.kind, file.name, file.reason, done=done, fix=fix)


def _describe(finding: Finding) -> Step:
    affected = ", ".join(finding.affected)
    done = "moved to damaged/" if finding.fault == "damaged" else ""
    reason = f"it is {finding.fault}" + (f" ({affected})" if affected else "")
    return Step(kind=finding.kind, name=finding.name, reason=reason, done=done, fix=_RUN)


def _shorten(store: LocalStore, path: str) -> str:
    return str(Path(path).relative_to(store.root))


# ---------------------------------------------------------------- file checks
# Each file must have the right kind, path and content. `check_integrity` reads results and blobs, and
# `tuning.ledger_folders` reads measured trials. A log may contain any text.

# Gets the path of a regular file; returns whether it has the content that was written.
ContentCheck = Callable[[Path], bool]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-f]{2}")
# Folders whose files are temporary or already set aside.
_UNCHECKED: Final = frozenset({"tmp", "damaged"})
_TRIALS_SUFFIX: Final = ".jsonl"
# How many path components a file has below its folder; 1 for folders that are not in this table.
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


def find_damaged_files(store: LocalStore, checks: Mapping[str, ContentCheck]) -> Iterator[Finding]:
    """Yield damaged files, except results, blobs and trials; `checks` maps further folders to checks."""
    root = Path(store.root)
    if store.condition() == "damaged":
        yield Finding("format", "format", reason="it does not name the format of this store")
    for path in sorted(root.iterdir()):
        if path.name in FOLDERS:
            if not path.is_dir():
                yield Finding("folder", path.name, reason="it is not a folder")
            elif path.name not in _UNCHECKED:
                yield from _check_folder(store, path, {**_CONTENT_CHECKS, **checks})
        elif path.name not in FILES:
            yield Finding("file", path.name, reason="it is not part of a store")
        elif path.name != "format" and not path.is_file():
            yield Finding("lock", path.name, reason="it is not a file")


def _check_folder(
    store: LocalStore, folder: Path, checks: Mapping[str, ContentCheck]
) -> Iterator[Finding]:
    for path in _list_files(folder):
        if reason := _find_fault(folder, path, checks.get(folder.name)):
            kind, name = _KINDS.get(folder.name, "note"), str(path.relative_to(store.root))
            yield Finding(kind, name, reason=reason)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder that should be a file, including folders in a file's place."""
    if folder.name == "work":
        # The other files in a work folder are the stage's own.
        for path in sorted(folder.iterdir()):
            yield path / "claim" if path.is_dir() else path
        return
    depths = _DEPTHS.get(folder.name, (1,))
    is_deep = folder.name == "ledger"
    for parent, folders, names in os.walk(folder):
        folders.sort()
        level = len(Path(parent).relative_to(folder).parts) + 1
        if is_deep:
            # A folder in the place of a workload's trials.
            misplaced = [name for name in folders if name.endswith(_TRIALS_SUFFIX)]
            names += misplaced
            folders[:] = [name for name in folders if name not in misplaced]
        if not is_deep and level == max(depths):
            names += folders
            folders.clear()
        yield from (Path(parent, name) for name in sorted(names))


def _find_fault(folder: Path, path: Path, check: ContentCheck | None) -> str:
    """Return what is wrong with a file; empty if nothing is."""
    depth = len(path.relative_to(folder).parts)
    if folder.name not in ("ledger", "work") and depth not in _DEPTHS.get(folder.name, (1,)):
        return "it is not where a file should be"
    if folder.name == "work" and not os.path.lexists(path):
        # A run removes its claim, and creates that of a killed run again.
        return ""
    if folder.name in ("cas", "actions"):
        prefix = path.parent.name
        is_prefix = _PREFIX.fullmatch(prefix) and path.name.startswith(prefix)
        if not (is_prefix and _DIGEST.fullmatch(path.name)):
            return "its name is not a digest, or belongs to another folder"
    if not path.is_file():
        return "it is a link to nothing" if path.is_symlink() else "it is not a file"
    if check is None:
        return ""
    try:
        return "" if check(path) else "its content is damaged"
    except ValueError:
        return "its content is damaged"
    except FileNotFoundError:
        # A run or a collection has removed the file meanwhile.
        return ""
    except OSError as error:
        if not is_damage(error, str(path)):
            raise
        return f"it cannot be read: {error.strerror}"


def _unseal(path: Path, folders: int = 1) -> str:
    return unseal(read_regular(path), *path.parts[-1 - folders :])


def _is_note(path: Path, folders: int = 1) -> bool:
    _unseal(path, folders)
    return True


def _is_pin(path: Path) -> bool:
    pin = from_json(Pin, json.loads(_unseal(path)))
    return pin.name.replace("/", "+") == path.name


def _is_download(path: Path) -> bool:
    # An incomplete download may have any content.
    return bool(path.suffix) or not _DIGEST.fullmatch(path.name) or hash_file(path) == path.name


_CONTENT_CHECKS: Final[Mapping[str, ContentCheck]] = {
    **dict.fromkeys(("stats", "facts", "delivered"), _is_note),
    "last": lambda path: bool(_DIGEST.fullmatch(_unseal(path, 2))),
    "pins": _is_pin,
    "downloads": _is_download,
    "locked": lambda path: hash_file(path) == path.name,
    **dict.fromkeys(("failures", "spool"), lambda path: _is_note(path, 2)),
}
