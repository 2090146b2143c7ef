"""The register tiles that fit a contraction, ranked by their estimated speed.

A register tile is `rows` times `vectors` accumulators (M times N). Each vector of weights is loaded once for all rows
of the tile, and each value of the data once for all of its vectors (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008). Padding, packing, emitters and schedules all ask `estimate_speed`, so
that a contraction is padded for the tile that its schedule takes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from tvmflow.compiler.contraction.machine import (
    BROADCAST,
    BY_ELEMENT,
    EMBEDDED_BROADCAST,
    FEW_ROWS,
    FLOAT_BYTES,
    L1_BYTES,
    MIN_ACCUMULATORS,
    MIN_ACCUMULATORS_BY_ELEMENT,
    MIN_ACCUMULATORS_WITHOUT_FMA,
    OPERAND_REGISTERS,
    VECTORS,
    CpuModel,
)

MAX_VECTORS: Final = 8
"""The maximum number of vectors in a register tile."""
MAX_ROWS: Final = 28
"""The maximum number of rows in a register tile."""

# Limits of padding: one vector per `_VECTORS_PER_PADDED` vectors, one row per `_ROWS_PER_PADDED` rows, and a maximum.
_VECTORS_PER_PADDED: Final = 16
_ROWS_PER_PADDED: Final = 4
_MAX_PADDED_ROWS: Final = 7

# With many terms, more vectors of packed columns would not fit the cache. Packing a vector takes as long as
# multiplying it with `_PACKING_TIME` rows.
_MAX_PACKED_VECTORS: Final = 4
_PACKING_TIME: Final = 2.0


class Arithmetic(Enum):
    """A way to multiply the terms of a contraction."""

    SCALAR = auto()
    """A vector times one value of the data for all lanes: broadcast to a register, or read by the instruction."""
    BY_ELEMENT = auto()
    """A vector times any lane of another (64-bit ARM)."""
    VECTORS = auto()
    """Vectors times vectors, as in depthwise convolutions, or no multiplications, as in pooling."""
    DOT = auto()
    """int8 or bfloat16 dot products: an instruction adds several products to each accumulator."""
    DOT_BY_ELEMENT = auto()
    """Dot products with a 32-bit word of data from any lane of a vector."""
    BYTE_MATRICES = auto()
    """Matrices of 2 x 8 times 8 x 2 bytes (smmla)."""


def multiply_add(cpu: CpuModel) -> Arithmetic:
    """Return how a CPU multiplies packed float32 weights."""
    return Arithmetic.BY_ELEMENT if cpu.multiplicand_lanes else Arithmetic.SCALAR


class Contraction(NamedTuple):
    """The properties of a contraction that determine its register tile.

    Attributes:
        rows: The number of rows of the result (M), such as positions of an image.
        vectors: The number of vectors in a row of the result (N).
        depth: The number of terms of each accumulator (K).
        arithmetic: How terms are multiplied.
        is_product: Whether there is a single loop over the terms, which LLVM does not unroll.
        has_long_loop: Whether the innermost loop over the terms is too long to be unrolled.
        has_dynamic_rows: Whether a smaller tile computes the last rows, so that no bounds checks are needed.
        has_dynamic_vectors: Whether a smaller tile computes the last vectors.
        holds_vectors: Whether LLVM keeps the weights of a term in registers, not the values of all rows: in kernels
            that pack a matrix at run time, whose inner loop is over vectors.
        kernel_width: The number of positions in a row of a depthwise kernel; 0 for others.
        row_stride: The distance between two rows, in kernel positions.
        spreads_columns: Whether the vectors of a tile may lie in several blocks of packed columns.
    """

    rows: int
    vectors: int
    depth: int
    arithmetic: Arithmetic = Arithmetic.SCALAR
    is_product: bool = True
    has_long_loop: bool = True
    has_dynamic_rows: bool = False
    has_dynamic_vectors: bool = False
    holds_vectors: bool = False
    kernel_width: int = 0
    row_stride: int = 1
    spreads_columns: bool = True

    @classmethod
    def over(cls, loops: Sequence[int], **others: Any) -> Contraction:
        """Return a contraction with reduction loops of some lengths, the innermost last."""
        return cls(
            depth=math.prod(loops),
            is_product=len(loops) == 1,
            has_long_loop=loops[-1] > SHORT_REDUCTION,
            **others,
        )


class RegisterTile(NamedTuple):
    """The accumulators that registers hold: `rows` times `vectors`."""

    rows: int
    vectors: int

    @property
    def accumulators(self) -> int:
        """The number of accumulators."""
        return self.rows * self.vectors

    @property
    def has_vectors_inside(self) -> bool:
        """True if there are fewer vectors than rows, so that the inner loop is over vectors in registers."""
        return self.vectors < self.rows


def estimate_speed(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate a tile's share of the peak throughput; 0 if instructions cannot compute it."""
    if computes_tails_apart(problem.arithmetic, cpu):
        return _estimate_with_tail_tiles(problem, tile, cpu)
    rows, vectors = tile
    computed_rows, computed_vectors = problem.rows, problem.vectors
    if not problem.has_dynamic_rows:
        computed_rows = _round_up(problem.rows, rows)
    if not problem.has_dynamic_vectors:
        computed_vectors = _round_up(problem.vectors, vectors)
    has_tail = computed_rows > problem.rows, computed_vectors > problem.vectors
    speed = _estimate_whole_tile(problem, tile, cpu) * _estimate_tail(problem, tile, has_tail, cpu)
    if not problem.spreads_columns and not cpu.divides_packs(vectors):
        speed *= BY_ELEMENT.spread_columns
    return speed * (problem.rows / computed_rows) * (problem.vectors / computed_vectors)


def computes_tails_apart(arithmetic: Arithmetic, cpu: CpuModel) -> bool:
    """Return whether remainder tiles compute the tails, so that whole tiles need no bounds checks."""
    return not cpu.multiplicand_lanes and arithmetic in (Arithmetic.SCALAR, Arithmetic.VECTORS)


def holds_next_weights(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> bool:
    """Return whether the second-level cache holds the weights of two tiles."""
    return 2 * FLOAT_BYTES * cpu.lanes * tile.vectors * problem.depth <= cpu.l2_bytes


def count_data_blocks(
    data_bytes: int, weight_bytes: int, tiles: int, panels: int, cpu: CpuModel
) -> int:
    """Return the number of blocks to divide data into, so that each stays in the second-level cache.

    All weights are read again for each block; without blocks, all data are read again for each panel.

    Args:
        data_bytes: The size of the data.
        weight_bytes: The size of the weights.
        tiles: The number of tiles that share a panel of weights, which blocks divide.
        panels: The number of panels: the weights of one tile each.
        cpu: The CPU.
    """
    blocks = next(
        (
            n
            for n in range(1, tiles + 1)
            if tiles % n == 0 and data_bytes <= n * cpu.cached_data_bytes
        ),
        1,
    )
    return blocks if blocks * weight_bytes < panels * data_bytes else 1


def _estimate_with_tail_tiles(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the share of the peak throughput that a tile and its remainder tiles reach."""
    rows = [(problem.rows, tile.rows)]
    if not problem.has_dynamic_rows:
        rows = _split(problem.rows, tile.rows)
    vectors = [(problem.vectors, tile.vectors)]
    if not problem.has_dynamic_vectors:
        vectors = _split(problem.vectors, tile.vectors)
    time = _add_times(rows, vectors, lambda part: _estimate_whole_tile(problem, part, cpu))
    return problem.rows * problem.vectors / time


def _split(extent: int, size: int) -> list[tuple[int, int]]:
    """Return (covered extent, tile size) of the whole tiles and of the remainder tile."""
    tail = extent % size
    return [part for part in ((extent - tail, size), (tail, tail)) if part[0]]


def _add_times(
    rows: Sequence[tuple[int, int]],
    vectors: Sequence[tuple[int, int]],
    speed: Callable[[RegisterTile], float],
) -> float:
    """Return the time of all parts of a contraction, in vector multiplications."""
    return sum(
        height * width / speed(RegisterTile(part_rows, part_vectors))
        for height, part_rows in rows
        for width, part_vectors in vectors
    )


def _round_up(extent: int, size: int) -> int:
    return -(-extent // size) * size


def _estimate_whole_tile(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> float:
    if problem.arithmetic is Arithmetic.BYTE_MATRICES:
        return _estimate_byte_matrices(tile, cpu)
    if problem.arithmetic is Arithmetic.DOT_BY_ELEMENT:
        return _estimate_dot_by_element(tile, cpu)
    if cpu.broadcasts_first and problem.arithmetic in (Arithmetic.SCALAR, Arithmetic.DOT):
        return _estimate_broadcast(problem, tile, cpu)
    if problem.arithmetic is Arithmetic.BY_ELEMENT:
        speed = 1 / _estimate_time_by_element(tile, cpu)
    else:
        speed = _estimate_loop(problem, tile, cpu)
    if 0 < problem.kernel_width <= BY_ELEMENT.max_kernel_width and cpu.multiplicand_lanes:
        # LLVM loads the data of a row of the kernel early, except for `late_loads` vectors
        data = (tile.rows - 1) * problem.row_stride + problem.kernel_width
        spilled = max(0, tile.rows + data - BY_ELEMENT.late_loads - cpu.registers)
        speed /= 1 + BY_ELEMENT.spill * spilled
    read = 0 if problem.arithmetic is Arithmetic.VECTORS else tile.vectors * problem.depth
    return speed / _estimate_weight_time(tile.rows, read, cpu.lanes)


def _estimate_tail(
    problem: Contraction, tile: RegisterTile, has_tail: tuple[bool, bool], cpu: CpuModel
) -> float:
    """Estimate the speed of a tile with bounds checks, relative to one without."""
    few_rows = VECTORS.few_rows if tile.rows <= FEW_ROWS < problem.rows else 1.0
    of_vectors = VECTORS.tested_tile if has_tail[1] else 1.0
    if problem.arithmetic is Arithmetic.BYTE_MATRICES:
        # instructions multiply whole matrices, so no row can be left out
        return 0.0 if has_tail[0] else of_vectors
    if problem.arithmetic is Arithmetic.DOT_BY_ELEMENT:
        return of_vectors * (VECTORS.tested_tile if has_tail[0] else 1.0)
    if problem.arithmetic is Arithmetic.DOT and cpu.broadcasts_first:
        tests_rows = problem.is_product and has_tail[0]
        is_spilled = _is_spilled(problem, tile, cpu, tests_rows=tests_rows)
        is_spilled = is_spilled or (tile.rows > FEW_ROWS and all(has_tail))
        return BROADCAST.spilled if is_spilled else 1.0
    of_rows = _estimate_row_tail(problem, tile, cpu) if has_tail[0] else 1.0
    return of_vectors * few_rows * of_rows


def _estimate_row_tail(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the speed of a tile with bounds checks of rows, relative to one without."""
    if problem.arithmetic is Arithmetic.BY_ELEMENT:
        return VECTORS.row_tail
    if cpu.has_broadcast_loads:
        is_kept = tile.vectors == 1 or tile.accumulators <= EMBEDDED_BROADCAST.tested_accumulators
        return EMBEDDED_BROADCAST.row_tail if is_kept else VECTORS.tested_tile
    return VECTORS.row_tail if tile.vectors == 1 or problem.has_long_loop else VECTORS.tested_tile


def _estimate_loop(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the fraction of peak throughput of a tile whose loads compete with its multiplications."""
    rows, vectors = tile
    costs = EMBEDDED_BROADCAST if cpu.has_broadcast_loads else VECTORS
    time = max(1.0, costs.base + costs.load * (vectors + rows) / tile.accumulators)
    live = tile.accumulators + (vectors if cpu.has_broadcast_loads else min(vectors, rows))
    if cpu.broadcasts_first and problem.kernel_width > BROADCAST.narrow_kernel:
        live += BROADCAST.early_loads
    time *= 1 + costs.spill * max(0, live - cpu.unspilled_registers)
    if vectors > rows:
        time /= costs.more_vectors_than_rows
    return min(1.0, tile.accumulators / MIN_ACCUMULATORS) / time


def _estimate_broadcast(problem: Contraction, tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the fraction of peak throughput of a tile that broadcasts each multiplicand first."""
    rows, vectors = tile
    if problem.arithmetic is Arithmetic.DOT:
        instructions = BROADCAST.pair_instructions if cpu.has_pair_dots else 1
        work = max(instructions * tile.accumulators, MIN_ACCUMULATORS)
        loads = vectors * BROADCAST.weight_load_of_pairs + rows * BROADCAST.broadcast_of_pairs
        return instructions * tile.accumulators / (work + loads)
    broadcasts = (
        rows if cpu.lanes == BROADCAST.broadcast_lanes else BROADCAST.loads_of_shuffle * rows
    )
    least = MIN_ACCUMULATORS if cpu.has_fma else MIN_ACCUMULATORS_WITHOUT_FMA
    load, read = BROADCAST.load, 0.0
    vector_bytes = FLOAT_BYTES * cpu.lanes
    if vectors * problem.depth * vector_bytes > L1_BYTES:
        load = BROADCAST.l2_load
        # two multiplications a cycle
        read = 2 * vectors * vector_bytes / BROADCAST.l2_bytes_per_cycle
    # a core loads as many vectors a cycle as it multiplies
    time = max(tile.accumulators, least, read, vectors + broadcasts)
    time += vectors * load + broadcasts * BROADCAST.load
    is_spilled = _is_spilled(problem, tile, cpu)
    return tile.accumulators / time * (BROADCAST.spilled if is_spilled else 1.0)


def _is_spilled(
    problem: Contraction, tile: RegisterTile, cpu: CpuModel, *, tests_rows: bool = False
) -> bool:
    """Return whether a tile and its operands need more registers than there are."""
    # LLVM unrolls a loop with one vector twice, and then keeps the values of all rows in registers
    rows_are_held = tile.vectors == 1 or not tile.has_vectors_inside
    operands = tile.rows if rows_are_held and not problem.holds_vectors else tile.vectors
    others = (1 if cpu.has_fma else 2) + (1 if tests_rows else 0)
    return tile.accumulators + operands + others > cpu.registers


def _estimate_time_by_element(tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the time of a by-element tile, relative to that of its multiplications; at least 1."""
    rows, vectors = tile
    spilled = max(0, tile.accumulators + rows + BY_ELEMENT.multiplicand_registers - cpu.registers)
    waits = math.sqrt(max(1.0, MIN_ACCUMULATORS_BY_ELEMENT / tile.accumulators))
    instructions = (
        BY_ELEMENT.vector_loads * vectors + BY_ELEMENT.row_loads * rows + 1
    ) / tile.accumulators
    return waits * max(1.0, cpu.issue_time * (1 + instructions)) * (1 + BY_ELEMENT.spill * spilled)


def _estimate_dot_by_element(tile: RegisterTile, cpu: CpuModel) -> float:
    rows, vectors = tile
    loads = vectors + -(-rows // cpu.multiplicand_lanes)
    # words that do not fill a vector are loaded and broadcast one by one
    moves = rows if rows < cpu.multiplicand_lanes or not cpu.has_quads else 0
    others = moves + loads + BY_ELEMENT.loop_instructions
    if cpu.has_quads:
        # a core issues four instructions a cycle, two of them dot products
        time = max(tile.accumulators + moves, (tile.accumulators + others) / 2, MIN_ACCUMULATORS)
    else:
        # a dot product is two instructions; a core issues three a cycle, two of them for dot products
        issued = (2 * tile.accumulators + others) / 3
        time = max(tile.accumulators + moves / 2, issued, MIN_ACCUMULATORS)
    return tile.accumulators / (time + BY_ELEMENT.exposed_load * loads)


def _estimate_byte_matrices(tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the share of the peak throughput of byte matrices; 0 if accumulators are spilled."""
    rows, vectors = tile
    pairs = rows // 2
    # registers hold two vectors of weights for each vector of results, and one of data for two rows
    if rows % 2 or tile.accumulators + 2 * vectors + pairs > cpu.registers:
        return 0.0
    time = max(tile.accumulators, 2 * MIN_ACCUMULATORS) + pairs
    return tile.accumulators / (time + BY_ELEMENT.matrix_load * (2 * vectors + rows))


def _estimate_weight_time(rows: int, vectors: int, lanes: int) -> float:
    """Estimate the time to load weights, relative to their multiplications with all rows; at least 1.

    A core multiplies two vectors a cycle. Weights that exceed the first-level cache come from the second-level cache.
    """
    vector_bytes = FLOAT_BYTES * lanes
    if vectors * vector_bytes <= L1_BYTES:
        return 1.0
    return max(1.0, 2 * vector_bytes / rows / BY_ELEMENT.l2_bytes_per_cycle)


def holds_unrolled_kernel(tile: RegisterTile, cpu: CpuModel) -> bool:
    """Return whether a by-element tile spills nothing if kernel positions are unrolled."""
    return (
        tile.accumulators + tile.rows + BY_ELEMENT.unrolled_multiplicand_registers <= cpu.registers
    )


def holds_operands(tile: RegisterTile, cpu: CpuModel) -> bool:
    """Return whether there are registers for the accumulators of a tile, its weights and its data."""
    data = tile.rows if cpu.multiplicand_lanes else 1
    return tile.accumulators + tile.vectors + data <= cpu.registers


def _fits(arithmetic: Arithmetic, tile: RegisterTile, cpu: CpuModel) -> bool:
    """Return whether the registers hold the accumulators of a tile and some operands."""
    if arithmetic is Arithmetic.DOT_BY_ELEMENT:
        # words are broadcast shortly before they are multiplied
        words = (
            tile.rows
            if cpu.has_quads
            else min(tile.rows, cpu.multiplicand_lanes) + BY_ELEMENT.pair_registers
        )
        return tile.accumulators + tile.vectors + words < cpu.registers
    return tile.accumulators <= cpu.registers - OPERAND_REGISTERS


def rank_tiles(problem: Contraction, cpu: CpuModel) -> list[tuple[float, RegisterTile]]:
    """Return the tiles that fit the registers with their estimated speeds, the fastest first."""
    tiles = _list_tiles(problem.rows, problem.vectors, problem.arithmetic, cpu)
    speeds = ((estimate_speed(problem, tile, cpu), tile) for tile in tiles)
    return sorted(speeds, key=lambda each: (-each[0], -each[1].vectors, -each[1].rows))


def _list_tiles(
    rows: int, vectors: int, arithmetic: Arithmetic, cpu: CpuModel
) -> Iterator[RegisterTile]:
    sizes = itertools.product(
        range(1, min(rows, MAX_ROWS) + 1), range(1, min(vectors, MAX_VECTORS) + 1)
    )
    return (tile for tile in itertools.starmap(RegisterTile, sizes) if _fits(arithmetic, tile, cpu))


# ---------------------------------------------------------------- tiles of loops
# A register tile, and the order of the loops around it.


SHORT_REDUCTION: Final = 5
"""Reduction axes of at most this length are unrolled if their tile is small."""
MAX_DYNAMIC_ROWS: Final = 8
"""The maximum number of rows in a tile along a dynamic axis: each possible tail adds a tile."""

# The cost of copying one element into a padded window, in multiplications.
_COPY_COST: Final = 3
# The cost of reading one element of a window that exceeds the first-level cache, if there are few weights.
_L2_COST: Final = 1.5
# The relative cost of bounds checks of rows if the last window is not full.
_PARTIAL_WINDOW_COST: Final = 1.1
_MAX_WINDOW_HEIGHTS: Final = 4


class Tile(NamedTuple):
    """The part of a result that is held in registers, and the order of the loops around it.

    `window_rows` rows of the result share a window of padded data; 0 to pad all data first. `speed` is the estimated
    share of the peak throughput.
    """

    shape: RegisterTile
    weights_outside: bool
    window_rows: int
    speed: float = 0.0

    def __str__(self) -> str:
        order = ", weights outside" if self.weights_outside else ""
        window = f", windows of {self.window_rows} rows" if self.window_rows else ""
        return f"{self.shape.rows}×{self.shape.vectors}{order}{window}"


class Window(NamedTuple):
    """Padded data that rows of a result may share.

    Attributes:
        height: The number of rows of the result.
        step: How many new rows of padded data each row of the result reads (the stride).
        halo: How many further rows the last one reads.
        row_elements: The number of elements in a row of padded data that one iteration of the outer loops reads.
        parts: The number of iterations of the loops around rows, without those over weights.
        work: The number of multiplications of the whole contraction.
        has_weights: Whether data are multiplied with weights of several channels.
        has_dynamic_height: Whether each call chooses the height.
    """

    height: int
    step: int
    halo: int
    row_elements: int
    parts: int
    work: int
    has_weights: bool
    has_dynamic_height: bool


def generate_tiles(
    problem: Contraction,
    window: Window | None,
    has_order: bool,
    weights_outside: bool,
    cpu: CpuModel,
) -> Iterator[Tile]:
    """Yield all tiles that fit the registers, ranked by estimated speed.

    The preferred loop order comes first for all shapes: loops over weights outside if `weights_outside`, otherwise
    windows of the best height. With `has_order`, there are loops over weights and over data, and both orders are tried.
    """
    shapes = [(speed, shape) for speed, shape in rank_tiles(problem, cpu) if speed > 0]
    heights = [0] if window is None else _choose_window_heights(window, cpu)
    preferred = (weights_outside, 0 if weights_outside else heights[0])
    for speed, shape in shapes:
        yield Tile(shape, *preferred, speed)
    for speed, shape in shapes:
        for height in dict.fromkeys((*heights, 0)):
            for outside in (False, True) if height == 0 and has_order else (False,):
                if (outside, height) != preferred:
                    yield Tile(shape, outside, height, speed)


def measure_overlap(padded: int, extent: int) -> tuple[int, int]:
    """Return the new rows of padded data for each row of a result, and the additional rows for the last."""
    step = max(1, (padded - 1) // (extent - 1)) if extent > 1 else 1
    return step, max(0, padded - step * extent)


def _measure_imbalance(window: Window, rows: int, cores: int) -> float:
    """Return the time with windows of this many rows, relative to perfectly balanced cores.

    This is the mean over all heights from half of `window.height` to all of it. A partial last window counts as a whole
    one.
    """
    parts, height = window.parts, window.height
    heights = range(-(-height // 2), height + 1)
    times = [math.ceil(parts * math.ceil(n / rows) / cores) * rows / n for n in heights]
    return sum(times) / len(times) * cores / parts


def _choose_window_heights(window: Window, cpu: CpuModel) -> list[int]:
    """Return the heights of padded windows to try, the cheapest first; [0] if none fits the cache."""
    height, parts = window.height, window.parts
    row_work = window.work // height // parts
    costs = []
    for rows in range(1, height + 1):
        elements = (rows * window.step + window.halo) * window.row_elements
        if FLOAT_BYTES * elements > cpu.cached_data_bytes:
            break
        cost = row_work + _COPY_COST * elements / rows
        leaves_l1 = FLOAT_BYTES * elements > L1_BYTES * 3 // 4
        if not window.has_weights and cpu.broadcasts_first and leaves_l1:
            cost += _L2_COST * elements / rows
        if window.has_dynamic_height:
            cost *= _measure_imbalance(window, rows, cpu.cores)
        else:
            all_parts = parts * math.ceil(height / rows)
            balance = math.ceil(all_parts / cpu.cores) * cpu.cores / all_parts
            cost = cost * balance / (height / rows / math.ceil(height / rows))
            cost = cost if height % rows == 0 else _PARTIAL_WINDOW_COST * cost
        costs.append((cost, rows))
    return [rows for _, rows in sorted(costs)[:_MAX_WINDOW_HEIGHTS]] or [0]


# ---------------------------------------------------------------- padding


class _Padding(NamedTuple):
    """A padded contraction and its tile, ordered by time, then by padding."""

    time: float
    rows: int
    vectors: int
    tile: RegisterTile


@functools.cache
def _list_paddings(problem: Contraction, max_vectors: int, cpu: CpuModel) -> list[_Padding]:
    """Return the contraction unchanged, and padded to a multiple of each tile within the limits."""
    max_rows = problem.rows + min(problem.rows // _ROWS_PER_PADDED, _MAX_PADDED_ROWS)
    paddings = []
    for tile in _list_tiles(max_rows, max_vectors, problem.arithmetic, cpu):
        all_rows = {problem.rows, _round_up(problem.rows, tile.rows)}
        all_vectors = {problem.vectors, _round_up(problem.vectors, tile.vectors)}
        for rows, vectors in itertools.product(all_rows, all_vectors):
            if tile.rows <= rows <= max_rows and tile.vectors <= vectors <= max_vectors:
                padded = problem._replace(rows=rows, vectors=vectors)
                if speed := estimate_speed(padded, tile, cpu):
                    time = round(rows * vectors / speed, 6)
                    paddings.append(_Padding(time, rows, vectors, tile))
    return paddings


def pad_product(problem: Contraction, cpu: CpuModel) -> tuple[int, int]:
    """Return the padded (rows, vectors) of a contraction with the shortest estimated time."""
    return rank_paddings(problem, cpu)[0]


def rank_paddings(
    problem: Contraction, cpu: CpuModel, max_ratio: float = 1.0
) -> list[tuple[int, int]]:
    """Return the (rows, vectors) to which a contraction may be padded, ranked by estimated time.

    Args:
        problem: The contraction.
        cpu: The CPU.
        max_ratio: The largest estimated time to return, relative to the least.
    """
    most = problem.vectors + problem.vectors // _VECTORS_PER_PADDED
    paddings = sorted(_list_paddings(problem, most, cpu))
    near = [each for each in paddings if each.time <= max_ratio * paddings[0].time]
    return list(dict.fromkeys((each.rows, each.vectors) for each in near))


def pad_rows(
    problem: Contraction, cpu: CpuModel, *, divides_rows: bool = False, min_gain: float = 1.0
) -> int:
    """Return the number of rows of a contraction, padded if that takes less time.

    With `divides_rows`, the rows of the tile must divide them. Padding must gain more than a factor of `min_gain`.
    """
    paddings = [
        padding
        for padding in _list_paddings(problem, problem.vectors, cpu)
        if not divides_rows or padding.rows % padding.tile.rows == 0
    ]
    best = min(paddings)
    plain = min((each.time for each in paddings if each.rows == problem.rows), default=math.inf)
    return best.rows if plain > min_gain * best.time else problem.rows


# ---------------------------------------------------------------- blocks of rows
# Kernels that pack a matrix at run time multiply it with a block of rows at a time. A smaller tile computes the
# remainder, so the inner loops need no bounds checks.


# Maximum rows of a tile if the number of rows is dynamic, so that the tail tile wastes few rows.
_MAX_DYNAMIC_ROWS: Final = 4


def most_tile_rows(rows: Any) -> int:
    """Return the maximum number of rows in a tile; fewer if the number of rows is dynamic."""
    return MAX_ROWS if isinstance(rows, int) else _MAX_DYNAMIC_ROWS


class RowBlock(NamedTuple):
    """A block of rows, and a tile for each matmul; the rows of each tile divide the block's."""

    rows: int
    tiles: tuple[RegisterTile, ...]


@functools.cache
def choose_row_block(
    rows: int, vectors: tuple[int, ...], max_rows: int, max_tile_rows: int, cpu: CpuModel
) -> RowBlock:
    """Return the fastest block of rows for several matmuls with the same rows.

    `vectors` are the vectors in a row of each matmul. A block has at most `max_rows` rows, a tile at most
    `max_tile_rows`.
    """
    blocks: list[tuple[float, RowBlock]] = []
    for together in range(1, min(MAX_ROWS, max_rows, rows + 2) + 1):
        best = [_choose_dividing_tile(together, count, max_tile_rows, cpu) for count in vectors]
        # the packed matrices are read once for each block of rows
        computed = -(-rows // together) * together * (1 + 1 / together)
        tiles = tuple(tile for _, tile in best)
        blocks.append((computed * sum(time for time, _ in best), RowBlock(together, tiles)))
    return min(blocks, key=lambda block: block[0])[1]


@functools.cache
def _choose_dividing_tile(
    rows: int, vectors: int, max_rows: int, cpu: CpuModel
) -> tuple[float, RegisterTile]:
    """Return the time of a row with the fastest tile whose rows divide the block's, and this tile."""
    tiles = (
        tile
        for tile in _list_tiles(min(rows, max_rows), vectors, multiply_add(cpu), cpu)
        if rows % tile.rows == 0
    )
    return min((_estimate_parts(tile, tile.rows, vectors, cpu) / tile.rows, tile) for tile in tiles)


@functools.cache
def choose_packing_tile(rows: int, columns: int, cpu: CpuModel) -> RegisterTile:
    """Return the fastest tile of a kernel that packs the vectors of a tile once for all rows.

    There is at least one vector of columns. No tile is wider than all columns, since the tail tile ends with them.
    """
    vectors = -(-columns // cpu.lanes)
    widest = min(columns // cpu.lanes, _MAX_PACKED_VECTORS)
    tiles = _list_tiles(rows, widest, multiply_add(cpu), cpu)
    return min(
        tiles, key=lambda tile: (_estimate_parts(tile, rows, vectors, cpu, _PACKING_TIME), tile)
    )


def _estimate_parts(
    tile: RegisterTile, rows: int, vectors: int, cpu: CpuModel, packing_time: float = 0
) -> float:
    """Return the time of a matmul with smaller tiles for its tails, in vector multiplications."""
    parts = _split(rows, tile.rows), _split(vectors, tile.vectors)
    return vectors * packing_time + _add_times(
        *parts, lambda part: estimate_packed_speed(part, cpu)
    )


@functools.cache
def estimate_packed_speed(tile: RegisterTile, cpu: CpuModel) -> float:
    """Estimate the speed of a tile of a packed matrix, whose columns are in the first-level cache."""
    problem = Contraction(*tile, 1, multiply_add(cpu), holds_vectors=True)
    return estimate_speed(problem, tile, cpu)


# ---------------------------------------------------------------- accumulators of other kernels
# For kernels that convert weights in registers, and for recurrent kernels, whose depth is short.

_DOT_ROWS: Final = range(5, 15)


def fill_registers(sizes: Iterable[int], accumulators: int, registers: int) -> int:
    """Return the largest size n for which n * accumulators fill at most half of the registers.

    LLVM keeps operands in the other half. If no size fits, this is the smallest one.
    """
    sizes = list(sizes)
    return max((n for n in sizes if n * accumulators <= registers // 2), default=min(sizes))


def divide_accumulators(terms: int, accumulators: int, wanted: int) -> int:
    """Return the number of partial sums, a divisor of `terms`, that need `wanted` accumulators at most."""
    return largest_divisor(terms, max(1, wanted // accumulators))


def largest_divisor(extent: int, limit: int) -> int:
    """Return the largest divisor of an extent up to a limit."""
    return next(n for n in range(min(extent, limit), 0, -1) if extent % n == 0)


def pad_dot_rows(rows: int) -> int:
    """Return the number of rows padded to whole tiles, because dot products compute only whole tiles."""
    if rows <= max(_DOT_ROWS):
        return rows
    return next(n for n in itertools.count(rows) if any(n % tile == 0 for tile in _DOT_ROWS))
