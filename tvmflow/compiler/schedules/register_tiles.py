"""The rule `register_tiles`: convolutions, matrix products and pooling, with their sums held in registers.

The innermost axis of the result is a vector. A tile is `vectors` of them that read different
weights, times `points` that read different data: each weight is loaded once for all points
and each value of the data once for all vectors (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.schedules import dot_products, tile_candidates
from tvmflow.compiler.schedules.blocks import (
    Block,
    analyze_blocks,
    is_contiguous,
    is_padded,
    list_loads,
)
from tvmflow.compiler.schedules.elementwise import (
    count_fused_axes,
    fuse_and_parallelize,
    schedule_block,
    vectorize_loop,
)
from tvmflow.compiler.schedules.tile_candidates import ReductionAxes, Tile

_MAX_UNROLLED: Final = 160
# Fewer multiplications are not worth handing to another core.
_MIN_PARALLEL_WORK: Final = 1 << 16
# With so many parts of the work a core, an uneven rest costs little.
_PARTS_PER_CORE: Final = 16


# Shorter vectors are not worth their instructions.
_MIN_PAD_LANES: Final = 4
# A reduction and its result.
_PARTS: Final = 2


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
    """Yield the different schedules of the tiles that fit, the fastest estimate first; none for other kernels."""
    hashes = set()
    for tile in _list_tiles(mod, cpu):
        schedule = Schedule(mod, seed=1)
        try:
            reduction = _isolate_reduction(schedule, cpu)
            assert reduction is not None, "the kernel had tiles"
            _apply_tile(schedule, reduction, tile, cpu)
        # TVM rejects some tiles.
        except RuntimeError:
            continue
        digest = tvm_ffi.structural_hash(schedule.mod)
        if digest not in hashes:
            hashes.add(digest)
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
    if len(reductions) != 1:
        return None
    axes = tile_candidates.analyze_axes(reductions[0], cpu)
    has_partial_vectors = tile_candidates.has_partial_vectors(reductions[0], cpu)
    if axes is None and not has_partial_vectors:
        return None
    position = blocks.index(reductions[0])
    # What is read once is not worth a pass over memory.
    is_inlined = position > 0 and _is_read_once(blocks[position - 1], reductions[0])
    first = position if is_inlined else max(position - 1, 0)
    after = blocks[position + 1 :]
    # Norms, which have no weights, read their data again while these are in the cache.
    has_weights = axes is not None and axes.weight_bytes > 0
    small = _count_before_broadcast(reductions[0], after) if has_weights else len(after)
    kept = {small - 1, len(after) - 1}
    inlined = [block for index, block in enumerate(after) if index not in kept]
    for block in (*blocks[:first], *inlined):
        schedule.compute_inline(block.handle)
    if small == 0:
        schedule.cache_write(reductions[0].handle, 0, "local")
    isolated = analyze_blocks(schedule) or []
    if has_partial_vectors and len(isolated) == _PARTS:
        isolated = _merge_axes(schedule, isolated, cpu)
        axes = tile_candidates.analyze_axes(isolated[0], cpu) if isolated else None
    if axes is None or len(isolated) < _PARTS:
        return None
    broadcast = isolated.pop() if small < len(after) else None
    *before, main, final = isolated
    if len(before) > 1 or not _is_result(final, main):
        return None
    return SingleReduction(before[0] if before else None, main, final, axes, broadcast)


def _is_read_once(block: Block, reader: Block) -> bool:
    """Return whether a reduction reads each number of a block once, and no condition of a padded row divides its vectors."""
    return block.work == reader.work and not is_padded(block, block.spatial_axes[-1])


def _merge_axes(schedule: Schedule, blocks: Sequence[Block], cpu: CpuModel) -> list[Block]:
    """Make one axis of those that follow each other in all tensors, so that fewer of its vectors are not whole.

    Args:
        schedule: The schedule.
        blocks: The reduction and its result.
        cpu: The CPU to schedule for.

    Returns:
        The blocks of the new axes; none if they are no simple loop nests.
    """
    count = min(count_fused_axes(block, cpu.lanes) for block in blocks)
    main, final = blocks
    rank, extents = len(main.spatial_extents), main.spatial_extents
    while extents[rank - count] == 1 and count > 1:
        count -= 1
    if count == 1 or final.spatial_extents != extents:
        return list(blocks)

    def merge(*axes: Any) -> list[Any]:
        first, *others = axes[rank - count : rank]
        for axis, extent in zip(others, extents[rank - count + 1 :], strict=True):
            first = first * extent + axis
        return [*axes[: rank - count], first, *axes[rank:]]

    for block in blocks:
        schedule.transform_block_layout(block.handle, _index_map(merge, block.axes))
    layout = _index_map(merge, main.spatial_axes)
    schedule.transform_layout(main.handle, ("write", 0), layout)
    # Axes of length one are no longer simple loops.
    return analyze_blocks(schedule) or []


def _index_map(merge: Callable[..., list[Any]], axes: Sequence[Any]) -> tirx.IndexMap:
    return tirx.IndexMap.from_func(merge, len(axes), index_dtype=str(axes[0].ty.dtype))


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
    if final.spatial_extents[last] != main.spatial_extents[last]:
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
    around, within = _order_outer_loops(outer, reduction, tile, window_loops)
    schedule.reorder(*around, *within, *register_loops, *store_loops, vector)
    pads_rows = _pads_rows_of_tiles(reduction, tile)
    rows = within[0] if pads_rows else None
    if not tile.window_rows:
        # columns of one window share its padding
        movable = 1 if pads_rows else len(within)
        _move_outside(schedule, around, within, movable, _PARTS_PER_CORE * cpu.cores)
    parallel = fuse_and_parallelize(schedule, around, main.work >= _MIN_PARALLEL_WORK, cpu)
    for loop in (*register_loops, *store_loops):
        schedule.unroll(loop)
    schedule.vectorize(vector)
    schedule.compute_at(main.handle, (within or [parallel])[-1], preserve_unit_loops=True)
    schedule.set_scope(main.handle, 0, "local")
    sums = _schedule_reduction(schedule, main, axes, tile)
    if pad is not None and (tile.window_rows or pads_rows):
        window = within[0] if pads_rows and within and within[0] is rows else parallel
        schedule.compute_at(pad.handle, window, preserve_unit_loops=True)
        _schedule_window(schedule, pad, window, cpu, pads_rows=pads_rows)
    elif pad is not None:
        schedule_block(schedule, pad, cpu)
    if dot_products.find_products(main) is not None:
        dot_products.use_instruction(schedule, main, parallel, sums, axes.lanes, cpu)


def _schedule_window(
    schedule: Schedule, pad: Block, around: Any, cpu: CpuModel, *, pads_rows: bool
) -> None:
    """Copy rows into a padded window in vectors.

    Args:
        schedule: The schedule.
        pad: The block that pads the data, in the loop `around`.
        around: The loop over windows.
        cpu: The CPU to schedule for.
        pads_rows: Whether a condition along rows chooses what is padding.
    """
    loops = list(schedule.get_loops(pad.handle))
    if not is_contiguous(pad, pad.spatial_axes[-1]):
        return
    if pads_rows:
        # all is padding at first, so that no condition divides the rows that are copied then
        inner = next(n for n, loop in enumerate(loops) if _is_same(schedule, loop, around)) + 1
        filled = schedule.decompose_padding(pad.handle, loops[inner])
        for handle in (filled, pad.handle):
            vectorize_loop(schedule, schedule.get_loops(handle)[-1], cpu)
        return
    # the model may use narrower vectors than the CPU has
    width = math.gcd(pad.spatial_extents[-1], cpu.lanes)
    if width >= _MIN_PAD_LANES:
        _, lanes = schedule.split(loops[-1], [None, width])
        schedule.vectorize(lanes)


def _is_same(schedule: Schedule, loop: Any, other: Any) -> bool:
    """Return whether two references are to one loop."""
    return bool(schedule.get(loop).same_as(schedule.get(other)))


def _pads_rows_of_tiles(reduction: SingleReduction, tile: Tile) -> bool:
    """Return whether the rows of one tile are padded at a time, for all of its columns: in pooling of plain data."""
    pad, main, _, axes, _ = reduction
    return (
        pad is not None
        and is_padded(pad, pad.spatial_axes[-1])
        and not axes.weight_bytes
        and axes.data in _order_outer_axes(range(len(main.spatial_extents)), axes, tile)[1]
    )


def _order_outer_loops(
    outer: Mapping[int, Any], reduction: SingleReduction, tile: Tile, window_loops: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the loops around tiles, in order: those that may run in parallel, and those inside of them.

    Args:
        outer: The loops around tiles by their axes.
        reduction: The reduction.
        tile: The tile.
        window_loops: The loops over the rows of a window.
    """
    data_axis = reduction.axes.data
    parallel_axes, serial_axes = _order_outer_axes(list(outer), reduction.axes, tile)
    data = [outer[axis] for axis in serial_axes if axis == data_axis]
    others = [*(outer[axis] for axis in serial_axes if axis != data_axis), *window_loops]
    within = [*data, *others] if _pads_rows_of_tiles(reduction, tile) else [*others, *data]
    return [outer[axis] for axis in parallel_axes], within


def _order_outer_axes(
    outer: Sequence[int], axes: ReductionAxes, tile: Tile
) -> tuple[list[int], list[int]]:
    """Return the axes of the loops around tiles: those that may run in parallel, and those inside of them."""
    weights = [axis for axis in axes.weights if axis in outer]
    others = [axis for axis in outer if axis not in weights]
    if tile.weights_outside or axes.data is None:
        return weights + others, []
    data = [axis for axis in others if axis != axes.data]
    # The loop along a row stays inside, so that all weights use the row while it is in the cache.
    return (data, [*weights, axes.data]) if data else (weights, [axes.data])


def _move_outside(
    schedule: Schedule, around: list[Any], within: list[Any], movable: int, parts: int
) -> None:
    """Move the first loops of `within`, at most `movable`, to `around` until these split the work into enough parts."""
    count = math.prod(int(schedule.get(loop).extent) for loop in around)
    for _ in range(movable):
        if count >= parts:
            break
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
