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
    """One measured schedule. `run_secs` are the seconds of every repeat; empty when it failed."""

    id: str
    trace: Json
    run_secs: tuple[float, ...]
    failure: Failure | None
    when: str
    tvm: str
    host: Json
    load: tuple[float, ...]
    seed: int

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
        if bool(run_secs) == bool(failure) or any(not seconds > 0 for seconds in run_secs):
            raise ValueError("a trial has either times or a failure")
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
        )


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def trial_id(trace: Json) -> str:
    """The sha256 (hex) of a trace in canonical JSON."""
    return hashlib.sha256(_canonical(trace)).hexdigest()


def _canonical(value: Json) -> bytes:
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


def target_key(target: Mapping[str, Json], tvm: str, device: Mapping[str, Json]) -> str:
    """The name of the folder for trials that may be compared with each other."""
    return hashlib.sha256(_canonical(_about(target, tvm, device))).hexdigest()[:32]


def _about(target: Mapping[str, Json], tvm: str, device: Mapping[str, Json]) -> Json:
    features = sorted(target.get("mattr", ()))
    return {
        "version": RECORD_VERSION,
        "target": {**target, **({"mattr": features} if features else {})},
        "tvm": tvm,
        "device": dict(device),
    }


# ---------------------------------------------------------------- per workload


class WorkloadLedger:
    """The trials of one workload on one target, shared with other processes.

    `trials` are those read or written so far, by id, in the order of the file. `repairs` are
    sentences about what was damaged when the file was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, Trial] = {}
        self.repairs: list[str] = []
        self._exhausted: dict[str, int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._offset = 0
        self.refresh()

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def quarantine_path(self) -> Path:
        """Where lines go that cannot be used."""
        return self.path.with_name(f"{self.path.stem}.quarantine.jsonl")

    def refresh(self) -> None:
        """Read what other processes have added since."""
        if self.path.exists():
            with self._locked() as descriptor:
                self._catch_up(descriptor)

    def append(self, trial: Trial) -> bool:
        """Keep a trial; False when another process has kept the same one in the meantime.

        It is on disk when this returns. Raises StoreError when it cannot be written; the
        file is then as it was.
        """
        with self._locked() as descriptor:
            self._catch_up(descriptor)
            if trial.id in self.trials:
                return False
            self._write(descriptor, trial.to_json())
            self._catch_up(descriptor)
            return True

    def valid(self) -> list[Trial]:
        """The trials that have a time, best first; equal ones in the order of their ids."""
        timed = [trial for trial in self.trials.values() if trial.run_secs]
        return sorted(timed, key=lambda trial: (trial.seconds, trial.id))

    def mark_exhausted(self, search: str) -> None:
        """Note that `search` found no further candidate beyond the trials that are here now."""
        with self._locked() as descriptor:
            self._catch_up(descriptor)
            mark = {"v": RECORD_VERSION, "exhausted": search, "trials": len(self), "when": now()}
            self._write(descriptor, mark)
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
                    self._set_aside(*self._places.pop(each), reason)
                    del self.trials[each]

    @contextlib.contextmanager
    def searching(self) -> Iterator[None]:
        """Hold the search for this workload alone, so that two runs share its trials and repeat none."""
        with self._open(self.path.with_suffix(".lock")):
            self.refresh()
            yield

    # ---- the file

    def _locked(self) -> contextlib.AbstractContextManager[int]:
        return self._open(self.path)

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        """An open file under an exclusive lock of the operating system, which dies with this process."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as refused:
            raise _unusable(path, refused) from refused
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, record: Json) -> None:
        line = _canonical(record) + b"\n"
        end = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        except OSError as refused:
            os.ftruncate(descriptor, end)
            raise _unusable(self.path, refused) from refused

    def _catch_up(self, descriptor: int) -> None:
        """Read from where the last reading ended; repair what is damaged. The lock is held."""
        size = os.fstat(descriptor).st_size
        *lines, tail = os.pread(descriptor, size - self._offset, self._offset).split(b"\n")
        if tail and _is_json(tail):
            # the process died between a record and the end of its line
            os.write(descriptor, b"\n")
            lines.append(tail)
        elif tail:
            os.ftruncate(descriptor, size - len(tail))
            os.fsync(descriptor)
            self.repairs.append(f"{self.path}: a torn last line of {len(tail)} bytes was cut off")
        for line in lines:
            self._take(self._offset, line)
            self._offset += len(line) + 1

    def _take(self, start: int, line: bytes) -> None:
        """Read one line. What was set aside earlier is blank, and a newer version's is left alone."""
        if not line.strip():
            return
        try:
            record = json.loads(line)
            if record["v"] > RECORD_VERSION:
                return
            if "exhausted" in record:
                self._exhausted[record["exhausted"]] = record["trials"]
                return
            trial = Trial.from_json(record)
        except (ValueError, KeyError, TypeError, AttributeError) as damage:
            self._set_aside(start, len(line), f"unreadable: {damage}")
            return
        if trial.id in self.trials:
            self._set_aside(start, len(line), "the same trial is in an earlier line")
            return
        self.trials[trial.id] = trial
        self._places[trial.id] = (start, len(line))

    def _set_aside(self, start: int, length: int, reason: str) -> None:
        """Copy a line to the quarantine file, then blank it in place: no other line moves."""
        with self.path.open("r+b") as stream:
            stream.seek(start)
            line = stream.read(length)
            entry = {
                "when": now(),
                "reason": reason,
                "line": line.decode("utf-8", "backslashreplace"),
            }
            with self.quarantine_path.open("ab") as aside:
                aside.write(_canonical(entry) + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            stream.seek(start)
            stream.write(b" " * length)
            stream.flush()
            os.fsync(stream.fileno())
        self.repairs.append(f"{self.path}: one line was set aside ({reason})")


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
    Path(stream.name).replace(path)
