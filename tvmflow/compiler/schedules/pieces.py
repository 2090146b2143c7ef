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

from tvmflow.compiler.ir import find_nodes, operator_name
from tvmflow.compiler.schedules.blocks import (
    ROOT,
    Block,
    analyze_blocks,
    find_loads,
    list_loads,
)

_MAX_PIECES: Final = 12
_COMPARISONS: Final = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_CONDITIONAL: Final = "prim.if_then_else"


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
    spans = _list_spans(block)
    # a condition on another axis chooses between whole vectors
    if len(spans[-1]) == 1:
        return [tuple(_Span(0, extent) for extent in block.spatial_extents)]
    return list(itertools.product(*spans))


def _list_spans(block: Block) -> list[list[_Span]]:
    """Return the spans of each axis within which no condition on it alone changes; whole axes where these are too many."""
    axes = list(zip(block.spatial_axes, block.spatial_extents, strict=True))
    value = block.stmt.body.value
    # most kernels have no condition
    conditions = _list_conditions(value) and _list_conditions(_make_analyzer(axes).simplify(value))
    spans: list[list[_Span]] = []
    for axis, extent in reversed(axes):
        changes = {
            change
            for condition in conditions
            if (change := _find_change(condition, axis, extent)) is not None
        }
        ends = sorted({0, extent, *changes})
        parts = [_Span(start, end - start) for start, end in itertools.pairwise(ends)]
        is_few = math.prod(map(len, spans)) * len(parts) <= _MAX_PIECES
        spans.append(parts if is_few else [_Span(0, extent)])
    return spans[::-1]


def _shift(block: Block, axes: Sequence[Any], spans: Sequence[_Span]) -> Any:
    """Return the value of a piece of a block, with other axes, which begin at 0."""
    shifted = [axis + span.start for axis, span in zip(axes, spans, strict=True)]
    places = dict(zip(block.axes, shifted, strict=True))
    value = _substitute(block.stmt.body.value, lambda var: places.get(var, var))
    extents = [(axis, span.extent) for axis, span in zip(axes, spans, strict=True)]
    # a kernel binds each variable once
    return tvm_ffi.structural_map(_make_analyzer(extents).simplify(value), (tirx.Let, _rename))


def _rename(let: Any) -> Any:
    """Return the binding of a value to a variable of its own."""
    own = tirx.Var(str(let.var.name), let.var.ty.dtype)
    body = _substitute(let.body, lambda var: own if var.same_as(let.var) else var)
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
        if operator_name(call) == _CONDITIONAL
        for comparison in find_nodes(call.args[0], *_COMPARISONS)
    ]


def _find_change(condition: Any, axis: Any, extent: int) -> int | None:
    """Return the first index of an axis at which a comparison with it changes; None if it does not, or depends on more."""
    variables = find_nodes(condition, tirx.Var)
    others = find_nodes(condition, tirx.FloorMod, tirx.FloorDiv, tvm.ir.Call, tvm.ir.TensorLoad)
    if others or not variables or not all(variable.same_as(axis) for variable in variables):
        return None
    analyzer = tvm.sym.Analyzer()

    def holds(index: int) -> bool:
        number = tirx.IntImm(axis.ty.dtype, index)
        return bool(analyzer.simplify(_substitute(condition, lambda _: number)))

    low, high, first = 0, extent - 1, holds(0)
    if holds(high) == first:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) == first else (low, middle)
    return high


def _substitute(expr: Any, replace: Callable[[Any], Any]) -> Any:
    """Return an expression with its variables replaced."""
    return tvm_ffi.structural_map(expr, (tirx.Var, replace))


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
