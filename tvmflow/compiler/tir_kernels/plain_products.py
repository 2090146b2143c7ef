"""Products of weights and matrices as they lie in memory, stored with bias and activation.

The rows of a matrix are channels, its columns are pixels. A tile is `vectors` of columns times
`tile_rows`, which are rows of the weights (see `schedules.register_tiles`). The columns of a tile are
packed once for all rows, so that they stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.candidates import RegisterTile, choose_packing_tile
from tvmflow.compiler.contraction.machine import MIN_PARALLEL_PRODUCTS, CpuModel
from tvmflow.compiler.contraction.packed import FLOAT, Accumulators, allocate
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel

Activation = Callable[[Any], Any]
"""An accumulator -> the element of the result."""


class PlainProduct(NamedTuple):
    """Products of weights (outputs, depth) and some matrices, with bias and activations in order.

    The product of the extents of an image is the number of columns, at least those of a vector.
    """

    number: int
    outputs: int
    depth: int
    image: tuple[int, ...]
    has_bias: bool = False
    activations: tuple[Activation, ...] = ()

    @property
    def pixels(self) -> int:
        """The columns of each matrix."""
        return math.prod(self.image)


def make_kernel(product: PlainProduct, cpu: CpuModel) -> tvm.tirx.PrimFunc:
    """Return the kernel.

    Its parameters are the weights (⌈outputs/points⌉, depth, points), the matrices (number, depth, …),
    the bias (outputs) if there is one, and the result (number, outputs, …).
    """
    number, outputs, depth, image = product[:4]
    pixels = product.pixels
    tile_rows, vectors = choose_packing_tile(outputs, pixels, cpu)
    parameters = {
        "weights": ((-(-outputs // tile_rows), depth, tile_rows), FLOAT),
        "data": ((number, depth, *image), FLOAT),
        **({"bias": ((outputs,), FLOAT)} if product.has_bias else {}),
        "out": ((number, outputs, *image), FLOAT),
    }
    tiles, rest = divmod(-(-pixels // cpu.lanes), vectors)
    count = tiles + (rest > 0)
    work = number * outputs * depth * pixels
    is_parallel = cpu.cores > 1 and work >= MIN_PARALLEL_PRODUCTS
    loop = T.parallel if is_parallel else T.serial
    with define_flat_kernel("plain_product", parameters, has_root=False) as (builder, buffers):
        weights, data, *others, out = map(T.buffer_proxy, buffers)

        def multiply(corner: tuple[Any, Any], packed: Any, group: Any, shape: RegisterTile) -> None:
            """Emit the product of the first rows of a group and a tile that begins at a corner."""
            matrix, start = corner
            sums = Accumulators.allocate(*shape, cpu.lanes)
            for index, _, _ in sums.iterate():
                sums.buffer[index] = T.float32(0)
            with T.serial(depth) as k:
                sums.add(
                    lambda row: weights[(group * depth + k) * tile_rows + row],
                    lambda column: packed[k * (shape.vectors * cpu.lanes) + column],
                )
            for index, tile_row, column in sums.iterate():
                row = group * tile_rows + tile_row
                value = sums.buffer[index]
                for bias in others:
                    value = value + bias[row]
                for activation in product.activations:
                    value = activation(value)
                out[(matrix * outputs + row) * pixels + start + column] = value

        def emit(matrix: Any, start: Any, vectors: int) -> None:
            """Emit the product of all rows and some columns; `start` is the first of these."""
            width = vectors * cpu.lanes
            packed = allocate(depth * width)
            with T.serial(depth) as k, T.unroll(vectors) as v, T.vectorized(cpu.lanes) as lane:
                column = v * cpu.lanes + lane
                packed[k * width + column] = data[(matrix * depth + k) * pixels + start + column]
            groups, rows = divmod(outputs, tile_rows)
            with T.serial(groups) as group:
                multiply((matrix, start), packed, group, RegisterTile(tile_rows, vectors))
            if rows:
                multiply((matrix, start), packed, groups, RegisterTile(rows, vectors))

        with loop(number * count) as part:
            matrix, tile = part // count, part % count
            # the tail tile ends where the columns do: it overlaps the one before it
            width = vectors * cpu.lanes
            if not rest:
                emit(matrix, tirx.min(tile * width, pixels - width), vectors)
            else:
                with T.If(tile < tiles):
                    with T.Then():
                        emit(matrix, tile * width, vectors)
                    with T.Else():
                        emit(matrix, pixels - rest * cpu.lanes, rest)
    return builder.get()
