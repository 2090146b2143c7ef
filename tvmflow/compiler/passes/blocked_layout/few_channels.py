"""Convolutions with few channels in their result, which would leave most lanes of its vectors empty.

Neighboring pixels become channels: one pixel in place of s·t has their channels after each other. Its
kernel is larger, with zeros for the data that a pixel does not read, and moves s and t times as far. Three
channels of 7×7 taps are computed with 64 multiplications of vectors for four pixels, in place of 196.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.blocked_layout.taps import Image, Window

# The larger kernel must save so much of the multiplications of vectors.
_MAX_SHARE: Final = 0.75
# Moving one number to its pixel takes as long as so many multiplications of vectors.
_MOVE_COST: Final = 4


def choose_phases(
    image: Image, kernel: Sequence[int], window: Window, block: int, share: float
) -> tuple[int, ...] | None:
    """Return how many pixels along each axis become channels; None where that is not faster.

    Args:
        image: The extents of data and result.
        kernel: The shape (o, i, …) of the weights.
        window: The movement of the kernel.
        block: The channels in a block.
        share: The share of the multiplications of a direct convolution that another method needs.
    """
    outputs, inputs, *taps = kernel
    if 2 * outputs > block or max(window.dilation) > 1:
        return None

    def cost(phases: Sequence[int]) -> int:
        blocks = -(-math.prod(phases) * outputs // block)
        axes = zip(image.result, taps, phases, window.strides, strict=True)
        sizes = (-(-size // s) * (count + (s - 1) * step) for size, count, s, step in axes)
        return blocks * inputs * math.prod(sizes)

    sizes = (range(1, min(block // outputs, size) + 1) for size in image.result)
    candidates = [c for c in itertools.product(*sizes) if math.prod(c) * outputs <= block]
    best = min(candidates, key=cost)
    moved = _MOVE_COST * outputs * math.prod(image.result)
    limit = min(_MAX_SHARE, share) * cost([1] * len(taps))
    return best if cost(best) + moved < limit else None


def pad_kernel(
    rewriter: LayoutRewriter, kernel: Any, window: Window, image: Image, phases: Sequence[int]
) -> tuple[Any, Window]:
    """Return the weights (s·t·o, i, …) and the window of the larger kernel.

    Args:
        rewriter: The rewriter.
        kernel: Weights (o, i, …).
        window: The movement of the kernel.
        image: The extents of data and result.
        phases: How many pixels along each axis become channels.
    """
    rank = len(phases)
    moved = rewriter.emit(relax.op.concat(list(_move(rewriter, kernel, window, phases)), 0))
    strides = [s * step for s, step in zip(phases, window.strides, strict=True)]
    rows = [-(-size // s) for size, s in zip(image.result, phases, strict=True)]
    before = window.padding[:rank]
    axes = zip(rows, strides, ir.known_shape(moved)[2:], image.data, before, strict=True)
    after = [(n - 1) * step + taps - size - pad for n, step, taps, size, pad in axes]
    return moved, Window(strides, [*before, *after], [1] * rank)


def _move(
    rewriter: LayoutRewriter, kernel: Any, window: Window, phases: Sequence[int]
) -> Iterator[Any]:
    """Emit, for each pixel that becomes channels, the weights with zeros around them."""
    for phase in itertools.product(*map(range, phases)):
        widths = [0, 0, 0, 0]
        for index, count, step in zip(phase, phases, window.strides, strict=True):
            widths += [index * step, (count - 1 - index) * step]
        yield rewriter.emit(relax.op.nn.pad(kernel, widths))
