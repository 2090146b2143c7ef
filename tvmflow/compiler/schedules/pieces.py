"""Divides kernels that compute their elements in different ways, such as concatenations, into pieces that do so in one way.

A vector that one condition divides is computed number by number. The pieces between the indices at
which conditions on an axis change have none: each becomes a kernel with its own schedule, and they
are joined into one again.
"""

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

from tvmflow.compiler.ir import IF_THEN_ELSE, find_nodes, operator_name, replace_variables
from tvmflow.compiler.schedules.blocks import (
    ROOT,
    Block,
    analyze_blocks,
    find_loads,
    is_contiguous,
    list_loads,
)

_MAX_PIECES: Final = 12
# Shorter pieces are not worth a loop, and vectors divide periods that are multiples of it.
_MIN_PERIOD: Final = 16
_COMPARISONS: Final = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


class _Span(NamedTuple):
    """A part of an axis: its first index and its length."""

    start: int
    extent: int


def split(schedule: Schedule) -> list[Schedule]:
    """Return the schedules of the pieces of a kernel without reductions: it alone if no condition divides its last axis."""
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


def join(schedules: Sequence[Schedule]) -> Schedule:
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
    """Return how many numbers a block reads of a buffer: none where a condition chooses others."""
    if not any(load.source.same_as(source) for load in list_loads(block)):
        return 0
    total = 0
    for spans in _list_pieces(block):
        loads = find_loads(_shift(block, block.axes, spans))
        count = sum(load.source.same_as(source) for load in loads)
        total += count * math.prod(span.extent for span in spans)
    return total


def _list_pieces(block: Block) -> list[tuple[_Span, ...]]:
    """Return the pieces of a block: the whole one if no condition divides its vectors."""
    whole = tuple(_Span(0, extent) for extent in block.spatial_extents)
    parts = _divide(block, whole)
    # a condition on another axis chooses between whole vectors
    is_divided = any(part[-1] != whole[-1] for part in parts)
    return parts if is_divided and len(parts) <= _MAX_PIECES else [whole]


def _divide(block: Block, piece: tuple[_Span, ...]) -> list[tuple[_Span, ...]]:
    """Return the parts of a piece within which no condition changes, as far as one on several axes can be decided."""
    parts = list(itertools.product(*_list_spans(block, piece)))
    if len(parts) == 1 or len(parts) > _MAX_PIECES:
        return parts
    # a condition on two axes is one on the other where the first is known
    return [smaller for part in parts for smaller in _divide(block, part)]


def _list_spans(block: Block, piece: Sequence[_Span]) -> list[list[_Span]]:
    """Return the spans of each axis of a piece within which no condition changes; whole axes where these are too many."""
    axes = [(axis, span.extent) for axis, span in zip(block.spatial_axes, piece, strict=True)]
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
        if repeats and axis.same_as(last):
            changes |= _find_wraps(value, axis, extent)
        ends = sorted({0, extent, *changes})
        parts = [_Span(whole.start + start, end - start) for start, end in itertools.pairwise(ends)]
        is_few = math.prod(map(len, spans)) * len(parts) <= _MAX_PIECES
        spans.append(parts if is_few else [whole])
    return spans[::-1]


def _shift(block: Block, axes: Sequence[Any], spans: Sequence[_Span]) -> Any:
    """Return the value of a piece of a block, with other axes, which begin at 0."""
    shifted = [axis + span.start for axis, span in zip(axes, spans, strict=True)]
    places = dict(zip(block.axes, shifted, strict=True))
    value = replace_variables(block.stmt.body.value, places)
    extents = [(axis, span.extent) for axis, span in zip(axes, spans, strict=True)]
    # a kernel binds each variable once
    return tvm_ffi.structural_map(_make_analyzer(extents).simplify(value), (tirx.Let, _rename))


def _rename(let: Any) -> Any:
    """Return the binding of a value to a variable of its own."""
    own = tirx.Var(str(let.var.name), let.var.ty.dtype)
    body = replace_variables(let.body, {let.var: own})
    return tirx.Let(own, let.value, body)


def _make_analyzer(axes: Sequence[tuple[Any, int]]) -> Any:
    analyzer = tvm.sym.Analyzer()
    for axis, extent in axes:
        analyzer.bind(axis, tvm.ir.Range(0, tirx.IntImm(axis.ty.dtype, extent)))
    return analyzer


def _list_conditions(value: Any) -> list[Any]:
    """Return the comparisons in the conditions of an expression."""
    return [
        comparison
        for call in find_nodes(value, tvm.ir.Call)
        if operator_name(call) == IF_THEN_ELSE
        for comparison in find_nodes(call.args[0], *_COMPARISONS)
    ]


def _find_changes(condition: Any, axis: Any, axes: Sequence[tuple[Any, int]]) -> set[int]:
    """Return the indices of an axis from which on a comparison holds, fails, or depends on axes within it.

    Args:
        condition: The comparison.
        axis: The axis.
        axes: All axes and their lengths, outermost first.
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
    return _find_ends(decide, extent)


def _find_ends(decide: Callable[[int], bool | None], extent: int) -> set[int]:
    """Return where a function that changes at most from one value over None to another does so."""
    first, last = decide(0), decide(extent - 1)
    if first == last:
        return set()
    ends = set()
    for end in (first, last):
        # the value before the change, or after it
        low, high = 0, extent - 1
        while high - low > 1:
            middle = (low + high) // 2
            is_before = (decide(middle) == end) == (end == first)
            low, high = (middle, high) if is_before else (low, middle)
        ends.add(high)
    return ends


def _list_periods(value: Any) -> list[tuple[Any, int]]:
    """Return the indices of an expression that begin again, as where a tensor is repeated, and after how many."""
    modulos = find_nodes(value, tirx.FloorMod)
    periods = [(node.a, int(node.b)) for node in modulos if isinstance(node.b, tirx.IntImm)]
    return [(index, n) for index, n in periods if n >= _MIN_PERIOD and n % _MIN_PERIOD]


def _find_wraps(value: Any, axis: Any, extent: int) -> set[int]:
    """Return where along an axis an index begins again."""
    wraps = set()
    for index, period in _list_periods(value):
        start = tvm.sym.Analyzer().simplify(index - axis)
        if isinstance(start, tirx.IntImm):
            wraps |= set(range(-int(start) % period, extent, period))
    return wraps - {0}


def _make_nest(block: Block, spans: Sequence[_Span]) -> Any:
    """Return the loop nest of a piece of a block."""
    dtype = block.axes[0].ty.dtype
    names = [str(axis.name) for axis in block.axes]
    loops = [tirx.Var(f"loop_{name}", dtype) for name in names]
    axes = [tirx.Var(name, dtype) for name in names]
    value = _shift(block, axes, spans)
    places = [axis + span.start for axis, span in zip(axes, spans, strict=True)]
    body = tirx.BufferStore(block.output, value, places)
    iterations = [
        tirx.IterVar(tvm.ir.Range(0, tirx.IntImm(dtype, span.extent)), axis, tirx.IterVar.DataPar)
        for axis, span in zip(axes, spans, strict=True)
    ]
    unread = SBlock(iterations, [], [], block.stmt.name_hint, body)
    buffers = [block.output, *(load.source for load in find_loads(value))]
    reads, writes = get_sblock_read_write_region(unread, {buffer: buffer for buffer in buffers})
    stmt: Any = SBlockRealize(
        loops, True, SBlock(iterations, reads, writes, block.stmt.name_hint, body)
    )
    for loop, span in zip(reversed(loops), reversed(spans), strict=True):
        stmt = tirx.For(loop, 0, tirx.IntImm(dtype, span.extent), tirx.ForKind.SERIAL, stmt)
    return stmt
