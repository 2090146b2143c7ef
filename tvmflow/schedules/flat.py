"""Kernels that compute each element by itself: spread over the cores, a vector at a time."""

from __future__ import annotations

import math
from typing import Any, Final

from tvm.s_tir import Schedule

from tvmflow.schedules._kernel import Block, loads_of, stride, uses
from tvmflow.schedules._machine import Machine

# What a core should have to do at least before work is handed to another one, in elements.
_LEAST_PARALLEL: Final = 1 << 14


def flat(schedule: Schedule, block: Block, machine: Machine) -> None:
    """Schedule one block without reduced axes, where it stands."""
    loops = list(schedule.get_loops(block.block))[-len(block.extents) :]
    extents = list(block.extents)
    work = math.prod(extents) * math.prod(block.depths)
    outer = loops
    if not block.is_reduction:
        lanes = math.gcd(extents[-1], machine.lanes)
        if lanes >= min(4, machine.lanes) and is_dense(block):
            outer = loops[:-1]
            if extents[-1] > lanes:
                rest, vector = schedule.split(loops[-1], [None, lanes])
                outer = [*outer, rest]
            else:
                vector = loops[-1]
            schedule.vectorize(vector)
    spread(schedule, outer, work, machine)


def is_dense(block: Block) -> bool:
    """Whether every access moves by one or not at all along the last axis."""
    last, every = block.spatial[-1], block.spatial + block.reduced
    return all(not uses(load, last) or stride(load, every, last) == 1 for load in loads_of(block))


def spread(schedule: Schedule, loops: list[Any], work: int, machine: Machine) -> Any:
    """Fuse loops and share them among the cores, where there is work enough; gives the one loop that they become."""
    if not loops:
        return None
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    if work >= _LEAST_PARALLEL * 2 and machine.cores > 1:
        schedule.parallel(fused)
    return fused
