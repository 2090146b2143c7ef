"""The register tiles that fit a reduction, ordered by an estimate of their speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators import tiles
from tvmflow.compiler.schedules import dot_products
from tvmflow.compiler.schedules.blocks import (
    Block,
    depends_on,
    element_stride,
    linear_stride,
    list_loads,
    narrow_vectors,
)
from tvmflow.compiler.strided_loads import MAX_STRIDE

SHORT_REDUCTION: Final = 5
"""Reduction axes of at most this length are unrolled if their tile is small."""

_MAX_VECTORS: Final = 8
_MAX_POINTS: Final = 28
# So many sums stay in registers where each point is tested.
_TESTED_SUMS: Final = 14
# Registers that are left for operands.
_OPERAND_REGISTERS: Final = 4
# The cost of copying one element into a padded window, in multiplications.
_COPY_COST: Final = 3
# The relative cost of testing each row where the last window is not full.
_PARTIAL_WINDOW_COST: Final = 1.1
_MAX_WINDOW_HEIGHTS: Final = 4
# Pooling reads vectors of numbers with so small a stride.
_STRIDES: Final = range(1, MAX_STRIDE + 1)
# The first axes of a convolution's data and result are images and channels.
_FIRST_SPATIAL: Final = 2


class Tile(NamedTuple):
    """The part of a result that is held in registers, and the order of the loops around it.

    Attributes:
        vectors: The number of vectors that read different weights.
        points: The number of positions that read different data.
        weights_outside: True if the loop over weights is outside the loop over data.
        window_rows: The rows of the result that share a window of padded data; 0 to pad all data first.
    """

    vectors: int
    points: int
    weights_outside: bool
    window_rows: int


class ReductionAxes(NamedTuple):
    """The roles of a reduction's spatial axes, as positions in its result; None for a missing role.

    Attributes:
        lanes: The lanes of a vector along the last axis.
        weight: The axis along which a tile reads different weights; the last axis if it is several whole vectors.
        data: The axis along which a tile reads different data.
        row: The next axis outside of `data` along which data differ.
        weights: All axes along which weights differ.
        weight_bytes: The size of the weights in bytes.
    """

    lanes: int
    weight: int | None
    data: int | None
    row: int | None
    weights: tuple[int, ...]
    weight_bytes: int


def analyze_axes(block: Block, cpu: CpuModel) -> ReductionAxes | None:
    """Return the roles of a reduction's axes; None if it does not read vectors, or reads across them."""
    spatial, axes = block.spatial_axes, block.axes
    extents = block.spatial_extents
    last = len(spatial) - 1
    loads = list_loads(block)
    # All terms of one sum lie between the weights of two sums.
    products = dot_products.find_products(block)
    scalars = [load for load in loads if not depends_on(load, spatial[last])]
    strides = _STRIDES if not scalars else (products.terms if products is not None else 1,)
    vectors = [load for load in loads if element_stride(load, axes, spatial[last]) in strides]
    if not vectors or len(vectors) + len(scalars) != len(loads):
        return None
    weights: tuple[int, ...] = ()
    data: Sequence[int] = range(last)
    if scalars:
        # Vectors are weights if scalars are loaded as well: these are the data.
        in_vectors = [any(depends_on(load, axis) for load in vectors) for axis in spatial]
        in_scalars = [any(depends_on(load, axis) for load in scalars) for axis in spatial]
        weights = tuple(axis for axis in range(last) if in_vectors[axis] and not in_scalars[axis])
        data = [axis for axis in range(last) if in_scalars[axis] and not in_vectors[axis]]
    long_data = [position for position in data if extents[position] > 1]
    long_weights = [position for position in weights if extents[position] > 1]
    has_data = bool(long_data) and products is None
    lanes = _choose_lanes(extents[last], cpu, has_scalars=bool(scalars), has_data=has_data)
    lanes = _limit_to_blocks(lanes, vectors, axes, spatial[last], strides)
    is_long, is_whole = extents[last] > lanes, extents[last] % lanes == 0
    if lanes < 2 or (last == 0 and not is_long):
        # The result is one vector: there is no loop around a tile.
        return None
    return ReductionAxes(
        lanes,
        last if is_long and scalars and is_whole else long_weights[-1] if long_weights else None,
        long_data[-1] if long_data else None,
        long_data[-2] if len(long_data) > 1 else None,
        (*weights, last) if is_long else weights,
        sum(4 * math.prod(int(n) for n in load.source.shape) for load in vectors if scalars),
    )


def has_partial_vectors(block: Block, cpu: CpuModel) -> bool:
    """Return whether a reduction reads nothing but vectors along its last axis, which they do not divide."""
    last = block.spatial_axes[-1]
    loads = list_loads(block)
    is_vector = all(element_stride(load, block.axes, last) in _STRIDES for load in loads)
    return is_vector and bool(loads) and block.spatial_extents[-1] % cpu.lanes > 0


def _choose_lanes(extent: int, cpu: CpuModel, *, has_scalars: bool, has_data: bool) -> int:
    """Return the lanes of the vectors along an axis: a divisor of its extent, or more if there are fewer vectors then.

    The last vector of an axis that is no multiple of them overlaps the one before it, and a tile has
    one of them. Where it has one position too (no `has_data`), vectors that divide the axis are
    better: a tile has several of these, and their sums do not wait for each other.
    """
    lanes = math.gcd(extent, cpu.lanes)
    if lanes > 1 and has_scalars and not has_data:
        return lanes
    if extent < cpu.lanes:
        return lanes if has_scalars else extent
    return cpu.lanes if -(-extent // cpu.lanes) < extent // lanes else lanes


def _limit_to_blocks(
    lanes: int, vectors: Sequence[Any], axes: Sequence[Any], axis: Any, strides: Sequence[int]
) -> int:
    """Return the lanes of vectors that stay within blocks of packed weights, whose vectors may be narrower than the CPU's.

    Args:
        lanes: The lanes of the vectors along an axis.
        vectors: What loads vectors.
        axes: All axes of the reduction.
        axis: The axis.
        strides: The strides that vectors may have.
    """

    def fits(count: int) -> bool:
        return all(linear_stride(load, axes, axis, count) in strides for load in vectors)

    return narrow_vectors(lanes, fits) or lanes


def generate_tiles(
    block: Block, pad: Block | None, axes: ReductionAxes, cpu: CpuModel
) -> Iterator[Tile]:
    """Yield all tiles that fit the registers, in the order of their estimated speed.

    The first tiles have the order of loops that the size of the weights suggests, and the best window.
    """
    outside = axes.weight_bytes > cpu.l2_bytes * 3 // 4 and axes.data is not None
    shapes = sorted(_estimate_shapes(block, axes, cpu), reverse=True)
    heights = _choose_window_heights(block, pad, axes, cpu)
    preferred = (outside, 0 if outside else heights[0])
    for _, vectors, points in shapes:
        yield Tile(vectors, points, *preferred)
    has_order = bool(axes.weights) and axes.data is not None
    for _, vectors, points in shapes:
        for height in dict.fromkeys((*heights, 0)):
            for weights_outside in (False, True) if height == 0 and has_order else (False,):
                if (weights_outside, height) != preferred:
                    yield Tile(vectors, points, weights_outside, height)


def _estimate_shapes(
    block: Block, axes: ReductionAxes, cpu: CpuModel
) -> Iterator[tuple[float, int, int]]:
    """Yield (estimated utilization, vectors, points) of all tiles that fit the registers."""
    extents = block.spatial_extents
    last = len(extents) - 1
    max_vectors = 1 if axes.weight is None else extents[axes.weight]
    max_vectors = max_vectors // axes.lanes if axes.weight == last else max_vectors
    max_points = 1 if axes.data is None else extents[axes.data]
    for vectors in range(1, min(max_vectors, _MAX_VECTORS) + 1):
        for points in range(1, min(max_points, _MAX_POINTS) + 1):
            if vectors * points <= cpu.registers - _OPERAND_REGISTERS:
                useful = _useful_share(max_vectors, vectors) * _useful_share(max_points, points)
                sizes = (vectors, points, max_vectors, max_points)
                read = vectors * math.prod(block.reduction_extents) if axes.weights else 0
                stalls = tiles.estimate_weight_time(points, read, axes.lanes)
                utilization = useful * _estimate_utilization(block, *sizes, cpu) / stalls
                yield utilization, vectors, points


def _useful_share(extent: int, size: int) -> float:
    """Return the share of the work that lies within an extent that is split into pieces of `size`."""
    return extent / size / math.ceil(extent / size)


def _estimate_utilization(
    block: Block, vectors: int, points: int, max_vectors: int, max_points: int, cpu: CpuModel
) -> float:
    """Estimate the share of time in which the arithmetic units are busy.

    Two pipelines with a latency of four cycles need eight independent sums. Two loads take the
    time of two multiplications; where a number must first be broadcast to a register, loads cost
    more, and those of weights the most. Sums leave some registers for operands. A piece beyond
    the end makes the compiler test each point or vector, and then it may spill sums.

    Args:
        block: The reduction.
        vectors: The vectors of the tile.
        points: The points of the tile.
        max_vectors: The vectors of the whole result.
        max_points: The points of the whole result.
        cpu: The CPU to schedule for.

    Returns:
        A number near 1 for the best tiles.
    """
    sums = vectors * points
    loads = (vectors + points) / sums
    free = cpu.registers * 11 // 16
    if cpu.has_broadcast_loads:
        stalls = max(1.0, 0.5 + 0.6 * loads) * (1 + 0.05 * max(0, sums + vectors - free))
        test_factor = 0.97 if vectors == 1 or sums <= _TESTED_SUMS else 0.6
    else:
        live = sums + min(vectors, points)
        stalls = max(1.0, 0.1 + 1.25 * loads) * (1 + 0.03 * max(0, live - free))
        stalls /= 0.8 if vectors > points else 1.0
        is_long = block.reduction_extents[-1] > SHORT_REDUCTION
        test_factor = 0.9 if vectors == 1 or is_long else 0.6
    utilization = min(1.0, sums / 8) / stalls
    utilization *= test_factor if max_points % points else 1.0
    utilization *= 0.6 if max_vectors % vectors else 1.0
    return utilization if points > 2 or max_points < 3 else 0.93 * utilization


def _measure_overlap(padded: int, extent: int) -> tuple[int, int]:
    """Return how many new rows of padded data each row of a result reads, and how many more the last one."""
    step = max(1, (padded - 1) // (extent - 1)) if extent > 1 else 1
    return step, max(0, padded - step * extent)


def _choose_window_heights(
    block: Block, pad: Block | None, axes: ReductionAxes, cpu: CpuModel
) -> list[int]:
    """Return how many rows may share a padded window, the cheapest first; [0] if nothing is padded."""
    if pad is None or axes.row is None or not _FIRST_SPATIAL <= axes.row < len(pad.spatial_extents):
        return [0]
    extents, padded = block.spatial_extents, pad.spatial_extents
    height = extents[axes.row]
    step, halo = _measure_overlap(padded[axes.row], height)
    # Without weights (depthwise, pooling), each block of channels reads one block of data.
    channels = padded[1] if axes.weights else 1
    row_elements = math.prod(padded[axes.row + 1 :]) * channels
    # A row of a volume reads rows of several planes.
    for axis in range(_FIRST_SPATIAL, axes.row):
        row_elements *= sum(_measure_overlap(padded[axis], extents[axis]))
    outer = [extents[axis] for axis in range(axes.row) if axis not in axes.weights]
    outer_parts = math.prod(outer)
    row_work = block.work // height // outer_parts
    costs = []
    for rows in range(1, height + 1):
        window = (rows * step + halo) * row_elements
        if 4 * window > cpu.l2_bytes // 2:
            break
        parts = outer_parts * math.ceil(height / rows)
        balance = math.ceil(parts / cpu.cores) * cpu.cores / parts
        cost = (row_work + _COPY_COST * window / rows) * balance / _useful_share(height, rows)
        costs.append((cost if height % rows == 0 else _PARTIAL_WINDOW_COST * cost, rows))
    return [rows for _, rows in sorted(costs)[:_MAX_WINDOW_HEIGHTS]] or [0]
