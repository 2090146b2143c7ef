"""The rule `row_reductions`: kernels that reduce rows and use the results on the same rows.

All steps of a softmax, a norm or a sum run for a row while it is in the cache. For reductions along another axis, all
steps run for some columns, whose elements are the lanes of vectors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm_ffi
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.candidates import largest_divisor
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.dynamic_tiles import PARTITION_HINT
from tvmflow.compiler.schedules.blocks import (
    Block,
    analyze_blocks,
    has_slow_operations,
    is_contiguous,
    list_intermediate_buffers,
    list_loads,
    loop_length,
)
from tvmflow.compiler.schedules.elementwise import (
    follow_each_other,
    fuse,
    fuse_and_parallelize,
    peel_last_iteration,
    vectorize_loop,
)

# Limits of the columns of a part: results must stay in the first-level cache, and cache lines be read whole.
_MAX_COLUMNS: Final = 512
_MIN_COLUMNS: Final = 64
# The maximum number of columns of a part if they cannot be divided.
_MAX_UNDIVIDED: Final = 4096
# The number of loops: over rows, vectors and lanes.
_JOINED_LOOPS: Final = 3
# The number of partial accumulators that are added one by one.
_MIN_ACCUMULATORS: Final = 2


class _Step(NamedTuple):
    """A block of a row, and the blocks of its partial sums, which run before it."""

    block: Block
    partial_accumulators: Sequence[Any]


def apply(schedule: Schedule, cpu: CpuModel) -> Schedule | None:
    """Compute all blocks of a row in sequence, and rows in parallel; return None for another kernel."""
    blocks = analyze_blocks(schedule) or []
    part = _find_columns(blocks, cpu)
    if part is not None:
        return _apply_to_columns(schedule, blocks, part, cpu)
    blocks = _inline_read_once(schedule, blocks)
    row_axes = _count_shared_axes(blocks)
    if not row_axes:
        return None
    steps = [_Step(block, _reduce_in_vectors(schedule, block, cpu)) for block in blocks]
    for block, _ in steps:
        is_row = not block.is_reduction and row_axes < len(block.spatial_extents)
        if is_row and is_contiguous(block, block.spatial_axes[-1]):
            vectorize_loop(schedule, schedule.get_loops(block.handle)[-1], cpu)
    handles = [handle for block, partial in steps for handle in (*partial, block.handle)]
    rows = [fuse(schedule, list(schedule.get_loops(handle))[:row_axes]) for handle in handles]
    row = schedule.merge(*rows) if len(rows) > 1 else rows[0]
    _join_vectors(schedule, steps, row_axes)
    is_worthwhile = sum(block.work for block in blocks) >= MIN_PARALLEL_ELEMENTS
    fuse_and_parallelize(schedule, [row], is_worthwhile, cpu)
    return schedule


def _inline_read_once(schedule: Schedule, blocks: list[Block]) -> list[Block]:
    """Inline cheap blocks whose elements a reduction reads once; return all blocks left."""
    intermediate = list_intermediate_buffers(schedule)
    inlined = [
        block
        for block in blocks
        if not (block.is_reduction or block.dynamic_axes or has_slow_operations(block))
        and any(map(block.output.same_as, intermediate))
        and _is_read_once(block, blocks)
    ]
    for block in inlined:
        schedule.compute_inline(block.handle)
    # inlining may leave further blocks that are read once, such as a difference read by its square
    return _inline_read_once(schedule, analyze_blocks(schedule) or []) if inlined else blocks


def _is_read_once(block: Block, blocks: Sequence[Block]) -> bool:
    """Return whether only one reduction reads a block's output, and reads each element once."""
    loads = [
        (reader, load)
        for reader in blocks
        for load in list_loads(reader)
        if load.source.same_as(block.output)
    ]
    return bool(loads) and all(
        reader is loads[0][0]
        and tvm_ffi.structural_equal(loads[0][1], load)
        and reader.is_reduction
        and reader.work == block.work
        for reader, load in loads
    )


def _join_vectors(schedule: Schedule, steps: Sequence[_Step], row_axes: int) -> None:
    """Merge the vector loop of a step with the partial sums of the next step that reads its results.

    With separate loops, a load at the end of a row may overlap two vectors that were just stored, which is slow.
    """
    for before, step in itertools.pairwise(steps):
        block, reduction = before.block, step.block
        if (
            block.is_reduction
            or not step.partial_accumulators
            or len(block.axes) - 1 in block.dynamic_axes
            or row_axes != len(reduction.spatial_extents)
            or len(reduction.reduction_extents) != 1
            or block.spatial_extents != (*reduction.spatial_extents, *reduction.reduction_extents)
        ):
            continue
        own = [load for load in list_loads(reduction) if load.source.same_as(block.output)]
        handles = (block.handle, step.partial_accumulators[0])
        loops = [schedule.get_loops(handle) for handle in handles]
        if not own or any(len(nest) != _JOINED_LOOPS for nest in loops):
            continue
        pairs = (zip(load.indices, reduction.axes, strict=True) for load in own)
        if not all(index.same_as(axis) for index, axis in itertools.chain(*pairs)):
            continue
        vectors = [nest[1] for nest in loops]
        for loop in vectors:
            if PARTITION_HINT in schedule.get(loop).annotations:
                schedule.unannotate(loop, PARTITION_HINT)
        joined = schedule.merge(*vectors)
        if reduction.reduction_extents[0] % loop_length(schedule, loops[0][-1]):
            peel_last_iteration(schedule, joined)


def _count_shared_axes(blocks: list[Block]) -> int:
    """Return how many outermost axes all blocks share, with results read only at the same index."""
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


def _reduce_in_vectors(schedule: Schedule, block: Block, cpu: CpuModel) -> list[Any]:
    """Split a contiguous reduction into a partial sum for each lane; return the partial sums' blocks."""
    is_dynamic = len(block.axes) - 1 in block.dynamic_axes
    if not block.is_reduction or not is_contiguous(block, block.axes[-1]):
        return []
    joined = _count_joined_axes(block, cpu.lanes)
    extent = math.prod(block.reduction_extents[-joined:])
    if extent <= cpu.lanes and not is_dynamic:
        return []
    loop = fuse(schedule, list(schedule.get_loops(block.handle))[-joined:])
    _, lanes = schedule.split(loop, [None, cpu.lanes])
    partial_accumulators = schedule.rfactor(lanes, factor_axis=len(block.spatial_extents))
    *_, vectors, lanes = schedule.get_loops(partial_accumulators)
    schedule.vectorize(lanes)
    if not is_dynamic and extent % cpu.lanes:
        peel_last_iteration(schedule, vectors)
    return [partial_accumulators, *_halve_accumulators(schedule, block, cpu.lanes)]


def _count_joined_axes(block: Block, lanes: int) -> int:
    """Return how many innermost reduced axes to fuse: until vectors divide the loop, or all possible."""
    extents, count = block.reduction_extents, 1
    axes = block.axes[-len(extents) :]
    is_dynamic = any(axis >= len(block.axes) - len(extents) for axis in block.dynamic_axes)
    while math.prod(extents[-count:]) % lanes and count < len(extents) and not is_dynamic:
        if not follow_each_other(block, axes[-count - 1], axes[-count], extents[-count - 1 :]):
            break
        count += 1
    return count


def _halve_accumulators(schedule: Schedule, block: Block, lanes: int) -> list[Any]:
    """Add the halves of a vector of partial sums pairwise until two sums are left.

    Adding them one by one has the latency of as many additions, which takes longer than a short row.
    """
    handles = []
    while lanes > _MIN_ACCUMULATORS:
        lanes //= 2
        halves, inner = schedule.split(schedule.get_loops(block.handle)[-1], [None, lanes])
        handle = schedule.rfactor(inner, factor_axis=len(block.spatial_extents))
        *_, halves, inner = schedule.get_loops(handle)
        schedule.vectorize(inner)
        schedule.unroll(halves)
        handles.append(handle)
    return handles


# ---------------------------------------------------------------- columns


class _Columns(NamedTuple):
    """The position of the reduced axis in the data, the axis to split, and its length in a part."""

    reduced: int
    split: int
    extent: int


def _find_columns(blocks: Sequence[Block], cpu: CpuModel) -> _Columns | None:
    """Return the columns of a kernel that reduces one axis, not the last one; None for other kernels."""
    reductions = [block for block in blocks if block.is_reduction]
    if not reductions or any(block.dynamic_axes for block in blocks):
        return None
    first = reductions[0]
    shape, lengths = first.spatial_extents, first.reduction_extents
    # the position of the last reduced axis among the axes of the data
    data_indices = (
        load.indices for load in list_loads(first) if len(load.indices) == len(first.axes)
    )
    indices = next(data_indices, ())
    same = (at for at, index in enumerate(indices) if index.same_as(first.axes[-1]))
    reduced = next(same, None)
    if reduced is None or reduced == len(shape) or len(lengths) != 1:
        return None
    data = (*shape[:reduced], *lengths, *shape[reduced:])
    for block in blocks:
        extents = (*block.spatial_extents, *block.reduction_extents)
        is_alike = (
            (extents, block.spatial_extents) == ((*shape, *lengths), shape)
            if block.is_reduction
            else extents in (shape, data)
        )
        if not is_alike or not is_contiguous(block, block.spatial_axes[-1]):
            return None
    if not _stay_in_columns(blocks, len(shape), reduced):
        return None
    return _choose_columns(shape, reduced, lengths[0], cpu)


def _stay_in_columns(blocks: Sequence[Block], rank: int, reduced: int) -> bool:
    """Return whether each block reads the results of others only in its own column.

    Reduced tensors have `rank` axes; others have one more, at the position `reduced`.
    """

    def position(axes: Sequence[Any]) -> Sequence[Any]:
        return axes if len(axes) == rank else [*axes[:reduced], *axes[reduced + 1 :]]

    outputs = [block.output for block in blocks]
    return all(
        index.same_as(axis)
        for block in blocks
        for load in list_loads(block)
        if any(load.source.same_as(output) for output in outputs)
        for index, axis in zip(position(load.indices), position(block.spatial_axes), strict=True)
    )


def _choose_columns(
    shape: Sequence[int], reduced: int, length: int, cpu: CpuModel
) -> _Columns | None:
    """Return the maximum number of columns in a part whose data stay in the cache; None without one.

    `reduced` is the position of the reduced axis in the data; `shape` holds the data's other axes.
    """
    kept = cpu.cached_data_bytes // (4 * length)
    limit = min(max(kept, _MIN_COLUMNS), _MAX_COLUMNS)
    # all cores have a part
    limit = min(limit, max(math.prod(shape) // cpu.cores, cpu.lanes))
    split = len(shape) - 1
    while split > reduced and math.prod(shape[split:]) <= limit:
        split -= 1
    inner = math.prod(shape[split + 1 :])
    extent = largest_divisor(shape[split], max(limit // inner, 1))
    if extent * inner < cpu.lanes:
        extent = shape[split]
    return _Columns(reduced, split, extent) if 1 < extent * inner <= _MAX_UNDIVIDED else None


def _apply_to_columns(
    schedule: Schedule, blocks: Sequence[Block], columns: _Columns, cpu: CpuModel
) -> Schedule:
    """Compute all blocks of a part of the columns in sequence, and parts in parallel."""
    reduced, split, extent = columns
    rank = next(len(block.spatial_extents) for block in blocks if block.is_reduction)
    parts, accumulators = [], []
    for block in blocks:
        own = list(schedule.get_loops(block.handle))
        if block.is_reduction:
            middle = [own.pop()]
            accumulators.append((block.handle, middle[0]))
        else:
            middle = [own.pop(reduced)] if len(own) > rank else []
        part, inside = schedule.split(own[split], [None, extent])
        after = own[split + 1 :]
        schedule.reorder(*own[:split], part, *middle, inside, *after)
        vectorize_loop(schedule, fuse(schedule, [inside, *after]), cpu)
        parts.append(fuse(schedule, [*own[:split], part]))
    loop = schedule.merge(*parts) if len(parts) > 1 else parts[0]
    is_worthwhile = sum(block.work for block in blocks) >= MIN_PARALLEL_ELEMENTS
    fuse_and_parallelize(schedule, [loop], is_worthwhile, cpu)
    for handle, along in accumulators:
        schedule.decompose_reduction(handle, along)
    return schedule
