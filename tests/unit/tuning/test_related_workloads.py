"""Schedules of related workloads: the same operator in another shape."""

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
from tvmflow.compiler.schedules.intrinsics import load_intrinsics
from tvmflow.tuning.budget import Task
from tvmflow.tuning.ledger import WorkloadDescription
from tvmflow.tuning.measure import trace_json
from tvmflow.tuning.proposals import fit_schedules, fit_tiles
from tvmflow.tuning.workloads import family_key


def context(task: Task) -> Any:
    load_intrinsics(TARGET)
    tune_context = ms.TuneContext(
        tvm.ir.load_json(task.mod),
        target=tvm.target.Target(TARGET),
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        rand_state=3,
        num_threads=1,
    )
    tune_context.pre_tuning(
        max_trials=64, num_trials_per_iter=8, design_spaces=tune_context.generate_design_space()
    )
    return tune_context


def traces(task: Task) -> list[Any]:
    return [trace_json(entry.sch.trace) for entry in context(task).generate_measure_candidates()]


@pytest.fixture(scope="module")
def small() -> Task:
    return task_of(model(conv(16), relu, shape=(1, 8, 16, 16)))


@pytest.fixture(scope="module")
def large() -> Task:
    return task_of(model(conv(24), relu, shape=(1, 12, 28, 28)))


def fit(task: Task, recorded: list[Any]) -> list[Any]:
    postprocs = context(task).space_generator.postprocs
    return list(fit_schedules(tvm.ir.load_json(task.mod), recorded, postprocs, seed=1))


def test_schedules_of_another_shape_apply_and_compute_the_same(small: Task, large: Task) -> None:
    """Each is fitted to the new extents, and the result is a schedule of the new workload."""
    fitted = fit(large, traces(small))
    assert len(fitted) == 8
    for schedule in fitted:
        types = [entry.ty for entry in schedule.mod["main"].params]
        assert [int(n) for n in types[0].shape] == [1, 12, 28, 28]
        tvm.tirx.build(schedule.mod, target=tvm.target.Target(TARGET))


def test_evolution_can_mutate_fitted_schedules(small: Task, large: Task) -> None:
    """The mark between a schedule and its postprocessing is kept, so that neither is applied twice."""
    for schedule in fit(large, traces(small)):
        kinds = [str(entry.kind.name) for entry in schedule.trace.insts]
        assert kinds.count("EnterPostproc") == 1
        again = tvm.s_tir.Schedule(tvm.ir.load_json(large.mod), seed=1)
        schedule.trace.apply_to_schedule(again, remove_postproc=True)
        assert all(entry.apply(again) for entry in context(large).space_generator.postprocs)


def test_decisions_stay_the_same_for_the_same_shape(small: Task) -> None:
    """Decisions that fit are not changed."""
    recorded = traces(small)
    fitted = [trace_json(entry.trace) for entry in fit(small, recorded)]
    assert [entry[1] for entry in fitted] == [entry[1] for entry in recorded]


def test_schedules_that_do_not_apply_are_left_out(large: Task) -> None:
    """Another operator's schedule, or nonsense, is no candidate and no error."""
    other = traces(task_of(model(dense(32), relu, softmax, shape=(32, 32))))
    nonsense = [[["GetSBlock", [], ["no such block", "main"], ["b9"]]], []]
    assert fit(large, [nonsense]) == []
    assert len(fit(large, [*other, nonsense])) <= len(other)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=5), st.integers(1, 4096))
def test_fitted_tiles_are_factors_of_the_extent(sizes: list[int], extent: int) -> None:
    """Their product is the extent, and only the outermost may be larger than before."""
    tiles = fit_tiles(sizes, extent)
    assert math.prod(tiles) == extent
    assert all(tile <= size for tile, size in zip(tiles[1:], sizes[1:], strict=True))


def test_tiles_that_fit_are_kept() -> None:
    """The inner ones first: they decide about registers."""
    assert fit_tiles([4, 1, 2, 8], 64) == [4, 1, 2, 8]
    assert fit_tiles([4, 1, 2, 8], 128) == [8, 1, 2, 8]
    assert fit_tiles([4, 1, 2, 8], 28) == [2, 1, 2, 7]


def test_a_family_is_an_operator_in_all_its_shapes(small: Task, large: Task) -> None:
    """Extents do not matter, the operator and what is fused with it do."""

    def family(task: Task) -> str:
        return family_key(tvm.ir.load_json(task.mod))

    assert family(small) == family(large)
    assert family(small) != family(task_of(model(conv(16), shape=(1, 8, 16, 16))))
    assert family(task_of(model(dense(8)))) == family(task_of(model(dense(9))))


def test_related_workloads_are_ordered_by_distance(tmp_path: Path) -> None:
    """Those of the same family, the nearest flops first, without the workload itself."""
    ledger = open_ledger(tmp_path)
    for key, family, flops in (
        ("own", "conv", 100.0),
        ("far", "conv", 1000.0),
        ("near", "conv", 80.0),
        ("other", "dense", 100.0),
    ):
        description = WorkloadDescription(key, flops, family=family)
        ledger.describe(key, description, f"module of {key}")
    assert ledger.related_workloads("own") == ["near", "far"]
    assert ledger.related_workloads("unknown") == []
    assert ledger.kernel("near") == "module of near"
    assert ledger.kernel("unknown") == ""
