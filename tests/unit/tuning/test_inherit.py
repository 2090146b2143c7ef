"""What a new workload takes over from the same operator in another shape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.s_tir import meta_schedule as ms

from tests.support.trials import TARGET
from tests.support.tuning import conv, dense, model, open_ledger, relu, softmax, task_of
from tvmflow.schedules.intrinsics import load_intrinsics
from tvmflow.tuning.inherit import _tiles, inherited
from tvmflow.tuning.measure import trace_json
from tvmflow.tuning.search import Task
from tvmflow.tuning.workloads import family_key


def context(task: Task) -> Any:
    load_intrinsics(TARGET)
    made = ms.TuneContext(
        tvm.ir.load_json(task.mod),
        target=tvm.target.Target(TARGET),
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        rand_state=3,
        num_threads=1,
    )
    made.pre_tuning(
        max_trials=64, num_trials_per_iter=8, design_spaces=made.generate_design_space()
    )
    return made


def traces(task: Task) -> list[Any]:
    return [trace_json(each.sch.trace) for each in context(task).generate_measure_candidates()]


@pytest.fixture(scope="module")
def small() -> Task:
    return task_of(model(conv(16), relu, shape=(1, 8, 16, 16)))


@pytest.fixture(scope="module")
def large() -> Task:
    return task_of(model(conv(24), relu, shape=(1, 12, 28, 28)))


def take_over(task: Task, given_: list[Any]) -> list[Any]:
    postprocs = context(task).space_generator.postprocs
    return list(inherited(tvm.ir.load_json(task.mod), given_, postprocs, seed=1))


def test_schedules_of_another_shape_apply_and_compute_the_same(small: Task, large: Task) -> None:
    """Every one of them, fitted to the new extents; the result is a schedule of the new workload."""
    found = take_over(large, traces(small))
    assert len(found) == 8
    for schedule in found:
        types = [each.ty for each in schedule.mod["main"].params]
        assert [int(n) for n in types[0].shape] == [1, 12, 28, 28]
        tvm.tirx.build(schedule.mod, target=tvm.target.Target(TARGET))


def test_evolution_can_breed_from_what_was_taken_over(small: Task, large: Task) -> None:
    """The mark between a schedule and its postprocessing is there, so that neither is done twice."""
    for schedule in take_over(large, traces(small)):
        kinds = [str(each.kind.name) for each in schedule.trace.insts]
        assert kinds.count("EnterPostproc") == 1
        again = tvm.s_tir.Schedule(tvm.ir.load_json(large.mod), seed=1)
        schedule.trace.apply_to_schedule(again, remove_postproc=True)
        assert all(each.apply(again) for each in context(large).space_generator.postprocs)


def test_for_the_same_shape_the_decisions_stay(small: Task) -> None:
    """What fits is not changed."""
    given_ = traces(small)
    found = [trace_json(each.trace) for each in take_over(small, given_)]
    assert [each[1] for each in found] == [each[1] for each in given_]


def test_what_does_not_apply_is_left_out(large: Task) -> None:
    """Another operator's schedule, or nonsense, is no candidate and no error."""
    other = traces(task_of(model(dense(32), relu, softmax, shape=(32, 32))))
    nonsense = [[["GetSBlock", [], ["no such block", "main"], ["b9"]]], []]
    assert take_over(large, [nonsense]) == []
    assert len(take_over(large, [*other, nonsense])) <= len(other)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=5), st.integers(1, 4096))
def test_tiles_are_factors_near_the_wanted_ones(wanted: list[int], extent: int) -> None:
    """Their product is the extent, and none but the outermost is larger than it was."""
    tiles = _tiles(wanted, extent)
    assert math.prod(tiles) == extent
    assert all(tile <= size for tile, size in zip(tiles[1:], wanted[1:], strict=True))


def test_tiles_that_fit_are_kept() -> None:
    """The inner ones first: they decide about registers."""
    assert _tiles([4, 1, 2, 8], 64) == [4, 1, 2, 8]
    assert _tiles([4, 1, 2, 8], 128) == [8, 1, 2, 8]
    assert _tiles([4, 1, 2, 8], 28) == [2, 1, 2, 7]


def test_a_family_is_an_operator_in_all_its_shapes(small: Task, large: Task) -> None:
    """Extents do not matter, the operator and what is fused with it do."""

    def family(task: Task) -> str:
        return family_key(tvm.ir.load_json(task.mod))

    assert family(small) == family(large)
    assert family(small) != family(task_of(model(conv(16), shape=(1, 8, 16, 16))))
    assert family(task_of(model(dense(8)))) == family(task_of(model(dense(9))))


def test_the_ledger_knows_relatives_by_their_distance(tmp_path: Path) -> None:
    """Those of the family, the nearest in work first; others and itself are none."""
    ledger = open_ledger(tmp_path)
    for key, family, flops in (
        ("own", "conv", 100.0),
        ("far", "conv", 1000.0),
        ("near", "conv", 80.0),
        ("other", "dense", 100.0),
    ):
        ledger.describe(key, {"name": key, "flops": flops, "family": family}, f"module of {key}")
    assert ledger.relatives("own") == ["near", "far"]
    assert ledger.relatives("unknown") == []
    assert ledger.kernel("near") == "module of near"
    assert ledger.kernel("unknown") == ""
