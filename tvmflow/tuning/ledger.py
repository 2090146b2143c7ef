"""The trial ledger: every measurement ever made, one append-only file per workload and target.

A trial is on disk before the next one begins. Writers of several processes take turns under
a lock of the operating system, which dies with its process, and never write one trial twice.
What a crash or a bad disk damaged is set aside line by line; the rest stays usable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import StoreError
from tvmflow.values import Json

RECORD_VERSION: Final = 1


class Failure(NamedTuple):
    """Why a trial has no time: in which phase (`apply`, `build`, `run`), how, and the first words."""

    phase: str
    kind: str
    message: str


class Trial(NamedTuple):
    """One measured schedule. `run_secs` are the seconds of every repeat; empty when it failed.

    `ran` is when it began and ended to run, in seconds since 1970; empty when that is not known.
    """

    id: str
    trace: Json
    run_secs: tuple[float, ...]
    failure: Failure | None
    when: str
    tvm: str
    host: Json
    load: tuple[float, ...]
    seed: int
    ran: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The median of the repeats; infinity when the trial failed."""
        return median(self.run_secs) if self.run_secs else float("inf")

    @property
    def spread(self) -> float:
        """How far the repeats lie apart, relative to the median; 0 for a single one."""
        return (max(self.run_secs) - min(self.run_secs)) / self.seconds if self.run_secs else 0.0

    def to_json(self) -> Json:
        return {
            "v": RECORD_VERSION,
            **self._asdict(),
            "failure": self.failure._asdict() if self.failure else None,
        }

    @classmethod
    def from_json(cls, value: Json) -> Trial:
        """Raises KeyError, TypeError or ValueError for anything that is not a whole record."""
        failure = value["failure"]
        run_secs = tuple(float(seconds) for seconds in value["run_secs"])
        if bool(run_secs) == bool(failure):
            raise ValueError("a trial has either times or a failure")
        if not all(0 < seconds < float("inf") for seconds in run_secs):
            raise ValueError("a time is a positive number of seconds")
        if value["id"] != trial_id(value["trace"]):
            raise ValueError("the trace is not the one that was measured")
        return cls(
            id=value["id"],
            trace=value["trace"],
            run_secs=run_secs,
            failure=Failure(**failure) if failure else None,
            when=str(value["when"]),
            tvm=str(value["tvm"]),
            host=value["host"],
            load=tuple(float(load) for load in value["load"]),
            seed=int(value["seed"]),
            ran=tuple(float(moment) for moment in value.get("ran", ())),
        )


class Mark(NamedTuple):
    """`search` found no further candidate when there were this many `trials`."""

    search: str
    trials: int


def read_line(line: bytes) -> Trial | Mark | None:
    """What one line of a workload's file holds; None when it is blank or a newer version's.

    Raises ValueError, saying what is wrong, for anything else.
    """
    if not line.strip():
        return None
    try:
        record = json.loads(line)
        if record["v"] > RECORD_VERSION:
            return None
        if "exhausted" in record:
            return Mark(record["exhausted"], record["trials"])
        return Trial.from_json(record)
    except KeyError as missing:
        raise ValueError(f"it has no {missing}") from missing
    except (TypeError, AttributeError) as shape:
        raise ValueError(str(shape)) from shape


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def trial_id(trace: Json) -> str:
    """The sha256 (hex) of a trace in canonical JSON."""
    return hashlib.sha256(canonical(trace)).hexdigest()


def canonical(value: Json) -> bytes:
    """A value as records are written: one line, keys in order, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def now() -> str:
    """The time, as records hold it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------- per target


class Ledger:
    """The trials on one target: a folder with one file per workload."""

    def __init__(self, folder: Path, about: Json) -> None:
        self.folder = folder
        self.about = about

    @classmethod
    def open(
        cls, root: Path, target: Mapping[str, Json], tvm: str, device: Mapping[str, Json]
    ) -> Ledger:
        """The ledger under `root` for a target, a build of TVM and a class of devices."""
        about = _about(target, tvm, device)
        folder = root / target_key(target, tvm, device)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            description = folder / "about.json"
            if not description.exists():
                _write_whole(description, json.dumps(about, indent=1, sort_keys=True))
        except OSError as refused:
            raise _unusable(folder, refused) from refused
        return cls(folder, about)

    def workload(self, key: str) -> WorkloadLedger:
        """The trials of one workload, repaired where the file was damaged."""
        return WorkloadLedger(self.folder / f"{key}.jsonl")

    def description(self, key: str) -> Json:
        """What is known of a workload for people (see `describe`); empty when nothing is."""
        try:
            found = json.loads(self._description_path(key).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def describe(self, key: str, about: Json, mod: str = "") -> None:
        """Note what a workload is: `name`, `flops`, the `buffers` it takes, its `family`; and, where it is known, its saved module.

        The first note stays, unless it came without the module and this one has it.
        """
        if self.description(key) and (not mod or self._kernel_path(key).exists()):
            return
        try:
            if mod:
                _write_whole(self._kernel_path(key), mod)
            _write_whole(self._description_path(key), json.dumps(about, indent=1, sort_keys=True))
        except OSError as refused:
            raise _unusable(self._description_path(key), refused) from refused

    def kernel(self, key: str) -> str:
        """The saved module of a workload that was described; empty for any other."""
        try:
            return self._kernel_path(key).read_text()
        except OSError:
            return ""

    def _kernel_path(self, key: str) -> Path:
        return self.folder / f"{key}.kernel.json"

    def untuned(self, key: str, schedules: int) -> float | None:
        """Seconds of a call with the schedule of the rules of that version, where that was measured."""
        try:
            note = json.loads(self._untuned_path(key).read_bytes())
            return float(note["seconds"]) if note["schedules"] == schedules else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_untuned(self, key: str, schedules: int, seconds: float) -> None:
        """Keep how long a call takes untuned. The first note stays, so that decisions made on it do."""
        if self.untuned(key, schedules) is not None:
            return
        note = {"seconds": seconds, "schedules": schedules, "when": now()}
        try:
            _write_whole(self._untuned_path(key), json.dumps(note))
        except OSError as refused:
            raise _unusable(self._untuned_path(key), refused) from refused

    def _untuned_path(self, key: str) -> Path:
        return self.folder / f"{key}.untuned.json"

    def relatives(self, key: str) -> list[str]:
        """The other workloads of its family (see `describe`), the nearest in work first."""
        own = self.description(key)
        found = []
        for path in self.folder.glob("*.about.json") if own.get("family") else ():
            other = path.name.removesuffix(".about.json")
            about = self.description(other)
            if other != key and about.get("family") == own["family"]:
                ratio = max(about["flops"], 1.0) / max(own["flops"], 1.0)
                found.append((max(ratio, 1 / ratio), other))
        return [other for _, other in sorted(found)]

    def _description_path(self, key: str) -> Path:
        return self.folder / f"{key}.about.json"


def target_key(target: Mapping[str, Json], tvm: str, device: Mapping[str, Json]) -> str:
    """The name of the folder for trials that may be compared with each other."""
    return hashlib.sha256(canonical(_about(target, tvm, device))).hexdigest()[:32]


def key_of(about: Json) -> str:
    """The target key for what `about.json` says. Raises ValueError when it says too little."""
    try:
        return target_key(about["target"], about["tvm"], about["device"])
    except (KeyError, TypeError, AttributeError, ValueError) as shape:
        raise ValueError("it lacks the target, the build of TVM or the device") from shape


def _about(target: Mapping[str, Json], tvm: str, device: Mapping[str, Json]) -> Json:
    features = sorted(target.get("mattr", ()))
    return {
        "version": RECORD_VERSION,
        "target": {**target, **({"mattr": features} if features else {})},
        "tvm": tvm,
        "device": dict(device),
    }


# ---------------------------------------------------------------- per workload


class _Place(NamedTuple):
    """Where a line is: its first byte, how many without the line end, and its number from 1."""

    start: int
    length: int
    number: int


class WorkloadLedger:
    """The trials of one workload on one target, shared with other processes.

    `trials` are those read or written so far, by id, in the order of the file. `repairs` are
    sentences about what was damaged when the file was read, `set_aside` how many lines that
    put out of use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, Trial] = {}
        self.repairs: list[str] = []
        self.set_aside = 0
        self._exhausted: dict[str, int] = {}
        self._places: dict[str, _Place] = {}
        self._offset = self._lines = 0
        self._last = b""
        self.refresh()

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def quarantine_path(self) -> Path:
        """Where lines go that cannot be used."""
        return self.path.with_name(f"{self.path.stem}.quarantine.jsonl")

    def refresh(self) -> None:
        """Read what other processes have added since, or all of it when they removed some."""
        if self.path.exists():
            with self._locked() as descriptor:
                self._catch_up(descriptor)
        else:
            self._forget()

    def append(self, trial: Trial) -> bool:
        """Keep a trial; False when another process has kept the same one in the meantime.

        It is on disk when this returns. Raises StoreError when it cannot be written; the
        file is then as it was.
        """
        return self.extend([trial]) == 1

    def extend(self, trials: Iterable[Trial]) -> int:
        """`append` for many at once: how many of them are new."""
        with self._locked() as descriptor:
            self._catch_up(descriptor)
            new = {trial.id: trial for trial in trials if trial.id not in self.trials}
            if new:
                self._write(descriptor, [trial.to_json() for trial in new.values()])
                self._catch_up(descriptor)
            return len(new)

    def valid(self) -> list[Trial]:
        """The trials that have a time, best first; equal ones in the order of their ids."""
        timed = [trial for trial in self.trials.values() if trial.run_secs]
        return sorted(timed, key=lambda trial: (trial.seconds, trial.id))

    def mark_exhausted(self, search: str) -> None:
        """Note that `search` found no further candidate beyond the trials that are here now."""
        with self._locked() as descriptor:
            self._catch_up(descriptor)
            mark = {"v": RECORD_VERSION, "exhausted": search, "trials": len(self), "when": now()}
            self._write(descriptor, [mark])
            self._catch_up(descriptor)

    def is_exhausted(self, search: str) -> bool:
        """Whether `search` has come to its end and nothing was added since."""
        return self._exhausted.get(search, -1) == len(self)

    def quarantine(self, ids: Iterable[str], reason: str) -> None:
        """Set trials aside that no longer apply to the workload; the others stay."""
        with self._locked() as descriptor:
            self._catch_up(descriptor)
            for each in ids:
                if each in self.trials:
                    self._set_aside(self._places.pop(each), reason)
                    del self.trials[each]

    def remove(self, ids: Iterable[str]) -> int:
        """Forget trials for good; how many were there. The others keep their order and their bytes.

        The file is replaced in one step. Whoever has it open notices, and reads it again.
        """
        with self._locked() as descriptor:
            self._catch_up(descriptor)
            gone = {self._places[each].start for each in ids if each in self.trials}
            if gone:
                self._replace(descriptor, gone)
        self.refresh()
        return len(gone)

    @contextlib.contextmanager
    def searching(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the search for this workload alone, so that two runs share its trials and repeat none.

        Raises BlockingIOError when another process holds it and this one is not to wait.
        """
        with self._open(self.path.with_suffix(".lock"), wait=wait):
            self.refresh()
            yield

    # ---- the file

    def _locked(self) -> contextlib.AbstractContextManager[int]:
        return self._open(self.path)

    @contextlib.contextmanager
    def _open(self, path: Path, *, wait: bool = True) -> Iterator[int]:
        """An open file under an exclusive lock of the operating system, which dies with this process."""
        descriptor = -1
        try:
            while descriptor < 0:
                try:
                    descriptor = os.open(path, _READ_AND_APPEND, 0o644)
                except OSError as refused:
                    raise _unusable(path, refused) from refused
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if not _is_at(path, descriptor):
                    # it was replaced while we waited: what we hold is no longer the ledger
                    os.close(descriptor)
                    descriptor = -1
            yield descriptor
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _write(self, descriptor: int, records: Iterable[Json]) -> None:
        lines = b"".join(canonical(record) + b"\n" for record in records)
        end = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, lines) != len(lines):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        except OSError as refused:
            os.ftruncate(descriptor, end)
            raise _unusable(self.path, refused) from refused

    def _replace(self, descriptor: int, gone: set[int]) -> None:
        """Put a file without the lines that start at `gone` in this one's place. The lock is held."""
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        kept, start = [], 0
        for line in content.split(b"\n"):
            # an exhausted search is no longer so; what is neither that nor blank is a newer version's
            if start not in gone and line.strip() and not isinstance(read_line(line), Mark):
                kept.append(line + b"\n")
            start += len(line) + 1
        aside = self.path.with_suffix(".part")
        try:
            with aside.open("wb") as stream:
                stream.writelines(kept)
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(self.path)
        except OSError as refused:
            raise _unusable(self.path, refused) from refused

    def _forget(self) -> None:
        self.trials, self._exhausted, self._places = {}, {}, {}
        self._offset = self._lines = 0
        self._last = b""

    def _catch_up(self, descriptor: int) -> None:
        """Read from where the last reading ended; repair what is damaged. The lock is held."""
        # a file that was rewritten without some of its lines has others, or none, at this place
        before = os.pread(descriptor, len(self._last), self._offset - len(self._last))
        if before != self._last:
            self._forget()
        size = os.fstat(descriptor).st_size
        *lines, tail = os.pread(descriptor, size - self._offset, self._offset).split(b"\n")
        if tail and _is_json(tail):
            # the process died between a record and the end of its line
            os.write(descriptor, b"\n")
            lines.append(tail)
        elif tail:
            os.ftruncate(descriptor, size - len(tail))
            os.fsync(descriptor)
            number = self._lines + len(lines) + 1
            self.repairs.append(
                f"{self.path}:{number}: a torn last line of {len(tail)} bytes was cut off"
            )
        for line in lines:
            self._lines += 1
            self._take(_Place(self._offset, len(line), self._lines), line)
            self._offset += len(line) + 1
            self._last = line + b"\n"

    def _take(self, place: _Place, line: bytes) -> None:
        """Read one line. What was set aside earlier is blank, and a newer version's is left alone."""
        try:
            found = read_line(line)
        except ValueError as damage:
            self._set_aside(place, f"unreadable: {damage}")
            return
        if isinstance(found, Mark):
            self._exhausted[found.search] = found.trials
        elif found is not None and found.id in self.trials:
            self._set_aside(place, "the same trial is in an earlier line")
        elif found is not None:
            self.trials[found.id] = found
            self._places[found.id] = place

    def _set_aside(self, place: _Place, reason: str) -> None:
        """Copy a line to the quarantine file, then blank it in place: no other line moves."""
        with self.path.open("r+b") as stream:
            stream.seek(place.start)
            line = stream.read(place.length)
            entry = {
                "when": now(),
                "reason": reason,
                "line": line.decode("utf-8", "backslashreplace"),
            }
            with self.quarantine_path.open("ab") as aside:
                aside.write(canonical(entry) + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            stream.seek(place.start)
            stream.write(b" " * place.length)
            stream.flush()
            os.fsync(stream.fileno())
        self.set_aside += 1
        self.repairs.append(f"{self.path}:{place.number}: one line was set aside ({reason})")


_READ_AND_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _unusable(path: Path, cause: OSError) -> StoreError:
    return StoreError(
        f"the trial ledger {path} cannot be written: {cause.strerror or cause}",
        fix="free some space or correct the permissions; everything measured so far is kept",
    )


def _write_whole(path: Path, text: str) -> None:
    """All of a file or nothing of it, whoever else writes the same."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
        stream.write(text)
        # a temporary file is its owner's alone; a store may be a team's
        os.fchmod(stream.fileno(), 0o644)
    Path(stream.name).replace(path)
