"""Near targets: the same code, measured with other threads or on another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.targets.tvm_target import with_threads
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.search import StartingPoints, list_similar_targets
from tvmflow.tuning.trials import Trial

KEY = "a" * 64


def ledger(
    root: Path, threads: int, *trials: Trial, tvm: str = "1", device: str = "any", **fields: Any
) -> Ledger:
    target = {**with_threads(TARGET, threads), **fields}
    opened = Ledger.open(root, target, tvm, {**DEVICE, "class": device})
    opened.workload(KEY).extend(trials)
    return opened


def test_near_targets_have_the_same_code_and_the_nearest_comes_first(tmp_path: Path) -> None:
    """This device before others, then by the ratio of threads; another CPU or TVM build is not similar."""
    own = ledger(tmp_path, 4)
    here, fewer = ledger(tmp_path, 8), ledger(tmp_path, 1)
    other_device = ledger(tmp_path, 4, device="other")
    ledger(tmp_path, 2, mcpu="x86-64-v2")
    ledger(tmp_path, 2, tvm="2")
    similar = [folder.path for folder in list_similar_targets(own)]
    assert similar == [here.folder, fewer.folder, other_device.folder]


def test_the_best_trials_of_near_targets_come_first_and_are_counted(tmp_path: Path) -> None:
    """Failures and slower ones are left out; only what is measured here counts, under its origin."""
    ledger(tmp_path, 2, *(trial(n, seconds=1e-3 * (20 - n)) for n in range(12)))
    checked: list[int] = []
    points = StartingPoints(ledger(tmp_path, 1), lambda _, trials: checked.append(len(trials)))
    first = points.find(KEY, "module")
    assert [entry.id for entry in first] == [trial(n).id for n in range(11, 3, -1)]
    assert (checked, points.measured, points.targets) == ([12], 0, [])
    for number in (11, 10, 99):
        points.record(trial(number).id)
    machine = TARGET["mtriple"]
    assert points.measured == 2
    assert points.targets == [f"llvm {machine}, 2 threads, TVM 1, any"]


def test_an_old_ledger_keeps_its_place(tmp_path: Path) -> None:
    """The number of threads is where the number of cores was: trials of earlier versions are found."""
    old = Ledger.open(tmp_path, TARGET, "1", DEVICE)
    assert ledger(tmp_path, 2).folder == old.folder
    assert list_similar_targets(old) == []
