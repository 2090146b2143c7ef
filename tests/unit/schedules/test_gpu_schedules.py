"""Kernels for GPUs that nothing was searched for."""

from __future__ import annotations

import tvm
from tvm import te

from tvmflow import schedules

TARGET = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
}


def test_a_rule_gives_threads_and_leaves_its_module_as_it_was() -> None:
    """TVM's passes write into the module that they are given; tuned traces fit only the original."""
    data = te.placeholder((64, 64), name="data")
    doubled = te.compute((64, 64), lambda i, j: data[i, j] * 2.0, name="doubled")
    mod = tvm.IRModule({"main": te.create_prim_func([data, doubled])})
    before = mod.script()
    made, roads = schedules.by_rule(mod, TARGET, 1)
    assert roads == {"main": "fallback"}
    assert "threadIdx.x" in made.script()
    assert mod.script() == before
