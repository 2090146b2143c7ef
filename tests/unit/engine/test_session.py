"""Runs of a plan: every failure is reported, and a run without all results never looks like a success."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_runs import RunHost, outcomes, plan_of
from tvmflow.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_OK,
    InternalError,
    RecipeError,
)
from tvmflow.core.types import Plan
from tvmflow.engine import completeness
from tvmflow.engine.doit_adapter import EngineTask, run_tasks
from tvmflow.engine.report import RunReport
from tvmflow.planning.decisions import PlanState


@pytest.fixture
def host(tmp_path: Path) -> RunHost:
    return RunHost(tmp_path)


def raising(error: Exception, stage: str = "build") -> Callable[[str], None]:
    """Return what an executor does during a stage: raise at the stage of this name."""

    def during(name: str) -> None:
        if name == stage:
            raise error

    return during


def test_an_operating_system_error_in_an_executor_is_reported(host: RunHost) -> None:
    """A folder that cannot be written blocks the stage; what depends on it is skipped."""
    host.executor.during = raising(PermissionError(errno.EACCES, "Permission denied", "/sys/locks"))
    report = host.run(plan_of())
    assert outcomes(report) == {
        "import": "ran", "build/t0": "blocked", "export/t0": "skipped", "verify/t0": "skipped",
    }  # fmt: skip
    assert report.exit_code == EXIT_ENVIRONMENT
    assert report.stages[1].message == "/sys/locks: Permission denied"
    assert not report.delivered


def test_an_unknown_operating_system_error_is_reported_too(host: RunHost) -> None:
    """Also one for which there is no advice."""
    host.executor.during = raising(OSError(errno.EIO, "Input/output error", "/dev/sda"), "import")
    report = host.run(plan_of())
    assert report.exit_code == EXIT_ENVIRONMENT
    assert "Input/output error" in report.stages[0].message


def test_a_bug_in_an_executor_is_reported_with_a_log(host: RunHost) -> None:
    """The message names the exception, the log has its traceback."""
    host.executor.during = raising(ValueError("seven"))
    report = host.run(plan_of())
    stage = report.stages[1]
    assert (stage.outcome, report.exit_code) == ("crashed", EXIT_FAILED)
    assert stage.message == "a bug in tvmflow: ValueError: seven"
    assert "Traceback" in Path(stage.log).read_text()


def test_an_error_while_a_stage_is_decided_is_reported(
    host: RunHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage fails with the message of the error instead of being skipped without one."""
    decide, plan = PlanState.decide, plan_of()
    decided: list[str] = []

    def fail_after_the_first_time(state: PlanState, spec: Any) -> Any:
        decided.append(spec.id)
        if spec.stage == "build" and decided.count(spec.id) > 1:
            raise RecipeError("net.yaml:1:1: model: the file is gone")
        return decide(state, spec)

    monkeypatch.setattr(PlanState, "decide", fail_after_the_first_time)
    report = host.run(plan)
    assert outcomes(report)["build/t0"] == "failed"
    assert report.stages[1].message == "net.yaml:1:1: model: the file is gone"


def test_an_error_of_the_progress_display_ends_the_run(host: RunHost) -> None:
    """A closed pipe is raised to the caller, and no further stage runs."""

    class ClosedPipe(list[dict[str, Any]]):
        def append(self, event: dict[str, Any]) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    host.events = ClosedPipe()
    with pytest.raises(BrokenPipeError):
        host.run(plan_of())
    assert host.executor.calls in ([], ["import"])


def test_a_result_that_vanishes_during_the_run_is_noticed(
    host: RunHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was reported as done, and the store does not have it: no success."""
    plan = plan_of()
    publish = type(host.store).publish

    def publish_and_lose(store: Any, *args: Any) -> Any:
        artifact = publish(store, *args)
        for action in Path(store.root, "actions").rglob(artifact.key):
            action.unlink()
        return artifact

    monkeypatch.setattr(type(host.store), "publish", publish_and_lose)
    with pytest.raises(InternalError, match=r"4 results of it cannot be found: net:import \(ran"):
        host.run(plan)
    log = (Path(host.store.root) / "logs" / "incomplete-run.log").read_text()
    assert "net:verify/t0 (ran, not in the store)" in log


def check(host: RunHost, plan: Plan, report: RunReport) -> None:
    state = PlanState(host.store)
    state.decide_all(plan)
    completeness.check_complete(plan, report, state.artifacts, host.store, str(host.dist))


def test_a_finished_run_is_complete_until_something_is_lost(host: RunHost) -> None:
    """A stage without a report, a skipped stage or a missing delivered file is no success."""
    plan = plan_of()
    report = host.run(plan)
    assert report.exit_code == EXIT_OK
    check(host, plan, report)
    with pytest.raises(InternalError, match=r"net:verify/t0 \(not reported\)"):
        check(host, plan, report._replace(stages=report.stages[:-1]))
    skipped = report.stages[-1]._replace(outcome="skipped")
    with pytest.raises(InternalError, match=r"1 result of it .* net:verify/t0 \(skipped\)"):
        check(host, plan, report._replace(stages=(*report.stages[:-1], skipped)))
    Path(report.delivered[0]).unlink()
    with pytest.raises(InternalError, match="delivered files in"):
        check(host, plan, report)


def test_a_failed_run_is_not_checked_further(host: RunHost) -> None:
    """Its report says already that results are missing."""
    plan = plan_of()
    host.executor.during = raising(ValueError("seven"), "import")
    check(host, plan, host.run(plan))


def task(name: str, *before: str, run: Callable[[], str] = str) -> EngineTask:
    return EngineTask(name, run, lambda: False, before)


def test_tasks_run_after_those_that_they_depend_on() -> None:
    """A failure keeps the tasks that depend on it from running; with `keep_going` others run."""
    ran: list[str] = []

    def recording(name: str, failure: str = "") -> Callable[[], str]:
        def run() -> str:
            ran.append(name)
            return failure

        return run

    tasks = [
        task("a", run=recording("a", "no")),
        task("b", "a", run=recording("b")),
        task("c", run=recording("c")),
    ]
    run_tasks(tasks, jobs=1, keep_going=True)
    assert ran == ["a", "c"]
    ran.clear()
    run_tasks(tasks, jobs=1, keep_going=False)
    assert ran == ["a"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_exception_in_a_task_is_raised_and_ends_the_run(jobs: int) -> None:
    """doit alone would hide it."""
    ran: list[str] = []

    def fail() -> str:
        raise ZeroDivisionError("here")

    def record() -> str:
        ran.append("b")
        return ""

    tasks = [task("a", run=fail), task("b", "a", run=record)]
    with pytest.raises(ZeroDivisionError, match="here"):
        run_tasks(tasks, jobs=jobs, keep_going=True)
    assert ran == []


def test_an_exception_in_a_check_is_raised_too() -> None:
    """`is_up_to_date` is called by doit itself."""

    def fail() -> bool:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        run_tasks([EngineTask("a", str, fail, ())], jobs=1, keep_going=False)


def test_a_plan_that_doit_cannot_order_is_an_error() -> None:
    """Two tasks that wait for each other."""
    with pytest.raises(InternalError, match="doit could not run the plan"):
        run_tasks([task("a", "b"), task("b", "a")], jobs=1, keep_going=False)


def test_the_report_of_a_run_is_json(host: RunHost) -> None:
    """Every event can be written for `--json`."""
    host.run(plan_of())
    assert [event["event"] for event in host.events].count("stage_finished") == 4
    assert json.loads(json.dumps(host.events)) == host.events
