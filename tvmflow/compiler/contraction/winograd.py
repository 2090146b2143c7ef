"""Winograd convolutions of 3×3: costs of tiles, and the division of an image into blocks of tiles.

F(2×2, 3×3), F(4×2, 3×3) and F(4×4, 3×3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015,
arXiv:1509.09308. A tile of 2×2 takes 16 multiplications instead of 36, one of 4×2 24 instead of 72, one of 4×4 36
instead of 144; with stride 2, 25, 45 and 81.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Contraction, RegisterTile, multiply_add
from tvmflow.compiler.contraction.machine import FLOAT_BYTES, STRIPS_PER_CORE, CpuModel
from tvmflow.core.choices import DIRECT, tile_size
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, simplify

RECTANGLE: Final = 42
"""A tile of 4×2: over an axis of 7 pixels, two tiles of 4 waste as much as four of 2."""
SQUARES: Final = (2, 4)
"""The tiles with as many rows as columns, the smallest first."""
KERNEL: Final = 3
"""The number of rows and of columns of a kernel."""


class Costs(NamedTuple):
    """The constants of the cost model: times in vector multiplications, for each lane of a vector.

    Attributes:
        transforms: (tile size, stride) -> the time to transform the data or the result of a tile for one block of
            channels.
        memory: The time to read a vector of weights from memory.
        gain: A tile must be faster than the direct convolution by this factor.
    """

    transforms: Mapping[tuple[int, int], float]
    memory: float
    gain: float


_COSTS: Final = Costs({(2, 1): 9, (4, 1): 22, (2, 2): 25, (4, 2): 110}, memory=4, gain=1.1)
# For 16 registers, which cannot hold the 36 elements of a tile.
_SPILLED_COSTS: Final = _COSTS._replace(transforms={**_COSTS.transforms, (4, 1): 64})
# Assumption for 64-bit ARM: a core reads 2 bytes from memory in the time of a multiplication (3 GB/s on a Cortex-A72
# at 1.5 GHz; 10 GB/s on a Neoverse N1 at 2.6 GHz, which multiplies twice a cycle).
_LANE_COSTS: Final = _COSTS._replace(
    transforms={**_COSTS.transforms, (RECTANGLE, 1): 15, (RECTANGLE, 2): 55}, memory=2
)
# Padding columns must make the matmul faster by this factor.
_MIN_PADDING_GAIN: Final = 1.05


class Geometry(NamedTuple):
    """The sizes of a Winograd convolution over volumes; images are volumes with a depth of 1.

    Attributes:
        tile: The size of a tile of the result (see `choices.tile_size`).
        shape: Images, depth, height and width of the result.
        padding: Front, top, left.
        kernel_depth: The depth of the kernel.
        stride: The stride down the depth.
        dilation: The dilation down the depth.
        tile_columns: The columns of tiles are padded to a multiple of this (see `pad_columns`).
        is_separate: Whether tiles are transformed along one axis and then along the other. This takes fewer
            additions, but registers for all elements of a tile.
        step: The stride in height and width, 1 or 2; 2 only where transforms are separate.
    """

    tile: int
    shape: tuple[IrSize, IrSize, IrSize, IrSize]
    padding: tuple[int, int, int]
    kernel_depth: int = 1
    stride: int = 1
    dilation: int = 1
    tile_columns: int = 1
    is_separate: bool = False
    step: int = 1

    @property
    def edges(self) -> tuple[int, int]:
        """The rows and columns of an input tile."""
        rows, columns = ((size - 1) * self.step + KERNEL for size in tile_size(self.tile))
        return rows, columns

    @property
    def tiles(self) -> tuple[IrSize, IrSize]:
        """The rows and columns of tiles in one slice of the result."""
        sizes = zip(self.shape[2:], tile_size(self.tile), strict=True)
        rows, columns = (simplify(divide_up(n, size)) for n, size in sizes)
        return rows, simplify(divide_up(columns, self.tile_columns) * self.tile_columns)

    @property
    def slices(self) -> IrSize:
        """The depth of the data that the result reads, with padding."""
        return (self.shape[1] - 1) * self.stride + (self.kernel_depth - 1) * self.dilation + 1


def list_tiles(takes_lanes: bool) -> tuple[int, ...]:
    """Return the tile sizes to try, the smallest first; by-element instructions allow more."""
    return (2, RECTANGLE, 4) if takes_lanes else SQUARES


def costs_by_rule(has_few_registers: bool, takes_lanes: bool = False) -> Costs:
    """Return the constants of the rules' cost model.

    They depend on whether there are 16 registers, not 32, and whether instructions multiply by element.
    """
    if takes_lanes:
        return _LANE_COSTS
    return _SPILLED_COSTS if has_few_registers else _COSTS


class Work(NamedTuple):
    """The work of a convolution, from which its time is estimated.

    Weights come from memory, data from a cache.

    Attributes:
        tile: The size of a tile; 0 for a direct convolution.
        step: The stride in height and width.
        products: The number of vector multiplications.
        weights: The number of weights that are read; smaller types count as a part of a float32 element.
        transforms: The number of transforms of a tile for one block of channels, times the lanes of a vector.
    """

    tile: int
    step: int
    products: int
    weights: float
    transforms: int

    def estimate(self, costs: Costs) -> float:
        """Return the time in vector multiplications; multiplied by `gain` for a Winograd tile."""
        time = max(float(self.products), costs.memory * self.weights)
        if not self.tile:
            return time
        return costs.gain * (time + costs.transforms[self.tile, self.step] * self.transforms)


class Convolution(NamedTuple):
    """A convolution with groups of `inner` input channels, and the instructions that compute it directly.

    Such an instruction adds `terms` products to each result. `geometry.tile` is ignored.
    """

    geometry: Geometry
    out: int
    inner: int
    lanes: int
    terms: int = 1
    weight_bytes: int = 4
    groups: int = 1

    def rank_tiles(self, tiles: Sequence[int], costs: Costs) -> list[int]:
        """Return the tiles and 0 (direct convolution), ranked by estimated time."""

        def estimate(tile: int) -> float:
            return self.count_work(tile).estimate(costs) * (self.terms if tile else 1)

        return sorted((DIRECT, *tiles), key=estimate)

    def count_work(self, tile: int) -> Work:
        """Return the work with a tile size; 0 is a direct convolution."""
        geometry, lanes = self.geometry, self.lanes
        n, depth, height, width = geometry.shape
        inner_blocks, out_blocks = -(-self.inner // lanes), -(-self.out // lanes)
        # a direct convolution does not multiply the empty lanes of a single block
        is_one_block = not tile and self.terms == 1 and self.inner < lanes
        channels = self.inner if is_one_block else inner_blocks * lanes
        vectors = geometry.kernel_depth * channels * out_blocks
        weights = count_products(tile) * vectors * lanes * self.weight_bytes / 4
        if not tile:
            products = KERNEL**2 * vectors * n * depth * height * width
            return Work(tile, geometry.step, int(products), weights, transforms=0)
        own = geometry._replace(tile=tile)
        count = n * math.prod(own.tiles)
        data_blocks = self.groups * inner_blocks
        transforms = lanes * count * (own.slices * data_blocks + depth * out_blocks)
        products = math.prod(own.edges) * vectors * depth * count
        return Work(tile, geometry.step, int(products), weights, int(transforms))


def count_products(tile: int) -> int:
    """Return the number of elements in a transformed kernel; in the kernel for tile 0 (direct)."""
    return math.prod(size + KERNEL - 1 for size in tile_size(tile)) if tile else KERNEL**2


def pad_columns(geometry: Geometry, out_blocks: int, inner: int, cpu: CpuModel) -> Geometry:
    """Return a convolution, with columns of tiles added if no fast register tile divides them.

    A group has `out_blocks` blocks of output channels and `inner` input channels.
    """
    columns = geometry.tiles[1]
    # one register tile covers a whole row
    if candidates.holds_operands(RegisterTile(columns, 1), cpu):
        return geometry
    problem = Contraction(columns, out_blocks, inner, multiply_add(cpu))
    padded = candidates.pad_rows(problem, cpu, divides_rows=True, min_gain=_MIN_PADDING_GAIN)
    return geometry._replace(tile_columns=padded if padded > columns else 1)


# ---------------------------------------------------------------- division into parts

# Weights are read once for this many tiles; with fewer, reading them takes longer than multiplying.
_MIN_TILES: Final = 96
# The relative time of a matmul whose parts do not keep all cores busy.
_IMBALANCE: Final = 1.2
# The maximum number of rows in a register tile over a dynamic number of tiles: each possible tail adds loops to the
# code.
_MAX_DYNAMIC_ROWS: Final = 8
# With this many accumulators, multiplications hide the reads of weights from the second-level cache.
_ENOUGH_ACCUMULATORS: Final = 14


class TiledProduct(NamedTuple):
    """The matmuls of transformed data and weights: one for each element of a tile.

    Attributes:
        images, depth: The number of images, and the depth of the result.
        tiles: The rows and columns of tiles in a slice of the result.
        elements: The number of elements in a tile.
        channels: The number of values in the transformed data for one element of a tile.
        out_blocks, groups: The numbers of vectors of output channels, and of the groups that they are divided into.
        lanes: The number of values in a vector.
        weight_bytes: The size of the weights in float32.
    """

    images: int
    depth: int
    tiles: tuple[int, int]
    elements: int
    channels: int
    out_blocks: int
    groups: int
    lanes: int
    weight_bytes: int

    def count_bytes(self, vectors: int) -> int:
        """Return the size of a tile's data and of a number of vectors of its result, in bytes."""
        return self.elements * (self.channels + self.depth * vectors * self.lanes) * FLOAT_BYTES

    def estimate_cost(
        self, tile: RegisterTile, in_strips: bool, cpu: CpuModel
    ) -> tuple[float, int]:
        """Return a sort key: the relative time of a vector multiplication, then the accumulators."""
        time = 1 / candidates.estimate_packed_speed(tile, cpu)
        parts = self.out_blocks // tile.vectors
        is_balanced = in_strips or parts % cpu.cores == 0 or parts >= STRIPS_PER_CORE * cpu.cores
        return time * (1.0 if is_balanced else _IMBALANCE), tile.accumulators


class Split(NamedTuple):
    """The split of a convolution into parts.

    Attributes:
        rows: The number of rows of tiles that are computed together.
        tile: The register tile: tiles of the image times vectors of output channels.
        in_strips: True if parts of the image run in parallel; False if output channels do, because
            all weights together do not fit into a core's cache.
    """

    rows: int
    tile: RegisterTile
    in_strips: bool


def list_splits(product: TiledProduct, cpu: CpuModel) -> list[Split]:
    """Return all splits whose accumulators fit the registers, ranked by estimated cost."""
    in_strips = product.weight_bytes <= cpu.cached_weight_bytes
    splits = []
    for vectors in _list_divisors(product.out_blocks // product.groups):
        rows = _choose_rows(product, product.count_bytes(vectors), in_strips, cpu)
        for tile_rows in _list_divisors(rows * product.tiles[1]):
            tile = RegisterTile(tile_rows, vectors)
            if candidates.holds_operands(tile, cpu):
                splits.append(Split(rows, tile, in_strips))
    return sorted(splits, key=lambda split: product.estimate_cost(split.tile, in_strips, cpu))


def _list_divisors(extent: int) -> list[int]:
    return [size for size in range(1, extent + 1) if extent % size == 0]


def _choose_rows(product: TiledProduct, tile_bytes: int, in_strips: bool, cpu: CpuModel) -> int:
    """Return the number of rows of tiles to compute together; `tile_bytes`: a tile's data and result."""
    tile_rows, columns = product.tiles
    rows = _list_divisors(tile_rows)
    if in_strips:
        parts = STRIPS_PER_CORE * cpu.cores
        small = [
            count
            for count in rows
            if count * columns * tile_bytes <= cpu.cached_data_bytes
            and product.images * tile_rows // count >= parts
        ]
        return max(small, default=1)
    enough = [count for count in rows if count * product.depth * columns >= _MIN_TILES]
    return min(enough, default=tile_rows)


class DynamicBlocks(NamedTuple):
    """The division of a dynamic number of tiles.

    Attributes:
        limit: The maximum number of tiles in a block, a multiple of the rows of `tile`.
        parts: If blocks run in parallel, the number of blocks; there are more if a block would exceed `limit`.
        tile: The register tile: tiles of the image times vectors of output channels.
        in_blocks: True if blocks of tiles run in parallel; False if channels do.
        is_parallel: Whether anything runs in parallel.
    """

    limit: int
    parts: int
    tile: RegisterTile
    in_blocks: bool
    is_parallel: bool


def divide_dynamic(product: TiledProduct, cpu: CpuModel) -> DynamicBlocks:
    """Return the division of a dynamic number of tiles."""
    in_blocks = product.weight_bytes <= cpu.cached_weight_bytes
    tiles = [
        tile
        for vectors in _list_divisors(product.out_blocks)
        for tile_rows in range(1, _MAX_DYNAMIC_ROWS + 1)
        if candidates.holds_operands(tile := RegisterTile(tile_rows, vectors), cpu)
    ]

    def rate(tile: RegisterTile) -> tuple[float, int, int]:
        cost, accumulators = product.estimate_cost(tile, in_blocks, cpu)
        return cost, -min(accumulators, _ENOUGH_ACCUMULATORS), tile.rows

    tile = min(tiles, key=rate)
    limit = _MIN_TILES
    if in_blocks:
        limit = cpu.cached_data_bytes // product.count_bytes(tile.vectors)
    return DynamicBlocks(
        limit=max(limit // tile.rows, 1) * tile.rows,
        parts=STRIPS_PER_CORE * cpu.cores,
        tile=tile,
        in_blocks=in_blocks,
        is_parallel=cpu.cores > 1,
    )
