"""Imports records into a ledger: which targets it accepts, and of those the records that it lacks.

This is the one way by which records from elsewhere enter a ledger: from packs, other stores,
remote caches, lock files. A ledger accepts a target's trials only if this machine could have measured them itself or if
it has trials on that target already: times of another device or TVM build mislead a search.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import UsageError
from tvmflow.core.types import Json
from tvmflow.tuning import traces
from tvmflow.tuning.ledger import Ledger, MachineClass, TargetDescription, WorkloadDescription
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders, read_records
from tvmflow.tuning.replay import TraceCheck, TraceVerdict
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
    is_ahead_of_clock,
)
from tvmflow.tuning.workload_ledger import same_trials

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
    """Problems with single records: all of them are counted, and the first ones kept.

    Attributes:
        count: How many there are.
        sentences: The first of them, each with its place.
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
        target: The key of the target.
        workload: The key of the workload.
        description: The workload for people.
        exhausted: The searches that came to their end with exactly these trials.
        kernel: The saved kernel, which nobody has checked; empty where it is not known.
        records: Trials, baselines and times of finalists.
        invalid: What cannot be used.
    """

    target: str
    workload: str
    description: WorkloadDescription
    exhausted: tuple[str, ...] = ()
    kernel: str = ""
    records: list[Record] = field(default_factory=list)
    invalid: Problems = field(default_factory=Problems)


class TargetImport(NamedTuple):
    """The outcome for one target: rejected for a reason, or the numbers of its trials.

    Attributes:
        rejection: The reason why nothing was imported; otherwise empty.
        new: Trials that the ledger lacked.
        known: Trials that it had.
        invalid: Trials that cannot be used.
    """

    target: str
    target_text: str
    rejection: str
    workloads: int = 0
    new: int = 0
    known: int = 0
    invalid: int = 0


class ImportResult(NamedTuple):
    """The outcome of an import; `problems` are the first ones of single records, with their places."""

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
    """Add to a ledger the records that it accepts and lacks.

    Args:
        root: The ledger.
        source: Where the trials come from, for messages.
        descriptions: The targets by key; each key was checked.
        workloads: The trials to import.
        machine_class: This machine's class.
        checker: Applies each trace to its kernel first; None to leave that to the tuning.

    Raises:
        UsageError: All targets are rejected; then nothing was changed.
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
    """Add the records of one workload; return the target's new counts."""
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
    """Return why a ledger refuses a record; an empty string when it does not."""
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
    """Return why a ledger does not accept trials on a target; an empty string when it does."""
    if description.machine_class == machine_class:
        return ""
    known = [folder.description for folder in list_target_folders(root) if folder.description]
    if any(other.key == description.key for other in known):
        return ""
    # Compared with the nearest target of this ledger, the differences are fewest.
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
    """Add to a ledger what another one has and it lacks. The other one is only read.

    Args:
        source: A store, or the ledger in it.
        root: The ledger to add to.
        machine_class: This machine's class.
        checker: Applies each trace to its kernel first; None to leave that to the tuning.

    Raises:
        UsageError: `source` is no ledger, is this one, or has no target that is accepted.
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
    workloads = _read_workloads(folders)
    result = import_trials(root, str(source), descriptions, workloads, machine_class, checker)
    unusable = [
        TargetImport(folder.key, folder.text, f"about.json: {folder.problem}")
        for folder in folders
        if folder.description is None
    ]
    return result._replace(targets=result.targets + unusable)


def _read_workloads(folders: Iterable[TargetFolder]) -> Iterator[ImportedWorkload]:
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
