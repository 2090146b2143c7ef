"""Reads a whole store and sets aside what is not what its name says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.keys import digest_of
from tvmflow.stores import leases
from tvmflow.stores.collect import alone_at_it
from tvmflow.stores.contents import RECIPE, Contents, Result, action_path, look, read_action
from tvmflow.stores.local import Damaged, LocalStore, hash_file

WRONG: Final = "wrong"
MISSING: Final = "missing"

# digest by digest: how many of how many are read
Progress = Callable[[int, int], None]


class Finding(NamedTuple):
    """Something wrong: `what` is `result` or `content`, `name` its key or digest, `fault` wrong or missing.

    `results` are those that cannot be used until a run has made them again, or who pinned it.
    """

    what: str
    name: str
    fault: str
    results: tuple[str, ...]


class Checked(NamedTuple):
    """How much was read, and what was wrong."""

    results: int
    contents: int
    bytes: int
    findings: tuple[Finding, ...]


def check(store: LocalStore, progress: Progress) -> Checked:
    """Read every action and every content; what is wrong is moved to `damaged/`.

    Runs may go on meanwhile: they make anew what they miss. Raises StoreError while a
    collection is at work.
    """
    with alone_at_it(store), store.running():
        contents = look(store)
        named = _named(contents.results)
        findings = [
            Finding("result", each.key, WRONG, (_label(each),))
            for each in contents.results.values()
            if _set_aside_result(store, each.key)
        ]
        total = len(contents.blobs)
        for done, digest in enumerate(contents.blobs, 1):
            if _set_aside_content(store, digest):
                findings.append(Finding("content", digest, WRONG, named.get(digest, ())))
            progress(done, total)
        # looked for again: a run may have made it while we read the others
        absent = [digest for digest in named if digest not in contents.blobs]
        findings += [
            Finding("content", digest, MISSING, named[digest])
            for digest in absent
            if not Path(store.blob(digest)).exists()
        ]
        findings += _pinned_and_missing(store, contents)
    size = sum(each.size for each in contents.results.values())
    size += sum(each.size for each in contents.blobs.values())
    return Checked(len(contents.results), total, size, tuple(findings))


def _named(results: Mapping[str, Result]) -> dict[str, tuple[str, ...]]:
    """Which results name a content."""
    named: dict[str, tuple[str, ...]] = {}
    for each in results.values():
        for digest in dict.fromkeys(each.files):
            named[digest] = (*named.get(digest, ()), _label(each))
    return named


def _pinned_and_missing(store: LocalStore, contents: Contents) -> Iterator[Finding]:
    """What locks and releases need and the store lacks. A recipe only has to be run again."""
    for pin in contents.pins:
        if not pin.name.startswith(RECIPE):
            for key in pin.keys:
                if not action_path(store, key).exists():
                    yield Finding("result", key, MISSING, (pin.words,))
            for digest in pin.digests:
                if not Path(store.blob(digest)).exists():
                    yield Finding("content", digest, MISSING, (pin.words,))


def _label(each: Result) -> str:
    return f"{each.label or 'unknown'} {each.key[:12]}"


def _set_aside_result(store: LocalStore, key: str) -> bool:
    """Whether this action was wrong. Under another's name it would be a wrong hit, so that counts too."""
    path = action_path(store, key)
    with leases.briefly(store.root, alone=True), contextlib.suppress(FileNotFoundError):
        action = read_action(path.read_bytes())
        if action is None or digest_of(action["preimage"]) != key:
            aside = Path(store.root, "damaged", key)
            aside.parent.mkdir(exist_ok=True)
            path.replace(aside)
            return True
    return False


def _set_aside_content(store: LocalStore, digest: str) -> bool:
    """Whether this content was wrong, and still was when nobody could replace it."""
    with contextlib.suppress(FileNotFoundError):
        if hash_file(store.blob(digest)) != digest:
            with leases.briefly(store.root, alone=True):
                try:
                    # one that this store has read before it would not read again
                    LocalStore(store.root).checked_blob(digest)
                except Damaged:
                    return True
    return False
