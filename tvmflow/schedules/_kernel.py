"""What a kernel does: its blocks, and how each reads along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

_ROOT: Final = "root"
_SPATIAL: Final = 0
REDUCTION: Final = 2


class Block(NamedTuple):
    """One block whose loops are its axes, in order: `extents` of the spatial ones, `depths` of the reduced ones.

    `block` is the schedule's handle, `stmt` what it stands for, `writes` the buffer of its result.
    """

    block: Any
    stmt: Any
    extents: tuple[int, ...]
    depths: tuple[int, ...]
    writes: Any

    @property
    def is_reduction(self) -> bool:
        return bool(self.depths)

    @property
    def spatial(self) -> list[Any]:
        return [each.var for each in self.stmt.iter_vars if each.iter_type == _SPATIAL]

    @property
    def reduced(self) -> list[Any]:
        return [each.var for each in self.stmt.iter_vars if each.iter_type == REDUCTION]


def blocks_of(schedule: Schedule) -> list[Block] | None:
    """All blocks of a kernel in their order; None when one is not made of plain loops over its axes."""
    found = [_block(schedule, handle) for handle in _handles(schedule)]
    blocks = [block for block in found if block is not None]
    return blocks if len(blocks) == len(found) else None


def plain_blocks(schedule: Schedule) -> list[Block]:
    """Those blocks of a kernel that are plain loops over their axes."""
    found = [_block(schedule, handle) for handle in _handles(schedule)]
    return [block for block in found if block is not None]


def _handles(schedule: Schedule) -> list[Any]:
    try:
        return list(schedule.get_child_blocks(schedule.get_sblock(_ROOT)))
    except RuntimeError:
        # plain loops without a block
        return []


def _block(schedule: Schedule, handle: Any) -> Block | None:
    stmt = schedule.get(handle)
    loops = [schedule.get(loop) for loop in schedule.get_loops(handle)]
    axes = list(stmt.iter_vars)
    values = _realize_values(schedule, handle)
    spatial = [axis for axis in axes if axis.iter_type == _SPATIAL]
    reduced = [axis for axis in axes if axis.iter_type == REDUCTION]
    is_plain = (
        bool(spatial)
        and spatial + reduced == axes
        and len(values) == len(loops) == len(axes)
        and all(value.same_as(loop.loop_var) for value, loop in zip(values, loops, strict=True))
        and all(isinstance(n, tirx.IntImm) and int(n) > 0 for n in (a.dom.extent for a in axes))
        and isinstance(stmt.body, tirx.BufferStore)
        and len(stmt.body.indices) == len(spatial)
        and all(
            index.same_as(axis.var) for index, axis in zip(stmt.body.indices, spatial, strict=True)
        )
    )
    if not is_plain:
        return None
    return Block(
        handle,
        stmt,
        tuple(int(axis.dom.extent) for axis in spatial),
        tuple(int(axis.dom.extent) for axis in reduced),
        stmt.body.buffer,
    )


def _realize_values(schedule: Schedule, handle: Any) -> list[Any]:
    """The expressions that a block's axes are bound to."""
    target = schedule.get(handle)
    found: list[Any] = []

    def keep(realize: Any) -> None:
        if realize.block.same_as(target):
            found.extend(realize.iter_values)

    tvm_ffi.structural_walk(schedule.mod["main"].body, (tvm.s_tir.SBlockRealize, keep))
    return found


def loads_of(block: Block) -> list[Any]:
    """What the block reads besides what it accumulates into."""
    found: list[Any] = []

    def keep(load: Any) -> None:
        if not load.source.same_as(block.writes):
            found.append(load)

    tvm_ffi.structural_walk(block.stmt.body.value, (tvm.ir.TensorLoad, keep))
    return found


def uses(load: Any, var: Any) -> bool:
    """Whether an access depends on an axis."""
    return any(_mentions(index, var) for index in load.indices)


def _mentions(expr: Any, var: Any) -> bool:
    found = []

    def keep(each: Any) -> None:
        if each.same_as(var):
            found.append(each)

    tvm_ffi.structural_walk(expr, (tvm.ir.Var, keep))
    return bool(found)


def stride(load: Any, axes: Sequence[Any], var: Any) -> int | None:
    """By how many elements an access moves when an axis goes from 0 to 1, the others being 0; None where data decide."""
    places = []
    at = tirx.IndexMap(list(axes), list(load.indices), None)
    for value in (0, 1):
        point = [value if axis.same_as(var) else 0 for axis in axes]
        flat = 0
        indices = at.map_indices([tirx.IntImm("int64", each) for each in point])
        for index, extent in zip(indices, load.source.shape, strict=True):
            if not isinstance(index, tirx.IntImm):
                return None
            flat = flat * int(extent) + int(index)
        places.append(flat)
    return places[1] - places[0]
