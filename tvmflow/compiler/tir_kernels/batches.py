"""Kernels over batches of matrices, of which some are packed for the tiles of `tir_kernels.tiles`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.cpu_model import BATCHES_PER_CORE
from tvmflow.compiler.tir_kernels.strided import StridedMatrices
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
