"""The rule `winograd`: Winograd convolutions that stay in the cache.

They are transformed, multiplied and transformed back there.

All loops over the elements of a tile are unrolled, so that the constants of the transforms
become additions. The product of data and weights is held in registers as in `register_tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import (
    RegisterTile,
    estimate_packed_speed,
    holds_operands,
)
from tvmflow.compiler.contraction.machine import STRIPS_PER_CORE, CpuModel
from tvmflow.compiler.ir import replace_variables
from tvmflow.compiler.open_sizes import same_sizes
from tvmflow.compiler.schedules.blocks import (
    Block,
    analyze_blocks,
    find_loads,
    list_intermediate_buffers,
    list_loads,
    loop_length,
)
from tvmflow.compiler.schedules.register_tiles import has_long_rows, schedule_window
from tvmflow.compiler.tir_kernels import winograd
from tvmflow.compiler.tir_kernels.tiles import FLOAT
from tvmflow.compiler.tir_kernels.winograd import OpenBlocks, OpenConvolution

_FLOAT_BYTES: Final = 4
# Weights are read once for so many tiles; with fewer, reading them takes longer than multiplying.
_MIN_TILES: Final = 96
_MAX_SCHEDULES: Final = 12
_COLUMNS: Final = (winograd.DATA_COLUMNS, winograd.IMAGE_COLUMNS)
_NAMES: Final = (
    *("pad", winograd.DATA_COLUMNS, winograd.DATA),
    *(winograd.PRODUCT, winograd.IMAGE_COLUMNS, winograd.IMAGE),
)
# Images, blocks of channels, height, width, lanes.
_IMAGE_RANK: Final = 5


class _Blocks(NamedTuple):
    """The blocks of a Winograd convolution in their order; `epilogue` has all that follow.

    Those of columns are there where transforms are separate.
    """

    pad: Block
    data_columns: Block | None
    data: Block
    product: Block
    image_columns: Block | None
    image: Block
    epilogue: Sequence[Block]

    @property
    def final(self) -> Block:
        """The block that computes the result of the kernel."""
        return self.epilogue[-1]

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of a tile of the result."""
        return self.image.spatial_extents[5], self.image.spatial_extents[6]

    @property
    def tile_rows(self) -> int:
        """The rows of tiles of one slice."""
        return self.image.spatial_extents[3]

    @property
    def tile_columns(self) -> int:
        """The columns of tiles of one slice."""
        return self.image.spatial_extents[4]

    @property
    def groups(self) -> int:
        """The number of groups of channels."""
        _, chunks, _ = self.product.reduction_extents
        return self.data.spatial_extents[2] // chunks

    @property
    def weights(self) -> Any:
        """The buffer of transformed weights."""
        (weights,) = (
            load.source
            for load in list_loads(self.product)
            if not load.source.same_as(self.data.output)
        )
        return weights

    @property
    def weight_bytes(self) -> int:
        """The size of the transformed weights in float32."""
        return math.prod(map(int, self.weights.shape)) * _FLOAT_BYTES

    @property
    def has_open_tiles(self) -> bool:
        """True if each call chooses how many tiles there are in an image."""
        return not self.image.open_axes.isdisjoint({3, 4})


class _Split(NamedTuple):
    """The split of a convolution into parts.

    Attributes:
        rows: The rows of tiles that are computed together.
        vectors: The vectors of output channels whose product is held in registers.
        points: The tiles whose product is held in registers.
        in_strips: True if parts of the image run in parallel; False if output channels do, because
            all weights together do not fit into a core's cache.
    """

    rows: int
    vectors: int
    points: int
    in_strips: bool


def generate(mod: tvm.IRModule, cpu: CpuModel) -> Iterator[Schedule]:
    """Yield schedules of a Winograd convolution, the fastest estimate first; none for other kernels."""
    schedule = Schedule(mod, seed=1)
    blocks = _find_blocks(schedule)
    if blocks is not None and blocks.has_open_tiles:
        function = _write_open(schedule, blocks, cpu)
        if function is not None:
            # each copy of the epilogue has variables of its own
            made = tirx.transform.ConvertSSA()(tvm.IRModule({"main": function}))
            yield Schedule(made, seed=1)
        return
    for split in _list_splits(blocks, cpu)[:_MAX_SCHEDULES] if blocks else ():
        schedule = Schedule(mod, seed=1)
        own = _find_blocks(schedule)
        assert own is not None, "the kernel had these blocks"
        _apply(schedule, own, split, cpu)
        yield schedule


def _find_blocks(schedule: Schedule) -> _Blocks | None:
    """Return the blocks of a Winograd convolution; None for other kernels.

    The epilogue is one block where the number of tiles is fixed.
    """
    blocks = analyze_blocks(schedule) or []
    own = {
        str(block.stmt.name_hint): block
        for block in blocks[: len(_NAMES)]
        if str(block.stmt.name_hint) in _NAMES
    }
    epilogue = blocks[len(own) :]
    if (
        list(own) not in (list(_NAMES), [name for name in _NAMES if name not in _COLUMNS])
        or not epilogue
        or any(block.is_reduction for block in epilogue)
        or len(epilogue[-1].spatial_extents) not in (5, 6)
    ):
        return None
    found = _Blocks(
        pad=own["pad"],
        data_columns=own.get(winograd.DATA_COLUMNS),
        data=own[winograd.DATA],
        product=own[winograd.PRODUCT],
        image_columns=own.get(winograd.IMAGE_COLUMNS),
        image=own[winograd.IMAGE],
        epilogue=epilogue,
    )
    # TVM inlines nothing of kernels where it does not know that all of an image is computed
    for block in () if found.has_open_tiles else epilogue[:-1]:
        schedule.compute_inline(block.handle)
    return found


def _list_splits(blocks: _Blocks, cpu: CpuModel) -> list[_Split]:
    """Return all splits whose sums fit the registers, the fastest estimate first."""
    height, width, out_blocks, _, depth, _, lanes = blocks.product.spatial_extents
    elements, inner = height * width, math.prod(blocks.product.reduction_extents)
    taps = blocks.product.reduction_extents[0]
    slices, groups = blocks.data.spatial_extents[4], blocks.groups
    in_strips = blocks.weight_bytes <= cpu.cached_weight_bytes
    splits = []
    for vectors in _list_divisors(out_blocks // groups):
        channels = slices * groups * inner // taps + depth * vectors * lanes
        tile_bytes = elements * channels * _FLOAT_BYTES
        rows = _choose_rows(blocks, tile_bytes, in_strips, cpu)
        for points in _list_divisors(rows * blocks.tile_columns):
            if holds_operands(RegisterTile(points, vectors), cpu):
                splits.append(_Split(rows, vectors, points, in_strips))
    return sorted(splits, key=lambda split: _estimate_cost(split, out_blocks, cpu))


def _list_divisors(extent: int) -> list[int]:
    return [size for size in range(1, extent + 1) if extent % size == 0]


def _choose_rows(blocks: _Blocks, tile_bytes: int, in_strips: bool, cpu: CpuModel) -> int:
    """Return how many rows of tiles are computed together.

    Args:
        blocks: The blocks of the kernel.
        tile_bytes: The size of a tile's data and product.
        in_strips: See `_Split`.
        cpu: The CPU to schedule for.
    """
    images, rows = blocks.image.spatial_extents[0], _list_divisors(blocks.tile_rows)
    if in_strips:
        parts = STRIPS_PER_CORE * cpu.cores
        small = [
            count
            for count in rows
            if count * blocks.tile_columns * tile_bytes <= cpu.cached_data_bytes
            and images * blocks.tile_rows // count >= parts
        ]
        return max(small, default=1)
    row_tiles = blocks.image.spatial_extents[2] * blocks.tile_columns
    enough = [count for count in rows if count * row_tiles >= _MIN_TILES]
    return min(enough, default=blocks.tile_rows)


def _estimate_cost(split: _Split, out_blocks: int, cpu: CpuModel) -> tuple[float, int]:
    """Return an estimate of the time for a product of vectors; of equal ones, more sums come last."""
    sums = split.vectors * split.points
    time = 1 / estimate_packed_speed(RegisterTile(split.points, split.vectors), cpu)
    parts = out_blocks // split.vectors
    is_balanced = split.in_strips or parts % cpu.cores == 0 or parts >= STRIPS_PER_CORE * cpu.cores
    return time * (1.0 if is_balanced else 1.2), sums


def _apply(schedule: Schedule, blocks: _Blocks, split: _Split, cpu: CpuModel) -> None:
    image, out, *depth, y, z, lane = schedule.get_loops(blocks.final.handle)
    rows, columns = blocks.tile
    strip, row = schedule.split(y, [None, split.rows * rows])
    tile_row, p = schedule.split(row, [split.rows, rows])
    tile_column, q = schedule.split(z, [blocks.tile_columns, columns])
    group, block = schedule.split(out, [None, split.vectors])
    schedule.reorder(image, strip, group, block, *depth, tile_row, tile_column, p, q, lane)
    around = schedule.fuse(image, strip)
    parallel = around if split.in_strips else group
    if cpu.cores > 1:
        schedule.parallel(parallel)
    for loop in (p, q):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    if blocks.image_columns is None:
        _schedule_image(schedule, blocks.image, tile_column)
    else:
        for block_of_tile in (blocks.image, blocks.image_columns):
            _keep_in_registers(schedule, block_of_tile, tile_column)
    schedule.compute_at(blocks.product.handle, group, preserve_unit_loops=True)
    _schedule_product(schedule, blocks.product, split, takes_lanes=cpu.factor_lanes > 0)
    schedule.compute_at(blocks.data.handle, around, preserve_unit_loops=True)
    channel = _schedule_data(schedule, blocks, cpu.cores > 1 and not split.in_strips)
    if has_long_rows(blocks.pad, cpu):
        schedule_window(schedule, blocks.pad, channel, cpu, fills=True)
        return
    schedule.compute_at(blocks.pad.handle, channel, preserve_unit_loops=True)
    schedule.vectorize(schedule.get_loops(blocks.pad.handle)[-1])


def _schedule_image(schedule: Schedule, block: Block, tile: Any) -> None:
    """Transform the product of a tile into registers."""
    schedule.compute_at(block.handle, tile, preserve_unit_loops=True)
    schedule.set_scope(block.handle, 0, "local")
    *_, p, q, lane, row, column = schedule.get_loops(block.handle)
    schedule.reorder(p, q, row, column, lane)
    for loop in (p, q, row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.decompose_reduction(block.handle, row)


def _schedule_product(
    schedule: Schedule, block: Block, split: _Split, *, takes_lanes: bool
) -> None:
    """Hold the sums of some vectors of channels and some tiles in registers.

    Data of all lanes of a block are read together where instructions take one lane (`takes_lanes`).
    """
    *_, i, j, out, image, depth, tile, lane, tap, chunk, channel = schedule.get_loops(block.handle)
    vectors, vector = schedule.split(out, [None, split.vectors])
    points, point = schedule.split(tile, [None, split.points])
    outer = (i, j, vectors, image, depth, points)
    schedule.reorder(*outer, tap, chunk, channel, vector, point, lane)
    store = schedule.cache_write(block.handle, 0, "local")
    schedule.reverse_compute_at(store, points)
    # it has no loops of one iteration
    count = sum(size > 1 for size in (split.vectors, split.points))
    *_, store_lane = store_loops = schedule.get_loops(store)
    for loop in (vector, point, *store_loops[-1 - count : -1]):
        schedule.unroll(loop)
    if takes_lanes:
        schedule.unroll(channel)
    for loop in (lane, store_lane):
        schedule.vectorize(loop)
    schedule.decompose_reduction(block.handle, tap)


def _keep_in_registers(schedule: Schedule, block: Block, tile: Any) -> None:
    """Compute one axis of a transform into registers, for a tile at a time."""
    schedule.compute_at(block.handle, tile, preserve_unit_loops=True)
    schedule.set_scope(block.handle, 0, "local")
    loops = schedule.get_loops(block.handle)[-len(block.spatial_extents) :]
    row, column, lane = (loop for loop in loops if loop_length(schedule, loop) > 1)
    for loop in (row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)


def _schedule_data(schedule: Schedule, blocks: _Blocks, is_parallel: bool) -> Any:
    """Transform the data of a tile in registers.

    Return the loop over blocks of channels, which may be parallel.
    """
    handle = blocks.data.handle
    first = len(schedule.get_loops(handle)) - len(blocks.data.stmt.iter_vars)
    i, j, channel, image, depth, tile, lane, *sums = schedule.get_loops(handle)[first:]
    schedule.reorder(channel, image, depth, tile, i, j, *sums, lane)
    unrolled, vectors = [i, j, *sums], [lane]
    if sums:
        store = schedule.cache_write(handle, 0, "local")
        schedule.reverse_compute_at(store, tile)
        stored = schedule.get_loops(store)
        unrolled, vectors = [*unrolled, *stored[-3:-1]], [lane, stored[-1]]
    if is_parallel:
        schedule.parallel(channel)
    for loop in unrolled:
        schedule.unroll(loop)
    for loop in vectors:
        schedule.vectorize(loop)
    if sums:
        schedule.decompose_reduction(handle, sums[0])
    elif blocks.data_columns is not None:
        _keep_in_registers(schedule, blocks.data_columns, tile)
    return channel


# ---------------------------------------------------------------- open images
# Tiles of an open number are computed by loops that are written statement by statement
# (`tir_kernels.winograd`), which end with the epilogue of the kernel.

# There are loops for each number of tiles that may be left.
_MAX_OPEN_POINTS: Final = 8
# With so many sums, reading the weights from the second-level cache takes no time of its own.
_ENOUGH_SUMS: Final = 14


def _write_open(schedule: Schedule, blocks: _Blocks, cpu: CpuModel) -> tirx.PrimFunc | None:
    """Return a convolution of images of open sizes as loops; None for other kernels."""
    function, final = schedule.mod["main"], blocks.final
    crop, image, (tile, _) = blocks.epilogue[0], blocks.image.output, blocks.tile
    size, cropped = ([axis.dom.extent for axis in block.stmt.iter_vars] for block in (final, crop))
    own = list_intermediate_buffers(schedule)
    if (
        len(size) != _IMAGE_RANK
        or str(image.dtype) != FLOAT
        or not same_sizes(size, cropped)
        # one of them is a result too
        or not all(any(block.output.same_as(b) for b in own) for block in blocks.epilogue[:-1])
    ):
        return None
    statement = final.stmt.body
    for block in blocks.epilogue[-2::-1]:
        statement = _inline(statement, block)
    first, second, y, z, lane = final.axes
    place = [first, second, tirx.IntImm("int64", 0), y // tile, z // tile, y % tile, z % tile, lane]
    total = tirx.Var("total", FLOAT)

    def take(load: Any) -> Any:
        is_sum = load.source.same_as(image) and same_sizes(load.indices, place)
        return total if is_sum else load

    statement = tvm_ffi.structural_map(statement, (tvm.ir.TensorLoad, take))
    if any(load.source.same_as(image) for load in find_loads(statement)):
        return None

    def store(indices: Sequence[Any], value: Any) -> None:
        values = dict(zip(final.axes, indices, strict=True))
        made = replace_variables(statement, {**values, total: value})
        T.buffer_store(made.buffer, made.value, list(made.indices))

    (data,) = list_loads(blocks.pad)
    before = [
        int(tvm.sym.Analyzer().simplify(axis - index))
        for axis, index in zip(blocks.pad.spatial_axes[3:5], data.indices[2:4], strict=True)
    ]
    convolution = OpenConvolution(
        data=data.source,
        weights=blocks.weights,
        tile=tile,
        size=(size[2], size[3]),
        padding=(before[0], before[1]),
        store=store,
    )
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        winograd.emit_open(convolution, _divide_open(blocks, cpu))
    return tirx.PrimFunc(
        function.params, builder.get().body, function.ret_type, attrs=function.attrs
    )


def _inline(statement: Any, block: Block) -> Any:
    """Return a statement with the value of a block in place of loads of its output."""

    def compute(load: Any) -> Any:
        if not load.source.same_as(block.output):
            return load
        return replace_variables(
            block.stmt.body.value, dict(zip(block.axes, load.indices, strict=True))
        )

    return tvm_ffi.structural_map(statement, (tvm.ir.TensorLoad, compute))


def _divide_open(blocks: _Blocks, cpu: CpuModel) -> OpenBlocks:
    """Return the division of an open number of tiles."""
    elements, inner = (
        blocks.product.spatial_extents[0] ** 2,
        math.prod(blocks.product.reduction_extents),
    )
    out_blocks, lanes = blocks.product.spatial_extents[2], blocks.product.spatial_extents[-1]
    in_blocks = blocks.weight_bytes <= cpu.cached_weight_bytes
    splits = [
        _Split(1, vectors, points, in_blocks)
        for vectors in _list_divisors(out_blocks)
        for points in range(1, _MAX_OPEN_POINTS + 1)
        if holds_operands(RegisterTile(points, vectors), cpu)
    ]

    def rate(split: _Split) -> tuple[float, int, int]:
        cost, sums = _estimate_cost(split, out_blocks, cpu)
        return cost, -min(sums, _ENOUGH_SUMS), split.points

    split = min(splits, key=rate)
    tile_bytes = elements * (inner + split.vectors * lanes) * _FLOAT_BYTES
    limit = cpu.cached_data_bytes // tile_bytes if in_blocks else _MIN_TILES
    return OpenBlocks(
        limit=max(limit // split.points, 1) * split.points,
        parts=STRIPS_PER_CORE * cpu.cores,
        vectors=split.vectors,
        points=split.points,
        in_blocks=in_blocks,
        is_parallel=cpu.cores > 1,
    )
