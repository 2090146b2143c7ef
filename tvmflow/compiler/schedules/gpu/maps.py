"""The rules `transposes` and `elementwise`: kernels without a reduction."""

from __future__ import annotations

import math
from typing import Any, Final

import tvm
from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.gpu_tiles import VECTOR, Device
from tvmflow.compiler.schedules.blocks import depends_on, find_read, list_all_blocks, uses
from tvmflow.compiler.schedules.gpu.accesses import (
    bind,
    element_stride,
    fuse_before,
    is_reduction,
    list_loads,
    unroll,
)
from tvmflow.graph.ir import IF_THEN_ELSE, find_nodes, operator_name

_THREADS: Final = 128
# Transposes read square tiles with this side along one axis and write them along another.
_SIDE: Final = 32
_SIDE_ROWS: Final = 8
_MIN_SIDE: Final = 8


def _make_one_block(schedule: Schedule) -> Any | None:
    """If a kernel has no reduction, inline all its blocks into the last one and return it; else None."""
    handles = list_all_blocks(schedule)
    stmts = [schedule.get(handle) for handle in handles]
    if any(is_reduction(schedule, handle) for handle in handles):
        return None
    if not all(isinstance(stmt.body, tirx.BufferStore) for stmt in stmts):
        return None
    for handle in handles[:-1]:
        schedule.compute_inline(handle)
    last = handles[-1]
    loops = schedule.get_loops(last)
    return last if len(loops) == len(schedule.get(last).iter_vars) else None


# ---------------------------------------------------------------- transposes


def transpose(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule a kernel whose input and output are contiguous along different axes; None for others."""
    last = _make_one_block(schedule)
    if last is None:
        return None
    stmt = schedule.get(last)
    axes = list(stmt.iter_vars)
    long = [position for position, axis in enumerate(axes) if int(axis.dom.extent) >= _MIN_SIDE]
    if not long or element_stride(stmt.body, axes[long[-1]].var) != 1:
        return None
    found = [
        (load, position)
        for load in list_loads(stmt)
        if element_stride(load, axes[long[-1]].var) not in (0, 1)
        for position in long[:-1]
        if element_stride(load, axes[position].var) == 1
        and not find_nodes(list(load.indices), tvm.ir.Call)
        and sum(uses(index, axes[position].var) for index in load.indices) == 1
    ]
    if len(found) != 1 or device.shared_bytes < 4 * _SIDE * (_SIDE + 1):
        return None
    ((load, across),) = found
    loops = list(schedule.get_loops(last))
    fast, slow = loops[long[-1]], loops[across]
    others = [loop for loop in loops if not any(loop.same_as(one) for one in (fast, slow))]
    slow_block, serial, slow_thread = schedule.split(slow, [None, _SIDE // _SIDE_ROWS, _SIDE_ROWS])
    fast_block, fast_thread = schedule.split(fast, [None, _SIDE])
    schedule.reorder(*others, slow_block, fast_block, slow_thread, fast_thread, serial)
    block = schedule.fuse(*others, slow_block, fast_block)
    copy = schedule.cache_read(last, find_read(stmt, load), "shared")
    schedule.compute_at(copy, block, preserve_unit_loops=True)
    fuse_before(schedule, copy)
    _divide_square(schedule, copy, load, axes[across].var)
    schedule.bind(block, "blockIdx.x")
    bind(schedule, "threadIdx", "yx", slow_thread, fast_thread)
    unroll(schedule, fast_thread, VECTOR)
    return schedule


def _divide_square(schedule: Schedule, copy: Any, load: Any, variable: Any) -> None:
    """Divide the copy of a square between threads; neighbors read adjacent values."""
    loops = list(schedule.get_loops(copy)[1:])
    (axis,) = (i for i, index in enumerate(load.indices) if uses(index, variable))
    nearest = loops[len(loops) - len(load.indices) + axis]
    others = [loop for loop in loops if not loop.same_as(nearest)]
    schedule.reorder(*others, nearest)
    serial, row = schedule.split(schedule.fuse(*others), [None, _SIDE_ROWS])
    schedule.bind(row, "threadIdx.y")
    _, thread = schedule.split(nearest, [None, _SIDE])
    schedule.bind(thread, "threadIdx.x")
    unroll(schedule, serial, VECTOR)
    # the rows of a square begin in different banks of shared memory
    rank = len(load.indices)
    if rank > 1:
        schedule.storage_align(copy, 0, axis=max(0, rank - 2), factor=_SIDE, offset=1)


# ---------------------------------------------------------------- elementwise


def elementwise(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule a kernel whose neighboring threads access adjacent vectors; None for other kernels."""
    last = _make_one_block(schedule)
    if last is None:
        return None
    stmt = schedule.get(last)
    loops = list(schedule.get_loops(last))
    lanes, repeats, axes = _choose_lanes(stmt), 1, list(stmt.iter_vars)
    indices = [index for load in list_loads(stmt) for index in load.indices]
    slow = [index for index in indices if find_nodes(index, tvm.ir.Call, tirx.Cast)]
    # Expensive indices do not depend on these axes, so a thread can reuse them for several values.
    free = [
        position
        for position, axis in enumerate(axes[:-1])
        if int(axis.dom.extent) > 1 and not any(uses(index, axis.var) for index in slow)
    ]
    if lanes == 1 and slow and free:
        position = free[-1]
        extent = int(axes[position].dom.extent)
        repeats = next(count for count in (4, 2, 1) if extent % count == 0)
        loops[position], inner = schedule.split(loops[position], [None, repeats])
        schedule.reorder(*loops, inner)
    fused = schedule.fuse(*loops) if loops else schedule.add_unit_loop(last)
    block, thread, vector = schedule.split(fused, [None, min(_THREADS, device.threads), lanes])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    if lanes > 1:
        schedule.vectorize(vector)
    unroll(schedule, thread, repeats * VECTOR)
    return schedule


def _choose_lanes(stmt: Any) -> int:
    """Return the number of values that a thread computes at once; 1 unless all accesses are vectors."""
    axes = list(stmt.iter_vars)
    accesses = [stmt.body, *list_loads(stmt)]
    count = math.prod(int(axis.dom.extent) for axis in axes)
    if not axes or count % VECTOR:
        return 1
    if all(_is_linear(access, axes) for access in accesses):
        return VECTOR
    last = axes[-1]
    if int(last.dom.extent) % VECTOR:
        return 1
    conditions = [
        call.args[0]
        for call in find_nodes(stmt.body.value, tvm.ir.Call)
        if operator_name(call) == IF_THEN_ELSE
    ]
    selects = [select.condition for select in find_nodes(stmt.body.value, tirx.Select)]
    is_uniform = not any(uses(condition, last.var) for condition in conditions + selects)
    is_vector = all(_is_vector(access, axes) for access in accesses)
    return VECTOR if is_uniform and is_vector else 1


def _is_linear(access: Any, axes: list[Any]) -> bool:
    """Return whether an access is contiguous over all axes, in their order."""
    if find_nodes(list(access.indices), tirx.FloorDiv, tirx.FloorMod, tvm.ir.Call):
        return False
    expected = 1
    for axis in reversed(axes):
        extent = int(axis.dom.extent)
        if extent > 1 and element_stride(access, axis.var) != expected:
            return False
        expected *= extent
    return True


def _is_vector(access: Any, axes: list[Any]) -> bool:
    """Return whether an access has aligned vectors along the last axis, or does not depend on it."""
    last = axes[-1]
    if not depends_on(access, last.var):
        return True
    extent = int(last.dom.extent)
    steps = [element_stride(access, last.var, step) for step in (1, VECTOR - 1, extent - 1)]
    if steps != [1, VECTOR - 1, extent - 1] or find_nodes(list(access.indices), tvm.ir.Call):
        return False
    others = [element_stride(access, axis.var) for axis in axes[:-1] if int(axis.dom.extent) > 1]
    return all(stride is not None and stride % VECTOR == 0 for stride in others)
