"""The critical chain of a run: the stages that decided how long it took, and what each of them cost.

The run is scheduled again with as many workers as it had and without one of the stages' times. Stages are
begun as doit begins them: when all that they need has ended, in the order in which they were begun then.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from tvmflow.engine.timeline import Timeline


class Work(NamedTuple):
    """A stage to schedule: the seconds that it takes, and the stages that must end before it."""

    seconds: float
    needs: tuple[str, ...] = ()


class ChainLink(NamedTuple):
    """A stage of the critical chain.

    Attributes:
        stage_id: The stage.
        seconds: The time that it took, with its waits for devices and locks.
        cause: The stage whose end let it begin; empty for the first one.
        waited_for_worker: Whether that stage is one that it does not need, and whose worker it got.
        saves_s: How much shorter the run would be if it cost nothing, with as many workers.
        saves_at_best_s: The same with a worker for every stage.
    """

    stage_id: str
    seconds: float
    cause: str
    waited_for_worker: bool
    saves_s: float
    saves_at_best_s: float


class CriticalChain(NamedTuple):
    """The critical chain of a run, where so many stages may run at a time.

    Its seconds are those before the first stage began, until the last one ended, and after that; of the
    stages when they are scheduled again; and of these with a worker for every stage.
    """

    links: tuple[ChainLink, ...]
    jobs: int
    before_s: float
    stages_s: float
    after_s: float
    scheduled_s: float
    at_best_s: float


def schedule(work: Mapping[str, Work], jobs: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return when each stage ends with so many workers, and the stage whose end let it begin.

    Of those that may begin, the first one in the order of the mapping does, which is topological.
    """
    order = {stage: place for place, stage in enumerate(work)}
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
        now, place = heapq.heappop(running)
        ended = stages[place]
        ends[ended] = now
        for later in needed_by[ended]:
            left[later] -= 1
            if not left[later]:
                heapq.heappush(ready, order[later])
    return ends, causes


def measure_length(work: Mapping[str, Work], jobs: int) -> float:
    """Return how long the stages take with so many workers."""
    return max(schedule(work, jobs)[0].values(), default=0.0)


def list_work(timeline: Timeline) -> dict[str, Work]:
    """Return the stages that a run executed, in the order in which they began.

    What a stage needs through one that was not executed, it needs itself; one that ran twice took both times.
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
            # of stages that ran again, the first execution may have begun before that of a need
            if need in work:
                found[need] = None
            elif need not in seconds:
                pending += needs.get(need, ())
        work[stage_id] = Work(took_s, tuple(found))
    return work


def find_critical_chain(timeline: Timeline, seconds: float) -> CriticalChain:
    """Return the critical chain of a run that took so many seconds, with its planning."""
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
            # with another order, a shorter stage may even make the rest longer
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
