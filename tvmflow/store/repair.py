"""The repair of a store: what is damaged is set aside, what can be made again at once is; nothing is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.store.file_checks import ContentCheck, DamagedFile, find_damaged_files
from tvmflow.store.integrity import Finding, Progress, check_integrity
from tvmflow.store.local import LocalStore

_BY_NEXT_RUN: Final = "the next run makes it again"
# What becomes of a file without which nothing is missing, where that is something else.
_CONSEQUENCES: Final[Mapping[str, str]] = {
    "log": "the next execution of its stage writes another",
    "run record": "nothing else says what that run did",
}
_RUN: Final = "run its recipe again, or fetch it with `tvmflow cache pull`"
# What the user has to do for a file of a kind that no run makes again.
_FIXES: Final[Mapping[str, str]] = {
    "pin": "make the lock file or the release of that name again: until then `gc` may remove what it needs",
    "upload": "upload everything with `tvmflow cache push --all`",
    "trials": "import the trials from another store, if one has them: `tvmflow records import`",
    "file": "move it away, unless you know what it is for",
}
# Put right in their places, as each run does.
_IN_PLACE: Final = frozenset({"format", "folder", "lock"})


class Step(NamedTuple):
    """A repair: a problem, its cure, and what is left to the user.

    Attributes:
        kind: See `integrity.Finding`, as is `name`.
        name: A digest, or the path in the store.
        reason: What was wrong.
        done: What the repair did; empty when it could do nothing.
        fix: What to do next; empty when nothing is left to do.
    """

    kind: str
    name: str
    reason: str
    done: str
    fix: str = ""


def repair_store(
    store: LocalStore, progress: Progress, checks: Mapping[str, ContentCheck]
) -> list[Step]:
    """Put right what is damaged in a store, as far as that is possible without running anything.

    Args:
        store: The store.
        progress: Called with each blob.
        checks: See `find_damaged_files`.

    Raises:
        StoreError: while a garbage collection is active, or when the disk is full or not writable.
    """
    damaged = list(find_damaged_files(store, checks))
    store.create()
    steps = [_repair_file(store, file) for file in damaged]
    return steps + [_describe(finding) for finding in check_integrity(store, progress, checks).findings
                    if finding.kind in ("result", "blob")]  # fmt: skip


def _repair_file(store: LocalStore, file: DamagedFile) -> Step:
    path = f"{store.root}/{file.name}"
    if file.kind == "file":
        return Step(*file, "", _FIXES["file"])
    if file.kind in _IN_PLACE:
        # a lock in a folder of its own is put right by whoever takes it
        moved = dict(store.moved).get(path, "")
        if not moved and file.kind == "lock":
            moved = store.set_aside(path)
        done = f"moved to {_shorten(store, moved)}" if moved else "written again"
        return Step(*file, done)
    done = f"moved to {_shorten(store, store.set_aside(path))}"
    if file.kind in _FIXES:
        return Step(*file, done, _FIXES[file.kind])
    return Step(*file, f"{done}; {_CONSEQUENCES.get(file.kind, _BY_NEXT_RUN)}")


def _describe(finding: Finding) -> Step:
    affected = ", ".join(finding.affected)
    done = "moved to damaged/" if finding.fault == "damaged" else ""
    reason = f"it is {finding.fault}" + (f" ({affected})" if affected else "")
    return Step(finding.kind, finding.name, reason, done, _RUN)


def _shorten(store: LocalStore, path: str) -> str:
    return str(Path(path).relative_to(store.root))
