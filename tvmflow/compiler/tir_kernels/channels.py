"""Channels of blocked tensors, copied to other places: what concatenation, slices and shuffles of channels do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.cpu_model import MIN_PARALLEL_ELEMENTS, CpuModel
from tvmflow.compiler.tir_kernels.definitions import declare_buffer, define_kernel, flatten

Indices = np.ndarray[Any, np.dtype[np.int64]]

_FLOAT: Final = "float32"
_TABLE: Final = "int32"
# The pixels of a part of the work: their blocks stay in the first-level cache while each group of lanes is copied.
_PIXELS: Final = 64


class Sources(NamedTuple):
    """The source of each channel of a result.

    Attributes:
        tensors: The position of its tensor.
        channels: Its channel in the tensor.
    """

    tensors: Indices
    channels: Indices

    @classmethod
    def of_tensor(cls, channels: int) -> Sources:
        """Return the sources of a tensor that is copied as it is."""
        return cls(np.zeros(channels, np.int64), np.arange(channels))

    def select(self, channels: Indices) -> Sources:
        """Return the sources of some channels of the result."""
        return Sources(self.tensors[channels], self.channels[channels])

    def first_block(self, block: int) -> int | None:
        """Return the first block of a tensor of which the result is a range of whole blocks; None if it is none."""
        start, count = int(self.channels[0]), len(self.channels)
        is_range = np.array_equal(self.channels, np.arange(start, start + count))
        is_whole = is_range and start % block == 0 and count % block == 0
        return start // block if is_whole and len(set(self.tensors)) == 1 else None


def copy_channels(shapes: Sequence[Sequence[int]], sources: Sources, cpu: CpuModel) -> Any:
    """Return a kernel that copies channels of blocked tensors, and the table that it reads.

    Args:
        shapes: The shapes (n, c/b, …, b) of the tensors.
        sources: Where each channel of the result comes from.
        cpu: The CPU.

    Returns:
        The kernel, whose parameters are the tensors, the table and the result; the table (groups
        of lanes of the result, 2), with the position of a group's tensor, or -1 for zeros, and the
        place of its first number in an image of the tensor; and the shape of the result.
    """
    n, _, *size, block = shapes[0]
    result = (n, -(-len(sources.channels) // block), *size, block)
    lanes = _list_lanes(sources, math.prod(size), block)
    width = _find_width(lanes, block)
    table = lanes[::width].astype(_TABLE)
    with define_kernel("copy_channels") as builder:
        parameters = [*((shape, _FLOAT) for shape in shapes), (table.shape, _TABLE)]
        names = [*(f"x{position}" for position in range(len(shapes))), "table", "out"]
        parameters.append((result, _FLOAT))
        buffers = [
            T.arg(name, declare_buffer(shape, dtype))
            for name, (shape, dtype) in zip(names, parameters, strict=True)
        ]
        flat = [
            flatten(buffer, shape, dtype)
            for buffer, (shape, dtype) in zip(buffers, parameters, strict=True)
        ]
        _emit(flat, [math.prod(shape[1:]) for shape in shapes], result, width, cpu)
    return builder.get(), table, result


def _list_lanes(sources: Sources, pixels: int, block: int) -> Any:
    """Return the tensor of each lane of the result's blocks, and the place of its first pixel: (lanes, 2)."""
    lanes = np.full((-(-len(sources.channels) // block) * block, 2), -1, np.int64)
    outer, lane = np.divmod(sources.channels, block)
    lanes[: len(outer)] = np.stack([sources.tensors, outer * pixels * block + lane], axis=1)
    return lanes


def _find_width(lanes: Any, block: int) -> int:
    """Return how many lanes of the result come from as many lanes next to each other, everywhere."""
    width = block
    while width > 1:
        groups = lanes.reshape(-1, width, 2)
        expected = groups[:, :1, :] + np.stack([np.zeros(width), np.arange(width)], axis=1)
        is_zero = np.all(groups[:, :, 0] == -1, axis=1)
        is_run = np.all(groups == expected, axis=(1, 2)) & (groups[:, 0, 0] >= 0)
        # lanes of one block
        is_run &= groups[:, 0, 1] % block + width <= block
        if np.all(is_zero | is_run):
            break
        width //= 2
    return width


def _emit(
    buffers: Sequence[Any], sizes: Sequence[int], result: Sequence[int], width: int, cpu: CpuModel
) -> None:
    """Emit the loops of the kernel; `sizes` are those of an image of each tensor."""
    *tensors, table, out = buffers
    n, blocks, *size, block = result
    pixels, groups = math.prod(size), block // width
    parts = -(-pixels // _PIXELS)

    def copy(tensor: Any, first: Any, target: Any, count: Any) -> None:
        with T.serial(count) as pixel, T.vectorized(width) as lane:
            offset = pixel * block + lane
            value = T.float32(0) if tensor is None else tirx.BufferLoad(tensor, [first + offset])
            T.buffer_store(out, value, [target + offset])

    is_parallel = math.prod(result) >= MIN_PARALLEL_ELEMENTS and cpu.cores > 1
    loop: AbstractContextManager[Any] = (T.parallel if is_parallel else T.serial)(
        n * blocks * parts
    )
    with loop as part, T.serial(groups) as group:
        first = part % parts * _PIXELS
        count = tirx.min(_PIXELS, pixels - first) if pixels % _PIXELS else min(_PIXELS, pixels)
        entry = (part // parts % blocks * groups + group) * 2
        target = (part // parts * pixels + first) * block + group * width
        source = tirx.BufferLoad(table, [entry])
        place = tirx.BufferLoad(table, [entry + 1]) + first * block
        for position, tensor in enumerate([*tensors, None]):
            with T.If(source == (position if tensor is not None else -1)), T.Then():
                image = 0 if tensor is None else part // (parts * blocks) * sizes[position]
                copy(tensor, image + place, target, count)
