"""The schedule rules for CPUs, in the order in which they are tried."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import tvm
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.candidates import Tile
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.passes.float16 import computes_float16
from tvmflow.compiler.schedules import elementwise, register_tiles, row_reductions, winograd
from tvmflow.compiler.schedules.blocks import analyze_simple_blocks, attempt
from tvmflow.compiler.schedules.elementwise import schedule_block
from tvmflow.graph import ir


def apply_generic_loops(schedule: Schedule, cpu: CpuModel) -> Schedule | None:
    """Schedule every simple loop nest separately; return None for a kernel that has none."""
    blocks = analyze_simple_blocks(schedule)
    for block in blocks:
        schedule_block(schedule, block, cpu)
    return schedule if blocks else None


_log = logging.getLogger(__name__)

ScheduleRule = Callable[[tvm.IRModule, CpuModel], Iterator[tuple[Tile | None, Schedule]]]
"""A function that yields (register tile or None, schedule) pairs for a kernel (`main` of a module).

The default comes first. If the rule does not fit the kernel, nothing is yielded.
"""


class ScheduleChoice(NamedTuple):
    """A schedule, the name of its rule, and its register tile; None for schedules of other rules."""

    rule: str
    tile: Tile | None
    schedule: Schedule


def _single(apply: Callable[[Schedule, CpuModel], Schedule | None]) -> ScheduleRule:
    """Return a rule that yields the one schedule of a function, or nothing if that returns None."""

    def generate(mod: tvm.IRModule, cpu: CpuModel) -> Iterator[tuple[None, Schedule]]:
        # a schedule that TVM rejects leaves the kernel to the next rule
        schedule = attempt(lambda: apply(Schedule(mod, seed=1), cpu), None)
        if schedule is not None:
            yield None, schedule

    return generate


CPU_RULES: Final[Mapping[str, ScheduleRule]] = {
    "winograd": lambda mod, cpu: ((None, s) for s in winograd.generate(mod, cpu)),
    "register_tiles": register_tiles.generate_tiled,
    "elementwise": _single(elementwise.apply),
    "row_reductions": _single(row_reductions.apply),
    "generic_loops": _single(apply_generic_loops),
}


def generate_for_cpu(mod: tvm.IRModule, cpu: CpuModel) -> Iterator[ScheduleChoice]:
    """Yield the schedules of a kernel (`main`) from the first rule that fits it, the default first."""
    if cpu.has_float16 and computes_float16(mod["main"].body):
        cpu = cpu.for_float16()
    for name, rule in CPU_RULES.items():
        schedule = None
        for tile, schedule in rule(mod, cpu):
            yield ScheduleChoice(name, tile, schedule)
        if schedule is not None:
            return


def choose_schedule(mod: tvm.IRModule, cpu: CpuModel) -> ScheduleChoice | None:
    """Return the default schedule of a kernel (`main` of a module); None if no rule fits it."""
    return next(generate_for_cpu(mod, cpu), None)


def schedule_for_cpu(lowered: tvm.IRModule, cpu: CpuModel | None) -> ScheduledModule:
    """Apply the default schedule to each unscheduled kernel, if there is a CPU model."""
    choose = functools.partial(choose_schedule, cpu=cpu) if cpu is not None else lambda _: None
    scheduled = schedule_each(lowered, choose)
    _log.debug("schedule rules of kernels: %s", scheduled.rules)
    return scheduled


# ---------------------------------------------------------------- scheduled modules

NO_RULE: Final = "none"
"""The rule name reported for a kernel without a schedule."""


class ScheduledModule(NamedTuple):
    """A module with scheduled kernels, and the rule's name for each kernel that was unscheduled."""

    mod: tvm.IRModule
    rules: dict[str, str]


def schedule_each(
    lowered: tvm.IRModule, choose: Callable[[tvm.IRModule], ScheduleChoice | None]
) -> ScheduledModule:
    """Apply the schedule that a function chooses to each unscheduled kernel (`main` of a module)."""
    mod = ir.copy_module(lowered)
    rules: dict[str, str] = {}
    for var, function in list_unscheduled(lowered):
        choice = choose(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}))
        rules[str(var.name_hint)] = choice.rule if choice else NO_RULE
        if choice is not None:
            mod[var] = ir.replace_kernel(function, choice.schedule.mod["main"])
    return ScheduledModule(mod, rules)


def list_unscheduled(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, tvm.tirx.PrimFunc]]:
    """Return the kernels of a module that have no schedule yet."""
    kernels = ir.kernels_of(mod).items()
    return [(var, kernel) for var, kernel in kernels if not ir.is_scheduled(kernel)]
