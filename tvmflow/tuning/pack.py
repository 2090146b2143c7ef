"""Trial packs: one file with the records of many targets and workloads, for another ledger.

A pack is JSON lines, gzipped or not: a header, then for each workload a line that names it and
a line for each record: trials, baselines, times of finalists. The ledger that receives all of
them decides as the one that they come from. Equal content has equal bytes. `pack_import` reads
packs.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from tvmflow.core.canonical_json import canonical
from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.files import output_file
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Json
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders, read_records
from tvmflow.tuning.trials import Trial, sort_by_record
from tvmflow.tuning.workload_records import WorkloadRecords, same_trials

FORMAT: Final = "tvmflow records"
VERSION: Final = 2
"""The version of packs. Those of version 1 have no other records than trials."""

WORKLOAD_LINE_START: Final = b'{"about":'
"""The first bytes of a workload's line; the canonical form of a record never starts with them."""

MAX_KERNEL_BYTES: Final = 8 << 20
"""The size of a saved kernel that is exported, at most: most have some kilobytes."""

COUNTS: Final = ("workloads", "trials", "failed")
"""What the header counts of each target."""

_CHUNK: Final = 1 << 20
_log = logging.getLogger(__name__)


class ExportResult(NamedTuple):
    """The content of a new pack; `problems` are ledger lines that were left out, with their places."""

    digest: str
    targets: int
    workloads: int
    trials: int
    failed: int
    bytes: int
    problems: list[str]


def export_pack(
    path: Path,
    root: Path,
    *,
    targets: Sequence[str] = (),
    workloads: Sequence[str] = (),
    best: int | None = None,
) -> ExportResult:
    """Write the trials of a ledger into one file, gzipped when its name ends in `.gz`.

    The file appears complete or not at all.

    Args:
        path: The file to write.
        root: The ledger.
        targets: Prefixes of target keys; all targets when empty.
        workloads: Prefixes of workload keys; all workloads when empty.
        best: Take only this many of each workload's fastest trials.

    Raises:
        UsageError: No trial matches, or `path` is a device or a pipe.
        StoreError: The file cannot be written.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(
            f"{path} is not a regular file, and is not replaced", fix="give another name"
        )
    problems: list[str] = []
    folders = list_target_folders(root, targets)
    try:
        with tempfile.TemporaryFile(dir=path.parent) as body:
            entries = _write_targets(body, folders, workloads, best, problems)
            if not any(entry["trials"] for entry in entries.values()):
                raise UsageError(
                    f"no trial in {shortest_path(str(root))} matches the options of the export",
                    fix="run `tvmflow records ls --workloads` to see the trials",
                )
            totals = {name: sum(entry[name] for entry in entries.values()) for name in COUNTS}
            header = {"format": FORMAT, "version": VERSION, "targets": entries, **totals}
            digest = _content_digest(header, body)
            line = canonical({**header, "digest": digest}) + b"\n"
            size = _write_file(path, line, body)
    except OSError as error:
        raise explain(error, path) or StoreError(
            f"cannot write {path}: {error.strerror or error}",
            fix="give a file in a folder that exists and has space",
        ) from error
    _log.debug("%s: %d trials, digest %s", path, totals["trials"], digest)
    return ExportResult(digest, len(entries), **totals, bytes=size, problems=problems)


def _write_targets(
    body: IO[bytes],
    folders: Sequence[TargetFolder],
    workloads: Sequence[str],
    best: int | None,
    problems: list[str],
) -> dict[str, Json]:
    """Write the lines of all targets that have records; return their entries in the header by key."""
    entries: dict[str, Json] = {}
    for folder in folders:
        if folder.description is None:
            problems.append(f"{folder.path / 'about.json'}: {folder.problem}; left out")
            continue
        counts = Counter(dict.fromkeys(COUNTS, 0))
        for key, path in folder.workload_files(workloads):
            records, unreadable = read_records(path)
            problems += unreadable
            trials = records.in_order() if best is None else sort_by_record(records.valid()[:best])
            if trials or records.notes():
                _write_workload(body, folder, key, records, trials)
                failed = sum(1 for trial in trials if trial.failure)
                counts.update(workloads=1, trials=len(trials), failed=failed)
        if counts["workloads"]:
            entries[folder.key] = {"about": folder.description.to_json(), **counts}
    return entries


def _write_workload(
    body: IO[bytes],
    folder: TargetFolder,
    key: str,
    records: WorkloadRecords,
    trials: Sequence[Trial],
) -> None:
    """Write the lines of one workload: its records, but of the trials only those that were chosen."""
    about, kernel = folder.ledger.description(key), folder.ledger.kernel(key)
    # That a search space is exhausted is true of all trials together.
    exhausted = records.exhausted_searches() if same_trials(records, trials) else []
    line = {"target": folder.key, "workload": key, "about": about.to_json(), "exhausted": exhausted}
    # The kernel, by which related workloads know each other and schedules can be checked.
    line |= {"kernel": kernel} if kernel and len(kernel) <= MAX_KERNEL_BYTES else {}
    body.write(canonical(line) + b"\n")
    for record in (*trials, *records.notes()):
        body.write(canonical(record.to_json()) + b"\n")


def _content_digest(header: Mapping[str, Json], body: IO[bytes]) -> str:
    digest = start_digest(header)
    body.seek(0)
    while chunk := body.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def start_digest(header: Mapping[str, Json]) -> hashlib._Hash:
    """Return the sha256 of a pack after its header, to be updated with the lines below.

    Args:
        header: The header; its own digest is no part of the content.
    """
    fields = {name: value for name, value in header.items() if name != "digest"}
    return hashlib.sha256(canonical(fields) + b"\n")


def _write_file(path: Path, header: bytes, body: IO[bytes]) -> int:
    """Write a pack atomically and return its size in bytes."""
    body.seek(0)
    with output_file(path) as temporary, open(temporary, "wb") as raw:  # noqa: PTH123
        if path.suffix == ".gz":
            # Neither the time nor the name of the temporary file belongs to the content.
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                packed.write(header)
                shutil.copyfileobj(body, packed)
        else:
            raw.write(header)
            shutil.copyfileobj(body, raw)
        raw.flush()
        os.fsync(raw.fileno())
    return path.stat().st_size
