"""Read, check and prune a whole ledger: its target folders, their workloads and trials.

Reading takes no lock and writes nothing, so it also works on the ledger of another store, on a ledger in use, and on
a read-only ledger.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from tvmflow.core import documents
from tvmflow.core.errors import UsageError
from tvmflow.core.file_locks import Locked
from tvmflow.core.formatting import quoted
from tvmflow.core.types import Json
from tvmflow.store.inventory import size_of
from tvmflow.tuning.ledger import (
    Ledger,
    MachineClass,
    TargetDescription,
    WorkloadDescription,
    WorkloadRecords,
    describe_copy,
    header_of,
)
from tvmflow.tuning.trials import (
    FAILED_TRIAL_START,
    TRIAL_START,
    Ban,
    FileHeader,
    Trial,
    parse_line,
    sort_by_time,
)

WORKLOAD_KEY: Final = re.compile(r"[0-9a-f]{64}")
_TARGET_KEY: Final = re.compile(r"[0-9a-f]{32}")
_UNKNOWN: Final = "not known: about.json is missing or damaged"
_MAX_LINE_BYTES: Final = 16 << 20
_log = logging.getLogger(__name__)


class TargetFolder(NamedTuple):
    """The folder of one target.

    Attributes:
        path: The folder; its name is the target's key.
        description: The content of `about.json`; None if it cannot be trusted.
        problem: The reason why `about.json` cannot be trusted; empty if it can.
    """

    path: Path
    description: TargetDescription | None
    problem: str

    @property
    def key(self) -> str:
        """The target's key."""
        return self.path.name

    @property
    def text(self) -> str:
        """A readable description of the target."""
        return self.description.text if self.description else _UNKNOWN

    @property
    def ledger(self) -> Ledger:
        """The ledger of this target."""
        return Ledger(self.path)

    def workload_files(self, prefixes: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
        """Yield (key, file) of each workload, or of those whose key has one of `prefixes`."""
        for path in sorted(self.path.glob("*.jsonl")):
            key = path.name.removesuffix(".jsonl")
            is_named = WORKLOAD_KEY.fullmatch(key) and key.startswith(tuple(prefixes) or "")
            # Opening a pipe would wait forever.
            if is_named and path.is_file():
                yield key, path


def list_target_folders(root: Path, prefixes: Sequence[str] = ()) -> list[TargetFolder]:
    """Return the target folders of a ledger, or those whose key has one of `prefixes`.

    Raises:
        UsageError: No target has a key with one of the prefixes.
    """
    paths = sorted(root.iterdir()) if root.is_dir() else []
    folders = [_open(path) for path in paths if _TARGET_KEY.fullmatch(path.name) and path.is_dir()]
    for prefix in prefixes:
        if not any(folder.key.startswith(prefix) for folder in folders):
            raise UsageError(
                f"no target in {root} has a key that starts with '{prefix}'",
                fix="run `tvmflow records ls` to see the keys",
            )
    return [folder for folder in folders if folder.key.startswith(tuple(prefixes) or "")]


def _open(path: Path) -> TargetFolder:
    description: TargetDescription | None = None
    try:
        value = documents.read_json(documents.read_file(path / "about.json"))
        description = TargetDescription.from_json(value)
        problem = "" if description.key == path.name else "it describes another target"
    except (ValueError, documents.Unreadable) as error:
        is_there = (path / "about.json").exists()
        problem = f"it cannot be read: {error}" if is_there else "it is missing"
    if problem:
        _log.debug("%s: %s", path / "about.json", problem)
    return TargetFolder(path, None if problem else description, problem)


class RecordsFile(NamedTuple):
    """The usable records of a workload's file, and a sentence for each unusable line."""

    records: WorkloadRecords
    problems: list[str]


def read_records(path: Path) -> RecordsFile:
    """Read all records in a workload's file; a missing file has none."""
    records = WorkloadRecords()
    problems = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            record = parse_line(line)
            if isinstance(record, FileHeader) and record != header_of(path):
                return RecordsFile(WorkloadRecords(), [describe_copy(path, record)])
            records.keep(record)
        except ValueError as error:
            # A last line without a line end is still being written.
            if line.endswith(b"\n"):
                problems.append(f"{path}:{number}: {error}")
    return RecordsFile(records, problems)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; overlong lines are split. Yields nothing if there is no such file."""
    if not path.is_file():
        # opening a pipe would wait forever
        return
    try:
        with path.open("rb") as stream:
            while line := stream.readline(_MAX_LINE_BYTES):
                yield line
    except FileNotFoundError:
        # removed meanwhile
        return


# ---------------------------------------------------------------- ledger check


class LedgerCheck(NamedTuple):
    """The result of a check.

    Attributes:
        findings: A sentence with location for each problem.
        unusable_targets: How many folders have a wrong description, so that exports leave them out.
    """

    targets: int
    workloads: int
    trials: int
    findings: list[str]
    quarantined: int
    unusable_targets: int

    @property
    def clean(self) -> bool:
        """True if every trial can be used (an incomplete last line does not count as a trial)."""
        return not self.quarantined and not self.unusable_targets


def check_ledger(root: Path, targets: Sequence[str] = ()) -> LedgerCheck:
    """Read every line of every workload, and repair damage as a `tune` stage does.

    It also quarantines trials whose TVM build is not their folder's. It reports folders with a wrong description, and
    does not touch the trials in them.
    """
    workloads = trials = quarantined = unusable_targets = 0
    findings = []
    folders = list_target_folders(root, targets)
    for folder in folders:
        if folder.description is None:
            unusable_targets += 1
            findings.append(
                f"{folder.path / 'about.json'}: {folder.problem}; "
                "exports and imports leave this folder out until a `tune` stage on its target repairs it"
            )
        findings += _find_irregular_files(folder)
        for key, path in folder.workload_files():
            if not path.stat().st_size:
                findings.append(f"{path}: it is empty; the trials that it had are lost")
            ledger = folder.ledger.workload(key)
            if folder.description is not None:
                tvm = folder.description.tvm
                foreign = [trial.id for trial in ledger.trials.values() if trial.tvm != tvm]
                ledger.quarantine(foreign, f"it was not measured with TVM {tvm}")
            workloads += 1
            trials += len(ledger)
            quarantined += ledger.quarantined
            findings += ledger.repairs
    return LedgerCheck(
        targets=len(folders),
        workloads=workloads,
        trials=trials,
        findings=findings,
        quarantined=quarantined,
        unusable_targets=unusable_targets,
    )


def _find_irregular_files(folder: TargetFolder) -> list[str]:
    return [
        f"{path}: it is not a regular file, and no tuning can use it; remove it"
        for path in sorted(folder.path.glob("*.jsonl"))
        if not path.is_file()
    ]


class PruneCriteria(NamedTuple):
    """The criteria for trials to remove.

    `keep_best` and `failed` each select trials; without both, all are selected. The others restrict the selection.

    Attributes:
        keep_best: Select successful trials, except this number of each workload's fastest.
        failed: Select failed trials.
        older_than_days: Remove only older trials.
        other_tvm: Remove only trials measured with a TVM build other than the installed one.
    """

    keep_best: int | None = None
    failed: bool = False
    older_than_days: float | None = None
    other_tvm: bool = False


class PruneResult(NamedTuple):
    """The trials of one workload that were removed, or with a dry run would be.

    Attributes:
        skip_reason: The reason why no trial was removed; otherwise empty.
    """

    target: str
    target_text: str
    key: str
    description: WorkloadDescription
    trials: int
    failed: int
    total: int
    skip_reason: str


def prune(
    root: Path,
    criteria: PruneCriteria,
    machine_class: MachineClass,
    *,
    targets: Sequence[str] = (),
    dry_run: bool,
) -> list[PruneResult]:
    """Remove trials and return a result for each workload that loses some.

    Pruned trials may be measured again. A workload that is being tuned is skipped.

    Raises:
        UsageError: No criterion is set.
    """
    if criteria == PruneCriteria():
        raise UsageError(
            "no criterion says which trials to remove",
            fix="give --keep-best N, --failed, --older-than DAYS or --tvm-other",
        )
    results = []
    for folder in list_target_folders(root, targets):
        tvm = folder.description.tvm if folder.description else None
        if criteria.other_tvm and tvm in (None, machine_class.tvm):
            continue
        for key, path in folder.workload_files():
            trials = read_records(path).records.in_order()
            selected = _select(trials, criteria)
            if selected:
                skip_reason = "" if dry_run else _remove(folder, key, selected)
                failed = sum(1 for trial in selected if trial.failure)
                names = (folder.key, folder.text, key, folder.ledger.description(key))
                counts = (len(selected), failed, len(trials))
                results.append(PruneResult(*names, *counts, skip_reason))
    return results


def _select(trials: Sequence[Trial], criteria: PruneCriteria) -> list[Trial]:
    keep_best, older_than_days = criteria.keep_best, criteria.older_than_days
    now = datetime.now(timezone.utc)
    timed = sort_by_time(trial for trial in trials if trial.run_secs)
    kept = {trial.id for trial in timed[: keep_best or 0]}
    any_outcome = keep_best is None and not criteria.failed

    def is_selected(trial: Trial) -> bool:
        outcome = criteria.failed if trial.failure else keep_best is not None
        age_s = (now - datetime.fromisoformat(trial.when)).total_seconds()
        is_old = older_than_days is None or age_s > older_than_days * 86_400
        return (any_outcome or outcome) and trial.id not in kept and is_old

    return [trial for trial in trials if is_selected(trial)]


def _remove(folder: TargetFolder, key: str, trials: Sequence[Trial]) -> str:
    """Remove trials of a workload; return why they cannot be removed, or an empty string."""
    ledger = folder.ledger.workload(key)
    try:
        with ledger.exclusive_search(wait=False):
            ledger.remove(trial.id for trial in trials)
    except Locked:
        _log.debug("workload %s is not pruned: another process tunes it", key[:12])
        return "it is being tuned"
    return ""


# Patterns of canonical records, to count them without parsing their traces.
_SUCCEEDED: Final = TRIAL_START + b"null,"
_WHEN: Final = re.compile(rb'"v":\d+,"when":"([0-9T:.+-]+)"\}\n?$')
_RUN_SECS: Final = re.compile(rb'"run_secs":\[([0-9.,e+-]+)\]')
_TAIL_BYTES: Final = 80
_SHOWN_KEYS: Final = 5


# ---------------------------------------------------------------- counts


class WorkloadSummary(NamedTuple):
    """Counts of one workload; `best_s` and `spread` are of its fastest trial."""

    key: str
    description: WorkloadDescription
    trials: int
    failed: int
    unreadable: int
    best_s: float | None
    spread: float
    first: str
    last: str


class TargetSummary(NamedTuple):
    """Counts of one target; `first` and `last` are the times of its first and last trial (ISO 8601)."""

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
        bytes=sum(map(size_of, files)),
    )


def summarize_workloads(
    folder: TargetFolder, *, with_best: bool = True
) -> Iterator[WorkloadSummary]:
    """Yield the counts of each workload; with `with_best` also its best time and description."""
    for key, path in folder.workload_files():
        counter = _LineCounter(with_best)
        for line in read_lines(path):
            counter.count(line)
        description = folder.ledger.description(key) if with_best else WorkloadDescription()
        counts = (counter.trials, counter.failed, counter.unreadable)
        best = (counter.best_s, counter.spread)
        yield WorkloadSummary(key, description, *counts, *best, counter.first, counter.last)


class _LineCounter:
    """Counts the records of a file; only lines that are not canonical are parsed."""

    def __init__(self, with_best: bool) -> None:
        self._with_best = with_best
        self.trials = self.failed = self.unreadable = 0
        self.first = self.last = ""
        self.best_s: float | None = None
        self.spread = 0.0

    def count(self, line: bytes) -> None:
        when = _WHEN.search(line[-_TAIL_BYTES:])
        failed = line.startswith(FAILED_TRIAL_START)
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
    """Return the trials of the workload whose key starts with `key`, for each target that has it.

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
    """Format a trace, one instruction per line: `v1, v2 = SamplePerfectTile(l0, 2, 64) -> [4, 16]`.

    The arrow is followed by the decision. Operands and attributes have no names in TVM.
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
        # An imported record may contain something other than a trace of TVM: show it verbatim.
        return [json.dumps(trace)]


def _format_operand(value: Json) -> str:
    """Format a variable or an attribute; strings are already quoted in the trace."""
    return value if isinstance(value, str) else json.dumps(value)
