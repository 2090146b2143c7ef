"""The timeline of a run: when each stage and each span of work began and ended, where, and why.

It is recorded from the events of the run, kept in its record, and written as a trace for viewers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from tvmflow.core import spans
from tvmflow.core.codec import Mismatch, from_json
from tvmflow.core.errors import UsageError
from tvmflow.core.trace_events import Slice, Trace
from tvmflow.core.types import Json, Plan
from tvmflow.engine.report import StageReport
from tvmflow.executors.base import PLACE, Event, OnEvent

# The fields of a `Span`: there may be many, and records are to stay small.
_SpanRow: TypeAlias = tuple[str, str, float, float, int, str, Mapping[str, Json]]

# A search of days has more; of these the first ones are kept.
_MAX_SPANS: Final = 100_000


class TimedStage(NamedTuple):
    """A stage that ended, in seconds since the run began.

    Attributes:
        stage_id: The stage.
        outcome: How it ended (see `StageReport`).
        began_s: When it began; for one that was not executed, when it ended.
        ended_s: When it ended.
        needs: The stages that had to end before.
        pid: The process that executed it; 0 for none.
        worker: The worker of a cluster; empty for this machine.
    """

    stage_id: str
    outcome: str
    began_s: float
    ended_s: float
    needs: tuple[str, ...] = ()
    pid: int = 0
    worker: str = ""

    @property
    def seconds(self) -> float:
        """The time that it took."""
        return self.ended_s - self.began_s

    @property
    def was_executed(self) -> bool:
        """True if a worker ran it, whatever came of it."""
        return self.ended_s > self.began_s


class Span(NamedTuple):
    """An interval of work: when it began, in seconds since the run began, and in which process and thread."""

    name: str
    stage_id: str
    began_s: float
    seconds: float
    pid: int
    thread: str
    arguments: Mapping[str, Json]


class Timeline(NamedTuple):
    """The timeline of a run.

    Attributes:
        began_s: When the stages were begun with, in seconds since 1970.
        seconds: How long it took from there.
        jobs: How many stages may run at a time.
        pid: The process of the run itself.
        stages: The stages in the order in which they ended; one that ran twice is there twice.
        spans: The spans as they ended; each is the fields of a `Span`.
        left_out: How many further spans there were.
    """

    began_s: float
    seconds: float
    jobs: int
    pid: int
    stages: tuple[TimedStage, ...]
    spans: tuple[_SpanRow, ...]
    left_out: int = 0

    def list_executed(self) -> list[TimedStage]:
        """Return the stages that were executed, in the order in which they began."""
        executed = (stage for stage in self.stages if stage.was_executed)
        return sorted(executed, key=lambda stage: stage.began_s)


class TimelineRecording:
    """Takes the events of a run, from several threads, and passes on those for people and programs."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._began_s = time.time()
        self._begun: dict[str, float] = {}
        self._places: dict[str, tuple[int, str]] = {}
        self._stages: list[TimedStage] = []
        self._spans: list[_SpanRow] = []
        self._left_out = 0

    def event(self, event: Event) -> None:
        """Take an event."""
        kind, now_s = event["event"], time.time() - self._began_s
        with self._lock:
            if kind == spans.EVENT:
                self._add_span(event)
                return
            if kind == PLACE:
                self._places[event["stage_id"]] = (event["pid"], event["worker"])
                return
            if kind == "stage_started":
                self._begun[event["stage_id"]] = now_s
            elif kind == "stage_finished":
                self._add_stage(event, now_s)
        self._on_event(event)

    def _add_span(self, event: Event) -> None:
        if len(self._spans) == _MAX_SPANS:
            self._left_out += 1
            return
        began_s = round(event["began_s"] - self._began_s, 6)
        # rounded, two spans in a row must not overlap
        ended_s = round(event["began_s"] + event["seconds"] - self._began_s, 6)
        row = (
            event["name"],
            event.get("stage_id", ""),
            began_s,
            round(ended_s - began_s, 6),
            event["process"],
            _name_thread(event["thread"]),
            event["arguments"],
        )
        self._spans.append(row)

    def _add_stage(self, event: Event, now_s: float) -> None:
        stage_id = event["stage_id"]
        pid, worker = self._places.pop(stage_id, (0, ""))
        stage = TimedStage(
            stage_id=stage_id,
            outcome=event["outcome"],
            began_s=round(self._begun.pop(stage_id, now_s), 6),
            ended_s=round(now_s, 6),
            pid=pid,
            worker=worker,
        )
        self._stages.append(stage)

    def finish(self, plan: Plan, jobs: int) -> Timeline:
        """Return the timeline of a plan whose run has ended."""
        needs = {spec.id: tuple(need.stage_id for need in spec.needs) for spec in plan.stages}
        with self._lock:
            return Timeline(
                began_s=self._began_s,
                seconds=round(time.time() - self._began_s, 6),
                jobs=jobs,
                pid=os.getpid(),
                stages=tuple(
                    stage._replace(needs=needs.get(stage.stage_id, ())) for stage in self._stages
                ),
                spans=tuple(self._spans),
                left_out=self._left_out,
            )


def read_timeline(value: Json, run: str) -> Timeline:
    """Return the timeline in the record of a run.

    Raises:
        UsageError: It has none, or none that can be read.
    """
    fix = "runs of this version have one: `tvmflow runs` lists the runs"
    if value is None:
        raise UsageError(f"the record of run {run} has no timeline", fix=fix)
    try:
        return from_json(Timeline, value)
    except Mismatch as error:
        raise UsageError(f"the timeline of run {run} cannot be read: {error}", fix=fix) from error


def _name_thread(name: str) -> str:
    """Return the name of a thread for people; nothing for the main one of a process."""
    if name == threading.main_thread().name:
        return ""
    # doit and others let Python name theirs: `Thread-2 (function)`
    return name.partition(" (")[0].replace("Thread-", "thread ")


# ---------------------------------------------------------------- as a trace


_RUN: Final = "run"
_RESTORED: Final = "restored and skipped stages"
_STAGES: Final = "stages"
_DEVICES: Final = "devices of this machine"


def make_trace(
    timeline: Timeline, reports: Iterable[StageReport], began_s: float, about: Mapping[str, Json]
) -> Trace:
    """Return the trace of a run.

    Args:
        timeline: Its timeline.
        reports: What its record says of its stages.
        began_s: When its command began, in seconds since 1970.
        about: What the trace says of the run; `run` is its name.
    """
    by_id = {report.stage_id: report for report in reports}
    trace = Trace(about)
    executed = list(_place_stages(timeline))
    for _, process in executed:
        trace.track(process, _STAGES)
    own, start_s = f"tvmflow run {about['run']}", max(timeline.began_s - began_s, 0.0)
    run = trace.track(own, _RUN)
    run.slice("plan", 0.0, start_s)
    run.slice("stages and delivery", start_s, timeline.seconds)
    restored = trace.track(own, _RESTORED)
    known = {stage.stage_id for stage in timeline.stages}
    end_s = timeline.seconds
    skipped = [
        TimedStage(report.stage_id, report.outcome, end_s, end_s)
        for report in by_id.values()
        if report.stage_id not in known
    ]
    for stage in (*timeline.stages, *skipped):
        if not stage.was_executed:
            arguments = _describe(stage, by_id)
            restored.slice(_title(stage), start_s + stage.ended_s, 0.0, arguments)
    slices: dict[str, Slice] = {}
    processes: dict[str, list[tuple[float, str]]] = {}
    for stage, process in executed:
        processes.setdefault(stage.stage_id, []).append((stage.ended_s, process))
        slices[stage.stage_id] = trace.track(process, _STAGES).slice(
            _title(stage), start_s + stage.began_s, stage.seconds, _describe(stage, by_id)
        )
        for need in stage.needs:
            if need in slices:
                trace.flow(slices[need], slices[stage.stage_id])
    threads = sorted((Span(*row) for row in timeline.spans), key=lambda span: span.thread)
    for span in threads:
        # of a stage that ran twice, the execution that had not ended by then
        ends = processes.get(span.stage_id, ())
        where = next((process for until_s, process in ends if span.began_s <= until_s), own)
        thread = span.thread or (_RUN if where == own else "main thread")
        at_s, arguments = start_s + span.began_s, {"stage": span.stage_id, **span.arguments}
        trace.track(where, thread).slice(span.name, at_s, span.seconds, arguments)
        if device := span.arguments.get("device"):
            measured = trace.track(_DEVICES, str(device))
            measured.slice(span.stage_id or own, at_s, span.seconds, arguments)
    return trace


def _place_stages(timeline: Timeline) -> Iterator[tuple[TimedStage, str]]:
    """Yield each stage that was executed with its process in the trace: one for each that ran at once."""
    ends: dict[str, list[float]] = {}
    for stage in timeline.list_executed():
        lanes = ends.setdefault(stage.worker, [])
        lane = next((i for i, end_s in enumerate(lanes) if end_s <= stage.began_s), len(lanes))
        lanes[lane : lane + 1] = [stage.ended_s]
        if not stage.worker:
            yield stage, f"worker {lane + 1}"
        else:
            yield stage, f"worker {stage.worker}{f' ({lane + 1})' if lane else ''}"


def _title(stage: TimedStage) -> str:
    return stage.stage_id if stage.outcome == "ran" else f"{stage.stage_id}: {stage.outcome}"


def _describe(stage: TimedStage, reports: Mapping[str, StageReport]) -> dict[str, Json]:
    report = reports.get(stage.stage_id)
    known = {} if report is None else {"reason": report.reason, "key": report.key}
    message = report.message if report and report.outcome == stage.outcome else ""
    return {**known, "outcome": stage.outcome, "message": message, "pid": stage.pid or None}
