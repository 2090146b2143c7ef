"""Schedules that no search has found: chosen from a kernel's shape and the target alone, and the same every time.

`road` names the rule that a kernel falls under: `transform` (of tiles, around the product of a Winograd
convolution), `tiled` (convolutions, matrix products, pooling), `rows` (softmax, norms), `flat` (element by element), `loops` (anything else whose
outer loops can be shared among cores), or `none`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import tvm
from tvm.s_tir import Schedule

from tvmflow.schedules._kernel import Block, blocks_of, plain_blocks
from tvmflow.schedules._machine import Machine, machine_of
from tvmflow.schedules._vectors import use_fixed_lengths
from tvmflow.schedules.flat import flat
from tvmflow.schedules.rows import rows
from tvmflow.schedules.tiled import Axes, Tile, axes_of, tiled, tiles
from tvmflow.schedules.winograd import transform
from tvmflow.targets.gpu import CUDA

__all__ = [
    "NO_ROAD",
    "Choice",
    "Machine",
    "by_rule",
    "candidates",
    "copied",
    "default",
    "machine_of",
    "restored",
    "schedule_rest",
]

NO_ROAD: Final = "none"

use_fixed_lengths()


class Choice(NamedTuple):
    """A schedule, and the road that led to it."""

    road: str
    schedule: Schedule


def default(mod: tvm.IRModule, machine: Machine) -> Choice | None:
    """The schedule of a kernel (`main` of a module) that nothing was searched for; None where no rule fits it."""
    return next(candidates(mod, machine), None)


def candidates(mod: tvm.IRModule, machine: Machine) -> Iterator[Choice]:
    """The schedules that the rules know for a kernel: the default first, then for `tiled` all other tiles by promise."""
    if choice := _by_rule("transform", transform, mod, machine):
        yield choice
        return
    blocks = blocks_of(Schedule(mod, seed=1))
    if blocks and any(block.is_reduction for block in blocks):
        found = False
        for tile in _tiles(mod, machine):
            schedule = _tiled(mod, machine, tile)
            if schedule is not None:
                found = True
                yield Choice("tiled", schedule)
        if found:
            return
    roads = {"flat": _flat, "rows": _rows, "loops": _loops}
    for road, rule in roads.items():
        if choice := _by_rule(road, rule, mod, machine):
            yield choice
            return


def _by_rule(
    road: str, rule: Callable[[Schedule, Machine], bool], mod: tvm.IRModule, machine: Machine
) -> Choice | None:
    """The schedule that a rule gives; None for a kernel that it does not fit."""
    schedule = Schedule(mod, seed=1)
    try:
        return Choice(road, schedule) if rule(schedule, machine) else None
    # one that does not fit after all leaves the kernel to the next
    except RuntimeError:
        return None


# ---------------------------------------------------------------- one sum in registers


class _Sum(NamedTuple):
    """A kernel that is one reduction: what prepares its data, itself, and what its result goes through."""

    pad: Block | None
    main: Block
    final: Block
    axes: Axes


def _tiles(mod: tvm.IRModule, machine: Machine) -> Iterator[Tile]:
    try:
        found = _sum_of(Schedule(mod, seed=1), machine)
    except RuntimeError:
        return
    if found is not None:
        yield from tiles(found.main, found.pad, found.axes, machine)


def _tiled(mod: tvm.IRModule, machine: Machine, tile: Tile) -> Schedule | None:
    schedule = Schedule(mod, seed=1)
    try:
        found = _sum_of(schedule, machine)
        if found is None:
            return None
        tiled(schedule, found.pad, found.main, found.final, found.axes, tile, machine)
    except RuntimeError:
        return None
    return schedule


def _sum_of(schedule: Schedule, machine: Machine) -> _Sum | None:
    """Bring a kernel with one reduction into the form that `tiled` takes; None for another kernel."""
    blocks = blocks_of(schedule) or []
    reductions = [block for block in blocks if block.is_reduction]
    axes = axes_of(reductions[0], machine) if len(reductions) == 1 else None
    if axes is None:
        return None
    place = blocks.index(reductions[0])
    for block in (*blocks[: max(place - 1, 0)], *blocks[place + 1 : -1]):
        schedule.compute_inline(block.block)
    if place == len(blocks) - 1:
        schedule.cache_write(reductions[0].block, 0, "local")
    *before, main, final = blocks_of(schedule) or []
    if final.extents != main.extents or len(before) > 1:
        return None
    return _Sum(before[0] if before else None, main, final, axes)


# ---------------------------------------------------------------- the other roads


def _flat(schedule: Schedule, machine: Machine) -> bool:
    blocks = blocks_of(schedule)
    if not blocks or any(block.is_reduction for block in blocks):
        return False
    for block in blocks[:-1]:
        schedule.compute_inline(block.block)
    (final,) = blocks_of(schedule) or []
    flat(schedule, final, machine)
    return True


def _rows(schedule: Schedule, machine: Machine) -> bool:
    blocks = blocks_of(schedule)
    return bool(blocks) and rows(schedule, blocks or [], machine)


def _loops(schedule: Schedule, machine: Machine) -> bool:
    """Each block by itself."""
    blocks = plain_blocks(schedule)
    for block in blocks:
        flat(schedule, block, machine)
    return bool(blocks)


# ---------------------------------------------------------------- whole modules


def by_rule(
    lowered: tvm.IRModule, target: Mapping[str, Any], rules: int
) -> tuple[tvm.IRModule, dict[str, str]]:
    """`schedule_rest` for TVM's mapping of a target, a GPU's too; `rules` is the version of the rules for CPUs, 0 for none."""
    if target["kind"] != CUDA:
        return schedule_rest(lowered, machine_of(target, rules))
    # the rules for GPUs are TVM's, and their import takes a second
    from tvmflow.schedules.gpu import schedule_gpu

    return schedule_gpu(lowered, tvm.target.Target(dict(target)))


def schedule_rest(
    lowered: tvm.IRModule, machine: Machine | None
) -> tuple[tvm.IRModule, dict[str, str]]:
    """A lowered module with the default schedule for each kernel that has none yet, and the road of each of those."""
    module = copied(lowered)
    roads: dict[str, str] = {}
    for var, function in lowered.functions_items():
        if not isinstance(function, tvm.tirx.PrimFunc) or function.attrs.get(
            "tirx.is_scheduled", False
        ):
            continue
        alone = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        choice = default(alone, machine) if machine is not None else None
        roads[str(var.name_hint)] = choice.road if choice else NO_ROAD
        if choice is not None:
            module[var] = restored(choice.schedule.mod["main"], function)
    return module, roads


def copied(module: tvm.IRModule) -> tvm.IRModule:
    """A module of its own with the same functions: some of TVM's passes change the one that they are given."""
    made = tvm.IRModule(dict(module.functions_items()), global_infos=module.global_infos)
    return made if module.attrs is None else made.with_attrs(module.attrs)


def restored(scheduled: tvm.tirx.PrimFunc, original: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """A scheduled kernel with the attributes of the function that it takes the place of."""
    return tvm.tirx.PrimFunc(
        scheduled.params, scheduled.body, scheduled.ret_type, original.attrs
    ).with_attr("tirx.is_scheduled", True)
