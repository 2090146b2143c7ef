"""The rule `tensor_cores`: float16 matmuls and convolutions on tensor cores.

A warp multiplies squares of 16×16 values (`wmma` in CUDA C) with float32 accumulation. The layout of a square in
registers is unspecified, so a warp loads squares from shared memory and stores them there.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, Schedule

from tvmflow.compiler.contraction.gpu_tiles import (
    ROW_OFFSET,
    SIDE,
    VECTOR,
    WARP,
    Device,
    Tile,
    choose_warp_tile,
)
from tvmflow.compiler.schedules.blocks import loop_length
from tvmflow.compiler.schedules.gpu import accesses, products
from tvmflow.compiler.schedules.intrinsics import load_intrinsics
from tvmflow.graph.ir import rewrite_nodes, with_fields

# All CUDA targets have the same intrinsics.
_ANY_TARGET: Final = {"kind": "cuda"}


def apply(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule a float16 matmul with float32 accumulation; None for another kernel."""
    if not device.has_tensor_cores:
        return None
    schedule = products.divide_groups(schedule)
    product = products.find_product(schedule)
    if product is None:
        return None
    stmt = schedule.get(product.main)
    dtypes = {str(load.source.dtype) for load in accesses.list_loads(stmt)}
    if dtypes != {"float16"} or str(stmt.body.buffer.dtype) != "float32":
        return None
    if product.left == 1:
        schedule = _swap_factors(schedule, product.main)
        product = products.find_product(schedule)
    if product is None or product.left == 1:
        return None
    choice = choose_warp_tile(product.lengths, device)
    if choice is None:
        return None
    load_intrinsics(_ANY_TARGET)
    return _apply_tile(schedule, product, *choice)


def _swap_factors(schedule: Schedule, main: Any) -> Schedule:
    """Return a kernel whose first operand has the rows, as the intrinsic requires."""
    stmt = schedule.get(main)

    def swap(block: SBlock) -> SBlock:
        if not block.same_as(stmt):
            return block
        body = tvm_ffi.structural_map(
            block.body, (tirx.Mul, lambda product: tirx.Mul(product.b, product.a))
        )
        return with_fields(block, reads=list(reversed(block.reads)), body=body)

    function = rewrite_nodes(schedule.mod["main"], SBlock, swap)
    return Schedule(tvm.IRModule({"main": function}), seed=1)


# ---------------------------------------------------------------- the schedule


def _apply_tile(schedule: Schedule, product: products.Product, tile: Tile, depth: int) -> Schedule:
    main = product.main
    warps = tile.threads
    accesses.fuse_epilogue(schedule, main)
    products.make_matrices(schedule, product._replace(left_by_depth=True))
    schedule.pad_einsum(main, [1, tile.rows, tile.columns, depth])
    batch, row, column, reduced = schedule.get_loops(main)
    block_y, warp_y, down, row_in = schedule.split(
        row, [None, tile.down, tile.rows // tile.down // SIDE, SIDE]
    )
    block_x, warp_x, across, column_in = schedule.split(
        column, [None, tile.across, tile.columns // tile.across // SIDE, SIDE]
    )
    outer, middle, depth_in = schedule.split(reduced, [None, depth // SIDE, SIDE])
    schedule.reorder(
        *(batch, block_y, block_x, warp_y, warp_x),
        *(outer, middle, down, across, row_in, column_in, depth_in),
    )
    accesses.bind(schedule, "blockIdx", "yx", schedule.fuse(batch, block_y), block_x)
    warp = schedule.fuse(warp_y, warp_x)
    schedule.bind(warp, "threadIdx.y")

    result = schedule.cache_write(main, 0, "shared")
    stored = schedule.cache_write(main, 0, "wmma.accumulator")
    _store_result(schedule, stored, result, product, warp, loop_length(schedule, down))

    threads = tile._replace(down=warps, across=WARP)
    copies = []
    for operand, by_depth, lanes in (
        (1, product.right_by_depth, product.right_lanes),
        (0, not product.left_by_depth, product.left_lanes),
    ):
        shared = schedule.cache_read(
            main, products.find_position(schedule, main, operand), "shared"
        )
        schedule.compute_at(shared, outer, preserve_unit_loops=True)
        if by_depth:
            # neighboring threads read along one axis, and write along the other
            schedule.reorder(*reversed(schedule.get_loops(shared)[-2:]))
        schedule.storage_align(shared, 0, axis=1, factor=SIDE, offset=ROW_OFFSET)
        products.divide_copy(schedule, shared, threads, lanes)
        accesses.fuse_before(schedule, shared)
        copies.append(shared)
    if tile.rows > SIDE:
        # with a single row of squares, sm_80 has no registers left for prefetched values
        products.load_ahead(schedule, outer, copies)
    for operand, name in ((0, "a"), (1, "b")):
        scope = f"wmma.matrix_{name}"
        loaded = schedule.cache_read(main, products.find_position(schedule, main, operand), scope)
        schedule.compute_at(loaded, middle, preserve_unit_loops=True)
        *_, loaded_row, loaded_column = schedule.get_loops(loaded)
        squares = [schedule.split(loop, [None, SIDE]) for loop in (loaded_row, loaded_column)]
        (first, loaded_row), (second, loaded_column) = squares
        schedule.reorder(first, second, loaded_row, loaded_column)
        for loop in (first, second):
            schedule.unroll(loop)
        schedule.tensorize(loaded_row, f"wmma_load_16x16x16_f16_{name}_shared")
    for loop in (middle, down, across):
        schedule.unroll(loop)
    initial = schedule.decompose_reduction(main, outer)
    for loop in schedule.get_loops(initial)[-4:-2]:
        schedule.unroll(loop)
    schedule.tensorize(schedule.get_loops(initial)[-2], "wmma_fill_16x16x16_f32")
    schedule.tensorize(row_in, "wmma_sync_16x16x16_f16f16f32")
    return schedule


def _store_result(
    schedule: Schedule, stored: Any, result: Any, product: products.Product, warp: Any, count: int
) -> None:
    """Store a warp's `count` rows of squares one row at a time, and compute the epilogue on them."""

    def by_squares(batch: Any, row: Any, column: Any) -> list[Any]:
        square = row // SIDE
        positions = [square % count, square // count, column // SIDE]
        return [batch, *positions, row % SIDE, column % SIDE]

    # a square's elements are contiguous, so that a block needs shared memory only for what it stores at once
    for block in (stored, result):
        schedule.transform_block_layout(block, by_squares)
    schedule.transform_layout(stored, ("write", 0), by_squares)
    schedule.reverse_compute_at(stored, warp, preserve_unit_loops=True)
    *_, position, _, across, square, _ = schedule.get_loops(stored)
    schedule.reverse_compute_at(result, position, preserve_unit_loops=True)
    squares, row, column = schedule.get_loops(result)[-3:]
    schedule.reorder(row, squares, column)
    lanes = VECTOR if product.stores_columns else 1
    fused = schedule.fuse(row, squares, column)
    _, thread, vector = schedule.split(fused, [None, WARP, lanes])
    schedule.bind(thread, "threadIdx.x")
    accesses.fuse_after(schedule, result)
    if lanes > 1:
        schedule.vectorize(vector)
    # NVRTC unrolls this loop: TVM would allocate shared memory for each row
    schedule.annotate(position, "pragma_auto_unroll_max_step", 2 * SIDE)
    schedule.annotate(position, "pragma_unroll_explicit", 0)
    schedule.unroll(across)
    schedule.tensorize(square, "wmma_store_16x16x16_f32_shared")
