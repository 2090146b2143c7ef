"""The records of one workload in memory: all that decides which schedule is tried and chosen next.

Of the same records the same follows, in whatever order a ledger received them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tvmflow.core.canonical_json import canonical
from tvmflow.tuning.trials import (
    NOTE_VERSION,
    Ban,
    Baseline,
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
)


class WorkloadRecords:
    """The records of one workload on one target.

    Attributes:
        trials: The trials by id, in the order in which they were added.
        baselines: The time of the untuned kernel, by the version of the schedule rules.
        finalists: The times of finalists, by the digest of what was measured and how.
        libraries: The same of comparisons of libraries.
        bans: The bans of trials, by their ids.
        search_time: The time that searches have spent; None where none has noted it.
        search_ends: The searches that ended, each under the largest budget, by their names.
    """

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}
        self.baselines: dict[int, Baseline] = {}
        self.finalists: dict[str, FinalistsRecord] = {}
        self.libraries: dict[str, LibraryRecord] = {}
        self.bans: dict[str, Ban] = {}
        self.search_time: SearchTime | None = None
        self.search_ends: dict[str, SearchEnd] = {}
        self._exhausted: dict[str, int] = {}
        self._last_when = ""

    def __len__(self) -> int:
        return len(self.trials)

    def keep(self, record: Record | None) -> None:
        """Add a record; of two about the same thing the one counts that `is_news` says.

        Args:
            record: The record; None stands for one of a newer version.
        """
        if isinstance(record, Trial | Baseline):
            self._last_when = max(self._last_when, record.when)
        if isinstance(record, ExhaustedMark):
            self._exhausted[record.search] = record.trials
        elif record is not None and not isinstance(record, FileHeader) and self.is_news(record):
            if isinstance(record, Trial):
                self.trials[record.id] = record
            elif isinstance(record, Baseline):
                self.baselines[record.schedules] = record
            elif isinstance(record, FinalistsRecord):
                self.finalists[record.request] = record
            elif isinstance(record, Ban):
                self.bans[record.trial] = record
            elif isinstance(record, SearchTime):
                self.search_time = record
            elif isinstance(record, SearchEnd):
                self.search_ends[record.search] = record
            else:
                self.libraries[record.request] = record

    def is_news(self, record: Trial | Note) -> bool:
        """Return whether a record is about something unknown, or counts more than the known one.

        Of two the earlier one counts, but of two notes of searches that of the longer one.
        """
        known: Trial | Note | None
        if isinstance(record, Trial):
            known = self.trials.get(record.id)
        elif isinstance(record, Baseline):
            known = self.baselines.get(record.schedules)
        elif isinstance(record, FinalistsRecord):
            known = self.finalists.get(record.request)
        elif isinstance(record, Ban):
            known = self.bans.get(record.trial)
        elif isinstance(record, SearchTime):
            known = self.search_time
        elif isinstance(record, SearchEnd):
            known = self.search_ends.get(record.search)
        else:
            known = self.libraries.get(record.request)
        return known is None or _precedence(record) < _precedence(known)

    def keep_earlier_baseline(self, path: Path) -> None:
        """Add the baseline from the file in which version 0.1 kept it.

        Args:
            path: The file of the workload's trials, beside which that one is.
        """
        try:
            note = json.loads(path.with_name(f"{path.stem}.untuned.json").read_bytes())
            note["baseline"] = note.pop("schedules")
            self.keep(parse_line(canonical({"v": NOTE_VERSION, **note})))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return

    # ---------------------------------------------------------------- views

    def in_order(self) -> list[Trial]:
        """Return the trials in the order of measuring, which all decisions depend on."""
        return sort_by_record(self.trials.values())

    def valid(self) -> list[Trial]:
        """Return the trials that have a time and no ban, fastest first; equal ones in the order of their ids."""
        return sort_by_time(
            trial for trial in self.trials.values() if trial.run_secs and trial.id not in self.bans
        )

    def notes(self) -> list[Note]:
        """Return the records of other kinds in an order that depends on the content alone."""
        return [
            *(self.baselines[version] for version in sorted(self.baselines)),
            *(self.finalists[request] for request in sorted(self.finalists)),
            *(self.libraries[request] for request in sorted(self.libraries)),
            *(self.bans[trial] for trial in sorted(self.bans)),
            *([self.search_time] if self.search_time else []),
            *(self.search_ends[search] for search in sorted(self.search_ends)),
        ]

    def is_exhausted(self, search: str) -> bool:
        """Return whether `search` came to its end and no trial was added since."""
        return self._exhausted.get(search, -1) == len(self)

    def exhausted_searches(self) -> list[str]:
        """Return the searches that came to their end with the present trials."""
        return sorted(filter(self.is_exhausted, self._exhausted))

    def untuned_seconds(self, schedules: int) -> float | None:
        """Return the seconds of an untuned call; None when not measured.

        Args:
            schedules: The version of the schedule rules.
        """
        baseline = self.baselines.get(schedules)
        return baseline.seconds if baseline else None

    def baseline_before_trials(self, schedules: int) -> Baseline | None:
        """Return the time of an untuned call if it was measured before the first trial.

        What is measured later must not change the decisions that led to the present trials.
        """
        baseline = self.baselines.get(schedules)
        first = min((trial.when for trial in self.trials.values()), default="")
        return baseline if baseline and (not first or baseline.when <= first) else None


def header_of(path: Path) -> FileHeader:
    """Return the header that the file of a workload has, by its name and that of its folder."""
    return FileHeader(path.stem, path.parent.name)


def describe_copy(path: Path, header: FileHeader) -> str:
    """Return a sentence for a file that was copied from another workload or target."""
    return (
        f"{path}: it has the records of workload {header.workload[:12]} "
        f"on target {header.target[:12]}, not of its own"
    )


def _precedence(record: Trial | Note) -> tuple[tuple[float, ...], str, bytes]:
    """Return what sorts the longer search first, then the earlier record, and equal ones always alike."""
    length: tuple[float, ...] = ()
    if isinstance(record, SearchTime):
        length = (-record.trials, -record.seconds)
    elif isinstance(record, SearchEnd):
        minutes, limit = record.budget
        length = (-minutes, -limit, -record.share)
    return length, record.when, canonical(record.to_json())


def same_trials(records: WorkloadRecords, trials: Iterable[Trial]) -> bool:
    """Return whether these are all trials, and no others."""
    return records.trials.keys() == {trial.id for trial in trials}
