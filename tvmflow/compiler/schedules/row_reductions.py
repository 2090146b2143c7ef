"""The rule `row_reductions`: kernels that reduce rows and use the results on the same rows.

Softmax, norms, and sums along the last axis: all steps of a row run while it is in the cache.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.schedules.blocks import REDUCTION, Block, analyze_blocks, is_contiguous
from tvmflow.compiler.schedules.elementwise import MIN_PARALLEL_ELEMENTS, fuse_and_parallelize


def apply(schedule: Schedule, cpu: CpuModel) -> bool:
    """Compute all blocks of a row after each other, rows in parallel; return False for another kernel."""
    blocks = analyze_blocks(schedule) or []
    row_axes = _count_shared_axes(blocks)
    if not row_axes:
        return False
    final = blocks[-1]
    is_worthwhile = sum(block.work for block in blocks) >= MIN_PARALLEL_ELEMENTS
    partial_sums = {
        position: _reduce_in_vectors(schedule, block, cpu)
        for position, block in enumerate(blocks)
        if block.is_reduction
    }
    row_loops = list(schedule.get_loops(final.handle))[:row_axes]
    row = fuse_and_parallelize(schedule, row_loops, is_worthwhile, cpu)
    for position, block in reversed(list(enumerate(blocks))):
        if block is not final:
            schedule.compute_at(block.handle, row, preserve_unit_loops=True)
        if partial_sums.get(position) is not None:
            schedule.compute_at(partial_sums[position], row, preserve_unit_loops=True)
    for position, block in enumerate(blocks):
        if partial_sums.get(position) is not None:
            _vectorize_partial_sums(schedule, partial_sums[position])
        elif not block.is_reduction and row_axes < len(block.spatial_extents):
            _vectorize_innermost(schedule, block, cpu)
    return True


def _count_shared_axes(blocks: list[Block]) -> int:
    """Return how many of the outermost axes all blocks share: a row is one point of them."""
    count = 0
    for extents in zip(*(block.spatial_extents for block in blocks), strict=False):
        if len(set(extents)) > 1:
            break
        count += 1
    return count


def _vectorize_innermost(schedule: Schedule, block: Block, cpu: CpuModel) -> None:
    """Vectorize the innermost loop if all loads are contiguous."""
    extent = block.spatial_extents[-1]
    lanes = math.gcd(extent, cpu.lanes)
    if lanes > 1 and is_contiguous(block, block.spatial_axes[-1]):
        loop = schedule.get_loops(block.handle)[-1]
        vector = schedule.split(loop, [None, lanes])[1] if extent > lanes else loop
        schedule.vectorize(vector)


def _reduce_in_vectors(schedule: Schedule, block: Block, cpu: CpuModel) -> Any:
    """Split a reduction along contiguous data into one partial sum a lane, added up at the end.

    Returns:
        The handle of the block of partial sums; None if the reduction does not allow it.
    """
    extent = block.reduction_extents[-1]
    has_whole_vectors = extent % cpu.lanes == 0 and extent > cpu.lanes
    if not has_whole_vectors or not is_contiguous(block, block.axes[-1]):
        return None
    loop = schedule.get_loops(block.handle)[-1]
    _, vector = schedule.split(loop, [None, cpu.lanes])
    return schedule.rfactor(vector, factor_axis=len(block.spatial_extents))


def _vectorize_partial_sums(schedule: Schedule, partial_sums: Any) -> None:
    """Move the loop over lanes inside all other loops of the row, and vectorize it."""
    axes = list(schedule.get(partial_sums).iter_vars)
    lanes, *others = list(schedule.get_loops(partial_sums))[-len(axes) :]
    schedule.reorder(*others, lanes)
    schedule.vectorize(lanes)
    first = next(position for position, axis in enumerate(axes) if axis.iter_type == REDUCTION)
    schedule.decompose_reduction(partial_sums, others[first - 1])
