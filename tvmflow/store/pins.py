"""Pins: what recipes, lock files and releases need, so that garbage collection keeps it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.codec import from_json
from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.files import read_regular
from tvmflow.core.types import RecipeOrigin
from tvmflow.store import leases
from tvmflow.store.disk import is_damage, unseal
from tvmflow.store.local import LocalStore

# What a recipe last was up to date with is pinned under this prefix and its name.
RECIPE: Final = "recipe:"


class Pin(NamedTuple):
    """The results and blobs that one recipe, lock file or release needs.

    Attributes:
        name: `recipe:NAME` for what a recipe was last up to date with, else the name of the pin.
        keys: The keys of results.
        digests: Blobs that are needed beside them.
        file: The lock file that the pin belongs to, if it belongs to one.
    """

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
    """Keep results and blobs until the pin is removed.

    Return the keys and digests that are not in the store. Another pin of the name is replaced. Once its lock
    `file` does not exist any more, the pin may be removed.
    """
    pin = Pin(name, tuple(sorted(set(keys))), tuple(sorted(set(digests))), file)
    # first the note, then the marks of use: a collection that has not read the note sees the marks
    store.notes.write(json.dumps(pin._asdict()), "pins", name)
    missing = [key for key in pin.keys if not _mark_used(store, key)]
    for digest in pin.digests:
        if not store.blobs.mark_used(digest) and not Path(store.blobs.path(digest)).exists():
            missing.append(digest)
    return missing


def _mark_used(store: LocalStore, key: str) -> bool:
    """Mark a result as used now; return whether it is in the store."""
    with leases.use_lock(store.root):
        if store.find(key) is None:
            return False
        # another user's file, or a disk that cannot be written: the note alone protects it
        with contextlib.suppress(OSError):
            os.utime(store.action_path(key))
        return True


def remove_pin(store: LocalStore, name: str) -> None:
    """Remove a pin; garbage collection may then remove what only it needed.

    Raises:
        UsageError: when there is no pin of that name.
    """
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
    """Take from the pins of recipes the results for targets that these no longer have."""
    for origin in origins:
        targets = {name.replace("/", "+") for name in origin.targets}
        for name in store.notes.list("last", origin.recipe):
            target = name.partition("+")[2]
            if target and target not in targets:
                # another user's file, or a disk that cannot be written: its results stay
                with contextlib.suppress(OSError):
                    store.notes.remove("last", origin.recipe, name)


def list_pins(store: LocalStore, *, skip_damaged: bool = False) -> list[Pin]:
    """Return the pins of recipes, then those of lock files and releases, by name.

    Raises:
        StoreError: for a pin that cannot be read, because what it needs is not known.
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
    """Return a pin for each recipe: what it was up to date with the last time."""
    recipes = sorted(last_keys(store).items())
    return [Pin(f"{RECIPE}{name}", tuple(sorted(set(keys.values())))) for name, keys in recipes]


def last_keys(store: LocalStore) -> dict[str, dict[str, str]]:
    """Return for each recipe the label of each stage and the key it had when it was last up to date."""
    keys: dict[str, dict[str, str]] = {}
    for recipe in store.notes.list("last"):
        for name in store.notes.list("last", recipe):
            if key := store.notes.read("last", recipe, name):
                keys.setdefault(recipe, {})[name.replace("+", "/")] = key
    return keys


def _read_pin(store: LocalStore, name: str) -> list[Pin]:
    """Return the pin of a lock file or a release; nothing when it was removed after it was listed."""
    path = Path(store.root, "pins", name)
    try:
        return [from_json(Pin, json.loads(unseal(read_regular(path), "pins", name) or ""))]
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
