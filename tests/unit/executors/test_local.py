"""Processes on this machine: how a stage that did not succeed is reported."""

from __future__ import annotations

import pytest

from tvmflow.core.fork_server import Outcome
from tvmflow.executors import local
from tvmflow.executors.local import ProcessExecutor, _add_fix


@pytest.mark.parametrize(
    ("outcome", "fix"),
    [
        (Outcome("timeout", 1.0), "give each stage more time with --stage-timeout SECONDS"),
        (Outcome("crashed", 1.0, is_killed=True), "run again: everything finished so far is kept"),
        (Outcome("crashed", 1.0, fix="use more memory", is_killed=True), "use more memory"),
        (Outcome("error", 1.0), ""),
    ],
)
def test_a_stage_that_was_stopped_from_outside_says_what_to_do(outcome: Outcome, fix: str) -> None:
    """What is known of the cause comes first."""
    assert _add_fix(outcome).fix.startswith(fix) and bool(_add_fix(outcome).fix) == bool(fix)


def test_an_executor_takes_over_the_server_that_was_started_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that no executor took over ends at once."""
    monkeypatch.setattr(local, "PRELOADED", ())
    server = local.start_early()
    assert local.start_early() is server
    executor = ProcessExecutor()
    executor.start()
    assert local.start_early() is not server
    executor.close()
    assert local._spare is None
