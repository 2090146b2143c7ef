"""Starting points: the best schedules of a workload on near targets, which are measured here before others.

A near target has the same code, and was measured with another number of threads or on another
device. Its times say nothing of this one, but its best schedules are mostly good here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

from tvmflow.tuning.ledger import Ledger, TargetDescription
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.workload_ledger import WorkloadLedger

_MAX_TRIALS: Final = 8
"""How many schedules of a workload are measured first."""

_log = logging.getLogger(__name__)

CheckTrials = Callable[[str, WorkloadLedger], None]
"""Takes a saved module and trials, and quarantines those that do not apply to it."""


class StartingPoints:
    """The best trials of workloads on near targets.

    Attributes:
        measured: How many of them were measured here.
        targets: The near targets that they are from, for people.
    """

    def __init__(self, ledger: Ledger, check: CheckTrials) -> None:
        """Look for near targets.

        Args:
            ledger: The ledger of the target to tune for; the others are beside it.
            check: What quarantines trials that do not apply.
        """
        self._near = list_near_targets(ledger)
        self._check = check
        self._origins: dict[str, str] = {}
        self.measured = 0
        self.targets: list[str] = []
        _log.debug("near targets: %s", [folder.text for folder in self._near])

    def find(self, key: str, mod: str) -> list[Trial]:
        """Return the best trials of a workload, those of the nearest target first."""
        best: dict[str, Trial] = {}
        for folder in self._near:
            trials = WorkloadLedger(folder.path / f"{key}.jsonl")
            if len(trials):
                self._check(mod, trials)
            for trial in trials.valid()[: _MAX_TRIALS - len(best)]:
                best.setdefault(trial.id, trial)
                self._origins.setdefault(trial.id, folder.text)
        return list(best.values())

    def record(self, trial_id: str) -> None:
        """Count a trial that was measured here, if it is one of these."""
        if trial_id in self._origins:
            self.measured += 1
            if self._origins[trial_id] not in self.targets:
                self.targets.append(self._origins[trial_id])


def list_near_targets(ledger: Ledger) -> list[TargetFolder]:
    """Return the targets with the same code, the nearest first: the same device, then a similar number of threads."""
    folders = list_target_folders(ledger.folder.parent)
    own = next((folder.description for folder in folders if folder.path == ledger.folder), None)
    if own is None:
        return []

    def distance(other: TargetDescription) -> tuple[bool, float]:
        ratio = (other.threads or 1) / (own.threads or 1)
        return other.device != own.device, abs(math.log2(ratio))

    near = [
        (distance(folder.description), folder.key, folder)
        for folder in folders
        if folder.description is not None and folder.description.is_near(own)
    ]
    return [folder for _, _, folder in sorted(near)]
