"""Seeds a ledger with the schedules of a lock file, for whoever has the lock file and no ledger.

A lock file does not say on which machine its schedules were measured. They enter the ledger as
trials of another device, so that a search measures them here before all others (see
`tuning.proposals`), and no time from elsewhere is compared with one of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from tvmflow.core.errors import UsageError
from tvmflow.recipe.lock_file import Lock, LockedKernel, LockedTarget, read_lock
from tvmflow.targets.backends import backend_for
from tvmflow.targets.tvm_target import split_threads, with_threads
from tvmflow.tuning.ledger import MachineClass, TargetDescription, WorkloadDescription
from tvmflow.tuning.replay import TraceCheck
from tvmflow.tuning.trial_import import (
    ImportedWorkload,
    ImportResult,
    Problems,
    import_trials,
)
from tvmflow.tuning.trials import Trial

SUFFIXES: Final = (".yaml", ".yml")
"""The ends of the names of lock files: trial packs have others."""

_TVM: Final = "apache-tvm"
_DEVICE: Final = {"kind": "cpu", "class": "the machine of a lock file"}
_US: Final = 1e-6


def import_lock(
    path: Path, root: Path, machine_class: MachineClass, checker: TraceCheck | None = None
) -> ImportResult:
    """Add the schedules of a lock file to a ledger, as trials of another device.

    Args:
        path: The lock file.
        root: The ledger.
        machine_class: This machine's class.
        checker: Applies each trace to its kernel first; None to leave that to the tuning.

    Raises:
        RecipeError: when it is not a valid lock file.
        UsageError: when it has no schedules that could be used with this machine's TVM.
    """
    lock = read_lock(path)
    tvm = lock.file.tools.get(_TVM, "")
    if tvm != machine_class.tvm:
        raise UsageError(
            f"the schedules in {path} are for TVM {tvm or '(not named)'}, and this machine has TVM {machine_class.tvm}",
            fix="install that build of TVM, or tune without them",
        )
    workloads = [*_list_workloads(lock, tvm)]
    if not workloads:
        raise UsageError(
            f"{path} has no tuned schedules for a CPU",
            fix="give the lock file of a recipe that was tuned, written by `tvmflow lock`",
        )
    descriptions = {
        description.key: description
        for target in _list_targets(lock)
        if (description := _describe(target, tvm)).key in {entry.target for entry in workloads}
    }
    lock_class = MachineClass(tvm, _DEVICE)
    return import_trials(root, str(path), descriptions, workloads, lock_class, checker)


def _list_targets(lock: Lock) -> Iterator[LockedTarget]:
    """Yield the targets whose kernels run on a CPU: only there are other devices starting points."""
    for recipe in lock.recipes.values():
        for target in recipe.targets.values():
            if backend_for(target.tvm).RUNS_ON_HOST_CPU:
                yield target


def _describe(target: LockedTarget, tvm: str) -> TargetDescription:
    """Return the target as a search knows it: with the number of threads that kernels run on."""
    code, _ = split_threads(target.tvm)
    return TargetDescription(with_threads(code, target.cores), tvm, _DEVICE)


def _list_workloads(lock: Lock, tvm: str) -> Iterator[ImportedWorkload]:
    when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    for target in _list_targets(lock):
        key = _describe(target, tvm).key
        for workload, kernel in target.kernels.items():
            if not kernel.trace:
                continue
            description = WorkloadDescription(name=next(iter(kernel.names), ""))
            if kernel.tuned_us is None:
                problem = f"{lock.path}: {description.name} has a schedule without a time"
                invalid = Problems([problem])
                yield ImportedWorkload(key, workload, description, invalid=invalid)
            else:
                trial = _make_trial(kernel, kernel.tuned_us, tvm, when)
                yield ImportedWorkload(key, workload, description, records=[trial])


def _make_trial(kernel: LockedKernel, tuned_us: float, tvm: str, when: str) -> Trial:
    return Trial(
        id=kernel.trial,
        trace=json.loads(kernel.trace),
        run_secs=(tuned_us * _US,),
        failure=None,
        when=when,
        tvm=tvm,
        host={"model": _DEVICE["class"]},
        load=(),
        seed=0,
    )
