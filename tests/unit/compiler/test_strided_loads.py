"""Loads of every second, third or fourth number: whole vectors within the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm.script
from tvm import tirx

from tests.support.kernels import LEVELS_HERE, level
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.vector_code import shuffle_strided_loads
from tvmflow.graph.ir import find_nodes, replace_variables

SOURCE = """
@T.prim_func(s_tir=True)
def main(a: T.Buffer(({size},), "{dtype}"), b: T.Buffer(({extent},), "{dtype}")):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"}})
    for i in range({extent} // {lanes}):
        b[T.ramp(i * {lanes}, 1, {lanes})] = a[T.ramp(i * {lanes} * {stride} + {first}, {stride}, {lanes})]
"""


REPEATED = """
@T.prim_func(s_tir=True)
def main(a: T.Buffer(({size},), "float32"), b: T.Buffer(({extent},), "float32")):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "main"}})
    for i in range({extent} // 16):
        for k in T.vectorized(16):
            b[i * 16 + k] = a[(i * 16 + {first} + k) // {count}]
"""


def make(size: int, extent: int, stride: int, first: int, lanes: int, dtype: str) -> tvm.IRModule:
    source = SOURCE.format(**locals())
    return tvm.IRModule({"main": tvm.script.from_source(source)})


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize("stride", [2, 3, 4, 5])
@pytest.mark.parametrize("spare", [0, 9])
def test_the_numbers_are_those_of_the_stride(
    stride: int, lanes: int, dtype: str, spare: int
) -> None:
    """Also where the last of them is the tensor's last number; nothing beyond the tensor is read."""
    extent, first = 3 * lanes, 2
    size = first + stride * (extent - 1) + 1 + spare
    mod = make(size, extent, stride, first, lanes, dtype)
    shuffled = shuffle_strided_loads()(mod)
    loads = find_nodes(shuffled["main"].body, tvm.ir.TensorLoad)
    # five vectors for one are not worth it
    assert len(loads) == (stride if stride <= 4 else 1)
    if stride <= 4:
        last = {loop.loop_var: loop.extent - 1 for loop in find_nodes(mod["main"].body, tirx.For)}
        simplify = tvm.sym.Analyzer().simplify
        ends = [simplify(replace_variables(load.indices[0].base, last)) for load in loads]
        assert max(map(int, ends)) + lanes <= size
    library = build_kernels(mod, tvm.target.Target(level(LEVELS_HERE[-1])))
    data = np.random.default_rng(0).integers(-99, 99, size).astype(dtype)
    out = tvm.runtime.tensor(np.zeros(extent, dtype))
    library["main"](tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), data[first::stride][:extent])


@pytest.mark.parametrize("first", [0, 8, 3])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
def test_numbers_are_read_several_times_each(count: int, first: int) -> None:
    """As vectors if one begins with a new number; else one by one."""
    extent = 48
    size = (extent + first - 1) // count + 1
    source = REPEATED.format(size=size, extent=extent, first=first, count=count)
    mod = tvm.IRModule({"main": tvm.script.from_source(source)})
    library = build_kernels(mod, tvm.target.Target(level(LEVELS_HERE[-1])))
    data = np.arange(size, dtype=np.float32)
    out = tvm.runtime.tensor(np.zeros(extent, np.float32))
    library["main"](tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), np.repeat(data, count)[first : first + extent])
    vectorized = tirx.transform.VectorizeLoop(True)(mod)
    simplified = tirx.transform.StmtSimplify()(vectorized)
    shuffles = find_nodes(shuffle_strided_loads()(simplified)["main"].body, tirx.Shuffle)
    assert len(shuffles) == int(first % count == 0 and count in (2, 4, 8))
