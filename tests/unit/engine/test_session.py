"""Runs of a plan: every failure is reported, and a run without all results never looks like a success."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_runs import RecordingExecutor, RunHost, outcomes, plan_of
from tvmflow.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_OK,
    ImportFailed,
    InternalError,
    RecipeError,
    VerifyFailed,
)
from tvmflow.core.types import Plan, StageCall, StageResult
from tvmflow.engine.builds import list_builds
from tvmflow.engine.doit_adapter import EngineTask, run_tasks
from tvmflow.engine.plan_text import explain_stage
from tvmflow.engine.report import RunReport
from tvmflow.engine.session import check_complete
from tvmflow.engine.summary import verdict_text
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.store.local import find_failure


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
    assert report.stages[1].message == "/sys: Permission denied"
    assert not report.delivered


def test_a_skipped_stage_says_why(host: RunHost) -> None:
    """Another target's failure ended the run; nothing that the stage needs had failed."""
    host.executor.during = raising(PermissionError(errno.EACCES, "Permission denied", "/sys/locks"))
    report = host.run(plan_of(width=2))
    reasons = {s.stage_id: s.reason for s in report.stages if s.outcome == "skipped"}
    assert reasons["net:export/t0"] == "a stage before it did not succeed"
    assert reasons["net:build/t1"] == "the run ended before it"
    builds = {build.target: build for build in list_builds(report)}
    assert (verdict_text(builds["t0"]), verdict_text(builds["t1"])) == ("FAILED", "skipped")


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
    check_complete(plan, report, state.artifacts, host.store, str(host.dist))


def test_a_finished_run_is_complete_until_something_is_lost(host: RunHost) -> None:
    """A stage without a report, a skipped stage or a missing delivered file is not a success."""
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


def test_a_forced_stage_runs_again_and_what_it_did_not_change_does_not(tmp_path: Path) -> None:
    """Its result is replaced; by early cutoff, stages behind it run only if its files are others."""
    host = RunHost(tmp_path)
    plan = plan_of()
    host.run(plan)
    report = host.run(plan, forced={"net:build/t0"})
    assert host.executor.calls == ["build"]
    assert [stage.outcome for stage in report.stages] == ["hit", "ran", "hit", "hit"]
    assert report.stages[1].reason == "forced by --force"
    other = RunHost(tmp_path, executor=RecordingExecutor(salt="another build"))
    report = other.run(plan, forced={"net:build/t0"})
    assert other.executor.calls == ["build", "export", "verify"]
    assert host.run(plan).exit_code == EXIT_OK and host.executor.calls == []


def test_a_forced_stage_that_never_ran_has_its_own_reason(host: RunHost) -> None:
    """`--force` changes nothing of a first run."""
    report = host.run(plan_of(), forced={"net:import"})
    assert host.executor.calls == ["import", "build", "export", "verify"]
    assert report.stages[0].reason == "never ran"


def test_a_forced_stage_is_not_fetched(tmp_path: Path) -> None:
    """Whoever forces a stage wants it to run here; the others are fetched."""
    url = str(tmp_path / "remote")
    Path(url).mkdir()
    RunHost(tmp_path / "1", url, writes=True).run(plan_of())
    reader = RunHost(tmp_path / "2", url)
    report = reader.run(plan_of(), forced={"net:import"})
    assert reader.executor.calls == ["import"]
    assert set(outcomes(report).values()) == {"ran", "fetched"}


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


def test_no_plugin_of_doit_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run without reading the metadata of all packages."""

    def refuse() -> None:
        raise AssertionError("entry points were read")

    monkeypatch.setattr("doit.plugin.entry_points_impl", refuse)
    run_tasks([task("a")], jobs=1, keep_going=False)


def test_the_report_of_a_run_is_json(host: RunHost) -> None:
    """Every event can be written for `--json`."""
    host.run(plan_of())
    assert [event["event"] for event in host.events].count("stage_finished") == 4
    assert json.loads(json.dumps(host.events)) == host.events


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (ImportFailed("no operator Foo"), "failed", "its last attempt failed"),
        (VerifyFailed("3 elements differ", fix="lower rtol"), "rejected", "was rejected"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "blocked", "could not run"),
        (ValueError("seven"), "crashed", "its last attempt crashed"),
    ],
)
def test_a_failure_is_remembered_until_the_stage_succeeds(
    error: Exception, outcome: str, text: str, host: RunHost
) -> None:
    """It is what `plan` gives as the reason, and what `explain` shows; a log is named only if it has a text."""
    host.executor.during = raising(error)
    plan = plan_of()
    host.run(plan)
    failure = find_failure(host.store, "net:build/t0")
    assert failure is not None and (failure.outcome, failure.fix) == (
        outcome,
        getattr(error, "fix", failure.fix),
    )
    assert not failure.log or Path(failure.log).read_text()
    state = evaluate_plan(plan, host.store)
    decision, key = state.decisions["net:build/t0"], state.keys["net:build/t0"]
    assert decision.reason == failure.text and text in decision.reason
    explained = explain_stage(decision, key, failure=failure)
    assert f"(0 s ago): {failure.message}" in explained
    assert ("fix: lower rtol" in explained) == (outcome == "rejected")

    # another value: the stage has changed since then
    changed = evaluate_plan(plan_of(value=1), host.store).decisions
    assert changed["net:import"].kind == "run"
    host.executor.during = lambda stage: None
    host.run(plan)
    assert find_failure(host.store, "net:build/t0") is None


def test_an_empty_log_is_not_named(host: RunHost) -> None:
    """A worker that was killed at once has written nothing."""

    class Crashing(RecordingExecutor):
        content = ""

        def execute(self, call: StageCall, log: Path, on_event: Callable[..., None]) -> StageResult:
            log.write_text(self.content)
            return StageResult("crashed", "was killed (SIGKILL)", "", {}, 0.1, str(log))

    host.executor = Crashing()
    assert host.run(plan_of()).stages[0].log == ""
    Crashing.content = "Fatal Python error\n"
    stage = host.run(plan_of()).stages[0]
    assert Path(stage.log).read_text() == "Fatal Python error\n"
    failure = find_failure(host.store, "net:import")
    assert failure is not None and failure.log == stage.log
