"""Leftovers: what kills, damage and deleted files leave in a store, and when it is removed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import is_disk_full
from tvmflow.core.file_locks import Locked, lock
from tvmflow.core.files import read_regular, temporary_name
from tvmflow.core.formatting import age_text
from tvmflow.store.files import changed_ns, entries_of, files_below, folders_below, size_below
from tvmflow.store.notes import unseal

DAY: Final = 86_400.0
# Somebody may want to resume a killed stage, or to examine a damaged file.
_LEFTOVER_AGE_S: Final = 7 * DAY
# The probed facts about compilers and packages are small, and slow to probe again.
_FACTS_AGE_S: Final = 365 * DAY
_PLANS_AGE_S: Final = 30 * DAY
# How many run records stay however old they are: their names sort by time.
_KEPT_RUNS: Final = 100
# Writers without a lease finish a file well within this time.
_WRITE_TIME_S: Final = 3600.0


class Candidate(NamedTuple):
    """Something to remove.

    Attributes:
        kind: What it is (see `garbage_collection.Eviction`).
        name: What it is called, for people.
        reason: Why it is removed.
        used_ns: When it was last used.
        bytes: What its removal will free.
        remove: Removes it and returns the bytes freed; None when it was used meanwhile, and stays.
    """

    kind: str
    name: str
    reason: str
    used_ns: int
    bytes: int
    remove: Callable[[], int | None]


class _Rule(NamedTuple):
    """The condition for removing the files of a folder: at an age, or when they are obsolete; the `kept` last ones stay."""

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
    """Yield the leftovers in a store.

    Args:
        root: The store.
        max_age_s: How long unused results may stay.
        now_ns: The time that ages are counted from.
        horizon_ns: Nothing that changed from then on is a leftover.
    """
    leftover_age_s = min(_LEFTOVER_AGE_S, max_age_s)
    rules = (
        _Rule("tmp", "temporary", "a process that was stopped left it", _WRITE_TIME_S),
        _Rule("damaged", "damaged", "it was set aside as damaged", leftover_age_s),
        _Rule("logs", "log", "it is a log", max_age_s),
        _Rule("history", "run record", "it is the record of a run", max_age_s, kept=_KEPT_RUNS),
        _Rule("failures", "note", "it says how a stage failed", max_age_s),
        _Rule("facts", "note", _OLD_NOTE, _FACTS_AGE_S),
        _Rule("plans", "note", _OLD_NOTE, _PLANS_AGE_S),
        _Rule("stats", "note", _FILE_MISSING, None, _is_obsolete_stat),
        _Rule("delivered", "note", _FILE_MISSING, None, _is_obsolete_delivery),
    )
    yield from _find_work_folders(root, leftover_age_s, now_ns, horizon_ns)
    for rule in rules:
        yield from _apply(rule, root, now_ns, horizon_ns)


def _apply(rule: _Rule, root: Path, now_ns: int, horizon_ns: int) -> Iterator[Candidate]:
    folder = root / rule.folder
    # a killed process may have left a folder in `tmp`, which is removed as a whole
    paths = entries_of(folder) if rule.folder == "tmp" else files_below(folder)
    removable = sorted(paths)[: -rule.kept] if rule.kept else paths
    for path in removable:
        # by the change time: a file that was moved here keeps its modification time
        changed = changed_ns(path)
        if not changed or changed >= horizon_ns:
            continue
        is_old = rule.age_s is not None and (now_ns - changed) / 1e9 >= rule.age_s
        if is_old or (rule.is_obsolete is not None and rule.is_obsolete(path)):
            reason = f"{rule.reason}{_older_than(rule.age_s)}" if is_old else _FILE_MISSING
            size, name = size_below(path), str(path.relative_to(root))
            yield Candidate(rule.kind, name, reason, changed, size, partial(_remove, path, size))


def _older_than(age_s: float | None) -> str:
    return f", older than {age_text(age_s)}" if age_s else ""


def _find_work_folders(
    root: Path, age_s: float, now_ns: int, horizon_ns: int
) -> Iterator[Candidate]:
    for path in entries_of(root / "work"):
        if path.is_dir():
            used_ns = max(map(changed_ns, (path, *folders_below(path), *files_below(path))))
            if used_ns < horizon_ns and (now_ns - used_ns) / 1e9 >= age_s:
                size, name = size_below(path), f"{path.name[:12]}…"
                remove = partial(_remove_work_folder, path, size)
                reason = f"a stage that had no result left it{_older_than(age_s)}"
                yield Candidate("work", name, reason, used_ns, size, remove)


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
    """Remove a work folder, unless a run has claimed it."""
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context((path / "claim").open("ab"))
            lock(handle.fileno(), wait=False)
            # moved away first, as `claims.release` does: whoever waits for this key creates a folder of the same name
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


# ---------------------------------------------------------------- obsolete notes


def _is_obsolete_stat(path: Path) -> bool:
    note = _read_json(path)
    return not (isinstance(note, dict) and Path(str(note.get("path"))).exists())


def _is_obsolete_delivery(path: Path) -> bool:
    # long paths are cut from the left, and `+` may be a slash: in doubt the file is hashed once more
    return not Path("/" + path.name.replace("+", "/")).exists()


def _read_json(path: Path) -> object:
    try:
        note: object = json.loads(unseal(read_regular(path), path.parent.name, path.name) or "")
    except (OSError, ValueError):
        return None
    return note
