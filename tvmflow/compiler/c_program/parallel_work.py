"""How many threads a call of a kernel is worth, by the work in its parallel loops.

Handing a part of a loop to a thread that is awake takes some tenths of a microsecond, waking one some
tens of them. So a short loop stays on the caller's thread, and so does a whole program of short loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.prim.expr import BinaryOpExpr

from tvmflow.compiler.ir import operator_name

# Operations on vectors, and loads of them, that a fast core does in a nanosecond: measured are 30 in matrix
# products and convolutions from the caches, 5 to 10 where kernels wait for memory.
_OPERATIONS_PER_NS: Final = 16
# A function such as erf, in operations.
_CALL_OPERATIONS: Final = 16
_LANES: Final = 16
_UNKNOWN_EXTENT: Final = 8
# A function of a user's: its author asked for threads.
_EXTERN_OPERATIONS: Final = 1 << 17

# What is left to one thread, and what a program must have in all for others to be woken.
_LEAST_TASK_NS: Final = 2_500
_LEAST_PROGRAM_NS: Final = 100_000
_MAX_TASKS: Final = 1024


class ParallelWork(NamedTuple):
    """The work of a kernel in parallel loops.

    Attributes:
        ns: About how many nanoseconds one core needs for all of them.
        loops: How often a call begins one; those inside a loop over time steps begin in each step.
    """

    ns: float
    loops: float

    @property
    def useful_tasks(self) -> int:
        """Into how many tasks a loop is worth dividing; 1 if it is not."""
        return min(max(int(self.ns / max(self.loops, 1) / _LEAST_TASK_NS), 1), _MAX_TASKS)


def estimate_parallel_work(function: tirx.PrimFunc) -> ParallelWork:
    """Return the work of a scheduled kernel in parallel loops."""
    operations, loops = _count_operations(function.body, 1.0, is_parallel=False)
    return ParallelWork(operations / _OPERATIONS_PER_NS, loops)


def count_useful_tasks(works: Mapping[str, ParallelWork], calls: Iterable[str]) -> dict[str, int]:
    """Return for each kernel into how many tasks its parallel loops are worth dividing: 1 if they are not.

    Args:
        works: The work of each kernel.
        calls: The kernels that a program calls, once for each call.

    >>> works = {"dense": ParallelWork(120_000, 1), "gru": ParallelWork(60_000, 50)}
    >>> count_useful_tasks(works, ["dense", "gru"])
    {'dense': 48, 'gru': 1}
    >>> count_useful_tasks({"dense": ParallelWork(20_000, 1)}, ["dense", "dense"])
    {'dense': 1}
    """
    tasks = {name: work.useful_tasks for name, work in works.items()}
    program_ns = sum(works[name].ns for name in calls if tasks[name] > 1)
    return tasks if program_ns >= _LEAST_PROGRAM_NS else dict.fromkeys(tasks, 1)


def _count_operations(body: Any, repeats: float, *, is_parallel: bool) -> tuple[float, float]:
    """Return the operations in parallel loops of a statement that runs so often, and their beginnings.

    The latter are how often one of the loops begins.
    """
    total = loops = 0.0

    def visit_loop(loop: tirx.For) -> Any:
        nonlocal total, loops
        extent = int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else _UNKNOWN_EXTENT
        if loop.kind == tirx.ForKind.VECTORIZED:
            extent = -(-extent // _LANES)
        is_first = loop.kind == tirx.ForKind.PARALLEL and not is_parallel
        operations, inner = _count_operations(
            loop.body, repeats * extent, is_parallel=is_parallel or is_first
        )
        total += operations
        loops += repeats if is_first else inner
        return tvm_ffi.WalkResult.SKIP

    def visit_store(store: tirx.BufferStore) -> Any:
        nonlocal total
        total += repeats * _cost_of(store.value) if is_parallel else 0
        return tvm_ffi.WalkResult.SKIP

    def visit_call(call: tvm.ir.Call) -> None:
        nonlocal total
        is_extern = operator_name(call) == "tirx.call_extern"
        total += repeats * _EXTERN_OPERATIONS if is_parallel and is_extern else 0

    callbacks = (
        (tirx.For, visit_loop),
        (tirx.BufferStore, visit_store),
        (tvm.ir.Call, visit_call),
    )
    tvm_ffi.structural_walk(body, callbacks, order="pre")
    return total, loops


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
