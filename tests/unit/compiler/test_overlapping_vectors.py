"""Vectors at the end of a row: they begin earlier where computing numbers twice changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm.script
from tvm import s_tir

from tests.support.kernels import LEVELS_HERE, level
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.tail_vectors import overlap_last_vectors

Array = np.ndarray[Any, Any]

KERNEL = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((5, {extent}), "float32"), y: T.Buffer((5, {extent}), "float32")):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"}})
    a = T.sblock_alloc_buffer((5, {extent}))
    b = T.sblock_alloc_buffer((5, {extent}))
    for i in range(5):
{steps}
"""
STEP = """
        for j{n} in range({vectors}):
            for k{n} in T.vectorized(16):
                with T.sblock("step{n}"):
                    vi = T.axis.spatial(5, i)
                    vj = T.axis.spatial({extent}, j{n} * 16 + k{n})
                    T.where(j{n} * 16 + k{n} < {extent})
                    {statement}
"""


def make(extent: int, *statements: str) -> tvm.IRModule:
    """Return a kernel of loops over the vectors of rows, one for each statement."""
    vectors = -(-extent // 16)
    steps = "".join(
        STEP.format(n=n, vectors=vectors, extent=extent, statement=statement)
        for n, statement in enumerate(statements)
    )
    return tvm.IRModule({"main": tvm.script.from_source(KERNEL.format(extent=extent, steps=steps))})


def count_conditions(mod: tvm.IRModule) -> int:
    """Return how many vectors still have a condition after the pass."""
    before = [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
    ]
    script: str = tvm.ir.transform.Sequential([*before, overlap_last_vectors()])(mod).script()
    return script.count("T.where(")


def run(mod: tvm.IRModule, x: Array) -> Array:
    """Return what a kernel computes."""
    library = build_kernels(mod, tvm.target.Target(level(LEVELS_HERE[-1])))
    shape = [int(extent) for extent in mod["main"].params[1].ty.shape]
    output = tvm.runtime.tensor(np.zeros(shape, np.float32))
    library["main"](tvm.runtime.tensor(x), output)
    result: Array = output.numpy()
    return result


COPY = "y[vi, vj] = x[vi, vj] * T.float32(2)"
TO_A = "a[vi, vj] = x[vi, vj] * T.float32(2)"
TO_B = "b[vi, vj] = a[vi, vj] * T.float32(2)"
FROM_B = "y[vi, vj] = b[vi, vj]"
SUM = "y[vi, vj] = y[vi, vj] + x[vi, vj]"


@pytest.mark.parametrize(
    ("statements", "conditions", "factor"),
    [
        # each number of the result is a function of the parameters
        ((COPY,), 0, 2),
        # b may get the memory of a, whose numbers are read once: what is computed of them a second time would be of b
        ((TO_A, TO_B, FROM_B), 1, 4),
        # a number would be added twice
        ((COPY, SUM), 1, 3),
    ],
)
@pytest.mark.parametrize("extent", [17, 31, 97])
def test_vectors_overlap_where_numbers_may_be_computed_twice(
    extent: int, statements: tuple[str, ...], conditions: int, factor: int
) -> None:
    mod = make(extent, *statements)
    assert count_conditions(mod) == conditions
    x = np.random.default_rng(0).standard_normal((5, extent)).astype(np.float32)
    np.testing.assert_allclose(run(mod, x), factor * x, rtol=1e-6)


@pytest.mark.parametrize("extent", [3, 15])
def test_a_row_that_is_shorter_than_a_vector_keeps_its_condition(extent: int) -> None:
    """There is no place for a whole one."""
    mod = make(extent, COPY)
    assert count_conditions(mod) == 1
    x = np.random.default_rng(0).standard_normal((5, extent)).astype(np.float32)
    np.testing.assert_array_equal(run(mod, x), 2 * x)


def test_vectors_in_registers_keep_their_condition() -> None:
    """In an unrolled loop: registers have no computed index."""
    schedule = s_tir.Schedule(make(97, COPY))
    _, vectors, _ = schedule.get_loops(schedule.get_sblock("step0"))
    schedule.unroll(vectors)
    assert count_conditions(schedule.mod) == 1


PRIVATE = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((9, 97), "float32"), y: T.Buffer((97,), "float32")):
    T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"})
    sums = T.sblock_alloc_buffer((97,), scope=SCOPE)
    for j in range(7):
        for k0 in T.vectorized(16):
            with T.sblock("init"):
                v = T.axis.spatial(97, j * 16 + k0)
                T.where(j * 16 + k0 < 97)
                sums[v] = T.float32(0)
        for r in range(9):
            for k1 in T.vectorized(16):
                with T.sblock("update"):
                    v = T.axis.spatial(97, j * 16 + k1)
                    vr = T.axis.reduce(9, r)
                    T.where(j * 16 + k1 < 97)
                    sums[v] = sums[v] + x[vr, v]
        for k2 in T.vectorized(16):
            with T.sblock("result"):
                v = T.axis.spatial(97, j * 16 + k2)
                T.where(j * 16 + k2 < 97)
                y[v] = sums[v]
"""


def test_sums_of_a_vector_of_their_own_overlap() -> None:
    """Each vector begins with zeros."""
    mod = tvm.IRModule({"main": tvm.script.from_source(PRIVATE.replace("SCOPE", '"local"'))})
    assert count_conditions(mod) == 0
    x = np.random.default_rng(0).standard_normal((9, 97)).astype(np.float32)
    np.testing.assert_allclose(run(mod, x), x.sum(0), rtol=1e-5, atol=1e-6)


def test_sums_that_all_vectors_share_keep_their_condition() -> None:
    """A loop over numbers around that over vectors would add some of them twice."""
    source = PRIVATE.replace("SCOPE", '"global"').replace(
        "        for r in range(9):\n            for k1",
        "    for r in range(9):\n        for j1 in range(7):\n            for k1",
    )
    source = source.replace("j * 16 + k1", "j1 * 16 + k1").replace(
        "        for k2", "    for j in range(7):\n        for k2"
    )
    mod = tvm.IRModule({"main": tvm.script.from_source(source)})
    assert count_conditions(mod) == 1
    x = np.random.default_rng(0).standard_normal((9, 97)).astype(np.float32)
    np.testing.assert_allclose(run(mod, x), x.sum(0), rtol=1e-5, atol=1e-6)


SEARCH = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((5, 97), "float32"), y: T.Buffer((5, 97), "float32")):
    T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"})
    found = T.sblock_alloc_buffer((5, 16))
    most = T.sblock_alloc_buffer((5,))
    away = T.sblock_alloc_buffer((5, 97))
    for i in range(5):
        for j in range(7):
            for k in T.vectorized(16):
                with T.sblock("search"):
                    vk, vi, vj = T.axis.remap("SSR", [k, i, j])
                    T.where(j * 16 + k < 97)
                    with T.init():
                        found[vi, vk] = T.float32(-1000)
                    found[vi, vk] = OPERATOR(found[vi, vk], x[vi, vj * 16 + vk])
        for k in range(16):
            with T.sblock("most"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    most[vi] = T.float32(-1000)
                most[vi] = T.max(most[vi], found[vi, vk])
        for j in range(7):
            for k in T.vectorized(16):
                with T.sblock("away"):
                    vi = T.axis.spatial(5, i)
                    vj = T.axis.spatial(97, j * 16 + k)
                    T.where(j * 16 + k < 97)
                    away[vi, vj] = x[vi, vj] - most[vi]
        for j in range(7):
            for k in T.vectorized(16):
                with T.sblock("result"):
                    vi = T.axis.spatial(5, i)
                    vj = T.axis.spatial(97, j * 16 + k)
                    T.where(j * 16 + k < 97)
                    y[vi, vj] = away[vi, vj]
"""


def test_a_search_may_meet_a_number_twice() -> None:
    """Its vectors overlap, as do those of numbers that are computed from one number of the row."""
    mod = tvm.IRModule({"main": tvm.script.from_source(SEARCH.replace("OPERATOR", "T.max"))})
    assert count_conditions(mod) == 0
    x = np.random.default_rng(0).standard_normal((5, 97)).astype(np.float32)
    x[2, 96] = x[3, 0] = x[4, 81] = 9
    np.testing.assert_array_equal(run(mod, x), x - x.max(1, keepdims=True))


def test_a_product_of_numbers_keeps_its_condition() -> None:
    """A number may be a factor only once."""
    source = SEARCH.replace("OPERATOR", "T.Mul").replace("T.float32(-1000)", "T.float32(1)", 1)
    assert count_conditions(tvm.IRModule({"main": tvm.script.from_source(source)})) == 1
