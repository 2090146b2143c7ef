"""Garbage collection: remove unused results, without waiting, even while runs are active.

What stays: the results of each recipe's last up-to-date run (`last/`), pinned results (`pins/`), and everything used
since the oldest active run began. Their blobs, which repair deliveries, and the downloads that they were made from
stay, too. Other results are removed if unused for `max_age_s`; then the longest unused ones, until the store has at
most `max_bytes`. Measured trials are never removed.

Why nothing is removed that a run needs. A collection takes a lease of its own at time G. It lists the active
leases, reads all action records with their modification times, and then `last/` and `pins/`. Let H be when the
oldest of these leases began, so H <= G; nothing with a time from H on is evicted (less a margin for coarse clocks).
Each eviction holds `use.lock` exclusively, and happens only if the file still has the time that it was chosen by.

- A run whose lease was listed: its results so far carry a time from H on, because `find` and `publish`, sharing
  `use.lock`, mark a result as used before they return it. Results that it finds later are marked under that lock.
  If that happens before the eviction, the time has changed and the result is skipped; if after, the run finds
  nothing and makes the result again.
- A run that began after the list: its lease, and so all its marks, are younger than G.
- A run that had ended before the list: its results are in `last/`, which is read later. An up-to-date run without
  a lease changes nothing in `last/`, so it relies on the same.
- A blob is removed only if no remaining action record refers to it, and after the records that did. An unlisted
  record was published after the listing, and its blobs were added before it, or marked with `mark_used`: both change
  their times under the shared lock. Adding replaces, so there is no instant in which an equal blob is missing.
- Reading is by path and only of blobs whose result stays; an open file survives the removal of its name.

Why a kill does no harm: an action record is removed before its blobs, so a kill leaves only unreferenced blobs,
which the next collection finds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import is_disk_full
from tvmflow.core.errors import StoreError
from tvmflow.core.file_locks import Locked, lock
from tvmflow.core.files import read_regular, temporary_name
from tvmflow.core.formatting import age_text
from tvmflow.core.project import shortest_path
from tvmflow.store import disk
from tvmflow.store.disk import unseal
from tvmflow.store.inventory import (
    Inventory,
    Pin,
    StoredResult,
    changed_ns,
    entries_of,
    files_below,
    require_store,
    size_below,
    size_of,
    take_inventory,
)
from tvmflow.store.local import LocalStore

_log = logging.getLogger(__name__)

# More than the difference between clocks of machines.
_AHEAD_NS: Final = 86_400 * 10**9


class Eviction(NamedTuple):
    """Something that was or will be removed, and the bytes freed; `Candidate` lists the kinds."""

    kind: str
    name: str
    reason: str
    age_s: float
    bytes: int


class Collection(NamedTuple):
    """The outcome, or the preview, of a garbage collection.

    `kept_bytes` is the size of the store afterwards, without measured trials. `needed_bytes` of it are needed by
    recipes, pins and active runs.
    """

    evictions: tuple[Eviction, ...]
    kept_bytes: int
    needed_bytes: int
    runs: int

    @property
    def freed(self) -> int:
        """The number of bytes that the evictions free."""
        return sum(eviction.bytes for eviction in self.evictions)


def preview_collection(
    store: LocalStore, limits: Limits, inventory: Inventory | None = None
) -> Collection:
    """Return what a garbage collection would remove; changes nothing."""
    active_runs = disk.active_runs(store.root)
    inventory = inventory or take_inventory(store)
    return _collect(store, inventory, limits, active_runs, time.time_ns(), remove=False)


def collect_garbage(store: LocalStore, limits: Limits) -> Collection:
    """Remove unused results; StoreError for an unreadable pin, or if another collection is active."""
    try:
        with exclude_maintenance(store), store.running() as began_ns:
            return _remove_unused(store, limits, began_ns)
    except (OSError, StoreError) as error:
        if not is_disk_full(error):
            raise
    _log.debug("no space for a lease in %s: collecting while no run is active", store.root)
    with disk.exclude_runs(store.root):
        return _remove_unused(store, limits, time.time_ns())


def _remove_unused(store: LocalStore, limits: Limits, now_ns: int) -> Collection:
    # Leases are read before the inventory, for the reason in the module's docstring.
    active_runs = disk.active_runs(store.root, remove_stale=True)
    inventory = take_inventory(store)
    if max(active_runs, default=0) <= now_ns + _AHEAD_NS:
        _correct_times(store, inventory, now_ns)
    return _collect(store, inventory, limits, active_runs, now_ns, remove=True)


def _correct_times(store: LocalStore, inventory: Inventory, now_ns: int) -> None:
    """Set times in the future (from a wrong clock) to the current time; otherwise files would not age."""
    times = {store.action_path(key): result.used_ns for key, result in inventory.results.items()}
    times |= {store.blobs.path(key): blob.changed_ns for key, blob in inventory.blobs.items()}
    for path, time_ns in times.items():
        if time_ns > now_ns + _AHEAD_NS:
            # Another user's file in a shared store, or one that has been removed.
            with contextlib.suppress(OSError):
                os.utime(path)


def _collect(
    store: LocalStore,
    inventory: Inventory,
    limits: Limits,
    active_runs: Sequence[int],
    now_ns: int,
    *,
    remove: bool,
) -> Collection:
    horizon_ns = min([now_ns, *active_runs]) - round(limits.clock_margin_s * 1e9)
    plan = EvictionPlan(store, inventory, limits, now_ns, horizon_ns)
    evictions = []
    for candidate in plan.candidates():
        freed = candidate.remove() if remove else candidate.bytes
        if freed is None:
            _log.debug("%s %s stays: it was used meanwhile", candidate.kind, candidate.name)
            continue
        _log.debug("%s %s is removed: %s", candidate.kind, candidate.name, candidate.reason)
        plan.bytes_left -= freed
        age_s = max(0.0, (now_ns - candidate.used_ns) / 1e9)
        evictions.append(Eviction(*candidate[:3], age_s=age_s, bytes=freed))
    # With `remove`, one of the leases is this collection's own.
    other_runs = max(0, len(active_runs) - remove)
    return Collection(tuple(evictions), plan.bytes_left, plan.needed_bytes(), other_runs)


def remove_result(store: LocalStore, key: str) -> None:
    """Remove one result; the next garbage collection removes files that only this result had."""
    with disk.exclude_runs(store.root):
        Path(store.action_path(key)).unlink(missing_ok=True)


def exclude_maintenance(store: LocalStore) -> AbstractContextManager[None]:
    """Exclude other garbage collections and integrity checks while the block runs."""
    refusal = f"another `tvmflow cache gc` or `tvmflow cache verify` is running in {shortest_path(store.root)}"
    return disk.exclude_others(store.root, "locks/gc", refusal)


# ---------------------------------------------------------------- leftovers
# What kills, damage and deleted files leave in a store, and when it is removed.

DAY: Final = 86_400.0
# Until then, a killed stage can be resumed, and a damaged file examined.
_LEFTOVER_AGE_S: Final = 7 * DAY
# Probed facts about compilers and packages are small but slow to probe again.
_FACTS_AGE_S: Final = 365 * DAY
_PLANS_AGE_S: Final = 30 * DAY
# This many last run records stay, however old they are; their names sort by time.
_KEPT_RUNS: Final = 100
# A writer without a lease finishes a file well within this time.
_WRITE_TIME_S: Final = 3600.0


class Candidate(NamedTuple):
    """Something to remove; `remove` returns the bytes freed, or None if it was used meanwhile.

    Its kind is `result`, `blob`, `download`, `work`, `note`, `log`, `run record`, `temporary` or `damaged`.
    """

    kind: str
    name: str
    reason: str
    used_ns: int
    bytes: int
    remove: Callable[[], int | None]


class _Rule(NamedTuple):
    """When to remove the files of a folder; the last `kept` files stay."""

    folder: str
    kind: str
    reason: str
    age_s: float | None = None
    is_obsolete: Callable[[Path], bool] | None = None
    kept: int = 0


_OLD_NOTE: Final = "it is a note that is made again when it is needed"
_FILE_MISSING: Final = "the file that it is about no longer exists"


def find_leftovers(
    root: Path, max_age_s: float, now_ns: int, horizon_ns: int
) -> Iterator[Candidate]:
    """Yield a store's leftovers that have not changed since `horizon_ns`."""
    leftover_age_s = min(_LEFTOVER_AGE_S, max_age_s)
    rules = (
        _Rule("tmp", "temporary", "a process that was stopped left it", _WRITE_TIME_S),
        _Rule("damaged", "damaged", "it was set aside as damaged", leftover_age_s),
        _Rule("logs", "log", "it is a log", max_age_s),
        _Rule("history", "run record", "it is the record of a run", max_age_s, kept=_KEPT_RUNS),
        _Rule("failures", "note", "it says how a stage failed", max_age_s),
        _Rule("facts", "note", _OLD_NOTE, _FACTS_AGE_S),
        _Rule("plans", "note", _OLD_NOTE, _PLANS_AGE_S),
        _Rule("stats", "note", _FILE_MISSING, is_obsolete=_is_obsolete_stat),
        _Rule("delivered", "note", _FILE_MISSING, is_obsolete=_is_obsolete_delivery),
    )
    yield from _find_work_folders(root, leftover_age_s, now_ns, horizon_ns)
    for rule in rules:
        yield from _apply(rule, root, now_ns, horizon_ns)


def _apply(rule: _Rule, root: Path, now_ns: int, horizon_ns: int) -> Iterator[Candidate]:
    folder = root / rule.folder
    # A killed process may leave a folder in `tmp`, which is removed as a whole.
    paths = entries_of(folder) if rule.folder == "tmp" else files_below(folder)
    removable = sorted(paths)[: -rule.kept] if rule.kept else paths
    for path in removable:
        # The change time counts, because a moved file keeps its modification time.
        changed = changed_ns(path)
        if not changed or changed >= horizon_ns:
            continue
        is_old = rule.age_s is not None and (now_ns - changed) / 1e9 >= rule.age_s
        if is_old or (rule.is_obsolete is not None and rule.is_obsolete(path)):
            reason = f"{rule.reason}{_older_than(rule.age_s)}" if is_old else _FILE_MISSING
            size, name = size_below(path), str(path.relative_to(root))
            remove = partial(_remove, path, size)
            yield Candidate(rule.kind, name, reason, changed, bytes=size, remove=remove)


def _older_than(age_s: float | None) -> str:
    return f", older than {age_text(age_s)}" if age_s else ""


def _find_work_folders(
    root: Path, age_s: float, now_ns: int, horizon_ns: int
) -> Iterator[Candidate]:
    for path in entries_of(root / "work"):
        if path.is_dir():
            below = (Path(at, name) for at, *lists in os.walk(path) for name in chain(*lists))
            used_ns = max(map(changed_ns, (path, *below)))
            if used_ns < horizon_ns and (now_ns - used_ns) / 1e9 >= age_s:
                size, name = size_below(path), f"{path.name[:12]}…"
                remove = partial(_remove_work_folder, path, size)
                reason = f"a stage that had no result left it{_older_than(age_s)}"
                yield Candidate("work", name, reason, used_ns, bytes=size, remove=remove)


def _remove(path: Path, size: int) -> int | None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return size
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    return size


def _remove_work_folder(path: Path, size: int) -> int | None:
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context((path / "claim").open("ab"))
            lock(handle.fileno(), wait=False)
            # Rename it first, as in `disk.release`: a process that waits for this key creates the same folder at once.
            removed = path.parent.parent / "tmp" / temporary_name()
            removed.parent.mkdir(exist_ok=True)
            path.rename(removed)
        except (Locked, FileNotFoundError):
            return None
        except OSError as error:
            if is_disk_full(error):
                return None
            raise
        shutil.rmtree(removed, ignore_errors=True)
    return size


def _is_obsolete_stat(path: Path) -> bool:
    try:
        note = json.loads(unseal(read_regular(path), path.parent.name, path.name))
        return not Path(str(note["path"])).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _is_obsolete_delivery(path: Path) -> bool:
    # Long paths are cut at the left, and `+` may stand for a slash. A wrong guess only costs one more hash.
    return not Path("/" + path.name.replace("+", "/")).exists()


# ---------------------------------------------------------------- eviction plan
# What a garbage collection removes from a store, in which order, and why.

DEFAULT_AGE: Final = 30 * DAY
# Folders that count towards the store's size: all except trials and locks.
_COUNTED: Final = "actions cas downloads work tmp damaged logs facts plans stats delivered last pins history failures".split()


class Limits(NamedTuple):
    """Limits for unused results: age and store size (None: no limit), and the clock's resolution."""

    max_age_s: float | None = DEFAULT_AGE
    max_bytes: int | None = None
    clock_margin_s: float = 2.0


class EvictionPlan:
    """The evictions of a store, in order; the caller updates `bytes_left`, the remaining size."""

    def __init__(
        self, store: LocalStore, inventory: Inventory, limits: Limits, now_ns: int, horizon_ns: int
    ) -> None:
        self._now_ns = now_ns
        self._store = store
        self._root = Path(store.root)
        self._inventory = inventory
        self._limits = limits
        # Nothing used at or after this time is evicted.
        self._horizon_ns = horizon_ns
        self._needed_keys = inventory.pinned_keys
        # How many results and pins refer to each blob.
        self._references = Counter(digest for pin in inventory.pins for digest in pin.digests)
        for result in inventory.results.values():
            self._references.update(set(result.files))
        counted = chain.from_iterable(files_below(self._root / name) for name in _COUNTED)
        self.bytes_left = sum(map(size_of, counted))

    def candidates(self) -> Iterator[Candidate]:
        """Yield what to remove. The caller removes it and updates `bytes_left` before taking the next."""
        max_age_s = self._limits.max_age_s
        age_s = DEFAULT_AGE if max_age_s is None else max_age_s
        yield from find_leftovers(self._root, age_s, self._now_ns, self._horizon_ns)
        yield from self._unreferenced_blobs()
        unused: list[StoredResult | Candidate] = [
            result
            for result in self._inventory.results.values()
            if result.used_ns < self._horizon_ns
            and (result.damaged or result.key not in self._needed_keys)
        ]
        unused += self._unused_downloads()
        for item in sorted(unused, key=lambda item: item.used_ns):
            if isinstance(item, Candidate):
                if reason := self._reason(item.used_ns):
                    yield item._replace(reason=reason)
            elif reason := "it is damaged" if item.damaged else self._reason(item.used_ns):
                yield self._evict_result(item, reason)

    def _reason(self, used_ns: int) -> str:
        """Return why something unused is removed; empty if it may stay."""
        age_s, max_age_s = (self._now_ns - used_ns) / 1e9, self._limits.max_age_s
        max_bytes = self._limits.max_bytes
        if max_age_s is not None and age_s >= max_age_s:
            unused = f", and it was not used for {age_text(max_age_s)}" if max_age_s else ""
            return f"nothing needs it{unused}"
        if max_bytes is not None and self.bytes_left > max_bytes:
            return "nothing needs it, and the store is larger than its limit"
        return ""

    def needed_bytes(self) -> int:
        """Return how many bytes the pins and active runs need."""
        needed = [
            result
            for result in self._inventory.results.values()
            if result.key in self._needed_keys or result.used_ns >= self._horizon_ns
        ]
        digests = [digest for pin in self._inventory.pins for digest in pin.digests]
        return self._inventory.size(needed, digests)

    def _evict_result(self, result: StoredResult, reason: str) -> Candidate:
        freed = result.size
        for digest in set(result.files):
            self._references[digest] -= 1
            if not self._references[digest] and digest in self._inventory.blobs:
                freed += self._inventory.blobs[digest].size
        remove = partial(self._remove_result, result)
        return Candidate("result", result.title, reason, result.used_ns, bytes=freed, remove=remove)

    def _remove_result(self, result: StoredResult) -> int | None:
        path = Path(self._store.action_path(result.key))
        with disk.use_lock(self._store.root, exclusive=True):
            try:
                if path.stat().st_mtime_ns != result.used_ns:
                    raise FileNotFoundError
                path.unlink()
            except FileNotFoundError:
                # Used in the meantime, so the result stays with its blobs.
                self._references.update(set(result.files))
                return None
        unused = [digest for digest in set(result.files) if not self._references[digest]]
        return result.size + sum(self._remove_blob(digest) or 0 for digest in sorted(unused))

    def _unreferenced_blobs(self) -> Iterator[Candidate]:
        """Yield the blobs that a killed process added before a record referred to them."""
        for digest, blob in self._inventory.blobs.items():
            if not self._references[digest] and blob.changed_ns < self._horizon_ns:
                name, remove = f"{digest[:12]}…", partial(self._remove_blob, digest)
                reason = "no result refers to it"
                yield Candidate(
                    "blob", name, reason, blob.changed_ns, bytes=blob.size, remove=remove
                )

    def _remove_blob(self, digest: str) -> int | None:
        blob = self._inventory.blobs.get(digest)
        if blob is None:
            return None
        with (
            disk.use_lock(self._store.root, exclusive=True),
            contextlib.suppress(FileNotFoundError),
        ):
            path = Path(self._store.blobs.path(digest))
            if path.stat().st_ctime_ns == blob.changed_ns < self._horizon_ns:
                path.unlink()
                return blob.size
        return None

    def _unused_downloads(self) -> Iterator[Candidate]:
        """Yield downloads that nothing needs; their reason is decided when their turn comes."""
        results = self._inventory.results
        pinned = [results[key] for key in self._needed_keys if key in results]
        needed = {digest for result in pinned for digest in result.inputs}
        for path in files_below(self._root / "downloads"):
            digest = path.name.partition(".")[0]
            if path.suffix == ".lock" or digest in needed:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                # The change time counts, because a file that a user put here may have been modified years ago.
                used_ns, size = status.st_ctime_ns, status.st_size
                if used_ns < self._horizon_ns:
                    name = f"{digest[:12]}…{path.suffix}"
                    remove = partial(_remove_download, path, digest, used_ns, size)
                    yield Candidate("download", name, "", used_ns, bytes=size, remove=remove)


def _remove_download(path: Path, digest: str, used_ns: int, size: int) -> int | None:
    lock_file = path.with_name(f"{digest}.lock")
    try:
        # In a shared store, another user's lock file cannot be touched, but can be locked.
        with contextlib.suppress(PermissionError):
            lock_file.touch()
    except OSError as error:
        if is_disk_full(error):
            return None
        raise
    with lock_file.open("rb") as handle, contextlib.suppress(Locked, FileNotFoundError):
        lock(handle.fileno(), wait=False)
        if path.stat().st_ctime_ns == used_ns:
            path.unlink()
            return size
    return None


_CLEANED: Final = "last failures work logs stats facts plans delivered tmp damaged runs".split()
_SELECTED: Final = ("actions", "cas", "downloads", "spool")
"""The folders whose files are named by a key or digest; pinned files in them stay."""


class Cleaning(NamedTuple):
    """The outcome of a cleaning: `trial_bytes` are trials, and pinned results have `kept_bytes`."""

    results: int
    bytes: int
    trial_bytes: int
    kept_results: int
    kept_bytes: int
    pins: tuple[str, ...]


def clean_store(store: LocalStore, *, ledger: bool, dry_run: bool = False) -> Cleaning:
    """Remove all results that no lock file or release needs, and notes, logs and leftovers.

    With `ledger`, also remove the measured trials, which may have cost hours. With `dry_run`, remove nothing.

    Raises:
        StoreError: while a run is using the store, or for an unreadable pin.
        UsageError: when the folder is not a store.
    """
    require_store(store)
    with contextlib.nullcontext() if dry_run else disk.exclude_runs(store.root):
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
    return Cleaning(
        results=len(inventory.results) - len(pinned),
        bytes=freed,
        trial_bytes=trials,
        kept_results=len(pinned),
        kept_bytes=kept,
        pins=tuple(pin.name for pin in pins),
    )


# ---------------------------------------------------------------- disk usage

_UNSIGNED: Final = "fetched, not signed"
_FOLDERS: Final = ("downloads", "work", "tmp", "damaged", "logs")


class StageUsage(NamedTuple):
    """The results of one kind of stage."""

    name: str
    results: int
    bytes: int


class RecipeUsage(NamedTuple):
    """The results of a recipe's last up-to-date run; other recipes may share their blobs.

    `missing` counts absent or incomplete results, which the next run makes. `stages` groups results by kind of stage.
    """

    name: str
    results: int
    bytes: int
    age_s: float
    missing: int
    stages: tuple[StageUsage, ...]


class PinUsage(NamedTuple):
    """The results that a pin keeps, and whether the pin's lock file no longer exists."""

    name: str
    results: int
    bytes: int
    missing: int
    file: str
    file_missing: bool


class UsageRow(NamedTuple):
    """How many items of one kind there are, and their size in bytes."""

    name: str
    number: int
    noun: str
    bytes: int


class StoreUsage(NamedTuple):
    """A store's usage; `bytes` excludes trials, `unused_bytes` would be freed without any age limit."""

    root: str
    bytes: int
    ledger_bytes: int
    recipes: tuple[RecipeUsage, ...]
    rows: tuple[UsageRow, ...]
    collectable_bytes: int
    unused_bytes: int


def measure_usage(store: LocalStore) -> StoreUsage:
    """Return the usage of a store. Changes nothing."""
    inventory = take_inventory(store)
    collection = preview_collection(store, Limits(), inventory)
    recipes = (_recipe_usage(pin, inventory) for pin in inventory.pins if pin.recipe)
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
    """Return what each pin keeps."""
    inventory = take_inventory(store)
    rows = []
    for pin in inventory.pins:
        results = [inventory.results[key] for key in pin.keys if key in inventory.results]
        missing = len(pin.keys) - len(results)
        usage = PinUsage(
            name=pin.name,
            results=len(pin.keys),
            bytes=inventory.size(results, pin.digests),
            missing=missing + sum(digest not in inventory.blobs for digest in pin.digests),
            file=pin.file,
            file_missing=bool(pin.file) and not Path(pin.file).exists(),
        )
        rows.append(usage)
    return rows


def _signature_rows(inventory: Inventory) -> Iterator[UsageRow]:
    """Yield fetched results by signing key; a result signed by several keys appears in several rows."""
    results: dict[str, list[StoredResult]] = defaultdict(list)
    for result in inventory.results.values():
        if result.signatures is not None:
            for line in [f"signed by {key}" for key in result.signatures] or [_UNSIGNED]:
                results[line].append(result)
    # Unsigned results come last.
    for line, signed in sorted(results.items(), key=lambda item: (item[0] == _UNSIGNED, item[0])):
        yield UsageRow(line, len(signed), "result", inventory.size(signed))


def _recipe_usage(pin: Pin, inventory: Inventory) -> RecipeUsage:
    results = [inventory.results[key] for key in pin.keys if key in inventory.results]
    stages: dict[str, list[StoredResult]] = defaultdict(list)
    for result in results:
        # Two recipes may need one result, but its label names the stage in any case.
        stages[result.label.partition(":")[2].partition("/")[0]].append(result)
    last_used_s = max([result.used_ns for result in results], default=0) / 1e9
    usages = [StageUsage(stage, len(own), inventory.size(own)) for stage, own in stages.items()]
    return RecipeUsage(
        name=pin.recipe,
        results=len(results),
        bytes=inventory.size(results),
        age_s=max(0.0, time.time() - last_used_s),
        missing=len(pin.keys) - sum(map(inventory.is_complete, results)),
        stages=tuple(sorted(usages, key=lambda usage: -usage.bytes)),
    )


def _folder_row(store: LocalStore, folder: str) -> UsageRow:
    sizes = [size_of(path) for path in files_below(Path(store.root, folder))]
    return UsageRow(folder, len(sizes), "file", sum(sizes))
