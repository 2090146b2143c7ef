"""The rule `register_tiles`: convolutions, matmuls and pooling with accumulators in registers.

The innermost axis of the result is a vector. A tile is `vectors` that read different weights times `rows` that read
different data. Each weight is loaded once for all rows, and each value of the data once for all vectors
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import (
    MAX_DYNAMIC_ROWS,
    SHORT_REDUCTION,
    Arithmetic,
    Contraction,
    Tile,
    Window,
    measure_overlap,
)
from tvmflow.compiler.contraction.machine import (
    FLOAT_BYTES,
    MIN_LANES,
    MIN_PARALLEL_PRODUCTS,
    PARTS_PER_CORE,
    CpuModel,
)
from tvmflow.compiler.dynamic_tiles import TAIL_HINT
from tvmflow.compiler.schedules import dot_products
from tvmflow.compiler.schedules.blocks import (
    Block,
    analyze_blocks,
    attempt,
    choose_lanes,
    count_elements,
    depends_on,
    element_stride,
    find_read,
    is_contiguous,
    is_padded,
    is_padded_at_all,
    linear_stride,
    list_loads,
    loop_length,
)
from tvmflow.compiler.schedules.elementwise import (
    count_fused_axes,
    fuse,
    fuse_and_parallelize,
    schedule_block,
    vectorize_loop,
)
from tvmflow.compiler.tir_kernels.blocked import BFLOAT16, DEPTHWISE, INTEGERS, MATRICES, PAIRS
from tvmflow.compiler.vector_code import MAX_STRIDE, PREFETCH_HINT

_MAX_UNROLLED: Final = 160
# The limit with by-element FMA, if registers also hold the multiplicands that LLVM loads early.
_MAX_UNROLLED_POSITIONS: Final = 192
# Kernel rows with few channels are unrolled completely, up to this length and this many statements.
_LONG_REDUCTION: Final = 7
_MAX_ROW: Final = 400
_VECTOR_BYTES: Final = 16
# Rows of padded data up to this length are copied without filling them with padding first.
_SHORT_ROW: Final = 12
# The number of rows in an int8 matrix instruction.
_MATRIX_ROWS: Final = 2
# The number of blocks in a kernel without padding: a reduction and its result.
_PARTS: Final = 2


_FLOAT16: Final = "float16"
# At most this many products are added up in one float16 partial sum.
_MAX_TERMS: Final = 256


class SingleReduction(NamedTuple):
    """A kernel with one reduction.

    Its data may be padded or copied first (`pad`); `final` computes the result elementwise from the accumulators.
    """

    pad: Block | None
    main: Block
    final: Block
    axes: ReductionAxes
    copies_data: bool = False


def generate_tiled(mod: tvm.IRModule, cpu: CpuModel) -> Iterator[tuple[Tile, Schedule]]:
    """Yield the tiles that fit and their schedules, ranked by estimated cost; none for other kernels."""
    hashes = set()
    for tile in attempt(lambda: _list_tiles(mod, cpu), list[Tile]()):
        schedule = attempt(functools.partial(_schedule, mod, tile, cpu), None)
        digest = None if schedule is None else tvm_ffi.structural_hash(schedule.mod)
        if schedule is not None and digest not in hashes:
            hashes.add(digest)
            yield tile, schedule


def _schedule(mod: tvm.IRModule, tile: Tile, cpu: CpuModel) -> Schedule | None:
    """Return the schedule of a kernel for a tile; TVM raises an error for some tiles."""
    schedule = Schedule(mod, seed=1)
    reduction = _isolate_reduction(schedule, cpu)
    assert reduction is not None, "the kernel had tiles"
    _apply_tile(schedule, reduction, tile, cpu)
    return schedule


def _list_tiles(mod: tvm.IRModule, cpu: CpuModel) -> list[Tile]:
    reduction = _isolate_reduction(Schedule(mod, seed=1), cpu)
    if reduction is None:
        return []
    pad, main, _, axes, copies_data = reduction
    return list(generate_tiles(main, pad, axes, cpu, copies_data=copies_data))


def _isolate_reduction(schedule: Schedule, cpu: CpuModel) -> SingleReduction | None:
    """Inline all blocks but the reduction, its padding and the result; None for other kernels."""
    blocks = analyze_blocks(schedule) or []
    positions = [index for index, block in enumerate(blocks) if block.is_reduction]
    if len(positions) != 1:
        return None
    main = blocks[positions[0]]
    axes = analyze_axes(main, cpu)
    is_partial = has_partial_vectors(main, cpu)
    if axes is None and not is_partial:
        return None
    _inline_others(schedule, blocks, positions[0])
    isolated = analyze_blocks(schedule) or []
    if is_partial and len(isolated) == _PARTS:
        isolated = _merge_axes(schedule, isolated, cpu)
        axes = analyze_axes(isolated[0], cpu) if isolated else None
    if axes is None or len(isolated) < _PARTS:
        return None
    *before, main, final = isolated
    if len(before) > 1 or not _is_result(final, main):
        return None
    if not before and _evicts_data(main, axes, cpu):
        return _copy_data(schedule, main, cpu)
    return SingleReduction(pad=before[0] if before else None, main=main, final=final, axes=axes)


def _evicts_data(main: Block, axes: ReductionAxes, cpu: CpuModel) -> bool:
    """Return whether blocks of channels evict each other from the second-level cache.

    If the size of an image is a power of two, the blocks of a pixel share a few sets of the cache. In a copy of one row
    of pixels they do not. Copying pays if several tiles read the row.
    """
    if axes.row is None or not axes.data_bytes or main.dynamic_axes or cpu.multiplicand_lanes:
        return False
    problem = _describe(main, axes, cpu)
    if problem.arithmetic is not Arithmetic.SCALAR or problem.vectors <= candidates.MAX_VECTORS:
        return False
    _, blocks, *pixels = map(int, _find_data(main).source.shape)
    return (
        len(pixels) > _FIRST_SPATIAL
        and blocks == main.reduction_extents[0]
        and cpu.evicts(FLOAT_BYTES * math.prod(pixels), blocks)
        and FLOAT_BYTES * blocks * math.prod(pixels[1:]) <= cpu.cached_data_bytes
    )


def _find_data(main: Block) -> Any:
    """Return the load of data that are multiplied with vectors of weights."""
    loads = _classify_loads(main)
    assert loads is not None, "the reduction has axes"
    return loads.scalars[0]


def _copy_data(schedule: Schedule, main: Block, cpu: CpuModel) -> SingleReduction | None:
    """Copy the data of a reduction in a block that computes nothing else."""
    region = find_read(main.stmt, _find_data(main))
    schedule.cache_read(main.handle, region, "global")
    copy, main, final = analyze_blocks(schedule) or []
    axes = analyze_axes(main, cpu)
    return axes and SingleReduction(copy, main, final, axes, copies_data=True)


def _inline_others(schedule: Schedule, blocks: Sequence[Block], position: int) -> None:
    """Inline all blocks but a reduction, the one before it, and the one that computes the result."""
    first = max(position - 1, 0)
    before, main = blocks[first], blocks[position]
    # also inline the block before the reduction if each value is read once and padding does not split vectors
    if before.work == main.work and not is_padded(before, before.spatial_axes[-1]):
        first = position
    after = blocks[position + 1 :]
    for block in (*blocks[:first], *after[:-1]):
        schedule.compute_inline(block.handle)
    if not after:
        schedule.cache_write(blocks[position].handle, 0, "local")


def _merge_axes(schedule: Schedule, blocks: Sequence[Block], cpu: CpuModel) -> list[Block]:
    """Fuse axes that are contiguous in all tensors, so that more vectors are whole.

    Returns the new blocks of the reduction and its result; an empty list if they are not simple loop nests.
    """
    count = min(count_fused_axes(block, cpu.lanes) for block in blocks)
    main, final = blocks
    if main.dynamic_axes:
        return list(blocks)
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
    # This replaces axes of length one by constants, and the analysis may reject their block.
    return analyze_blocks(schedule) or []


def _index_map(merge: Callable[..., list[Any]], axes: Sequence[Any]) -> tirx.IndexMap:
    return tirx.IndexMap.from_func(merge, len(axes), index_dtype=str(axes[0].ty.dtype))


def _is_result(final: Block, main: Block) -> bool:
    """Return whether a block computes the result elementwise from the accumulators, perhaps padded."""
    if final.spatial_extents == main.spatial_extents:
        return True
    accumulators = [load for load in list_loads(final) if load.source.same_as(main.output)]
    return len(accumulators) > 0 and all(
        len(load.indices) == len(final.spatial_axes)
        and all(map(lambda index, axis: index.same_as(axis), load.indices, final.spatial_axes))
        for load in accumulators
    )


class _ResultLoops(NamedTuple):
    """The loops over a result that is divided into tiles.

    `outer` holds the loop around tiles of each axis. The others are the loops over the rows of a window, the vectors
    and rows of a tile (`registers`), the parts in which a vector is stored, and its lanes.
    """

    outer: dict[int, Any]
    window: list[Any]
    registers: list[Any]
    stores: list[Any]
    vector: Any


def _split_result(
    schedule: Schedule, reduction: SingleReduction, tile: Tile, *, computes_tails: bool
) -> _ResultLoops:
    main, final, axes = reduction.main, reduction.final, reduction.axes
    last = len(main.spatial_extents) - 1
    loops = list(schedule.get_loops(final.handle))
    outer: dict[int, Any] = dict(enumerate(loops[:last]))
    vector = loops[last]
    if main.spatial_extents[last] > axes.lanes:
        outer[last], vector = schedule.split(vector, [None, axes.lanes])
    split = _ResultLoops(outer=outer, window=[], registers=[], stores=[], vector=vector)
    is_padded_result = final.spatial_extents[last] != main.spatial_extents[last]
    if is_padded_result and not computes_tails:
        # the last vector is stored in parts, and parts beyond the end are omitted
        width = math.gcd(final.spatial_extents[last], axes.lanes)
        part, vector = schedule.split(vector, [None, width])
        split = split._replace(stores=[part], vector=vector)
    for axis, size in ((axes.weight, tile.shape.vectors), (axes.data, tile.shape.rows)):
        if axis is not None:
            outer[axis], inner = schedule.split(outer[axis], [None, size])
            split.registers.append(inner)
    if tile.window_rows and axes.row is not None:
        outer[axes.row], inner = schedule.split(outer[axes.row], [None, tile.window_rows])
        split.window.append(inner)
    return split


def _apply_tile(schedule: Schedule, reduction: SingleReduction, tile: Tile, cpu: CpuModel) -> None:
    pad, main, _, axes, _ = reduction
    computes_tails = candidates.computes_tails_apart(_find_arithmetic(main, axes, cpu), cpu)
    loops = _split_result(schedule, reduction, tile, computes_tails=computes_tails)
    around, within = _order_outer_loops(loops.outer, reduction, tile, loops.window)
    schedule.reorder(*around, *within, *loops.registers, *loops.stores, loops.vector)
    pads_rows = _pads_rows_of_tiles(reduction, tile)
    rows = within[0] if pads_rows else None
    if not tile.window_rows:
        # columns of one window share its padding
        movable = 1 if pads_rows else len(within)
        _move_outside(schedule, around, within, movable, PARTS_PER_CORE * cpu.cores)
    weights = [loops.outer[axis] for axis in axes.weights if axis in loops.outer]
    around, sharing = _share_weights(schedule, around, within, weights, reduction, tile, cpu)
    parallel = fuse_and_parallelize(schedule, around, main.work >= MIN_PARALLEL_PRODUCTS, cpu)
    if sharing:
        schedule.annotate(parallel, PREFETCH_HINT, sharing)
    for loop in (*loops.registers, *loops.stores):
        schedule.unroll(loop)
    schedule.vectorize(loops.vector)
    if computes_tails:
        for loop in (parallel, *within):
            schedule.annotate(loop, TAIL_HINT, 1)
    schedule.compute_at(main.handle, (within or [parallel])[-1], preserve_unit_loops=True)
    schedule.set_scope(main.handle, 0, "local")
    accumulators = _schedule_accumulators(schedule, main, axes, tile, cpu)
    if pad is not None and (tile.window_rows or pads_rows):
        window = rows if any(loop is rows for loop in within[:1]) else parallel
        products = dot_products.find_products(main)
        is_of_bytes = products in (INTEGERS, PAIRS, DEPTHWISE, MATRICES)
        is_long = products is None and has_long_rows(pad, cpu)
        fills = pads_rows or is_long or (is_of_bytes and cpu.multiplicand_lanes > 0)
        schedule_window(schedule, pad, window, cpu, fills=fills)
    elif pad is not None:
        schedule_block(schedule, pad, cpu)
    if dot_products.find_products(main) is not None:
        dot_products.use_instruction(schedule, main, parallel, accumulators, axes.lanes, cpu)


def _share_weights(
    schedule: Schedule,
    around: list[Any],
    within: Sequence[Any],
    weights: Sequence[Any],
    reduction: SingleReduction,
    tile: Tile,
    cpu: CpuModel,
) -> tuple[list[Any], int]:
    """Order parallel loops so that data stay in the cache while prefetched weights are streamed.

    Returns:
        The loops, and how many consecutive tiles share weights; 0 if none are prefetched.
    """
    main, axes = reduction.main, reduction.axes
    is_outside = all(map(lambda loop, other: loop is other, weights, around))
    panels = math.prod(loop_length(schedule, loop) for loop in weights)
    if (
        not _prefetches_weights(main, cpu)
        or not is_outside
        or panels == 1
        or not candidates.holds_next_weights(_describe(main, axes, cpu), tile.shape, cpu)
    ):
        return around, 0
    data = around[len(weights) :]
    tiles = math.prod(loop_length(schedule, loop) for loop in data)
    blocks = candidates.count_data_blocks(axes.data_bytes, axes.weight_bytes, tiles, panels, cpu)
    if within or blocks == 1:
        return around, tiles
    block, member = schedule.split(fuse(schedule, data), [blocks, None])
    schedule.reorder(block, *weights, member)
    return [block, *weights, member], tiles // blocks


def _prefetches_weights(block: Block, cpu: CpuModel) -> bool:
    """Return whether tiles prefetch the weights of later ones if weights are in outer loops."""
    is_static = not block.dynamic_axes
    return cpu.prefetches_weights and is_static and dot_products.find_products(block) is None


def has_long_rows(pad: Block, cpu: CpuModel) -> bool:
    """Return whether to fill rows with padding, then copy whole rows: faster for long rows on 64-bit ARM.

    LLVM unrolls the vectors of shorter rows completely, and then knows which of them are padding.
    """
    is_long = pad.spatial_extents[-_PARTS] > _SHORT_ROW
    return is_long and cpu.multiplicand_lanes > 0 and not pad.dynamic_axes and is_padded_at_all(pad)


def schedule_window(
    schedule: Schedule, pad: Block, around: Any, cpu: CpuModel, *, fills: bool
) -> None:
    """Copy rows into a padded window in vectors, within the loop over windows.

    With `fills`, the window is filled with padding first, so that vectors and lanes need no padding condition.
    """
    schedule.compute_at(pad.handle, around, preserve_unit_loops=True)
    loops = list(schedule.get_loops(pad.handle))
    if not is_contiguous(pad, pad.spatial_axes[-1]):
        return
    pads_lanes = is_padded(pad, pad.spatial_axes[-1])
    if fills:
        # then rows are copied without conditions
        outer = schedule.get(around)
        inner = next(n for n, loop in enumerate(loops) if schedule.get(loop).same_as(outer)) + 1
        filled = schedule.decompose_padding(pad.handle, loops[inner])
        for handle in (filled, pad.handle):
            *_, points, last = schedule.get_loops(handle)
            if pads_lanes:
                vectorize_loop(schedule, last, cpu)
                continue
            row = schedule.fuse(points, last)
            width = math.gcd(loop_length(schedule, row), _VECTOR_BYTES)
            schedule.vectorize(schedule.split(row, [None, width])[1])
        return
    # the model may use narrower vectors than the CPU has
    width = math.gcd(pad.spatial_extents[-1], cpu.lanes)
    if width >= MIN_LANES:
        _, lanes = schedule.split(loops[-1], [None, width])
        schedule.vectorize(lanes)


def _pads_rows_of_tiles(reduction: SingleReduction, tile: Tile) -> bool:
    """Return whether the rows of one tile are padded at a time, for all columns, as in pooling."""
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
    """Return the loops around tiles in order: the parallel ones, and those inside them."""
    data_axis = reduction.axes.data
    parallel_axes, serial_axes = _order_outer_axes(list(outer), reduction.axes, tile)
    data = [outer[axis] for axis in serial_axes if axis == data_axis]
    others = [*(outer[axis] for axis in serial_axes if axis != data_axis), *window_loops]
    within = [*data, *others] if _pads_rows_of_tiles(reduction, tile) else [*others, *data]
    return [outer[axis] for axis in parallel_axes], within


def _order_outer_axes(
    outer: Sequence[int], axes: ReductionAxes, tile: Tile
) -> tuple[list[int], list[int]]:
    """Return the axes of the loops around tiles: of the parallel ones, and of those inside them."""
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
    """Move at most `movable` first loops of `within` to `around`, until there are enough parts."""
    count = math.prod(loop_length(schedule, loop) for loop in around)
    for _ in range(movable):
        if count >= parts:
            break
        count *= loop_length(schedule, within[0])
        around.append(within.pop(0))


def _count_parts(block: Block) -> int:
    """Return the number of partial sums of a float16 reduction, which divide its first axis.

    The error of a sum grows with the root of its number of terms, so short partial sums are more accurate.
    """
    if str(block.output.dtype) != _FLOAT16 or block.dynamic_axes:
        return 1
    first, *others = block.reduction_extents
    terms = math.prod(others)
    if first * terms <= _MAX_TERMS:
        return 1
    sizes = (n for n in range(1, first + 1) if first % n == 0 and n * terms <= _MAX_TERMS)
    return first // max(sizes, default=1)


def _schedule_accumulators(
    schedule: Schedule, block: Block, axes: ReductionAxes, tile: Tile, cpu: CpuModel
) -> Any:
    """Schedule the accumulators of one tile, float16 ones in parts; return the loop over lanes."""
    parts = _count_parts(block)
    if parts == 1:
        return _schedule_reduction(schedule, block, axes, tile, cpu)
    first, *others = block.reduction_extents
    last = len(block.spatial_extents) - 1
    loops = list(schedule.get_loops(block.handle))
    part, _ = schedule.split(loops[-1 - len(others)], [parts, None])
    terms = schedule.rfactor(part, 0)
    loops = list(schedule.get_loops(block.handle))[-(last + 2) :]
    units, registers, vector = _order_spatial_loops(schedule, loops[:-1], axes)
    schedule.reorder(*units, loops[-1], *registers, vector)
    for loop in registers:
        schedule.unroll(loop)
    schedule.vectorize(vector)
    schedule.decompose_reduction(block.handle, loops[-1])
    schedule.compute_at(terms, loops[-1], preserve_unit_loops=True)
    schedule.set_scope(terms, 0, "local")
    divided = block._replace(handle=terms, reduction_extents=(first // parts, *others))
    return _schedule_reduction(schedule, divided, axes, tile, cpu)


def _order_spatial_loops(
    schedule: Schedule, spatial: Sequence[Any], axes: ReductionAxes
) -> tuple[list[Any], list[Any], Any]:
    """Return the spatial loops within a tile: those of one iteration, over registers, and over lanes."""
    last = len(spatial) - 1
    vector, register_loops = spatial[last], []
    if axes.weight == last:
        vectors, vector = schedule.split(vector, [None, axes.lanes])
        register_loops.append(vectors)
    tiled = [axis for axis in (axes.weight, axes.data) if axis not in (None, last)]
    register_loops += [spatial[axis] for axis in tiled if axis is not None]
    unit_loops = [loop for axis, loop in enumerate(spatial[:last]) if axis not in tiled]
    return unit_loops, register_loops, vector


def _schedule_reduction(
    schedule: Schedule, block: Block, axes: ReductionAxes, tile: Tile, cpu: CpuModel
) -> Any:
    """Order, unroll and vectorize the loops of the reduction within one tile.

    Returns:
        The loop over the lanes of a vector, or over the points of a matrix. For dot products, it is not tensorized
        yet, because TVM cannot move other blocks once a block has been tensorized.
    """
    last, reduction_rank = len(block.spatial_extents) - 1, len(block.reduction_extents)
    loops = list(schedule.get_loops(block.handle))[-(last + 1 + reduction_rank) :]
    spatial, reduction_loops = loops[: last + 1], loops[last + 1 :]
    products = dot_products.find_products(block)
    is_dot, is_matrix = products is not None, _multiplies_matrices(block)
    # a matrix instruction reads the terms of a pixel from two blocks, hence two loops
    terms = [reduction_loops.pop() for _ in range(is_dot + (products is MATRICES))][::-1]
    extents = list(block.reduction_extents[: len(reduction_loops)])
    factors = _count_factors(block, cpu)
    takes_lanes = _reads_whole_vectors(block, extents, factors)
    if takes_lanes and extents[-1] > SHORT_REDUCTION:
        reduction_loops += schedule.split(reduction_loops.pop(), [None, factors])
        extents += [extents.pop() // factors, factors]
    unit_loops, register_loops, vector = _order_spatial_loops(schedule, spatial, axes)
    points = []
    if cpu.broadcasts_first and tile.shape.has_vectors_inside:
        register_loops.reverse()
    if is_matrix:
        outer, inner = schedule.split(register_loops.pop(), [None, _MATRIX_ROWS])
        register_loops.append(outer)
        points.append(inner)
    schedule.reorder(*unit_loops, *reduction_loops, *register_loops, *points, vector, *terms)
    for loop in register_loops:
        schedule.unroll(loop)
    if not is_dot:
        schedule.vectorize(vector)
    accumulators = tile.shape.accumulators
    longest, limit = (
        max(SHORT_REDUCTION, cpu.multiplicand_lanes, factors if takes_lanes else 0),
        _MAX_UNROLLED,
    )
    if _reads_rows(block, extents, cpu):
        longest, limit = _LONG_REDUCTION, _MAX_ROW
    elif cpu.multiplicand_lanes and _measure_kernel(block, axes.data)[0]:
        longest = _LONG_REDUCTION
    elif takes_lanes and not is_dot:
        holds_positions = candidates.holds_unrolled_kernel(tile.shape, cpu)
        limit = _MAX_UNROLLED_POSITIONS if holds_positions else factors * accumulators
    _unroll_short(schedule, reduction_loops, extents, accumulators, longest, limit)
    initial = schedule.decompose_reduction(block.handle, reduction_loops[0])
    if is_dot:
        *_, outer, lanes = schedule.get_loops(initial)
        schedule.vectorize(lanes)
        if is_matrix:
            schedule.unroll(outer)
    return points[0] if is_matrix else vector


def _count_factors(block: Block, cpu: CpuModel) -> int:
    """Return how many multiplicands of by-element FMA fit a vector; 0 without such instructions."""
    products = dot_products.find_products(block)
    if products is None:
        return cpu.multiplicand_lanes
    return 0 if products is BFLOAT16 else 4 * cpu.multiplicand_lanes // products.terms


def _reads_whole_vectors(block: Block, extents: Sequence[int], lanes: int) -> bool:
    """Return whether multiplicands along the last reduction axis fill whole vectors."""
    if not lanes or extents[-1] % lanes:
        return False
    axis, last = block.axes[len(block.spatial_extents) + len(extents) - 1], block.spatial_axes[-1]
    scalars = [load for load in list_loads(block) if not depends_on(load, last)]
    products = dot_products.find_products(block)
    step = 1 if products is None else products.terms
    return bool(scalars) and all(element_stride(load, block, axis) == step for load in scalars)


def _reads_rows(block: Block, extents: Sequence[int], cpu: CpuModel) -> bool:
    """Return whether few channels make multiplicands contiguous over the last two axes (64-bit ARM)."""
    if not cpu.multiplicand_lanes or len(extents) < _PARTS or extents[-1] >= cpu.multiplicand_lanes:
        return False
    first = len(block.spatial_extents) + len(extents) - _PARTS
    pixel, channel = block.axes[first : first + _PARTS]
    last = block.spatial_axes[-1]
    scalars = [load for load in list_loads(block) if not depends_on(load, last)]
    return bool(scalars) and all(
        element_stride(load, block, channel) == 1
        # the latter if the block of channels is not full
        and element_stride(load, block, pixel) in (extents[-1], cpu.multiplicand_lanes)
        for load in scalars
    )


def _measure_kernel(block: Block, data: int | None) -> tuple[int, int]:
    """Return the width of a depthwise kernel, and the distance between two points in kernel positions.

    The result is (0, 1) for other blocks and for dynamic shapes.
    """
    loads, extents = list_loads(block), block.reduction_extents
    if data is None or len(loads) != _PARTS or block.dynamic_axes:
        return 0, 1
    point, position = (
        block.spatial_axes[data],
        block.axes[len(block.spatial_extents) + len(extents) - 1],
    )
    steps = [
        (element_stride(load, block, point), element_stride(load, block, position))
        for load in loads
        if depends_on(load, point)
    ]
    if len(steps) != 1 or not all(depends_on(load, block.spatial_axes[-1]) for load in loads):
        return 0, 1
    ((of_point, of_position),) = steps
    if not of_point or not of_position or of_point % of_position:
        return 0, 1
    return extents[-1], of_point // of_position


def _unroll_short(
    schedule: Schedule,
    loops: Sequence[Any],
    extents: Sequence[int],
    unrolled: int,
    longest: int,
    limit: int,
) -> None:
    """Unroll innermost reduction loops up to a length, as long as statements stay within a limit."""
    for loop, extent in zip(reversed(loops), reversed(extents), strict=True):
        unrolled *= extent
        if extent > longest or unrolled > limit:
            break
        schedule.unroll(loop)


# ---------------------------------------------------------------- the contraction of a block


# The strides of vector loads that pooling may use.
_STRIDES: Final = range(1, MAX_STRIDE + 1)
# The first axes of a convolution's data and result are images and channels.
_FIRST_SPATIAL: Final = 2


class ReductionAxes(NamedTuple):
    """The roles of a reduction's spatial axes, as positions in its result; None for a missing role.

    Attributes:
        lanes: The number of lanes in a vector along the last axis.
        weight: The axis along which a tile reads different weights; the last axis if it has several whole vectors.
        data: The axis along which a tile reads different data.
        row: The next axis outside of `data` along which data differ.
        weights: All axes along which weights differ.
        weight_bytes: The size of the weights in bytes.
        data_bytes: The size of the data that are multiplied with them.
    """

    lanes: int
    weight: int | None
    data: int | None
    row: int | None
    weights: tuple[int, ...]
    weight_bytes: int
    data_bytes: int


class _Loads(NamedTuple):
    """The vector and scalar loads of a reduction; `has_products` if it has dot product instructions."""

    vectors: list[Any]
    scalars: list[Any]
    strides: Sequence[int]
    has_products: bool


def analyze_axes(block: Block, cpu: CpuModel) -> ReductionAxes | None:
    """Return the roles of a reduction's axes; None if it does not read vectors, or reads across them."""
    loads = _classify_loads(block)
    if loads is None:
        return None
    extents, last = block.spatial_extents, len(block.spatial_extents) - 1
    weights, data = _find_roles(block, loads)
    long_weights = [axis for axis in weights if extents[axis] > 1]
    long_data = [axis for axis in data if extents[axis] > 1]
    has_scalars = bool(loads.scalars)
    has_data = bool(long_data) and not loads.has_products
    lanes = _choose_lanes(extents[last], cpu, has_scalars=has_scalars, has_data=has_data)
    axis = block.spatial_axes[last]
    lanes = _limit_to_blocks(lanes, loads.vectors, block, axis, loads.strides)
    is_long = extents[last] > lanes
    if lanes < 2 or (last == 0 and not is_long):
        # The result is one vector, so there is no loop around a tile.
        return None
    if is_long and has_scalars and extents[last] % lanes == 0:
        long_weights.append(last)
    row, innermost = [None, None, *long_data][-2:]
    read = loads.vectors if has_scalars else []
    return ReductionAxes(
        lanes=lanes,
        weight=long_weights[-1] if long_weights else None,
        data=innermost,
        row=row,
        weights=(*weights, last) if is_long else weights,
        weight_bytes=sum(FLOAT_BYTES * count_elements(load.source, block) for load in read),
        data_bytes=sum(FLOAT_BYTES * count_elements(load.source, block) for load in loads.scalars),
    )


def _classify_loads(block: Block) -> _Loads | None:
    """Return what a reduction loads; None if it does not read vectors, or reads across them."""
    last = block.spatial_axes[-1]
    loads = list_loads(block)
    scalars = [load for load in loads if not depends_on(load, last)]
    products = dot_products.find_products(block)
    # The weights of neighboring accumulators are as many elements apart as a dot product has terms.
    strides = _STRIDES if not scalars else (products.terms if products is not None else 1,)
    vectors = [load for load in loads if element_stride(load, block, last) in strides]
    if not vectors or len(vectors) + len(scalars) != len(loads):
        return None
    return _Loads(vectors, scalars, strides, products is not None)


def _find_roles(block: Block, loads: _Loads) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes along which weights differ and along which data differ, without the last axis.

    If a block loads both vectors and scalars, vectors are weights and scalars are data.
    """
    before = block.spatial_axes[:-1]
    if not loads.scalars:
        return (), tuple(range(len(before)))
    in_vectors = [any(depends_on(load, axis) for load in loads.vectors) for axis in before]
    in_scalars = [any(depends_on(load, axis) for load in loads.scalars) for axis in before]
    uses = list(enumerate(zip(in_vectors, in_scalars, strict=True)))
    weights = tuple(axis for axis, use in uses if use == (True, False))
    data = tuple(axis for axis, use in uses if use == (False, True))
    return weights, data


def has_partial_vectors(block: Block, cpu: CpuModel) -> bool:
    """Return whether a reduction loads only vectors along the last axis, and the last one is partial."""
    last = block.spatial_axes[-1]
    loads = list_loads(block)
    is_vector = all(element_stride(load, block, last) in _STRIDES for load in loads)
    return is_vector and bool(loads) and block.spatial_extents[-1] % cpu.lanes > 0


def _choose_lanes(extent: int, cpu: CpuModel, *, has_scalars: bool, has_data: bool) -> int:
    """Return the number of lanes in vectors along an axis.

    It divides the axis's length, or is larger if that saves vectors. If it does not divide the length, the last vector
    overlaps the one before it, and a tile has one vector. If the tile also has one row (no `has_data`), a divisor is
    better: a tile then has several vectors with independent accumulators.
    """
    lanes = math.gcd(extent, cpu.lanes)
    if lanes > 1 and has_scalars and not has_data:
        return lanes
    if extent < cpu.lanes:
        return lanes if has_scalars else extent
    return cpu.lanes if -(-extent // cpu.lanes) < extent // lanes else lanes


def _limit_to_blocks(
    lanes: int, vectors: Sequence[Any], block: Block, axis: Any, strides: Sequence[int]
) -> int:
    """Return the lane count of vectors within blocks of packed weights, which may be narrower."""

    def fits(count: int) -> bool:
        return all(linear_stride(load, block, axis, count) in strides for load in vectors)

    return choose_lanes(lanes, fits) or lanes


def generate_tiles(
    block: Block,
    pad: Block | None,
    axes: ReductionAxes,
    cpu: CpuModel,
    *,
    copies_data: bool = False,
) -> Iterator[Tile]:
    """Yield the tiles of a reduction, ranked by estimated cost; `pad` pads or copies its data first."""
    has_order = bool(axes.weights) and axes.data is not None
    is_prefetched = _prefetches_weights(block, cpu) and axes.weight_bytes > axes.data_bytes
    outside = is_prefetched or axes.weight_bytes > cpu.cached_weight_bytes
    return candidates.generate_tiles(
        _describe(block, axes, cpu),
        _describe_window(block, pad, axes),
        has_order,
        outside and axes.data is not None and not copies_data,
        cpu,
    )


def _describe(block: Block, axes: ReductionAxes, cpu: CpuModel) -> Contraction:
    extents = block.spatial_extents
    last = len(extents) - 1
    vectors = 1 if axes.weight is None else extents[axes.weight]
    vectors = vectors // axes.lanes if axes.weight == last else vectors
    rows = 1 if axes.data is None else extents[axes.data]
    has_dynamic_rows = axes.data in block.dynamic_axes
    width, stride = _measure_kernel(block, axes.data)
    return Contraction.over(
        block.reduction_extents,
        # each possible tail adds a tile to the code
        rows=min(rows, MAX_DYNAMIC_ROWS) if has_dynamic_rows else rows,
        vectors=vectors,
        arithmetic=_find_arithmetic(block, axes, cpu),
        has_dynamic_rows=has_dynamic_rows,
        has_dynamic_vectors=axes.weight in block.dynamic_axes,
        kernel_width=width,
        row_stride=stride,
        spreads_columns=axes.weight != last,
    )


def _find_arithmetic(block: Block, axes: ReductionAxes, cpu: CpuModel) -> Arithmetic:
    if _multiplies_matrices(block):
        return Arithmetic.BYTE_MATRICES
    products = dot_products.find_products(block)
    if cpu.multiplicand_lanes > 0 and products in (INTEGERS, PAIRS):
        return Arithmetic.DOT_BY_ELEMENT
    if _reads_whole_vectors(block, block.reduction_extents, cpu.multiplicand_lanes):
        return Arithmetic.BY_ELEMENT
    if products is not None:
        return Arithmetic.DOT
    return Arithmetic.SCALAR if axes.weights else Arithmetic.VECTORS


def _multiplies_matrices(block: Block) -> bool:
    """Return whether a block uses int8 matrix instructions."""
    products = dot_products.find_products(block)
    return products is not None and products.has_matrices


def _describe_window(block: Block, pad: Block | None, axes: ReductionAxes) -> Window | None:
    """Return the padded data that rows of a result may share; None if nothing is padded."""
    row = axes.row
    if pad is None or row is None or not _FIRST_SPATIAL <= row < len(pad.spatial_extents):
        return None
    extents, padded = block.typical_extents, pad.typical_extents
    # without weights (depthwise, pooling), each block of channels reads one block of data
    read = padded[1] if axes.weights else 1
    # in a volume, a row of the result reads rows of several planes
    planes = [sum(measure_overlap(padded[n], extents[n])) for n in range(_FIRST_SPATIAL, row)]
    step, halo = measure_overlap(padded[row], extents[row])
    return Window(
        height=extents[row],
        step=step,
        halo=halo,
        row_elements=math.prod((*padded[row + 1 :], read, *planes)),
        parts=math.prod(extents[axis] for axis in range(row) if axis not in axes.weights),
        work=math.prod(extents) * math.prod(block.reduction_extents),
        has_weights=bool(axes.weights),
        has_dynamic_height=row in block.dynamic_axes,
    )
