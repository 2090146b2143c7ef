"""Records of a ledger file, one per line: trials, and what else decides the schedule tried or chosen.

The format of a line is its field `v`. A ledger holds hours of tuning: what a later version wrote is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from statistics import median
from typing import Annotated, Final, NamedTuple

from pydantic import AfterValidator, Field, StrictStr, TypeAdapter, ValidationError

from tvmflow.core import documents
from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.choices import choice_text, find_problem
from tvmflow.core.codec import to_json, without_empty
from tvmflow.core.types import Json
from tvmflow.tuning import traces

RECORD_VERSION: Final = 7
"""The version of lines. A line of a newer version is left alone."""

TRIAL_START: Final = b'{"failure":'
FAILED_TRIAL_START: Final = TRIAL_START + b"{"
_YEARS: Final = range(1970, 3000)
_MAX_QUOTED: Final = 80


def _utc(when: str) -> str:
    """Return a time as records hold it: they are sorted by this text."""
    moment = datetime.fromisoformat(when)
    if moment.tzinfo is None:
        raise ValueError("a time needs a time zone")
    if moment.year not in _YEARS:
        raise ValueError("a time needs a plausible year")
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")


_Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_When = Annotated[StrictStr, AfterValidator(_utc)]


def _check_choice(choice: dict[str, int]) -> dict[str, int]:
    if problem := find_problem(choice):
        raise ValueError(problem)
    return choice


_Choice = Annotated[dict[str, Annotated[int, Field(strict=True)]], AfterValidator(_check_choice)]


class Failure(NamedTuple):
    """The reason why a trial has no time: its phase (`apply`, `build`, `run`), kind and message."""

    phase: StrictStr
    kind: StrictStr
    message: StrictStr


class Trial(NamedTuple):
    """One measured schedule of a workload on a target.

    Attributes:
        id: The digest of the trace.
        trace: The decisions from which TVM makes the schedule again.
        run_secs: Seconds of a call, one value for each repeat; empty when the trial failed. Of a
            kernel with dynamic shapes, the geometric mean over those at which it is measured.
        failure: The reason why there are no times; None when there are.
        when: The time of the record (ISO 8601, UTC).
        tvm: The identity of the TVM build.
        host: The machine, for people: model, architecture, cores, and the threads of the kernel.
        load: The load averages of the machine before the trial; empty for a remote device.
        seed: The seed of the search.
        ran: Start and end of the measurement in seconds since 1970; empty when not known.
        size_secs: The seconds at each of several sizes, in the order in which the workload has them.
    """

    id: _Digest
    trace: Json
    run_secs: tuple[_Seconds, ...]
    failure: Failure | None
    when: _When
    tvm: StrictStr
    host: Json
    load: tuple[_Number, ...]
    seed: _Count
    ran: tuple[_Number, ...] = ()
    size_secs: tuple[tuple[_Seconds, ...], ...] = ()

    @property
    def seconds(self) -> float:
        """The median of the repeats; infinity when the trial failed."""
        return median(self.run_secs) if self.run_secs else float("inf")

    @property
    def spread(self) -> float:
        """The range of the repeats relative to their median; 0 for a single repeat."""
        return (max(self.run_secs) - min(self.run_secs)) / self.seconds if self.run_secs else 0.0


class ExhaustedMark(NamedTuple):
    """A note that `search` found no further candidate when the ledger had this many `trials`."""

    search: StrictStr
    trials: _Count
    when: _When


class Baseline(NamedTuple):
    """The time of the untuned kernel, which tuning has to beat.

    Attributes:
        schedules: The version of the schedule rules that gave the kernel its schedule.
        least_s: Seconds of a call at the roofline of the machine; 0 when not known.
    """

    schedules: _Count
    seconds: _Seconds
    when: _When
    least_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0


class FinalistsRecord(NamedTuple):
    """The interleaved times of a workload's finalists.

    Attributes:
        request: The digest of what was measured and how.
        rule: The schedule rule of the untuned kernel.
        untuned: One sample a round of the untuned kernel; a single one where it takes long.
        samples: One sample a round for each finalist; none for one that does not apply.
        sizes: For a kernel that is measured at several sizes, the seconds at each: of the untuned kernel,
            then of each finalist. The others are geometric means.
    """

    request: _Digest
    rule: StrictStr
    untuned: tuple[_Seconds, ...]
    samples: tuple[tuple[_Seconds, ...], ...]
    when: _When
    sizes: tuple[tuple[tuple[_Seconds, ...], ...], ...] = ()


class LibraryRecord(NamedTuple):
    """The comparison of a whole tuned library with the untuned one, interleaved.

    Attributes:
        request: The digest of what was compared and how.
        slower: The workloads whose tuned kernels are slower in the library than untuned, by key.
        tuned: Seconds of a call of the library with the other schedules; none if there are none.
        untuned: Seconds of the untuned library in the same interleaved measurement.
        sizes: For a library that is measured at several sizes, the seconds at each: tuned, then untuned.
            The others are geometric means.
    """

    request: _Digest
    slower: tuple[_Digest, ...]
    tuned: tuple[_Seconds, ...]
    untuned: tuple[_Seconds, ...]
    when: _When
    sizes: tuple[tuple[tuple[_Seconds, ...], ...], ...] = ()


class Ban(NamedTuple):
    """A note that the kernel of a trial computes wrong values: its schedule is never chosen."""

    trial: _Digest
    reason: StrictStr
    when: _When


class SearchTime(NamedTuple):
    """The time that all searches together have spent on the workload.

    Attributes:
        seconds: Seconds of proposing, building and measuring.
        trials: The trials that the ledger had then.
    """

    seconds: _Seconds
    trials: _Count
    when: _When


class SearchEnd(NamedTuple):
    """A note that a search ended by itself: the workload has had its share of that budget.

    Attributes:
        search: The search, with everything that shapes it except its budget.
        limit: Trials of all workloads together that it was allowed.
        minutes: Minutes that it was allowed; None without a limit.
        share: The share of the workload in the untuned time of an inference; 1 if it was not known.
        trials: The trials that the ledger had of the workload then.
    """

    search: StrictStr
    limit: _Count
    minutes: _Seconds | None
    share: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    trials: _Count
    when: _When

    @property
    def budget(self) -> tuple[float, int]:
        """The limits as a key that sorts a larger budget behind a smaller one."""
        return (float("inf") if self.minutes is None else self.minutes), self.limit


class ChoiceTimes(NamedTuple):
    """The times of an operator computed by rule and otherwise, interleaved in whole libraries.

    Attributes:
        choice: What was chosen otherwise.
        seconds: Seconds of all of its kernels in a call of the one library.
        rule_seconds: Those in the other one.
        calls: How often the library called them.
    """

    choice: _Choice
    rule: _Choice
    seconds: tuple[_Seconds, ...]
    rule_seconds: tuple[_Seconds, ...]
    calls: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
    when: _When

    @property
    def key(self) -> str:
        """Both choices, which distinguish it from other records about the operator."""
        return f"{choice_text(self.choice)} {choice_text(self.rule)}"

    @property
    def ratio(self) -> float:
        """The time relative to that by rule, of the shortest of each, which no other process disturbed."""
        return min(self.seconds) / min(self.rule_seconds)


class FileHeader(NamedTuple):
    """The workload and target that a ledger file is for; reveals files copied from another one."""

    workload: StrictStr
    target: StrictStr


Note = Baseline | FinalistsRecord | LibraryRecord | Ban | SearchTime | SearchEnd | ChoiceTimes
"""What a ledger keeps beside trials, because it decides which schedule is tried or chosen."""

Record = Trial | ExhaustedMark | Note | FileHeader
"""What a line of a ledger file holds."""


# What the first field of each kind is called in a line, by which the kind is known.
_NAMES: Final[Mapping[type[Record], str]] = {
    ExhaustedMark: "exhausted",
    Baseline: "baseline",
    FinalistsRecord: "finalists",
    LibraryRecord: "library",
    Ban: "ban",
    SearchTime: "spent",
    SearchEnd: "ended",
    ChoiceTimes: "choice",
    FileHeader: "header",
    # What every trial has is an id, so that it comes last.
    Trial: "id",
}
RECORD_STARTS: Final = tuple(
    f'{{"{min((name, *kind._fields[1:]))}":'.encode()
    for kind, name in _NAMES.items()
    if kind is not FileHeader
)
"""The first bytes of each kind of record in its canonical form, whose keys are sorted."""

# The fields that are left out where they are empty.
_OPTIONAL: Final = frozenset({"least_s", "sizes", "size_secs"})
_ADAPTERS: Final[Mapping[type[Record], TypeAdapter[Record]]] = {
    kind: TypeAdapter[Record](kind) for kind in _NAMES
}


def record_to_json(record: Record) -> dict[str, Json]:
    """Return the written form of a record."""
    fields = to_json(record)
    (_, first), *others = without_empty(fields, _OPTIONAL & fields.keys()).items()
    return {"v": RECORD_VERSION, _NAMES[type(record)]: first, **dict(others)}


def to_line(record: Record) -> bytes:
    """Return a record as a line of a file."""
    return canonical(record_to_json(record)) + b"\n"


def parse_line(line: bytes) -> Record | None:
    """Return the record in one line of a ledger file; None for a blank line or a newer version's.

    Raises:
        ValueError: The line holds anything else; the message says what is wrong.
    """
    if not line.strip():
        return None
    record = read_object(line)
    version = record.pop("v", None)
    if type(version) is not int or version < 1:
        raise ValueError("the field 'v' is not a version")
    if version > RECORD_VERSION:
        return None
    try:
        kind = next((kind for kind, name in _NAMES.items() if name in record), Trial)
        if kind is not Trial:
            record[kind._fields[0]] = record.pop(_NAMES[kind])
        parsed = _ADAPTERS[kind].validate_python(record)
    except ValidationError as error:
        raise ValueError(_describe(error)) from error
    _check(parsed)
    return parsed


def read_object(line: bytes) -> dict[str, Json]:
    """Return the JSON object in a line that anybody may have written.

    Raises:
        ValueError: The line holds anything else.
    """
    try:
        value = documents.read_json(line.decode().encode())
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except documents.Unreadable as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _check(record: Record) -> None:
    """Raise ValueError for a wrong trial, or for lists of times of different lengths."""
    if isinstance(record, Trial):
        _check_trial(record)
        return
    if isinstance(record, ChoiceTimes):
        if not record.seconds or len(record.seconds) != len(record.rule_seconds):
            raise ValueError("the field 'seconds' has another number of times than there are turns")
        return
    if isinstance(record, FinalistsRecord):
        subjects: tuple[tuple[float, ...], ...] = (record.untuned, *record.samples)
    elif isinstance(record, LibraryRecord):
        subjects = (record.tuned, record.untuned)
    else:
        return
    if not record.sizes:
        return
    counts = [[len(row) for row in rows] for rows in record.sizes]
    number = max(map(len, counts))
    if len(counts) != len(subjects) or any(
        row != [len(samples)] * number and (row or samples)
        for row, samples in zip(counts, subjects, strict=True)
    ):
        raise ValueError("the field 'sizes' has other numbers of times than there are turns")


def _check_trial(trial: Trial) -> None:
    if bool(trial.run_secs) == bool(trial.failure):
        raise ValueError("a trial has either times or a failure")
    if any(len(seconds) != len(trial.run_secs) for seconds in trial.size_secs):
        raise ValueError("a trial has other numbers of repeats at some sizes")
    if not traces.has_form(trial.trace):
        raise ValueError("its trace is malformed")
    if problem := traces.find_problem(trial.trace):
        raise ValueError(problem)
    if trial.id != trial_id(trial.trace):
        raise ValueError("the trace does not have the digest that the record gives")


def _describe(error: ValidationError) -> str:
    """Return one sentence for the first problem of a record: the field, and what is wrong with it."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, problem["loc"]))[:_MAX_QUOTED]
    if problem["type"] == "missing":
        return f"the field '{field}' is missing"
    return f"the field '{field}' is wrong: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def trial_id(trace: Json) -> str:
    """Return the sha256 (hex) of a trace in canonical JSON."""
    return digest_of(trace)


def sort_by_time(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials, fastest first, failures last; equal ones in the order of their ids."""
    return sorted(trials, key=lambda trial: (trial.seconds, trial.id))


def sort_by_record(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials in the order of measuring, whatever the order in which a ledger received them."""
    return sorted(trials, key=lambda trial: (trial.when, trial.id))


def is_ahead_of_clock(when: str) -> bool:
    """Return whether a record's time is more than a day ahead: more than clocks differ."""
    return datetime.fromisoformat(when) > datetime.now(timezone.utc) + timedelta(days=1)


def timestamp(after: str = "") -> str:
    """Return the current time as records hold it (ISO 8601, UTC), in any case a later one than `after`.

    A record must not be sorted before earlier ones, though they may come from a machine whose clock is ahead.
    """
    now = datetime.now(timezone.utc)
    if after:
        now = max(now, datetime.fromisoformat(after) + timedelta(milliseconds=1))
    return now.isoformat(timespec="milliseconds")
