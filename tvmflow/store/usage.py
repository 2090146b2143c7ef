"""The disk usage of a store: by recipe, stage and pin."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.store.garbage_collection import Limits, preview_collection
from tvmflow.store.inventory import (
    Inventory,
    Pin,
    StoredResult,
    files_below,
    size_of,
    take_inventory,
)
from tvmflow.store.local import LocalStore

_UNSIGNED: Final = "fetched, not signed"
_FOLDERS: Final = ("downloads", "work", "tmp", "damaged", "logs")


class StageUsage(NamedTuple):
    """The results of one kind of stage."""

    name: str
    results: int
    bytes: int


class RecipeUsage(NamedTuple):
    """The results that a recipe was up to date with the last time, with blobs that others may share.

    Of its results, `missing` are not there or incomplete, and its next run makes them; `stages` has the same by
    kind of stage.
    """

    name: str
    results: int
    bytes: int
    age_s: float
    missing: int
    stages: tuple[StageUsage, ...]


class PinUsage(NamedTuple):
    """The results that a pin keeps, and whether the lock file that it belongs to no longer exists."""

    name: str
    results: int
    bytes: int
    missing: int
    file: str
    file_missing: bool


class UsageRow(NamedTuple):
    """A number of items of one kind, and their size in bytes."""

    name: str
    number: int
    noun: str
    bytes: int


class StoreUsage(NamedTuple):
    """The usage of a whole store in bytes.

    `bytes` is without the measured trials; `collectable_bytes` is what a garbage collection would free, and
    `unused_bytes` what one would that keeps no unused results.
    """

    root: str
    bytes: int
    ledger_bytes: int
    recipes: tuple[RecipeUsage, ...]
    rows: tuple[UsageRow, ...]
    collectable_bytes: int
    unused_bytes: int


def measure_usage(store: LocalStore) -> StoreUsage:
    """Return the usage of a store. Changes nothing.

    Raises:
        StoreError: for a pin that cannot be read.
    """
    inventory = take_inventory(store)
    now = time.time()
    collection = preview_collection(store, Limits(), inventory)
    recipes = [_recipe_usage(pin, inventory, now) for pin in inventory.pins if pin.recipe]
    return StoreUsage(
        root=store.root,
        bytes=collection.kept_bytes + collection.freed,
        ledger_bytes=_folder_row(store, "ledger").bytes,
        recipes=tuple(recipes),
        rows=tuple(_rows(store, inventory)),
        collectable_bytes=collection.freed,
        unused_bytes=preview_collection(store, Limits(0.0), inventory).freed,
    )


def _rows(store: LocalStore, inventory: Inventory) -> Iterator[UsageRow]:
    results, blobs, pins = inventory
    unused = [results[key] for key in results.keys() - inventory.pinned_keys]
    incomplete = [result for result in results.values() if not inventory.is_complete(result)]
    referenced = {digest for result in results.values() for digest in result.files}
    referenced.update(digest for pin in pins for digest in pin.digests)
    unreferenced = [blob.size for digest, blob in blobs.items() if digest not in referenced]
    yield UsageRow("pins", sum(not pin.recipe for pin in pins), "pin", 0)
    yield UsageRow("unused", len(unused), "result", inventory.size(unused))
    incomplete_bytes = sum(result.size for result in incomplete)
    yield UsageRow("incomplete", len(incomplete), "result", incomplete_bytes)
    yield UsageRow("blobs", len(blobs), "blob", sum(blob.size for blob in blobs.values()))
    yield UsageRow("unreferenced blobs", len(unreferenced), "blob", sum(unreferenced))
    yield from _signature_rows(inventory)
    for folder in _FOLDERS:
        yield _folder_row(store, folder)


def measure_pins(store: LocalStore) -> list[PinUsage]:
    """Return what each pin keeps.

    Raises:
        StoreError: for a pin that cannot be read.
    """
    inventory = take_inventory(store)
    rows = []
    for pin in inventory.pins:
        results = [inventory.results[key] for key in pin.keys if key in inventory.results]
        missing_blobs = [digest for digest in pin.digests if digest not in inventory.blobs]
        size = inventory.size(results, pin.digests)
        missing = len(pin.keys) - len(results) + len(missing_blobs)
        file_missing = bool(pin.file) and not Path(pin.file).exists()
        rows.append(
            PinUsage(
                name=pin.name,
                results=len(pin.keys),
                bytes=size,
                missing=missing,
                file=pin.file,
                file_missing=file_missing,
            )
        )
    return rows


def _signature_rows(inventory: Inventory) -> Iterator[UsageRow]:
    """Yield fetched results by the keys that signed them; one with several keys is in several rows."""
    results: dict[str, list[StoredResult]] = defaultdict(list)
    for result in inventory.results.values():
        if result.signatures is not None:
            for line in [f"signed by {key}" for key in result.signatures] or [_UNSIGNED]:
                results[line].append(result)
    # unsigned ones come last
    for line, signed in sorted(results.items(), key=lambda item: (item[0] == _UNSIGNED, item[0])):
        yield UsageRow(line, len(signed), "result", inventory.size(signed))


def _recipe_usage(pin: Pin, inventory: Inventory, now: float) -> RecipeUsage:
    results = [inventory.results[key] for key in pin.keys if key in inventory.results]
    stages: dict[str, list[StoredResult]] = defaultdict(list)
    for result in results:
        # two recipes may need one result; its label names the stage in any case
        stages[result.label.partition(":")[2].partition("/")[0]].append(result)
    last_used_s = max([result.used_ns for result in results], default=0) / 1e9
    usages = [StageUsage(stage, len(own), inventory.size(own)) for stage, own in stages.items()]
    return RecipeUsage(
        name=pin.recipe,
        results=len(results),
        bytes=inventory.size(results),
        age_s=max(0.0, now - last_used_s),
        missing=len(pin.keys) - sum(map(inventory.is_complete, results)),
        stages=tuple(sorted(usages, key=lambda usage: -usage.bytes)),
    )


def _folder_row(store: LocalStore, folder: str) -> UsageRow:
    sizes = [size_of(path) for path in files_below(Path(store.root, folder))]
    return UsageRow(folder, len(sizes), "file", sum(sizes))
