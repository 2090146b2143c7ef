"""Loops whose indices repeat: LLVM's vectors do not reach beyond the period."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm.script
from tvm import tirx

from tvmflow.compiler.code_generation import build_kernels, split_loops_where_indices_repeat
from tvmflow.graph.ir import find_nodes

SOURCE = """
@T.prim_func(s_tir=True)
def main(a: T.Buffer((64,), "float32"), b: T.Buffer((2048,), "float32"), c: T.Buffer(({extent},), "float32")):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True}})
    for i in range({extent}):
        c[i] = T.if_then_else(
            ({step} * i) % {divisor} < {divisor} // 2, a[({step} * i) % {divisor}], a[({step} * i + 1) % {divisor}] * b[i]
        )
"""


def list_loops(extent: int, step: int, divisor: int) -> list[int]:
    """Return the numbers of iterations of a kernel's loops after the pass; -1 for those that are computed."""
    source = SOURCE.format(extent=extent, step=step, divisor=divisor)
    mod = split_loops_where_indices_repeat()(tvm.IRModule({"main": tvm.script.from_source(source)}))
    loops = find_nodes(mod["main"].body, tirx.For)
    return [
        int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else -1
        for loop in sorted(loops, key=lambda loop: str(loop.loop_var.name).count("inner"))
    ]


@pytest.mark.parametrize(
    ("extent", "step", "divisor", "loops"),
    [
        (16, 1, 8, [2, 8]),
        (20, 1, 8, [3, -1]),
        (16, 2, 8, [4, 4]),
        (8, 1, 8, [8]),
        (18, 1, 6, [18]),
        (2048, 1, 1024, [2048]),
    ],
)
def test_loops_end_where_an_index_repeats(
    extent: int, step: int, divisor: int, loops: list[int]
) -> None:
    """By powers of 2 that are shorter than what LLVM computes at once; others it computes one by one."""
    assert list_loops(extent, step, divisor) == loops


@pytest.mark.parametrize("extent", [16, 20, 64, 1000])
@pytest.mark.parametrize(("step", "divisor"), [(1, 2), (1, 8), (2, 8), (3, 16), (1, 64)])
def test_the_numbers_stay(extent: int, step: int, divisor: int) -> None:
    """Also where the last period is not whole."""
    source = SOURCE.format(extent=extent, step=step, divisor=divisor)
    mod = tvm.IRModule({"main": tvm.script.from_source(source)})
    library = build_kernels(mod, tvm.target.Target({"kind": "llvm", "mcpu": "x86-64"}))
    a, b = (np.random.default_rng(0).normal(size=n).astype("float32") for n in (64, 2048))
    result = tvm.runtime.tensor(np.zeros(extent, "float32"))
    library["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), result)
    i = np.arange(extent)
    first, second = step * i % divisor, (step * i + 1) % divisor
    expected = np.where(first < divisor // 2, a[first], a[second] * b[i])
    assert np.array_equal(result.numpy(), expected)
