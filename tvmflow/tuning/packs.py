"""Export and import records of ledgers: packs, other stores, remote caches and lock files.

A ledger accepts a target's trials only if this machine could have measured them, or if it already has trials on that
target: times of another device or TVM build would mislead a search.

A pack is one file with the records of many targets and workloads, as JSON lines, gzipped or not: a header, then for
each workload a line that names it and a line for each record. A ledger that imports a whole pack makes the same
choices as the ledger that exported it. Equal content gives equal bytes. A pack is not trusted: all of it is checked
before the first record enters the ledger, and it is read line by line within limits, so that a small file cannot fill
the memory when decompressed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple

from tvmflow.core.canonical_json import canonical
from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.files import flush_file, is_irregular, open_regular, output_file
from tvmflow.core.formatting import size_text
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Json
from tvmflow.tuning import traces
from tvmflow.tuning.ledger import (
    Ledger,
    MachineClass,
    TargetDescription,
    WorkloadDescription,
    WorkloadRecords,
    same_trials,
)
from tvmflow.tuning.ledger_folders import (
    WORKLOAD_KEY,
    TargetFolder,
    list_target_folders,
    read_records,
)
from tvmflow.tuning.replay import TraceCheck, TraceVerdict
from tvmflow.tuning.trials import (
    FAILED_TRIAL_START,
    RECORD_STARTS,
    TRIAL_START,
    Ban,
    Baseline,
    ChoiceTimes,
    ExhaustedMark,
    FileHeader,
    FinalistsRecord,
    LibraryRecord,
    Note,
    Record,
    SearchEnd,
    SearchTime,
    Trial,
    is_ahead_of_clock,
    parse_line,
    read_object,
    sort_by_record,
    to_line,
)

FORMAT: Final = "tvmflow records"
VERSION: Final = 2
"""The version of packs; packs of version 1 contain only trials."""

WORKLOAD_LINE_START: Final = b'{"about":'
"""The first bytes of a workload's line; no canonical record starts with them."""

MAX_KERNEL_BYTES: Final = 8 << 20
"""Larger saved kernels are not exported; most take a few kilobytes."""

COUNTS: Final = ("workloads", "trials", "failed")
"""The counts of each target in the header."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
# Size limits, with ample room: a record takes a few kilobytes, a header a few hundred bytes per target.
_MAX_RECORD_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 16 << 20
_MAX_WORKLOAD_BYTES: Final = 256 << 20
# The largest allowed ratio of decompressed to compressed size.
_MAX_COMPRESSION: Final = 200
_CHUNK: Final = 1 << 20

_FIELD_NAMES: Final[Mapping[str, str]] = {
    "tvm": "TVM build",
    "device.class": "device class",
    "device.kind": "device kind",
}
_KIND_NAMES: Final[Mapping[type[Record], str]] = {
    Baseline: "time of the untuned kernel",
    FinalistsRecord: "times of finalists",
    LibraryRecord: "comparison of libraries",
    Ban: "ban",
    ChoiceTimes: "times of a choice",
    SearchTime: "time of searches",
    SearchEnd: "end of a search",
    ExhaustedMark: "mark of an exhausted search",
    FileHeader: "header",
}
_MAX_SENTENCES: Final = 1000
_log = logging.getLogger(__name__)


class Problems:
    """Problems with single records: all are counted, only the first ones are kept.

    Attributes:
        sentences: The first problems, each with its location.
    """

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self.count = 0
        self.sentences: list[str] = []
        for sentence in sentences:
            self.add(sentence)

    def add(self, sentence: str) -> None:
        """Count a problem."""
        self.count += 1
        if len(self.sentences) < _MAX_SENTENCES:
            self.sentences.append(sentence)


@dataclass(frozen=True, slots=True)
class ImportedWorkload:
    """The records of one workload from elsewhere.

    Attributes:
        exhausted: The searches that exhausted their space with exactly these trials.
        kernel: The saved kernel, not checked yet; empty if unknown.
    """

    target: str
    workload: str
    description: WorkloadDescription
    exhausted: tuple[str, ...] = ()
    kernel: str = ""
    records: list[Record] = field(default_factory=list)
    invalid: Problems = field(default_factory=Problems)


class TargetImport(NamedTuple):
    """The outcome for one target: the reason for its rejection, or the counts of its trials.

    Attributes:
        rejection: The reason why nothing was imported; otherwise empty.
        invalid: How many trials cannot be used.
    """

    target: str
    target_text: str
    rejection: str
    workloads: int = 0
    new: int = 0
    known: int = 0
    invalid: int = 0


class ImportResult(NamedTuple):
    """The outcome of an import; `problems` lists the first problems with records, with locations."""

    targets: list[TargetImport]
    problems: list[str]

    @property
    def complete(self) -> bool:
        """True if nothing had to be left out."""
        return not self.problems and not any(
            target.rejection or target.invalid for target in self.targets
        )


def import_trials(
    root: Path,
    source: str,
    descriptions: Mapping[str, TargetDescription],
    workloads: Iterable[ImportedWorkload],
    machine_class: MachineClass,
    checker: TraceCheck | None = None,
) -> ImportResult:
    """Import the records that a ledger accepts and lacks.

    `source` names their origin in messages. The keys of `descriptions`, the targets, must have been checked. The
    checker applies each trace to its kernel before the import; None leaves this check to a later tuning.

    Raises:
        UsageError: All targets are rejected; nothing was changed.
    """
    results = {
        key: TargetImport(key, description.text, rejection_reason(root, description, machine_class))
        for key, description in descriptions.items()
    }
    if all(result.rejection for result in results.values()):
        reasons = [f"  {key[:12]}: {result.rejection}" for key, result in results.items()]
        raise UsageError(
            "\n".join([f"{source} has no trials that this machine could have measured", *reasons]),
            fix="tune on this machine, or import them where they were measured: "
            "times of another device or TVM build would mislead the search",
        )
    problems = Problems()
    for workload in workloads:
        result = results[workload.target]
        if result.rejection:
            continue
        description = descriptions[workload.target]
        ledger = Ledger.open(root, *description)
        results[workload.target] = _import_workload(ledger, description, workload, result, checker)
        for sentence in workload.invalid.sentences:
            problems.add(sentence)
    for result in results.values():
        _log.debug("%s: %s", result.target[:12], result.rejection or f"{result.new} new trials")
    return ImportResult(list(results.values()), problems.sentences)


def _import_workload(
    ledger: Ledger,
    target: TargetDescription,
    workload: ImportedWorkload,
    result: TargetImport,
    checker: TraceCheck | None,
) -> TargetImport:
    key = workload.workload
    trials = [record for record in workload.records if isinstance(record, Trial)]
    checked = TraceVerdict("", {})
    if checker and trials:
        checked = checker.check(key, workload.kernel or ledger.kernel(key), target.target, trials)
    usable: list[Trial] = []
    notes: list[Note] = []
    for record in workload.records:
        if reason := _refusal_reason(record, target.tvm, checked):
            workload.invalid.add(f"workload {key[:12]}, {_name(record)}: {reason}")
        elif isinstance(record, Trial):
            usable.append(record)
        elif isinstance(record, Note):
            notes.append(record)
    new = 0
    if usable or notes:
        opened = ledger.workload(key)
        opened.add(notes)
        new = opened.extend(usable)
        for search in workload.exhausted if same_trials(opened, trials) else ():
            if not opened.is_exhausted(search):
                opened.mark_exhausted(search)
        ledger.adopt_description(key, workload.description, workload.kernel)
    return result._replace(
        workloads=result.workloads + 1,
        new=result.new + new,
        known=result.known + len(usable) - new,
        invalid=result.invalid + workload.invalid.count,
    )


def _name(record: Record) -> str:
    if isinstance(record, Trial):
        return f"trial {record.id[:12]}"
    return _KIND_NAMES[type(record)]


def _refusal_reason(record: Record, tvm: str, checked: TraceVerdict) -> str:
    if checked.problem:
        return checked.problem
    if isinstance(record, ExhaustedMark | FileHeader):
        return "it is not a record of a pack"
    if is_ahead_of_clock(record.when):
        return f"its time {record.when} is in the future"
    if not isinstance(record, Trial):
        return ""
    if record.tvm != tvm:
        return f"measured with TVM {record.tvm}, but its target has TVM {tvm}"
    return traces.find_problem(record.trace) or checked.reasons.get(record.id, "")


def rejection_reason(
    root: Path, description: TargetDescription, machine_class: MachineClass
) -> str:
    """Return why a ledger does not accept trials on a target; empty if it does."""
    if description.machine_class == machine_class:
        return ""
    known = [folder.description for folder in list_target_folders(root) if folder.description]
    if any(other.key == description.key for other in known):
        return ""
    # Report the differences from the most similar target of this ledger.
    differences = [
        _differences(other._replace(**machine_class._asdict()), description)
        for other in known or [description]
    ]
    fewest = min(differences, key=len)
    return "; ".join(fewest)


def _differences(local: TargetDescription, imported: TargetDescription) -> list[str]:
    """Return `TVM build: 1 here, 2 there` for each field in which two targets differ."""
    local_fields = dict(_leaves(local.to_json()))
    imported_fields = dict(_leaves(imported.to_json()))
    return [
        f"{_FIELD_NAMES.get(name, name)}: "
        f"{local_fields.get(name, 'none')} here, {imported_fields.get(name, 'none')} there"
        for name in sorted(local_fields.keys() | imported_fields.keys())
        if local_fields.get(name) != imported_fields.get(name)
    ]


def _leaves(value: Json, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the text of every value that is not an object."""
    if not isinstance(value, dict):
        yield path, str(value)
        return
    for name, entry in value.items():
        yield from _leaves(entry, f"{path}.{name}" if path else name)


# ---------------------------------------------------------------- another ledger


def merge_ledger(
    source: Path, root: Path, machine_class: MachineClass, checker: TraceCheck | None = None
) -> ImportResult:
    """Import the records of another ledger, which is only read.

    Raises:
        UsageError: `source` is not a ledger, is this one, or has no target that is accepted.
    """
    other = source / "ledger" if (source / "ledger").is_dir() else source
    folders = list_target_folders(other)
    if not folders:
        raise UsageError(
            f"{source} is neither a store nor a ledger: it holds no trials",
            fix="give the folder that --store names there",
        )
    if other.resolve() == root.resolve():
        raise UsageError(f"{source} is this store's own ledger", fix="give another store")
    descriptions = {
        folder.key: folder.description for folder in folders if folder.description is not None
    }
    workloads = _read_ledger(folders)
    result = import_trials(root, str(source), descriptions, workloads, machine_class, checker)
    unusable = [
        TargetImport(folder.key, folder.text, f"about.json: {folder.problem}")
        for folder in folders
        if folder.description is None
    ]
    return result._replace(targets=result.targets + unusable)


def _read_ledger(folders: Iterable[TargetFolder]) -> Iterator[ImportedWorkload]:
    for folder in folders:
        for key, path in folder.workload_files() if folder.description else ():
            records, problems = read_records(path)
            yield ImportedWorkload(
                target=folder.key,
                workload=key,
                description=folder.ledger.description(key),
                exhausted=tuple(records.exhausted_searches()),
                kernel=folder.ledger.kernel(key),
                records=[*records.in_order(), *records.notes()],
                invalid=Problems(problems),
            )


# ---------------------------------------------------------------- reading packs


def import_pack(
    path: Path, root: Path, machine_class: MachineClass, checker: TraceCheck | None = None
) -> ImportResult:
    """Import the records of a pack that a ledger accepts and lacks.

    Raises:
        UsageError: The file is damaged, is not a pack, or has no target that this ledger accepts; nothing was changed.
        StoreError: The file cannot be read, or the ledger cannot be written.
    """
    with _open_file(path) as file:
        descriptions = _check(path, file)
        # Read the same open file again, because the path may have another file by now.
        workloads = _read_workloads(path, file)
        return import_trials(root, str(path), descriptions, workloads, machine_class, checker)


def _open_file(path: Path) -> IO[bytes]:
    try:
        return io.BufferedReader(open_regular(path))
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except OSError as error:
        if not is_irregular(error):
            raise _unreadable(path, error) from error
    raise UsageError(
        f"{path} is not a regular file", fix="give a file that `tvmflow records export` wrote"
    )


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of an open pack from its beginning; raises if it exceeds the limits."""
    file.seek(0)
    is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=file) if is_packed else file
    max_bytes = os.fstat(file.fileno()).st_size * _MAX_COMPRESSION + (1 << 20)
    try:
        while line := stream.readline(_MAX_LINE_BYTES):
            max_bytes -= len(line)
            if max_bytes < 0:
                raise _damaged(path, "its decompressed size is far larger than that of any pack")
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"it cannot be unpacked ({error})") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot read {path}: {error.strerror or error}")


def _not_a_pack(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not a trial pack, or its first line is damaged",
        fix="give a file that `tvmflow records export` wrote",
    )


def _damaged(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} is damaged: {reason}; nothing was imported", fix="copy it or export it again"
    )


# ---------------------------------------------------------------- the check of the whole


def _check(path: Path, file: IO[bytes]) -> dict[str, TargetDescription]:
    """Check a whole pack and return its targets by key."""
    lines = _lines(path, file)
    header = _read_header(path, next(lines, b""))
    descriptions = _read_targets(path, header)
    digest = start_digest(header)
    counts: dict[str, Counter[str]] = {
        key: Counter(dict.fromkeys(COUNTS, 0)) for key in descriptions
    }
    problem, target, size = "", "", 0
    for number, line in enumerate(lines, 2):
        digest.update(line)
        size += len(line)
        if line.startswith(WORKLOAD_LINE_START):
            target, size = _read_target_key(line, descriptions), 0
        if not target:
            problem = problem or f"line {number} names no workload of a target in it"
            continue
        counts[target].update(_count_line(line))
        if size > _MAX_WORKLOAD_BYTES:
            problem = problem or f"a workload has more than {size_text(_MAX_WORKLOAD_BYTES)}"
    if digest.hexdigest() != header["digest"]:
        raise _damaged(
            path, f"its digest is {digest.hexdigest()}, but its header has {header['digest']}"
        )
    for key, entry in header["targets"].items():
        if any(entry.get(name) != count for name, count in counts[key].items()):
            actual = ", ".join(f"{count} {name}" for name, count in counts[key].items())
            problem = problem or f"its header does not say {actual} for target {key[:12]}"
    if problem:
        raise _damaged(path, problem)
    return descriptions


def _count_line(line: bytes) -> dict[str, int]:
    if line.startswith(WORKLOAD_LINE_START):
        return {"workloads": 1}
    return {"trials": line.startswith(TRIAL_START), "failed": line.startswith(FAILED_TRIAL_START)}


def _read_header(path: Path, line: bytes) -> dict[str, Json]:
    try:
        header = read_object(line)
        version = header["version"]
        if header["format"] != FORMAT or not isinstance(header["digest"], str):
            raise ValueError("another format")
        if type(version) is not int or version < 1:
            raise ValueError("another version")
    except (ValueError, KeyError) as error:
        raise _not_a_pack(path) from error
    if version > VERSION:
        raise UsageError(
            f"{path} has version {version} of the pack format, which is newer than this tvmflow",
            fix="update tvmflow",
        )
    return header


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


def _read_target_key(line: bytes, targets: Mapping[str, TargetDescription]) -> str:
    """Return the key of the target that a workload's line names; empty if the line is not valid."""
    try:
        entry = read_object(line)
        is_valid = (
            entry["target"] in targets
            and WORKLOAD_KEY.fullmatch(entry["workload"]) is not None
            and isinstance(entry["about"], dict)
            and all(isinstance(search, str) for search in entry.get("exhausted", []))
            and isinstance(entry.get("kernel", ""), str)
        )
        return str(entry["target"]) if is_valid else ""
    except (ValueError, KeyError, TypeError):
        return ""


# ---------------------------------------------------------------- the records


def _read_workloads(path: Path, file: IO[bytes]) -> Iterator[ImportedWorkload]:
    lines = _lines(path, file)
    next(lines)
    workload: ImportedWorkload | None = None
    for number, line in enumerate(lines, 2):
        if line.startswith(WORKLOAD_LINE_START):
            if workload is not None:
                yield workload
            workload = _start_workload(read_object(line))
            is_certain = True
        elif workload is not None:
            # After an unreadable line, the workload of further records is uncertain: the line may have named another
            # one.
            is_certain = is_certain and line.startswith(RECORD_STARTS)
            _read_record(line, f"{path}:{number}", workload, is_certain=is_certain)
    if workload is not None:
        yield workload


def _start_workload(entry: Mapping[str, Json]) -> ImportedWorkload:
    return ImportedWorkload(
        target=entry["target"],
        workload=entry["workload"],
        description=WorkloadDescription.from_json(entry["about"]),
        exhausted=tuple(entry.get("exhausted", ())),
        kernel=entry.get("kernel", ""),
    )


def _read_record(
    line: bytes, line_name: str, workload: ImportedWorkload, *, is_certain: bool
) -> None:
    try:
        if not is_certain:
            raise ValueError("it is not a record, or the line before it is not one")
        if len(line) > _MAX_RECORD_BYTES:
            raise ValueError(f"it is longer than {size_text(_MAX_RECORD_BYTES)}")
        record = parse_line(line)
        if record is None:
            raise ValueError("it is not a record that this tvmflow can read")
    except ValueError as error:
        workload.invalid.add(f"{line_name}: workload {workload.workload[:12]}: {error}")
    else:
        workload.records.append(record)


# ---------------------------------------------------------------- writing packs


class ExportResult(NamedTuple):
    """The content of a new pack; `problems` names the ledger lines that were left out."""

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
    """Write the records of a ledger into a pack, gzipped if its name ends in `.gz`.

    The file is written atomically. `targets` and `workloads` are prefixes of keys; empty for all. With `best`, only
    this many of each workload's fastest trials are exported.

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
    about, kernel = folder.ledger.description(key), folder.ledger.kernel(key)
    # The note that a search is exhausted holds only for all trials together.
    exhausted = records.exhausted_searches() if same_trials(records, trials) else []
    line = {"target": folder.key, "workload": key, "about": about.to_json(), "exhausted": exhausted}
    # The importer applies schedules to the kernel to check them.
    line |= {"kernel": kernel} if kernel and len(kernel) <= MAX_KERNEL_BYTES else {}
    body.write(canonical(line) + b"\n")
    for record in (*trials, *records.notes()):
        body.write(to_line(record))


def _content_digest(header: Mapping[str, Json], body: IO[bytes]) -> str:
    digest = start_digest(header)
    body.seek(0)
    while chunk := body.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def start_digest(header: Mapping[str, Json]) -> hashlib._Hash:
    """Return a pack's sha256 after its header; it must be updated with the lines that follow."""
    fields = {name: value for name, value in header.items() if name != "digest"}
    return hashlib.sha256(canonical(fields) + b"\n")


def _write_file(path: Path, header: bytes, body: IO[bytes]) -> int:
    body.seek(0)
    with output_file(path) as temporary, open(temporary, "wb") as raw:  # noqa: PTH123
        if path.suffix == ".gz":
            # no time and no file name in the gzip header: equal content must give equal bytes
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                packed.write(header)
                shutil.copyfileobj(body, packed)
        else:
            raw.write(header)
            shutil.copyfileobj(body, raw)
        raw.flush()
        flush_file(raw.fileno())
    return path.stat().st_size
