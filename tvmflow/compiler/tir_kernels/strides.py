"""Strided views: the matrices of a tensor after reshapes, transposes, slices and broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tvmflow.compiler.contraction.packed import positive
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, same_size, simplify


class Operand(NamedTuple):
    """A tensor that a kernel reads, and where the matrices of the batch lie in it."""

    shape: tuple[IrSize, ...]
    dtype: str
    matrices: StridedMatrices


Mode = tuple[IrSize, IrSize]
"""The (length, stride) of a mode of a mixed-radix index, as in CuTe layouts."""


class StridedMatrices(NamedTuple):
    """The offsets of the elements of a batch of matrices, in elements from the start of a buffer.

    `offset` is the offset of the first element; `row` and `column` are the strides of rows and columns. `modes` are
    the modes of a matrix's mixed-radix index, the lowest first. All lengths and strides may be dynamic.
    """

    offset: IrSize
    modes: tuple[Mode, ...]
    row: IrSize
    column: IrSize

    def offset_of(self, matrix: Any, row: Any, column: Any) -> Any:
        """Return the offset of an element; the arguments are values or TIR expressions."""
        offset, divisor = self.offset + row * self.row + column * self.column, 1
        for position, (length, stride) in enumerate(self.modes):
            index = matrix // positive(divisor) if is_dynamic(divisor) or divisor > 1 else matrix
            if position < len(self.modes) - 1:
                index = index % positive(length)
            if is_dynamic(stride) or stride:
                offset = offset + index * stride
            divisor *= length
        return offset

    @property
    def repeats(self) -> int:
        """The known number of consecutive matrices that are the same."""
        length, stride = self.modes[0] if self.modes else (1, 1)
        return int(length) if not is_dynamic(length) and same_size(stride, 0) else 1


class StridedView(NamedTuple):
    """A view of a tensor: an offset in elements, and axes.

    An axis is a sequence of modes, the highest first; it is empty for an axis of length 1.
    """

    offset: IrSize
    axes: tuple[tuple[Mode, ...], ...]

    @classmethod
    def of_tensor(cls, shape: Sequence[IrSize]) -> StridedView:
        """Return the view of a whole tensor."""
        axes: list[tuple[Mode, ...]] = []
        stride: IrSize = 1
        for size in reversed(shape):
            axes.insert(0, () if same_size(size, 1) else ((size, stride),))
            stride = stride * size
        return cls(0, tuple(axes))

    def reshape(self, shape: Sequence[IrSize]) -> StridedView | None:
        """Return the view in another shape; None if that is not a view."""
        modes = [mode for axis in self.axes for mode in axis]
        axes = []
        for size in shape:
            taken = _take_modes(modes, size)
            if taken is None:
                return None
            axes.append(taken)
        return None if modes else self._replace(axes=tuple(axes))

    def permute(self, order: Sequence[int]) -> StridedView:
        """Return the view with its axes in another order."""
        return self._replace(axes=tuple(self.axes[axis] for axis in order))

    def broadcast(self, shape: Sequence[IrSize]) -> StridedView:
        """Return the view broadcast to a shape, which repeats axes of length 1 and adds outer axes."""
        missing = ((),) * (len(shape) - len(self.axes))
        axes = (
            axis or (() if same_size(size, 1) else ((size, 0),))
            for axis, size in zip((*missing, *self.axes), shape, strict=True)
        )
        return self._replace(axes=tuple(axes))

    def cut(self, axis: int, begin: int, step: int, length: int) -> StridedView | None:
        """Return the view sliced along an axis with one mode or of length 1; None for other axes."""
        modes = _merge_modes(self.axes[axis])
        if len(modes) != 1:
            return self if not modes and (begin, length) == (0, 1) else None
        [(_, stride)] = modes
        axes = list(self.axes)
        axes[axis] = ((length, stride * step),) if length > 1 else ()
        return StridedView(self.offset + begin * stride, tuple(axes))

    def matrices(self, batch: Sequence[IrSize]) -> StridedMatrices | None:
        """Return the matrices of the last two axes; None if one of these axes has no single stride.

        The outer axes are broadcast to the shape of the batch.
        """
        *outer, rows, columns = map(_merge_modes, self.axes)
        if max(len(rows), len(columns)) > 1:
            return None
        row, column = (axis[0][1] if axis else 0 for axis in (rows, columns))
        spread = StridedView(0, tuple(outer)).broadcast(batch)
        modes = _merge_modes(mode for axis in spread.axes for mode in axis)
        return StridedMatrices(self.offset, modes[::-1], row, column)


def _take_modes(modes: list[Mode], size: IrSize) -> tuple[Mode, ...] | None:
    """Remove and return the highest modes that multiply to `size`, splitting the last; None if none do."""
    taken: list[Mode] = []
    while not same_size(size, 1):
        if not modes:
            return None
        length, stride = modes.pop(0)
        if (rest := _divide(size, length)) is not None:
            taken.append((length, stride))
            size = rest
        elif (inner := _divide(length, size)) is not None:
            taken.append((size, stride * inner))
            modes.insert(0, (inner, stride))
            size = 1
        else:
            return None
    return tuple(taken)


def _divide(size: IrSize, divisor: IrSize) -> IrSize | None:
    """Return the quotient if it is an integer for all values of the dimensions; else None."""
    quotient = simplify(size // divisor)
    return quotient if same_size(quotient * divisor, size) else None


def _merge_modes(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Merge adjacent modes that one stride can step through; the highest mode comes first.

    They merge if the outer stride is the inner stride times the inner length.
    """
    merged: list[Mode] = []
    for length, stride in modes:
        if merged and same_size(merged[-1][1], stride * length):
            merged[-1] = (merged[-1][0] * length, stride)
        else:
            merged.append((length, stride))
    return tuple(merged)


def contiguous(shape: Sequence[IrSize], axes: Sequence[int]) -> StridedMatrices:
    """Return the strides of matrices in a contiguous tensor that is stored with its axes permuted."""
    written = [shape[axis] for axis in axes]
    order = sorted(range(len(axes)), key=axes.__getitem__)
    strides = StridedView.of_tensor(written).permute(order).matrices(shape[:-2])
    assert strides is not None, "a permuted tensor has strides"
    return strides
