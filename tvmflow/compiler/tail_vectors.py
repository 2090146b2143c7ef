"""Tails of rows that vectors do not divide: overlapping vectors and masks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmflow.compiler.contraction.machine import list_masked_types
from tvmflow.compiler.contraction.packed import LAST_LANES
from tvmflow.graph import ir

_DIVISIONS: Final = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def list_terms(condition: Any) -> list[Any]:
    """Return the operands of a conjunction; other conditions as the only one."""
    if isinstance(condition, tirx.And):
        return [*list_terms(condition.a), *list_terms(condition.b)]
    return [condition]


# ---------------------------------------------------------------- overlapping vectors
# A row of 97 elements is six vectors of 16 and one element. A schedule computes it in seven vectors. The last vector
# has a condition, so TVM computes its elements one by one. Here the last vector begins at 81 instead, and computes 15
# elements a second time. Reductions that find a maximum or minimum may also read elements twice.

# A reduction has two statements: its initial value, and its update.
_START_AND_STEP: Final = 2


class _End(NamedTuple):
    """The condition that keeps a vector within its row: `start + lane < extent`."""

    start: Any
    extent: int


@ir.kernel_pass
def overlap_last_vectors(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let a row's last vector overlap the previous vector if elements may be computed twice."""
    loops = ir.find_nodes(function.body, tirx.For)
    if not any(map(_is_conditional, loops)):
        return function
    # for each buffer that is not a parameter, the loop variables within the block that allocates it
    scopes = {
        buffer: {loop.loop_var for loop in ir.find_nodes(block.body, tirx.For)}
        for block in ir.find_nodes(function.body, SBlock)
        for buffer in block.alloc_buffers
    }

    def overlap(loop: tirx.For) -> tirx.For:
        return _overlap(loop, loops, scopes) if _is_conditional(loop) else loop

    return ir.rewrite_nodes(function, tirx.For, overlap)


def _is_conditional(loop: tirx.For) -> bool:
    """Return whether a loop is vectorized and its store is predicated."""
    return (
        int(loop.kind) == tirx.ForKind.VECTORIZED
        and isinstance(loop.body, SBlockRealize)
        and (
            isinstance(loop.body.block.body, tirx.BufferStore)
            or _find_searched(loop.body.block.body) is not None
        )
        and not isinstance(loop.body.predicate, tirx.IntImm)
    )


def _find_searched(body: Any) -> Any:
    """Return the operand of a maximum or minimum reduction; None for any other body."""
    if not (
        isinstance(body, tirx.SeqStmt)
        and len(body) == _START_AND_STEP
        and isinstance(body[0], tirx.IfThenElse)
        and isinstance(body[1], tirx.BufferStore)
        and isinstance(body[1].value, tirx.Max | tirx.Min)
    ):
        return None
    store, kept, searched = body[1], body[1].value.a, body[1].value.b
    is_kept = (
        isinstance(kept, tvm.ir.TensorLoad)
        and kept.source.same_as(store.buffer)
        and all(map(tvm_ffi.structural_equal, kept.indices, store.indices))
    )
    loads = ir.find_nodes(searched, tvm.ir.TensorLoad)
    reads_itself = any(load.source.same_as(store.buffer) for load in loads)
    return searched if is_kept and not reads_itself else None


def _overlap(loop: tirx.For, loops: Sequence[tirx.For], scopes: Mapping[Any, set[Any]]) -> tirx.For:
    """Move a row's last vector back into the row and drop the condition on its end, if that is safe."""
    lane, lanes = loop.loop_var, int(loop.extent)
    realize = loop.body
    conditions = list_terms(realize.predicate)
    ends = [end for condition in conditions if (end := _find_end(condition, lane)) is not None]
    others = [condition for condition in conditions if _find_end(condition, lane) is None]
    if len(ends) != 1 or ends[0].extent < lanes or any(_uses(other, lane) for other in others):
        return loop
    start, extent = ends[0]
    around = set(ir.find_nodes(start, tirx.Var))
    nest = [other for other in loops if other.loop_var in around]
    # in an unrolled loop, vectors are registers, and registers cannot have a computed index
    is_unrolled = any(int(other.kind) == tirx.ForKind.UNROLLED for other in nest)
    back = {lane: lane + tirx.min(start, tirx.IntImm(start.ty.dtype, extent - lanes)) - start}
    searched = _find_searched(realize.block.body)
    if searched is not None:
        first, step = realize.block.body
        if is_unrolled or any(
            _uses(index, other.loop_var) for index in step.indices for other in nest
        ):
            return loop
        value = type(step.value)(step.value.a, ir.replace_variables(searched, back))
        step = tirx.BufferStore(step.buffer, value, step.indices)
        own, body = realize.block, tirx.SeqStmt([first, step])
        reads = [ir.replace_variables(region, back) for region in own.reads]
        block = ir.simplify_indices(SBlock([], reads, own.writes, own.name_hint, body))
    elif is_unrolled or not _may_repeat(realize.block.body, lane, nest, scopes):
        return loop
    else:
        block = ir.simplify_indices(ir.replace_variables(realize.block, back))
    predicate = functools.reduce(tirx.all, others, tirx.const(True, "bool"))
    return ir.with_fields(loop, body=SBlockRealize([], predicate, block))


def _find_end(condition: Any, lane: Any) -> _End | None:
    """Return the end of a row from a condition `start + lane < extent`; None for other conditions."""
    if not (isinstance(condition, tirx.LT) and isinstance(condition.b, tirx.IntImm)):
        return None
    start = tvm.sym.Analyzer().simplify(condition.a - lane)
    return None if _uses(start, lane) else _End(start, int(condition.b))


def _may_repeat(
    store: tirx.BufferStore, lane: Any, nest: Sequence[tirx.For], own: Mapping[Any, set[Any]]
) -> bool:
    """Return whether elements of a row may be computed a second time, after its other vectors.

    `nest` holds the loops over vectors. `own` maps buffers other than parameters to the loop variables in their blocks.
    """
    target = store.buffer
    if target in own and own[target].isdisjoint(loop.loop_var for loop in nest):
        # the buffer is allocated anew for each vector
        return True
    loads = ir.find_nodes(store.value, tvm.ir.TensorLoad)
    vectors = [load.source for load in loads if any(_uses(index, lane) for index in load.indices)]
    others = [
        other
        for loop in nest
        for other in ir.find_nodes(loop.body, tirx.BufferStore)
        if other.buffer.same_as(target) and not other.same_as(store)
    ]
    # TVM may give source and target the same memory, if both are a kernel's own buffers and vectors are read only once
    is_kept = target not in own or not any(source in own for source in vectors)
    return is_kept and not others and not any(load.source.same_as(target) for load in loads)


def _uses(expr: Any, variable: Any) -> bool:
    return any(var.same_as(variable) for var in ir.find_nodes(expr, tirx.Var))


# ---------------------------------------------------------------- masked vectors


@ir.kernel_pass
def mask_last_vectors(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute tail vectors with masked loads and stores."""
    loops = ir.find_nodes(function.body, tirx.For)
    if not any(LAST_LANES in loop.annotations for loop in loops):
        return function
    types = list_masked_types(function.attrs["target"])

    def mask(loop: tirx.For) -> Any:
        is_last = LAST_LANES in loop.annotations
        return _mask(loop) if is_last and may_mask(loop.body, loop.loop_var, types) else loop

    return ir.rewrite_nodes(function, tirx.For, mask)


def may_mask(body: Any, lane: Any, types: Set[str]) -> bool:
    """Return whether a tail can be computed as a masked vector: lanes beyond the end have no effect."""
    store = body.block.body if isinstance(body, SBlockRealize) else body
    if not isinstance(store, tirx.BufferStore):
        return False
    loads = [
        (load.source, load.indices)
        for load in ir.find_nodes(store.value, tvm.ir.TensorLoad)
        if lane in ir.find_nodes(list(load.indices), tirx.Var)
    ]
    ones = (tvm.ir.TensorLoad, lambda load: tirx.const(1, str(load.source.dtype)))
    value = tvm_ffi.structural_map(store.value, ones)
    # beyond the end, an integer divisor may be 0, and a condition may guard an out-of-bounds read
    is_harmless = all(
        "float" in str(node.ty.dtype) for node in ir.find_nodes(value, *_DIVISIONS)
    ) and ir.IF_THEN_ELSE not in map(ir.operator_name, ir.find_nodes(value, tvm.ir.Call))
    return is_harmless and all(
        str(buffer.dtype) in types and _find_first_index(indices, lane) is not None
        for buffer, indices in [(store.buffer, store.indices), *loads]
    )


def _mask(loop: tirx.For) -> Any:
    """Return a loop over the last elements of a row as one vector."""
    store, lane = loop.body, loop.loop_var
    lanes = int(loop.annotations[LAST_LANES])
    ramp = tirx.Ramp(loop.min, tirx.IntImm(lane.ty.dtype, 1), lanes)
    mask = tirx.LT(ramp, tirx.Broadcast(loop.extent, lanes))
    stmts: list[Any] = []

    def make_registers(buffer: Any) -> Any:
        # StorageRewrite mistakes booleans in registers for bytes (apache-tvm 0.27)
        held = "int8" if str(buffer.dtype) == "bool" else buffer.dtype
        own = tirx.decl_buffer((lanes,), held, f"{buffer.name}_last", scope="local")
        stmts.append(tirx.AllocBuffer(own))
        return own

    def load_vector(load: Any) -> Any:
        first = _find_first_index(load.indices, lane)
        is_row = lane in ir.find_nodes(list(load.indices), tirx.Var)
        if not is_row or _has_lanes(load.source, first, lanes):
            return load
        own, dtype = make_registers(load.source), str(load.source.dtype)
        positions = tirx.Ramp(first, tirx.IntImm(first.ty.dtype, 1), lanes)
        value = tirx.op.masked_load(f"{dtype}x{lanes}", load.source, positions, mask)
        stmts.append(tirx.BufferStore(own, value.astype(f"{own.dtype}x{lanes}"), [ramp]))
        return tirx.BufferLoad(own, [lane]).astype(dtype)

    value = tvm_ffi.structural_map(store.value, (tvm.ir.TensorLoad, load_vector))
    first = _find_first_index(store.indices, lane)
    result, dtype = store.buffer, str(store.buffer.dtype)
    has_lanes = _has_lanes(result, first, lanes) and dtype != "bool"
    if has_lanes:
        value = tirx.Select(tirx.LT(lane, loop.extent), value, tirx.BufferLoad(result, [lane]))
    else:
        result = make_registers(result)
    body = tirx.BufferStore(result, value.astype(str(result.dtype)), [lane])
    count = tirx.IntImm(lane.ty.dtype, lanes)
    stmts.append(tirx.For(lane, loop.min, count, tirx.ForKind.VECTORIZED, body))
    if not has_lanes:
        positions = tirx.Ramp(first, tirx.IntImm(first.ty.dtype, 1), lanes)
        computed = tirx.BufferLoad(result, [ramp]).astype(f"{dtype}x{lanes}")
        stmts.append(tirx.Evaluate(tirx.op.masked_store(store.buffer, computed, positions, mask)))
    return tirx.SeqStmt(stmts) if len(stmts) > 1 else stmts[0]


def _find_first_index(indices: Sequence[Any], lane: Any) -> Any:
    """Return the last index of a vector's first element; None if the elements are not contiguous."""
    *outer, index = indices
    simplify = tvm.sym.Analyzer().simplify
    step = simplify(ir.replace_variables(index, {lane: lane + 1}) - index)
    if as_int(step) != 1 or lane in ir.find_nodes(outer, tirx.Var):
        return None
    return simplify(ir.replace_variables(index, {lane: tirx.IntImm(lane.ty.dtype, 0)}))


def _has_lanes(buffer: Any, position: Any, lanes: int) -> bool:
    """Return whether a buffer is one vector of this many lanes, and the position is its beginning."""
    return as_int(position) == 0 and [as_int(size) for size in buffer.shape] == [lanes]


def as_int(expr: Any) -> int | None:
    """Return the value of an integer constant; None for other expressions."""
    return int(expr) if isinstance(expr, tirx.IntImm) else None
