"""Prunes a ledger: removes the trials that fit given criteria."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import UsageError
from tvmflow.core.file_locks import Locked
from tvmflow.core.types import Json
from tvmflow.tuning.ledger import MachineClass, WorkloadDescription
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders, read_records
from tvmflow.tuning.trials import Trial, sort_by_time

_log = logging.getLogger(__name__)


class PruneCriteria(NamedTuple):
    """The criteria for trials to remove: those that fit all criteria that are set.

    Attributes:
        keep_best: Keep this many of each workload's fastest trials, and all failures.
        failed: Remove failures alone; with `keep_best`, failures and all but the best.
        older_than_days: Remove only older trials.
        other_tvm: Remove only what another TVM build measured than the installed one.
    """

    keep_best: int | None = None
    failed: bool = False
    older_than_days: float | None = None
    other_tvm: bool = False


class PruneResult(NamedTuple):
    """The trials of one workload that were removed, or would be.

    Attributes:
        trials: How many are removed.
        failed: How many of them are failures.
        total: How many trials the workload had.
        skip_reason: The reason why none was removed; otherwise empty.
    """

    target: str
    target_text: str
    key: str
    description: WorkloadDescription
    trials: int
    failed: int
    total: int
    skip_reason: str

    def to_json(self) -> Json:
        """Return the result for `--json`."""
        return {**self._asdict(), "description": self.description.to_json()}


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

    Args:
        root: The ledger.
        criteria: Which trials to remove.
        machine_class: This machine's class, for `other_tvm`.
        targets: Prefixes of target keys; all targets when empty.
        dry_run: Remove nothing.

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
    """Return the trials that fit all criteria."""
    keep_best, older_than = criteria.keep_best, criteria.older_than_days
    timed = sort_by_time(trial for trial in trials if trial.run_secs)
    kept = {trial.id for trial in timed[: keep_best or 0]}
    any_outcome = keep_best is None and not criteria.failed

    def is_selected(trial: Trial) -> bool:
        outcome = criteria.failed if trial.failure else keep_best is not None
        is_old = older_than is None or _age_days(trial.when) > older_than
        return (any_outcome or outcome) and trial.id not in kept and is_old

    return [trial for trial in trials if is_selected(trial)]


def _age_days(when: str) -> float:
    """Return the age of a record; 0 when its time cannot be read."""
    try:
        recorded = datetime.fromisoformat(when)
    except ValueError:
        return 0.0
    recorded = recorded if recorded.tzinfo else recorded.replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - recorded).total_seconds() / 86_400


def _remove(folder: TargetFolder, key: str, trials: Sequence[Trial]) -> str:
    """Remove trials of a workload; return the reason when they cannot be removed."""
    ledger = folder.ledger.workload(key)
    try:
        with ledger.exclusive_search(wait=False):
            ledger.remove(trial.id for trial in trials)
    except Locked:
        _log.debug("workload %s is not pruned: another process tunes it", key[:12])
        return "it is being tuned"
    return ""
