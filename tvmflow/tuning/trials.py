"""Records of a ledger file: trials, and other facts that decide which schedule is tried or chosen.

Each line is a record, whose field `v` is the format version. A ledger contains hours of tuning, so lines of a newer
version are kept unchanged.
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
"""The format version of lines; lines of a newer version are kept unchanged."""

TRIAL_START: Final = b'{"failure":'
FAILED_TRIAL_START: Final = TRIAL_START + b"{"
_YEARS: Final = range(1970, 3000)
_MAX_QUOTED: Final = 80


def _utc(when: str) -> str:
    """Return a time in UTC, in a form that sorts by time as text."""
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
    """Why a trial failed: the phase (`apply`, `build`, `run`), the kind of failure, and a message."""

    phase: StrictStr
    kind: StrictStr
    message: StrictStr


class Trial(NamedTuple):
    """One measured schedule of a workload on a target.

    Attributes:
        id: The digest of the trace.
        trace: The instructions and decisions from which TVM makes the schedule again.
        run_secs: Seconds per call, one value for each repeat; empty if the trial failed. For a kernel with dynamic
            shapes, the geometric means over the measured sizes.
        failure: Why there are no times; None if there are.
        when: The time of the record (ISO 8601, UTC).
        tvm: The identity of the TVM build.
        host: A description of the machine: model, architecture, cores, and the threads of the kernel.
        load: The load averages of the machine before the trial; empty for a remote device.
        seed: The seed of the search.
        ran: Start and end of the measurement in seconds since 1970; empty if unknown.
        size_secs: The seconds of each repeat at each of several sizes, in the workload's order of sizes.
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
        """The median of the repeats; infinity if the trial failed."""
        return median(self.run_secs) if self.run_secs else float("inf")

    @property
    def spread(self) -> float:
        """The range of the repeats relative to their median; 0 for a single repeat."""
        return (max(self.run_secs) - min(self.run_secs)) / self.seconds if self.run_secs else 0.0


class ExhaustedMark(NamedTuple):
    """A note that `search` found no more candidates when the ledger had this many `trials`."""

    search: StrictStr
    trials: _Count
    when: _When


class Baseline(NamedTuple):
    """The time of the untuned kernel, which tuning has to beat.

    Attributes:
        schedules: The version of the schedule rules that gave the kernel its schedule.
        least_s: Seconds per call at the machine's roofline; 0 if unknown.
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
        untuned: The untuned kernel's samples, one per round; a single one if it takes long.
        samples: The samples of each finalist, one per round; none if it does not apply.
        sizes: For a kernel that is measured at several sizes, the seconds at each size: of the untuned kernel, then
            of each finalist. The other fields have geometric means.
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
        slower: The keys of the workloads whose tuned kernels are slower in the library than the untuned ones.
        tuned: Seconds per call of the library with the remaining tuned kernels; empty if none remain.
        untuned: Seconds per call of the untuned library, measured interleaved with the tuned one.
        sizes: For a library that is measured at several sizes, the seconds at each size: tuned, then untuned. The
            other fields have geometric means.
    """

    request: _Digest
    slower: tuple[_Digest, ...]
    tuned: tuple[_Seconds, ...]
    untuned: tuple[_Seconds, ...]
    when: _When
    sizes: tuple[tuple[tuple[_Seconds, ...], ...], ...] = ()


class Ban(NamedTuple):
    """A note that a trial's kernel computes wrong values, so that its schedule is never chosen."""

    trial: _Digest
    reason: StrictStr
    when: _When


class SearchTime(NamedTuple):
    """The time that all searches together have spent on the workload.

    Attributes:
        seconds: Seconds of proposing, building and measuring.
        trials: How many trials the ledger had when this was recorded.
    """

    seconds: _Seconds
    trials: _Count
    when: _When


class SearchEnd(NamedTuple):
    """A note that a search ended before its budget, so that the workload gets no more trials of it.

    Attributes:
        search: The name of the search, with everything that influences it except its budget.
        limit: The budget in trials of all workloads together.
        minutes: The budget in minutes; None without a limit.
        share: The workload's share of the untuned time of an inference; 1 if it was unknown.
        trials: How many trials of the workload the ledger had at the end.
    """

    search: StrictStr
    limit: _Count
    minutes: _Seconds | None
    share: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    trials: _Count
    when: _When

    @property
    def budget(self) -> tuple[float, int]:
        """A sort key, larger for a larger budget."""
        return (float("inf") if self.minutes is None else self.minutes), self.limit


class ChoiceTimes(NamedTuple):
    """The times of an operator's alternative and of the rule's choice, interleaved in whole libraries.

    Attributes:
        choice: The alternative to the rule's choice.
        seconds: Total times of the operator's kernels per call, in the library with the alternative.
        rule_seconds: The same in the library with the rule's choice.
        calls: How often a call of the library computes the operator.
    """

    choice: _Choice
    rule: _Choice
    seconds: tuple[_Seconds, ...]
    rule_seconds: tuple[_Seconds, ...]
    calls: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
    when: _When

    @property
    def key(self) -> str:
        """Both choices: the key of the record within its operator."""
        return f"{choice_text(self.choice)} {choice_text(self.rule)}"

    @property
    def ratio(self) -> float:
        """The minimum time relative to the rule's; other processes disturb minimum times least."""
        return min(self.seconds) / min(self.rule_seconds)


class FileHeader(NamedTuple):
    """The workload and target of a ledger file; reveals files copied from another workload or target."""

    workload: StrictStr
    target: StrictStr


Note = Baseline | FinalistsRecord | LibraryRecord | Ban | SearchTime | SearchEnd | ChoiceTimes
"""The records besides trials that decide which schedule is tried or chosen."""

Record = Trial | ExhaustedMark | Note | FileHeader
"""A line of a ledger file."""


# The name in a line of each kind's first field, which identifies the kind.
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
    # every trial has an id; this name is tried last, after the names of all other kinds
    Trial: "id",
}
RECORD_STARTS: Final = tuple(
    f'{{"{min((name, *kind._fields[1:]))}":'.encode()
    for kind, name in _NAMES.items()
    if kind is not FileHeader
)
"""The first bytes of each kind of record in canonical form, which sorts the keys."""

# The fields that are omitted if they are empty.
_OPTIONAL: Final = frozenset({"least_s", "sizes", "size_secs"})
_ADAPTERS: Final[Mapping[type[Record], TypeAdapter[Record]]] = {
    kind: TypeAdapter[Record](kind) for kind in _NAMES
}


def record_to_json(record: Record) -> dict[str, Json]:
    """Return a record as the JSON object of its line."""
    fields = to_json(record)
    (_, first), *others = without_empty(fields, _OPTIONAL & fields.keys()).items()
    return {"v": RECORD_VERSION, _NAMES[type(record)]: first, **dict(others)}


def to_line(record: Record) -> bytes:
    """Return a record as a line of a file."""
    return canonical(record_to_json(record)) + b"\n"


def parse_line(line: bytes) -> Record | None:
    """Return the record in one line of a ledger file; None for a blank one, or a newer version.

    Raises:
        ValueError: The line is not a record; the message says why.
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
    """Return the JSON object in an untrusted line.

    Raises:
        ValueError: The line is not a JSON object.
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
    """Raise ValueError for an invalid trial, or if lists of times differ in length."""
    if isinstance(record, Trial):
        _check_trial(record)
        return
    if isinstance(record, ChoiceTimes):
        if not record.seconds or len(record.seconds) != len(record.rule_seconds):
            raise ValueError("the field 'seconds' does not have one time per round")
        return
    if isinstance(record, FinalistsRecord):
        kernels: tuple[tuple[float, ...], ...] = (record.untuned, *record.samples)
    elif isinstance(record, LibraryRecord):
        kernels = (record.tuned, record.untuned)
    else:
        return
    if not record.sizes:
        return
    counts = [[len(row) for row in rows] for rows in record.sizes]
    sizes = max(map(len, counts))
    if len(counts) != len(kernels) or any(
        row != [len(samples)] * sizes and (row or samples)
        for row, samples in zip(counts, kernels, strict=True)
    ):
        raise ValueError("the field 'sizes' does not have one time per round")


def _check_trial(trial: Trial) -> None:
    if bool(trial.run_secs) == bool(trial.failure):
        raise ValueError("a trial has either times or a failure")
    if any(len(seconds) != len(trial.run_secs) for seconds in trial.size_secs):
        raise ValueError("a trial's number of repeats differs between sizes")
    if not traces.has_form(trial.trace):
        raise ValueError("its trace is malformed")
    if problem := traces.find_problem(trial.trace):
        raise ValueError(problem)
    if trial.id != trial_id(trial.trace):
        raise ValueError("the trace does not have the digest that the record gives")


def _describe(error: ValidationError) -> str:
    """Return a sentence about the first problem of a record: the field and its problem."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, problem["loc"]))[:_MAX_QUOTED]
    if problem["type"] == "missing":
        return f"the field '{field}' is missing"
    return f"the field '{field}' is wrong: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def trial_id(trace: Json) -> str:
    """Return the sha256 (hex) of a trace in canonical JSON."""
    return digest_of(trace)


def sort_by_time(trials: Iterable[Trial]) -> list[Trial]:
    """Sort trials by time, failures last, and then by id."""
    return sorted(trials, key=lambda trial: (trial.seconds, trial.id))


def sort_by_record(trials: Iterable[Trial]) -> list[Trial]:
    """Sort trials by the time of their measurement, independent of the order in the ledger."""
    return sorted(trials, key=lambda trial: (trial.when, trial.id))


def is_ahead_of_clock(when: str) -> bool:
    """Return whether a record's time is over a day in the future; clocks usually differ less."""
    return datetime.fromisoformat(when) > datetime.now(timezone.utc) + timedelta(days=1)


def timestamp(after: str = "") -> str:
    """Return the current time in the form of records (ISO 8601, UTC); always later than `after`.

    A new record must be sorted after existing ones, even if those are from a machine whose clock is ahead.
    """
    now = datetime.now(timezone.utc)
    if after:
        now = max(now, datetime.fromisoformat(after) + timedelta(milliseconds=1))
    return now.isoformat(timespec="milliseconds")
