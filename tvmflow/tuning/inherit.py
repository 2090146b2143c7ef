"""What a new workload takes over from its relatives: the same operator in another shape, measured before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tvm
from tvm.s_tir.schedule import Schedule, Trace

from tvmflow.values import Json

_TILE: Final = "SamplePerfectTile"
_POSTPROCESSED: Final = "EnterPostproc"


def inherited(
    mod: tvm.IRModule, traces: Sequence[Json], postprocs: Sequence[Any], seed: int
) -> Iterator[Schedule]:
    """The relatives' schedules on this workload, those that apply; tile sizes are fitted to its extents.

    `traces` are recorded ones, as the ledger keeps them. What MetaSchedule's postprocessors did for
    the relative's shape is left out, and `postprocs` do it for this one.
    """
    for trace in traces:
        # whatever TVM raises here means that the relative is not so near
        try:
            schedule = _fitted(mod, trace, seed)
            if schedule is not None and all(each.apply(schedule) for each in postprocs):
                yield schedule
        except Exception:
            continue


def _fitted(mod: tvm.IRModule, recorded: Json, seed: int) -> Schedule | None:
    """The recorded decisions on another workload, ready for postprocessing."""
    instructions, decisions = _without_postprocessing(recorded)
    # once with sampled decisions, to see which extents there are
    sampled = Schedule(mod, seed=seed)
    Trace.apply_json_to_schedule([instructions, []], sampled)
    trace = sampled.trace
    if len(trace.insts) != len(instructions):
        return None
    for index, wanted in decisions:
        instruction = trace.insts[index]
        current = trace.decisions[instruction]
        decision = _tiles(wanted, math.prod(_ints(current))) if _is_tile(instruction) else wanted
        trace = trace.with_decision(instruction, decision, remove_postproc=True)
    schedule = Schedule(mod, seed=seed)
    trace.apply_to_schedule(schedule, remove_postproc=True)
    # evolution repeats what stands before this mark, and postprocesses anew
    schedule.enter_postproc()
    return schedule


def _without_postprocessing(recorded: Json) -> tuple[list[Json], list[Json]]:
    instructions, decisions = recorded
    kinds = [each[0] for each in instructions]
    end = kinds.index(_POSTPROCESSED) if _POSTPROCESSED in kinds else len(kinds)
    return instructions[:end], [each for each in decisions if each[0] < end]


def _is_tile(instruction: Any) -> bool:
    return str(instruction.kind.name) == _TILE


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


def _tiles(wanted: Sequence[int], extent: int) -> list[int]:
    """Factors of `extent` near the wanted ones: the inner tiles are kept as far as they divide, the outermost takes the rest.

    The inner sizes decide about registers and caches, whatever the shape is around them.
    """
    tiles: list[int] = []
    rest = extent
    for size in reversed(wanted[1:]):
        tile = max(factor for factor in range(1, min(size, rest) + 1) if rest % factor == 0)
        tiles.append(tile)
        rest //= tile
    return [rest, *reversed(tiles)]
