"""The eviction plan: what a garbage collection removes of a store, in which order, and why."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import is_disk_full
from tvmflow.core.file_locks import Locked, lock
from tvmflow.core.formatting import age_text
from tvmflow.store import leases, leftovers
from tvmflow.store.files import files_below, size_of
from tvmflow.store.inventory import Inventory, StoredResult
from tvmflow.store.leftovers import DAY, Candidate
from tvmflow.store.local import LocalStore

DEFAULT_AGE: Final = 30 * DAY
# Folders that count towards the size of a store: all but trials and locks.
_COUNTED: Final = "actions cas downloads work tmp damaged logs facts plans stats delivered last pins history failures".split()


class Limits(NamedTuple):
    """The limits of unused results.

    Attributes:
        max_age_s: How long they may stay; None for ever.
        max_bytes: How large the store may be with them; None for any size.
    """

    max_age_s: float | None = DEFAULT_AGE
    max_bytes: int | None = None


class EvictionPlan:
    """The parts of a store that are removed, in order.

    Attributes:
        bytes_left: The size of the store after the evictions so far; whoever removes keeps it up to date.
    """

    def __init__(
        self, store: LocalStore, inventory: Inventory, limits: Limits, now_ns: int, horizon_ns: int
    ) -> None:
        self._now_ns = now_ns
        self._store = store
        self._root = Path(store.root)
        self._inventory = inventory
        self._limits = limits
        # nothing that was used from then on is evicted
        self._horizon_ns = horizon_ns
        self._needed_keys = inventory.pinned_keys
        # how many results and pins refer to a blob
        self._references = Counter(digest for pin in inventory.pins for digest in pin.digests)
        for result in inventory.results.values():
            self._references.update(set(result.files))
        counted = chain.from_iterable(files_below(self._root / name) for name in _COUNTED)
        self.bytes_left = sum(map(size_of, counted))

    def candidates(self) -> Iterator[Candidate]:
        """Yield what is to be removed. Remove each, and update `bytes_left`, before the next is taken."""
        max_age_s = self._limits.max_age_s
        age_s = DEFAULT_AGE if max_age_s is None else max_age_s
        yield from leftovers.find_leftovers(self._root, age_s, self._now_ns, self._horizon_ns)
        yield from self._unreferenced_blobs()
        unused: list[StoredResult | Candidate] = list(self._unused_results())
        unused += self._unused_downloads()
        for item in sorted(unused, key=lambda item: item.used_ns):
            if isinstance(item, Candidate):
                if reason := self._reason(item.used_ns):
                    yield item._replace(reason=reason)
            elif reason := "it is damaged" if item.damaged else self._reason(item.used_ns):
                yield self._evict_result(item, reason)

    def _reason(self, used_ns: int) -> str:
        """Return why something unused is removed; nothing when it may stay."""
        age_s, (max_age_s, max_bytes) = (self._now_ns - used_ns) / 1e9, self._limits
        if max_age_s is not None and age_s >= max_age_s:
            unused = f", and it was not used for {age_text(max_age_s)}" if max_age_s else ""
            return f"nothing needs it{unused}"
        if max_bytes is not None and self.bytes_left > max_bytes:
            return "nothing needs it, and the store is larger than its limit"
        return ""

    def needed_bytes(self) -> int:
        """Return how many bytes pins and active runs need."""
        needed = [
            result
            for result in self._inventory.results.values()
            if result.key in self._needed_keys or result.used_ns >= self._horizon_ns
        ]
        digests = [digest for pin in self._inventory.pins for digest in pin.digests]
        return self._inventory.size(needed, digests)

    # ------------------------------------------------------------ results

    def _unused_results(self) -> Iterator[StoredResult]:
        for result in self._inventory.results.values():
            needed = result.key in self._needed_keys and not result.damaged
            if not needed and result.used_ns < self._horizon_ns:
                yield result

    def _evict_result(self, result: StoredResult, reason: str) -> Candidate:
        freed = result.size
        for digest in set(result.files):
            self._references[digest] -= 1
            if not self._references[digest] and digest in self._inventory.blobs:
                freed += self._inventory.blobs[digest].size
        remove = partial(self._remove_result, result)
        return Candidate("result", result.title, reason, result.used_ns, freed, remove)

    def _remove_result(self, result: StoredResult) -> int | None:
        path = Path(self._store.action_path(result.key))
        with leases.use_lock(self._store.root, exclusive=True):
            try:
                if path.stat().st_mtime_ns != result.used_ns:
                    raise FileNotFoundError
                path.unlink()
            except FileNotFoundError:
                # used in the meantime, so it stays with its blobs
                self._references.update(set(result.files))
                return None
        freed = result.size
        for digest in sorted(set(result.files)):
            if not self._references[digest]:
                freed += self._remove_blob(digest) or 0
        return freed

    # ------------------------------------------------------------ blobs

    def _unreferenced_blobs(self) -> Iterator[Candidate]:
        """Yield the blobs that a killed process added and did not refer to."""
        for digest, blob in self._inventory.blobs.items():
            if not self._references[digest] and blob.changed_ns < self._horizon_ns:
                name, remove = f"{digest[:12]}…", partial(self._remove_blob, digest)
                reason = "no result refers to it"
                yield Candidate("blob", name, reason, blob.changed_ns, blob.size, remove)

    def _remove_blob(self, digest: str) -> int | None:
        blob = self._inventory.blobs.get(digest)
        if blob is None:
            return None
        with (
            leases.use_lock(self._store.root, exclusive=True),
            contextlib.suppress(FileNotFoundError),
        ):
            path = Path(self._store.blobs.path(digest))
            if path.stat().st_ctime_ns == blob.changed_ns < self._horizon_ns:
                path.unlink()
                return blob.size
        return None

    # ------------------------------------------------------------ downloads

    def _unused_downloads(self) -> Iterator[Candidate]:
        """Yield downloads that nothing needs; their reason follows when it is their turn."""
        results = self._inventory.results
        pinned = [results[key] for key in self._needed_keys if key in results]
        needed = {digest for result in pinned for digest in result.inputs}
        for path in files_below(self._root / "downloads"):
            digest = path.name.partition(".")[0]
            if path.suffix == ".lock" or digest in needed:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                # by the change time: a file that a user put there may have been modified years ago
                used_ns, size = status.st_ctime_ns, status.st_size
                if used_ns < self._horizon_ns:
                    name = f"{digest[:12]}…{path.suffix}"
                    remove = partial(_remove_download, path, digest, used_ns, size)
                    yield Candidate("download", name, "", used_ns, size, remove)


def _remove_download(path: Path, digest: str, used_ns: int, size: int) -> int | None:
    lock_file = path.with_name(f"{digest}.lock")
    try:
        lock_file.touch()
    except PermissionError:
        # another user's lock file in a shared store, which can be locked all the same
        pass
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
