"""The rule `elementwise`: kernels that compute each element independently, parallel and vectorized."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.analysis import get_sblock_read_write_region

from tvmflow.compiler.contraction.candidates import largest_divisor
from tvmflow.compiler.contraction.machine import (
    CACHED_LINES,
    LINE_FLOATS,
    MIN_LANES,
    MIN_PARALLEL_ELEMENTS,
    PARTS_PER_CORE,
    CpuModel,
)
from tvmflow.compiler.schedules.blocks import (
    ROOT,
    Block,
    analyze_blocks,
    choose_lanes,
    depends_on,
    element_stride,
    find_axis_without_slow_indices,
    find_loads,
    has_computed_indices,
    has_slow_operations,
    is_contiguous,
    is_dynamic_loop,
    linear_stride,
    list_intermediate_buffers,
    list_loads,
    loop_length,
    reads_vectors,
)
from tvmflow.graph.ir import IF_THEN_ELSE, find_nodes, operator_name, replace_variables


def apply(schedule: Schedule, cpu: CpuModel) -> Schedule | None:
    """Return the schedule of a kernel without reductions; None for another kernel."""
    blocks = analyze_blocks(schedule)
    if not blocks or any(block.is_reduction for block in blocks):
        return None
    for block in _find_inlined(blocks, list_intermediate_buffers(schedule)):
        schedule.compute_inline(block.handle)
    parts = split_into_pieces(schedule)
    for part in parts:
        for block in analyze_blocks(part) or []:
            schedule_block(part, block, cpu)
    return join_pieces(parts)


def _find_inlined(blocks: Sequence[Block], intermediate: Sequence[Any]) -> list[Block]:
    """Return the blocks to inline: all but results and slow blocks whose values are read repeatedly."""
    inlined: list[Block] = []
    slow: list[Block] = []
    for block in blocks:
        sources = [load.source for load in list_loads(block)]
        reads_slow = any(other.output.same_as(source) for other in slow for source in sources)
        is_slow = reads_slow or has_slow_operations(block)
        is_result = not any(block.output.same_as(buffer) for buffer in intermediate)
        reads = sum(count_reads(reader, block.output) for reader in blocks) if is_slow else 0
        if is_result or reads > block.work:
            continue
        inlined.append(block)
        if is_slow:
            slow.append(block)
    return inlined


def schedule_block(schedule: Schedule, block: Block, cpu: CpuModel) -> None:
    """Parallelize outer spatial loops of a block; vectorize the innermost if loads are contiguous."""
    loops = list(schedule.get_loops(block.handle))[-len(block.axes) :][: len(block.spatial_axes)]
    is_worthwhile = block.work >= MIN_PARALLEL_ELEMENTS
    last, extent = block.spatial_axes[-1], block.spatial_extents[-1]
    if not block.is_reduction and reads_vectors(block, last, extent):
        outer = _vectorize(schedule, block, loops, cpu)
    elif not block.is_reduction and (
        # vectors that do not cross a block of channels
        lanes := choose_lanes(
            math.gcd(extent, cpu.lanes), lambda count: reads_vectors(block, last, count)
        )
    ):
        vectors, vector = schedule.split(loops[-1], [None, lanes])
        schedule.vectorize(vector)
        outer = [*loops[:-1], vectors]
    elif (position := find_axis_without_slow_indices(block)) is not None:
        # No expensive index depends on this axis: as the innermost loop, it reuses each computed index for
        # as many values as stay in the cache
        outer = [*loops[:position], *loops[position + 1 :]]
        inner = loops[position]
        if position not in block.dynamic_axes:
            length = block.spatial_extents[position]
            rows = largest_divisor(length, CACHED_LINES)
            lengths = [None, rows if rows >= LINE_FLOATS else length]
            around, inner = schedule.split(inner, lengths)
            outer.insert(position, around)
        schedule.reorder(*outer, inner)
    elif not block.is_reduction:
        outer = _tile_transposition(schedule, block, loops, cpu)
    else:
        outer = loops
    parallelize(schedule, outer, is_worthwhile, cpu)


def parallelize(schedule: Schedule, loops: list[Any], is_worthwhile: bool, cpu: CpuModel) -> None:
    """Distribute the fewest outermost loops that make enough parts over the cores.

    The indices of fused loops are quotients and remainders, so the other loops stay unfused.
    """
    if not loops or not is_worthwhile:
        return
    parts, count = 1, 0
    while count < len(loops) and parts < PARTS_PER_CORE * cpu.cores:
        parts *= loop_length(schedule, loops[count])
        count += 1
    fuse_and_parallelize(schedule, loops[:count], is_worthwhile, cpu)


def fuse_and_parallelize(
    schedule: Schedule, loops: list[Any], is_worthwhile: bool, cpu: CpuModel
) -> Any:
    """Fuse loops and distribute them over the cores if that is worthwhile; return the fused loop."""
    fused = fuse(schedule, loops)
    if is_worthwhile and cpu.cores > 1:
        schedule.parallel(fused)
    return fused


def fuse(schedule: Schedule, loops: Sequence[Any]) -> Any:
    """Fuse loops into one and return it; a single loop is returned as it is."""
    return schedule.fuse(*loops) if len(loops) > 1 else loops[0]


def _vectorize(schedule: Schedule, block: Block, loops: list[Any], cpu: CpuModel) -> list[Any]:
    """Fuse and vectorize the innermost loops over contiguous elements; return the outer loops."""
    count = count_fused_axes(block, cpu.lanes)
    outer = list(loops[:-count])
    loop = fuse(schedule, loops[-count:])
    if math.prod(block.spatial_extents[:-count]) < cpu.cores:
        # The loop over vectors runs in parallel, so it stays whole.
        return [*outer, *_split_vectors(schedule, loop, cpu)]
    vectorize_loop(schedule, loop, cpu)
    return outer


def vectorize_loop(schedule: Schedule, loop: Any, cpu: CpuModel) -> None:
    """Vectorize a loop of any length, with a tail of single elements.

    The pass `split_dynamic_tiles` finds the tail of a dynamic loop.
    """
    is_dynamic = is_dynamic_loop(schedule, loop)
    extent = loop_length(schedule, loop)
    if not is_dynamic and extent % cpu.lanes and has_computed_indices(schedule):
        lanes = largest_divisor(extent, cpu.lanes)
        cpu = cpu._replace(lanes=lanes) if lanes >= MIN_LANES else cpu
    for vectors in _split_vectors(schedule, loop, cpu):
        if extent % cpu.lanes and not is_dynamic:
            peel_last_iteration(schedule, vectors)


def _split_vectors(schedule: Schedule, loop: Any, cpu: CpuModel) -> list[Any]:
    """Vectorize a loop; return the loop over vectors, if there is one."""
    if not is_dynamic_loop(schedule, loop) and loop_length(schedule, loop) <= cpu.lanes:
        schedule.vectorize(loop)
        return []
    vectors, vector = schedule.split(loop, [None, cpu.lanes])
    schedule.vectorize(vector)
    return [vectors]


def peel_last_iteration(schedule: Schedule, loop: Any) -> None:
    """Have TVM peel off the last iteration, whose vector is not whole.

    Nothing is peeled if indices depend on data or conditions: TVM fails for these (apache-tvm 0.27).
    """
    if not has_computed_indices(schedule):
        schedule.annotate(loop, "pragma_loop_partition_hint", True)


def count_fused_axes(block: Block, lanes: int) -> int:
    """Return how many innermost axes to fuse: until vectors divide the loop, or as many as possible."""
    axes, extents = block.spatial_axes, block.spatial_extents
    count = 1
    while math.prod(extents[-count:]) % lanes and count < len(extents):
        if len(extents) - count in block.dynamic_axes:
            # TVM does not simplify the indices of loops that are fused by dynamic lengths
            break
        if not follow_each_other(block, axes[-count - 1], axes[-count], extents[-count - 1 :]):
            break
        lengths = [extent for extent in extents[-count - 1 :] if extent > 1]
        if len(lengths) > 2 and lanes % lengths[-1] == 0:
            # in three fused axes with rows shorter than a vector, elements would be loaded one by one
            break
        count += 1
    return count


def follow_each_other(block: Block, outer: Any, inner: Any, extents: Sequence[int]) -> bool:
    """Return whether two neighboring axes can be fused: all loads and the store have a linear stride."""
    if extents[0] == 1:
        return True
    store = tirx.BufferLoad(block.output, list(block.stmt.body.indices))
    for load in (*list_loads(block), store):
        first = linear_stride(load, block, outer, extents[0])
        second = linear_stride(load, block, inner, extents[1])
        if first is None or second is None or first != second * extents[1]:
            return False
    return True


def _tile_transposition(
    schedule: Schedule, block: Block, loops: list[Any], cpu: CpuModel
) -> list[Any]:
    """Tile a transposition so that its lines stay in the cache; return the loops around the tiles.

    A tile spans the contiguous axes of output and input. Elements are loaded one by one and stored as vectors.
    """
    axes, extents = block.spatial_axes, block.spatial_extents
    strides = {
        load: linear_stride(load, block, axes[-1], extents[-1])
        for load in list_loads(block)
        if depends_on(load, axes[-1])
    }
    others = [load for load, step in strides.items() if step != 1]
    contiguous = (
        position
        for position in reversed(range(len(extents) - 1))
        if extents[position] > 1
        and all(element_stride(load, block, axes[position]) == 1 for load in others)
    )
    position = next(contiguous, None)
    if position is None:
        return loops
    count = count_fused_axes(block, cpu.lanes)
    is_vector = (
        None not in strides.values()
        and math.prod(extents[-count:]) >= MIN_LANES
        and position < len(extents) - count
        and not has_computed_indices(schedule)
    )
    if not is_vector:
        return _tile_numbers(schedule, block, loops, position)
    outer = list(loops[:-count])
    outer[position], row = schedule.split(outer[position], [None, _choose_rows(extents[position])])
    vectors = _split_vectors(schedule, fuse(schedule, loops[-count:]), cpu)
    schedule.reorder(*outer, *vectors, row, schedule.get_loops(block.handle)[-1])
    if math.prod(loop_length(schedule, loop) for loop in outer) < cpu.cores:
        # The loop over vectors runs in parallel, so it stays whole.
        return [*outer, *vectors]
    is_dynamic = any(
        axis in block.dynamic_axes for axis in range(len(extents) - count, len(extents))
    )
    is_ragged = math.prod(extents[-count:]) % cpu.lanes > 0 and not is_dynamic
    for loop in vectors if is_ragged else ():
        peel_last_iteration(schedule, loop)
    return outer


def _tile_numbers(schedule: Schedule, block: Block, loops: list[Any], position: int) -> list[Any]:
    """Tile a transposition of single elements; return the loops around the tiles.

    Data are contiguous along the axis at `position`. The innermost loop is the one whose strided access (read or write)
    has the shorter stride: cache lines a large power of two apart would evict each other.
    """
    extents, last = block.spatial_extents, block.spatial_axes[-1]
    outer = list(loops)
    is_dynamic = [axis in block.dynamic_axes for axis in (position, len(extents) - 1)]
    rows = LINE_FLOATS if is_dynamic[0] else largest_divisor(extents[position], LINE_FLOATS)
    columns = CACHED_LINES if is_dynamic[1] else largest_divisor(extents[-1], CACHED_LINES)
    outer[position], row = schedule.split(loops[position], [None, rows])
    outer[-1], column = schedule.split(loops[-1], [None, columns])
    loads = [load for load in list_loads(block) if depends_on(load, last)]
    # the stride within one phase, if data alternate between several, such as the phases of an interleaved image
    steps = (1,) if is_dynamic[1] else range(1, min(LINE_FLOATS, extents[-1]))
    distances = (
        [abs(element_stride(load, block, last, step) or 0) for step in steps] for load in loads
    )
    read_stride = max(min(filter(None, own), default=0) for own in distances)
    write_stride = math.prod(extents[position + 1 :])
    tile = (row, column) if read_stride <= write_stride else (column, row)
    schedule.reorder(*outer, *tile)
    return outer


def _choose_rows(extent: int) -> int:
    """Return the number of rows in a tile: a divisor of the extent, or `LINE_FLOATS` if it is small."""
    rows = largest_divisor(extent, LINE_FLOATS)
    return rows if 2 * rows >= min(extent, LINE_FLOATS) else LINE_FLOATS


# ---------------------------------------------------------------- pieces
# If a condition differs between the lanes of a vector, as in a concatenation, its elements are computed one by one. So
# kernels are split at the indices where conditions change. Each piece gets a schedule; then they are joined again.


# The number of lanes in the widest vectors.
_MAX_LANES: Final = 16
_MAX_PIECES: Final = 12
# Shorter periods are not worth a loop, and vectors divide periods that are multiples of it.
_MIN_PERIOD: Final = 16
_COMPARISONS: Final = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


class _Span(NamedTuple):
    """A part of an axis: its first index and its length."""

    start: int
    extent: int


def split_into_pieces(schedule: Schedule) -> list[Schedule]:
    """Return schedules of the pieces of a kernel; only its own if no condition divides vectors."""
    blocks = analyze_blocks(schedule) or []
    parts = [_list_pieces(block) for block in blocks]
    if all(len(spans) == 1 for spans in parts):
        return [schedule]
    main = schedule.mod["main"]
    nests = [
        _make_nest(block, spans)
        for block, pieces in zip(blocks, parts, strict=True)
        for spans in pieces
    ]
    modules = (tvm.IRModule({"main": _with_body(main, nest)}) for nest in nests)
    return [Schedule(mod, seed=1) for mod in modules]


def join_pieces(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of a kernel whose pieces have these schedules."""
    if len(schedules) == 1:
        return schedules[0]
    functions = [schedule.mod["main"] for schedule in schedules]
    body = tirx.SeqStmt([function.body.block.body for function in functions])
    return Schedule(tvm.IRModule({"main": _with_body(functions[0], body)}), seed=1)


def _with_body(function: tirx.PrimFunc, body: Any) -> tirx.PrimFunc:
    """Return a kernel with another body, and the same parameters and buffers."""
    buffers = function.body.block.alloc_buffers
    root = SBlockRealize([], True, SBlock([], [], [], ROOT, body, alloc_buffers=buffers))
    return tirx.PrimFunc(function.params, root, function.ret_type, function.attrs)


def count_reads(block: Block, source: Any) -> int:
    """Return how many values a block reads from a buffer, without those that conditions exclude."""
    if not any(load.source.same_as(source) for load in list_loads(block)):
        return 0
    total = 0
    for spans in _list_pieces(block):
        loads = find_loads(_shift(block, block.axes, spans))
        count = sum(load.source.same_as(source) for load in loads)
        total += count * math.prod(span.extent for span in spans)
    return total


def _list_pieces(block: Block) -> list[tuple[_Span, ...]]:
    """Return the pieces of a block; the whole block if no condition divides its vectors."""
    whole = tuple(_Span(0, extent) for extent in block.spatial_extents)
    parts = _divide(block, whole)
    # a condition on another axis chooses between whole vectors, unless vectors cross an index of that axis
    is_divided = any(
        part[axis] != whole[axis]
        and (axis == len(whole) - 1 or math.prod(block.spatial_extents[axis + 1 :]) % _MAX_LANES)
        for part in parts
        for axis in range(len(whole))
    )
    return parts if is_divided and len(parts) <= _MAX_PIECES else [whole]


def _divide(block: Block, piece: tuple[_Span, ...]) -> list[tuple[_Span, ...]]:
    """Return the parts of a piece within which no condition changes, if that can be decided."""
    parts = list(itertools.product(*_list_spans(block, piece)))
    if len(parts) == 1 or len(parts) > _MAX_PIECES:
        return parts
    # if one axis is fixed, a condition on two axes becomes a condition on the other axis
    return [smaller for part in parts for smaller in _divide(block, part)]


def _list_spans(block: Block, piece: Sequence[_Span]) -> list[list[_Span]]:
    """Return the spans of each axis within which no condition changes; the whole axis if too many."""
    axes = list(zip(block.spatial_axes, _list_lengths(block, piece), strict=True))
    value = block.stmt.body.value
    last = block.spatial_axes[-1]
    repeats = _list_periods(value) and is_contiguous(block, last)
    # most kernels have no condition
    if not repeats and not _list_conditions(value):
        return [[span] for span in piece]
    value = _shift(block, block.axes, piece)
    conditions = _list_conditions(value)
    spans: list[list[_Span]] = []
    for (axis, extent), whole in reversed(list(zip(axes, piece, strict=True))):
        changes = {
            change for condition in conditions for change in _find_changes(condition, axis, axes)
        }
        if repeats and axis.same_as(last) and isinstance(extent, int):
            # where an index wraps around
            for index, period in _list_periods(value):
                start = tvm.sym.Analyzer().simplify(index - axis)
                if isinstance(start, tirx.IntImm):
                    changes |= set(range(-int(start) % period, extent, period))
        ends = sorted({0, whole.extent, *changes})
        parts = [_Span(whole.start + start, end - start) for start, end in itertools.pairwise(ends)]
        parts = parts if isinstance(extent, int) else [whole]
        is_few = math.prod(map(len, spans)) * len(parts) <= _MAX_PIECES
        spans.append(parts if is_few else [whole])
    return spans[::-1]


def _shift(block: Block, axes: Sequence[Any], spans: Sequence[_Span]) -> Any:
    """Return the value of a piece of a block over new axes, which begin at 0."""
    shifted = [axis + span.start for axis, span in zip(axes, spans, strict=True)]
    positions = dict(zip(block.axes, shifted, strict=True))
    value = replace_variables(block.stmt.body.value, positions)
    extents = list(zip(axes, _list_lengths(block, spans), strict=True))
    # a value that was simplified to a constant may have lost its type
    simple = _make_analyzer(extents).simplify(value).astype(block.output.dtype)

    def rename(let: Any) -> Any:
        own = tirx.Var(str(let.var.name), let.var.ty.dtype)
        return tirx.Let(own, let.value, replace_variables(let.body, {let.var: own}))

    # a kernel binds each variable once
    return tvm_ffi.structural_map(simple, (tirx.Let, rename))


def _list_lengths(block: Block, spans: Sequence[_Span]) -> list[Any]:
    """Return the lengths of a piece's axes: integers, or expressions for dynamic axes, which stay whole."""
    return [
        block.stmt.iter_vars[position].dom.extent if position in block.dynamic_axes else span.extent
        for position, span in enumerate(spans)
    ]


def _make_analyzer(axes: Sequence[tuple[Any, Any]]) -> Any:
    analyzer = tvm.sym.Analyzer()
    for axis, extent in axes:
        length = tirx.IntImm(axis.ty.dtype, extent) if isinstance(extent, int) else extent
        analyzer.bind(axis, tvm.ir.Range(0, length))
    return analyzer


def _list_conditions(value: Any) -> list[Any]:
    """Return the comparisons in the conditions of an expression."""
    return [
        comparison
        for call in find_nodes(value, tvm.ir.Call)
        if operator_name(call) == IF_THEN_ELSE
        for comparison in find_nodes(call.args[0], *_COMPARISONS)
    ]


def _find_changes(condition: Any, axis: Any, axes: Sequence[tuple[Any, Any]]) -> set[int]:
    """Return the indices of an axis at which the outcome of a comparison changes.

    The outcome is true, false, or undecided because it depends on inner axes. A dynamic axis has no such indices.
    `axes` lists the axes with their lengths, outermost first.
    """
    others = find_nodes(condition, tirx.FloorMod, tirx.FloorDiv, tvm.ir.Call, tvm.ir.TensorLoad)
    variables = set(find_nodes(condition, tirx.Var))
    if others or not axis.same_as(next((var for var, _ in axes if var in variables), None)):
        return set()
    analyzer = _make_analyzer(
        [(other, length) for other, length in axes if not other.same_as(axis)]
    )

    def decide(index: int) -> bool | None:
        number = tirx.IntImm(axis.ty.dtype, index)
        decided = analyzer.simplify(replace_variables(condition, {axis: number}))
        return bool(decided) if isinstance(decided, tirx.IntImm) else None

    extent = next(length for other, length in axes if other.same_as(axis))
    return _find_ends(decide, extent) if isinstance(extent, int) else set()


def _find_ends(decide: Callable[[int], bool | None], extent: int) -> set[int]:
    """Return where a function changes from one value, perhaps via None, to another."""
    first, last = decide(0), decide(extent - 1)
    if first == last:
        return set()
    ends = set()
    for end in (first, last):
        # bisect for the end of the first value, then for the start of the last one
        low, high = 0, extent - 1
        while high - low > 1:
            middle = (low + high) // 2
            is_before = (decide(middle) == end) == (end == first)
            low, high = (middle, high) if is_before else (low, middle)
        ends.add(high)
    return ends


def _list_periods(value: Any) -> list[tuple[Any, int]]:
    """Return (index, period) of indices that wrap around, such as those into a repeated tensor."""
    modulos = find_nodes(value, tirx.FloorMod)
    periods = [(node.a, int(node.b)) for node in modulos if isinstance(node.b, tirx.IntImm)]
    return [(index, n) for index, n in periods if n >= _MIN_PERIOD and n % _MIN_PERIOD]


def _make_nest(block: Block, spans: Sequence[_Span]) -> Any:
    """Return the loop nest of a piece of a block."""
    dtype = block.axes[0].ty.dtype
    names = [str(axis.name) for axis in block.axes]
    loops = [tirx.Var(f"loop_{name}", dtype) for name in names]
    axes = [tirx.Var(name, dtype) for name in names]
    value = _shift(block, axes, spans)
    positions = [axis + span.start for axis, span in zip(axes, spans, strict=True)]
    body = tirx.BufferStore(block.output, value, positions)
    lengths = [
        tirx.IntImm(dtype, length) if isinstance(length, int) else length
        for length in _list_lengths(block, spans)
    ]
    iterations = [
        tirx.IterVar(tvm.ir.Range(0, length), axis, tirx.IterVar.DataPar)
        for axis, length in zip(axes, lengths, strict=True)
    ]
    name, buffers = (
        block.stmt.name_hint,
        [block.output, *(load.source for load in find_loads(value))],
    )
    unread = SBlock(iterations, [], [], name, body)
    reads, writes = get_sblock_read_write_region(unread, {buffer: buffer for buffer in buffers})
    stmt: Any = SBlockRealize(loops, True, SBlock(iterations, reads, writes, name, body))
    for loop, length in zip(reversed(loops), reversed(lengths), strict=True):
        stmt = tirx.For(loop, 0, length, tirx.ForKind.SERIAL, stmt)
    return stmt
