"""Images of 8 bits resized as Pillow does it: bit for bit, with integers alone, and without Pillow.

An output pixel is a weighted sum of the input pixels in its support, which grows with the factor
of the reduction (antialiasing). Rows are resized first, then columns, each rounded to 8 bits.
Weights have 22 fractional bits. Source: `src/libImaging/Resample.c` of Pillow. Pillow 13 resizes
columns first where the height is reduced much more than the width, which changes single levels; the
order here is the one of all versions before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WEIGHT_BITS: Final = 22
"""The fractional bits of a weight: 32 without 8 of the pixel and 2 for the sum."""


class _Filter(NamedTuple):
    """A kernel of resampling.

    It has a value at distances from an output pixel, and a distance beyond which it is 0.
    """

    value: Callable[[Array], Array]
    support: float


def _triangle(x: Array) -> Array:
    import numpy as np

    distance = np.abs(x)
    return np.where(distance < 1.0, 1.0 - distance, 0.0)


def _cubic(x: Array) -> Array:
    """Return the cubic convolution kernel of Keys with a = -0.5, with operations in Pillow's order."""
    import numpy as np

    a, distance = -0.5, np.abs(x)
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))


_FILTERS: Final[Mapping[str, _Filter]] = {
    "bilinear": _Filter(_triangle, 1.0),
    "bicubic": _Filter(_cubic, 2.0),
}
INTERPOLATIONS: Final = tuple(_FILTERS)
"""The names of the kernels of resampling."""

# So many output pixels share a matrix of weights, which is mostly zeros.
_BLOCK: Final = 32


def resize(image: Array, height: int, width: int, interpolation: str) -> Array:
    """Return an image in another size.

    Args:
        image: The pixels, uint8 `[height, width, channels]`.
        height: The new height in pixels.
        width: The new width in pixels.
        interpolation: One of `INTERPOLATIONS`.
    """
    resized = _resize_rows(image, width, interpolation)
    return _resize_rows(resized.swapaxes(0, 1), height, interpolation).swapaxes(0, 1)


def _resize_rows(image: Array, width: int, interpolation: str) -> Array:
    """Return an image with rows of another width."""
    import numpy as np

    height, old_width, channels = image.shape
    if old_width == width:
        return image
    starts, weights = _compute_weights(old_width, width, interpolation)
    resized = np.empty((height, width, channels), np.uint8)
    for first in range(0, width, _BLOCK):
        block = slice(first, first + _BLOCK)
        start = int(starts[block][0])
        matrix = _weight_matrix(starts[block] - start, weights[block])[: old_width - start]
        pixels = image[:, start : start + len(matrix)].swapaxes(1, 2)
        # all sums are integers below 2^53: a matrix product of float64 is exact, in any order
        sums = pixels.reshape(height * channels, -1).astype(np.float64) @ matrix
        rounded = (sums.astype(np.int64) + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS
        columns = rounded.clip(0, 255).reshape(height, channels, -1)
        resized[:, block] = columns.swapaxes(1, 2)
    return resized


def _weight_matrix(starts: Array, weights: Array) -> Array:
    """Return the weights `[output pixels, taps]` as float64 `[input pixels, output pixels]`."""
    import numpy as np

    count, taps = weights.shape
    matrix = np.zeros((int(starts[-1]) + taps, count))
    matrix[starts[:, None] + np.arange(taps), np.arange(count)[:, None]] = weights
    return matrix


def _compute_weights(size: int, new_size: int, interpolation: str) -> tuple[Array, Array]:
    """Return the first input pixel of each output pixel's support, and the weights from there on.

    Returns:
        int64 `[new_size]`, and int32 `[new_size, taps]`.
    """
    import numpy as np

    kernel = _FILTERS[interpolation]
    scale = size / new_size
    filter_scale = max(scale, 1.0)
    support = kernel.support * filter_scale
    centers = (np.arange(new_size) + 0.5) * scale
    # a conversion to integers rounds towards 0, as in C
    starts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + support + 0.5).astype(np.int64), size)
    taps = np.arange(math.ceil(support) * 2 + 1)
    positions = taps + starts[:, None]
    weights = kernel.value((positions - centers[:, None] + 0.5) * (1.0 / filter_scale))
    weights = np.where(positions < ends[:, None], weights, 0.0)
    total = np.zeros(new_size)
    for tap in taps:
        # the order of a sum decides its last bit
        total += weights[:, tap]
    weights = np.divide(weights, total[:, None], out=weights, where=total[:, None] != 0)
    fixed = weights * (1 << WEIGHT_BITS)
    return starts, (fixed + np.where(fixed < 0, -0.5, 0.5)).astype(np.int32)
