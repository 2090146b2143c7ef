"""The rules `block_reductions` (softmax, norms, means, matrix-vector products) and `windows`.

The threads of a block divide the values of one or a few reductions among themselves. A row that several steps need is
loaded into shared memory once, and all steps run in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.gpu_tiles import Device
from tvmflow.compiler.schedules.blocks import (
    REDUCTION,
    depends_on,
    find_read,
    list_all_blocks,
    uses,
)
from tvmflow.compiler.schedules.gpu import accesses

_THREADS: Final = 128
# A thread adds up at least this many values.
_MIN_SERIAL: Final = 4
# Blocks can share a compute unit only if each takes at most this part of its shared memory.
_SHARED_PART: Final = 4
_UNROLLED: Final = 16


class _Threads(NamedTuple):
    """A block of threads: `parts` threads for each of `rows` results, x along rows or along parts."""

    rows: int
    parts: int
    is_along_rows: bool

    @property
    def row_name(self) -> str:
        return "threadIdx.x" if self.is_along_rows else "threadIdx.y"

    @property
    def part_name(self) -> str:
        return "threadIdx.y" if self.is_along_rows else "threadIdx.x"


def apply(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule reductions over the same axes, and the blocks around them, or return None."""
    handles = list_all_blocks(schedule)
    reductions = [handle for handle in handles if accesses.is_reduction(schedule, handle)]
    stmts = [schedule.get(handle) for handle in handles]
    if not reductions or not all(isinstance(stmt.body, tirx.BufferStore) for stmt in stmts):
        return None
    last = handles[-1]
    for handle in handles[:-1]:
        if not accesses.is_reduction(schedule, handle):
            schedule.compute_inline(handle)
    if accesses.is_reduction(schedule, last):
        if not schedule.get_loops(last):
            return None
        schedule.cache_write(last, 0, "local")
        (last,) = schedule.get_consumers(last)
    return _apply_blocks(schedule, reductions, last, device)


def _apply_blocks(
    schedule: Schedule, reductions: Sequence[Any], last: Any, device: Device
) -> Schedule | None:
    first = schedule.get(reductions[0])
    # the lengths of the spatial and the reduced axes
    shapes = [
        [
            [int(axis.dom.extent) for axis in axes if (axis.iter_type == REDUCTION) == is_reduced]
            for is_reduced in (False, True)
        ]
        for axes in (schedule.get(handle).iter_vars for handle in reductions)
    ]
    if any(shape != shapes[0] for shape in shapes):
        return None
    row_count, depth = map(math.prod, shapes[0])
    # neighboring results may read adjacent values
    load = max(
        accesses.list_loads(first),
        key=lambda one: math.prod(int(size) for size in one.source.shape),
    )
    nearest = [
        axis
        for axis in first.iter_vars
        if int(axis.dom.extent) > 1 and depends_on(load, axis.var)
        if accesses.element_stride(load, axis.var) == 1
    ]
    is_along_rows = bool(nearest) and nearest[0].iter_type != REDUCTION
    threads = _choose_threads(row_count, depth, is_along_rows, device)
    rows, columns = _divide_last(schedule, reductions, last)
    fused = schedule.fuse(*rows) if rows else schedule.add_unit_loop((*columns, last)[0])
    block, row = schedule.split(fused, [None, threads.rows])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(row, threads.row_name)
    inner = schedule.fuse(*columns) if columns else schedule.add_unit_loop(last)
    serial, part = schedule.split(inner, [None, threads.parts])
    schedule.bind(part, threads.part_name)
    accesses.unroll(schedule, serial, _UNROLLED)
    steps = [*reductions, last]
    reads = [[read.source for read in schedule.get(handle).reads] for handle in steps]
    # the tensors that every step reads as a whole
    repeated = [
        buffer
        for buffer in reads[0]
        if all(any(map(buffer.same_as, others)) for others in reads[1:])
    ]
    for handle in reversed(reductions):
        schedule.set_scope(handle, 0, "local")
        schedule.compute_at(handle, row, preserve_unit_loops=True)
        reduced = schedule.fuse(*schedule.get_loops(handle)[-len(shapes[0][1]) :])
        serial, part = schedule.split(reduced, [None, threads.parts])
        schedule.reorder(part, serial)
        schedule.bind(part, threads.part_name)
        accesses.unroll(schedule, serial, _UNROLLED)
    bytes_row = 4 * depth * threads.rows
    if len(repeated) == 1 and _SHARED_PART * bytes_row <= device.shared_bytes * 2:
        _load_once(schedule, repeated[0], steps, block, threads)
    return schedule


def _choose_threads(rows: int, depth: int, is_along_rows: bool, device: Device) -> _Threads:
    """Return how many results a block computes, and with how many threads each."""
    most = min(device.threads // 2, 512) if rows >= device.units else device.threads
    if is_along_rows:
        across = min(device.lanes, _power_of_two(rows))
        parts = 1
        while (
            rows * parts < device.units * _THREADS * 4
            and 2 * parts * across <= most
            and 2 * parts * _MIN_SERIAL <= depth
        ):
            parts *= 2
        return _Threads(max(across, min(_THREADS // parts, _power_of_two(rows))), parts, True)
    parts = min(_power_of_two(-(-depth // (2 * _MIN_SERIAL))), _THREADS, most)
    while rows * parts < device.units * _THREADS * 4 and 2 * parts * _MIN_SERIAL <= depth:
        if 2 * parts > most:
            break
        parts *= 2
    return _Threads(max(1, min(_THREADS // parts, _power_of_two(rows))), parts, False)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def _divide_last(
    schedule: Schedule, reductions: Sequence[Any], last: Any
) -> tuple[list[Any], list[Any]]:
    """Move the last block's loops over rows (reduction results) outermost; return them and the others."""
    stmt = schedule.get(last)
    results = [schedule.get(handle).body.buffer for handle in reductions]
    loads = [load for load in accesses.list_loads(stmt) if load.source in results]
    rows: list[Any] = []
    columns: list[Any] = []
    for loop, axis in zip(schedule.get_loops(last), stmt.iter_vars, strict=True):
        is_row = int(axis.dom.extent) == 1 or any(depends_on(load, axis.var) for load in loads)
        (rows if is_row else columns).append(loop)
    schedule.reorder(*rows, *columns)
    return rows, columns


def _load_once(
    schedule: Schedule, buffer: Any, steps: Sequence[Any], block: Any, threads: _Threads
) -> None:
    """Let all threads copy the rows of a tensor to shared memory before the first step."""
    first = schedule.get(steps[0])
    load = next(load for load in accesses.list_loads(first) if load.source.same_as(buffer))
    copy = schedule.cache_read(steps[0], find_read(first, load), "shared", list(steps))
    schedule.compute_at(copy, block, preserve_unit_loops=True)
    accesses.fuse_before(schedule, copy)
    fused = schedule.fuse(*schedule.get_loops(copy)[1:])
    serial, row, part = schedule.split(fused, [None, threads.rows, threads.parts])
    schedule.bind(row, threads.row_name)
    schedule.bind(part, threads.part_name)
    accesses.unroll(schedule, serial, _UNROLLED)


# ---------------------------------------------------------------- windows
# The rule `windows`: depthwise convolutions and pooling. A thread computes some neighboring rows of one column of pixels.
# It loads values that several results need into registers once; neighboring threads load adjacent values.

# Larger windows do not fit into registers, and are scheduled as reductions.
_MAX_WINDOW: Final = 128
_MAX_VALUES: Final = 80
_ROWS: Final = (4, 2, 1)


class _Window(NamedTuple):
    """A block that reduces windows of data.

    Attributes:
        main: The block.
        data: The index of the load of data among the block's loads.
        axis: The position of the axis along which a thread computes several results.
        window_shape: The lengths of the axes that are reduced.
        step: The distance between the windows of two results along `axis`, in elements.
        reach: The number of elements that a window spans along `axis`.
        results: The number of results.
    """

    main: Any
    data: int
    axis: int
    window_shape: tuple[int, ...]
    step: int
    reach: int
    results: int


def apply_windows(schedule: Schedule, device: Device) -> Schedule | None:
    """Schedule a reduction of windows, with its epilogue; None for another kernel."""
    window = _find_window(schedule)
    if window is None:
        return None
    main = window.main
    accesses.fuse_epilogue(schedule, main)
    loops = list(schedule.get_loops(main))
    count = len(loops) - len(window.window_shape)
    spatial, reduced = loops[:count], loops[count:]
    rows = _choose_rows(window, device)
    spatial[window.axis], row = schedule.split(spatial[window.axis], [None, rows])
    schedule.reorder(*spatial, row, *reduced)
    block, thread = schedule.split(schedule.fuse(*spatial), [None, _THREADS])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    accesses.unroll(schedule, thread, 1024)
    load = accesses.list_loads(schedule.get(main))[window.data]
    values = schedule.cache_read(main, find_read(schedule.get(main), load), "local")
    schedule.compute_at(values, thread, preserve_unit_loops=True)
    accesses.fuse_before(schedule, values)
    result = schedule.cache_write(main, 0, "local")
    schedule.reverse_compute_at(result, thread, preserve_unit_loops=True)
    accesses.fuse_after(schedule, result)
    schedule.decompose_reduction(main, row)
    return schedule


def _find_window(schedule: Schedule) -> _Window | None:
    handles = list_all_blocks(schedule)
    reductions = [handle for handle in handles if accesses.is_reduction(schedule, handle)]
    if len(reductions) != 1:
        return None
    stmt = schedule.get(reductions[0])
    if not isinstance(stmt.body, tirx.BufferStore):
        return None
    axes = list(stmt.iter_vars)
    spatial = [axis for axis in axes if axis.iter_type != REDUCTION]
    reduced = [axis for axis in axes if axis.iter_type == REDUCTION]
    window_shape = tuple(int(axis.dom.extent) for axis in reduced)
    if axes != spatial + reduced or not 1 < math.prod(window_shape) <= _MAX_WINDOW:
        return None
    loads = accesses.list_loads(stmt)
    columns = [axis for axis in spatial if int(axis.dom.extent) > 1]
    if not columns or accesses.element_stride(stmt.body, columns[-1].var) != 1:
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
        window_shape=window_shape,
        results=math.prod(int(axis.dom.extent) for axis in spatial),
        **_find_axis(loads[data[0]], spatial, reduced),
    )


def _find_axis(load: Any, spatial: list[Any], reduced: list[Any]) -> dict[str, int]:
    """Return the axis along which windows overlap, not the last (threads divide it), step and reach."""
    lengths = [position for position, axis in enumerate(spatial) if int(axis.dom.extent) > 1]
    for position in reversed(lengths[:-1]):
        axis = spatial[position]
        for index in load.indices:
            window_shape = [other for other in reduced if uses(index, other.var)]
            if uses(index, axis.var) and window_shape:
                step, gap = (
                    accesses.element_stride(load, one.var) or 1 for one in (axis, window_shape[0])
                )
                row = math.gcd(step, gap)
                reach = (int(window_shape[0].dom.extent) - 1) * (gap // row) + 1
                return {"axis": position, "step": step // row, "reach": reach}
    return {"axis": lengths[-1], "step": 1, "reach": 1}


def _choose_rows(window: _Window, device: Device) -> int:
    """Return the number of results per thread: several if they share data and enough threads remain."""
    if window.step >= window.reach:
        return 1
    others = math.prod(window.window_shape) // min(window.window_shape)
    for rows in _ROWS:
        values = ((rows - 1) * window.step + window.reach) * others
        threads = window.results // rows
        if values <= _MAX_VALUES and threads >= device.units * _THREADS:
            return rows
    return 1
