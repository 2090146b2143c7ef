"""What a store's space is used for, and by whom."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.stores import collect
from tvmflow.stores.contents import RECIPE, Contents, Result, look
from tvmflow.stores.local import LocalStore


class StageUse(NamedTuple):
    """The results of one kind of stage."""

    name: str
    results: int
    bytes: int


class RecipeUse(NamedTuple):
    """What a recipe was up to date with the last time: with its contents, though others may share them.

    `missing` results are needed and are not there; its next run makes them.
    """

    name: str
    results: int
    bytes: int
    age_s: float
    missing: int
    stages: tuple[StageUse, ...]


class PinUse(NamedTuple):
    """What a pin holds, and whether the lock file that it stands for is gone."""

    name: str
    results: int
    bytes: int
    missing: int
    file: str
    file_gone: bool


class Row(NamedTuple):
    """A number of things of one sort, and what they take."""

    name: str
    number: int
    what: str
    bytes: int


class Usage(NamedTuple):
    """A whole store (bytes; `bytes` is without measured trials), and what a collection would free of it."""

    root: str
    bytes: int
    ledger_bytes: int
    recipes: tuple[RecipeUse, ...]
    rest: tuple[Row, ...]
    free_now: int
    free_all: int


_UNSIGNED: Final = "fetched, not signed"
_FOLDERS: Final = ("downloads", "work", "tmp", "damaged", "logs")


def measure(store: LocalStore) -> Usage:
    """Look at everything; nothing is changed. Raises StoreError."""
    contents = look(store)
    now = time.time()
    roots = [pin for pin in contents.pins if pin.name.startswith(RECIPE)]
    named = {key for pin in contents.pins for key in pin.keys}
    others = [each for each in contents.results.values() if each.key not in named]
    digests = {digest for each in contents.results.values() for digest in each.files}
    digests.update(digest for pin in contents.pins for digest in pin.digests)
    unnamed = [each.size for digest, each in contents.blobs.items() if digest not in digests]
    incomplete = [each for each in contents.results.values() if not _complete(each, contents)]
    rows = [
        Row("pins", len(contents.pins) - len(roots), "names", 0),
        Row("nothing needs", len(others), "results", _bytes(others, contents)),
        Row("incomplete", len(incomplete), "results", sum(each.size for each in incomplete)),
        Row("contents", len(contents.blobs), "files", sum(b.size for b in contents.blobs.values())),
        Row("of them unnamed", len(unnamed), "files", sum(unnamed)),
        *_signed(contents),
        *(Row(name, *_below(store, name)) for name in _FOLDERS),
    ]
    now_free = collect.preview(store, collect.Limits(), contents)
    all_free = collect.preview(store, collect.Limits(0.0), contents)
    return Usage(
        store.root,
        now_free.kept_bytes + now_free.freed,
        _below(store, "ledger")[2],
        tuple(_recipe(pin.name.removeprefix(RECIPE), pin.keys, contents, now) for pin in roots),
        tuple(rows),
        now_free.freed,
        all_free.freed,
    )


def to_json(found: Usage) -> dict[str, Any]:
    """The same as JSON."""
    recipes = [
        {**each._asdict(), "stages": [stage._asdict() for stage in each.stages]}
        for each in found.recipes
    ]
    return {**found._asdict(), "recipes": recipes, "rest": [row._asdict() for row in found.rest]}


def pinned(store: LocalStore) -> list[PinUse]:
    """What each pin holds. Raises StoreError."""
    contents = look(store)
    rows = []
    for pin in contents.pins:
        found = [contents.results[key] for key in pin.keys if key in contents.results]
        absent = [digest for digest in pin.digests if digest not in contents.blobs]
        size = _bytes(found, contents, pin.digests)
        missing = len(pin.keys) - len(found) + len(absent)
        gone = bool(pin.file) and not Path(pin.file).exists()
        rows.append(PinUse(pin.name, len(pin.keys), size, missing, pin.file, gone))
    return rows


def _signed(contents: Contents) -> Iterator[Row]:
    """Of results from elsewhere: whose signatures they came with. One with several is in several rows."""
    found: dict[str, list[Result]] = defaultdict(list)
    for each in contents.results.values():
        if each.signed is not None:
            for line in [f"signed by {key}" for key in each.signed] or [_UNSIGNED]:
                found[line].append(each)
    # those that nobody signed come last
    for line, of in sorted(found.items(), key=lambda item: (item[0] == _UNSIGNED, item[0])):
        yield Row(line, len(of), "results", _bytes(of, contents))


def _recipe(name: str, keys: tuple[str, ...], contents: Contents, now: float) -> RecipeUse:
    found = [contents.results[key] for key in keys if key in contents.results]
    stages: dict[str, list[Result]] = defaultdict(list)
    for each in found:
        # two recipes may need one result; its label names the stage in any case
        stages[each.label.partition(":")[2].partition("/")[0]].append(each)
    last = max([each.used_ns for each in found], default=0) / 1e9
    uses = [StageUse(stage, len(of), _bytes(of, contents)) for stage, of in stages.items()]
    return RecipeUse(
        name,
        len(found),
        _bytes(found, contents),
        max(0.0, now - last),
        len(keys) - len([each for each in found if _complete(each, contents)]),
        tuple(sorted(uses, key=lambda use: -use.bytes)),
    )


def _bytes(results: Iterable[Result], contents: Contents, more: Iterable[str] = ()) -> int:
    """What these take: equal contents once."""
    listed = list(results)
    digests = {digest for each in listed for digest in each.files} | set(more)
    blobs = contents.blobs
    sizes = sum(blobs[digest].size for digest in digests if digest in blobs)
    return sizes + sum(each.size for each in listed)


def _complete(each: Result, contents: Contents) -> bool:
    return not each.wrong and all(digest in contents.blobs for digest in each.files)


def _below(store: LocalStore, folder: str) -> tuple[int, str, int]:
    sizes = [collect.size_of(path) for path in collect.files_below(Path(store.root, folder))]
    return len(sizes), "files", sum(sizes)
