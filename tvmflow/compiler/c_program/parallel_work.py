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

from tvmflow.compiler.c_program.c_kernels import named_size_text
from tvmflow.compiler.ir import operator_name
from tvmflow.compiler.open_sizes import NoSize, list_symbols
from tvmflow.core.types import Size

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
    def operations(self) -> int:
        """The operations in all of them."""
        return int(self.ns * _OPERATIONS_PER_NS)

    @property
    def useful_tasks(self) -> int:
        """Into how many tasks a loop is worth dividing; 1 if it is not."""
        return min(max(int(self.ns / max(self.loops, 1) / _LEAST_TASK_NS), 1), _MAX_TASKS)


class OpenWork(NamedTuple):
    """A part of the work of a kernel whose loops have open sizes: both numbers times all extents.

    Attributes:
        extents: The extents that are open, as expressions of `core.dimensions`.
        operations: The operations in parallel loops.
        loops: How often a call begins one.
    """

    extents: tuple[str, ...]
    operations: int
    loops: int


TASK_OPERATIONS: Final = _LEAST_TASK_NS * _OPERATIONS_PER_NS
"""The operations of a task that is worth a thread of its own."""

PROGRAM_OPERATIONS: Final = _LEAST_PROGRAM_NS * _OPERATIONS_PER_NS
"""The operations in parallel loops of a program that is worth threads."""

MAX_TASKS: Final = _MAX_TASKS
"""The tasks of a loop, at most."""


def estimate_parallel_work(function: tirx.PrimFunc) -> ParallelWork:
    """Return the work of a scheduled kernel in parallel loops."""
    work = _count_operations(function.body, _Repeats(1.0), {}, is_parallel=False)
    operations, loops = work.get((), (0.0, 0.0))
    return ParallelWork(operations / _OPERATIONS_PER_NS, loops)


def estimate_open_work(function: tirx.PrimFunc, names: Mapping[Any, str]) -> tuple[OpenWork, ...]:
    """Return the work of a scheduled kernel with open sizes in parallel loops.

    Args:
        function: The kernel.
        names: The variables of its sizes, and their names in the extents.
    """
    work = _count_operations(function.body, _Repeats(1.0), names, is_parallel=False)
    return tuple(OpenWork(key, int(total), int(loops)) for key, (total, loops) in work.items())


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


class _Repeats(NamedTuple):
    """The number of runs of a statement: a number times all extents that are open."""

    times: float
    extents: tuple[str, ...] = ()

    def inside(self, extent: float | Size) -> _Repeats:
        if isinstance(extent, str):
            return _Repeats(self.times, tuple(sorted((*self.extents, extent))))
        return _Repeats(self.times * extent, self.extents)


# Open extents -> operations in parallel loops, and how often one of the loops begins.
_Work = dict[tuple[str, ...], tuple[float, float]]


def _count_operations(
    body: Any, repeats: _Repeats, names: Mapping[Any, str], *, is_parallel: bool
) -> _Work:
    """Return the operations in parallel loops of a statement that runs so often, and their beginnings."""
    work: _Work = {}

    def add(extents: tuple[str, ...], operations: float, loops: float) -> None:
        before = work.get(extents, (0.0, 0.0))
        work[extents] = (before[0] + operations, before[1] + loops)

    def visit_loop(loop: tirx.For) -> Any:
        extent = _read_extent(loop.extent, names)
        if loop.kind == tirx.ForKind.VECTORIZED and not isinstance(extent, str):
            extent = -(-extent // _LANES)
        is_first = loop.kind == tirx.ForKind.PARALLEL and not is_parallel
        inner = _count_operations(
            loop.body, repeats.inside(extent), names, is_parallel=is_parallel or is_first
        )
        for extents, (operations, loops) in inner.items():
            add(extents, operations, 0 if is_first else loops)
        if is_first:
            add(repeats.extents, 0, repeats.times)
        return tvm_ffi.WalkResult.SKIP

    def visit_store(store: tirx.BufferStore) -> Any:
        if is_parallel:
            add(repeats.extents, repeats.times * _cost_of(store.value), 0)
        return tvm_ffi.WalkResult.SKIP

    def visit_call(call: tvm.ir.Call) -> None:
        if is_parallel and operator_name(call) == "tirx.call_extern":
            add(repeats.extents, repeats.times * _EXTERN_OPERATIONS, 0)

    callbacks = (
        (tirx.For, visit_loop),
        (tirx.BufferStore, visit_store),
        (tvm.ir.Call, visit_call),
    )
    tvm_ffi.structural_walk(body, callbacks, order="pre")
    return work


def _read_extent(extent: Any, names: Mapping[Any, str]) -> float | Size:
    """Return the extent of a loop: a number, or an expression of names."""
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    if not set(list_symbols(extent)) <= names.keys():
        # it depends on the position in another loop
        return _UNKNOWN_EXTENT
    try:
        return named_size_text(extent, names)
    except NoSize:
        return _UNKNOWN_EXTENT


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
