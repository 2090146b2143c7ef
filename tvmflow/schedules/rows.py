"""Kernels that reduce rows and use what comes out on the same rows: softmax, norms, sums along the last axis."""

from __future__ import annotations

import math
from typing import Any

from tvm.s_tir import Schedule

from tvmflow.schedules._kernel import REDUCTION, Block, loads_of, stride, uses
from tvmflow.schedules._machine import Machine
from tvmflow.schedules.flat import is_dense, spread


def rows(schedule: Schedule, blocks: list[Block], machine: Machine) -> bool:
    """Do all blocks of a row after each other, rows spread over the cores; whether this kernel is of that kind."""
    lead = _shared(blocks)
    if not lead:
        return False
    final = blocks[-1]
    work = sum(math.prod(block.extents) * math.prod(block.depths) for block in blocks)
    partial = {
        position: _in_vectors(schedule, block, machine)
        for position, block in enumerate(blocks)
        if block.is_reduction
    }
    loops = list(schedule.get_loops(final.block))[:lead]
    around = spread(schedule, loops, work, machine)
    for position, block in reversed(list(enumerate(blocks))):
        if block is not final:
            schedule.compute_at(block.block, around, preserve_unit_loops=True)
        if partial.get(position) is not None:
            schedule.compute_at(partial[position], around, preserve_unit_loops=True)
    for position, block in enumerate(blocks):
        if partial.get(position) is not None:
            _vectorise_partial(schedule, partial[position])
        elif not block.is_reduction and is_dense(block) and lead < len(block.extents):
            _vectorise(schedule, block, machine)
    return True


def _shared(blocks: list[Block]) -> int:
    """How many of the first axes all blocks have in common: a row is one point of them."""
    shared = 0
    for sizes in zip(*(block.extents for block in blocks), strict=False):
        if len(set(sizes)) > 1:
            break
        shared += 1
    return shared


def _vectorise(schedule: Schedule, block: Block, machine: Machine) -> None:
    """The innermost loop of a block that computes each element by itself."""
    lanes = math.gcd(block.extents[-1], machine.lanes)
    if lanes > 1:
        loop = schedule.get_loops(block.block)[-1]
        vector = schedule.split(loop, [None, lanes])[1] if block.extents[-1] > lanes else loop
        schedule.vectorize(vector)


def _in_vectors(schedule: Schedule, block: Block, machine: Machine) -> Any:
    """Let a reduction along neighbours run in vectors, added up at the end; gives the block of vectors, or None."""
    every, axis = block.spatial + block.reduced, block.reduced[-1]
    depth = block.depths[-1]
    if depth % machine.lanes or depth == machine.lanes:
        return None
    if any(uses(load, axis) and stride(load, every, axis) != 1 for load in loads_of(block)):
        return None
    loop = schedule.get_loops(block.block)[-1]
    _, vector = schedule.split(loop, [None, machine.lanes])
    return schedule.rfactor(vector, factor_axis=len(block.extents))


def _vectorise_partial(schedule: Schedule, partial: Any) -> None:
    """Sums of vectors: the lanes go inside all other loops of the row."""
    axes = list(schedule.get(partial).iter_vars)
    lanes, *others = list(schedule.get_loops(partial))[-len(axes) :]
    schedule.reorder(*others, lanes)
    schedule.vectorize(lanes)
    first = next(place for place, axis in enumerate(axes) if axis.iter_type == REDUCTION)
    schedule.decompose_reduction(partial, others[first - 1])
