"""The disks that a run depends on, for `tvmflow doctor`: each is written to, locked, and looked at."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.cli.cache import CHECKS
from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import StoreError, TvmflowError
from tvmflow.core.file_locks import Locked, held, lock
from tvmflow.core.file_systems import find_file_system
from tvmflow.core.files import temporary_name
from tvmflow.core.formatting import count_text
from tvmflow.core.lock_holders import describe_holders
from tvmflow.core.project import shortest_path
from tvmflow.store.file_checks import DamagedFile, find_damaged_files
from tvmflow.store.inventory import take_inventory
from tvmflow.store.leases import active_runs
from tvmflow.store.local import LocalStore
from tvmflow.targets.devices import ALL_DEVICES, RUNTIME_FIX, RUNTIME_VARIABLE, device_locks_folder

_ENOUGH_BYTES: Final = 10**9
_SHOWN: Final = 3
# A run holds these locks for an instant.
_PATIENCE_S: Final = 1.0
_ATTEMPT_S: Final = 0.05


class Finding(NamedTuple):
    """The state of one piece of an installation, and what to do when it is not good."""

    subject: str
    good: bool
    detail: str
    fix: str = ""
    optional: bool = False

    @property
    def is_problem(self) -> bool:
        """True if it keeps tvmflow from working."""
        return not (self.good or self.optional)


def examine_disks(store: LocalStore, dist: Path) -> list[Finding]:
    """Return a finding for each place that a run writes to, and for what is in the store."""
    findings = [
        _examine_space(store),
        _examine_folder("store can be written", Path(store.root)),
        _examine_folder("dist can be written", dist),
        _examine_temporary_folder(),
        _examine_runtime_folder(),
        *_examine_device_locks(),
    ]
    return [*findings, *_examine_store(store)]


def _examine_space(store: LocalStore) -> Finding:
    file_system = find_file_system(store.root)
    enough = file_system.free > _ENOUGH_BYTES and not file_system.lacks_inodes
    free = f"{file_system.free / 1e9:.1f} GB at {shortest_path(store.root)}"
    detail = free if enough else f"{free} ({file_system})"
    return Finding("space for the store", enough, detail, "free some space, or remove files there")


def _examine_folder(subject: str, folder: Path) -> Finding:
    """Write a file into a folder, or into the nearest one above it that exists, and lock it."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    probe = place / f".tvmflow-{temporary_name()}"
    try:
        with held(probe, wait=False) as descriptor:
            os.write(descriptor, b"a probe")
            os.fsync(descriptor)
    except OSError as error:
        problem = explain(error, place) or StoreError(f"{place}: {error.strerror}")
        return Finding(subject, False, problem.message, problem.fix)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    file_system = find_file_system(place)
    kind = f", a {file_system.kind} file system on the network: files can be locked there" if file_system.is_network else ""  # fmt: skip
    return Finding(subject, True, f"{shortest_path(str(folder))}{kind}")


def _examine_temporary_folder() -> Finding:
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        return Finding(
            "temporary files", False, str(error), "set $TMPDIR to a folder that can be written"
        )
    finding = _examine_folder("temporary files", folder)
    if finding.good and find_file_system(folder).is_noexec:
        detail = f"{folder} is mounted noexec: no library can be loaded from there"
        return finding._replace(good=False, detail=detail, fix="set $TMPDIR to another folder")
    return finding


def _examine_runtime_folder() -> Finding:
    """Look at the folder of the device locks, which a run creates and only its user may write."""
    subject, folder = "folder of the device locks", Path(device_locks_folder())
    base = os.environ.get(RUNTIME_VARIABLE, "")
    if base and not Path(base).is_absolute():
        detail = f"${RUNTIME_VARIABLE} is {base!r}, which is not an absolute path: {folder} is used"
        return Finding(subject, False, detail, RUNTIME_FIX, optional=True)
    for place in (folder, folder.parent):
        if place.exists() and place.stat().st_uid != os.getuid():
            detail = f"{place} belongs to user {place.stat().st_uid}, not to {os.getuid()}"
            return Finding(subject, False, detail, RUNTIME_FIX)
    finding = _examine_folder(subject, folder)
    return finding if finding.good else finding._replace(fix=RUNTIME_FIX)


def _examine_device_locks() -> Iterator[Finding]:
    for device in ALL_DEVICES:
        path = Path(device_locks_folder(), f"{device['kind']}.lock")
        if path.is_file() and (holder := _find_holder(path, patience_s=0.0)):
            detail = f"held by {holder}, which measures: other stages wait for it"
            fix = "wait for it, or end that process"
            yield Finding(f"lock of the {device['kind']}", False, detail, fix, optional=True)


def _examine_store(store: LocalStore) -> Iterator[Finding]:
    """Look at what is in the store, without reading results and downloads."""
    root = Path(store.root)
    try:
        condition = store.check()
        if condition == "absent":
            yield Finding("store", True, f"{shortest_path(str(root))} does not exist yet")
            return
        damaged = list(find_damaged_files(store, {**CHECKS, "downloads": lambda path: True}))
        inventory = take_inventory(store, skip_damaged_pins=True)
    except (TvmflowError, OSError) as error:
        problem = error if isinstance(error, TvmflowError) else explain(error, root)
        text, fix = (problem.message, problem.fix) if problem else (str(error), "")
        yield Finding("store", False, text, fix)
        return
    for name in ("run.lock", "use.lock", "locks/gc"):
        path = root / name
        if path.is_file() and (holder := _find_holder(path, patience_s=_PATIENCE_S)):
            detail = f"{path} is held by {holder}: a run would wait for it"
            yield Finding("lock of the store", False, detail, "wait for it, or end that process")
    damaged += [
        DamagedFile("result", result.title, "it is damaged or lacks a file")
        for result in inventory.results.values()
        if not inventory.is_complete(result)
    ]
    yield _describe_damage(root, damaged)


def _describe_damage(root: Path, damaged: list[DamagedFile]) -> Finding:
    if damaged:
        shown = ", ".join(f"{file.name} ({file.reason})" for file in damaged[:_SHOWN])
        more = f", and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        fix = "`tvmflow cache repair` puts it right, and so does the next run where it can"
        return Finding("store", False, f"damaged: {shown}{more}", fix, optional=True)
    kept = root / "damaged"
    number = len(list(kept.iterdir())) if kept.is_dir() else 0
    detail = f"{count_text(number, 'damaged file')} in {kept}" if number else "no damaged files"
    stale = len(list((root / "runs").glob("*"))) - len(active_runs(str(root)))
    if stale > 0:
        detail += f"; {count_text(stale, 'lease')} of killed runs, which the next run removes"
    return Finding("store", True, detail)


def _find_holder(path: Path, *, patience_s: float) -> str:
    """Return who holds a lock alone for longer than that; nothing when it can be shared."""
    deadline = time.monotonic() + patience_s
    # read-only, so that looking at a lock changes nothing
    with path.open("rb") as stream:
        while True:
            try:
                lock(stream.fileno(), shared=True, wait=False)
            except Locked:
                if time.monotonic() >= deadline:
                    return describe_holders(os.fstat(stream.fileno())) or "this command"
                time.sleep(_ATTEMPT_S)
            else:
                return ""
