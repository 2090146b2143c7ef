"""Block quantization of matmul weights to 4 or 8 bits, with a scale for each group.

No floats are accumulated by a BLAS library, so that every machine gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from tvmflow.core.types import Array
from tvmflow.graph import bfloat16
from tvmflow.graph.ir_operators import BlockQuantizedWeights

# The candidates for a group's largest value, as factors of the actual one; the best candidate is taken.
_FACTORS: Final = tuple(1 - step / 32 for step in range(14))
# This many weights are evaluated with a candidate scale at a time.
_COMPARED: Final = 1 << 15
# The error of a column is compensated within a block of about this many columns.
_BLOCK: Final = 512
# This share of the diagonal's mean is added to the diagonal of a Hessian, which might be singular otherwise.
_DAMPING: Final = 0.01
# Inputs are rounded to integers up to this value, so that their products are accumulated exactly.
_DATA_STEPS: Final = 2047
_BITS: Final = 4
_BYTE: Final = 8


class Groups(NamedTuple):
    """The format of block-quantized weights: `size` neighboring weights of a row share a scale."""

    bits: int = _BITS
    size: int = 32

    @property
    def largest(self) -> int:
        """The largest integer."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point."""
        return 1 << (self.bits - 1)


_DEFAULT: Final = Groups()


class BlockQuantizedIntegers(NamedTuple):
    """Block-quantized weights (rows, depth).

    Attributes:
        integers: uint8, padded to whole groups.
        scales: (rows, groups), bfloat16 values as float32.
        depth: The length of a row.
    """

    integers: Array
    scales: Array
    groups: Groups
    depth: int

    @property
    def bits(self) -> int:
        """The number of bits in an integer."""
        return self.groups.bits

    @property
    def operator(self) -> BlockQuantizedWeights:
        """The operator that dequantizes the weights."""
        bits, size = self.groups.bits, self.groups.size
        zero = self.groups.middle
        return BlockQuantizedWeights(
            bits=bits, group=size, depth=self.depth, zero=zero, rounds_data=False
        )

    def pack(self) -> dict[str, Array]:
        """Return the operands of `operator` by name, in the operator's order."""
        rows, count = self.scales.shape
        packed = self.integers
        if self.groups.bits < _BYTE:
            packed = packed[:, 0::2] | packed[:, 1::2] << 4
        bits = self.scales.view(np.uint32) >> bfloat16.BITS
        return {
            f"int{self.groups.bits}": packed.reshape(rows, count, -1),
            "scales": bits.astype(bfloat16.DTYPE),
        }

    def to_float(self) -> Array:
        """Return the dequantized weights, float32 (rows, depth)."""
        difference = self.integers.astype(np.float32) - np.float32(self.groups.middle)
        real: Array = difference * np.repeat(self.scales, self.groups.size, axis=1)
        return real[:, : self.depth]


def error_of(weights: Array, rounded: BlockQuantizedIntegers) -> float:
    """Return the relative root mean square error of rounded weights."""
    exact = weights.astype(np.float64)
    power = float(np.square(exact).sum())
    lost = float(np.square(rounded.to_float() - exact).sum())
    return float(np.sqrt(lost / power)) if power else 0.0


class InputProducts:
    """The Hessian XᵀX of a layer's squared error, accumulated over its inputs X.

    Only diagonal blocks of whole groups of `size` columns are kept, so memory grows linearly with `depth`. Inputs
    are rounded to integers, whose accumulation is exact in any order.
    """

    def __init__(self, depth: int, size: int) -> None:
        self._depth = depth
        self.blocks = [np.zeros((width, width)) for _, width in _list_blocks(depth, size)]
        self._width = len(self.blocks[0])
        self._factor = 0.0

    def add(self, data: Array) -> None:
        """Add inputs (…, depth); rows with NaN or infinity are left out."""
        rows = data.reshape(-1, self._depth).astype(np.float64)
        rows = rows[np.isfinite(rows).all(axis=1)]
        if not self._factor:
            # later batches may have twice the range of the first batch; larger values are clipped
            largest = float(np.abs(rows).max(initial=0.0))
            self._factor = _DATA_STEPS / (2 * largest) if largest else 0.0
        whole = np.clip(np.rint(rows * self._factor), -_DATA_STEPS, _DATA_STEPS)
        for index, block in enumerate(self.blocks):
            part = whole[:, index * self._width : (index + 1) * self._width]
            width = part.shape[1]
            block[:width, :width] += part.T @ part


def _list_blocks(depth: int, size: int) -> list[tuple[int, int]]:
    """Return the first column and the width of each block of whole groups."""
    padded = -(-depth // size) * size
    width = max(_BLOCK // size, 1) * size
    return [(start, min(width, padded - start)) for start in range(0, padded, width)]


def round_groups(
    weights: Array, groups: Groups = _DEFAULT, products: InputProducts | None = None
) -> BlockQuantizedIntegers:
    """Block-quantize weights (rows, depth): round to nearest, or with GPTQ if `products` is given.

    The scale of each group is the candidate with the least squared error. With `products`, later columns of a block
    compensate for the error of a rounded column (Frantar et al., GPTQ, 2022).
    """
    rows, depth = weights.shape
    count = -(-depth // groups.size)
    padded = np.zeros((rows, count * groups.size))
    padded[:, :depth] = np.where(np.isfinite(weights), weights, 0)
    integers = np.zeros(padded.shape, np.uint8)
    scales = np.ones((rows, count))
    for index, (start, width) in enumerate(_list_blocks(depth, groups.size)):
        importance, inverse = np.ones(width), None
        if products is not None:
            hessian = _dampen(products.blocks[index])
            importance, inverse = np.diagonal(hessian).copy(), _invert(hessian)
        for first in range(start, start + width, groups.size):
            group, last = first // groups.size, first + groups.size
            own = importance[first - start : last - start]
            # rows that are evaluated at a time
            size = max(_COMPARED // groups.size, 1)
            for some in (slice(begin, begin + size) for begin in range(0, rows, size)):
                part = padded[some, first:last]
                scales[some, group] = scale = _choose_scales(part, own, groups)
                if inverse is None:
                    integers[some, first:last] = _round(part, scale, groups)
            if inverse is None:
                continue
            scale = scales[:, group]
            for column in range(first, last):
                exact = padded[:, column].copy()
                integer = _round(exact[:, None], scale, groups)[:, 0]
                integers[:, column] = integer
                error = exact - (integer - groups.middle) * scale
                # later columns of the block compensate the error, and this column is eliminated from the inverse
                this, rest = column - start, slice(column - start + 1, None)
                factors = inverse[this, rest] / inverse[this, this]
                padded[:, column + 1 : start + width] -= error[:, None] * factors
                inverse[rest, rest] -= inverse[rest, this, None] * factors
    return BlockQuantizedIntegers(
        integers=integers, scales=scales.astype(np.float32), groups=groups, depth=depth
    )


def _round(weights: Array, scales: Array, groups: Groups) -> Array:
    integers = np.divide(weights, scales[:, None])
    np.rint(integers, out=integers)
    integers += groups.middle
    return np.clip(integers, 0, groups.largest, out=integers)


def _dampen(hessian: Array) -> Array:
    """Return a copy of a Hessian with a larger diagonal, so that it is invertible."""
    changed, diagonal = hessian.copy(), np.diagonal(hessian)
    mean = float(diagonal.mean()) or 1.0
    np.fill_diagonal(changed, np.where(diagonal > 0, diagonal, mean) + _DAMPING * mean)
    return changed


def _invert(matrix: Array) -> Array:
    """Return the inverse of a positive definite matrix, by elimination column by column."""
    inverse = matrix.astype(np.float64).copy()
    for pivot in range(len(inverse)):
        column = inverse[:, pivot].copy()
        row = inverse[pivot] / column[pivot]
        row[pivot] = 1 / column[pivot]
        column[pivot] = 0
        inverse[:, pivot] = 0
        inverse -= column[:, None] * row
        inverse[pivot] = row
    return inverse


def _choose_scales(weights: Array, importance: Array, groups: Groups) -> Array:
    best = np.full(len(weights), np.inf)
    scales = np.ones(len(weights))
    largest = np.abs(weights).argmax(axis=1)[:, None]
    extremes = np.take_along_axis(weights, largest, axis=1)
    for candidate in _list_candidates(weights, groups):
        scale = _to_bfloat16(candidate)
        # The error of the largest values already rules out many candidates: with 8 bits most of them.
        if (_sum_errors(extremes, scale, importance[largest], groups) >= best).all():
            continue
        sums = _sum_errors(weights, scale, importance, groups)
        is_better = sums < best
        best, scales = np.where(is_better, sums, best), np.where(is_better, scale, scales)
    return scales


def _sum_errors(weights: Array, scales: Array, importance: Array, groups: Groups) -> Array:
    """Return the squared errors of each row, summed with the importance of the columns as weights."""
    errors = _round(weights, scales, groups)
    errors -= groups.middle
    errors *= scales[:, None]
    errors -= weights
    np.square(errors, out=errors)
    errors *= importance
    return np.asarray(errors.sum(axis=1))


def _list_candidates(weights: Array, groups: Groups) -> Iterator[Array]:
    low, high = np.minimum(weights.min(axis=1), 0), np.maximum(weights.max(axis=1), 0)
    # the value with the largest magnitude may become the lowest integer, which has no positive counterpart
    extreme = np.where(-low > high, low, high)
    for factor in _FACTORS:
        yield extreme * (-factor / groups.middle)
        yield extreme * (factor / (groups.middle - 1))


def _to_bfloat16(scales: Array) -> Array:
    """Return scales rounded to bfloat16, with 1 in place of denormal, zero and infinite scales."""
    bits = scales.astype(np.float32).view(np.uint32)
    even = bits >> np.uint32(bfloat16.BITS) & np.uint32(1)
    bits = (bits + np.uint32(bfloat16.ROUNDING_BIAS) + even) & np.uint32(0xFFFF0000)
    rounded = bits.view(np.float32).astype(np.float64)
    is_usable = np.abs(rounded) >= np.finfo(np.float32).tiny
    return np.where(is_usable & np.isfinite(rounded), rounded, 1)
