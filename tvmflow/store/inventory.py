"""The inventory of a store: its results, its blobs, and the pins that need them."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.codec import from_json
from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.files import read_regular
from tvmflow.core.project import shortest_path
from tvmflow.core.types import RecipeOrigin
from tvmflow.store import disk, local
from tvmflow.store.disk import is_damage, unseal
from tvmflow.store.local import LocalStore

# The prefix of the pin's name for the results of a recipe's last up-to-date run.
RECIPE: Final = "recipe:"


class Pin(NamedTuple):
    """The keys and digests that a recipe (`recipe:NAME`), a release or a lock `file` needs."""

    name: str
    keys: tuple[str, ...]
    digests: tuple[str, ...] = ()
    file: str = ""

    @property
    def recipe(self) -> str:
        """The name of the recipe; empty for the pin of a lock file or a release."""
        return self.name.removeprefix(RECIPE) if self.name.startswith(RECIPE) else ""

    @property
    def reason(self) -> str:
        """The reason why a result stays."""
        return f"recipe {self.recipe} needs it" if self.recipe else f"pinned by {self.name}"


def add_pin(
    store: LocalStore,
    name: str,
    keys: Iterable[str],
    digests: Iterable[str] = (),
    *,
    file: str = "",
) -> list[str]:
    """Keep results and blobs until the pin is removed, or until its lock `file` no longer exists.

    Replaces another pin with this name. Returns the keys and digests that the store lacks.
    """
    pin = Pin(name, tuple(sorted(set(keys))), tuple(sorted(set(digests))), file)
    # The note is written before results are marked: a collection that missed the note then sees the marks.
    store.notes.write(json.dumps(pin._asdict()), "pins", name)
    missing = [key for key in pin.keys if not _mark_used(store, key)]
    for digest in pin.digests:
        if not store.blobs.mark_used(digest) and not Path(store.blobs.path(digest)).exists():
            missing.append(digest)
    return missing


def _mark_used(store: LocalStore, key: str) -> bool:
    with disk.use_lock(store.root):
        if store.find(key) is None:
            return False
        # Another user's file, or a disk that cannot be written: the note alone protects the result.
        with contextlib.suppress(OSError):
            os.utime(store.action_path(key))
        return True


def remove_pin(store: LocalStore, name: str) -> None:
    """Remove a pin; garbage collection may then remove what no other pin needs."""
    recipe = name.removeprefix(RECIPE)
    if name.startswith(RECIPE) and recipe in last_keys(store):
        for path in sorted(Path(store.root, "last", recipe).iterdir()):
            path.unlink(missing_ok=True)
        return
    path = Path(store.root, "pins", name.replace("/", "+"))
    if name.startswith(RECIPE) or name in ("", ".", "..") or not os.path.lexists(path):
        raise UsageError(
            f"nothing is pinned as '{name}'", fix="`tvmflow cache pins` lists the pins"
        )
    if path.is_file() or path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        store.set_aside(str(path))


def update_recipe_pins(store: LocalStore, origins: Iterable[RecipeOrigin]) -> None:
    """Remove results from recipes' pins if their targets are no longer in the recipe."""
    for origin in origins:
        targets = {name.replace("/", "+") for name in origin.targets}
        for name in store.notes.list("last", origin.recipe):
            target = name.partition("+")[2]
            if target and target not in targets:
                # Another user's file, or a disk that cannot be written: its results simply stay.
                with contextlib.suppress(OSError):
                    store.notes.remove("last", origin.recipe, name)


def list_pins(store: LocalStore, *, skip_damaged: bool = False) -> list[Pin]:
    """Return the pins of recipes, then the other pins by name.

    Raises StoreError for an unreadable pin, because the results that it protects are unknown.
    """
    named = []
    for name in store.notes.list("pins"):
        try:
            named += _read_pin(store, name)
        except StoreError:
            if not skip_damaged:
                raise
    return [*list_recipe_pins(store), *named]


def list_recipe_pins(store: LocalStore) -> list[Pin]:
    """Return a pin for each recipe: the results of its last up-to-date run."""
    recipes = sorted(last_keys(store).items())
    return [Pin(f"{RECIPE}{name}", tuple(sorted(set(keys.values())))) for name, keys in recipes]


def last_keys(store: LocalStore) -> dict[str, dict[str, str]]:
    """Return the keys of each recipe's last up-to-date run, by the labels of its stages."""
    keys: dict[str, dict[str, str]] = {}
    for recipe in store.notes.list("last"):
        for name in store.notes.list("last", recipe):
            if key := store.notes.read("last", recipe, name):
                keys.setdefault(recipe, {})[name.replace("+", "/")] = key
    return keys


def _read_pin(store: LocalStore, name: str) -> list[Pin]:
    path = Path(store.root, "pins", name)
    try:
        return [from_json(Pin, json.loads(unseal(read_regular(path), "pins", name)))]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return []
        if not isinstance(error, FileNotFoundError) and not is_damage(error, str(path)):
            raise
        cause: Exception = error
    except ValueError as error:
        cause = error
    unpin = f"or remove the pin with `tvmflow cache unpin {name}`"
    raise StoreError(
        f"{path} cannot be read, so it is not known which results it needs",
        fix=f"make the lock file or the release again that it belongs to, {unpin}",
    ) from cause


_DIGITS: Final = frozenset("0123456789abcdef")


class StoredResult(NamedTuple):
    """A finished stage: its record, and when its result was last used.

    The label is `RECIPE:STAGE[/TARGET]` of a recipe that needs the result, or else that needed it first. `size` is the
    record's size in bytes. Files and inputs are digests. `signatures` holds a line per signer of a fetched result; it
    is None for a result made here.
    """

    key: str
    label: str
    used_ns: int
    size: int
    files: tuple[str, ...]
    inputs: tuple[str, ...]
    damaged: bool = False
    signatures: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        """The label and the key's first digits, for people."""
        return f"{self.label or 'unknown'} {self.key[:12]}"


class StoredBlob(NamedTuple):
    """A blob: digest, size in bytes, and when it was added or last marked as used (ns)."""

    digest: str
    size: int
    changed_ns: int


class Inventory(NamedTuple):
    """Results by key, blobs by digest, and the pins."""

    results: dict[str, StoredResult]
    blobs: dict[str, StoredBlob]
    pins: tuple[Pin, ...]

    @property
    def pinned_keys(self) -> set[str]:
        """The keys of the results that pins need."""
        return {key for pin in self.pins for key in pin.keys}

    def is_complete(self, result: StoredResult) -> bool:
        """Return whether a result is usable: its record and all its files are in the store."""
        return not result.damaged and all(digest in self.blobs for digest in result.files)

    def size(self, results: Sequence[StoredResult], digests: Iterable[str] = ()) -> int:
        """Return the size of results and blobs in bytes; equal blobs count once."""
        needed = {digest for result in results for digest in result.files} | set(digests)
        blobs = [self.blobs[digest].size for digest in needed if digest in self.blobs]
        return sum(result.size for result in results) + sum(blobs)


def require_store(store: LocalStore) -> LocalStore:
    """Return the store if it exists; otherwise raise an error."""
    if store.condition() == "absent":
        raise UsageError(
            f"{shortest_path(store.root)} is not a tvmflow store", fix="choose one with --store DIR"
        )
    return store


def take_inventory(store: LocalStore, *, skip_damaged_pins: bool = False) -> Inventory:
    """Read every action record and list every blob."""
    # Results are read before pins, for the reason in `garbage_collection`.
    results = {result.key: result for result in _list_results(store)}
    pins = tuple(list_pins(store, skip_damaged=skip_damaged_pins))
    for recipe, keys in last_keys(store).items():
        for label, key in keys.items():
            if key in results:
                results[key] = results[key]._replace(label=f"{recipe}:{label}")
    return Inventory(results, {blob.digest: blob for blob in _list_blobs(store)}, pins)


def _list_results(store: LocalStore) -> Iterator[StoredResult]:
    for path in stored_paths(store, "actions"):
        try:
            status = path.lstat()
            content = read_regular(path) if stat.S_ISREG(status.st_mode) else b""
        except FileNotFoundError:
            continue
        except OSError as error:
            if not is_damage(error, str(path)):
                raise
            content = b""
        times_and_size = (status.st_mtime_ns, status.st_size)
        record = local.decode(path.name, content)
        if record is None:
            yield StoredResult(path.name, "", *times_and_size, (), (), damaged=True)
            continue
        yield StoredResult(
            path.name,
            record.stage_id or record.preimage.get("stage", ""),
            *times_and_size,
            tuple(file.digest for file in record.files),
            tuple(record.preimage.get("inputs", {}).values()),
            signatures=record.origin.signature_lines if record.origin else None,
        )


def _list_blobs(store: LocalStore) -> Iterator[StoredBlob]:
    for path in stored_paths(store, "cas"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            yield StoredBlob(path.name, status.st_size, status.st_ctime_ns)


def stored_paths(store: LocalStore, folder: str) -> Iterator[Path]:
    """Yield the files in `actions` or `cas` whose names are digests, in a fixed order."""
    for parent, folders, names in os.walk(Path(store.root, folder)):
        folders.sort()
        for name in sorted(names):
            if len(name) == 64 and _DIGITS.issuperset(name):
                yield Path(parent, name)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted; empty if the folder does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def size_of(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def size_below(path: Path) -> int:
    """Return the size of a file, or of all files below a folder, in bytes."""
    return sum(map(size_of, files_below(path))) if path.is_dir() else size_of(path)


def changed_ns(path: Path) -> int:
    """Return a file's change time (ns); 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_ctime_ns
    return 0
