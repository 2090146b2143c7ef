"""Kernels over batches of matrices, of which some are packed for the tiles of `tir_kernels.tiles`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.cpu_model import BATCHES_PER_CORE
from tvmflow.compiler.tir_kernels.tiles import Workspace


class Operand(NamedTuple):
    """A tensor that the kernel reads.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its dtype.
        matrices: The matrices of the batch in it.
    """

    shape: tuple[int, ...]
    dtype: str
    matrices: StridedMatrices


class Batches(NamedTuple):
    """The parts of a kernel's work.

    Attributes:
        matrices: The number of matrices of the result.
        shared: How many consecutive ones share the packed matrices.
        blocks: The blocks of rows of each of them.
    """

    matrices: int
    shared: int
    blocks: int


def emit_batches(
    batches: Batches,
    sizes: Sequence[int],
    cores: int,
    pack: Callable[[Any, Sequence[Workspace], Any], None],
    compute: Callable[[Any, Any, Sequence[Workspace], Any], None],
) -> None:
    """Emit the loops over the parts of a kernel's work.

    Args:
        batches: The parts.
        sizes: The sizes of the packed matrices of a group that shares them.
        cores: The cores that the work is divided for.
        pack: Emits the packing for a group, into a slot of buffers.
        compute: Emits a block of rows of a matrix, with the packed matrices in a slot of buffers.
    """
    groups, is_parallel = batches.matrices // batches.shared, cores > 1
    if not is_parallel or groups >= BATCHES_PER_CORE * cores:
        with _loop(groups, is_parallel) as group:
            packed = [Workspace.allocate(size) for size in sizes]
            pack(group, packed, 0)
            with T.serial(batches.shared) as member, T.serial(batches.blocks) as block:
                compute(group * batches.shared + member, block, packed, 0)
        return
    packed = [Workspace.allocate(groups * size) for size in sizes]
    with _loop(groups, is_parallel) as group:
        pack(group, packed, group)
    with _loop(batches.matrices * batches.blocks, is_parallel) as part:
        matrix = part // batches.blocks
        compute(matrix, part % batches.blocks, packed, matrix // batches.shared)


def _loop(extent: int, is_parallel: bool) -> AbstractContextManager[Any]:
    loop: AbstractContextManager[Any] = (T.parallel if is_parallel else T.serial)(extent)
    return loop


# ---------------------------------------------------------------- matrices in memory
# How a kernel reads a tensor through reshapes, transposes, slices and broadcasts.

_Array = np.ndarray[Any, Any]


class StridedMatrices(NamedTuple):
    """The place of each element of a batch of matrices, in elements from the start of a buffer.

    Attributes:
        offset: The place of the first element.
        digits: Length and stride of each digit of a matrix's number, in mixed radix, the lowest first.
        row: The distance of rows.
        column: The distance of columns.
    """

    offset: int
    digits: tuple[tuple[int, int], ...]
    row: int
    column: int

    def place(self, matrix: Any, row: Any, column: Any) -> Any:
        """Return the place of an element; the arguments are numbers or TIR expressions."""
        place, divisor = self.offset + row * self.row + column * self.column, 1
        for position, (length, stride) in enumerate(self.digits):
            digit = matrix // divisor if divisor > 1 else matrix
            if position < len(self.digits) - 1:
                digit = digit % length
            if stride:
                place = place + digit * stride
            divisor *= length
        return place

    @property
    def repeats(self) -> int:
        """The number of consecutive matrices that are the same one."""
        length, stride = self.digits[0] if self.digits else (1, 1)
        return length if stride == 0 else 1


def find_strides(places: _Array, batch: Sequence[int]) -> StridedMatrices | None:
    """Return a tensor's places as strides; None if there are none.

    Args:
        places: The place of each element, of rank 2 or more; axes that are broadcast may have length 1.
        batch: The shape of the batch of matrices, to which the outer axes are broadcast.
    """
    if places.size == 0:
        return None
    first = int(places.flat[0])
    rows = places.reshape(-1, *places.shape[-2:])[0, :, 0] - first
    columns = places.reshape(-1, *places.shape[-2:])[0, 0] - first
    outer = places[..., 0, 0]
    row, column = (int(axis[1]) if len(axis) > 1 else 0 for axis in (rows, columns))
    expected = (
        outer[..., None, None]
        + row * np.arange(len(rows))[:, None]
        + column * np.arange(len(columns))
    )
    digits = _find_digits(np.broadcast_to(outer, batch).reshape(-1) - first)
    if digits is None or not np.array_equal(places, expected):
        return None
    return StridedMatrices(first, digits, row, column)


def _find_digits(table: _Array) -> tuple[tuple[int, int], ...] | None:
    """Return lengths and strides of digits whose products with their strides add up to a table of numbers."""
    digits = []
    while len(table) > 1:
        step = int(table[1] - table[0])
        lengths = (n for n in range(len(table), 1, -1) if len(table) % n == 0)
        length = next((n for n in lengths if _repeats(table.reshape(-1, n), step)), None)
        if length is None:
            return None
        digits.append((length, step))
        table = table[::length]
    return tuple(digits)


def _repeats(table: _Array, step: int) -> bool:
    return bool((table == table[:, :1] + step * np.arange(table.shape[1])).all())


def contiguous(shape: Sequence[int], axes: Sequence[int]) -> StridedMatrices:
    """Return the places of matrices whose axes are written in another order.

    Args:
        shape: The shape of the matrices with all outer axes.
        axes: The axes in the order of memory.
    """
    places = np.arange(math.prod(shape)).reshape([shape[axis] for axis in axes])
    strides = find_strides(places.transpose(np.argsort(axes)), shape[:-2])
    assert strides is not None, "a permuted tensor has strides"
    return strides
