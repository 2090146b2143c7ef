"""Trials: the record of one measured schedule, and the lines of a ledger file.

The format of a line is `RECORD_VERSION`. A ledger holds hours of tuning: what an earlier
version wrote must stay readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timezone
from statistics import median
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.types import Json

RECORD_VERSION: Final = 1


class Failure(NamedTuple):
    """The reason why a trial has no time: its phase (`apply`, `build`, `run`), kind and message."""

    phase: str
    kind: str
    message: str


class Trial(NamedTuple):
    """One measured schedule of a workload on a target.

    Attributes:
        id: The digest of the trace.
        trace: The decisions from which TVM makes the schedule again.
        run_secs: Seconds of a call, one number for each repeat; empty when the trial failed.
        failure: The reason why there are no times; None when there are.
        when: The time of the record (ISO 8601, UTC).
        tvm: The identity of the TVM build.
        host: The machine, for people: model, architecture, cores, and the threads of the kernel.
        load: The load averages of the machine before the trial; empty for a remote device.
        seed: The seed of the search.
        ran: Start and end of the measurement in seconds since 1970; empty when not known.
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
        """The range of the repeats relative to their median; 0 for a single repeat."""
        return (max(self.run_secs) - min(self.run_secs)) / self.seconds if self.run_secs else 0.0

    def to_json(self) -> Json:
        """Return the record as it is written."""
        return {
            "v": RECORD_VERSION,
            **self._asdict(),
            "failure": self.failure._asdict() if self.failure else None,
        }

    @classmethod
    def from_json(cls, value: Json) -> Trial:
        """Return the trial in a record.

        Raises:
            KeyError: A field is missing.
            TypeError: A field has another type.
            ValueError: A field has a value that no trial has.
        """
        failure = value["failure"]
        run_secs = tuple(float(seconds) for seconds in value["run_secs"])
        if bool(run_secs) == bool(failure):
            raise ValueError("a trial has either times or a failure")
        if not all(0 < seconds < float("inf") for seconds in run_secs):
            raise ValueError("a time is a positive number of seconds")
        if value["id"] != trial_id(value["trace"]):
            raise ValueError("the trace does not have the digest that the record gives")
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


class ExhaustedMark(NamedTuple):
    """A note that `search` found no further candidate when the ledger had this many `trials`."""

    search: str
    trials: int

    def to_json(self) -> Json:
        """Return the mark as it is written."""
        return {
            "v": RECORD_VERSION,
            "exhausted": self.search,
            "trials": self.trials,
            "when": timestamp(),
        }


def parse_line(line: bytes) -> Trial | ExhaustedMark | None:
    """Return the record in one line of a ledger file; None for a blank line or a newer version's.

    Raises:
        ValueError: The line holds anything else; the message says what is wrong.
    """
    if not line.strip():
        return None
    try:
        record = json.loads(line)
        if record["v"] > RECORD_VERSION:
            return None
        if "exhausted" in record:
            return ExhaustedMark(record["exhausted"], record["trials"])
        return Trial.from_json(record)
    except KeyError as error:
        raise ValueError(f"the field {error} is missing") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def trial_id(trace: Json) -> str:
    """Return the sha256 (hex) of a trace in canonical JSON."""
    return digest_of(trace)


def sort_by_time(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials, fastest first, failures last; equal ones in the order of their ids."""
    return sorted(trials, key=lambda trial: (trial.seconds, trial.id))


def timestamp() -> str:
    """Return the current time as records hold it (ISO 8601, UTC)."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
