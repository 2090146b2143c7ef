"""Lets go of what nobody needs, also while runs are under way, and without waiting for them.

What stays: the results that a recipe last was up to date with (`last/`), those that are
pinned (`pins/`), and all that was used since the oldest living run began; with them their
contents, from which deliveries are repaired, and the downloads that they were made from.
Of the rest, what was not used for `max_age_s` goes, and then what was used longest ago
until the store is no larger than `max_bytes`. Measured trials are never touched.

Why nothing goes that a run needs. A collection takes a lease of its own at time G. It lists
the living leases, reads all actions with their modification times, and then `last/` and
`pins/`. Let H be when the oldest of those leases began, so H <= G; nothing with a time from
H on is chosen (less a slack for coarse clocks). Each choice is carried out alone with
`use.lock`, and only if the file still has the time that it was chosen by.

- A run whose lease was listed: what it found or published carries a time from H on, because
  `find` and `publish`, sharing `use.lock`, mark a result as used before they return it.
  Whatever it will find later is marked under that lock: either before we hold it, and then
  the time is another one and we pass, or after, and then it finds nothing and makes the
  result anew.
- A run that began after the list: its lease, and so all its marks, are younger than G.
- A run that had ended before the list: what it needs is in `last/`, which we read later.
  An up-to-date run without a lease changes nothing in `last/`, so it relies on the same.
- A content goes only when no action that stayed names it, and after the actions that did.
  An action that we have not seen was published after we looked, and its contents were taken
  in before it, or asked for with `use_blob`: both change their times under the shared lock.
  Taking in replaces, so there is no instant in which an equal content is gone.
- Reading is by path and only of contents whose result stays; a file that is open survives
  its name in any case.

Why a kill does no harm: an action goes before its contents, so what is half done is a
content that nobody names, which the next collection finds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import StoreError
from tvmflow.stores import leases
from tvmflow.stores.contents import Contents, Pin, Result, action_path, look
from tvmflow.stores.local import LocalStore

DAY: Final = 86_400.0
DEFAULT_AGE: Final = 30 * DAY
# What a kill or damage left is of use for as long as somebody may want to go on or to look.
LEFTOVER_AGE: Final = 7 * DAY
# What compilers and packages were found to be: small, and slow to ask again.
_FACTS_AGE: Final = 365 * DAY
# Writers without a lease finish what they write well within this.
_WRITING: Final = 3600.0
# The coarsest clock of a file system.
_SLACK_NS: Final = 2 * 10**9


class Limits(NamedTuple):
    """How long what nobody needs may lie unused (None: for ever), and how large the store may be in bytes."""

    max_age_s: float | None = DEFAULT_AGE
    max_bytes: int | None = None


class Gone(NamedTuple):
    """One thing that goes: what it is, whose, why, how long it was not used, and what that frees (bytes)."""

    kind: str
    name: str
    reason: str
    age_s: float
    bytes: int


class Collected(NamedTuple):
    """What went, or would go; the size of the store after it (bytes, without trials), and what of it is needed."""

    gone: tuple[Gone, ...]
    kept_bytes: int
    needed_bytes: int
    runs: int

    @property
    def freed(self) -> int:
        return sum(each.bytes for each in self.gone)


class _Item(NamedTuple):
    """Something that may go: a line for people, the time that it was chosen by, and how it goes (bytes freed)."""

    kind: str
    name: str
    reason: str
    used_ns: int
    bytes: int
    remove: Callable[[], int | None]


def preview(store: LocalStore, limits: Limits, contents: Contents) -> Collected:
    """What would be removed of what a look has found. Writes nothing."""
    return _collect(store, contents, limits, leases.living(store.root), time.time_ns(), do=False)


def collect(store: LocalStore, limits: Limits, *, do: bool) -> Collected:
    """Remove what is not needed, or say what would be removed (`do` not set, which writes nothing).

    Raises StoreError when another collection is at work, or when what is needed cannot be told.
    """
    if not do:
        return preview(store, limits, look(store))
    try:
        with alone_at_it(store), store.running() as began:
            return _remove(store, limits, began)
    except (OSError, StoreError) as error:
        if not _is_full(error):
            raise
    # there is no room for a lease: then without one, while nobody else uses the store
    with store.alone():
        return _remove(store, limits, time.time_ns())


def _remove(store: LocalStore, limits: Limits, now_ns: int) -> Collected:
    # in this order: see above
    living = leases.living(store.root, tidy=True)
    return _collect(store, look(store), limits, living, now_ns, do=True)


def _is_full(error: BaseException | None) -> bool:
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def alone_at_it(store: LocalStore) -> Iterator[None]:
    """While this is open, nobody else collects or checks the store. Raises StoreError when somebody does."""
    path = Path(store.locks, "gc")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another `tvmflow cache gc` or `verify` is at work in {store.root}",
                fix="wait for it to end, then try again",
            ) from None
        yield


def _collect(
    store: LocalStore,
    contents: Contents,
    limits: Limits,
    living: Sequence[int],
    now_ns: int,
    *,
    do: bool,
) -> Collected:
    choice = _Choice(store, contents, limits, now_ns, min([now_ns, *living]) - _SLACK_NS)
    gone = []
    for item in choice.items():
        freed = item.remove() if do else item.bytes
        if freed is not None:
            choice.left -= freed
            age = max(0.0, (now_ns - item.used_ns) / 1e9)
            gone.append(Gone(item.kind, item.name, item.reason, age, freed))
    # when we remove, one of them is our own
    others = max(0, len(living) - do)
    return Collected(tuple(gone), choice.left, choice.needed_bytes(), others)


def age_text(seconds: float) -> str:
    """An age for people: 5 s, 12 min, 3 h, 31 days."""
    for unit, size in (("days", DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            number = int(seconds / size)
            return f"{number} {'day' if unit == 'days' and number == 1 else unit}"
    return f"{int(seconds)} s"


class _Choice:
    """What of a store goes, and how. `items` come in the order in which they must go."""

    def __init__(
        self, store: LocalStore, contents: Contents, limits: Limits, now_ns: int, horizon_ns: int
    ) -> None:
        self._store = store
        self._root = Path(store.root)
        self._contents = contents
        self._limits = limits
        self._now_ns = now_ns
        self._horizon_ns = horizon_ns
        self._needed_by = _needed(contents.pins)
        # how many results and pins need a content
        self._names = Counter(
            digest for each in contents.results.values() for digest in set(each.files)
        )
        self._names.update(digest for pin in contents.pins for digest in pin.digests)
        # bytes that are there after all that went so far; who carries the items out keeps count
        self.left = sum(map(size_of, _governed(self._root)))

    def items(self) -> Iterator[_Item]:
        """What goes. Each is to be carried out before the next is asked for, and counted in `left`."""
        yield from self._beside()
        yield from self._unnamed()
        for candidate in sorted(self._candidates(), key=lambda each: each.used_ns):
            if reason := self._why(candidate):
                yield self._goes(candidate, reason)

    def _why(self, candidate: Result) -> str:
        """Why something that nobody needs goes; empty when it may stay."""
        age_s, (max_age_s, max_bytes) = (self._now_ns - candidate.used_ns) / 1e9, self._limits
        if candidate.wrong:
            return "it is damaged"
        if max_age_s is not None and age_s >= max_age_s:
            unused = f", and it was not used for {age_text(max_age_s)}" if max_age_s else ""
            return f"nothing needs it{unused}"
        if max_bytes is not None and self.left > max_bytes:
            return "nothing needs it, and the store is larger than it may be"
        return ""

    # ------------------------------------------------------------ results and downloads

    def _candidates(self) -> Iterator[Result]:
        """Results and downloads that nobody needs and no run has used. A download has no files."""
        for each in self._contents.results.values():
            needed = each.key in self._needed_by and not each.wrong
            if not needed and each.used_ns < self._horizon_ns:
                yield each
        needed_files = {
            digest
            for each in self._contents.results.values()
            if each.key in self._needed_by
            for digest in each.inputs
        }
        for path in files_below(self._root / "downloads"):
            if path.suffix == ".lock" or path.name.partition(".")[0] in needed_files:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                # a file that was put there by hand may be years old
                if status.st_ctime_ns < self._horizon_ns:
                    label = f"downloads/{path.name}"
                    yield Result("", label, status.st_ctime_ns, status.st_size, (), ())

    def _goes(self, each: Result, reason: str) -> _Item:
        if not each.key:
            path = self._root / each.label
            remove = partial(self._remove_download, path, each)
            name = f"{path.name.partition('.')[0][:12]}…{path.suffix}"
            return _Item("download", name, reason, each.used_ns, each.size, remove)
        freed = each.size
        for digest in set(each.files):
            self._names[digest] -= 1
            if not self._names[digest] and digest in self._contents.blobs:
                freed += self._contents.blobs[digest].size
        name = f"{each.label or 'unknown'} {each.key[:12]}"
        return _Item("result", name, reason, each.used_ns, freed, partial(self._remove, each))

    def _remove(self, each: Result) -> int | None:
        path = action_path(self._store, each.key)
        with leases.briefly(self._store.root, alone=True):
            try:
                if path.stat().st_mtime_ns != each.used_ns:
                    raise FileNotFoundError
                path.unlink()
            except FileNotFoundError:
                # used in the meantime, so it stays, with its contents
                self._names.update(set(each.files))
                return None
        freed = each.size
        for digest in sorted(set(each.files)):
            if not self._names[digest]:
                freed += self._remove_content(digest) or 0
        return freed

    def _remove_content(self, digest: str) -> int | None:
        known = self._contents.blobs.get(digest)
        if known is None:
            return None
        with leases.briefly(self._store.root, alone=True), contextlib.suppress(FileNotFoundError):
            path = Path(self._store.blob(digest))
            if path.stat().st_ctime_ns == known.changed_ns < self._horizon_ns:
                path.unlink()
                return known.size
        return None

    def _remove_download(self, path: Path, each: Result) -> int | None:
        lock = path.with_name(f"{path.name.partition('.')[0]}.lock")
        if not lock.exists() and not _touched(lock):
            return None
        with lock.open("rb") as handle, contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ctime_ns == each.used_ns:
                path.unlink()
                return each.size
        return None

    def _unnamed(self) -> Iterator[_Item]:
        """Contents that a kill left between taking them in and naming them."""
        for digest, each in self._contents.blobs.items():
            if not self._names[digest] and each.changed_ns < self._horizon_ns:
                name, remove = f"{digest[:12]}…", partial(self._remove_content, digest)
                told = "no result names it"
                yield _Item("content", name, told, each.changed_ns, each.size, remove)

    def needed_bytes(self) -> int:
        """What roots and running builds hold on to."""
        held = [
            each
            for each in self._contents.results.values()
            if each.key in self._needed_by or each.used_ns >= self._horizon_ns
        ]
        digests = {digest for each in held for digest in each.files}
        digests.update(digest for pin in self._contents.pins for digest in pin.digests)
        blobs = self._contents.blobs
        return sum(each.size for each in held) + sum(
            blobs[digest].size for digest in digests if digest in blobs
        )

    # ------------------------------------------------------------ what lies beside

    def _beside(self) -> Iterator[_Item]:
        age = DEFAULT_AGE if self._limits.max_age_s is None else self._limits.max_age_s
        leftover = min(LEFTOVER_AGE, age)
        yield from self._old("tmp", "temporary", _WRITING, "a kill left it")
        yield from self._work(leftover)
        yield from self._old("damaged", "damaged", leftover, "it was set aside as damaged")
        yield from self._old("logs", "log", age, "it is an old log")
        yield from self._old("facts", "note", _FACTS_AGE, "it is an old memory")
        yield from self._old("plans", "note", DEFAULT_AGE, "it is an old memory", _plan_is_void)
        yield from self._old("stats", "note", None, "its file is gone", _stat_is_void)
        yield from self._old("delivered", "note", None, "its file is gone", _delivery_is_void)

    def _old(
        self,
        folder: str,
        kind: str,
        age_s: float | None,
        reason: str,
        void: Callable[[Path], bool] | None = None,
    ) -> Iterator[_Item]:
        """Entries of a folder that are older than this, or void; none that came since a living run began."""
        place = self._root / folder
        # what a kill left in `tmp` may be a folder, which goes as a whole
        entries = _entries(place) if folder == "tmp" else files_below(place)
        for path in entries:
            # what was moved here keeps the time that it was written at, and gets a new time of change
            changed = _changed(path)
            if not changed or changed >= self._horizon_ns:
                continue
            old = age_s is not None and (self._now_ns - changed) / 1e9 >= age_s
            if old or (void is not None and void(path)):
                told = reason if old else "its file is gone"
                size, name = _size_below(path), str(path.relative_to(self._root))
                yield _Item(kind, name, told, changed, size, partial(_remove_path, path, size))

    def _work(self, age_s: float) -> Iterator[_Item]:
        """Work folders that nobody holds."""
        for path in _entries(self._root / "work"):
            if path.is_dir():
                used = max(map(_changed, (path, *_folders(path), *files_below(path))))
                if used < self._horizon_ns and (self._now_ns - used) / 1e9 >= age_s:
                    size, name = _size_below(path), f"{path.name[:12]}…"
                    remove = partial(_remove_work, path, size)
                    yield _Item("work", name, "a kill left it", used, size, remove)


def _needed(pins: Sequence[Pin]) -> dict[str, Pin]:
    return {key: pin for pin in pins for key in pin.keys}


# ---------------------------------------------------------------- files


_GOVERNED: Final = (
    "actions cas downloads work tmp damaged logs facts plans stats delivered last pins".split()
)


def _governed(root: Path) -> Iterator[Path]:
    """Every file that counts: all but trials and locks."""
    for name in _GOVERNED:
        yield from files_below(root / name)


def files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def _folders(folder: Path) -> Iterator[Path]:
    for parent, names, _ in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _changed(path: Path) -> int:
    try:
        return path.lstat().st_ctime_ns
    except FileNotFoundError:
        return 0


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size_below(path: Path) -> int:
    return sum(map(size_of, files_below(path))) if path.is_dir() else size_of(path)


def _touched(path: Path) -> bool:
    """Make an empty file, if there is room for one."""
    try:
        path.touch()
    except OSError as error:
        if _is_full(error):
            return False
        raise
    return True


def _remove_path(path: Path, size: int) -> int | None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return size
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    return size


def _remove_work(path: Path, size: int) -> int | None:
    """Remove a work folder, unless a run has claimed it."""
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context((path / "claim").open("ab"))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # moved away first, as a run does: whoever waits for this key makes a folder of the same name
            aside = path.parent.parent / "tmp" / f"{os.getpid()}-{time.monotonic_ns()}-{path.name}"
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            if _is_full(error):
                return None
            raise
        shutil.rmtree(aside, ignore_errors=True)
    return size


def _plan_is_void(path: Path) -> bool:
    """Whether a file is gone that the plan was read from."""
    note = _note(path)
    reads = note.get("reads", []) if isinstance(note, dict) else []
    return any(digest and not Path(name).exists() for name, digest in reads)


def _stat_is_void(path: Path) -> bool:
    note = _note(path)
    return not (isinstance(note, dict) and Path(str(note.get("path"))).exists())


def _delivery_is_void(path: Path) -> bool:
    # long paths are cut from the left, and `+` may be a slash: when in doubt the file is read once more
    return not Path("/" + path.name.replace("+", "/")).exists()


def _note(path: Path) -> object:
    try:
        note: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note
