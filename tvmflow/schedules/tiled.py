"""Register tiles for convolutions, matrix products and pooling: sums that stay in registers while the reduced axes go by.

The innermost axis of the result is a vector. A tile is `vectors` of them side by side, where
they read other weights, times `points` that read other data: each weight is loaded once for
all points and each datum once for all vectors (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from tvm.s_tir import Schedule

from tvmflow.schedules._kernel import Block, loads_of, stride, uses
from tvmflow.schedules._machine import Machine
from tvmflow.schedules.flat import flat, is_dense

# A reduced axis that is no longer than this is unrolled when its tile is small.
_SHORT: Final = 5
_MOST_UNROLLED: Final = 160
# Multiplications that are worth handing to another core.
_LEAST_PARALLEL: Final = 1 << 16
# Parts of the work for each core: so many that an uneven rest costs little.
_PARTS: Final = 16
_MOST_VECTORS: Final = 8
_MOST_POINTS: Final = 28
# What copying one element into a padded window costs, in multiplications.
_COPY: Final = 3
# What testing each row costs, where the last window is not full.
_RAGGED_ROWS: Final = 1.1


class Tile(NamedTuple):
    """How one kernel is cut: what registers hold, and the order of the loops around.

    `weights_outside` puts the loop over weights around that over data. `rows` of the result
    share a window of padded data; 0 pads all data beforehand.
    """

    vectors: int
    points: int
    weights_outside: bool
    rows: int


class Axes(NamedTuple):
    """What the spatial axes of a reduction are, as places in its result; None where there is no such axis.

    `lanes` of the last axis are a vector. `weight` is the axis along which other weights are
    read (the last one itself where it is longer than a vector), `data` that along which other
    data are, and `row` the next one outside it. `weights` are all places of the first kind.
    """

    lanes: int
    weight: int | None
    data: int | None
    row: int | None
    weights: tuple[int, ...]
    weight_bytes: int


def axes_of(block: Block, machine: Machine) -> Axes | None:
    """The axes of a reduction that can be tiled; None for one that reads no vectors, or across them."""
    spatial, every = block.spatial, block.spatial + block.reduced
    last = len(spatial) - 1
    lanes = math.gcd(block.extents[last], machine.lanes)
    loads = loads_of(block)
    vectors = [load for load in loads if stride(load, every, spatial[last]) == 1]
    scalars = [load for load in loads if not uses(load, spatial[last])]
    if lanes < 2 or not vectors or len(vectors) + len(scalars) != len(loads):
        return None
    places = range(last)
    weights: tuple[int, ...] = ()
    data: Sequence[int] = places
    if scalars:
        read = [
            (any(uses(load, axis) for load in vectors), any(uses(load, axis) for load in scalars))
            for axis in spatial
        ]
        weights = tuple(place for place in places if read[place] == (True, False))
        data = [place for place in places if read[place] == (False, True)]
    long_ones = [place for place in data if block.extents[place] > 1]
    is_long = block.extents[last] > lanes
    wide = [place for place in weights if block.extents[place] > 1]
    return Axes(
        lanes,
        last if is_long and scalars else wide[-1] if wide else None,
        long_ones[-1] if long_ones else None,
        long_ones[-2] if len(long_ones) > 1 else None,
        (*weights, last) if is_long else weights,
        sum(4 * math.prod(int(n) for n in load.source.shape) for load in vectors if scalars),
    )


# ---------------------------------------------------------------- which tiles there are


def tiles(block: Block, pad: Block | None, axes: Axes, machine: Machine) -> Iterator[Tile]:
    """All tiles that fit the registers, the most promising first."""
    outside = axes.weight_bytes > machine.l2 * 3 // 4 and axes.data is not None
    shapes = sorted(_shapes(block, axes, machine), reverse=True)
    rows = _rows(block, pad, axes, machine)
    for _, vectors, points in shapes:
        yield Tile(vectors, points, outside, 0 if outside else rows[0])
    has_order = bool(axes.weights) and axes.data is not None
    for _, vectors, points in shapes:
        for height in dict.fromkeys((*rows, 0)):
            for weights_outside in (False, True) if height == 0 and has_order else (False,):
                if (weights_outside, height) != (outside, 0 if outside else rows[0]):
                    yield Tile(vectors, points, weights_outside, height)


def _shapes(block: Block, axes: Axes, machine: Machine) -> Iterator[tuple[float, int, int]]:
    """Vectors and points of the tiles that fit, each after what it is worth."""
    last = len(block.extents) - 1
    there = 1 if axes.weight is None else block.extents[axes.weight]
    there = there // axes.lanes if axes.weight == last else there
    along = 1 if axes.data is None else block.extents[axes.data]
    for vectors in range(1, min(there, _MOST_VECTORS) + 1):
        for points in range(1, min(along, _MOST_POINTS) + 1):
            if vectors * points <= machine.registers - 4:
                useful = _useful(there, vectors) * _useful(along, points)
                yield useful * _busy(block, vectors, points, there, along, machine), vectors, points


def _useful(extent: int, size: int) -> float:
    """The part of the work that is not beyond the end, when an extent is cut into pieces of a size."""
    return extent / size / math.ceil(extent / size)


def _busy(
    block: Block, vectors: int, points: int, there: int, along: int, machine: Machine
) -> float:
    """The part of the time in which the arithmetic units work.

    Two pipelines of four cycles want eight sums. Two loads come in the time of two
    multiplications; where a number has to be spread over a register first, loads cost more, and
    those of weights the most. Registers are wanted for more than sums. A piece beyond the end makes
    the compiler test each point or vector, and soon it no longer keeps all sums in registers.
    """
    sums = vectors * points
    loads = (vectors + points) / sums
    room = machine.registers * 11 // 16
    if machine.spreads:
        stalls = max(1.0, 0.6 + 0.4 * loads) * (1 + 0.05 * max(0, sums + vectors - room))
        tests = 0.9 if vectors == 1 else 0.6
    else:
        held = sums + min(vectors, points)
        stalls = max(1.0, 0.1 + 1.25 * loads) * (1 + 0.03 * max(0, held - room))
        stalls /= 0.8 if vectors > points else 1.0
        tests = 0.9 if vectors == 1 or block.depths[-1] > _SHORT else 0.6
    worth = min(1.0, sums / 8) / stalls
    worth *= tests if along % points else 1.0
    worth *= 0.6 if there % vectors else 1.0
    return worth if points > 2 or along < 3 else 0.93 * worth


def _rows(block: Block, pad: Block | None, axes: Axes, machine: Machine) -> list[int]:
    """How many rows may share a padded window, the most promising number first; [0] where nothing is padded."""
    if pad is None or axes.row is None or len(pad.extents) not in (4, 5):
        return [0]
    height = block.extents[axes.row]
    # rows of data: those of the padded tensor, of which each row of the result reads some anew
    taken = pad.extents[-2 if len(pad.extents) == 4 else -3]
    step = max(1, (taken - 1) // max(height - 1, 1)) if height > 1 else 1
    halo = max(0, taken - step * height)
    channels = 1 if _has_own_channels(block, axes) else pad.extents[1]
    line = math.prod(pad.extents[3:]) * channels
    others = math.prod(
        extent
        for place, extent in enumerate(block.extents[:-1])
        if place < axes.row and place not in axes.weights
    )
    work = math.prod(block.extents) // height // max(others, 1) * math.prod(block.depths)
    costs = []
    for rows in range(1, height + 1):
        window = (rows * step + halo) * line
        if 4 * window > machine.l2 // 2:
            break
        parts = others * math.ceil(height / rows)
        balance = math.ceil(parts / machine.cores) * machine.cores / parts
        cost = (work + _COPY * window / rows) * balance / _useful(height, rows)
        costs.append((cost if height % rows == 0 else _RAGGED_ROWS * cost, rows))
    return [rows for _, rows in sorted(costs)[:4]] or [0]


def _has_own_channels(block: Block, axes: Axes) -> bool:
    """Whether each block of channels is computed from one block of data: depthwise, pooling."""
    return not axes.weights


# ---------------------------------------------------------------- how they are applied


def tiled(
    schedule: Schedule,
    pad: Block | None,
    block: Block,
    final: Block,
    axes: Axes,
    tile: Tile,
    machine: Machine,
) -> None:
    """Cut a reduction whose result `final` turns into the kernel's, element by element; `pad` prepares its data."""
    last = len(block.extents) - 1
    loops = list(schedule.get_loops(final.block))
    outer: dict[int, Any] = dict(enumerate(loops[:last]))
    vector = loops[last]
    if block.extents[last] > axes.lanes:
        outer[last], vector = schedule.split(vector, [None, axes.lanes])
    held, near = [], []
    for place, size in ((axes.weight, tile.vectors), (axes.data, tile.points)):
        if place is not None:
            outer[place], inner = schedule.split(outer[place], [None, size])
            held.append(inner)
    if tile.rows and axes.row is not None:
        outer[axes.row], inner = schedule.split(outer[axes.row], [None, tile.rows])
        near.append(inner)
    first, inside = _order(outer, axes, tile)
    around = [outer[place] for place in first]
    within = [*(outer[place] for place in inside if place != axes.data), *near]
    within += [outer[place] for place in inside if place == axes.data]
    schedule.reorder(*around, *within, *held, vector)
    work = math.prod(block.extents) * math.prod(block.depths)
    windows = _share(schedule, around, within, tile, work, machine)
    for loop in held:
        schedule.unroll(loop)
    schedule.vectorize(vector)
    schedule.compute_at(block.block, (within or [windows])[-1], preserve_unit_loops=True)
    schedule.set_scope(block.block, 0, "local")
    _inside(schedule, block, axes, tile)
    if pad is not None and tile.rows:
        schedule.compute_at(pad.block, windows, preserve_unit_loops=True)
        if is_dense(pad) and pad.extents[-1] % machine.lanes == 0:
            _, lanes = schedule.split(schedule.get_loops(pad.block)[-1], [None, machine.lanes])
            schedule.vectorize(lanes)
    elif pad is not None:
        flat(schedule, pad, machine)


def _order(outer: dict[int, Any], axes: Axes, tile: Tile) -> tuple[list[int], list[int]]:
    """The places of the loops around the tiles: those that may be shared among cores, and those inside them."""
    weights = [place for place in axes.weights if place in outer]
    others = [place for place in outer if place not in weights]
    if tile.weights_outside or axes.data is None:
        return weights + others, []
    data = [place for place in others if place != axes.data]
    # the loop along a row stays inside, so that all weights use the row while it is near
    return (data, [*weights, axes.data]) if data else (weights, [axes.data])


def _share(
    schedule: Schedule,
    around: list[Any],
    within: list[Any],
    tile: Tile,
    work: int,
    machine: Machine,
) -> Any:
    """Share the outer loops among the cores; gives the one loop that they become.

    Without windows that tie them together, loops from inside join until there are enough parts.
    """
    count = math.prod(int(schedule.get(loop).extent) for loop in around)
    while not tile.rows and len(within) > 0 and count < _PARTS * machine.cores:
        count *= int(schedule.get(within[0]).extent)
        around.append(within.pop(0))
    fused = schedule.fuse(*around) if len(around) > 1 else around[0]
    if work >= _LEAST_PARALLEL and machine.cores > 1:
        schedule.parallel(fused)
    return fused


def _inside(schedule: Schedule, block: Block, axes: Axes, tile: Tile) -> None:
    """The loops of the reduction within one tile."""
    last, depth = len(block.extents) - 1, len(block.depths)
    loops = list(schedule.get_loops(block.block))[-(last + 1 + depth) :]
    spatial, reduced = loops[: last + 1], loops[last + 1 :]
    vector, held = spatial[last], []
    if axes.weight == last:
        several, vector = schedule.split(vector, [None, axes.lanes])
        held.append(several)
    tied = [place for place in (axes.weight, axes.data) if place not in (None, last)]
    held += [spatial[place] for place in tied if place is not None]
    ones = [loop for place, loop in enumerate(spatial[:last]) if place not in tied]
    schedule.reorder(*ones, *reduced, *held, vector)
    for loop in held:
        schedule.unroll(loop)
    schedule.vectorize(vector)
    unrolled = tile.vectors * tile.points
    for loop, extent in zip(reversed(reduced), reversed(block.depths), strict=True):
        unrolled *= extent
        if extent > _SHORT or unrolled > _MOST_UNROLLED:
            break
        schedule.unroll(loop)
    schedule.decompose_reduction(block.block, reduced[0])
