"""The trial ledger: all trials ever measured, in one folder for each target.

A folder is named by the digest of its target's description, so that trials that are not comparable are never in one
folder. It contains an append-only file for each workload, and notes about the workload: a readable description, and
the saved kernel.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeGuard

from pydantic import StrictStr, TypeAdapter

from tvmflow.core import documents, file_locks, packages
from tvmflow.core.canonical_json import canonical, digest_of, document
from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import StoreError
from tvmflow.core.files import flush_file, replacing, temporary_name, write_atomically
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Json
from tvmflow.store import disk
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning.trials import (
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
    parse_line,
    sort_by_record,
    sort_by_time,
    timestamp,
    to_line,
)


class WorkloadRecords:
    """The records of one workload on one target.

    Attributes:
        trials: The trials by id, in the order in which they were added.
        baselines: The time of the untuned kernel, by the version of the schedule rules.
        finalists: The times of finalists, by the digest of what was measured and how.
        libraries: The comparisons of libraries, by the same kind of digest.
        bans: The bans of trials, by their ids.
        choices: The times of an operator's alternatives, by their keys.
        search_ends: The finished searches by name, each with the largest budget.
    """

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}
        self.baselines: dict[int, Baseline] = {}
        self.finalists: dict[str, FinalistsRecord] = {}
        self.libraries: dict[str, LibraryRecord] = {}
        self.bans: dict[str, Ban] = {}
        self.choices: dict[str, ChoiceTimes] = {}
        self.search_ends: dict[str, SearchEnd] = {}
        # record type -> records by their subject, in the order of `notes`
        self._kept: dict[type[Record], dict[Any, Any]] = {
            Trial: self.trials,
            Baseline: self.baselines,
            FinalistsRecord: self.finalists,
            LibraryRecord: self.libraries,
            Ban: self.bans,
            ChoiceTimes: self.choices,
            SearchTime: {},
            SearchEnd: self.search_ends,
        }
        self._exhausted: dict[str, int] = {}
        self._last_when = ""

    def __len__(self) -> int:
        return len(self.trials)

    def keep(self, record: Record | None) -> None:
        """Add a record, unless `is_news` says that a known record about the same subject takes precedence."""
        if isinstance(record, Trial | Baseline):
            self._last_when = max(self._last_when, record.when)
        if isinstance(record, ExhaustedMark):
            self._exhausted[record.search] = record.trials
        elif record is not None and not isinstance(record, FileHeader) and self.is_news(record):
            self._kept[type(record)][_subject_of(record)] = record

    def is_news(self, record: Trial | Note) -> bool:
        """Return whether a record has a new subject, or takes precedence over the known record.

        Earlier records take precedence over later ones; for notes about searches, the longer search does.
        """
        known = self._kept[type(record)].get(_subject_of(record))
        return known is None or _precedence(record) < _precedence(known)

    # ---------------------------------------------------------------- views

    def in_order(self) -> list[Trial]:
        """Return the trials in the order in which they were measured; all decisions depend on this order."""
        return sort_by_record(self.trials.values())

    def valid(self) -> list[Trial]:
        """Return the successful trials without a ban, sorted by time and then by id."""
        return sort_by_time(
            trial for trial in self.trials.values() if trial.run_secs and trial.id not in self.bans
        )

    def notes(self) -> list[Note]:
        """Return the records other than trials, in an order that depends only on their content."""
        notes = (records for kind, records in self._kept.items() if kind is not Trial)
        return [records[subject] for records in notes for subject in sorted(records)]

    @property
    def search_time(self) -> SearchTime | None:
        """The time that searches have spent; None if unknown."""
        return next(iter(self._kept[SearchTime].values()), None)

    def is_exhausted(self, search: str) -> bool:
        """Return whether `search` exhausted its space, and no trial was added since."""
        return self._exhausted.get(search, -1) == len(self)

    def exhausted_searches(self) -> list[str]:
        """Return the searches that exhausted their space with the present trials."""
        return sorted(filter(self.is_exhausted, self._exhausted))

    def untuned_seconds(self, schedules: int) -> float | None:
        """Return the seconds of an untuned call; None if it was not measured."""
        baseline = self.baselines.get(schedules)
        return baseline.seconds if baseline else None

    def baseline_before_trials(self, schedules: int) -> Baseline | None:
        """Return the untuned time if it was measured before the first trial; otherwise None.

        A later measurement must not change the decisions that led to the present trials.
        """
        baseline = self.baselines.get(schedules)
        first = min((trial.when for trial in self.trials.values()), default="")
        return baseline if baseline and (not first or baseline.when <= first) else None


def header_of(path: Path) -> FileHeader:
    """Return the header of a workload's file that the names of the file and its folder imply."""
    return FileHeader(path.stem, path.parent.name)


def describe_copy(path: Path, header: FileHeader) -> str:
    """Return a sentence about a file that was copied from another workload or target."""
    return (
        f"{path}: it has the records of workload {header.workload[:12]} "
        f"on target {header.target[:12]}, not of its own"
    )


def _subject_of(record: Trial | Note) -> object:
    """Return the subject of a record; a ledger keeps one record for each subject."""
    if isinstance(record, SearchTime):
        return None
    return record.key if isinstance(record, ChoiceTimes) else record[0]


def _precedence(record: Trial | Note) -> tuple[tuple[float, ...], str, bytes]:
    """Return a sort key: the longer search first, then the earlier record, then by content."""
    length: tuple[float, ...] = ()
    if isinstance(record, SearchTime):
        length = (-record.trials, -record.seconds)
    elif isinstance(record, SearchEnd):
        minutes, limit = record.budget
        length = (-minutes, -limit, -record.share)
    return length, record.when, to_line(record)


def same_trials(records: WorkloadRecords, trials: Iterable[Trial]) -> bool:
    """Return whether `trials` are exactly the trials of `records`."""
    return records.trials.keys() == {trial.id for trial in trials}


_RECORD_START: Final = b"{"
# Notes about all trials together: they are invalid after trials were removed.
_SEARCH_NOTES: Final = (ExhaustedMark, SearchTime, SearchEnd)
_MAX_REPAIRS: Final = 1000
_log = logging.getLogger(__name__)


class _Line(NamedTuple):
    """A line's first byte, its length without the line end, and its number from 1."""

    start: int
    length: int
    number: int


class _ForeignFile(Exception):
    """The file was copied from another workload or target."""

    def __init__(self, header: FileHeader) -> None:
        super().__init__(header)
        self.header = header


class WorkloadLedger(WorkloadRecords):
    """The ledger file of one workload on one target, shared with other processes.

    The records are those read from the file so far.

    Attributes:
        repairs: A sentence for each repair of the file, up to a limit.
        quarantined: The number of quarantined lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repairs: list[str] = []
        self.quarantined = 0
        self._reset()
        self.refresh()

    @property
    def quarantine_path(self) -> Path:
        """The file of lines that cannot be used."""
        return self.path.with_name(f"{self.path.stem}.quarantine.jsonl")

    # ---------------------------------------------------------------- trials

    def refresh(self) -> None:
        """Read what other processes have added, or the whole file if they removed trials."""
        if self.path.exists():
            with self._locked():
                pass
        else:
            self._reset()

    def append(self, trial: Trial) -> bool:
        """Add a new trial; return False if another process has added it meanwhile.

        The trial is on disk when this returns.

        Raises:
            StoreError: It cannot be written; the file is then as it was.
        """
        with self._locked() as descriptor:
            if trial.id in self.trials:
                return False
            if trial.when <= self._last_when:
                trial = trial._replace(when=timestamp(after=self._last_when))
            self._write(descriptor, [trial])
            return True

    def extend(self, trials: Iterable[Trial]) -> int:
        """Add many trials at once; return how many of them were new.

        Of two measurements of one schedule, the one with the earlier time is kept, in whatever order they are added.

        Raises:
            StoreError: They cannot be written; the file is then as it was.
        """
        chosen = WorkloadRecords()
        for trial in trials:
            chosen.keep(trial)
        with self._locked() as descriptor:
            new = [trial for trial in chosen.trials.values() if self.is_news(trial)]
            unknown = sum(1 for trial in new if trial.id not in self.trials)
            if new:
                self._write(descriptor, new)
            return unknown

    def mark_exhausted(self, search: str) -> None:
        """Record that `search` found no further candidate beyond the present trials."""
        with self._locked() as descriptor:
            self._write(descriptor, [ExhaustedMark(search, len(self), timestamp())])

    def record_untuned(self, schedules: int, seconds: float, least_s: float = 0.0) -> None:
        """Record the untuned time that was just measured, unless the ledger has one.

        Raises:
            StoreError: The record cannot be written.
        """
        with self._locked() as descriptor:
            if schedules not in self.baselines:
                when = timestamp(after=self._last_when)
                self._write(descriptor, [Baseline(schedules, seconds, when, least_s)])

    def add(self, records: Iterable[Note]) -> None:
        """Add records other than trials; records that take precedence replace known ones.

        Raises:
            StoreError: They cannot be written.
        """
        with self._locked() as descriptor:
            new = [record for record in records if self.is_news(record)]
            if new:
                self._write(descriptor, new)

    def quarantine(self, ids: Iterable[str], reason: str) -> None:
        """Move trials that no longer apply to the workload into the quarantine file."""
        with self._locked():
            known = [trial_id for trial_id in ids if trial_id in self.trials]
            self._quarantine_lines([(self._lines.pop(trial_id), reason) for trial_id in known])
            for trial_id in known:
                del self.trials[trial_id]

    def remove(self, ids: Iterable[str]) -> int:
        """Delete trials and return how many were present; the other lines do not change.

        The file is replaced atomically; processes that have it open notice this and read it again.
        """
        with self._locked() as descriptor:
            starts = {self._lines[trial_id].start for trial_id in ids if trial_id in self.trials}
            if starts:
                self._rewrite_without(descriptor, starts)
        self.refresh()
        return len(starts)

    @contextlib.contextmanager
    def exclusive_search(self, *, wait: bool = True) -> Iterator[None]:
        """Lock the search for this workload, so that concurrent runs share trials and do not repeat any.

        Raises:
            Locked: Another process searches and `wait` is false.
        """
        with _locked_file(self.path.with_suffix(".lock"), wait=wait):
            self.refresh()
            yield

    # ---------------------------------------------------------------- the file

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Lock the file, read what is new in it, and yield its descriptor."""
        is_new = False
        while True:
            with _locked_file(self.path) as descriptor:
                try:
                    self._read_new_lines(descriptor)
                except _ForeignFile as foreign:
                    self._set_aside(foreign.header)
                    is_new = True
                    continue
                if is_new and not self._has_header:
                    # write the header, because an empty file would look as if trials were lost
                    self._write(descriptor, [])
                yield descriptor
                return

    def _set_aside(self, header: FileHeader) -> None:
        """Rename the locked file, which belongs to another workload or target."""
        aside = self.path.with_name(f"{self.path.stem}.set-aside-{temporary_name()}.jsonl")
        try:
            self.path.rename(aside)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._report_repair(
            f"{describe_copy(self.path, header)}; it was moved to {aside.name}: "
            "rename it to the file of that workload if this has no trials"
        )
        self.quarantined += 1
        self._reset()

    def _write(self, descriptor: int, records: Iterable[Record]) -> None:
        """Append records to the locked file, sync it and read them; undo this if the disk is full."""
        headers = [] if self._has_header else [header_of(self.path)]
        lines = b"".join(map(to_line, (*headers, *records)))
        end = os.fstat(descriptor).st_size
        try:
            if os.pwrite(descriptor, lines, end) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush_file(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise unwritable(self.path, error) from error
        self._read_new_lines(descriptor)

    def _rewrite_without(self, descriptor: int, starts: set[int]) -> None:
        """Replace the locked file by one without the lines that start at these bytes."""
        content = _read_at(descriptor, 0, os.fstat(descriptor).st_size)
        kept, start = [], 0
        for line in content.split(b"\n"):
            # With fewer trials, notes about finished searches are invalid. All other lines are kept, even a newer
            # version's.
            is_mark = start not in starts and isinstance(parse_line(line), _SEARCH_NOTES)
            if start not in starts and line.strip() and not is_mark:
                kept.append(line + b"\n")
            start += len(line) + 1
        try:
            with replacing(self.path) as path, open(path, "wb") as stream:  # noqa: PTH123
                stream.writelines(kept)
                stream.flush()
                flush_file(stream.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _reset(self) -> None:
        super().__init__()
        self._lines: dict[str, _Line] = {}
        self._offset = self._line_count = 0
        self._last_line = b""
        self._has_header = False

    def _read_new_lines(self, descriptor: int) -> None:
        """Read the locked file from where the last read ended, and repair damage."""
        # If the file was rewritten, its bytes before this offset differ: read it from the beginning.
        before = os.pread(descriptor, len(self._last_line), self._offset - len(self._last_line))
        if before != self._last_line:
            self._reset()
        size = os.fstat(descriptor).st_size
        *lines, tail = _read_at(descriptor, self._offset, size).split(b"\n")
        if tail and (_is_json(tail) or not tail.startswith(_RECORD_START)):
            # A process died before it wrote the end of the line, or this is not a record: end the line.
            os.pwrite(descriptor, b"\n", size)
            lines.append(tail)
        elif tail:
            os.ftruncate(descriptor, size - len(tail))
            flush_file(descriptor)
            number = self._line_count + len(lines) + 1
            self._report_repair(
                f"{self.path}:{number}: an incomplete last line of {len(tail)} bytes was removed"
            )
        damaged: list[tuple[_Line, str]] = []
        superseded: list[_Line] = []
        for content in lines:
            self._line_count += 1
            line = _Line(self._offset, len(content), self._line_count)
            if reason := self._read_line(line, content, superseded):
                damaged.append((line, reason))
            self._offset += len(content) + 1
            self._last_line = content + b"\n"
        self._quarantine_lines(damaged)
        self._blank(superseded)

    def _read_line(self, line: _Line, content: bytes, superseded: list[_Line]) -> str:
        """Read a line; return why it must be quarantined, or an empty string.

        Blank (quarantined) lines and lines of a newer version are skipped. A line that this one replaces is added to
        `superseded`.
        """
        try:
            record = parse_line(content)
        except ValueError as error:
            return f"unreadable: {error}"
        if isinstance(record, Trial):
            if not self.is_news(record):
                return "the same trial is in an earlier line"
            if record.id in self.trials:
                superseded.append(self._lines[record.id])
            self._lines[record.id] = line
        if isinstance(record, FileHeader):
            if record != header_of(self.path):
                raise _ForeignFile(record)
            self._has_header = True
        self.keep(record)
        return ""

    def _quarantine_lines(self, damaged: Sequence[tuple[_Line, str]]) -> None:
        """Copy lines to the quarantine file, then blank them in place: no other line moves."""
        if not damaged:
            return
        with self.path.open("rb") as stream, self.quarantine_path.open("ab") as quarantine:
            for line, reason in damaged:
                stream.seek(line.start)
                content = stream.read(line.length)
                entry = {
                    "when": timestamp(),
                    "reason": reason,
                    "line": content.decode("utf-8", "backslashreplace"),
                }
                quarantine.write(canonical(entry) + b"\n")
            # sync the copies to disk before the first line is blanked
            quarantine.flush()
            flush_file(quarantine.fileno())
        self._blank([line for line, _ in damaged])
        self.quarantined += len(damaged)
        for line, reason in damaged:
            self._report_repair(f"{self.path}:{line.number}: one line was quarantined ({reason})")

    def _blank(self, lines: Sequence[_Line]) -> None:
        if not lines:
            return
        with self.path.open("r+b") as stream:
            for line in lines:
                stream.seek(line.start)
                stream.write(b" " * line.length)
            stream.flush()
            flush_file(stream.fileno())

    def _report_repair(self, text: str) -> None:
        _log.debug("%s", text)
        if len(self.repairs) < _MAX_REPAIRS:
            self.repairs.append(text)


@contextlib.contextmanager
def _locked_file(path: Path, *, wait: bool = True) -> Iterator[int]:
    while True:
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(file_locks.held(path, wait=wait))
            except OSError as error:
                raise unwritable(path, error) from error
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise unwritable(path, OSError(errno.EINVAL, "it is not a regular file"))
            # If the file was replaced while this process waited, the locked one is no longer at `path`: try again.
            if disk.is_current(descriptor, str(path)):
                yield descriptor
                return


def _read_at(descriptor: int, start: int, end: int) -> bytes:
    """Return the bytes of an open file from `start` to `end`; a single `pread` may return fewer."""
    parts = []
    while part := os.pread(descriptor, end - start, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def unwritable(path: Path, cause: OSError) -> StoreError:
    """Return the error for a file of the ledger that cannot be written."""
    problem = explain(cause, path)
    reason = problem.message if problem else cause.strerror or str(cause)
    return StoreError(
        f"cannot write the trial ledger {path}: {reason}",
        fix="free some space or correct the permissions; all trials measured so far are kept",
    )


class TargetDescription(NamedTuple):
    """The target and the machine of all trials in a folder: the content of its `about.json`.

    Attributes:
        target: TVM's target as JSON; the order of CPU features (`mattr`) does not matter.
        tvm: The identity of the TVM build.
        device: The class of the device: `kind` and `class`.
    """

    target: Mapping[StrictStr, Json]
    tvm: StrictStr
    device: Mapping[StrictStr, StrictStr]

    @property
    def key(self) -> str:
        """The name of the folder."""
        return digest_of(self.to_json())[:32]

    @property
    def threads(self) -> int | None:
        """The thread count that kernels were measured with; None for a GPU."""
        return split_threads(self.target)[1]

    def is_similar(self, other: TargetDescription) -> bool:
        """Return whether both have the same code, but another thread count or device."""
        codes = [
            (split_threads(entry.to_json()["target"])[0], entry.tvm) for entry in (self, other)
        ]
        return (
            codes[0] == codes[1]
            and self.key != other.key
            and None not in (self.threads, other.threads)
        )

    @property
    def machine_class(self) -> MachineClass:
        """The TVM build and the class of device that measured the trials."""
        return MachineClass(self.tvm, self.device)

    @property
    def text(self) -> str:
        """A readable text: kind, CPU, features, threads, TVM build, class of device."""
        target = self.target
        chip = target.get("mcpu") or target.get("mtriple") or target.get("arch") or ""
        fields = [" ".join(str(field) for field in (target.get("kind", ""), chip) if field)]
        fields += [str(feature) for feature in target.get("mattr", ())]
        fields += [count_text(threads, "thread")] if (threads := self.threads) else []
        fields.append(f"TVM {self.tvm}")
        fields.append(str(self.device.get("class") or self.device.get("kind", "")))
        return ", ".join(fields)

    def to_json(self) -> Json:
        """Return the content of `about.json`."""
        features = sorted(self.target.get("mattr", ()))
        return {
            "version": 1,
            "target": {**self.target, **({"mattr": features} if features else {})},
            "tvm": self.tvm,
            "device": dict(self.device),
        }

    @classmethod
    def from_json(cls, value: Json) -> TargetDescription:
        """Return the description in an `about.json`.

        Raises:
            ValueError: A field is missing or has a wrong type.
        """
        try:
            fields = {name: value[name] for name in cls._fields}
            description = _DESCRIPTION.validate_python(fields)
            if not (description.key and description.text):
                raise ValueError("an empty description")
            return description
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError("it lacks the target, the TVM build or the device") from error


_DESCRIPTION: Final = TypeAdapter(TargetDescription)


def target_key(target: Mapping[str, Json], tvm: str, device: Mapping[str, str]) -> str:
    """Return the name of a target's folder, in which all trials are comparable."""
    return TargetDescription(target, tvm, device).key


class WorkloadDescription(NamedTuple):
    """A readable description of a workload; unknown fields are empty.

    Attributes:
        name: The name of the kernel in the first model that was tuned with it.
        flops: Arithmetic operations of one call; None if unknown.
        buffers: Its parameters, such as `float32[1×3×8×8]`.
    """

    name: str = ""
    flops: float | None = None
    buffers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Name and buffers; empty if nothing is known."""
        return " ".join(field for field in (self.name, ", ".join(self.buffers)) if field)

    def to_json(self) -> Json:
        """Return the known fields; an empty object if nothing is known."""
        fields = {**self._asdict(), "buffers": list(self.buffers)}
        known = {name: value for name, value in fields.items() if value not in ("", None, [])}
        return {"name": self.name, **known} if known else {}

    @classmethod
    def from_json(cls, value: Json) -> WorkloadDescription:
        """Read the fields that have the right type; other fields count as unknown."""
        if not isinstance(value, dict):
            return cls()
        name, flops, buffers = (value.get(field) for field in cls._fields)
        is_number = isinstance(flops, int | float) and 0 <= flops < float("inf")
        return cls(
            name if isinstance(name, str) else "",
            flops if is_number else None,
            tuple(buffers) if _is_text_list(buffers) else (),
        )


class Ledger:
    """The trials on one target: a folder with one file for each workload.

    Attributes:
        repairs: A sentence for each repaired damage in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repairs: list[str] = []

    @classmethod
    def open(
        cls, root: Path, target: Mapping[str, Json], tvm: str, device: Mapping[str, str]
    ) -> Ledger:
        """Open the ledger under `root` for a target, a TVM build and a class of devices.

        Raises:
            StoreError: The folder cannot be written.
        """
        description = TargetDescription(target, tvm, device)
        folder = root / description.key
        try:
            folder.mkdir(parents=True, exist_ok=True)
            repairs = _put_description_right(folder, description)
        except OSError as error:
            raise unwritable(folder, error) from error
        ledger = cls(folder)
        ledger.repairs += repairs
        return ledger

    def workload(self, key: str) -> WorkloadLedger:
        """Open the file of one workload, and repair damage in it."""
        return WorkloadLedger(self.folder / f"{key}.jsonl")

    def description(self, key: str) -> WorkloadDescription:
        """Return the description of a workload; its fields are empty if unknown."""
        return WorkloadDescription.from_json(_read_json(self._note_path(key, "about")))

    def describe(self, key: str, description: WorkloadDescription, mod: str = "") -> None:
        """Record the description of a workload and its saved module, if given.

        A known description is replaced only if the given module is new or differs from the saved one.

        Raises:
            StoreError: The notes cannot be written.
        """
        is_described = self.description(key) != WorkloadDescription()
        if is_described and (not mod or self.kernel(key) == mod):
            return
        self._write_notes(key, description, mod)

    def adopt_description(self, key: str, description: WorkloadDescription, mod: str) -> None:
        """Import a workload's description and module from another ledger, if they are better than this one's.

        The result does not depend on the order of imports. The module may be empty. It is not checked here: its user
        must check that it is the workload's.

        Raises:
            StoreError: The notes cannot be written.
        """
        known = self.description(key)
        if self.kernel(key):
            # The module is known, so only the readable name may be imported; other fields are not trusted.
            if mod and description._replace(name=known.name) == known != description:
                self._write_notes(key, min(description, known), "")
            return
        is_known = known != WorkloadDescription()
        if mod or not is_known or canonical(description.to_json()) < canonical(known.to_json()):
            self._write_notes(key, description, mod)

    def _write_notes(self, key: str, description: WorkloadDescription, mod: str) -> None:
        if mod:
            _write(self._note_path(key, "kernel"), mod)
        _write(self._note_path(key, "about"), document(description.to_json()))

    def kernel(self, key: str) -> str:
        """Return the saved module of a workload; empty if the ledger lacks it."""
        try:
            return documents.read_file(self._note_path(key, "kernel")).decode()
        except (documents.Unreadable, UnicodeDecodeError):
            return ""

    def _note_path(self, key: str, note: Literal["about", "kernel"]) -> Path:
        return self.folder / f"{key}.{note}.json"


def _put_description_right(folder: Path, description: TargetDescription) -> list[str]:
    """Write a folder's description if it is missing or wrong; return a sentence for what was wrong.

    A folder that was copied from another target is renamed, because its trials are not comparable with this target's.
    """
    path, repairs = folder / "about.json", []
    actual = _read_json(path)
    if actual == description.to_json():
        return []
    try:
        other = TargetDescription.from_json(actual)
    except ValueError:
        repairs = [f"{path}: it was damaged, and was written again"] if path.exists() else []
    else:
        aside = folder.with_name(f"{folder.name}.set-aside-{temporary_name()}")
        folder.rename(aside)
        folder.mkdir()
        repairs = [
            f"{path}: it describes another target ({other.text}); the folder was moved to {aside}"
        ]
    write_atomically(path, document(description.to_json()))
    return repairs


def _is_text_list(value: Json) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _read_json(path: Path) -> Json:
    """Return the content of a note; an empty object if it is missing or damaged."""
    try:
        return documents.read_json(documents.read_file(path))
    except documents.Unreadable:
        return {}


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


class MachineClass(NamedTuple):
    """A TVM build and a class of devices: `kind` (`cpu`, `cuda`, `rpc`) and `class` (its model)."""

    tvm: str
    device: Mapping[str, str]


def this_machine_class() -> MachineClass:
    """Return the machine class of this machine's CPU with the installed TVM."""
    return MachineClass(
        packages.identity("apache-tvm"), {"kind": "cpu", "class": read_host().model}
    )
