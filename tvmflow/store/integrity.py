"""The integrity check: reads a whole store and sets aside what does not match its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from tvmflow.core.files import hash_file
from tvmflow.store import leases
from tvmflow.store.blobs import DamagedBlob
from tvmflow.store.garbage_collection import exclude_maintenance
from tvmflow.store.inventory import Inventory, StoredResult, take_inventory
from tvmflow.store.local import LocalStore

# Gets how many blobs were read, of how many.
Progress = Callable[[int, int], None]


class Finding(NamedTuple):
    """A damaged or missing part of the store.

    Attributes:
        kind: What it is.
        name: Its key or digest.
        fault: What is wrong with it.
        affected: The results that cannot be used until a run has made them again, or the pins that need it.
    """

    kind: Literal["result", "blob"]
    name: str
    fault: Literal["damaged", "missing"]
    affected: tuple[str, ...]


class IntegrityReport(NamedTuple):
    """The numbers of results, blobs and bytes that were read, and what was wrong."""

    results: int
    blobs: int
    bytes: int
    findings: tuple[Finding, ...]


def check_integrity(store: LocalStore, progress: Progress) -> IntegrityReport:
    """Read every action record and every blob; move what is damaged to `damaged/`.

    Runs may be active meanwhile: they make again what they miss.

    Raises:
        StoreError: while a garbage collection is active.
    """
    with exclude_maintenance(store), store.running():
        inventory = take_inventory(store)
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
    """Yield what lock files and releases need and the store lacks. A recipe only has to be run again."""
    for pin in inventory.pins:
        if not pin.recipe:
            for key in pin.keys:
                if not Path(store.action_path(key)).exists():
                    yield Finding("result", key, "missing", (pin.reason,))
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
        if hash_file(store.blobs.path(digest)) != digest:
            with leases.use_lock(store.root, exclusive=True):
                try:
                    # by another object: one that has verified the blob before would not read it again
                    LocalStore(store.root).blobs.verified_path(digest)
                except DamagedBlob:
                    return True
    return False
