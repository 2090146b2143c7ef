"""Memory accesses of a kernel's blocks, and scheduling steps that several GPU rules share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.schedules.blocks import (
    REDUCTION,
    attempt,
    find_distance,
    list_all_blocks,
    loop_length,
)
from tvmflow.graph.ir import find_nodes


def is_reduction(schedule: Schedule, handle: Any) -> bool:
    """Return whether a block has axes that are reduced."""
    return any(axis.iter_type == REDUCTION for axis in schedule.get(handle).iter_vars)


def has_fixed_sizes(schedule: Schedule, handles: Sequence[Any]) -> bool:
    """Return whether no axis of the blocks has a dynamic length."""
    axes = [axis for handle in handles for axis in schedule.get(handle).iter_vars]
    return all(isinstance(axis.dom.extent, tirx.IntImm) for axis in axes)


def list_loads(stmt: Any) -> list[Any]:
    """Return the loads of a block, except of the buffer that it accumulates in."""
    loads = find_nodes(stmt.body.value, tvm.ir.TensorLoad)
    return [load for load in loads if not load.source.same_as(stmt.body.buffer)]


def element_stride(access: Any, variable: Any, step: int = 1) -> int | None:
    """Return how many elements an access moves for a variable from 0 to `step`; None if data-dependent."""
    buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
    return find_distance(access.indices, buffer.shape, variable, step)


def fuse_before(schedule: Schedule, handle: Any) -> None:
    """Inline the producers of a block that TVM can inline."""
    inlined = [True]
    while any(inlined):
        steps = [partial(schedule.compute_inline, one) for one in schedule.get_producers(handle)]
        inlined = [attempt(step, False) is None for step in steps]


def fuse_after(schedule: Schedule, handle: Any) -> None:
    """Inline all consumers of a block into the block."""
    while consumers := list(schedule.get_consumers(handle)):
        for consumer in consumers:
            schedule.reverse_compute_inline(consumer)


def fuse_epilogue(schedule: Schedule, main: Any) -> None:
    """Inline all blocks that follow a block into the last one."""
    handles = [main]
    for handle in handles:
        # the list grows while it is iterated, by all blocks that `main` depends on
        handles += schedule.get_producers(handle)
    before = [schedule.get(handle) for handle in handles]
    after = [
        handle
        for handle in list_all_blocks(schedule)
        if not any(map(schedule.get(handle).same_as, before))
    ]
    for handle in after[:-1]:
        schedule.compute_inline(handle)


def bind(schedule: Schedule, index: str, loops: str, *bound: Any) -> None:
    """Bind loops to the indices of blocks or threads along some axes, such as `zyx`."""
    for axis, loop in zip(loops, bound, strict=True):
        schedule.bind(loop, f"{index}.{axis}")


def vectorize(schedule: Schedule, loop: Any, lanes: int) -> None:
    """Vectorize the innermost `lanes` iterations of a loop if they divide its length."""
    if loop_length(schedule, loop) % lanes == 0:
        _, inner = schedule.split(loop, [None, lanes])
        schedule.vectorize(inner)


def unroll(schedule: Schedule, loop: Any, steps: int) -> None:
    """Unroll the loops within a loop that have at most `steps` iterations in total."""
    schedule.annotate(loop, "pragma_auto_unroll_max_step", steps)
    schedule.annotate(loop, "pragma_unroll_explicit", 1)
