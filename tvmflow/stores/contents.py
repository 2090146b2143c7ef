"""What a store holds, as one look finds it: results and who needs them, contents, and all that lies beside them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import StoreError, UsageError
from tvmflow.stores.local import FORMAT, LocalStore
from tvmflow.stores.origin import signed_by
from tvmflow.values import Json

# A recipe is a root under this name, beside those of pins.
RECIPE: Final = "recipe:"
_DIGITS: Final = frozenset("0123456789abcdef")


class Result(NamedTuple):
    """A finished stage: when it was last used (ns), the size of its action, and the digests of its files.

    `label` is the stage as its recipe last needed it or as it was first made for, `inputs`
    the digests of what it read. One that is `wrong` cannot be read, and counts as not there.
    `signed` are lines about the keys that signed one from elsewhere; None for one that was made here.
    """

    key: str
    label: str
    used_ns: int
    size: int
    files: tuple[str, ...]
    inputs: tuple[str, ...]
    wrong: bool = False
    signed: tuple[str, ...] | None = None


class Content(NamedTuple):
    """A file of the store: its size, and when it was taken in or last asked for (ns)."""

    digest: str
    size: int
    changed_ns: int


class Pin(NamedTuple):
    """What somebody needs: `recipe:NAME` for what a recipe last was up to date with, else a pin's name.

    `file` is the lock file that it stands for, if it stands for one.
    """

    name: str
    keys: tuple[str, ...]
    digests: tuple[str, ...] = ()
    file: str = ""

    @property
    def words(self) -> str:
        """As the reason why something stays."""
        if self.name.startswith(RECIPE):
            return f"recipe {self.name.removeprefix(RECIPE)} needs it"
        return f"pinned by {self.name}"


class Contents(NamedTuple):
    """Results by key, contents by digest, and what needs them."""

    results: dict[str, Result]
    blobs: dict[str, Content]
    pins: tuple[Pin, ...]


def existing(store: LocalStore) -> LocalStore:
    """The store, if it is one. Raises UsageError."""
    if store.read_note("format") != FORMAT:
        raise UsageError(f"{store.root} is not a tvmflow store", fix="name one with --store DIR")
    return store


def look(store: LocalStore) -> Contents:
    """Read every action and list every content. Raises StoreError where what is needed cannot be told."""
    # first the results, then who needs them: see `collect`
    found = {result.key: result for result in _results(store)}
    roots = (*recipes(store), *pins(store))
    labels = {
        key: f"{name}:{label}"
        for name, entries in _last(store).items()
        for label, key in entries.items()
    }
    results = {key: each._replace(label=labels.get(key, each.label)) for key, each in found.items()}
    return Contents(results, {each.digest: each for each in _blobs(store)}, roots)


def _results(store: LocalStore) -> Iterator[Result]:
    for path in files_of(store, "actions"):
        try:
            with path.open("rb") as stream:
                status, content = os.fstat(stream.fileno()), stream.read()
        except FileNotFoundError:
            continue
        action = read_action(content)
        if action is None:
            yield Result(path.name, "", status.st_mtime_ns, status.st_size, (), (), wrong=True)
            continue
        preimage = action["preimage"]
        label = action.get("for") or preimage.get("stage", "")
        files = tuple(entry[1] for entry in action["files"])
        inputs = tuple(preimage.get("inputs", {}).values())
        signed = signed_by(action["origin"]) if "origin" in action else None
        facts = (status.st_mtime_ns, status.st_size, files, inputs)
        yield Result(path.name, label, *facts, signed=signed)


def read_action(content: bytes) -> dict[str, Json] | None:
    """An action that matches its own digest; None for one that does not."""
    check, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != check:
        return None
    action: dict[str, Json] = json.loads(body)
    return action


def action_path(store: LocalStore, key: str) -> Path:
    """Where the action with this key is, or would be."""
    return Path(store.root, "actions", key[:2], key)


def _blobs(store: LocalStore) -> Iterator[Content]:
    for path in files_of(store, "cas"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield Content(path.name, status.st_size, status.st_ctime_ns)


def files_of(store: LocalStore, folder: str) -> Iterator[Path]:
    """The files in `actions` or `cas` whose names are digests."""
    for parent, folders, names in os.walk(Path(store.root, folder)):
        folders.sort()
        for name in sorted(names):
            if len(name) == 64 and _DIGITS.issuperset(name):
                yield Path(parent, name)


# ---------------------------------------------------------------- who needs what


def recipes(store: LocalStore) -> list[Pin]:
    """What each recipe was up to date with the last time."""
    return [
        Pin(f"{RECIPE}{name}", tuple(sorted(set(entries.values()))))
        for name, entries in sorted(_last(store).items())
    ]


def _last(store: LocalStore) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for parent, _, names in os.walk(Path(store.root, "last")):
        recipe = Path(parent).name
        for name in names:
            key = store.read_note("last", recipe, name)
            if key:
                found.setdefault(recipe, {})[name.replace("+", "/")] = key
    return found


def pins(store: LocalStore) -> list[Pin]:
    """What was pinned, by name. Raises StoreError for a pin that cannot be read: what it needs is not known."""
    folder = Path(store.root, "pins")
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            text = store.read_note("pins", path.name)
            if text is None and not path.exists():
                # dropped while we looked
                continue
            note = json.loads(text or "")
            keys, digests = tuple(note["keys"]), tuple(note["digests"])
            found.append(Pin(note["name"], keys, digests, note["file"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} cannot be read, so what it keeps is not known",
                fix="write the lock or release anew that it belongs to, "
                f"or drop it with `tvmflow cache unpin {path.name}`",
            ) from error
    return found


def unpin(store: LocalStore, name: str) -> None:
    """Forget that something is needed; only `gc` then removes it. Raises UsageError for an unknown name."""
    recipe = name.removeprefix(RECIPE)
    if name.startswith(RECIPE) and recipe in _last(store):
        for path in sorted(Path(store.root, "last", recipe).iterdir()):
            path.unlink(missing_ok=True)
        return
    path = Path(store.root, "pins", name.replace("/", "+"))
    if name.startswith(RECIPE) or name in ("", ".", "..") or not path.is_file():
        raise UsageError(f"nothing is pinned as '{name}'", fix="`tvmflow cache pins` lists what is")
    path.unlink(missing_ok=True)
