"""The rule `row_reductions`: kernels that reduce rows and use the results on the same rows.

Softmax, norms, and sums along the last axis: all steps of a row run while it is in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.schedules.blocks import Block, analyze_blocks, is_contiguous, list_loads
from tvmflow.compiler.schedules.elementwise import (
    fuse,
    fuse_and_parallelize,
    peel_last_iteration,
    vectorize_loop,
)


class _Step(NamedTuple):
    """A block of a row, and the block of its partial sums, one for each lane, which runs before it."""

    block: Block
    partial_sums: Any = None

    @property
    def handles(self) -> list[Any]:
        return [self.block.handle] if self.partial_sums is None else [*self[1:], self.block.handle]


def apply(schedule: Schedule, cpu: CpuModel) -> Schedule | None:
    """Compute all blocks of a row after each other, rows in parallel; return None for another kernel."""
    blocks = analyze_blocks(schedule) or []
    row_axes = _count_shared_axes(blocks)
    if not row_axes:
        return None
    steps = [_Step(block, _reduce_in_vectors(schedule, block, cpu)) for block in blocks]
    for block, _ in steps:
        if not block.is_reduction and row_axes < len(block.spatial_extents):
            _vectorize_innermost(schedule, block, cpu)
    rows = [
        fuse(schedule, list(schedule.get_loops(handle))[:row_axes])
        for step in steps
        for handle in step.handles
    ]
    row = schedule.merge(*rows) if len(rows) > 1 else rows[0]
    is_worthwhile = sum(block.work for block in blocks) >= MIN_PARALLEL_ELEMENTS
    fuse_and_parallelize(schedule, [row], is_worthwhile, cpu)
    return schedule


def _count_shared_axes(blocks: list[Block]) -> int:
    """Return how many of the outermost axes all blocks share.

    At one point of them, a block reads no other block's results but those at that point.
    """
    count = 0
    for extents in zip(*(block.spatial_extents for block in blocks), strict=False):
        if len(set(extents)) > 1:
            break
        count += 1
    outputs = [block.output for block in blocks]
    for block in blocks:
        for load in list_loads(block):
            if any(load.source.same_as(output) for output in outputs):
                pairs = list(zip(load.indices, block.spatial_axes, strict=False))[:count]
                same = [index.same_as(axis) for index, axis in pairs]
                count = (*same, False).index(False)
    return count


def _vectorize_innermost(schedule: Schedule, block: Block, cpu: CpuModel) -> None:
    """Vectorize the innermost loop if all loads are contiguous."""
    if is_contiguous(block, block.spatial_axes[-1]):
        vectorize_loop(schedule, schedule.get_loops(block.handle)[-1], cpu)


def _reduce_in_vectors(schedule: Schedule, block: Block, cpu: CpuModel) -> Any:
    """Split a reduction along contiguous data into one partial sum a lane, added up at the end.

    Returns:
        The handle of the block of partial sums; None if the reduction does not allow it.
    """
    is_open = len(block.axes) - 1 in block.open_axes
    if (
        not block.is_reduction
        or (block.reduction_extents[-1] <= cpu.lanes and not is_open)
        or not is_contiguous(block, block.axes[-1])
    ):
        return None
    loop = schedule.get_loops(block.handle)[-1]
    _, lanes = schedule.split(loop, [None, cpu.lanes])
    partial_sums = schedule.rfactor(lanes, factor_axis=len(block.spatial_extents))
    *_, vectors, lanes = schedule.get_loops(partial_sums)
    schedule.vectorize(lanes)
    if not is_open and block.reduction_extents[-1] % cpu.lanes:
        peel_last_iteration(schedule, vectors)
    return partial_sums
