"""The rule `winograd`: the transforms of Winograd convolutions.

Both loops over a tile are unrolled, so that the constants of the transforms become additions.
"""

from __future__ import annotations

from typing import Final

from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators import winograd
from tvmflow.compiler.schedules.blocks import Block, analyze_blocks

_PARTS_PER_CORE: Final = 8


def apply(schedule: Schedule, cpu: CpuModel) -> bool:
    """Schedule a kernel that transforms the data or the result of tiles; return False for another kernel."""
    blocks = analyze_blocks(schedule) or []
    blocks_by_name = {str(block.stmt.name_hint): block for block in blocks}
    if winograd.DATA in blocks_by_name and len(blocks) == 2:
        _schedule_data(schedule, blocks[0], blocks_by_name[winograd.DATA], cpu)
        return True
    return winograd.IMAGE in blocks_by_name and _schedule_image(schedule, blocks, cpu)


def _schedule_data(schedule: Schedule, pad: Block, block: Block, cpu: CpuModel) -> None:
    """Transform some rows of tiles of one block of channels at a time, with their padded data in the cache."""
    size, _, channels, tiles, _ = block.spatial_extents
    n, _, height, _, _ = pad.spatial_extents
    tile = size - 2
    tile_rows = (height - 2) // tile
    tile_columns = tiles // (n * tile_rows)
    rows = tile_rows
    while rows > 1 and channels * n * (tile_rows // rows) < _PARTS_PER_CORE * cpu.cores:
        rows = next(count for count in range(rows - 1, 0, -1) if tile_rows % count == 0)
    i, j, c, p, lane, row, column = schedule.get_loops(block.handle)
    parts, y, z = schedule.split(p, [n * tile_rows // rows, rows, tile_columns])
    schedule.reorder(c, parts, y, z, i, j, row, column, lane)
    fused = schedule.fuse(c, parts)
    schedule.parallel(fused)
    for loop in (i, j, row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.compute_at(pad.handle, fused)
    schedule.vectorize(schedule.get_loops(pad.handle)[-1])
    cached = schedule.cache_write(block.handle, 0, "local")
    schedule.reverse_compute_at(cached, j)
    schedule.vectorize(schedule.get_loops(cached)[-1])
    schedule.decompose_reduction(block.handle, row)


def _schedule_image(schedule: Schedule, blocks: list[Block], cpu: CpuModel) -> bool:
    """Transform a tile at a time, and compute its epilogue (bias, sum, activation) while it is in registers."""
    (block,) = (candidate for candidate in blocks if candidate.is_reduction)
    final = blocks[-1]
    if final.is_reduction or len(final.spatial_extents) != 5 or blocks[0] is not block:
        return False
    for intermediate in blocks[1:-1]:
        schedule.compute_inline(intermediate.handle)
    tile = block.spatial_extents[4]
    i, o, y, z, lane = schedule.get_loops(final.handle)
    tile_row, p = schedule.split(y, [None, tile])
    tile_column, q = schedule.split(z, [None, tile])
    schedule.reorder(i, o, tile_row, tile_column, p, q, lane)
    fused = schedule.fuse(i, o, tile_row)
    if cpu.cores > 1:
        schedule.parallel(fused)
    schedule.compute_at(block.handle, tile_column, preserve_unit_loops=True)
    schedule.set_scope(block.handle, 0, "local")
    for loop in (p, q):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    *_, p, q, lane, row, column = schedule.get_loops(block.handle)
    schedule.reorder(p, q, row, column, lane)
    for loop in (p, q, row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.decompose_reduction(block.handle, row)
    return True
