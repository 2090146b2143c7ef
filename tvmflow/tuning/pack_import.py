"""Imports trial packs: a pack is checked as a whole before the first trial enters the ledger."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.types import Json
from tvmflow.tuning.ledger import TargetDescription, WorkloadDescription
from tvmflow.tuning.ledger_folders import WORKLOAD_KEY
from tvmflow.tuning.machine_class import MachineClass
from tvmflow.tuning.pack import FORMAT, VERSION, WORKLOAD_LINE_START, start_digest
from tvmflow.tuning.trial_import import ImportedWorkload, ImportResult, import_trials
from tvmflow.tuning.trials import Trial, parse_line

_GZIP_MAGIC: Final = b"\x1f\x8b"
# A header names targets, a few hundred bytes each; a file without line ends is no pack.
_MAX_HEADER_BYTES: Final = 16 << 20

PackStream = IO[bytes] | gzip.GzipFile
"""A pack that is open for reading."""


def import_pack(path: Path, root: Path, machine_class: MachineClass) -> ImportResult:
    """Add to a ledger the trials of a pack that it accepts and lacks.

    Raises:
        UsageError: The file is damaged, is no pack, or has no target that this ledger accepts;
            then nothing was changed.
        StoreError: The file cannot be read, or the ledger cannot be written.
    """
    with _open(path) as stream:
        descriptions = _check(path, stream)
        # The same open file is read again, whatever is put in its place meanwhile.
        stream.seek(0)
        workloads = _read_workloads(path, stream)
        return import_trials(root, str(path), descriptions, workloads, machine_class)


def _open(path: Path) -> PackStream:
    try:
        with path.open("rb") as stream:
            is_gzipped = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        return gzip.open(path, "rb") if is_gzipped else path.open("rb")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _check(path: Path, stream: PackStream) -> dict[str, TargetDescription]:
    """Check a whole pack and return its targets by key.

    Raises:
        UsageError: The file is damaged or is no pack.
    """
    first_unknown = 0
    try:
        header = _read_header(path, stream.readline(_MAX_HEADER_BYTES))
        descriptions = _read_targets(path, header)
        digest = start_digest(header)
        for number, line in enumerate(stream, 2):
            digest.update(line)
            if line.startswith(WORKLOAD_LINE_START) and not _is_workload(line, descriptions):
                first_unknown = first_unknown or number
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"it cannot be unpacked ({error})") from error
    if digest.hexdigest() != header["digest"]:
        raise _damaged(
            path, f"its digest is {digest.hexdigest()}, but its header has {header['digest']}"
        )
    if first_unknown:
        raise _damaged(path, f"line {first_unknown} names no workload of a target in it")
    return descriptions


def _read_header(path: Path, line: bytes) -> dict[str, Json]:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT or not isinstance(header["digest"], str):
            raise ValueError("another format")
        version = int(header["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise _not_a_pack(path) from error
    if version > VERSION:
        raise UsageError(
            f"{path} has version {version} of the pack format, which is newer than this tvmflow",
            fix="update tvmflow",
        )
    return dict(header)


def _read_targets(path: Path, header: Mapping[str, Json]) -> dict[str, TargetDescription]:
    try:
        descriptions = {
            key: TargetDescription.from_json(entry["about"])
            for key, entry in header["targets"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_pack(path) from error
    for key, description in descriptions.items():
        if description.key != key:
            raise _damaged(path, f"the description of target {key[:12]} does not have that key")
    return descriptions


def _not_a_pack(path: Path) -> UsageError:
    return UsageError(
        f"{path} is no trial pack, or its first line is damaged",
        fix="give a file that `tvmflow records export` wrote",
    )


def _damaged(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} is damaged: {reason}; nothing was imported", fix="copy it or export it again"
    )


def _is_workload(line: bytes, targets: Mapping[str, TargetDescription]) -> bool:
    """Return whether a line names a workload of one of the targets, by a key that is a safe file name."""
    try:
        entry = json.loads(line)
        return (
            entry["target"] in targets
            and WORKLOAD_KEY.fullmatch(entry["workload"]) is not None
            and isinstance(entry["about"], dict)
        )
    except (ValueError, KeyError, TypeError):
        return False


def _read_workloads(path: Path, stream: PackStream) -> Iterator[ImportedWorkload]:
    """Yield the workloads of a pack that was checked, each with its trials."""
    workload: ImportedWorkload | None = None
    next(stream)
    for number, line in enumerate(stream, 2):
        if line.startswith(WORKLOAD_LINE_START):
            if workload is not None:
                yield workload
            entry = json.loads(line)
            description = WorkloadDescription.from_json(entry["about"])
            workload = ImportedWorkload(entry["target"], entry["workload"], description, [], [])
        elif workload is not None:
            _read_trial(line, f"{path}:{number}", workload)
    if workload is not None:
        yield workload


def _read_trial(line: bytes, line_name: str, workload: ImportedWorkload) -> None:
    try:
        record = parse_line(line)
    except ValueError as error:
        workload.invalid.append(f"{line_name}: {error}")
        return
    if isinstance(record, Trial):
        workload.trials.append(record)
    else:
        workload.invalid.append(f"{line_name}: it is no trial that this tvmflow can read")
