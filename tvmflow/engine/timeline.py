"""The timeline of a run: when, where and why stages and spans of work began and ended.

It is recorded from events, kept in the run's record, and exported as a trace for viewers.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.codec import Mismatch, from_json
from tvmflow.core.errors import UsageError
from tvmflow.core.trace_events import Slice, Trace
from tvmflow.core.types import Json, Plan
from tvmflow.engine.report import StageReport
from tvmflow.executors import PLACE, Event, OnEvent

# A search of several days has more spans; only the first ones are kept.
_MAX_SPANS: Final = 100_000
_MAIN_THREAD: Final = threading.main_thread().name
_RUN: Final = "run"


class TimedStage(NamedTuple):
    """A stage that ended; times are seconds since the run began.

    If a stage was not executed, it begins when it ends, and `pid` is 0. `worker` names a cluster's worker; it is empty
    for this machine.
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
        """How many seconds it took."""
        return self.ended_s - self.began_s

    @property
    def was_executed(self) -> bool:
        """True if a process executed it, even without success."""
        return self.ended_s > self.began_s


class Span(NamedTuple):
    """An interval of work in a thread (empty for the main thread); times are seconds since the run began."""

    name: str
    stage_id: str
    began_s: float
    ended_s: float
    thread: str
    arguments: Mapping[str, Json]


class Timeline(NamedTuple):
    """The timeline of a run; its stages began at `began_s`, in seconds since 1970.

    At most `jobs` stages run at a time. Stages, and the entries of each field of `Span`, are in the order in which they
    ended; a stage that ran twice appears twice. `left_out` counts the spans beyond the limit.
    """

    began_s: float
    seconds: float
    jobs: int
    stages: tuple[TimedStage, ...]
    spans: tuple[tuple[str, str, float, float, str, Mapping[str, Json]], ...]
    left_out: int = 0

    def list_executed(self) -> list[TimedStage]:
        """Return the stages that were executed, in the order in which they began."""
        executed = (stage for stage in self.stages if stage.was_executed)
        return sorted(executed, key=lambda stage: stage.began_s)


class TimelineRecording:
    """Receives the events of a run, from several threads, and passes them on to the display and programs."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._began_s = time.time()
        self._begun: dict[str, float] = {}
        self._workers: dict[str, tuple[int, str]] = {}
        self._stages: list[TimedStage] = []
        self._spans: list[tuple[str, str, float, float, str, Mapping[str, Json]]] = []
        self._left_out = 0

    def event(self, event: Event) -> None:
        """Take an event."""
        kind, now_s = event["event"], self._since(time.time())
        stage_id = event.get("stage_id", "")
        with self._lock:
            if kind == spans.EVENT and len(self._spans) < _MAX_SPANS:
                times = self._since(event["began_s"]), self._since(event["ended_s"])
                thread = "" if event["thread"] == _MAIN_THREAD else event["thread"]
                row = (event["name"], stage_id, *times, thread, event["arguments"])
                self._spans.append(row)
            elif kind == spans.EVENT:
                self._left_out += 1
            elif kind == PLACE:
                self._workers[stage_id] = (event["pid"], event["worker"])
            elif kind == "stage_started":
                self._begun[stage_id] = now_s
            elif kind == "stage_finished":
                times = self._begun.pop(stage_id, now_s), now_s
                worker = self._workers.pop(stage_id, (0, ""))
                self._stages.append(TimedStage(stage_id, event["outcome"], *times, (), *worker))
        if kind not in (spans.EVENT, PLACE):
            self._on_event(event)

    def _since(self, at_s: float) -> float:
        return round(at_s - self._began_s, 6)

    def finish(self, plan: Plan, jobs: int) -> Timeline:
        """Return the timeline of a run that has ended."""
        needs = {spec.id: tuple(need.stage_id for need in spec.needs) for spec in plan.stages}
        return Timeline(
            began_s=self._began_s,
            seconds=self._since(time.time()),
            jobs=jobs,
            stages=tuple(one._replace(needs=needs.get(one.stage_id, ())) for one in self._stages),
            spans=tuple(self._spans),
            left_out=self._left_out,
        )


def read_timeline(value: Json, run: str) -> Timeline:
    """Return the timeline in a run's record."""
    try:
        return from_json(Timeline, value)
    except Mismatch as error:
        problem = "cannot be read" if value else "is missing"
        fix = "runs of this version record one: `tvmflow runs` lists the runs"
        raise UsageError(f"the timeline of run {run} {problem} ({error})", fix=fix) from error


def make_trace(
    timeline: Timeline, reports: Iterable[StageReport], began_s: float, about: Mapping[str, Json]
) -> Trace:
    """Return the trace of a run whose command began at `began_s`, in seconds since 1970.

    `reports` are those of its stages; `about` contains facts about the run, whose name is `run`.
    """
    by_id = {report.stage_id: report for report in reports}
    own, start_s = f"tvmflow run {about['run']}", max(timeline.began_s - began_s, 0.0)
    trace = Trace(about)
    slices: dict[str, Slice] = {}
    processes: dict[str, list[tuple[float, str]]] = {}
    for stage, process in _place_stages(timeline):
        processes.setdefault(stage.stage_id, []).append((stage.ended_s, process))
        slices[stage.stage_id] = _add_stage(trace, process, "stages", stage, start_s, by_id)
        for need in filter(slices.get, stage.needs):
            trace.flow(slices[need], slices[stage.stage_id])
    trace.track(own, _RUN).slice("plan", 0.0, start_s)
    trace.track(own, _RUN).slice("stages and delivery", start_s, timeline.seconds)
    known, end_s = {stage.stage_id for stage in timeline.stages}, timeline.seconds
    skipped = (
        TimedStage(name, by_id[name].outcome, end_s, end_s) for name in by_id if name not in known
    )
    for stage in (*timeline.stages, *skipped):
        if not stage.was_executed:
            _add_stage(trace, own, "restored and skipped stages", stage, start_s, by_id)
    for span in sorted((Span(*row) for row in timeline.spans), key=lambda span: span.thread):
        # If the stage ran twice, this is the execution that was still going on when the span began.
        ends = processes.get(span.stage_id, ())
        where = next((process for until_s, process in ends if span.began_s <= until_s), own)
        thread = span.thread or (_RUN if where == own else "main thread")
        times = start_s + span.began_s, span.ended_s - span.began_s
        arguments = {"stage": span.stage_id, **span.arguments}
        trace.track(where, thread).slice(span.name, *times, arguments)
        if device := span.arguments.get("device"):
            measured = trace.track("devices of this machine", str(device))
            measured.slice(span.stage_id or own, *times, arguments)
    return trace


def _place_stages(timeline: Timeline) -> Iterator[tuple[TimedStage, str]]:
    """Yield each executed stage with its process in the trace; overlapping stages get different processes."""
    ends: dict[str, list[float]] = {}
    for stage in timeline.list_executed():
        lanes = ends.setdefault(stage.worker, [])
        lane = next((i for i, end_s in enumerate(lanes) if end_s <= stage.began_s), len(lanes))
        lanes[lane : lane + 1] = [stage.ended_s]
        number = f" ({lane + 1})" if lane else ""
        yield stage, f"worker {f'{stage.worker}{number}' if stage.worker else lane + 1}"


def _add_stage(
    trace: Trace,
    process: str,
    track: str,
    stage: TimedStage,
    start_s: float,
    reports: Mapping[str, StageReport],
) -> Slice:
    title = stage.stage_id if stage.outcome == "ran" else f"{stage.stage_id}: {stage.outcome}"
    arguments = {"outcome": stage.outcome, "pid": stage.pid or None}
    if report := reports.get(stage.stage_id):
        arguments |= {"reason": report.reason, "key": report.key, "message": report.message}
    at_s = start_s + stage.began_s
    return trace.track(process, track).slice(title, at_s, stage.seconds, arguments)


# ---------------------------------------------------------------- critical chain
# The critical path of a run, and what each stage on it costs: the run is simulated with the same number of workers, but
# without the time of that stage. As in doit, ready stages begin in their original order.


class Work(NamedTuple):
    """A stage to schedule: its seconds, and the stages that must end before it."""

    seconds: float
    needs: tuple[str, ...] = ()


class ChainLink(NamedTuple):
    """A stage of the critical chain.

    The stage could begin when `cause` ended, either because it needs `cause` or because it got its worker. `saves_s` is
    how much shorter the run would be if the stage took no time; `saves_at_best_s` the same with a worker for every
    stage.
    """

    stage_id: str
    seconds: float
    cause: str
    waited_for_worker: bool
    saves_s: float
    saves_at_best_s: float


class CriticalChain(NamedTuple):
    """The critical chain of a run: its critical path if at most `jobs` stages run at a time.

    `before_s` is the time before the first stage began, `stages_s` from then until the last one ended, and `after_s`
    the time after that. `scheduled_s` is the time of the stages in a simulation with `jobs` workers, `at_best_s` the
    same with a worker for every stage.
    """

    links: tuple[ChainLink, ...]
    jobs: int
    before_s: float
    stages_s: float
    after_s: float
    scheduled_s: float
    at_best_s: float


def schedule(work: Mapping[str, Work], jobs: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return when each stage ends with `jobs` workers, and the stage whose end let it begin, or nothing."""
    order = {stage: index for index, stage in enumerate(work)}
    left = {stage: len(item.needs) for stage, item in work.items()}
    needed_by: dict[str, list[str]] = {stage: [] for stage in work}
    for stage, item in work.items():
        for need in item.needs:
            needed_by[need].append(stage)
    ready = [order[stage] for stage, count in left.items() if not count]
    stages, running = list(work), list[tuple[float, int]]()
    ends: dict[str, float] = {}
    causes: dict[str, str] = {}
    now, ended = 0.0, ""
    while ready or running:
        while ready and len(running) < jobs:
            stage = stages[heapq.heappop(ready)]
            causes[stage] = ended
            heapq.heappush(running, (now + work[stage].seconds, order[stage]))
        now, index = heapq.heappop(running)
        ended = stages[index]
        ends[ended] = now
        for later in needed_by[ended]:
            left[later] -= 1
            if not left[later]:
                heapq.heappush(ready, order[later])
    return ends, causes


def measure_length(work: Mapping[str, Work], jobs: int) -> float:
    """Return the time in seconds from the first stage's start to the last one's end with `jobs` workers."""
    return max(schedule(work, jobs)[0].values(), default=0.0)


def list_work(timeline: Timeline) -> dict[str, Work]:
    """Return the stages that a run executed, in the order in which they began.

    A stage that needs a stage that was not executed inherits its needs. Both times of a stage that ran twice count.
    """
    executed = timeline.list_executed()
    seconds: dict[str, float] = {}
    for stage in executed:
        seconds[stage.stage_id] = seconds.get(stage.stage_id, 0.0) + stage.seconds
    needs = {stage.stage_id: stage.needs for stage in timeline.stages}
    work: dict[str, Work] = {}
    for stage_id, took_s in seconds.items():
        found, pending = dict[str, None](), list(needs[stage_id])
        seen: set[str] = set()
        while pending:
            need = pending.pop()
            if need in seen:
                continue
            seen.add(need)
            # After reruns, a stage may have first run before a stage that it needs.
            if need in work:
                found[need] = None
            elif need not in seconds:
                pending += needs.get(need, ())
        work[stage_id] = Work(took_s, tuple(found))
    return work


def find_critical_chain(timeline: Timeline, seconds: float) -> CriticalChain:
    """Return the critical chain of a run that took this many seconds, including planning."""
    work = list_work(timeline)
    jobs = max(timeline.jobs, 1)
    ends, causes = schedule(work, jobs)
    length_s, at_best_s = max(ends.values(), default=0.0), measure_length(work, len(work) or 1)
    chain: list[ChainLink] = []
    stage = max(ends, key=lambda one: ends[one], default="")
    while stage:
        free = {**work, stage: work[stage]._replace(seconds=0.0)}
        cause = causes[stage]
        link = ChainLink(
            stage_id=stage,
            seconds=work[stage].seconds,
            cause=cause,
            waited_for_worker=bool(cause) and cause not in work[stage].needs,
            # A shorter stage can change the order so that the others take longer; then nothing is saved.
            saves_s=max(length_s - measure_length(free, jobs), 0.0),
            saves_at_best_s=at_best_s - measure_length(free, len(work)),
        )
        chain.insert(0, link)
        stage = cause
    executed = timeline.list_executed()
    began_s = min((stage.began_s for stage in executed), default=0.0)
    ended_s = max((stage.ended_s for stage in executed), default=0.0)
    return CriticalChain(
        links=tuple(chain),
        jobs=jobs,
        before_s=max(seconds - timeline.seconds, 0.0) + began_s,
        stages_s=ended_s - began_s,
        after_s=max(timeline.seconds - ended_s, 0.0),
        scheduled_s=length_s,
        at_best_s=at_best_s,
    )
