"""Separate whole tiles and vectors of loops of dynamic length from their tails.

A schedule splits a dynamic loop into tiles, with a condition for the end of the tail tile. TVM computes vectors with a
condition element by element, and tests the condition for each row of every tile. Here whole tiles have no condition,
and the tail has its own code: a smaller tile, or a tile whose rows beyond the end repeat the last row. The elements of
a tail vector are computed one by one, or under a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmflow.compiler.contraction.machine import list_masked_types
from tvmflow.compiler.contraction.packed import LAST_LANES
from tvmflow.compiler.tail_vectors import list_terms, may_mask
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import DYNAMIC_SHAPES, MULTIPLES, list_size_variables

# Tiles of up to this many rows get a tail tile for each row count; fewer if they unroll to many statements.
_MAX_EXACT_ROWS: Final = 6
_MAX_EXACT_ROWS_OF_LONG_CODE: Final = 4
_MAX_STATEMENTS: Final = 40
# In images of more than this many tiles, one tail tile serves all pixel counts: the wasted pixels are few.
_MIN_TILES_OF_IMAGE: Final = 24

PARTITION_HINT: Final = "pragma_loop_partition_hint"
"""The attribute of a loop whose first or last iterations LoopPartition separates."""

TAIL_HINT: Final = "tvmflow.computes_tails_apart"
"""The annotation of a loop of static extent over tiles, whose tail tile gets its own code."""

# An upper bound of a tensor's sizes, which are at least 1.
_MOST: Final = 1 << 31
# An upper bound of the length of a tile along an axis.
_LOCAL_LENGTH: Final = 1 << 12
# An upper bound of indices.
_MAX_INDEX: Final = 1 << 30
SIZE_TYPES: Final = ("int32", "int64")
"""The types of sizes and indices."""


class _Condition(NamedTuple):
    """A condition `position < end` that limits the rows of a tile or the lanes of a vector.

    Attributes:
        variables: The variables of loops within the tile that the condition depends on -> the loops' lengths.
        is_whole: The condition that the tile is whole.
        tail: The rows or values from the tile's first one to the end.
    """

    term: Any
    variables: dict[Any, int]
    is_whole: Any
    tail: Any


@ir.kernel_pass
def split_dynamic_tiles(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split loops of dynamic length, or with a `TAIL_HINT`, into whole tiles and the tail tile."""
    loops = ir.find_nodes(function.body, tirx.For)
    if not _has_dynamic_loops(loops) and not any(TAIL_HINT in loop.annotations for loop in loops):
        return function
    function = function.with_body(_with_local_lengths(function.body))
    body = tvm_ffi.structural_map(function.body, (SBlockRealize, _normalize))
    bound = tvm_ffi.structural_map(body, (tirx.For, _bind_divisions))
    splitter = _Splitter(function.with_body(bound))
    body = tvm_ffi.structural_map(bound, (tirx.For, splitter.split))
    body = tvm_ffi.structural_map(body, (tirx.For, _roll))
    body = _guard_divisors(body)
    made = tvm.IRModule({"kernel": function.with_body(body)})
    # Give each copy of a loop or a buffer its own variable.
    return tirx.transform.ConvertSSA()(made)["kernel"]


def _roll(loop: tirx.For) -> tirx.For:
    """Return a loop without unrolling if it contains a loop over the single elements of a tail vector.

    LLVM would vectorize each unrolled copy, which takes seconds for a pooling window.
    """
    is_rolled = loop.kind == tirx.ForKind.UNROLLED and any(
        inner.kind == tirx.ForKind.SERIAL
        and not isinstance(inner.extent, tirx.IntImm)
        and LAST_LANES not in inner.annotations
        for inner in ir.find_nodes(loop.body, tirx.For)
    )
    return ir.with_fields(loop, kind=tirx.ForKind.SERIAL) if is_rolled else loop


@ir.kernel_pass
def start_dynamic_reductions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Initialize reductions of dynamic length before their loops.

    LowerInitBlock initializes them in the first iteration: never if there are no iterations, and not all lanes of
    a row that is shorter than a vector.
    """
    loops = ir.find_nodes(function.body, tirx.For)
    if not _has_dynamic_loops(loops):
        return function
    first: dict[Any, list[Any]] = {}
    started = []
    for realize in ir.find_nodes(function.body, SBlockRealize):
        if realize.block.init is not None:
            around = [
                loop
                for loop in loops
                if any(map(realize.same_as, ir.find_nodes(loop.body, SBlockRealize)))
            ]
            around.sort(key=lambda loop: -len(ir.find_nodes(loop.body, tirx.For)))
            if found := _start_reduction(realize, around):
                outermost, start = found
                first.setdefault(outermost.loop_var, []).append(start)
                started.append(realize.block)

    def update(realize: SBlockRealize) -> SBlockRealize:
        if not any(realize.block.same_as(block) for block in started):
            return realize
        return ir.with_fields(realize, block=ir.with_fields(realize.block, init=None))

    def insert(loop: tirx.For) -> Any:
        starts = first.get(loop.loop_var)
        return tirx.SeqStmt([*starts, loop]) if starts else loop

    body = tvm_ffi.structural_map(function.body, ((SBlockRealize, update), (tirx.For, insert)))
    return function.with_body(body)


def _start_reduction(
    realize: SBlockRealize, around: Sequence[tirx.For]
) -> tuple[tirx.For, Any] | None:
    """Return the outermost loop of a reduction of dynamic length, and the loops that initialize it."""
    used: dict[int, set[Any]] = {tirx.IterVar.DataPar: set(), tirx.IterVar.CommReduce: set()}
    for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        used.setdefault(axis.iter_type, set()).update(ir.find_nodes(value, tirx.Var))
    reduced = used[tirx.IterVar.CommReduce]
    begin = next((n for n, loop in enumerate(around) if loop.loop_var in reduced), len(around))
    path = around[begin:]
    is_dynamic = any(
        loop.loop_var in reduced and not isinstance(loop.extent, tirx.IntImm) for loop in path
    )
    variables = {loop.loop_var for loop in path}
    if not is_dynamic or not reduced.isdisjoint(used[tirx.IterVar.DataPar] & variables):
        return None
    terms = [
        term
        for term in list_terms(realize.predicate)
        if reduced.isdisjoint(ir.find_nodes(term, tirx.Var))
    ]
    kept = [loop for loop in path if loop.loop_var not in reduced]
    own = {loop.loop_var: tirx.Var(loop.loop_var.name, loop.loop_var.ty.dtype) for loop in kept}
    body = ir.replace_variables(_make_initial(realize, terms), own)
    for loop in reversed(kept):
        extent = ir.replace_variables(loop.extent, own)
        body = tirx.For(own[loop.loop_var], loop.min, extent, loop.kind, body)
    return path[0], body


def _make_initial(realize: SBlockRealize, terms: Sequence[Any]) -> SBlockRealize:
    """Return the block that initializes a reduction where all of `terms` are true."""
    block = realize.block
    pairs = [
        (axis, value)
        for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)
        if axis.iter_type == tirx.IterVar.DataPar
    ]
    own = {axis.var: tirx.Var(axis.var.name, axis.var.ty.dtype) for axis, _ in pairs}
    axes = [tirx.IterVar(axis.dom, own[axis.var], axis.iter_type) for axis, _ in pairs]
    made = SBlock(
        axes,
        [],
        [ir.replace_variables(write, own) for write in block.writes],
        f"{block.name_hint}_init",
        ir.replace_variables(block.init, own),
    )
    return SBlockRealize([value for _, value in pairs], _all(terms), made)


@ir.kernel_pass
def name_dynamic_lengths(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bind dynamic lengths of a kernel's own buffers to variables: TVM would expand them in each index."""
    loops = ir.find_nodes(function.body, tirx.For)
    loop_vars = {loop.loop_var for loop in loops}
    if not _has_dynamic_loops(loops):
        return function
    bound: list[tuple[Any, Any]] = []
    moving = loop_vars | {bind.var for bind in ir.find_nodes(function.body, tirx.Bind)}

    def bind(size: Any) -> Any:
        size = _choose_plain(size, moving)
        used = ir.find_nodes(size, tirx.Var)
        if isinstance(size, tirx.IntImm | tirx.Var) or not moving.isdisjoint(used):
            return size
        return _name(size, "length", bound)

    buffers = _list_buffers(function.body)
    own = {}
    for buffer in buffers:
        shape = list(map(bind, buffer.shape))
        if any(not new.same_as(old) for new, old in zip(shape, buffer.shape, strict=True)):
            own[buffer] = ir.with_shape(buffer, shape)

    def hide(loop: tirx.For) -> tirx.For:
        return _hide_divisions(loop, loop_vars)

    body = tvm_ffi.structural_map(function.body, (tirx.For, hide))
    body = ir.replace_variables(_simplify_indices(body, set(buffers)), own)
    return function.with_body(_bind_all(bound, body))


def _with_local_lengths(body: Any) -> Any:
    """Return a statement whose local buffers have an upper bound in place of each dynamic length.

    CompactBufferAllocation shrinks each buffer to the region that a tile uses if it is provably within the buffer.
    """
    own = {}
    for buffer in _list_buffers(body):
        known = [size if isinstance(size, tirx.IntImm) else _LOCAL_LENGTH for size in buffer.shape]
        if str(buffer.scope()) == "local" and any(isinstance(size, int) for size in known):
            own[buffer] = ir.with_shape(buffer, known)
    return _with_buffers(body, own)


def _bind_divisions(loop: tirx.For) -> tirx.For:
    """Bind divisions of a parallel loop's variable by dynamic lengths, so that each is computed once."""
    if loop.kind != tirx.ForKind.PARALLEL:
        return loop
    bound: list[tuple[Any, Any]] = []

    def bind(division: Any) -> Any:
        used = ir.find_nodes(division, tirx.Var)
        own = {loop.loop_var, *(var for var, _ in bound)}
        is_dynamic = not isinstance(division.b, tirx.IntImm)
        if not is_dynamic or any(var in inner for var in used) or own.isdisjoint(used):
            return division
        if ir.find_nodes(division, tvm.ir.TensorLoad):
            # a condition may guard the load
            return division
        return _name(division, loop.loop_var.name, bound)

    inner = {other.loop_var for other in ir.find_nodes(loop.body, tirx.For)}
    body = tvm_ffi.structural_map(loop.body, ((tirx.FloorDiv, bind), (tirx.FloorMod, bind)))
    return ir.with_fields(loop, body=_bind_all(bound, body))


def _name(value: Any, prefix: str, bound: list[tuple[Any, Any]]) -> Any:
    """Return the variable that is bound to an equal value, or bind a new variable with the prefix."""
    for var, known in bound:
        if _same(known, value):
            return var
    var = tirx.Var(f"{prefix}_{len(bound)}", value.ty.dtype)
    bound.append((var, value))
    return var


def _bind_all(bound: Sequence[tuple[Any, Any]], body: Any) -> Any:
    return tirx.SeqStmt([*(tirx.Bind(*pair) for pair in bound), body]) if bound else body


def _guard_divisors(body: Any) -> Any:
    """Return a statement in which divisors of dynamic length are at least 1.

    In unreachable code for empty rows, TVM would find a division by 0 and fail (apache-tvm 0.27). Divisors that depend
    on data are unchanged: they may be negative.
    """
    data: set[Any] = set()

    def is_data(value: Any) -> bool:
        loads = ir.find_nodes(value, tvm.ir.TensorLoad)
        return bool(loads) or not data.isdisjoint(ir.find_nodes(value, tirx.Var))

    binds = ir.find_nodes(body, tirx.Bind, tirx.Let)
    while found := {bind.var for bind in binds if is_data(bind.value)} - data:
        data |= found

    def guard(division: Any) -> Any:
        if isinstance(division.b, tirx.IntImm | tirx.Max) or is_data(division.b):
            return division
        one = tirx.IntImm(division.b.ty.dtype, 1)
        return type(division)(division.a, tirx.max(division.b, one))

    return tvm_ffi.structural_map(body, ((tirx.FloorDiv, guard), (tirx.FloorMod, guard)))


def _has_dynamic_loops(loops: Sequence[tirx.For]) -> bool:
    """Return whether the length of a loop depends on more than the loops around it."""
    variables = {loop.loop_var for loop in loops}
    return any(
        var not in variables for loop in loops for var in ir.find_nodes(loop.extent, tirx.Var)
    )


def _choose_plain(size: Any, moving: set[Any]) -> Any:
    """Return the simplest operand of the minimum that CompactBufferAllocation computed: an upper bound."""
    if not isinstance(size, tirx.Min):
        return size
    sides = [_choose_plain(side, moving) for side in (size.a, size.b)]

    def rate(side: Any) -> tuple[bool, bool, int]:
        used = ir.find_nodes(side, tirx.Var)
        return not moving.isdisjoint(used), bool(used), len(str(side))

    return min(sides, key=rate)


def _simplify_indices(body: Any, buffers: set[Any]) -> Any:
    analyzer = tvm.sym.Analyzer()
    loops, binds = ir.find_nodes(body, tirx.For), ir.find_nodes(body, tirx.Bind)
    variables = {*(loop.loop_var for loop in loops), *(bind.var for bind in binds)}
    for var in variables:
        if str(var.ty.dtype) in SIZE_TYPES:
            analyzer.bind(var, tvm.ir.Range(0, tirx.IntImm(var.ty.dtype, _MAX_INDEX)))

    def simplify(buffer: Any, indices: Sequence[Any]) -> list[Any]:
        return list(map(analyzer.simplify, indices)) if buffer in buffers else list(indices)

    return ir.rewrite_indices(body, simplify)


def _hide_divisions(loop: tirx.For, loop_vars: set[Any]) -> tirx.For:
    """Return a loop that uses the variables of bound divisions wherever the divisions are repeated.

    CompactBufferAllocation writes the divisions out in indices, and other passes simplify each index with the values of
    all variables substituted, so that the indices explode (apache-tvm 0.27).
    """
    stmts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else []
    bound: list[tirx.Bind] = []
    moving = set(loop_vars)
    for bind in stmts:
        if not isinstance(bind, tirx.Bind) or str(bind.var.ty.dtype) not in SIZE_TYPES:
            continue
        if not moving.isdisjoint(ir.find_nodes(bind.value, tirx.Var)):
            bound.append(bind)
            moving.add(bind.var)
    if not bound:
        return loop

    def name(division: Any) -> Any:
        return next((bind.var for bind in bound if _same(bind.value, division)), division)

    rules = ((tirx.FloorDiv, name), (tirx.FloorMod, name))
    # the intrinsic is opaque to TVM, which therefore does not substitute the value; no value is negative
    hidden = {
        bind.var: tirx.Bind(
            bind.var,
            tirx.call_llvm_intrin(
                bind.value.ty.dtype, "llvm.smax", bind.value, tirx.IntImm(bind.value.ty.dtype, 0)
            ),
        )
        for bind in bound
    }

    def rewrite(stmt: Any) -> Any:
        is_hidden = isinstance(stmt, tirx.Bind) and stmt.var in hidden
        return hidden[stmt.var] if is_hidden else tvm_ffi.structural_map(stmt, rules)

    return ir.with_fields(loop, body=tirx.SeqStmt(list(map(rewrite, stmts))))


def _normalize(realize: SBlockRealize) -> SBlockRealize:
    """Return a block whose conditions `a <= b` are rewritten to the form `position < end`."""
    simplify = tvm.sym.Analyzer().simplify

    def normalize(term: Any) -> Any:
        if isinstance(term, tirx.LE):
            return tirx.LT(simplify(term.a), simplify(term.b + 1))
        return tirx.LT(simplify(term.a), simplify(term.b)) if isinstance(term, tirx.LT) else term

    terms = list(map(normalize, list_terms(realize.predicate)))
    return ir.with_fields(realize, predicate=_all(terms))


class _Splitter:
    """Splits the loops of one kernel, the innermost first."""

    def __init__(self, function: tirx.PrimFunc) -> None:
        self._loop_vars = {loop.loop_var for loop in ir.find_nodes(function.body, tirx.For)}
        self._masked_types = list_masked_types(function.attrs["target"])
        predicates = [realize.predicate for realize in ir.find_nodes(function.body, SBlockRealize)]
        self._cut_vars = set(ir.find_nodes(predicates, tirx.Var))
        known = (function.attrs or {}).get(MULTIPLES, {})
        # a size with a known divisor is written as a count times the divisor
        self._multiples = {
            size: tirx.Var(f"{size.name}_count", size.ty.dtype) * int(known[str(size.name)])
            for param in function.params
            for size in getattr(param.ty, "shape", ())
            if isinstance(size, tirx.Var) and str(size.name) in known
        }
        tuning_sizes = (function.attrs or {}).get(DYNAMIC_SHAPES, {})
        self._tuning_sizes = {
            size: int(tuning_sizes.get(str(size.name), 0)) for size in list_size_variables(function)
        }

    def split(self, loop: tirx.For) -> Any:
        """Split a loop so that whole tiles run without bounds checks; return one loop, or two."""
        if loop.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
            return loop
        found = self._find_conditions(loop)
        has_hint = TAIL_HINT in loop.annotations
        # LoopPartition mixes integer types of dynamic lengths and other expressions (apache-tvm 0.27)
        annotations = {
            key: value
            for key, value in loop.annotations.items()
            if key not in (PARTITION_HINT, TAIL_HINT)
        }
        certain = [condition.term for condition in found if self._is_certain(condition, loop)]
        body = _without(loop.body, certain) if certain else loop.body
        found = [condition for condition in found if condition.term not in certain]
        loop = ir.with_fields(loop, body=body, annotations=annotations)
        if not found:
            return loop
        limited = _limit(loop, found)
        if limited is not None:
            return limited
        tests = _unique(condition.is_whole for condition in found)
        count = _count_whole(loop, found[0]) if len(tests) == 1 else None
        if count is None and (has_hint or len(tests) == 1):
            return ir.with_fields(loop, body=self._branch(loop, found, tests))
        whole = _copy(_without(loop.body, [condition.term for condition in found]))
        if count is None:
            test = functools.reduce(tirx.And, tests)
            return ir.with_fields(loop, body=_choose(loop.body, test, whole, loop.body))
        wholes = tirx.Var(f"{loop.loop_var.name}_wholes", loop.loop_var.ty.dtype)
        first = ir.with_fields(loop, body=whole, extent=wholes)
        last = ir.replace_variables(self._cut(loop, found), {loop.loop_var: wholes})
        is_cut = tirx.LT(wholes, loop.extent)
        return tirx.SeqStmt([tirx.Bind(wholes, count), first, tirx.IfThenElse(is_cut, last, None)])

    def _branch(
        self, loop: tirx.For, found: Sequence[_Condition], tests: Sequence[Any]
    ) -> tirx.Stmt:
        """Return the body with separate code for whole tiles and tails of rows, vectors, and both."""
        if not tests:
            return loop.body
        test, *others = tests
        own = [condition for condition in found if _same(condition.is_whole, test)]
        whole = _copy(_without(loop.body, [condition.term for condition in own]))
        forms = [
            self._branch(ir.with_fields(loop, body=form), found, others)
            for form in (whole, self._cut(loop, own))
        ]
        return _choose(loop.body, test, *forms)

    def _is_certain(self, condition: _Condition, loop: tirx.For) -> bool:
        """Return whether all tiles of a loop are whole, because the size is a multiple of the tile."""
        if not self._multiples or not isinstance(condition.is_whole, tirx.LT):
            return False
        last = {loop.loop_var: loop.extent - 1}
        for bind in ir.find_nodes(loop.body, tirx.Bind):
            if isinstance(bind.value, tirx.FloorMod):
                last[bind.var] = bind.value.b - 1
        analyzer = tvm.sym.Analyzer()
        slack = condition.is_whole.b - condition.is_whole.a
        remainders = {
            node: tirx.Var("remainder", node.ty.dtype)
            for node in ir.find_nodes(slack, tirx.FloorMod)
        }
        last.update({var: node.b - 1 for node, var in remainders.items()})
        slack = tvm_ffi.structural_map(
            slack, (tirx.FloorMod, lambda node: remainders[node]), order="pre"
        )
        if any(_find_fall(slack, var) < 0 for var in last):
            return False
        slack = ir.replace_variables(ir.replace_variables(slack, last), self._multiples)
        for var in set(ir.find_nodes(slack, tirx.Var)) - self._loop_vars:
            analyzer.bind(var, tvm.ir.Range(1, tirx.IntImm(var.ty.dtype, _MOST)))
        return bool(analyzer.can_prove(analyzer.simplify(slack) > 0))

    def _find_conditions(self, loop: tirx.For) -> list[_Condition]:
        """Return the conditions on tiles that depend on this loop's variable or bindings."""
        own = {loop.loop_var, *(bind.var for bind in ir.find_nodes(loop.body, tirx.Bind))}
        if own.isdisjoint(self._cut_vars):
            return []
        inner = {other.loop_var: other for other in ir.find_nodes(loop.body, tirx.For)}
        is_hinted = not {PARTITION_HINT, TAIL_HINT}.isdisjoint(loop.annotations)
        found = []
        for realize in ir.find_nodes(loop.body, SBlockRealize):
            for term in list_terms(realize.predicate):
                if not isinstance(term, tirx.LT) or own.isdisjoint(ir.find_nodes(term, tirx.Var)):
                    continue
                is_dynamic = not self._loop_vars.issuperset(ir.find_nodes(term.b, tirx.Var))
                if (is_dynamic or is_hinted) and (condition := _analyze(term, inner)):
                    found.append(condition)
        return found

    def _cut(self, loop: tirx.For, found: Sequence[_Condition]) -> Any:
        inner = {other.loop_var: other for other in ir.find_nodes(loop.body, tirx.For)}
        tile_loops = [inner[var] for condition in found for var in condition.variables]
        if any(len(condition.variables) != 1 for condition in found):
            return loop.body
        terms = [condition.term for condition in found]
        if any(not _holds_everywhere(tile_loop, terms) for tile_loop in tile_loops):
            return loop.body
        if all(tile_loop.kind == tirx.ForKind.VECTORIZED for tile_loop in tile_loops):
            return self._cut_vectors(loop, found)
        if all(tile_loop.kind == tirx.ForKind.UNROLLED for tile_loop in tile_loops):
            end = found[0].term.b
            # the pixels of an image (height times width) have one tail tile
            sizes = [end.a, end.b] if isinstance(end, tirx.Mul) else [0]
            return _cut_rows(loop, found, prod(self._tuning_sizes.get(size, 0) for size in sizes))
        return loop.body

    def _cut_vectors(self, loop: tirx.For, found: Sequence[_Condition]) -> Any:
        """Return the body of a loop over vectors for the tail vector: a loop over its elements."""
        lanes = {var: condition for condition in found for var in condition.variables}

        def cut(lane: tirx.For) -> Any:
            condition = lanes.get(lane.loop_var)
            if condition is None:
                return lane
            body = ir.simplify_indices(_without(lane.body, [condition.term]))
            is_masked = may_mask(body, lane.loop_var, self._masked_types)
            return ir.with_fields(
                lane,
                extent=condition.tail,
                kind=tirx.ForKind.SERIAL,
                body=body,
                annotations={LAST_LANES: int(lane.extent)} if is_masked else {},
            )

        return tvm_ffi.structural_map(loop.body, (tirx.For, cut))


def _analyze(term: Any, inner: Mapping[Any, tirx.For]) -> _Condition | None:
    """Return a condition on a tile; None if it depends on an inner loop that is not part of the tile."""
    tile_kinds = (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED)
    tail = term.b - term.a
    lengths: dict[Any, int] = {}
    for var in ir.find_nodes(term, tirx.Var):
        if (loop := inner.get(var)) is None or var in lengths:
            continue
        if loop.kind not in tile_kinds or not isinstance(loop.extent, tirx.IntImm):
            return None
        if _find_fall(tail, var) < 1:
            return None
        lengths[var] = int(loop.extent)
    simplify = tvm.sym.Analyzer().simplify
    last = {var: tirx.IntImm(var.ty.dtype, length - 1) for var, length in lengths.items()}
    first = {var: tirx.IntImm(var.ty.dtype, 0) for var in lengths}
    return _Condition(
        term=term,
        variables=lengths,
        is_whole=tirx.LT(simplify(ir.replace_variables(term.a, last)), term.b),
        tail=simplify(ir.replace_variables(tail, first)),
    )


def _limit(loop: tirx.For, found: Sequence[_Condition]) -> tirx.For | None:
    """Return a serial loop that ends where the condition on its variable fails; None if there is none."""
    tails = _unique(condition.tail for condition in found)
    if (
        loop.kind != tirx.ForKind.SERIAL
        or len(tails) > 1
        or any(condition.variables for condition in found)
        or not _holds_everywhere(loop, [condition.term for condition in found])
    ):
        return None
    var = loop.loop_var
    if _find_fall(tails[0], var) != 1:
        return None
    first = {var: tirx.IntImm(var.ty.dtype, 0)}
    tail = tvm.sym.Analyzer().simplify(ir.replace_variables(tails[0], first))
    body = _without(loop.body, [condition.term for condition in found])
    return ir.with_fields(loop, body=body, extent=tirx.min(loop.extent, tail))


def _count_whole(loop: tirx.For, condition: _Condition) -> Any:
    """Return how many iterations of a serial loop are whole tiles; None if unknown."""
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(condition.is_whole, tirx.LT):
        return None
    analyzer = tvm.sym.Analyzer()
    var = loop.loop_var
    # whole as long as 0 < slack
    slack = condition.is_whole.b - condition.is_whole.a
    step = _find_fall(slack, var)
    # if this fails, tiles overlap or leave gaps
    if step < 1 or prod(condition.variables.values()) != step:
        return None
    at_first = analyzer.simplify(ir.replace_variables(slack, {var: tirx.IntImm(var.ty.dtype, 0)}))
    return tirx.floordiv(analyzer.simplify(at_first + (step - 1)), step)


def _find_fall(value: Any, var: Any) -> int:
    """Return the decrease of a value when a variable grows by 1; -1 if it grows or is not constant."""
    step = tvm.sym.Analyzer().simplify(value - ir.replace_variables(value, {var: var + 1}))
    return max(int(step), -1) if isinstance(step, tirx.IntImm) else -1


def _choose(body: Any, test: Any, whole: Any, cut: Any) -> Any:
    """Return a statement that runs `whole` if the test holds, else `cut`, after the bindings of both."""
    binds = []
    if isinstance(body, tirx.SeqStmt):
        binds = [stmt for stmt in body.seq if isinstance(stmt, tirx.Bind)]
    if not binds:
        return tirx.IfThenElse(test, whole, cut)
    variables = {bind.var for bind in binds}

    def remove_binds(sequence: tirx.SeqStmt) -> Any:
        kept = [stmt for stmt in sequence.seq if getattr(stmt, "var", None) not in variables]
        return tirx.SeqStmt(kept) if len(kept) > 1 else kept[0]

    forms = [tvm_ffi.structural_map(form, (tirx.SeqStmt, remove_binds)) for form in (whole, cut)]
    return tirx.SeqStmt([*binds, tirx.IfThenElse(test, *forms)])


def _cut_rows(loop: tirx.For, found: Sequence[_Condition], pixels: int) -> Any:
    """Return the body of a loop over tiles for the tail: the smallest of several tiles that suffices.

    `pixels` is the typical pixel count of an image; 0 for other rows.
    """
    tail = found[0].tail
    size = max(length for condition in found for length in condition.variables.values())
    terms = {var: (condition.term, tail) for condition in found for var in condition.variables}
    fewest, most = _count_unrolled(loop.body)
    if rows := _count_last_rows(found, size):
        left = tirx.IntImm(tail.ty.dtype, rows)
        return _with_rows(loop.body, {var: (term, left) for var, (term, _) in terms.items()}, rows)
    if fewest == size > _MAX_EXACT_ROWS_OF_LONG_CODE and most > _MAX_STATEMENTS:
        # half a tile at a time: additions to an accumulator depend on each other, so a few rows take as long as one
        rows, dtype = -(-size // 2), tail.ty.dtype
        half = tirx.Var(f"{loop.loop_var.name}_half", dtype)
        count = tirx.floordiv(tail + (rows - 1), tirx.IntImm(dtype, rows))
        body = _with_rows(loop.body, terms, rows, half * rows)
        return tirx.For(half, tirx.IntImm(dtype, 0), count, tirx.ForKind.SERIAL, body)
    *smaller_sizes, largest = _list_rows(size, most)
    if pixels:
        is_rare = pixels > _MIN_TILES_OF_IMAGE * size
        smaller_sizes = [] if is_rare else smaller_sizes[:1]
    body = _with_rows(loop.body, terms, largest)
    for rows in reversed(smaller_sizes):
        smaller = _copy(_with_rows(loop.body, terms, rows))
        test = tirx.LE(tail, tirx.IntImm(tail.ty.dtype, rows))
        body = tirx.IfThenElse(test, smaller, body)
    return body


def _count_last_rows(found: Sequence[_Condition], size: int) -> int:
    """Return the number of rows of the tail tile of a static extent; 0 if it is not known."""
    end = found[0].term.b
    first = found[0].tail - end
    if not isinstance(end, tirx.IntImm):
        return 0
    starts = tvm.sym.Analyzer().simplify(tirx.floormod(first, size))
    return int(end) % size if isinstance(starts, tirx.IntImm) and int(starts) == 0 else 0


def _count_unrolled(body: Any) -> tuple[int, int]:
    """Return the minimum and maximum number of copies of a statement after unrolling."""
    unrolled = [
        (int(loop.extent), set(ir.find_nodes(loop.body, tirx.BufferStore)))
        for loop in ir.find_nodes(body, tirx.For)
        if loop.kind == tirx.ForKind.UNROLLED
    ]
    counts = [
        prod(length for length, stores in unrolled if store in stores)
        for store in ir.find_nodes(body, tirx.BufferStore)
    ]
    return min(counts), max(counts)


def _list_rows(size: int, statements: int) -> list[int]:
    """Return the row counts of the tiles for the tail, each less than `size`."""
    is_long = statements > _MAX_STATEMENTS
    if size <= (_MAX_EXACT_ROWS_OF_LONG_CODE if is_long else _MAX_EXACT_ROWS):
        return list(range(1, size))
    return sorted({1, size // 2, size - 1})


def _with_rows(
    body: Any, terms: Mapping[Any, tuple[Any, Any]], rows: int, first: Any = None
) -> Any:
    """Return the body of a tile of this many rows at `first`; rows beyond the end repeat the last.

    `terms` maps the variable of each loop over rows to its bounds check and to the number of rows left.
    """

    def shorten(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in terms:
            return loop
        term, tail = terms[loop.loop_var]
        is_exact = first is None and (rows == 1 or isinstance(tail, tirx.IntImm))
        within = _without(loop.body, [term]) if is_exact else _clamp(loop, term, tail, first)
        extent = tirx.IntImm(loop.extent.ty.dtype, rows)
        return ir.with_fields(loop, extent=extent, body=within)

    return tvm_ffi.structural_map(body, (tirx.For, shorten))


def _clamp(loop: tirx.For, term: Any, tail: Any, first: Any) -> Any:
    """Return the body of a loop over rows from `first` on; rows beyond the end repeat the last one."""
    row = loop.loop_var
    own = tirx.Var(row.name, row.ty.dtype)

    def cast(value: Any) -> Any:
        return value if value.ty.dtype == row.ty.dtype else tirx.Cast(row.ty.dtype, value)

    def keep(buffer: Any, indices: Sequence[Any]) -> list[Any]:
        # registers cannot have a computed index
        is_local = str(buffer.scope()) == "local"
        return [ir.replace_variables(index, {row: own}) if is_local else index for index in indices]

    kept = ir.rewrite_indices(_without(loop.body, [term]), keep)
    # clamps the row also where a value depends on it, such as the divisor of average pooling at the border
    position = row if first is None else cast(first) + row
    clamped = ir.replace_variables(kept, {row: tirx.min(position, cast(tail) - 1)})
    return ir.replace_variables(clamped, {own: row})


def _holds_everywhere(loop: tirx.For, terms: Sequence[Any]) -> bool:
    """Return whether each innermost block in a loop has one of the conditions on the loop's variable."""
    own = [term for term in terms if loop.loop_var in ir.find_nodes(term, tirx.Var)]
    leaves = [
        realize
        for realize in ir.find_nodes(loop.body, SBlockRealize)
        if not ir.find_nodes(realize.block.body, SBlockRealize)
    ]
    return bool(leaves) and all(
        any(_same(term, other) for term in list_terms(realize.predicate) for other in own)
        for realize in leaves
    )


def _without(body: Any, terms: Sequence[Any]) -> Any:

    def rewrite(realize: SBlockRealize) -> SBlockRealize:
        kept = [
            term
            for term in list_terms(realize.predicate)
            if not any(_same(term, other) for other in terms)
        ]
        return ir.with_fields(realize, predicate=_all(kept))

    return tvm_ffi.structural_map(body, (SBlockRealize, rewrite))


def _all(terms: Sequence[Any]) -> Any:
    return functools.reduce(tirx.And, terms) if terms else tirx.const(True, "bool")


def _copy(body: Any) -> Any:
    own = {buffer: ir.with_shape(buffer, buffer.shape) for buffer in _list_buffers(body)}
    return _with_buffers(body, own)


def _list_buffers(body: Any) -> list[Any]:
    return [buffer for block in ir.find_nodes(body, SBlock) for buffer in block.alloc_buffers]


def _with_buffers(body: Any, buffers: Mapping[Any, Any]) -> Any:
    """Return a statement with buffers replaced; each match of a buffer's region gets its own offset."""
    own = {
        position: tirx.Var(position.name, position.ty.dtype)
        for block in ir.find_nodes(body, SBlock)
        for match in block.match_buffers
        for position in (match.buffer.elem_offset, *match.buffer.strides)
        if isinstance(position, tvm.ir.Var)
    }
    return ir.replace_variables(body, {**buffers, **own}) if buffers or own else body


def _same(left: Any, right: Any) -> bool:
    return bool(tvm_ffi.structural_equal(left, right))


def _unique(exprs: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for expr in exprs:
        if not any(_same(expr, other) for other in found):
            found.append(expr)
    return found
