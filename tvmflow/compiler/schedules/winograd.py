"""The rule `winograd`: Winograd convolutions, with transformed data and matmuls in the cache.

All loops over the elements of a tile are unrolled, so that the constants of the transforms become additions. The
accumulators of the matmuls are in registers as in `register_tiles`.
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

from tvmflow.compiler.contraction.machine import FLOAT_BYTES, CpuModel
from tvmflow.compiler.contraction.packed import FLOAT
from tvmflow.compiler.contraction.winograd import Split, TiledProduct, divide_dynamic, list_splits
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
from tvmflow.compiler.tir_kernels.winograd import DynamicConvolution
from tvmflow.graph.dynamic_shapes import same_sizes
from tvmflow.graph.ir import replace_variables

_MAX_SCHEDULES: Final = 12
_COLUMNS: Final = (winograd.DATA_COLUMNS, winograd.IMAGE_COLUMNS)
_NAMES: Final = (
    *("pad", winograd.DATA_COLUMNS, winograd.DATA),
    *(winograd.PRODUCT, winograd.IMAGE_COLUMNS, winograd.IMAGE),
)
# The axes of an image: batch, blocks of channels, height, width, lanes.
_IMAGE_RANK: Final = 5


class _Blocks(NamedTuple):
    """The blocks of a Winograd convolution; `*_columns` exist only if transforms are separate."""

    pad: Block
    data_columns: Block | None
    data: Block
    product: Block
    image_columns: Block | None
    image: Block
    epilogue: Sequence[Block]

    @property
    def final(self) -> Block:
        return self.epilogue[-1]

    @property
    def tile(self) -> tuple[int, int]:
        return self.image.spatial_extents[5], self.image.spatial_extents[6]

    @property
    def weights(self) -> Any:
        (weights,) = (
            load.source
            for load in list_loads(self.product)
            if not load.source.same_as(self.data.output)
        )
        return weights

    @property
    def tiled_product(self) -> TiledProduct:
        """The sizes of the matmuls, from which splits are chosen."""
        height, width, out_blocks, images, depth, _, lanes = self.product.spatial_extents
        kernel_depth, chunks, _ = self.product.reduction_extents
        blocks, slices = self.data.spatial_extents[2], self.data.spatial_extents[4]
        groups = blocks // chunks
        inner = math.prod(self.product.reduction_extents)
        return TiledProduct(
            images=images,
            depth=depth,
            tiles=(self.image.spatial_extents[3], self.image.spatial_extents[4]),
            elements=height * width,
            channels=slices * groups * inner // kernel_depth,
            out_blocks=out_blocks,
            groups=groups,
            lanes=lanes,
            weight_bytes=math.prod(map(int, self.weights.shape)) * FLOAT_BYTES,
        )

    @property
    def has_dynamic_tiles(self) -> bool:
        """True if the number of tiles in an image is dynamic."""
        return not self.image.dynamic_axes.isdisjoint({3, 4})


def generate(mod: tvm.IRModule, cpu: CpuModel) -> Iterator[Schedule]:
    """Yield schedules of a Winograd convolution, ranked by estimated cost; none for other kernels."""
    schedule = Schedule(mod, seed=1)
    blocks = _find_blocks(schedule)
    if blocks is not None and blocks.has_dynamic_tiles:
        function = _write_dynamic(schedule, blocks, cpu)
        if function is not None:
            # SSA form needs separate variables in each copy of the epilogue
            made = tirx.transform.ConvertSSA()(tvm.IRModule({"main": function}))
            yield Schedule(made, seed=1)
        return
    for split in list_splits(blocks.tiled_product, cpu)[:_MAX_SCHEDULES] if blocks else ():
        schedule = Schedule(mod, seed=1)
        own = _find_blocks(schedule)
        assert own is not None, "the kernel had these blocks"
        _apply(schedule, own, split, cpu)
        yield schedule


def _find_blocks(schedule: Schedule) -> _Blocks | None:
    """Return a Winograd convolution's blocks, with one epilogue if sizes are static; None for others."""
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
    # with dynamic tiles, TVM cannot prove that the whole image is computed, and inlines nothing
    for block in () if found.has_dynamic_tiles else epilogue[:-1]:
        schedule.compute_inline(block.handle)
    return found


def _apply(schedule: Schedule, blocks: _Blocks, split: Split, cpu: CpuModel) -> None:
    image, out, *depth, y, z, lane = schedule.get_loops(blocks.final.handle)
    rows, columns = blocks.tile
    strip, row = schedule.split(y, [None, split.rows * rows])
    tile_row, p = schedule.split(row, [split.rows, rows])
    tile_column, q = schedule.split(z, [blocks.image.spatial_extents[4], columns])
    group, block = schedule.split(out, [None, split.tile.vectors])
    schedule.reorder(image, strip, group, block, *depth, tile_row, tile_column, p, q, lane)
    around = schedule.fuse(image, strip)
    parallel = around if split.in_strips else group
    if cpu.cores > 1:
        schedule.parallel(parallel)
    for loop in (p, q):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    if blocks.image_columns is None:
        # the inverse transform of a tile writes to registers
        handle = blocks.image.handle
        schedule.compute_at(handle, tile_column, preserve_unit_loops=True)
        schedule.set_scope(handle, 0, "local")
        *_, p, q, lane, row, column = schedule.get_loops(handle)
        schedule.reorder(p, q, row, column, lane)
        for loop in (p, q, row, column):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        schedule.decompose_reduction(handle, row)
    else:
        for block_of_tile in (blocks.image, blocks.image_columns):
            _keep_in_registers(schedule, block_of_tile, tile_column)
    schedule.compute_at(blocks.product.handle, group, preserve_unit_loops=True)
    _schedule_product(schedule, blocks.product, split, takes_lanes=cpu.multiplicand_lanes > 0)
    schedule.compute_at(blocks.data.handle, around, preserve_unit_loops=True)
    channel = _schedule_data(schedule, blocks, cpu.cores > 1 and not split.in_strips)
    if has_long_rows(blocks.pad, cpu):
        schedule_window(schedule, blocks.pad, channel, cpu, fills=True)
        return
    schedule.compute_at(blocks.pad.handle, channel, preserve_unit_loops=True)
    schedule.vectorize(schedule.get_loops(blocks.pad.handle)[-1])


def _schedule_product(schedule: Schedule, block: Block, split: Split, *, takes_lanes: bool) -> None:
    """Keep the accumulators of some vectors of channels and some tiles in registers.

    `takes_lanes`: the CPU has by-element FMA, so the data of all lanes of a block are read together.
    """
    *_, i, j, out, image, depth, tile, lane, depth_step, chunk, channel = schedule.get_loops(
        block.handle
    )
    vectors, vector = schedule.split(out, [None, split.tile.vectors])
    points, point = schedule.split(tile, [None, split.tile.rows])
    outer = (i, j, vectors, image, depth, points)
    schedule.reorder(*outer, depth_step, chunk, channel, vector, point, lane)
    store = schedule.cache_write(block.handle, 0, "local")
    schedule.reverse_compute_at(store, points)
    # the store has no loops of one iteration
    count = sum(size > 1 for size in (split.tile.vectors, split.tile.rows))
    *_, store_lane = store_loops = schedule.get_loops(store)
    for loop in (vector, point, *store_loops[-1 - count : -1]):
        schedule.unroll(loop)
    if takes_lanes:
        schedule.unroll(channel)
    for loop in (lane, store_lane):
        schedule.vectorize(loop)
    schedule.decompose_reduction(block.handle, depth_step)


def _keep_in_registers(schedule: Schedule, block: Block, tile: Any) -> None:
    """Compute the transform along one axis into registers, one tile at a time."""
    schedule.compute_at(block.handle, tile, preserve_unit_loops=True)
    schedule.set_scope(block.handle, 0, "local")
    loops = schedule.get_loops(block.handle)[-len(block.spatial_extents) :]
    row, column, lane = (loop for loop in loops if loop_length(schedule, loop) > 1)
    for loop in (row, column):
        schedule.unroll(loop)
    schedule.vectorize(lane)


def _schedule_data(schedule: Schedule, blocks: _Blocks, is_parallel: bool) -> Any:
    """Transform the data of a tile in registers; return the loop over blocks of channels."""
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


# ---------------------------------------------------------------- dynamic images
# The loops of `tir_kernels.winograd` compute a dynamic number of tiles, and end with the kernel's epilogue.


def _write_dynamic(schedule: Schedule, blocks: _Blocks, cpu: CpuModel) -> tirx.PrimFunc | None:
    """Return a convolution of images of dynamic shape as loops; None for other kernels."""
    function, final = schedule.mod["main"], blocks.final
    crop, image, (tile, _) = blocks.epilogue[0], blocks.image.output, blocks.tile
    size, cropped = ([axis.dom.extent for axis in block.stmt.iter_vars] for block in (final, crop))
    own = list_intermediate_buffers(schedule)
    if (
        len(size) != _IMAGE_RANK
        or str(image.dtype) != FLOAT
        or not same_sizes(size, cropped)
        # every block but the last must write an intermediate buffer, not a second result
        or not all(any(block.output.same_as(b) for b in own) for block in blocks.epilogue[:-1])
    ):
        return None
    statement = final.stmt.body
    for block in blocks.epilogue[-2::-1]:
        statement = _inline(statement, block)
    first, second, y, z, lane = final.axes
    entry = [first, second, tirx.IntImm("int64", 0), y // tile, z // tile, y % tile, z % tile, lane]
    total = tirx.Var("total", FLOAT)

    def take(load: Any) -> Any:
        is_sum = load.source.same_as(image) and same_sizes(load.indices, entry)
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
    convolution = DynamicConvolution(
        data=data.source,
        weights=blocks.weights,
        tile=tile,
        size=(size[2], size[3]),
        padding=(before[0], before[1]),
        store=store,
    )
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        winograd.DynamicLoops(convolution, divide_dynamic(blocks.tiled_product, cpu)).emit()
    return tirx.PrimFunc(
        function.params, builder.get().body, function.ret_type, attrs=function.attrs
    )


def _inline(statement: Any, block: Block) -> Any:
    """Return a statement in which the value of a block replaces the loads of its output."""

    def compute(load: Any) -> Any:
        if not load.source.same_as(block.output):
            return load
        return replace_variables(
            block.stmt.body.value, dict(zip(block.axes, load.indices, strict=True))
        )

    return tvm_ffi.structural_map(statement, (tvm.ir.TensorLoad, compute))
