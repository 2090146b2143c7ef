"""Seeding a ledger from a lock file: its schedules are measured here first, its times are not believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.core.canonical_json import canonical
from tvmflow.core.errors import UsageError
from tvmflow.recipe.lock_file import LockedKernel, LockedRecipe, LockedTarget, LockFile
from tvmflow.recipe.yaml_files import write_yaml
from tvmflow.release.lock import import_lock
from tvmflow.targets.tvm_target import with_threads
from tvmflow.tuning.ledger import Ledger, MachineClass
from tvmflow.tuning.search import StartingPoints

TRIAL = trial(1)
TVM = TRIAL.tvm
KEY = "a" * 64
HERE = MachineClass(TVM, DEVICE)


def write_lock(path: Path, kernel: LockedKernel, *, tvm: str = TVM, **target: Any) -> Path:
    fields = {"tvm": dict(TARGET), "cores": 2, "kernels": {KEY: kernel}, **target}
    recipe = LockedRecipe(
        recipe="net.yaml", version="0", stages={}, targets={"host": LockedTarget(**fields)}
    )
    lock = LockFile(lock=1, machine="any", tools={"apache-tvm": tvm}, recipes={"net": recipe})
    path.write_text(write_yaml(lock.model_dump(exclude_defaults=True)))
    return path


def tuned(**fields: Any) -> LockedKernel:
    trace = canonical(TRIAL.trace).decode()
    values = {"tuned_us": 2.5, "trial": TRIAL.id, "trace": trace, **fields}
    return LockedKernel(names=["conv"], calls=1, **values)


def test_the_schedules_of_a_lock_file_are_starting_points_here(tmp_path: Path) -> None:
    """The first thing that a search measures on this machine; the time of the lock file is not its own."""
    path = write_lock(tmp_path / "net.lock.yaml", tuned())
    result = import_lock(path, tmp_path / "ledger", HERE)
    assert result.complete and [target.new for target in result.targets] == [1]
    own = Ledger.open(tmp_path / "ledger", with_threads(TARGET, 2), TVM, DEVICE)
    assert len(own.workload(KEY)) == 0
    [point] = StartingPoints(own, lambda *_: None).find(KEY, "module")
    assert (point.id, point.trace) == (TRIAL.id, TRIAL.trace)
    assert point.seconds == pytest.approx(2.5e-6)
    again = import_lock(path, tmp_path / "ledger", HERE)
    assert [(target.new, target.known) for target in again.targets] == [(0, 1)]


def test_schedules_for_another_build_of_tvm_are_refused(tmp_path: Path) -> None:
    """They may not apply to its kernels."""
    path = write_lock(tmp_path / "net.lock.yaml", tuned(), tvm="0.1+other")
    with pytest.raises(UsageError, match=r"are for TVM 0\.1\+other, and this machine has TVM"):
        import_lock(path, tmp_path / "ledger", HERE)
    assert not (tmp_path / "ledger").exists()


def test_a_lock_file_without_tuned_schedules_is_refused(tmp_path: Path) -> None:
    """Also one for GPUs alone, whose schedules are not starting points."""
    untuned = write_lock(tmp_path / "a.yaml", LockedKernel(names=["conv"], calls=1))
    for_gpu = write_lock(tmp_path / "b.yaml", tuned(), tvm=TVM)
    for_gpu.write_text(for_gpu.read_text().replace("kind: llvm", "kind: cuda"))
    for path in (untuned, for_gpu):
        with pytest.raises(UsageError, match="has no tuned schedules for a CPU"):
            import_lock(path, tmp_path / "ledger", HERE)


def test_a_schedule_without_a_time_is_reported(tmp_path: Path) -> None:
    """Its kernel has a name; the others are imported."""
    path = write_lock(tmp_path / "net.lock.yaml", tuned(tuned_us=None))
    result = import_lock(path, tmp_path / "ledger", HERE)
    assert not result.complete
    assert result.problems == [f"{path}: conv has a schedule without a time"]
