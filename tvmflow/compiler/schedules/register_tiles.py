"""The rule `register_tiles`: convolutions, matrix products and pooling, with their sums held in registers.

The innermost axis of the result is a vector. A tile is `vectors` of them that read different
weights, times `points` that read different data: each weight is loaded once for all points
and each value of the data once for all vectors (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import tvm
from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.schedules import dot_products, tile_candidates
from tvmflow.compiler.schedules.blocks import (
    Block,
    analyze_blocks,
    is_contiguous,
    list_loads,
)
from tvmflow.compiler.schedules.elementwise import fuse_and_parallelize, schedule_block
from tvmflow.compiler.schedules.tile_candidates import ReductionAxes, Tile

_MAX_UNROLLED: Final = 160
# Fewer multiplications are not worth handing to another core.
_MIN_PARALLEL_WORK: Final = 1 << 16
# With so many parts of the work a core, an uneven rest costs little.
_PARTS_PER_CORE: Final = 16


# Shorter vectors are not worth their instructions.
_MIN_PAD_LANES: Final = 4


class SingleReduction(NamedTuple):
    """A kernel with one reduction.

    Attributes:
        pad: The block that pads the data; None if nothing is padded.
        main: The reduction.
        final: The block that computes the result from the sums, elementwise.
        axes: The roles of the reduction's axes.
        broadcast: The block that reads each element of the result several times; None if there is none.
    """

    pad: Block | None
    main: Block
    final: Block
    axes: ReductionAxes
    broadcast: Block | None


def generate(mod: tvm.IRModule, cpu: CpuModel) -> Iterator[Schedule]:
    """Yield a schedule for each tile that fits, the fastest estimate first; none for other kernels."""
    for tile in _list_tiles(mod, cpu):
        schedule = Schedule(mod, seed=1)
        try:
            reduction = _isolate_reduction(schedule, cpu)
            assert reduction is not None, "the kernel had tiles"
            _apply_tile(schedule, reduction, tile, cpu)
        # TVM rejects some tiles.
        except RuntimeError:
            continue
        yield schedule


def _list_tiles(mod: tvm.IRModule, cpu: CpuModel) -> list[Tile]:
    try:
        reduction = _isolate_reduction(Schedule(mod, seed=1), cpu)
    except RuntimeError:
        return []
    if reduction is None:
        return []
    pad, main, _, axes, _ = reduction
    return list(tile_candidates.generate_tiles(main, pad, axes, cpu))


def _isolate_reduction(schedule: Schedule, cpu: CpuModel) -> SingleReduction | None:
    """Inline all blocks of a kernel but its reduction, its padding and its result; None for other kernels."""
    blocks = analyze_blocks(schedule) or []
    reductions = [block for block in blocks if block.is_reduction]
    axes = tile_candidates.analyze_axes(reductions[0], cpu) if len(reductions) == 1 else None
    if axes is None:
        return None
    position = blocks.index(reductions[0])
    # What is read once is not worth a pass over memory.
    is_read_once = position > 0 and blocks[position - 1].work == reductions[0].work
    first = position if is_read_once else max(position - 1, 0)
    after = blocks[position + 1 :]
    # Norms, which have no weights, read their data again while these are in the cache.
    has_weights = axes.weight_bytes > 0
    small = _count_before_broadcast(reductions[0], after) if has_weights else len(after)
    kept = {small - 1, len(after) - 1}
    inlined = [block for index, block in enumerate(after) if index not in kept]
    for block in (*blocks[:first], *inlined):
        schedule.compute_inline(block.handle)
    if small == 0:
        schedule.cache_write(reductions[0].handle, 0, "local")
    isolated = analyze_blocks(schedule) or []
    broadcast = isolated.pop() if small < len(after) else None
    *before, main, final = isolated
    if len(before) > 1 or not _is_result(final, main):
        return None
    return SingleReduction(before[0] if before else None, main, final, axes, broadcast)


def _count_before_broadcast(main: Block, after: list[Block]) -> int:
    """Return how many of the blocks after a reduction compute its result: those before it is broadcast, or all."""
    if not after or math.prod(after[-1].spatial_extents) < 2 * math.prod(main.spatial_extents):
        return len(after)
    sizes = [block.spatial_extents == main.spatial_extents for block in after]
    return sizes.index(False)


def _is_result(final: Block, main: Block) -> bool:
    """Return whether a block computes the result from the sums; these may be padded."""
    if final.spatial_extents == main.spatial_extents:
        return True
    sums = [load for load in list_loads(final) if load.source.same_as(main.output)]
    return len(sums) > 0 and all(
        len(load.indices) == len(final.spatial_axes)
        and all(map(lambda index, axis: index.same_as(axis), load.indices, final.spatial_axes))
        for load in sums
    )


def _apply_tile(schedule: Schedule, reduction: SingleReduction, tile: Tile, cpu: CpuModel) -> None:
    pad, main, final, axes, broadcast = reduction
    if broadcast is not None:
        schedule_block(schedule, broadcast, cpu)
    last = len(main.spatial_extents) - 1
    loops = list(schedule.get_loops(final.handle))
    outer: dict[int, Any] = dict(enumerate(loops[:last]))
    vector = loops[last]
    if main.spatial_extents[last] > axes.lanes:
        outer[last], vector = schedule.split(vector, [None, axes.lanes])
    store_loops = []
    if final.spatial_extents[last] % axes.lanes:
        # the last vector is stored in parts: those beyond the end are left out
        width = math.gcd(final.spatial_extents[last], axes.lanes)
        part, vector = schedule.split(vector, [None, width])
        store_loops.append(part)
    register_loops, window_loops = [], []
    for axis, size in ((axes.weight, tile.vectors), (axes.data, tile.points)):
        if axis is not None:
            outer[axis], inner = schedule.split(outer[axis], [None, size])
            register_loops.append(inner)
    if tile.window_rows and axes.row is not None:
        outer[axes.row], inner = schedule.split(outer[axes.row], [None, tile.window_rows])
        window_loops.append(inner)
    parallel_axes, serial_axes = _order_outer_axes(outer, axes, tile)
    around = [outer[axis] for axis in parallel_axes]
    within = [*(outer[axis] for axis in serial_axes if axis != axes.data), *window_loops]
    within += [outer[axis] for axis in serial_axes if axis == axes.data]
    schedule.reorder(*around, *within, *register_loops, *store_loops, vector)
    if not tile.window_rows:
        _move_outside(schedule, around, within, _PARTS_PER_CORE * cpu.cores)
    parallel = fuse_and_parallelize(schedule, around, main.work >= _MIN_PARALLEL_WORK, cpu)
    for loop in (*register_loops, *store_loops):
        schedule.unroll(loop)
    schedule.vectorize(vector)
    schedule.compute_at(main.handle, (within or [parallel])[-1], preserve_unit_loops=True)
    schedule.set_scope(main.handle, 0, "local")
    sums = _schedule_reduction(schedule, main, axes, tile)
    if pad is not None and tile.window_rows:
        schedule.compute_at(pad.handle, parallel, preserve_unit_loops=True)
        # the model may use narrower vectors than the CPU has
        width = math.gcd(pad.spatial_extents[-1], cpu.lanes)
        if width >= _MIN_PAD_LANES and is_contiguous(pad, pad.spatial_axes[-1]):
            _, lanes = schedule.split(schedule.get_loops(pad.handle)[-1], [None, width])
            schedule.vectorize(lanes)
    elif pad is not None:
        schedule_block(schedule, pad, cpu)
    if dot_products.find_products(main) is not None:
        dot_products.use_instruction(schedule, main, parallel, sums, axes.lanes, cpu)


def _order_outer_axes(
    outer: dict[int, Any], axes: ReductionAxes, tile: Tile
) -> tuple[list[int], list[int]]:
    """Return the axes of the loops around tiles: those that may run in parallel, and those inside of them."""
    weights = [axis for axis in axes.weights if axis in outer]
    others = [axis for axis in outer if axis not in weights]
    if tile.weights_outside or axes.data is None:
        return weights + others, []
    data = [axis for axis in others if axis != axes.data]
    # The loop along a row stays inside, so that all weights use the row while it is in the cache.
    return (data, [*weights, axes.data]) if data else (weights, [axes.data])


def _move_outside(schedule: Schedule, around: list[Any], within: list[Any], parts: int) -> None:
    """Move loops from `within` to `around` until these split the work into enough parts."""
    count = math.prod(int(schedule.get(loop).extent) for loop in around)
    while within and count < parts:
        count *= int(schedule.get(within[0]).extent)
        around.append(within.pop(0))


def _schedule_reduction(schedule: Schedule, block: Block, axes: ReductionAxes, tile: Tile) -> Any:
    """Order, unroll and vectorize the loops of the reduction within one tile.

    Returns:
        The loop over the lanes of a vector. That of a dot product is as yet neither vectorized nor an
        instruction, because TVM moves no block after one with an instruction.
    """
    last, reduction_rank = len(block.spatial_extents) - 1, len(block.reduction_extents)
    loops = list(schedule.get_loops(block.handle))[-(last + 1 + reduction_rank) :]
    spatial, reduction_loops = loops[: last + 1], loops[last + 1 :]
    is_dot = dot_products.find_products(block) is not None
    terms = [reduction_loops.pop()] if is_dot else []
    vector, register_loops = spatial[last], []
    if axes.weight == last:
        vectors, vector = schedule.split(vector, [None, axes.lanes])
        register_loops.append(vectors)
    tiled = [axis for axis in (axes.weight, axes.data) if axis not in (None, last)]
    register_loops += [spatial[axis] for axis in tiled if axis is not None]
    unit_loops = [loop for axis, loop in enumerate(spatial[:last]) if axis not in tiled]
    schedule.reorder(*unit_loops, *reduction_loops, *register_loops, vector, *terms)
    for loop in register_loops:
        schedule.unroll(loop)
    if not is_dot:
        schedule.vectorize(vector)
    unrolled = tile.vectors * tile.points
    extents = reversed(block.reduction_extents[: len(reduction_loops)])
    for loop, extent in zip(reversed(reduction_loops), extents, strict=True):
        unrolled *= extent
        if extent > tile_candidates.SHORT_REDUCTION or unrolled > _MAX_UNROLLED:
            break
        schedule.unroll(loop)
    initial = schedule.decompose_reduction(block.handle, reduction_loops[0])
    if is_dot:
        schedule.vectorize(schedule.get_loops(initial)[-1])
    return vector
