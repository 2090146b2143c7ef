"""The blocks of a kernel, and how their loads move along each axis."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import tvm
from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.machine import MIN_LANES
from tvmflow.compiler.vector_code import MAX_STRIDE
from tvmflow.core.dimensions import is_prime
from tvmflow.graph.dynamic_shapes import DYNAMIC_SHAPES, list_size_variables
from tvmflow.graph.ir import IF_THEN_ELSE, find_nodes, operator_name, replace_variables

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_SPATIAL: Final = 0
_FAST_CALLS: Final = {IF_THEN_ELSE, "prim.likely", "tirx.fabs"}
# LLVM hoists these calls, and one function, out of a loop; nested functions are computed for each element.
_MOVABLE_CALLS: Final = {
    *_FAST_CALLS,
    *(f"tirx.{name}" for name in ("round", "floor", "ceil", "trunc", "sqrt", "reinterpret")),
}
_MOVABLE_FUNCTIONS: Final = frozenset(
    f"tirx.{name}" for name in ("exp", "log", "pow", "sigmoid", "tanh", "erf", "sin", "cos")
)
# The assumed size of dynamic dimensions without a tuning size, and the minimum that rules assume.
_UNKNOWN_SIZE: Final = 31
_MIN_DYNAMIC_LENGTH: Final = 17
# Hoisting expensive index computations (division, modulo) out of a shorter axis saves no time.
_MIN_READERS: Final = 8
_MAX_REPEATS: Final = 8
ROOT: Final = "root"
"""The name of the block around all others of a kernel."""
REDUCTION: Final = 2
"""TVM's `IterVar.iter_type` of an axis that is reduced."""


class Block(NamedTuple):
    """A block whose loops are its axes, in the same order.

    Attributes:
        handle: The schedule's reference to the block.
        stmt: The block's statement in TIR.
        spatial_extents: The lengths of the spatial axes, outermost first; a prime number for a dynamic one.
        reduction_extents: The lengths of the reduction axes, outermost first; likewise.
        output: The buffer that the block writes.
        dynamic_axes: The positions of the axes with dynamic lengths.
        sizes: Prime numbers for the variables of dynamic shapes.
        typical_extents: The lengths of the spatial axes at the tuning size.
    """

    handle: Any
    stmt: Any
    spatial_extents: tuple[int, ...]
    reduction_extents: tuple[int, ...]
    output: Any
    dynamic_axes: frozenset[int] = frozenset()
    sizes: Mapping[Any, int] = MappingProxyType({})
    typical_extents: tuple[int, ...] = ()

    @property
    def is_reduction(self) -> bool:
        """True if the block has reduction axes."""
        return bool(self.reduction_extents)

    @property
    def work(self) -> int:
        """The number of times that the body is computed."""
        return math.prod(self.spatial_extents) * math.prod(self.reduction_extents)

    @property
    def axes(self) -> list[Any]:
        """The variables of all axes: first the spatial ones."""
        return [axis.var for axis in self.stmt.iter_vars]

    @property
    def spatial_axes(self) -> list[Any]:
        """The variables of the spatial axes."""
        return self.axes[: len(self.spatial_extents)]


def attempt(apply: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Return the result of a scheduling function; `otherwise` if TVM rejects a step."""
    try:
        return apply()
    except RuntimeError as exc:
        _log.debug("TVM rejected a schedule: %s", exc)
        return otherwise


def analyze_blocks(schedule: Schedule) -> list[Block] | None:
    """Inline scalars and return all blocks of a kernel; None if one is not a simple loop nest."""
    _inline_scalars(schedule)
    blocks = analyze_simple_blocks(schedule)
    return blocks if len(blocks) == len(list_all_blocks(schedule)) else None


def _inline_scalars(schedule: Schedule) -> None:
    """Inline intermediate scalars into their readers; LLVM hoists them out of the loops."""
    intermediate = list_intermediate_buffers(schedule) if list_all_blocks(schedule) else []
    scalars = [buffer for buffer in intermediate if not buffer.shape]
    for handle in list_all_blocks(schedule) if scalars else []:
        stmt = schedule.get(handle)
        is_scalar = any(write.source.same_as(buffer) for write in stmt.writes for buffer in scalars)
        calls = map(operator_name, find_nodes(stmt, tvm.ir.Call))
        others = [name for name in calls if name not in _MOVABLE_CALLS]
        is_movable = len(others) <= 1 and _MOVABLE_FUNCTIONS.issuperset(others)
        if is_scalar and stmt.init is None and is_movable:
            # blocks that TVM cannot inline stay, and the kernel gets no tiles
            attempt(functools.partial(schedule.compute_inline, handle), None)


def analyze_simple_blocks(schedule: Schedule) -> list[Block]:
    """Return the blocks of a kernel that are simple loop nests over their axes."""
    blocks = [_analyze(schedule, handle) for handle in list_all_blocks(schedule)]
    return [block for block in blocks if block is not None]


def list_all_blocks(schedule: Schedule) -> list[Any]:
    """Return the handles of the blocks of a kernel, in order; none for a kernel without any."""
    # a kernel may consist of loops without a block
    return attempt(lambda: list(schedule.get_child_blocks(schedule.get_sblock(ROOT))), [])


def _analyze(schedule: Schedule, handle: Any) -> Block | None:
    stmt = schedule.get(handle)
    loop_vars = [schedule.get(loop).loop_var for loop in schedule.get_loops(handle)]
    axes = list(stmt.iter_vars)
    extents = [axis.dom.extent for axis in axes]
    realizes = find_nodes(schedule.mod["main"].body, tvm.s_tir.SBlockRealize)
    (bindings,) = (realize.iter_values for realize in realizes if realize.block.same_as(stmt))
    tuning_sizes = _read_tuning_sizes(schedule)
    sizes = {var: _prime_up_to(size) for var, size in tuning_sizes.items()}
    lengths = tuple(_choose_length(extent, sizes) for extent in extents)
    spatial = [axis for axis in axes if axis.iter_type == _SPATIAL]
    reduction = [axis for axis in axes if axis.iter_type == REDUCTION]
    is_simple = (
        bool(spatial)
        and spatial + reduction == axes
        and len(loop_vars) == len(axes) == len(bindings)
        and all(var.same_as(loop) for var, loop in zip(bindings, loop_vars, strict=True))
        and all(length > 0 for length in lengths)
        and isinstance(stmt.body, tirx.BufferStore)
        and _are_shifted(stmt.body, [axis.var for axis in spatial])
    )
    if not is_simple:
        return None
    rank = len(spatial)
    is_dynamic = [not isinstance(extent, tirx.IntImm) for extent in extents]
    return Block(
        handle=handle,
        stmt=stmt,
        spatial_extents=lengths[:rank],
        reduction_extents=lengths[rank:],
        output=stmt.body.buffer,
        dynamic_axes=frozenset(position for position, value in enumerate(is_dynamic) if value),
        sizes=sizes,
        typical_extents=tuple(evaluate_size(each, tuning_sizes) or 1 for each in extents[:rank]),
    )


# ---------------------------------------------------------------- dynamic shapes
# Rules need concrete sizes. They take a prime number for a dynamic length, so that no vectors or tiles divide it.


def _read_tuning_sizes(schedule: Schedule) -> dict[Any, int]:
    """Return the tuning size of each variable in the shapes of a kernel with dynamic shapes."""
    function = schedule.mod["main"]
    known = (function.attrs or {}).get(DYNAMIC_SHAPES, {})
    return {
        var: int(known.get(str(var.name), _UNKNOWN_SIZE)) for var in list_size_variables(function)
    }


def _choose_length(extent: Any, sizes: Mapping[Any, int]) -> int:
    """Return the length of an axis; a prime number if it is dynamic, 0 if it cannot be evaluated."""
    length = evaluate_size(extent, sizes)
    is_fixed = isinstance(extent, tirx.IntImm)
    return 0 if length is None else length if is_fixed else _prime_up_to(length)


def evaluate_size(size: Any, sizes: Mapping[Any, int]) -> int | None:
    """Return the value of a size for values of its variables; None if it has further variables."""
    if isinstance(size, tirx.Var):
        return sizes.get(size)
    if sizes and not isinstance(size, tirx.IntImm):
        values = {var: tirx.IntImm(var.ty.dtype, number) for var, number in sizes.items()}
        size = tvm.sym.Analyzer().simplify(replace_variables(size, values))
    return int(size) if isinstance(size, int | tirx.IntImm) else None


def count_elements(buffer: Any, block: Block) -> int:
    """Return the number of elements of a block's buffer; an estimate if its shape is dynamic."""
    sizes = [evaluate_size(size, block.sizes) for size in buffer.shape]
    return math.prod(_UNKNOWN_SIZE if size is None else size for size in sizes)


def _prime_up_to(size: int) -> int:
    """Return the largest prime number up to a size, at least 17: small ones would mislead the rules."""
    return next(filter(is_prime, range(max(size, _MIN_DYNAMIC_LENGTH), 1, -1)))


def loop_length(schedule: Schedule, loop: Any) -> int:
    """Return the number of iterations of a loop; at the tuning size if it is dynamic."""
    extent = schedule.get(loop).extent
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    primes = {var: _prime_up_to(number) for var, number in _read_tuning_sizes(schedule).items()}
    length = evaluate_size(extent, primes)
    return _UNKNOWN_SIZE if length is None else length


def is_dynamic_loop(schedule: Schedule, loop: Any) -> bool:
    """Return whether the number of iterations of a loop is dynamic."""
    return not isinstance(schedule.get(loop).extent, tirx.IntImm)


# ---------------------------------------------------------------- memory accesses


def _are_shifted(store: Any, axes: Sequence[Any]) -> bool:
    """Return whether each index is an axis plus a constant; the last axis may span several indices."""
    indices, shape = list(store.indices), list(store.buffer.shape)
    while len(indices) > len(axes):
        inner, length = indices.pop(), shape.pop()
        indices[-1] = indices[-1] * length + inner
        shape[-1] = shape[-1] * length
    return len(indices) == len(axes) and all(
        isinstance(tvm.sym.Analyzer().simplify(index - axis), tirx.IntImm)
        for index, axis in zip(indices, axes, strict=True)
    )


def list_intermediate_buffers(schedule: Schedule) -> list[Any]:
    """Return the buffers of a kernel that are not its parameters."""
    return list(schedule.get(schedule.get_sblock(ROOT)).alloc_buffers)


def has_slow_operations(block: Block) -> bool:
    """Return whether a block divides or calls slow functions such as exp."""
    return _is_slow(block.stmt.body.value)


def _is_slow(expr: Any) -> bool:
    divisions = find_nodes(expr, tirx.Div)
    calls = find_nodes(expr, tvm.ir.Call)
    return bool(divisions or set(map(operator_name, calls)) - _FAST_CALLS)


def is_padded(block: Block, axis: Any) -> bool:
    """Return whether a block pads data with a constant along an axis."""
    value = block.stmt.body.value
    if operator_name(value) != IF_THEN_ELSE:
        return False
    condition, _, other = value.args
    return isinstance(other, tirx.IntImm | tirx.FloatImm) and uses(condition, axis)


def is_padded_at_all(block: Block) -> bool:
    """Return whether any element of a block with static shapes is padding."""
    value = block.stmt.body.value
    if operator_name(value) != IF_THEN_ELSE:
        return False
    analyzer = tvm.sym.Analyzer()
    for axis, extent in zip(block.spatial_axes, block.spatial_extents, strict=True):
        analyzer.bind(axis, tvm.ir.Range(0, tirx.IntImm(axis.ty.dtype, extent)))
    return not isinstance(analyzer.simplify(value.args[0]), tirx.IntImm)


def find_axis_without_slow_indices(block: Block) -> int | None:
    """Return a long axis, not the last, that no expensive index computation depends on, or None."""
    slow = [index for load in list_loads(block) for index in load.indices if _is_slow(index)]
    free = [
        position
        for position, axis in enumerate(block.spatial_axes[:-1])
        if block.spatial_extents[position] >= _MIN_READERS
        and not any(uses(index, axis) for index in slow)
    ]
    return free[-1] if slow and free else None


def find_read(stmt: Any, load: Any) -> int:
    """Return the index of the region that a load reads, among the regions that its block reads."""
    return next(i for i, read in enumerate(stmt.reads) if read.source.same_as(load.source))


def list_loads(block: Block) -> list[Any]:
    """Return the loads of a block, except those of the buffer that it accumulates into."""
    loads = find_loads(block.stmt.body.value)
    return [load for load in loads if not load.source.same_as(block.output)]


def find_loads(expr: Any) -> list[Any]:
    """Return the loads in an expression."""
    return find_nodes(expr, tvm.ir.TensorLoad)


def has_computed_indices(schedule: Schedule) -> bool:
    """Return whether load indices depend on data or conditions, such as those of reflection padding."""
    loads = find_loads(schedule.mod["main"].body)
    indices = [index for load in loads for index in load.indices]
    return any(find_loads(index) or find_nodes(index, tvm.ir.Call) for index in indices)


def depends_on(access: Any, axis: Any) -> bool:
    """Return whether the address of a load or a store depends on an axis."""
    return any(uses(index, axis) for index in access.indices)


def uses(expr: Any, axis: Any) -> bool:
    """Return whether an expression depends on an axis."""
    return any(var.same_as(axis) for var in find_nodes(expr, tvm.ir.Var))


def is_contiguous(block: Block, axis: Any) -> bool:
    """Return whether every load has stride 1 along an axis or does not depend on it."""
    return all(
        not depends_on(load, axis) or element_stride(load, block, axis) == 1
        for load in list_loads(block)
    )


def reads_vectors(block: Block, axis: Any, extent: int) -> bool:
    """Return whether each load has a small stride along an axis, or repeats each element a few times."""
    return all(
        not depends_on(load, axis)
        or linear_stride(load, block, axis, extent) in range(1, MAX_STRIDE + 1)
        or _repeats_numbers(load, block, axis, extent)
        for load in list_loads(block)
    )


def _repeats_numbers(load: Any, block: Block, axis: Any, extent: int) -> bool:
    """Return whether a load reads each element 2, 4 or 8 times in a row."""
    steps = {*range(1, min(extent, _MAX_REPEATS + 2)), extent // 2, extent - 1}
    distances = {step: element_stride(load, block, axis, step) for step in steps}
    return any(
        all(distance == step // count for step, distance in distances.items())
        for count in (2, 4, _MAX_REPEATS)
        if extent % count == 0
    )


def choose_lanes(lanes: int, fits: Callable[[int], bool]) -> int:
    """Return the number of lanes in the widest vectors that fit: `lanes`, half of that, …; 0 if none do."""
    while lanes >= MIN_LANES and not fits(lanes):
        lanes //= 2
    return lanes if lanes >= MIN_LANES else 0


def linear_stride(load: Any, block: Block, axis: Any, extent: int) -> int | None:
    """Return the stride of a load along a whole axis; None if it is not constant, or depends on data."""
    steps = {1, extent // 2, extent - 1} - {0}
    strides = set()
    for step in steps:
        distance = element_stride(load, block, axis, step)
        strides.add(None if distance is None or distance % step else distance // step)
    return strides.pop() if len(strides) == 1 else None if strides else 0


def element_stride(load: Any, block: Block, axis: Any, step: int = 1) -> int | None:
    """Return how many elements a load moves for `axis` from 0 to `step`; None if it depends on data."""
    shape = [evaluate_size(extent, block.sizes) for extent in load.source.shape]
    if None in shape:
        return None
    sizes = {var: tirx.IntImm(var.ty.dtype, number) for var, number in block.sizes.items()}
    indices = [replace_variables(index, sizes) if sizes else index for index in load.indices]
    return find_distance(indices, shape, axis, step, block.axes)


def find_distance(
    indices: Sequence[Any],
    shape: Sequence[Any],
    axis: Any,
    step: int,
    axes: Sequence[Any] | None = None,
) -> int | None:
    """Return the distance in a buffer, in elements, from index 0 of an axis to index `step`.

    All other `axes` (by default, all other variables) are 0. Returns None if data or conditions decide.
    """
    distance = 0
    for index, length in zip(indices, shape, strict=True):
        distance *= int(length)
        # an index that does not depend on the axis may depend on data
        if uses(index, axis):
            if find_nodes(index, tvm.ir.Call):
                return None
            used = dict.fromkeys(find_nodes(index, tirx.Var))
            own = list(axes or (var for var in used if isinstance(var.ty, tvm.ir.PrimType)))
            index_map = tirx.IndexMap(own, [index], None)
            positions = (
                [tirx.IntImm("int64", end if var.same_as(axis) else 0) for var in own]
                for end in (0, step)
            )
            ends = [index_map.map_indices(position)[0] for position in positions]
            if not all(isinstance(end, tirx.IntImm) for end in ends):
                return None
            distance += int(ends[1]) - int(ends[0])
    return distance
