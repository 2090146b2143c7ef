"""Moves the last vector of a row that no vector divides back, so that it ends where the row ends.

A row of 97 numbers is six vectors of 16 and one number. A schedule computes it in seven vectors, and a condition in
the last one leaves out what is beyond the end: TVM computes a vector with such a condition number by number. Here
the last vector begins at 81 instead: it computes 15 numbers a second time, and has no condition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmflow.compiler.ir import find_nodes, replace_variables


class _End(NamedTuple):
    """The condition that keeps a vector within its row: `start + lane < extent`."""

    start: Any
    extent: int


def overlap_last_vectors() -> tvm.transform.Pass:
    """Return a pass that moves the last vector of a row back, if computing numbers twice changes nothing."""

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        loops = find_nodes(function.body, tirx.For)
        if not any(map(_is_conditional, loops)):
            return function
        scopes = _list_inner_loops(function)

        def overlap(loop: tirx.For) -> tirx.For:
            return _overlap(loop, loops, scopes) if _is_conditional(loop) else loop

        return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, overlap)))

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="OverlapLastVectors")


def _is_conditional(loop: tirx.For) -> bool:
    """Return whether a loop is a vector that is stored under a condition."""
    return (
        int(loop.kind) == tirx.ForKind.VECTORIZED
        and isinstance(loop.body, SBlockRealize)
        and isinstance(loop.body.block.body, tirx.BufferStore)
        and not isinstance(loop.body.predicate, tirx.IntImm)
    )


def _list_inner_loops(function: tirx.PrimFunc) -> dict[Any, set[Any]]:
    """Return for each buffer that is no parameter the variables of the loops within the block that allocates it."""
    scopes: dict[Any, set[Any]] = {}
    for block in find_nodes(function.body, SBlock):
        if block.alloc_buffers:
            inner = {loop.loop_var for loop in find_nodes(block.body, tirx.For)}
            scopes.update(dict.fromkeys(block.alloc_buffers, inner))
    return scopes


def _overlap(loop: tirx.For, loops: Sequence[tirx.For], scopes: Mapping[Any, set[Any]]) -> tirx.For:
    """Return a vector without the condition that it ends within its row; the same loop where that is not safe.

    Args:
        loop: The loop over the lanes of the vector.
        loops: All loops of the kernel.
        scopes: See `_list_inner_loops`.
    """
    lane, lanes = loop.loop_var, int(loop.extent)
    realize = loop.body
    conditions = _list_terms(realize.predicate)
    ends = [end for condition in conditions if (end := _find_end(condition, lane)) is not None]
    others = [condition for condition in conditions if _find_end(condition, lane) is None]
    if len(ends) != 1 or ends[0].extent < lanes or any(_uses(other, lane) for other in others):
        return loop
    start, extent = ends[0]
    around = set(find_nodes(start, tirx.Var))
    nest = [other for other in loops if other.loop_var in around]
    # in a loop that is unrolled, vectors are registers, which have no computed index
    is_unrolled = any(int(other.kind) == tirx.ForKind.UNROLLED for other in nest)
    if is_unrolled or not _may_repeat(realize.block.body, nest, scopes):
        return loop
    back = tirx.min(start, tirx.IntImm(start.ty.dtype, extent - lanes)) - start
    block = _simplify_indices(replace_variables(realize.block, {lane: lane + back}))
    predicate = functools.reduce(tirx.all, others, tirx.const(True, "bool"))
    body = SBlockRealize([], predicate, block)
    return tirx.For(lane, loop.min, loop.extent, loop.kind, body, annotations=loop.annotations)


def _list_terms(condition: Any) -> list[Any]:
    """Return the conditions that a condition is the conjunction of."""
    if isinstance(condition, tirx.And):
        return [*_list_terms(condition.a), *_list_terms(condition.b)]
    return [condition]


def _find_end(condition: Any, lane: Any) -> _End | None:
    """Return the end of a row that a condition on a lane of a vector is about; None for other conditions."""
    if not (isinstance(condition, tirx.LT) and isinstance(condition.b, tirx.IntImm)):
        return None
    start = tvm.sym.Analyzer().simplify(condition.a - lane)
    return None if _uses(start, lane) else _End(start, int(condition.b))


def _may_repeat(
    store: tirx.BufferStore, nest: Sequence[tirx.For], scopes: Mapping[Any, set[Any]]
) -> bool:
    """Return whether numbers of a row may be computed a second time, after its other vectors.

    Args:
        store: What stores a vector.
        nest: The loops over the vectors of the row.
        scopes: See `_list_inner_loops`.
    """
    target = store.buffer
    if target in scopes and scopes[target].isdisjoint(loop.loop_var for loop in nest):
        # each vector has a buffer of its own, where nothing is stored for another
        return True
    sources = [load.source for load in find_nodes(store.value, tvm.ir.TensorLoad)]
    others = [
        other
        for loop in nest
        for other in find_nodes(loop.body, tirx.BufferStore)
        if other.buffer.same_as(target) and not other.same_as(store)
    ]
    # buffers that are no parameters may share their memory, if the numbers of one are read but once
    is_kept = target not in scopes or not any(source in scopes for source in sources)
    return is_kept and not others and not any(source.same_as(target) for source in sources)


def _uses(expr: Any, variable: Any) -> bool:
    return any(var.same_as(variable) for var in find_nodes(expr, tirx.Var))


def _simplify_indices(block: SBlock) -> Any:
    """Return a block whose loads and stores have simple indices."""
    simplify = tvm.sym.Analyzer().simplify

    def simplify_load(load: Any) -> Any:
        return tirx.BufferLoad(load.source, list(map(simplify, load.indices)))

    def simplify_store(store: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(store.buffer, store.value, list(map(simplify, store.indices)))

    rules = ((tvm.ir.TensorLoad, simplify_load), (tirx.BufferStore, simplify_store))
    return tvm_ffi.structural_map(block, rules)
