"""Code generation: where kernels keep their buffers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm.script

from tvmflow.compiler.code_generation import build_kernels

ALLOCATOR = "TVMBackendAllocWorkspace"


SOURCE = """
@T.prim_func(s_tir=True)
def main(source: T.Buffer((8, {0}), "float32"), target: T.Buffer((8, {0}), "float32")):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True}})
    for row in T.parallel(8):
        with T.sblock("row"):
            local = T.sblock_alloc_buffer(({0},), scope="local")
            for column in range({0}):
                local[column] = source[row, column] + T.float32(1)
            for column in range({0}):
                target[row, column] = local[{0} - 1 - column]
"""


def make_kernel(length: int) -> tvm.IRModule:
    """A kernel that adds 1 by way of a buffer of so many numbers in each task."""
    return tvm.IRModule({"main": tvm.script.from_source(SOURCE.format(length))})


@pytest.mark.parametrize(("length", "is_allocated"), [(7, False), (1024, False), (1025, True)])
def test_small_buffers_are_on_the_stack(length: int, is_allocated: bool) -> None:
    """Up to 4 KiB a buffer costs nothing; a larger one is allocated. Both give the right numbers."""
    target = tvm.target.Target({"kind": "llvm"})
    library = build_kernels(make_kernel(length), target)
    assert (ALLOCATOR in library.inspect_source("s")) == is_allocated
    source = np.random.default_rng(0).normal(size=(8, length)).astype("float32")
    result = tvm.runtime.tensor(np.zeros_like(source))
    library["main"](tvm.runtime.tensor(source), result)
    assert np.array_equal(result.numpy(), (source + np.float32(1))[:, ::-1])
