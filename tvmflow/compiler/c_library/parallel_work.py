"""How many threads a call of a kernel is worth, by the work in its parallel loops.

Handing a part of a loop to a thread that is awake takes some tenths of a microsecond, waking one some
tens of them. So a short loop stays on the caller's thread, and so does a whole program of short loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.prim.expr import BinaryOpExpr

# Operations on vectors, and loads of them, that a fast core does in a nanosecond: measured are 30 in matrix
# products and convolutions from the caches, 5 to 10 where kernels wait for memory.
_OPERATIONS_PER_NS: Final = 16
# A function such as erf, in operations.
_CALL_OPERATIONS: Final = 16
_LANES: Final = 16
_UNKNOWN_EXTENT: Final = 8

# What is left to one thread, and what a program must have in all for others to be woken.
_LEAST_TASK_NS: Final = 2_500
_LEAST_PROGRAM_NS: Final = 50_000
_MAX_TASKS: Final = 1024


def estimate_parallel_ns(function: tirx.PrimFunc) -> float:
    """Return about how many nanoseconds one core needs for the parallel loops of a scheduled kernel."""
    return _count_operations(function.body, 1.0, is_parallel=False) / _OPERATIONS_PER_NS


def count_useful_tasks(kernel_ns: Mapping[str, float], calls: Iterable[str]) -> dict[str, int]:
    """Return for each kernel into how many tasks its parallel loops are worth dividing: 1 if they are not.

    Args:
        kernel_ns: The time of the parallel loops of each kernel, in nanoseconds.
        calls: The kernels that a program calls, once for each call.

    >>> count_useful_tasks({"dense": 60_000.0, "relu": 4_000.0}, ["dense", "relu"])
    {'dense': 24, 'relu': 1}
    >>> count_useful_tasks({"dense": 20_000.0}, ["dense", "dense"])
    {'dense': 1}
    """
    tasks = {
        name: min(max(int(ns / _LEAST_TASK_NS), 1), _MAX_TASKS) for name, ns in kernel_ns.items()
    }
    program_ns = sum(kernel_ns[name] for name in calls if tasks[name] > 1)
    return tasks if program_ns >= _LEAST_PROGRAM_NS else dict.fromkeys(tasks, 1)


def _count_operations(body: Any, repeats: float, *, is_parallel: bool) -> float:
    """Return the operations in parallel loops of a statement that is executed so often."""
    total = 0.0

    def visit_loop(loop: tirx.For) -> Any:
        nonlocal total
        extent = int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else _UNKNOWN_EXTENT
        if loop.kind == tirx.ForKind.VECTORIZED:
            extent = -(-extent // _LANES)
        inside = is_parallel or loop.kind == tirx.ForKind.PARALLEL
        total += _count_operations(loop.body, repeats * extent, is_parallel=inside)
        return tvm_ffi.WalkResult.SKIP

    def visit_store(store: tirx.BufferStore) -> Any:
        nonlocal total
        total += repeats * _cost_of(store.value) if is_parallel else 0
        return tvm_ffi.WalkResult.SKIP

    tvm_ffi.structural_walk(
        body, ((tirx.For, visit_loop), (tirx.BufferStore, visit_store)), order="pre"
    )
    return total


def _cost_of(value: Any) -> int:
    """Return the operations that compute and store a value, without those of its indices."""
    cost = 1

    def visit_load(_: Any) -> Any:
        nonlocal cost
        cost += 1
        return tvm_ffi.WalkResult.SKIP

    def visit_call(_: Any) -> None:
        nonlocal cost
        cost += _CALL_OPERATIONS

    def visit(node: Any) -> None:
        nonlocal cost
        cost += isinstance(node, BinaryOpExpr)

    callbacks = ((tvm.ir.TensorLoad, visit_load), (tvm.ir.Call, visit_call), (object, visit))
    tvm_ffi.structural_walk(value, callbacks, order="pre")
    return cost
