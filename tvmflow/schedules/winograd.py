"""The transforms of Winograd convolutions: both loops over a tile unrolled, so that their constants become additions."""

from __future__ import annotations

from typing import Final

from tvm.s_tir import Schedule

from tvmflow.passes import winograd
from tvmflow.schedules._kernel import Block, blocks_of
from tvmflow.schedules._machine import Machine

# Parts of the work for each core.
_PARTS: Final = 8


def transform(schedule: Schedule, machine: Machine) -> bool:
    """Schedule a kernel that transforms the data or the result of tiles; False for another one."""
    blocks = blocks_of(schedule) or []
    named = {str(block.stmt.name_hint): block for block in blocks}
    if winograd.DATA in named and len(blocks) == 2:
        _data(schedule, blocks[0], named[winograd.DATA], machine)
        return True
    return winograd.IMAGE in named and _image(schedule, blocks, machine)


def _data(schedule: Schedule, pad: Block, block: Block, machine: Machine) -> None:
    """Some rows of tiles of one block of channels at a time, their padded data in the cache."""
    size, _, channels, count, _ = block.extents
    n, _, height, _, _ = pad.extents
    tile = size - 2
    down = (height - 2) // tile
    across = count // (n * down)
    rows = down
    while rows > 1 and channels * n * (down // rows) < _PARTS * machine.cores:
        rows = next(each for each in range(rows - 1, 0, -1) if down % each == 0)
    i, j, c, p, lane, row, column = schedule.get_loops(block.block)
    parts, y, z = schedule.split(p, [n * down // rows, rows, across])
    schedule.reorder(c, parts, y, z, i, j, row, column, lane)
    together = schedule.fuse(c, parts)
    schedule.parallel(together)
    for loop in (i, j, row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.compute_at(pad.block, together)
    schedule.vectorize(schedule.get_loops(pad.block)[-1])
    kept = schedule.cache_write(block.block, 0, "local")
    schedule.reverse_compute_at(kept, j)
    schedule.vectorize(schedule.get_loops(kept)[-1])
    schedule.decompose_reduction(block.block, row)


def _image(schedule: Schedule, blocks: list[Block], machine: Machine) -> bool:
    """A tile at a time, what follows (bias, sum, activation) done while it is in registers."""
    (block,) = (each for each in blocks if each.is_reduction)
    final = blocks[-1]
    if final.is_reduction or len(final.extents) != 5 or blocks[0] is not block:
        return False
    for each in blocks[1:-1]:
        schedule.compute_inline(each.block)
    tile = block.extents[4]
    i, o, y, z, lane = schedule.get_loops(final.block)
    down, p = schedule.split(y, [None, tile])
    across, q = schedule.split(z, [None, tile])
    schedule.reorder(i, o, down, across, p, q, lane)
    together = schedule.fuse(i, o, down)
    if machine.cores > 1:
        schedule.parallel(together)
    schedule.compute_at(block.block, across, preserve_unit_loops=True)
    schedule.set_scope(block.block, 0, "local")
    for loop in (p, q):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    *_, p, q, lane, row, column = schedule.get_loops(block.block)
    schedule.reorder(p, q, row, column, lane)
    for loop in (p, q, row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.decompose_reduction(block.block, row)
    return True
