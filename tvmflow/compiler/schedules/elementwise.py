"""The rule `elementwise`: kernels that compute each element by itself, parallelized and vectorized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.schedules import pieces
from tvmflow.compiler.schedules.blocks import (
    MIN_LANES,
    Block,
    analyze_blocks,
    depends_on,
    element_stride,
    find_axis_without_slow_indices,
    has_computed_indices,
    has_slow_operations,
    linear_stride,
    list_intermediate_buffers,
    list_loads,
    narrow_vectors,
    reads_vectors,
)

# With so many parts of the work a core, an uneven rest costs little.
_PARTS_PER_CORE: Final = 16
# The first-level cache holds the lines of so many rows of a transposed tile; a line holds so many numbers.
_MAX_TILE_ROWS: Final = 64
_LINE: Final = 16


def apply(schedule: Schedule, cpu: CpuModel) -> Schedule | None:
    """Return the schedule of a kernel without reductions; None for another kernel."""
    blocks = analyze_blocks(schedule)
    if not blocks or any(block.is_reduction for block in blocks):
        return None
    for block in _find_inlined(blocks, list_intermediate_buffers(schedule)):
        schedule.compute_inline(block.handle)
    parts = pieces.split(schedule)
    for part in parts:
        for block in analyze_blocks(part) or []:
            schedule_block(part, block, cpu)
    return pieces.join(parts)


def _find_inlined(blocks: Sequence[Block], intermediate: Sequence[Any]) -> list[Block]:
    """Return the blocks that are computed where they are read: not the results, and none with slow operations that would run more than once for an element.

    Args:
        blocks: The blocks of a kernel, in order.
        intermediate: The buffers that are not parameters of the kernel.
    """
    inlined: list[Block] = []
    slow: list[Block] = []
    for block in blocks:
        sources = [load.source for load in list_loads(block)]
        reads_slow = any(other.output.same_as(source) for other in slow for source in sources)
        is_slow = reads_slow or has_slow_operations(block)
        is_result = not any(block.output.same_as(buffer) for buffer in intermediate)
        if is_result or (is_slow and _count_reads(block, blocks) > block.work):
            continue
        inlined.append(block)
        if is_slow:
            slow.append(block)
    return inlined


def _count_reads(block: Block, blocks: Sequence[Block]) -> int:
    """Return how many numbers all blocks together read of a block's output."""
    return sum(pieces.count_reads(reader, block.output) for reader in blocks)


def schedule_block(schedule: Schedule, block: Block, cpu: CpuModel) -> None:
    """Parallelize a block's outer spatial loops, and vectorize the innermost one where all loads are contiguous."""
    loops = list(schedule.get_loops(block.handle))[-len(block.axes) :][: len(block.spatial_axes)]
    is_worthwhile = block.work >= MIN_PARALLEL_ELEMENTS
    last, extent = block.spatial_axes[-1], block.spatial_extents[-1]
    if not block.is_reduction and reads_vectors(block, last, extent):
        outer = _vectorize(schedule, block, loops, cpu)
    elif not block.is_reduction and (lanes := _find_part(block, cpu)):
        vectors, vector = schedule.split(loops[-1], [None, lanes])
        schedule.vectorize(vector)
        outer = [*loops[:-1], vectors]
    elif (position := find_axis_without_slow_indices(block)) is not None:
        outer = _move_inside(schedule, block, loops, position)
    elif not block.is_reduction:
        outer = _tile_transposition(schedule, block, loops, cpu)
    else:
        outer = loops
    parallelize(schedule, outer, is_worthwhile, cpu)


def _find_part(block: Block, cpu: CpuModel) -> int:
    """Return the lanes of vectors that each lie in one block of channels, as where blocked data become rows; 0 for other data."""
    last, extent = block.spatial_axes[-1], block.spatial_extents[-1]
    lanes = math.gcd(extent, cpu.lanes)
    return narrow_vectors(lanes, lambda count: reads_vectors(block, last, count))


def parallelize(schedule: Schedule, loops: list[Any], is_worthwhile: bool, cpu: CpuModel) -> None:
    """Distribute as few of the outermost loops as make enough parts over the cores.

    The indices of fused loops are quotients and remainders, so the other loops stay as they are.
    """
    if not loops or not is_worthwhile:
        return
    parts, count = 1, 0
    while count < len(loops) and parts < _PARTS_PER_CORE * cpu.cores:
        parts *= int(schedule.get(loops[count]).extent)
        count += 1
    fuse_and_parallelize(schedule, loops[:count], is_worthwhile, cpu)


def fuse_and_parallelize(
    schedule: Schedule, loops: list[Any], is_worthwhile: bool, cpu: CpuModel
) -> Any:
    """Fuse loops and distribute them over the cores if that is worthwhile; return the fused loop."""
    fused = fuse(schedule, loops)
    if is_worthwhile and cpu.cores > 1:
        schedule.parallel(fused)
    return fused


def fuse(schedule: Schedule, loops: Sequence[Any]) -> Any:
    """Return one loop in place of some, which is the loop itself if there is one."""
    return schedule.fuse(*loops) if len(loops) > 1 else loops[0]


def _vectorize(schedule: Schedule, block: Block, loops: list[Any], cpu: CpuModel) -> list[Any]:
    """Vectorize the innermost loop; return the loops around it.

    Loops whose elements follow each other in all tensors are fused before.
    """
    count = count_fused_axes(block, cpu.lanes)
    outer = list(loops[:-count])
    loop = fuse(schedule, loops[-count:])
    if math.prod(block.spatial_extents[:-count]) < cpu.cores:
        # The loop over vectors runs in parallel, so it stays whole.
        return [*outer, *_split_vectors(schedule, loop, cpu)]
    vectorize_loop(schedule, loop, cpu)
    return outer


def vectorize_loop(schedule: Schedule, loop: Any, cpu: CpuModel) -> None:
    """Vectorize a loop of any length; what is left after the last whole vector is computed element by element."""
    extent = int(schedule.get(loop).extent)
    if extent % cpu.lanes and has_computed_indices(schedule):
        lanes = _divisor(extent, cpu.lanes)
        cpu = cpu._replace(lanes=lanes) if lanes >= MIN_LANES else cpu
    for vectors in _split_vectors(schedule, loop, cpu):
        if extent % cpu.lanes:
            peel_last_iteration(schedule, vectors)


def _split_vectors(schedule: Schedule, loop: Any, cpu: CpuModel) -> list[Any]:
    """Vectorize a loop; return the loop over vectors, if there is one."""
    if int(schedule.get(loop).extent) <= cpu.lanes:
        schedule.vectorize(loop)
        return []
    vectors, vector = schedule.split(loop, [None, cpu.lanes])
    schedule.vectorize(vector)
    return [vectors]


def peel_last_iteration(schedule: Schedule, loop: Any) -> None:
    """Have TVM move the last iteration, whose vector is not whole, behind the loop.

    It fails to where data or conditions are in the index of data (apache-tvm 0.27): the loop stays whole.
    """
    if not has_computed_indices(schedule):
        schedule.annotate(loop, "pragma_loop_partition_hint", True)


def count_fused_axes(block: Block, lanes: int) -> int:
    """Return how many of the innermost axes make a loop of whole vectors, or else the longest loop."""
    axes, extents = block.spatial_axes, block.spatial_extents
    count = 1
    while math.prod(extents[-count:]) % lanes and count < len(extents):
        if not _follow_each_other(block, axes[-count - 1], axes[-count], extents[-count - 1 :]):
            break
        count += 1
    return count


def _follow_each_other(block: Block, outer: Any, inner: Any, extents: Sequence[int]) -> bool:
    """Return whether all loads, and the store, move along two neighboring axes as along one axis."""
    if extents[0] == 1:
        return True
    store = tirx.BufferLoad(block.output, list(block.stmt.body.indices))
    for load in (*list_loads(block), store):
        first = linear_stride(load, block.axes, outer, extents[0])
        second = linear_stride(load, block.axes, inner, extents[1])
        if first is None or second is None or first != second * extents[1]:
            return False
    return True


def _move_inside(schedule: Schedule, block: Block, loops: list[Any], position: int) -> list[Any]:
    """Compute indices once for so many values of an axis as stay in the cache; return the loops around these."""
    extent = block.spatial_extents[position]
    rows = _divisor(extent, _MAX_TILE_ROWS)
    outer = list(loops)
    outer[position], inner = schedule.split(
        loops[position], [None, rows if rows >= _LINE else extent]
    )
    schedule.reorder(*outer, inner)
    return outer


def _tile_transposition(
    schedule: Schedule, block: Block, loops: list[Any], cpu: CpuModel
) -> list[Any]:
    """Compute a transposition in tiles whose lines stay in the cache; return the loops around them.

    A tile spans the axis along which results are contiguous and the one along which data are.
    Results are stored as vectors, of which each number is loaded by itself.
    """
    axes, extents = block.spatial_axes, block.spatial_extents
    strides = {
        load: linear_stride(load, block.axes, axes[-1], extents[-1])
        for load in list_loads(block)
        if depends_on(load, axes[-1])
    }
    position = _find_contiguous_axis(block, [load for load, step in strides.items() if step != 1])
    if position is None:
        return loops
    count = count_fused_axes(block, cpu.lanes)
    is_vector = (
        None not in strides.values()
        and math.prod(extents[-count:]) >= MIN_LANES
        and position < len(extents) - count
        and not has_computed_indices(schedule)
    )
    if not is_vector:
        return _tile_numbers(schedule, block, loops, position)
    outer = list(loops[:-count])
    outer[position], row = schedule.split(outer[position], [None, _choose_rows(extents[position])])
    vectors = _split_vectors(schedule, fuse(schedule, loops[-count:]), cpu)
    schedule.reorder(*outer, *vectors, row, schedule.get_loops(block.handle)[-1])
    if math.prod(int(schedule.get(loop).extent) for loop in outer) < cpu.cores:
        # The loop over vectors runs in parallel, so it stays whole.
        return [*outer, *vectors]
    for loop in vectors if math.prod(extents[-count:]) % cpu.lanes else ():
        peel_last_iteration(schedule, loop)
    return outer


def _tile_numbers(schedule: Schedule, block: Block, loops: list[Any], position: int) -> list[Any]:
    """Compute a transposition in tiles, one number at a time; return the loops around them.

    The innermost loop is the one whose other side has the shorter stride: lines whose distance
    is a large power of two would displace each other.

    Args:
        schedule: The schedule.
        block: The block.
        loops: Its loops.
        position: The axis along which data are contiguous.
    """
    extents, last = block.spatial_extents, block.spatial_axes[-1]
    outer = list(loops)
    rows, columns = _divisor(extents[position], _LINE), _divisor(extents[-1], _MAX_TILE_ROWS)
    outer[position], row = schedule.split(loops[position], [None, rows])
    outer[-1], column = schedule.split(loops[-1], [None, columns])
    loads = [load for load in list_loads(block) if depends_on(load, last)]
    read_stride = max(abs(element_stride(load, block.axes, last) or 0) for load in loads)
    write_stride = math.prod(extents[position + 1 :])
    tile = (row, column) if read_stride <= write_stride else (column, row)
    schedule.reorder(*outer, *tile)
    return outer


def _find_contiguous_axis(block: Block, loads: Sequence[Any]) -> int | None:
    """Return the position of an axis, but the last, along which all loads are contiguous."""
    for position in reversed(range(len(block.spatial_extents) - 1)):
        axis, extent = block.spatial_axes[position], block.spatial_extents[position]
        if extent > 1 and all(element_stride(load, block.axes, axis) == 1 for load in loads):
            return position
    return None


def _choose_rows(extent: int) -> int:
    """Return the rows of a tile: a divisor of the extent, or a whole line if that is much more."""
    rows = _divisor(extent, _LINE)
    return rows if 2 * rows >= min(extent, _LINE) else _LINE


def _divisor(extent: int, limit: int) -> int:
    """Return the largest divisor of an extent up to a limit."""
    return next(n for n in range(min(extent, limit), 0, -1) if extent % n == 0)
