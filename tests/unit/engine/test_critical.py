"""The critical chain of a run, against naive oracles on random graphs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmflow.engine.timeline import (
    ChainLink,
    TimedStage,
    Timeline,
    Work,
    find_critical_chain,
    list_work,
    measure_length,
    schedule,
)

Graph = dict[str, Work]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw stages in topological order that take whole seconds, each with any needs among those before it."""
    work: Graph = {}
    for number in range(draw(st.integers(1, 8))):
        needs = draw(st.lists(st.sampled_from([*work]), unique=True)) if work else []
        work[f"s{number}"] = Work(float(draw(st.integers(0, 4))), tuple(needs))
    return work


def longest_path(work: Graph) -> float:
    """Return the length of the longest of all paths, each walked to its end."""

    def walk(stage: str) -> float:
        return work[stage].seconds + max(map(walk, work[stage].needs), default=0.0)

    return max(map(walk, work))


def simulate(work: Graph, jobs: int) -> float:
    """Return how long the stages take, second by second, with a list of what is done and what runs."""
    left, running, now = dict(work), dict[str, float](), 0.0
    while left or running:
        done = [stage for stage in work if stage not in left and stage not in running]
        may_begin = [
            stage for stage, item in left.items() if all(need in done for need in item.needs)
        ]
        if may_begin and len(running) < jobs:
            running[may_begin[0]] = left.pop(may_begin[0]).seconds
        elif any(seconds <= 0 for seconds in running.values()):
            del running[next(stage for stage, seconds in running.items() if seconds <= 0)]
        else:
            now += 1.0
            running = {stage: seconds - 1.0 for stage, seconds in running.items()}
    return now


@given(graphs(), st.integers(1, 4))
def test_a_schedule_is_as_long_as_a_simulated_one(work: Graph, jobs: int) -> None:
    if all(item.seconds for item in work.values()):
        assert measure_length(work, jobs) == simulate(work, jobs)
    else:
        # stages that end at once may be begun in another order
        assert longest_path(work) <= measure_length(work, jobs)


@given(graphs())
def test_with_a_worker_for_each_stage_the_longest_path_decides(work: Graph) -> None:
    """And without the time of a stage, the longest path of the rest."""
    assert measure_length(work, len(work)) == longest_path(work)
    for stage in work:
        free = {**work, stage: work[stage]._replace(seconds=0.0)}
        assert measure_length(free, len(work)) == longest_path(free)


@given(graphs(), st.integers(1, 4))
def test_no_worker_runs_two_stages_and_none_begins_too_early(work: Graph, jobs: int) -> None:
    """Each stage begins when the one that is named as its cause ends."""
    ends, causes = schedule(work, jobs)
    begins = {stage: ends[stage] - item.seconds for stage, item in work.items()}
    for stage, item in work.items():
        assert begins[stage] == (ends[causes[stage]] if causes[stage] else 0.0)
        assert all(ends[need] <= begins[stage] for need in item.needs)
        at_once = [one for one in work if begins[one] <= begins[stage] < ends[one]]
        assert len(at_once) <= jobs


@given(graphs(), st.integers(1, 4))
def test_a_chain_is_as_long_as_the_schedule(work: Graph, jobs: int) -> None:
    """Each stage of it saves what recomputing says, in the same order of stages or with enough workers."""
    chain = find_critical_chain(timeline_of(work, jobs), 100.0)
    kept = list_work(timeline_of(work, jobs))
    assert sum(link.seconds for link in chain.links) == chain.scheduled_s
    assert chain.scheduled_s == measure_length(kept, jobs)
    assert chain.at_best_s == (longest_path(kept) if kept else 0.0)
    for link in chain.links:
        free = {**kept, link.stage_id: kept[link.stage_id]._replace(seconds=0.0)}
        assert link.saves_at_best_s == longest_path(kept) - longest_path(free)
        assert link.saves_s == max(chain.scheduled_s - measure_length(free, jobs), 0.0)
        assert link.saves_at_best_s <= link.seconds


def timeline_of(work: Graph, jobs: int) -> Timeline:
    """Return the timeline of a run of stages; those that take no time were not executed."""
    ends, _ = schedule(work, jobs)
    stages = tuple(
        TimedStage(stage, "ran", ends[stage] - item.seconds, ends[stage], item.needs)
        for stage, item in work.items()
    )
    return Timeline(began_s=0.0, seconds=99.0, jobs=jobs, stages=stages, spans=())


def test_a_chain_names_needs_and_workers() -> None:
    """Two targets on one worker: the second waits for the first, which it does not need."""
    work = {
        "import": Work(1.0),
        "build/a": Work(2.0, ("import",)),
        "build/b": Work(5.0, ("import",)),
    }
    chain = find_critical_chain(timeline_of(work, 1), 100.0)
    assert chain.links == (
        ChainLink("import", 1.0, "", False, saves_s=1.0, saves_at_best_s=1.0),
        ChainLink("build/a", 2.0, "import", False, saves_s=2.0, saves_at_best_s=0.0),
        ChainLink("build/b", 5.0, "build/a", True, saves_s=5.0, saves_at_best_s=3.0),
    )
    assert (chain.before_s, chain.stages_s, chain.after_s) == (1.0, 8.0, 91.0)
    assert (chain.scheduled_s, chain.at_best_s) == (8.0, 6.0)


def test_a_stage_needs_what_those_need_that_were_restored() -> None:
    """A stage between two that ran may be a hit: it still orders them."""
    stages = (
        TimedStage("import", "ran", 0.0, 1.0),
        TimedStage("lower", "hit", 1.0, 1.0, ("import",)),
        TimedStage("build", "failed", 1.0, 4.0, ("lower",)),
        TimedStage("build", "ran", 5.0, 6.0, ("lower",)),
    )
    timeline = Timeline(began_s=0.0, seconds=7.0, jobs=2, stages=stages, spans=())
    assert list_work(timeline) == {"import": Work(1.0), "build": Work(4.0, ("import",))}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_executed_nothing_has_no_chain(jobs: int) -> None:
    timeline = Timeline(began_s=0.0, seconds=2.0, jobs=jobs, stages=(), spans=())
    chain = find_critical_chain(timeline, 3.0)
    assert (chain.links, chain.before_s, chain.after_s) == ((), 1.0, 2.0)
