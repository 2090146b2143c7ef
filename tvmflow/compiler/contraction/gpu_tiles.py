"""The limits of GPUs, and the tiles of matmuls and attention with the shortest estimated time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import tvm

# The compute units of the smallest NVIDIA board of each architecture, from NVIDIA's data sheets.
_CUDA_UNITS: Final = {
    "sm_50": 5,
    "sm_52": 13,
    "sm_53": 1,
    "sm_60": 56,
    "sm_61": 10,
    "sm_62": 2,
    "sm_70": 80,
    "sm_72": 6,
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 28,
    "sm_87": 8,
    "sm_89": 58,
    "sm_90": 114,
}
# The oldest architecture with tensor cores that is compiled from CUDA C; TVM's LLVM backend cannot use them.
_TENSOR_CORES: Final = 75
# The number of compute units assumed for unknown GPUs: an integrated GPU has as many.
_UNITS: Final = 16
# The minimum limits that OpenCL, WebGPU and Metal guarantee.
_THREADS: Final = 256
_SHARED_BYTES: Final = 16384
_LANES: Final = 32
# 32-bit registers of a thread: with more, too few threads fit a compute unit.
_REGISTERS: Final = {"cuda": 128, "nvptx": 128, "rocm": 128, "metal": 96}
_FEW_REGISTERS: Final = 68
# A compute unit hides latencies if it computes this many results at once, with at least this many threads.
_BUSY_RESULTS: Final = 2048
_BUSY_THREADS: Final = 128


class Device(NamedTuple):
    """The limits of a GPU.

    Attributes:
        threads: The maximum number of threads in a block.
        shared_bytes: The maximum size of shared memory in a block, in bytes.
        lanes: The number of threads that compute in step (warp, subgroup).
        units: The number of compute units that blocks are divided between.
        registers: The maximum number of registers per thread with which enough threads fit a compute unit.
        has_tensor_cores: Whether kernels may multiply float16 matrices with tensor cores.
    """

    threads: int
    shared_bytes: int
    lanes: int
    units: int
    registers: int
    has_tensor_cores: bool = False

    @classmethod
    def from_target(cls, target: tvm.target.Target) -> Device:
        """Return the limits of a target; limits that it does not state are the minimum of such GPUs."""

        def limit(name: str, minimum: int) -> int:
            value = target.attrs.get(name)
            return int(value) if value is not None and int(value) > 1 else minimum

        arch = str(target.attrs.get("arch", "")).rstrip("af")
        return cls(
            threads=limit("max_threads_per_block", _THREADS),
            shared_bytes=limit("max_shared_memory_per_block", _SHARED_BYTES),
            lanes=limit("thread_warp_size", _LANES),
            units=_CUDA_UNITS.get(arch, _UNITS),
            registers=_REGISTERS.get(str(target.kind.name), _FEW_REGISTERS),
            has_tensor_cores=arch.removeprefix("sm_").isdigit() and int(arch[3:]) >= _TENSOR_CORES,
        )

    def estimate_time(self, blocks: int, threads: int, work: float, results: int) -> float:
        """Return the relative time of blocks whose threads each do `work` for `results` results.

        A compute unit with few threads idles while they wait for memory, unless each thread computes
        several results (Volkov, Better performance at lower occupancy, 2010).
        """
        on_each = -(-blocks // self.units) * threads
        return work * max(on_each, _BUSY_RESULTS // results, _BUSY_THREADS)


# ---------------------------------------------------------------- matmuls

VECTOR: Final = 4
"""The float32 values that a thread loads or stores at once: 16 bytes."""

# The share of multiplications among the instructions of a thread with this many results.
_EFFICIENCY: Final = {4: 0.45, 8: 0.65, 16: 0.85, 32: 0.95, 64: 1.0}
# Loading an element from global memory takes as long as this many multiply-adds.
_LOAD_COST: Final = 8
_MORE_REGISTERS: Final = 32
# How many multiply-adds a compute unit starts at once, and the latency of GPU memory, in multiply-adds of one pipeline.
# The values of a step are prefetched during the previous step.
_PIPELINES: Final = 128
_WAIT: Final = 800
_GROUPS: Final = (1, 2, 4, 8)


class Tile(NamedTuple):
    """The part of a result that a block of `down` times `across` threads computes.

    There may be several such groups of threads; each adds up a part of the depth.
    """

    rows: int
    columns: int
    down: int
    across: int
    groups: int = 1

    @property
    def threads(self) -> int:
        """The number of threads in a group."""
        return self.down * self.across

    @property
    def results(self) -> int:
        """The number of results per thread."""
        return self.rows * self.columns // self.threads


TILES: Final = (
    Tile(128, 128, 16, 16),
    Tile(128, 64, 16, 16),
    Tile(64, 128, 8, 32),
    Tile(64, 64, 8, 16),
    Tile(128, 32, 16, 8),
    Tile(32, 128, 4, 32),
    Tile(32, 64, 8, 16),
    Tile(64, 32, 16, 8),
    Tile(16, 128, 4, 32),
    Tile(16, 64, 4, 16),
    Tile(32, 32, 8, 8),
    Tile(16, 32, 8, 8),
    Tile(32, 16, 16, 4),
    Tile(16, 16, 16, 4),
)
"""The tiles that are tried, the largest first."""


def choose_depth(depth: int) -> int:
    """Return the depth in shared memory at a time: the one with the least padding, then the largest."""
    return min((16, 8, 4), key=lambda part: (-(-depth // part) * part, -part))


def choose_tile(lengths: dict[str, int], depth: int, device: Device) -> Tile | None:
    """Return the tile with the shortest estimated time; None if none fits a GPU."""

    def estimate(tile: Tile) -> float:
        blocks = lengths["batch"] * math.prod(
            -(-lengths[kind] // size)
            for kind, size in (("row", tile.rows), ("column", tile.columns))
        )
        loads = _LOAD_COST * (tile.rows + tile.columns) / tile.threads
        work = depth * (tile.results / _EFFICIENCY[tile.results] + loads)
        steps = -(-lengths["depth"] // (depth * tile.groups))
        on_each = -(-blocks // device.units) * tile.groups * tile.threads
        return steps * max(work * on_each / _PIPELINES, _WAIT)

    return min(_list_tiles(depth, device), key=estimate, default=None)


def _list_tiles(depth: int, device: Device) -> Iterator[Tile]:
    """Yield the tiles that fit a GPU; with many registers, the largest blocks rarely run."""
    for tile in (tile._replace(groups=groups) for groups in _GROUPS for tile in TILES):
        sums = tile.rows * tile.columns if tile.groups > 1 else 0
        floats = tile.groups * ((depth + VECTOR) * (tile.rows + tile.columns) + sums)
        # the results, the multiplicands of this step and of the next one, and addresses
        registers = tile.results + VECTOR * (tile.rows // tile.down) + _MORE_REGISTERS
        if (
            4 * tile.threads <= device.threads
            # each thread adds up at least one result over all groups
            and tile.groups <= tile.results
            and 2 * tile.groups * tile.threads <= device.threads
            and 4 * floats <= device.shared_bytes
            and registers <= device.registers
        ):
            yield tile


# ---------------------------------------------------------------- tensor cores

SIDE: Final = 16
"""The number of rows, columns and terms in a matmul on tensor cores."""
WARP: Final = 32
"""The number of threads in a warp."""

# Bytes of an element of an operand (float16) and of a result (float32).
_BYTES: Final = 2
_RESULT_BYTES: Final = 4
ROW_OFFSET: Final = SIDE // 2
"""The padding of rows in shared memory: rows that begin in different banks are loaded at once."""
# At least this share of the multiplied values must not be padding.
_MIN_USE: Final = 0.25
# The number of cycles that threads wait for copies to shared memory.
_WAIT_FOR_COPIES: Final = 100

WARP_TILES: Final = (
    Tile(128, 128, 2, 4),
    Tile(128, 64, 4, 2),
    Tile(64, 128, 2, 4),
    Tile(64, 64, 2, 2),
    Tile(32, 128, 2, 2),
    Tile(128, 32, 4, 1),
    Tile(64, 32, 4, 1),
    Tile(32, 64, 2, 2),
    Tile(16, 128, 1, 4),
    Tile(32, 32, 2, 2),
    Tile(16, 64, 1, 4),
)
"""The tiles that are tried, the largest first; their threads are warps."""


def choose_warp_tile(lengths: dict[str, int], device: Device) -> tuple[Tile, int] | None:
    """Return the fastest tile for tensor cores by estimate, and the depth in shared memory."""
    return min(
        _list_warp_tiles(lengths, device),
        key=lambda choice: _estimate_warps(lengths, choice[0], choice[1], device),
        default=None,
    )


def _list_warp_tiles(lengths: dict[str, int], device: Device) -> Iterator[tuple[Tile, int]]:
    """Yield (tile, depth in shared memory) pairs that fit a GPU and need little padding."""
    for tile, depth in itertools.product(WARP_TILES, (2 * SIDE, SIDE)):
        sizes = {"row": tile.rows, "column": tile.columns, "depth": depth}
        use = math.prod(
            lengths[kind] / (-(-lengths[kind] // size) * size) for kind, size in sizes.items()
        )
        left = _BYTES * tile.rows * (depth + ROW_OFFSET)
        right = _BYTES * depth * (tile.columns + ROW_OFFSET)
        result = _RESULT_BYTES * SIDE * tile.down * tile.columns
        if (
            tile.threads * WARP <= device.threads
            and left + right + result <= device.shared_bytes
            and use >= _MIN_USE
            # TVM would put a smaller float32 result into an operand's buffer, and fail to address it
            and result > max(left, right)
        ):
            yield tile, depth


def _estimate_warps(lengths: dict[str, int], tile: Tile, depth: int, device: Device) -> float:
    """Return the relative time of a matmul with a tile.

    For a depth of 16, a compute unit of an A100 takes 4 cycles to multiply two squares, 4 to load a square
    from shared memory, and 1 to load 64 bytes from GPU memory.
    """
    blocks = lengths["batch"] * math.prod(
        -(-lengths[kind] // size) for kind, size in (("row", tile.rows), ("column", tile.columns))
    )
    down, across = tile.rows // tile.down // SIDE, tile.columns // tile.across // SIDE
    cycles = 4 * tile.threads * (down * across + down + across) + (tile.rows + tile.columns) / 2
    steps = -(-lengths["depth"] // depth)
    work = steps * (cycles * depth / SIDE + _WAIT_FOR_COPIES)
    threads = tile.threads * WARP
    return device.estimate_time(
        blocks, threads, work / threads, tile.rows * tile.columns // threads
    )


# ---------------------------------------------------------------- attention


class AttentionSizes(NamedTuple):
    """The sizes of attention: `batch` matrices of `queries` times `keys` scores.

    A query or key has `depth` elements, a value has `values`.
    """

    batch: int
    queries: int
    keys: int
    depth: int
    values: int


# The number of registers that a thread needs besides accumulators and operands, such as for addresses.
_ATTENTION_REGISTERS: Final = 20
# An exponential takes as long as this many multiplications.
_EXPONENTIAL_COST: Final = 16
# A barrier for all threads of a block takes as long as this many multiplications.
_WAIT_COST: Final = 100


class AttentionTile(NamedTuple):
    """A block of `down` threads along queries, and `across` along keys and elements of a result.

    A thread computes the scores of `rows` queries and `columns` keys at once, and `values` elements of each result.
    """

    rows: int
    columns: int
    values: int
    down: int
    across: int

    @property
    def threads(self) -> int:
        """The number of threads in a block."""
        return self.down * self.across

    @property
    def queries(self) -> int:
        """The number of queries in a block."""
        return self.rows * self.down

    @property
    def keys(self) -> int:
        """The number of keys whose scores a block computes at once."""
        return self.columns * self.across

    @property
    def query_stride(self) -> int:
        """The stride of rows with a value for each query in shared memory, padded against bank conflicts."""
        return self.queries + VECTOR

    @property
    def key_stride(self) -> int:
        """The stride of rows with a value for each key in shared memory, padded likewise."""
        return self.keys + VECTOR

    @property
    def value_stride(self) -> int:
        """The distance between the values of two keys in shared memory, in elements."""
        return self.values * self.across

    def shared_sizes(self, depth: int) -> tuple[int, int, int, int]:
        """Return the elements in shared memory: queries, keys or values, weights, and partial sums."""
        return (
            depth * self.query_stride,
            max(depth * self.key_stride, self.keys * self.value_stride),
            self.keys * self.query_stride,
            self.queries * self.across,
        )


def choose_attention_tile(sizes: AttentionSizes, device: Device) -> AttentionTile | None:
    """Return the tile with the shortest estimated time; None if none fits the GPU."""

    def estimate(tile: AttentionTile) -> float:
        blocks = sizes.batch * -(-sizes.queries // tile.queries)
        scores, results = tile.rows * tile.columns, tile.rows * tile.values
        products = sizes.depth * (scores + tile.rows + tile.columns)
        products += tile.keys * (results + tile.rows + tile.values)
        copied = tile.keys * (sizes.depth + sizes.values) / tile.threads
        work = products + _EXPONENTIAL_COST * scores + _LOAD_COST * copied + 3 * _WAIT_COST
        steps = -(-sizes.keys // tile.keys)
        return device.estimate_time(blocks, tile.threads, steps * work, results)

    return min(_list_attention_tiles(sizes, device), key=estimate, default=None)


def _list_attention_tiles(sizes: AttentionSizes, device: Device) -> Iterator[AttentionTile]:
    """Yield the tiles that fit a GPU; with many registers, the largest blocks rarely run."""
    for across, down, rows, columns in itertools.product(
        (4, 8, 16, 32), (4, 8, 16), (2, 4), (1, 2, 4)
    ):
        values = -(-sizes.values // across)
        values = values if values in (1, 2) else -(-values // VECTOR) * VECTOR
        tile = AttentionTile(rows=rows, columns=columns, values=values, down=down, across=across)
        sums = rows * (columns + values + 2)
        if (
            tile.threads >= device.lanes
            and 4 * tile.threads <= device.threads
            and sums + 2 * VECTOR + _ATTENTION_REGISTERS <= device.registers
            and 4 * sum(tile.shared_sizes(sizes.depth)) <= device.shared_bytes
        ):
            yield tile
