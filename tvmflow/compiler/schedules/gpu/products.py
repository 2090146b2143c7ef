"""The rule `tiled_products`: matmuls and convolutions in shared memory and registers.

A matmul is result[batch, row, column] = sum over depth of left[batch, row, depth] times right[batch, column, depth].
In a convolution, columns are pixels, rows are the channels of the result, and the depth is input channels and kernel
positions. Threads copy the next tile of pixels into shared memory (implicit GEMM).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.gpu_tiles import VECTOR, Device, Tile, choose_depth, choose_tile
from tvmflow.compiler.schedules.blocks import (
    REDUCTION,
    depends_on,
    find_read,
    list_all_blocks,
    loop_length,
)
from tvmflow.compiler.schedules.gpu import accesses
from tvmflow.graph.ir import find_nodes, rewrite_nodes

# Matmuls with fewer rows or columns are left to rules without tiles.
_MIN_SIDE: Final = 4
_DTYPE_INDEX: Final = "int64"


# (first operand uses an axis, second operand uses it, result uses it) -> its kind.
_KINDS: Final = {
    (True, True, True): "batch",
    (True, False, True): "first",
    (False, True, True): "second",
    (True, True, False): "depth",
}


class Product(NamedTuple):
    """A matmul or convolution, and the kinds of its axes.

    Attributes:
        main: The reduction block.
        kinds: For each axis of the block: `batch`, `row`, `column`, `depth`, or `one` if its length is 1.
        order: The positions of the axes, in the order in which axes of the same kind are fused.
        lengths: Kind -> the product of the lengths of its axes.
        left: The position, among the block's loads, of the operand that has rows.
        stores_columns: Whether columns of the result are contiguous, so that vectors are stored.
        left_by_depth: Whether the left operand is contiguous along the depth.
        left_lanes: The number of values of the left operand that a thread loads at once.
        right_by_depth: Whether the right operand is contiguous along the depth.
        right_lanes: The number of values of the right operand that a thread loads at once.
    """

    main: Any
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    lengths: dict[str, int]
    left: int
    stores_columns: bool
    left_by_depth: bool
    left_lanes: int
    right_by_depth: bool
    right_lanes: int


def apply(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule a matmul, with its epilogue in registers; None for another kernel."""
    schedule = divide_groups(schedule)
    product = find_product(schedule)
    if product is None:
        return None
    depth = choose_depth(product.lengths["depth"])
    tile = choose_tile(product.lengths, depth, device)
    return None if tile is None else _apply_tile(schedule, product, tile, depth)


# ---------------------------------------------------------------- recognition of matmuls


def find_product(schedule: Schedule) -> Product | None:
    """Return the only reduction of a kernel if it is a matmul; None for other kernels."""
    handles = list_all_blocks(schedule)
    reductions = [handle for handle in handles if accesses.is_reduction(schedule, handle)]
    if len(reductions) != 1 or not _is_product(schedule.get(reductions[0])):
        return None
    (main,) = reductions
    stmt = schedule.get(main)
    loads = accesses.list_loads(stmt)
    axes = list(stmt.iter_vars)
    kinds = [_kind_of(axis, stmt.body, loads) for axis in axes]
    if None in kinds or not {"first", "second", "depth"} <= set(kinds):
        return None
    # columns are the axis along which the result is contiguous
    strides = {
        kind: min(
            accesses.element_stride(stmt.body, axis.var) or 0
            for axis, other in zip(axes, kinds, strict=True)
            if other == kind
        )
        for kind in ("first", "second")
    }
    columns = min(strides, key=lambda kind: strides[kind])
    names = {"first": "row", "second": "row", columns: "column"}
    named = tuple(names.get(str(kind), str(kind)) for kind in kinds)
    left = int(columns == "first")
    lengths = {
        kind: math.prod(
            int(axis.dom.extent) for axis, other in zip(axes, named, strict=True) if other == kind
        )
        for kind in ("batch", "row", "column", "depth")
    }
    if min(lengths["row"], lengths["column"]) < _MIN_SIDE:
        return None
    # the axes of the depth are fused in the memory order of the left operand, such as weights
    order = sorted(
        range(len(axes)),
        key=lambda position: (
            -(accesses.element_stride(loads[left], axes[position].var) or 0)
            if named[position] == "depth"
            else 0
        ),
    )
    ordered = [(axes[position], named[position]) for position in order]
    left_depth, left_row = (_contiguous(loads[left], ordered, kind) for kind in ("depth", "row"))
    right_depth, right_column = (
        _contiguous(loads[1 - left], ordered, kind) for kind in ("depth", "column")
    )
    return Product(
        main=main,
        kinds=named,
        order=tuple(order),
        lengths=lengths,
        left=left,
        stores_columns=_contiguous(stmt.body, ordered, "column") == VECTOR,
        left_by_depth=left_depth > 0 and left_row == 0,
        left_lanes=max(left_depth, left_row, 1),
        right_by_depth=right_depth > 0 and right_column == 0,
        right_lanes=max(right_column, 1),
    )


def _is_product(stmt: Any) -> bool:
    """Return whether a block adds up products of two elements of different buffers."""
    body = stmt.body
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, tirx.Add):
        return False
    loads = accesses.list_loads(stmt)
    factors = [term for term in (body.value.a, body.value.b) if isinstance(term, tirx.Mul)]
    return len(loads) == 2 and len(factors) == 1 and not loads[0].source.same_as(loads[1].source)


def divide_groups(schedule: Schedule) -> Schedule:
    """Return a kernel with the channels of a grouped convolution split into (group, channel) axes."""
    for main in list_all_blocks(schedule):
        axes = list(schedule.get(main).iter_vars)
        for position, axis in enumerate(axes):
            divisions = [
                division
                for division in find_nodes(schedule.get(main).body, tirx.FloorDiv)
                if division.a.same_as(axis.var) and isinstance(division.b, tirx.IntImm)
            ]
            if accesses.is_reduction(schedule, main) and axis.iter_type != REDUCTION and divisions:
                size = divisions[0].b
                inputs = [tirx.Var(f"i{i}", _DTYPE_INDEX) for i in range(len(axes))]
                group, channel = (
                    kind(inputs[position], size) for kind in (tirx.FloorDiv, tirx.FloorMod)
                )
                outputs = [*inputs[:position], group, channel, *inputs[position + 1 :]]
                schedule.transform_block_layout(main, tirx.IndexMap(inputs, outputs, None))
                # the ranges of the new axes let the analyzer simplify divisions
                analyzer = tvm.sym.Analyzer()
                for own in schedule.get(main).iter_vars:
                    analyzer.bind(own.var, own.dom)
                function = rewrite_nodes(schedule.mod["main"], tirx.FloorDiv, analyzer.simplify)
                return Schedule(tvm.IRModule({"main": function}), seed=1)
    return schedule


def _kind_of(axis: Any, store: Any, loads: Sequence[Any]) -> str | None:
    """Return the kind of an axis: batch, rows (first operand), columns (second operand) or depth."""
    if int(axis.dom.extent) == 1:
        return "one"
    first, second, stored = (depends_on(access, axis.var) for access in (*loads, store))
    return _KINDS.get((first, second, stored))


def _contiguous(access: Any, axes: Sequence[tuple[Any, str]], kind: str) -> int:
    """Return the contiguous values to access at once along a kind's axes: a vector, 1, or 0 if none are."""
    count = 1
    others: list[int | None] = []
    for axis, other in reversed(axes):
        extent = int(axis.dom.extent)
        if extent == 1 or not depends_on(access, axis.var):
            continue
        stride = accesses.element_stride(access, axis.var)
        if other == kind and not others and stride == count:
            count *= extent
        elif other == kind or stride is None or stride % VECTOR:
            others.append(stride)
    if count == 1:
        return 0
    # vectors must begin at multiples of their size, which rows of odd lengths prevent
    is_aligned = all(stride is not None and stride % VECTOR == 0 for stride in others)
    return VECTOR if count % VECTOR == 0 and is_aligned else 1


# ---------------------------------------------------------------- the schedule


def _apply_tile(schedule: Schedule, product: Product, tile: Tile, depth: int) -> Schedule:
    main = product.main
    left, right = product.left, 1 - product.left
    accesses.fuse_epilogue(schedule, main)
    make_matrices(schedule, product)
    schedule.pad_einsum(main, [1, tile.rows, tile.columns, tile.groups * depth])
    total = None
    if tile.groups > 1:
        divided = schedule.split(schedule.get_loops(main)[-1], [None, tile.groups, depth])
        total, main = main, schedule.rfactor(divided[1], 0)
        schedule.set_scope(main, 0, "shared")
    batch, row, column, *reduced = schedule.get_loops(main)
    if total is None:
        reduced = schedule.split(reduced[0], [None, depth])
    outer, *group, part = reduced
    for loop in group:
        schedule.bind(loop, "threadIdx.z")
    middle, inner = schedule.split(part, [None, VECTOR])
    vectors = tile.columns // tile.across // VECTOR
    block_y, thread_y, row_in = schedule.split(row, [None, tile.down, tile.rows // tile.down])
    block_x, vector, thread_x, lane = schedule.split(column, [None, vectors, tile.across, VECTOR])
    schedule.reorder(
        *(batch, block_y, block_x, *group, thread_y, thread_x),
        *(outer, middle, inner, row_in, vector, lane),
    )
    accesses.bind(schedule, "blockIdx", "yx", schedule.fuse(batch, block_y), block_x)
    accesses.bind(schedule, "threadIdx", "yx", thread_y, thread_x)
    # unroll the loads of a step of the depth, too: registers cannot be indexed by a loop variable
    accesses.unroll(schedule, thread_x, max(64, 2 * tile.results * VECTOR))
    result = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(result, thread_x, preserve_unit_loops=True)

    copies = []
    for operand, lanes in ((right, product.right_lanes), (left, product.left_lanes)):
        shared = schedule.cache_read(main, find_position(schedule, main, operand), "shared")
        schedule.compute_at(shared, outer, preserve_unit_loops=True)
        if operand == right and product.right_by_depth:
            # neighboring threads read along the depth, and write to different banks of shared memory
            schedule.reorder(*reversed(schedule.get_loops(shared)[-2:]))
            schedule.storage_align(shared, 0, axis=1, factor=4 * VECTOR, offset=VECTOR)
        divide_copy(schedule, shared, tile, lanes)
        accesses.fuse_before(schedule, shared)
        copies.append(shared)
    load_ahead(schedule, outer, copies)
    local = schedule.cache_read(main, find_position(schedule, main, right), "local")
    schedule.compute_at(local, inner, preserve_unit_loops=True)
    accesses.vectorize(schedule, schedule.get_loops(local)[-1], VECTOR)
    local = schedule.cache_read(main, find_position(schedule, main, left), "local")
    anchor = middle if product.left_by_depth else inner
    schedule.compute_at(local, anchor, preserve_unit_loops=True)
    accesses.vectorize(schedule, schedule.get_loops(local)[-1], VECTOR)

    if total is not None:
        _add_groups(schedule, total, tile, block_x)
    else:
        accesses.fuse_after(schedule, result)
    if product.stores_columns:
        accesses.vectorize(schedule, schedule.get_loops(result)[-1], VECTOR)
    schedule.decompose_reduction(main, outer)
    return schedule


def _add_groups(schedule: Schedule, total: Any, tile: Tile, block: Any) -> None:
    """Add up the partial results of all groups; the threads divide the results among themselves."""
    schedule.reverse_compute_at(total, block, preserve_unit_loops=True)
    group, batch, row, column = schedule.get_loops(total)[-4:]
    schedule.reorder(batch, row, column, group)
    threads = [tile.groups, tile.down, tile.across]
    split = schedule.split(schedule.fuse(row, column), [None, *threads])
    accesses.bind(schedule, "threadIdx", "zyx", *split[1:])
    result = schedule.cache_write(total, 0, "local")
    schedule.reverse_compute_at(result, split[-1], preserve_unit_loops=True)
    accesses.fuse_after(schedule, result)
    schedule.decompose_reduction(total, group)


def make_matrices(schedule: Schedule, product: Product) -> None:
    """Transform a block and its buffers to the axes of a matrix multiplication."""
    main = product.main
    loads = accesses.list_loads(schedule.get(main))
    reads = [find_read(schedule.get(main), load) for load in loads]
    indices = schedule.get(main).body.indices
    has_groups = any(len(find_nodes(index, tvm.ir.Var)) > 1 for index in indices)
    gathered = [schedule.reindex(main, ("read", read)) for read in reads]
    scattered = schedule.reindex(main, ("write", 0))
    if has_groups:
        # before rows are padded: TVM would forget that a group has no rows beyond its own
        accesses.fuse_after(schedule, scattered)
    # from here on, indices are axes of the block
    stmt = schedule.get(main)
    axes = list(zip(product.kinds, (int(axis.dom.extent) for axis in stmt.iter_vars), strict=True))
    positions = {axis.var: position for position, axis in enumerate(stmt.iter_vars)}
    ranks = {position: anchor for anchor, position in enumerate(product.order)}

    def fuse(variables: Sequence[Any], kinds: Sequence[str]) -> tirx.IndexMap:
        """Return the map that fuses axes into one axis for each kind."""
        inputs = [tirx.Var(f"i{number}", _DTYPE_INDEX) for number in range(len(variables))]
        used = [positions[variable] for variable in variables]
        fused: dict[str, Any] = {}
        for number in sorted(range(len(used)), key=lambda number: ranks[used[number]]):
            kind, extent = axes[used[number]]
            fused[kind] = fused[kind] * extent + inputs[number] if kind in fused else inputs[number]
        zero = tirx.IntImm(_DTYPE_INDEX, 0)
        return tirx.IndexMap(inputs, [fused.get(kind, zero) for kind in kinds], None)

    left_kinds = ("batch", "row", "depth") if product.left_by_depth else ("batch", "depth", "row")
    for position, load in enumerate(accesses.list_loads(stmt)):
        kinds = left_kinds if position == product.left else ("batch", "depth", "column")
        schedule.transform_layout(gathered[position], ("write", 0), fuse(load.indices, kinds))
    result = fuse(stmt.body.indices, ("batch", "row", "column"))
    schedule.transform_layout(scattered, ("read", 0), result)
    main_axes = [axis.var for axis in stmt.iter_vars]
    schedule.transform_block_layout(main, fuse(main_axes, ("batch", "row", "column", "depth")))


def find_position(schedule: Schedule, main: Any, operand: int) -> int:
    """Return the index, among the regions that a block reads, of its first or second operand."""
    stmt = schedule.get(main)
    return find_read(stmt, accesses.list_loads(stmt)[operand])


def divide_copy(schedule: Schedule, copy: Any, tile: Tile, lanes: int) -> None:
    """Divide a copy to shared memory between all threads; neighbors copy adjacent values."""
    loops = schedule.get_loops(copy)[-3:]
    count = math.prod(loop_length(schedule, loop) for loop in loops)
    threads = tile.groups * tile.threads
    lanes = lanes if count % (threads * lanes) == 0 else 1
    divisions = [None, tile.groups, tile.down, tile.across, lanes]
    part, thread_z, thread_y, thread_x, vector = schedule.split(schedule.fuse(*loops), divisions)
    # prefetched operands are in registers
    accesses.unroll(schedule, part, 32)
    if lanes > 1:
        schedule.vectorize(vector)
    if tile.groups > 1:
        schedule.bind(thread_z, "threadIdx.z")
    accesses.bind(schedule, "threadIdx", "yx", thread_y, thread_x)


def load_ahead(schedule: Schedule, steps: Any, copies: Sequence[Any]) -> None:
    """Prefetch the operands of the next step, two copies to shared memory, into registers."""
    for copy in copies:
        schedule.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    # each copy is a load, in the previous step, and a store
    schedule.annotate(steps, "software_pipeline_stage", [0, 1, 0, 1, 1])
    schedule.annotate(steps, "software_pipeline_order", [2, 0, 3, 1, 4])
