"""The rule `windows`: depthwise convolutions and pooling.

A thread computes some neighboring rows of one column of pixels. It loads the numbers that it needs
into registers once, though several results read most of them; neighboring threads load neighboring
numbers.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.gpu_model import Device
from tvmflow.compiler.schedules.blocks import REDUCTION, depends_on, list_all_blocks, uses
from tvmflow.compiler.schedules.gpu.accesses import (
    element_stride,
    find_read,
    fuse_after,
    fuse_before,
    fuse_epilogue,
    has_fixed_sizes,
    is_reduction,
    list_loads,
    unroll,
)

# Larger windows are reductions: they do not fit into registers.
_MAX_TAPS: Final = 128
_MAX_NUMBERS: Final = 80
_ROWS: Final = (4, 2, 1)
_THREADS: Final = 128


class _Window(NamedTuple):
    """A block that reduces windows of data.

    Attributes:
        main: The block.
        data: The position of the load of data among its loads.
        axis: The position of the axis along which a thread computes several results.
        taps: The lengths of the axes that are reduced.
        step: How far windows are from each other along the axis.
        reach: The numbers that a window covers along the axis.
        results: The number of results.
    """

    main: Any
    data: int
    axis: int
    taps: tuple[int, ...]
    step: int
    reach: int
    results: int


def apply(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule a reduction of windows, with what follows it; None for another kernel."""
    window = _find_window(schedule)
    return None if window is None else _apply_rows(schedule, window, _choose_rows(window, device))


def _find_window(schedule: Schedule) -> _Window | None:
    handles = list_all_blocks(schedule)
    if not handles or not has_fixed_sizes(schedule, handles):
        return None
    reductions = [handle for handle in handles if is_reduction(schedule, handle)]
    if len(reductions) != 1:
        return None
    stmt = schedule.get(reductions[0])
    if not isinstance(stmt.body, tirx.BufferStore):
        return None
    axes = list(stmt.iter_vars)
    spatial = [axis for axis in axes if axis.iter_type != REDUCTION]
    reduced = [axis for axis in axes if axis.iter_type == REDUCTION]
    taps = tuple(int(axis.dom.extent) for axis in reduced)
    if axes != spatial + reduced or not 1 < math.prod(taps) <= _MAX_TAPS:
        return None
    loads = list_loads(stmt)
    columns = [axis for axis in spatial if int(axis.dom.extent) > 1]
    if not columns or element_stride(stmt.body, columns[-1].var) != 1:
        return None
    data = [i for i, load in enumerate(loads) if depends_on(load, columns[-1].var)]
    if len(data) != 1 or len(loads) > 2:
        return None
    is_window = any(
        any(uses(index, axis.var) for axis in spatial)
        and any(uses(index, axis.var) for axis in reduced)
        for index in loads[data[0]].indices
    )
    if not is_window:
        return None
    return _Window(
        main=reductions[0],
        data=data[0],
        taps=taps,
        results=math.prod(int(axis.dom.extent) for axis in spatial),
        **_find_axis(loads[data[0]], spatial, reduced),
    )


def _find_axis(load: Any, spatial: list[Any], reduced: list[Any]) -> dict[str, int]:
    """Return the axis along which windows overlap, but not the last one, which threads divide."""
    lengths = [position for position, axis in enumerate(spatial) if int(axis.dom.extent) > 1]
    for position in reversed(lengths[:-1]):
        axis = spatial[position]
        for index in load.indices:
            taps = [other for other in reduced if uses(index, other.var)]
            if uses(index, axis.var) and taps:
                step, gap = (element_stride(load, one.var) or 1 for one in (axis, taps[0]))
                row = math.gcd(step, gap)
                reach = (int(taps[0].dom.extent) - 1) * (gap // row) + 1
                return {"axis": position, "step": step // row, "reach": reach}
    return {"axis": lengths[-1], "step": 1, "reach": 1}


def _choose_rows(window: _Window, device: Device) -> int:
    """Return how many results a thread computes: more where they share data, and enough threads remain."""
    if window.step >= window.reach:
        return 1
    others = math.prod(window.taps) // min(window.taps)
    for rows in _ROWS:
        numbers = ((rows - 1) * window.step + window.reach) * others
        threads = window.results // rows
        if numbers <= _MAX_NUMBERS and threads >= device.units * _THREADS:
            return rows
    return 1


def _apply_rows(schedule: Schedule, window: _Window, rows: int) -> Schedule:
    main = window.main
    fuse_epilogue(schedule, main)
    loops = list(schedule.get_loops(main))
    count = len(loops) - len(window.taps)
    spatial, reduced = loops[:count], loops[count:]
    spatial[window.axis], row = schedule.split(spatial[window.axis], [None, rows])
    schedule.reorder(*spatial, row, *reduced)
    block, thread = schedule.split(schedule.fuse(*spatial), [None, _THREADS])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    unroll(schedule, thread, 1024)
    load = list_loads(schedule.get(main))[window.data]
    numbers = schedule.cache_read(main, find_read(schedule.get(main), load), "local")
    schedule.compute_at(numbers, thread, preserve_unit_loops=True)
    fuse_before(schedule, numbers)
    result = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(result, thread, preserve_unit_loops=True)
    fuse_after(schedule, result)
    schedule.decompose_reduction(main, row)
    return schedule
