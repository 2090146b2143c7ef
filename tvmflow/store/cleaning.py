"""The removal of all results from a store, except those that lock files and releases need.

Measured trials and records of runs stay, too.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.store import leases
from tvmflow.store.inventory import files_below, require_store, size_below, size_of, take_inventory
from tvmflow.store.local import LocalStore

_CLEANED: Final = "last failures work logs stats facts plans delivered tmp damaged runs".split()
_SELECTED: Final = ("actions", "cas", "downloads", "spool")
"""The folders of files that are named by a key or a digest: those that a pin needs stay."""


class Cleaning(NamedTuple):
    """The extent of a cleaning, done or not.

    `trial_bytes` of the freed bytes are measured trials. The size of what is kept, because pins need it, includes
    blobs and downloads.
    """

    results: int
    bytes: int
    trial_bytes: int
    kept_results: int
    kept_bytes: int
    pins: tuple[str, ...]


def clean_store(store: LocalStore, *, ledger: bool, dry_run: bool = False) -> Cleaning:
    """Remove all results that no lock file and no release needs, and notes, logs and leftovers.

    `ledger` removes the measured trials, too, which may have cost hours; `dry_run` only returns what would be removed.

    Raises:
        StoreError: while a run is using the store; for a pin that cannot be read, because what it
            needs is not known.
        UsageError: when the folder is not a store.
    """
    require_store(store)
    with contextlib.nullcontext() if dry_run else leases.exclude_runs(store.root):
        return _clean(store, ledger=ledger, dry_run=dry_run)


def _clean(store: LocalStore, *, ledger: bool, dry_run: bool) -> Cleaning:
    inventory = take_inventory(store)
    pins = [pin for pin in inventory.pins if not pin.recipe]
    keys = {key for pin in pins for key in pin.keys}
    pinned = [inventory.results[key] for key in keys if key in inventory.results]
    needed = keys | {digest for pin in pins for digest in pin.digests}
    needed |= {digest for result in pinned for digest in (*result.files, *result.inputs)}
    root = Path(store.root)
    freed = kept = 0
    for path in (path for name in _SELECTED for path in files_below(root / name)):
        if path.name.partition(".")[0] in needed:
            kept += size_of(path)
            continue
        freed += size_of(path)
        if not dry_run:
            path.unlink(missing_ok=True)
    trials = size_below(root / "ledger") if ledger else 0
    for name in [*_CLEANED, *(["ledger"] if ledger else [])]:
        freed += size_below(root / name)
        if not dry_run:
            shutil.rmtree(root / name, ignore_errors=True)
    removed = len(inventory.results) - len(pinned)
    names = tuple(pin.name for pin in pins)
    return Cleaning(
        results=removed,
        bytes=freed,
        trial_bytes=trials,
        kept_results=len(pinned),
        kept_bytes=kept,
        pins=names,
    )
