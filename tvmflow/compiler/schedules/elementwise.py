"""The rule `elementwise`: kernels that compute each element by itself, parallelized and vectorized."""

from __future__ import annotations

import math
from typing import Any, Final

from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.schedules.blocks import Block, analyze_blocks, is_contiguous

MIN_PARALLEL_ELEMENTS: Final = 1 << 15
"""Fewer elements are not worth handing to another core."""

# A vector of fewer lanes is not worth its instructions.
_MIN_LANES: Final = 4


def apply(schedule: Schedule, cpu: CpuModel) -> bool:
    """Schedule a kernel without reductions; return False for another kernel."""
    blocks = analyze_blocks(schedule)
    if not blocks or any(block.is_reduction for block in blocks):
        return False
    for block in blocks[:-1]:
        schedule.compute_inline(block.handle)
    (final,) = analyze_blocks(schedule) or []
    schedule_block(schedule, final, cpu)
    return True


def schedule_block(schedule: Schedule, block: Block, cpu: CpuModel) -> None:
    """Parallelize a block's spatial loops, and vectorize the innermost one where all loads are contiguous."""
    extent = block.spatial_extents[-1]
    outer = list(schedule.get_loops(block.handle))[-len(block.spatial_extents) :]
    lanes = math.gcd(extent, cpu.lanes)
    is_wide = not block.is_reduction and lanes >= min(_MIN_LANES, cpu.lanes)
    if is_wide and is_contiguous(block, block.spatial_axes[-1]):
        vector = outer.pop()
        if extent > lanes:
            rest, vector = schedule.split(vector, [None, lanes])
            outer.append(rest)
        schedule.vectorize(vector)
    if outer:
        fuse_and_parallelize(schedule, outer, block.work >= MIN_PARALLEL_ELEMENTS, cpu)


def fuse_and_parallelize(
    schedule: Schedule, loops: list[Any], is_worthwhile: bool, cpu: CpuModel
) -> Any:
    """Fuse loops and distribute them over the cores if that is worthwhile; return the fused loop."""
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    if is_worthwhile and cpu.cores > 1:
        schedule.parallel(fused)
    return fused
