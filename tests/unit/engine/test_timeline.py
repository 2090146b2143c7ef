"""Timelines of runs: when stages and spans began and ended, and the trace of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_runs import RecordingExecutor, RunHost, plan_of
from tests.support.trace_checks import CheckedTrace, check_trace
from tvmflow.core import spans
from tvmflow.core.codec import to_json
from tvmflow.core.errors import UsageError
from tvmflow.core.types import Plan
from tvmflow.engine import session, timeline
from tvmflow.engine.report import RunReport
from tvmflow.engine.timeline import (
    TimedStage,
    Timeline,
    TimelineRecording,
    make_trace,
    read_timeline,
)


def record(host: RunHost, plan: Plan, jobs: int = 1) -> tuple[RunReport, Timeline]:
    """Run a plan, and return its timeline as a record has it."""
    recorder = TimelineRecording(host.events.append)
    before = spans.report_spans(recorder.event)
    try:
        options = session.SessionOptions(jobs, dist=str(host.dist))
        report = session.run_plan(plan, host.store, host.executor, recorder.event, options)
    finally:
        spans.report_spans(before)
    value = json.loads(json.dumps(to_json(recorder.finish(plan, jobs))))
    return report, read_timeline(value, "abc")


def trace_of(made: Timeline, report: RunReport) -> CheckedTrace:
    return check_trace(
        make_trace(made, report.stages, made.began_s - 1.0, {"run": "abc"}).to_json()
    )


def test_stages_are_on_workers_and_point_to_those_that_need_them(tmp_path: Path) -> None:
    """Those that ran at once on one each; their arguments have why they ran."""
    host = RunHost(tmp_path, executor=RecordingExecutor(during=lambda _: None))
    report, made = record(host, plan_of(width=2), jobs=2)
    assert made.jobs == 2
    assert made.stages[0].needs == ()
    assert {"net:build/t0", "net:build/t1"} == {
        stage.stage_id for stage in made.stages if stage.needs == ("net:import",)
    }
    trace = trace_of(made, report)
    ran = [item for name in trace.slices if "worker" in name for item in trace.slices[name]]
    assert len(ran) == 7
    assert {item["args"]["reason"] for item in ran} == {"never ran"}
    assert {item["args"]["key"] for item in ran} == {stage.key for stage in report.stages}
    assert ("net:import", "net:build/t0") in trace.flows
    assert len(trace.flows) == 6


def test_what_was_not_executed_is_an_instant(tmp_path: Path) -> None:
    """With its outcome, of a skipped stage also why."""
    host = RunHost(tmp_path)
    record(host, plan_of())

    def fail(stage: str) -> None:
        if stage == "build":
            raise OSError(5, "Input/output error")

    host.executor.during = fail
    report, made = record(host, plan_of(width=2))
    trace = trace_of(made, report)
    (lane,) = (items for name, items in trace.slices.items() if "restored" in name)
    assert [(item["name"], item["ph"]) for item in lane] == [
        *((f"net:{label}: hit", "i") for label in ("import", "build/t0", "export/t0", "verify/t0")),
        *((f"net:{label}: skipped", "i") for label in ("export/t1", "verify/t1")),
    ]
    assert lane[-1]["args"]["reason"] == "a stage before it did not succeed"
    assert trace.names("worker 1/stages") == ["net:build/t1: blocked"]


def span_event(name: str, began_s: float, seconds: float, **fields: Any) -> dict[str, Any]:
    base = {"event": "span", "thread": "MainThread", "arguments": {}}
    ended_s = began_s + seconds
    return {**base, "name": name, "began_s": began_s, "ended_s": ended_s, **fields}


def test_spans_of_a_stage_are_on_threads_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a device also on a track of the device, named by the stage; events for people are passed on."""
    passed_on: list[dict[str, Any]] = []
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    recorder = TimelineRecording(passed_on.append)
    stage = {"stage_id": "net:tune/host"}
    recorder.event({"event": "stage_started", "reason": "never ran", **stage})
    recorder.event({"event": "place", "pid": 42, "worker": "alpha", **stage})
    trial = span_event("trial of conv", 1001.0, 1.0, thread="builder_0", **stage)
    recorder.event(trial)
    recorder.event(span_event("measurement", 1001.5, 0.5, **stage, arguments={"device": "cpu"}))
    recorder.event(span_event("fetch import", 999.5, 0.1, thread="Thread-2"))
    now_s = 1004.0
    recorder.event({"event": "stage_finished", "outcome": "ran", **stage})
    made = recorder.finish(Plan((), ()), jobs=3)
    assert [event["event"] for event in passed_on] == ["stage_started", "stage_finished"]
    assert made.stages == (
        TimedStage("net:tune/host", "ran", began_s=0.0, ended_s=4.0, pid=42, worker="alpha"),
    )
    trace = check_trace(make_trace(made, (), 999.0, {"run": "abc"}).to_json())
    assert {name: trace.names(name) for name in trace.slices} == {
        "worker alpha 1/stages": ["net:tune/host"],
        "worker alpha 1/builder_0": ["trial of conv"],
        "worker alpha 1/main thread": ["measurement"],
        "devices of this machine 3/cpu": ["net:tune/host"],
        "tvmflow run abc 2/run": ["plan", "stages and delivery"],
        "tvmflow run abc 2/Thread-2": ["fetch import"],
    }
    (slice_,) = trace.slices["worker alpha 1/builder_0"]
    assert (slice_["ts"], slice_["dur"]) == (2e6, 1e6)


def test_a_long_search_keeps_the_first_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MAX_SPANS", 2)
    recorder = TimelineRecording(lambda _: None)
    for number in range(5):
        recorder.event(span_event(f"{number}", 1.0, 1.0))
    made = recorder.finish(Plan((), ()), jobs=1)
    assert ([row[0] for row in made.spans], made.left_out) == (["0", "1"], 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the timeline of run abc is missing"),
        ({"jobs": "two"}, "the timeline of run abc cannot be read ("),
    ],
)
def test_a_record_without_a_timeline_says_so(value: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_timeline(value, "abc")
    assert caught.value.message.startswith(message)
    assert "tvmflow runs" in caught.value.fix


def test_spans_cost_nothing_where_nobody_takes_them() -> None:
    """And those that took no time are left out."""
    taken: list[dict[str, Any]] = []
    with spans.span("before"):
        pass
    before = spans.report_spans(taken.append)
    try:
        spans.add_span("long", 1.0, 2.0, key="k")
        spans.add_span("short", 1.0, 1.0001)
    finally:
        assert spans.report_spans(before) is not None
    assert [(event["name"], event["arguments"]) for event in taken] == [("long", {"key": "k"})]
