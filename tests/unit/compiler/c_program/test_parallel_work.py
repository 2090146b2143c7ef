"""How many tasks the parallel loops of a kernel are worth."""

from __future__ import annotations

import pytest
import tvm
from tvm import te

from tvmflow.compiler.c_program.c_code import ParallelWork, estimate_parallel_work


@pytest.mark.parametrize(
    ("parallel", "work"),
    [
        ((), ParallelWork(0.0, 0.0)),
        ((0,), ParallelWork(768.0, 1.0)),
        ((1,), ParallelWork(768.0, 64.0)),
        ((0, 1), ParallelWork(768.0, 1.0)),
    ],
)
def test_loops_are_counted_where_they_begin(parallel: tuple[int, ...], work: ParallelWork) -> None:
    """A load, a product and a store for each of 64×64 numbers; a loop inside another one begins 64 times."""
    data = te.placeholder((64, 64), name="data")
    doubled = te.compute((64, 64), lambda i, j: data[i, j] * 2.0, name="doubled")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([data, doubled]))
    loops = schedule.get_loops(schedule.get_sblock("doubled"))
    for index in parallel:
        schedule.parallel(loops[index])
    assert estimate_parallel_work(schedule.mod["main"]) == work


def test_a_loop_of_some_microseconds_is_divided() -> None:
    """Into tasks of 2.5 µs; one that begins often is judged by what it does each time."""
    assert ParallelWork(4_000, 1).useful_tasks == 1
    assert ParallelWork(10_000, 1).useful_tasks == 4
    assert ParallelWork(10_000, 10).useful_tasks == 1
    assert ParallelWork(1e12, 1).useful_tasks == 1024
