"""The share of a model's time that kernels without a schedule take.

It is estimated by how many values each kernel computes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import tvm
from tvm import tirx
from tvm.s_tir import SBlockRealize

# A schedule computes a vector in the time of a number.
_GAIN: Final = 16
# Fewer steps take microseconds.
_MIN_STEPS: Final = 1 << 15


def estimate_shares(
    mod: tvm.IRModule, calls: Mapping[str, int], unscheduled: Collection[str]
) -> dict[str, float | None]:
    """Return the estimated share of the time, between 0 and 1, of each kernel without a schedule.

    The share is 0 where a kernel computes few values, None if its loops depend on data. `mod` is the lowered
    module before its kernels get schedules, `calls` the number of calls of each.
    """
    times: dict[str, float] = {}
    for var, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            name = str(var.name_hint)
            gain = 1 if name in unscheduled else _GAIN
            times[name] = _count_steps(function.body) * calls.get(name, 1) / gain
    known = sum(filter(math.isfinite, times.values()))
    shares: dict[str, float | None] = {}
    for name in sorted(unscheduled):
        is_small = times[name] < _MIN_STEPS
        shares[name] = 0.0 if is_small else times[name] / known if times[name] < math.inf else None
    return shares


def _count_steps(stmt: Any) -> float:
    """Return how many statements run in all iterations of a kernel's loops.

    It is infinity if that depends on data.
    """
    if isinstance(stmt, tirx.For):
        steps = _count_steps(stmt.body)
        is_known = isinstance(stmt.extent, tirx.IntImm)
        return steps * int(stmt.extent) if is_known else math.inf
    if isinstance(stmt, tirx.SeqStmt):
        return sum(map(_count_steps, stmt.seq))
    if isinstance(stmt, tirx.IfThenElse):
        branches = (stmt.then_case, stmt.else_case)
        return sum(_count_steps(branch) for branch in branches if branch is not None)
    if isinstance(stmt, SBlockRealize):
        return _count_steps(stmt.block.body)
    if isinstance(stmt, tirx.AttrStmt):
        return _count_steps(stmt.body)
    return math.inf if isinstance(stmt, tirx.While) else 1.0
