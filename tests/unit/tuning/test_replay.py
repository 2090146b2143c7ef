"""Schedules are applied again to their kernels, and only those that do not apply are quarantined."""

from __future__ import annotations

from pathlib import Path

from tests.support import tuning
from tests.unit.tuning.traces import CRASHES, GOOD, WRONG, of
from tvmflow.tuning.replay import replay_ledger
from tvmflow.tuning.trials import Failure

FAILED = Failure("apply", "error", "no such block")


def test_a_schedule_that_crashes_the_compiler_is_quarantined_alone(tmp_path: Path) -> None:
    """So is one that does not apply; a known failure stays, and unknown kernels are counted."""
    task = tuning.task_of(tuning.model(tuning.dense(16)))
    ledger = tuning.open_ledger(tmp_path)
    records = ledger.workload(task.key)
    known_to_fail = of([WRONG[0] * 2, []], run_secs=(), failure=FAILED)
    records.extend([of(WRONG), of(GOOD), of(CRASHES), of([[], []]), known_to_fail])
    ledger.workload("ab" * 32).append(of(WRONG))
    result = replay_ledger(tmp_path / "ledger", {task.key: task.mod})
    assert (result.workloads, result.trials, result.unknown, result.quarantined) == (1, 4, 1, 2)
    assert ["SIGFPE" in text for text in result.findings] == [False, True]
    left = list(ledger.workload(task.key).trials)
    assert left == [of(GOOD).id, of([[], []]).id, known_to_fail.id]


def test_a_kernel_that_cannot_be_loaded_costs_no_trial(tmp_path: Path) -> None:
    """The schedules are not the culprits, so all of them stay; the kernel is named, and counts as unknown."""
    task = tuning.task_of(tuning.model(tuning.dense(16)))
    ledger = tuning.open_ledger(tmp_path)
    ledger.workload(task.key).extend([of(WRONG), of(GOOD)])
    result = replay_ledger(tmp_path / "ledger", {task.key: "damaged"})
    assert (result.workloads, result.unknown, result.quarantined) == (0, 1, 0)
    assert f"workload {task.key[:12]}: its kernel cannot be used" in result.findings[0]
    assert len(ledger.workload(task.key)) == 2
