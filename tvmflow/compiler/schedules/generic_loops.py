"""The rule `generic_loops`: each loop nest of a kernel by itself, parallelized where possible."""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.schedules.blocks import analyze_simple_blocks
from tvmflow.compiler.schedules.elementwise import schedule_block


def apply(schedule: Schedule, cpu: CpuModel) -> Schedule | None:
    """Schedule every simple loop nest; return None for a kernel that has none."""
    blocks = analyze_simple_blocks(schedule)
    for block in blocks:
        schedule_block(schedule, block, cpu)
    return schedule if blocks else None
