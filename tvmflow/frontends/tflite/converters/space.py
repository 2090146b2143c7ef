"""Operators that move pixels between the axes of images, their channels and the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from tvmflow.frontends.tflite._operation import Converter, Operation


def _depth_to_space(operation: Operation) -> None:
    block = operation.options["block_size"]
    value = operation.graph.add("DepthToSpace", operation.real(first=True), blocksize=block)
    operation.write(value, first=True)


def _space_to_depth(operation: Operation) -> None:
    block = operation.options["block_size"]
    value = operation.graph.add("SpaceToDepth", operation.real(first=True), blocksize=block)
    operation.write(value, first=True)


def _space_to_batch(operation: Operation) -> None:
    """Convert SPACE_TO_BATCH_ND by its definition: padded, cut in blocks, whose pixels become batches."""
    graph, value = operation.graph, operation.real()
    blocks, widths = operation.integers(1), operation.constant(2)
    count = len(blocks)
    amounts = np.zeros((value.rank, 2), np.int64)
    amounts[1 : 1 + count] = widths
    if amounts.any():
        value = graph.add("Pad", value, graph.integers(amounts.T.ravel().tolist()))
    batch, *sizes = value.shape
    cut = [n for size, block in zip(sizes, blocks, strict=False) for n in (size // block, block)]
    rest = sizes[count:]
    value = graph.reshape(value, [batch, *cut, *rest])
    inner, outer = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    last = range(2 * count + 1, 2 * count + 1 + len(rest))
    value = graph.transpose(value, [*inner, 0, *outer, *last])
    shape = [batch * math.prod(blocks), *cut[::2], *rest]
    operation.write(graph.reshape(value, shape))


def _batch_to_space(operation: Operation) -> None:
    """Convert BATCH_TO_SPACE_ND by its definition: batches become pixels of blocks, and the edges are cut off."""
    graph, value = operation.graph, operation.real()
    blocks, crops = operation.integers(1), operation.constant(2)
    count, batch = len(blocks), value.shape[0] // math.prod(blocks)
    sizes, rest = value.shape[1 : 1 + count], value.shape[1 + count :]
    value = graph.reshape(value, [*blocks, batch, *sizes, *rest])
    pairs = [axis for i in range(count) for axis in (count + 1 + i, i)]
    last = range(2 * count + 1, 2 * count + 1 + len(rest))
    value = graph.transpose(value, [count, *pairs, *last])
    full = [size * block for size, block in zip(sizes, blocks, strict=True)]
    value = graph.reshape(value, [batch, *full, *rest])
    if crops.any():
        starts = crops[:, 0].tolist()
        ends = [size - int(end) for size, end in zip(full, crops[:, 1], strict=True)]
        bounds = (starts, ends, list(range(1, count + 1)))
        value = graph.add("Slice", value, *map(graph.integers, bounds))
    operation.write(value)


CONVERTERS: Final[Mapping[str, Converter]] = {
    "BATCH_TO_SPACE_ND": _batch_to_space,
    "DEPTH_TO_SPACE": _depth_to_space,
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "SPACE_TO_DEPTH": _space_to_depth,
}
