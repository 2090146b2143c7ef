"""Garbage collection: removing unused results, also while runs are active, and without waiting for them.

What stays: the results that a recipe was last up to date with (`last/`), those that are pinned
(`pins/`), and all that was used since the oldest active run began; with them their blobs, from
which deliveries are repaired, and the downloads that they were made from. Of the rest, what was
not used for `max_age_s` is removed, and then what was unused longest until the store is no
larger than `max_bytes`. Measured trials are never touched.

Why nothing is removed that a run needs. A collection takes a lease of its own at time G. It
lists the active leases, reads all action records with their modification times, and then `last/`
and `pins/`. Let H be when the oldest of those leases began, so H <= G; nothing with a time from
H on is evicted (less a margin for coarse clocks). Each eviction holds `use.lock` exclusively, and
is carried out only if the file still has the time that it was chosen by.

- A run whose lease was listed: what it found or published carries a time from H on, because
  `find` and `publish`, sharing `use.lock`, mark a result as used before they return it.
  Whatever it will find later is marked under that lock: either before we hold it, and then
  the time has changed and the result is skipped, or after, and then the run finds nothing and
  makes the result again.
- A run that began after the list: its lease, and so all its marks, are younger than G.
- A run that had ended before the list: what it needs is in `last/`, which is read later.
  An up-to-date run without a lease changes nothing in `last/`, so it relies on the same.
- A blob is removed only when no action record that stays refers to it, and after the records
  that did. A record that we have not seen was published after we looked, and its blobs were
  added before it, or marked with `mark_used`: both change their times under the shared lock.
  Adding replaces, so there is no instant in which an equal blob is missing.
- Reading is by path and only of blobs whose result stays; a file that is open survives the
  removal of its name in any case.

Why a kill does no harm: an action record is removed before its blobs, so what is left half done
is a blob that nothing refers to, which the next collection finds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import is_disk_full
from tvmflow.core.errors import StoreError
from tvmflow.core.project import shortest_path
from tvmflow.store import leases
from tvmflow.store.eviction_plan import EvictionPlan, Limits
from tvmflow.store.inventory import Inventory, take_inventory
from tvmflow.store.local import LocalStore

_log = logging.getLogger(__name__)

# The coarsest clock of a file system.
_CLOCK_MARGIN_NS: Final = 2 * 10**9
# More than clocks of machines differ.
_AHEAD_NS: Final = 86_400 * 10**9


class Eviction(NamedTuple):
    """Something that was or would be removed.

    Attributes:
        kind: `result`, `blob`, `download`, `work`, `note`, `log`, `run record`, `temporary` or `damaged`.
        name: What it is called, for people.
        reason: Why it is removed.
        age_s: How long it was not used.
        bytes: What its removal frees.
    """

    kind: str
    name: str
    reason: str
    age_s: float
    bytes: int


class Collection(NamedTuple):
    """The outcome of a garbage collection, or of its preview.

    Attributes:
        evictions: What was removed, in order.
        kept_bytes: The size of the store afterwards, without measured trials.
        needed_bytes: How much of that recipes, pins and active runs need.
        runs: How many runs are active.
    """

    evictions: tuple[Eviction, ...]
    kept_bytes: int
    needed_bytes: int
    runs: int

    @property
    def freed(self) -> int:
        """The bytes that the evictions free."""
        return sum(eviction.bytes for eviction in self.evictions)


def preview_collection(
    store: LocalStore, limits: Limits, inventory: Inventory | None = None
) -> Collection:
    """Return what a garbage collection would remove. Writes nothing.

    Args:
        store: The store.
        limits: What unused results are allowed.
        inventory: The inventory, if it was taken already.

    Raises:
        StoreError: for a pin that cannot be read, because what it needs is not known.
    """
    active_runs = leases.active_runs(store.root)
    inventory = inventory or take_inventory(store)
    return _collect(store, inventory, limits, active_runs, time.time_ns(), remove=False)


def collect_garbage(store: LocalStore, limits: Limits) -> Collection:
    """Remove unused results.

    Raises:
        StoreError: when another collection is active, or for a pin that cannot be read.
    """
    try:
        with exclude_maintenance(store), store.running() as began_ns:
            return _remove_unused(store, limits, began_ns)
    except (OSError, StoreError) as error:
        if not is_disk_full(error):
            raise
    _log.debug("no space for a lease in %s: collecting while no run is active", store.root)
    with leases.exclude_runs(store.root):
        return _remove_unused(store, limits, time.time_ns())


def _remove_unused(store: LocalStore, limits: Limits, now_ns: int) -> Collection:
    # leases before the inventory: see the module's docstring
    active_runs = leases.active_runs(store.root, remove_stale=True)
    inventory = take_inventory(store)
    if max(active_runs, default=0) <= now_ns + _AHEAD_NS:
        _correct_times(store, inventory, now_ns)
    return _collect(store, inventory, limits, active_runs, now_ns, remove=True)


def _correct_times(store: LocalStore, inventory: Inventory, now_ns: int) -> None:
    """Give what a wrong clock dated in the future the current time, from which on it ages; until then, it would stay."""
    limit_ns = now_ns + _AHEAD_NS
    results = (result for result in inventory.results.values() if result.used_ns > limit_ns)
    blobs = (blob for blob in inventory.blobs.values() if blob.changed_ns > limit_ns)
    for path in (
        *(store.action_path(result.key) for result in results),
        *(store.blobs.path(blob.digest) for blob in blobs),
    ):
        # a file of another user in a shared store, or one that was removed meanwhile
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
    horizon_ns = min([now_ns, *active_runs]) - _CLOCK_MARGIN_NS
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
        evictions.append(Eviction(candidate.kind, candidate.name, candidate.reason, age_s, freed))
    # one of the leases may be that of this collection
    other_runs = max(0, len(active_runs) - remove)
    return Collection(tuple(evictions), plan.bytes_left, plan.needed_bytes(), other_runs)


def remove_result(store: LocalStore, key: str) -> None:
    """Remove one result; a later garbage collection removes files that no other result has.

    Raises:
        StoreError: while a run is using the store.
    """
    with leases.exclude_runs(store.root):
        Path(store.action_path(key)).unlink(missing_ok=True)


def exclude_maintenance(store: LocalStore) -> AbstractContextManager[None]:
    """Keep every other garbage collection and integrity check out while the block runs.

    Raises:
        StoreError: when one is active.
    """
    refusal = f"another `tvmflow cache gc` or `tvmflow cache verify` is running in {shortest_path(store.root)}"
    return leases.exclude_others(store.root, "locks/gc", refusal)
