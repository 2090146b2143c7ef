"""Checks a whole ledger: reads every line and quarantines what cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders


class LedgerCheck(NamedTuple):
    """The result of a check.

    Attributes:
        targets: How many target folders were read.
        workloads: How many workloads.
        trials: How many trials can be used.
        findings: A sentence with its place for each problem.
        quarantined: How many lines were quarantined.
        unusable_targets: How many folders are left out of exports, because their description is wrong.
    """

    targets: int
    workloads: int
    trials: int
    findings: list[str]
    quarantined: int
    unusable_targets: int

    @property
    def clean(self) -> bool:
        """True if every trial can be used (an incomplete last line never was a trial)."""
        return not self.quarantined and not self.unusable_targets


def check_ledger(root: Path, targets: Sequence[str] = ()) -> LedgerCheck:
    """Read every line of every workload and repair what is damaged, as a tuning would.

    It also quarantines trials of another TVM build than their folder's, and reports folders
    whose description is wrong; the trials in those are not touched.
    """
    workloads = trials = quarantined = unusable_targets = 0
    findings = []
    folders = list_target_folders(root, targets)
    for folder in folders:
        if folder.description is None:
            unusable_targets += 1
            findings.append(
                f"{folder.path / 'about.json'}: {folder.problem}; "
                "exports and imports leave this folder out until a tuning on its target puts it right"
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
    return LedgerCheck(len(folders), workloads, trials, findings, quarantined, unusable_targets)


def _find_irregular_files(folder: TargetFolder) -> list[str]:
    """Return a sentence for each thing that has a workload's name and is not a file: nothing can be recorded there."""
    return [
        f"{path}: it is not a regular file, and no tuning can use it; remove it"
        for path in sorted(folder.path.glob("*.jsonl"))
        if not path.is_file()
    ]
