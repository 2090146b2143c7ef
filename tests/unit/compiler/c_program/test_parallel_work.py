"""How many tasks the parallel loops of a kernel are worth."""

from __future__ import annotations

import pytest
import tvm
from tvm import te

from tvmflow.compiler.c_program.c_code import (
    ParallelWork,
    count_tasks,
    estimate_parallel_work,
)


@pytest.mark.parametrize(
    ("parallel", "work"),
    [
        ((), ()),
        ((0,), (ParallelWork((), 12_288, 1),)),
        ((1,), (ParallelWork((), 12_288, 64),)),
        ((0, 1), (ParallelWork((), 12_288, 1),)),
    ],
)
def test_loops_are_counted_where_they_begin(
    parallel: tuple[int, ...], work: tuple[ParallelWork, ...]
) -> None:
    """A load, a product and a store for each of 64×64 numbers; a loop inside another one begins 64 times."""
    data = te.placeholder((64, 64), name="data")
    doubled = te.compute((64, 64), lambda i, j: data[i, j] * 2.0, name="doubled")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([data, doubled]))
    loops = schedule.get_loops(schedule.get_sblock("doubled"))
    for index in parallel:
        schedule.parallel(loops[index])
    assert estimate_parallel_work(schedule.mod["main"], {}) == work


def test_a_loop_of_some_microseconds_is_divided() -> None:
    """Into tasks of 2.5 µs; one that begins often is judged by what it does each time."""
    assert count_tasks([ParallelWork((), 64_000, 1)]) == 1
    assert count_tasks([ParallelWork((), 160_000, 1)]) == 4
    assert count_tasks([ParallelWork((), 160_000, 10)]) == 1
    assert count_tasks([ParallelWork((), 1 << 44, 1)]) == 1024
