"""Schedules of untuned kernels on GPUs."""

from __future__ import annotations

import tvm
from tvm import te

from tvmflow.compiler import schedules

TARGET = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
}


def test_a_rule_binds_threads_and_does_not_change_its_argument() -> None:
    """TVM's passes change their argument in place; tuned traces fit only the original."""
    data = te.placeholder((64, 64), name="data")
    doubled = te.compute((64, 64), lambda i, j: data[i, j] * 2.0, name="doubled")
    mod = tvm.IRModule({"main": te.create_prim_func([data, doubled])})
    before = mod.script()
    scheduled, rules = schedules.schedule_untuned(mod, TARGET, 1)
    assert rules == {"main": "fallback"}
    assert "threadIdx.x" in scheduled.script()
    assert mod.script() == before
