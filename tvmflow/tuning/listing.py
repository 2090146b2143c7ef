"""Lists what a ledger holds: counts for each target and workload, and the trials of one workload.

Counting holds one line in memory at a time, however large the ledger is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import quoted
from tvmflow.core.types import Json
from tvmflow.tuning.ledger import WorkloadDescription
from tvmflow.tuning.ledger_folders import (
    TargetFolder,
    list_target_folders,
    read_lines,
    read_records,
)
from tvmflow.tuning.trials import Ban, Trial, parse_line, sort_by_time

# How canonical records look: enough to count them without parsing their traces.
_SUCCEEDED: Final = b'{"failure":null,'
_FAILED: Final = b'{"failure":{'
_WHEN: Final = re.compile(rb'"v":1,"when":"([0-9T:.+-]+)"\}\n?$')
_RUN_SECS: Final = re.compile(rb'"run_secs":\[([0-9.,e+-]+)\]')
_TAIL_BYTES: Final = 80
_SHOWN_KEYS: Final = 5


# ---------------------------------------------------------------- counts


class WorkloadSummary(NamedTuple):
    """Counts of one workload: `best_s` and `spread` are those of its fastest trial."""

    key: str
    description: WorkloadDescription
    trials: int
    failed: int
    unreadable: int
    best_s: float | None
    spread: float
    first: str
    last: str

    def to_json(self) -> Json:
        """Return the summary for `--json`."""
        return {**self._asdict(), "description": self.description.to_json()}


class TargetSummary(NamedTuple):
    """Counts of one target; `first` and `last` are the times of its trials (ISO 8601)."""

    key: str
    description: Json
    text: str
    workloads: int
    trials: int
    failed: int
    unreadable: int
    quarantined: int
    first: str
    last: str
    bytes: int


def summarize_target(folder: TargetFolder) -> TargetSummary:
    """Return the counts of a target."""
    summaries = list(summarize_workloads(folder, with_best=False))
    files = [path for path in folder.path.glob("*") if path.is_file()]
    quarantines = [path for path in files if path.name.endswith(".quarantine.jsonl")]
    return TargetSummary(
        key=folder.key,
        description=folder.description.to_json() if folder.description else {},
        text=folder.text,
        workloads=sum(1 for summary in summaries if summary.trials),
        trials=sum(summary.trials for summary in summaries),
        failed=sum(summary.failed for summary in summaries),
        unreadable=sum(summary.unreadable for summary in summaries),
        quarantined=sum(1 for path in quarantines for _ in read_lines(path)),
        first=min((summary.first for summary in summaries if summary.first), default=""),
        last=max((summary.last for summary in summaries), default=""),
        bytes=sum(_size(path) for path in files),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def summarize_workloads(
    folder: TargetFolder, *, with_best: bool = True
) -> Iterator[WorkloadSummary]:
    """Yield the counts of each workload; `with_best` also its best time and its description."""
    for key, path in folder.workload_files():
        counter = _LineCounter(with_best)
        for line in read_lines(path):
            counter.count(line)
        description = folder.ledger.description(key) if with_best else WorkloadDescription()
        counts = (counter.trials, counter.failed, counter.unreadable)
        best = (counter.best_s, counter.spread)
        yield WorkloadSummary(key, description, *counts, *best, counter.first, counter.last)


class _LineCounter:
    """Counts the lines of a file; only those that are not canonical records are parsed."""

    def __init__(self, with_best: bool) -> None:
        self._with_best = with_best
        self.trials = self.failed = self.unreadable = 0
        self.first = self.last = ""
        self.best_s: float | None = None
        self.spread = 0.0

    def count(self, line: bytes) -> None:
        when = _WHEN.search(line[-_TAIL_BYTES:])
        failed = line.startswith(_FAILED)
        if when is None or not (failed or line.startswith(_SUCCEEDED)):
            self._count_parsed(line)
            return
        match = _RUN_SECS.search(line) if self._with_best and not failed else None
        run_secs = tuple(float(number) for number in match[1].split(b",")) if match else ()
        self._add(failed, when[1].decode(), run_secs)

    def _count_parsed(self, line: bytes) -> None:
        try:
            record = parse_line(line)
        except ValueError:
            self.unreadable += 1
            return
        if isinstance(record, Trial):
            self._add(record.failure is not None, record.when, record.run_secs)

    def _add(self, failed: bool, when: str, run_secs: tuple[float, ...]) -> None:
        self.trials += 1
        self.failed += failed
        self.first = min(filter(None, (self.first, when)), default="")
        self.last = max(self.last, when)
        if run_secs and (self.best_s is None or median(run_secs) < self.best_s):
            self.best_s = median(run_secs)
            self.spread = (max(run_secs) - min(run_secs)) / self.best_s


# ---------------------------------------------------------------- trials


class WorkloadTrials(NamedTuple):
    """All trials of one workload on one target, fastest first."""

    target: str
    target_text: str
    key: str
    description: WorkloadDescription
    trials: list[Trial]
    problems: list[str]
    bans: dict[str, Ban]


def find_workload_trials(root: Path, key: str, targets: Sequence[str] = ()) -> list[WorkloadTrials]:
    """Return the trials of the workload whose key starts with `key`, for each target that has some.

    Raises:
        UsageError: No workload has such a key, or several have.
    """
    matches = [
        (folder, workload, path)
        for folder in list_target_folders(root, targets)
        for workload, path in folder.workload_files([key])
    ]
    keys = sorted({workload for _, workload, _ in matches})
    fix = "`tvmflow records ls --workloads` shows the keys"
    if not keys:
        raise UsageError(f"no workload has a key that begins with {quoted(key)}", fix=fix)
    if len(keys) > 1:
        shown = ", ".join(workload[:12] for workload in keys[:_SHOWN_KEYS])
        raise UsageError(
            f"'{key}' is the beginning of the keys of {len(keys)} workloads: {shown}",
            fix=f"give more digits; {fix}",
        )
    return [read_workload_trials(folder, workload, path) for folder, workload, path in matches]


def read_workload_trials(folder: TargetFolder, key: str, path: Path) -> WorkloadTrials:
    """Return the trials of a workload from its file in the folder of a target."""
    records, problems = read_records(path)
    names = (folder.key, folder.text, key, folder.ledger.description(key))
    return WorkloadTrials(*names, sort_by_time(records.trials.values()), problems, records.bans)


def format_trace(trace: Json) -> list[str]:
    """Return a trace, one instruction a line: `v1, v2 = SamplePerfectTile(l0, 2, 64) -> [4, 16]`.

    The decision stands after the arrow. TVM names neither operands nor attributes.
    """
    try:
        instructions, decisions = trace
        decided = {index: f" -> {json.dumps(decision)}" for index, decision in decisions}
        return [
            f"{', '.join(results)}{' = ' if results else ''}{kind}"
            f"({', '.join(map(_format_operand, (*operands, *attributes)))}){decided.get(index, '')}"
            for index, (kind, operands, attributes, results) in enumerate(instructions)
        ]
    except (ValueError, TypeError):
        # An imported record may hold something that is not a trace of TVM: shown as it is.
        return [json.dumps(trace)]


def _format_operand(value: Json) -> str:
    """Return a variable or an attribute; operands that are strings are quoted in the trace already."""
    return value if isinstance(value, str) else json.dumps(value)
