"""The integrity check: reads a whole store and sets aside what does not match its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from tvmflow.core.files import hash_file
from tvmflow.store import leases
from tvmflow.store.blobs import DamagedBlob
from tvmflow.store.disk import is_damage
from tvmflow.store.file_checks import ContentCheck, find_damaged_files
from tvmflow.store.garbage_collection import exclude_maintenance
from tvmflow.store.inventory import Inventory, StoredResult, take_inventory
from tvmflow.store.local import LocalStore

# Gets how many blobs were read, of how many.
Progress = Callable[[int, int], None]


class Finding(NamedTuple):
    """A damaged or missing part of the store.

    Attributes:
        kind: `result`, `blob`, `trials`, or the kind of another file (see `DamagedFile`).
        name: Its key or digest; the path in the store of another file.
        fault: Whether it is there.
        affected: The results that cannot be used until a run has made them again, or the pins that need it.
        reason: What is wrong with another file than a result or a blob.
    """

    kind: str
    name: str
    fault: Literal["damaged", "missing"]
    affected: tuple[str, ...]
    reason: str = ""


class IntegrityReport(NamedTuple):
    """The numbers of results, blobs and bytes that were read, and what was wrong."""

    results: int
    blobs: int
    bytes: int
    findings: tuple[Finding, ...]


def check_integrity(
    store: LocalStore, progress: Progress, checks: Mapping[str, ContentCheck] = MappingProxyType({})
) -> IntegrityReport:
    """Read every file; move damaged results and blobs to `damaged/`, so that nobody uses them.

    Runs may be active meanwhile: they make again what they miss.

    Args:
        store: The store.
        progress: Called with each blob.
        checks: See `find_damaged_files`.

    Raises:
        StoreError: while a garbage collection is active.
    """
    # first: the locks below may be what is damaged
    files = [
        Finding(file.kind, file.name, "damaged", (), file.reason)
        for file in find_damaged_files(store, checks)
    ]
    with exclude_maintenance(store), store.running():
        inventory = take_inventory(store, skip_damaged_pins=True)
        references = _list_references(inventory.results)
        findings = [
            Finding("result", result.key, "damaged", (result.title,))
            for result in inventory.results.values()
            if result.damaged and _set_aside_record(store, result.key)
        ]
        total = len(inventory.blobs)
        for done, digest in enumerate(inventory.blobs, 1):
            if _set_aside_blob(store, digest):
                findings.append(Finding("blob", digest, "damaged", references.get(digest, ())))
            progress(done, total)
        # looked for again: a run may have added it while the others were read
        absent = [digest for digest in references if digest not in inventory.blobs]
        findings += [
            Finding("blob", digest, "missing", references[digest])
            for digest in absent
            if not Path(store.blobs.path(digest)).exists()
        ]
        findings += _find_missing_pinned(store, inventory)
        findings = [*files, *findings]
    size = sum(result.size for result in inventory.results.values())
    size += sum(blob.size for blob in inventory.blobs.values())
    return IntegrityReport(len(inventory.results), total, size, tuple(findings))


def _list_references(results: Mapping[str, StoredResult]) -> dict[str, tuple[str, ...]]:
    """Return for each blob the results that refer to it."""
    references: dict[str, tuple[str, ...]] = {}
    for result in results.values():
        for digest in dict.fromkeys(result.files):
            references[digest] = (*references.get(digest, ()), result.title)
    return references


def _find_missing_pinned(store: LocalStore, inventory: Inventory) -> Iterator[Finding]:
    """Yield what recipes, lock files and releases need and the store lacks."""
    for pin in inventory.pins:
        for key in pin.keys:
            # a damaged one was named above
            if key not in inventory.results and not Path(store.action_path(key)).exists():
                yield Finding("result", key, "missing", (pin.reason,))
        if not pin.recipe:
            for digest in pin.digests:
                if not Path(store.blobs.path(digest)).exists():
                    yield Finding("blob", digest, "missing", (pin.reason,))


def _set_aside_record(store: LocalStore, key: str) -> bool:
    """Set aside the record of a key if it still is damaged when nobody can replace it; return whether it was."""
    # by another object, whose list of damage has nothing else
    checked = LocalStore(store.root)
    with leases.use_lock(store.root, exclusive=True):
        checked.record(key)
    return bool(checked.damage)


def _set_aside_blob(store: LocalStore, digest: str) -> bool:
    """Set aside a blob if it is damaged, and still is when nobody can replace it; return whether it was."""
    with contextlib.suppress(FileNotFoundError):
        if not _has_digest(store.blobs.path(digest), digest):
            with leases.use_lock(store.root, exclusive=True):
                try:
                    # by another object: one that has verified the blob before would not read it again
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
