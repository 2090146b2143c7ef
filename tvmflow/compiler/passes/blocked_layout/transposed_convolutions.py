"""Transposed convolutions on blocked layouts.

A transposed convolution with strides (s, t) is computed as a convolution that gives the s·t
pixels between two pixels of its data as channels of one pixel, which are then interleaved:
rows s·q to s·q + s − 1 of the result read the same ⌈k/s⌉ rows of data, each with other rows
of the weights.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import blocked
from tvmflow.compiler.operators.blocked import Groups
from tvmflow.compiler.passes.blocked_layout import convolutions, direct_convolutions
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.blocked_layout.taps import Window


class _Geometry(NamedTuple):
    """The convolution behind a transposed one; one number for each spatial axis.

    Attributes:
        strides: The strides of the transposed convolution.
        kernel: The size of the convolution's kernel.
        padding: Its padding before and then after each axis.
        rows: The size of its result.
        offsets: How many pixels of the interleaved image to skip.
    """

    strides: list[int]
    kernel: list[int]
    padding: list[int]
    rows: list[int]
    offsets: list[int]


def rewrite_conv_transpose(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any
) -> relax.Expr | None:
    """Rewrite a transposed convolution without dilation."""
    window = Window.of(call)
    rank = len(window.strides)
    if not convolutions.is_supported(rewriter, call, "IO") or window.dilation != [1] * rank:
        return None
    size = list(ir.known_shape(call)[2:])
    geometry = _analyze(ir.known_shape(data)[2:], ir.known_shape(kernel)[2:], size, window)
    inner = Window([1] * rank, geometry.padding, [1] * rank)
    groups, dtype = int(call.attrs.groups), rewriter.context.weight_dtype
    name = f"conv{rank}d_transpose_NCHWc"
    flipped = _flip_kernel(rewriter, kernel, geometry, groups)
    if ir.is_depthwise(call):
        packed = convolutions.pack_depthwise_kernel(rewriter, flipped)
        weights = rewriter.cast(_move_phases(rewriter, packed, geometry, 1), dtype)
        pixels = rewriter.kernel(
            lambda x, w: blocked.depthwise_conv(x, w, *inner),
            f"depthwise_{name}",
            rewriter.to_blocked(data),
            weights,
        )
    else:
        x, lanes = direct_convolutions.block_data(rewriter, data, dtype)
        inputs, outputs = (ir.known_shape(expr)[1] // groups for expr in (data, call))
        phases = math.prod(window.strides)
        reads = Groups(inputs, outputs, lanes, rewriter.block, groups, phases)
        packed = convolutions.pack_kernel(rewriter, flipped, reads)
        moved = _move_phases(rewriter, packed, geometry, 2)
        pixels = direct_convolutions.emit(rewriter, name, x, moved, inner, reads, dtype)
    if window.strides == [1] * rank and not any(geometry.offsets) and geometry.rows == size:
        return pixels
    arguments = (pixels, window.strides, geometry.offsets, size)
    return rewriter.kernel(blocked.interleave, "interleave", *arguments, pattern=None)


def _analyze(
    data: tuple[int, ...], kernel: tuple[int, ...], result: list[int], window: Window
) -> _Geometry:
    """Return the convolution behind a transposed one; all sizes are those along each spatial axis."""
    axes = []
    # The padding after each axis is in the size of the result.
    sizes = zip(data, kernel, result, window.strides, window.padding[: len(data)], strict=True)
    for size, edge, out, step, pad in sizes:
        length = -(-edge // step)
        # Padding of whole strides only skips rows of data.
        skipped = min(pad // step, length - 1)
        offset = pad - skipped * step
        count = max(-(-(out + offset) // step), size - skipped)
        axes.append((length, length - 1 - skipped, count - size + skipped, count, offset))
    inner_kernel, before, after, rows, offsets = map(list, zip(*axes, strict=True))
    return _Geometry(window.strides, inner_kernel, before + after, rows, offsets)


def _flip_kernel(rewriter: LayoutRewriter, kernel: Any, geometry: _Geometry, groups: int) -> Any:
    """Emit weights (i, o of a group, s·h, t·w) as (o, i of a group, h, s, w, t): taps and phases of each axis.

    The kernel is flipped: a transposed convolution scatters what a convolution gathers.
    """
    i, o = ir.known_shape(kernel)[:2]
    split = list(zip(geometry.kernel, geometry.strides, strict=True))
    padded = rewriter.pad_to_multiples(kernel, [1, 1, *(taps * step for taps, step in split)])
    axes = [extent for pair in split for extent in pair]
    taps = list(range(3, 3 + len(axes)))
    swapped = rewriter.rearrange(
        padded, [groups, i // groups, o, *axes], [0, 2, 1, *taps], taps[::2]
    )
    return rewriter.reshape(swapped, [groups * o, i // groups, *axes])


def _move_phases(rewriter: LayoutRewriter, kernel: Any, geometry: _Geometry, outer: int) -> Any:
    """Emit packed weights (o/b, …, h, s, w, t, …) as (o/b·s·t, …, h, w, …); `outer` axes are before the taps."""
    shape = ir.known_shape(kernel)
    rank = len(geometry.strides)
    taps, phases = (list(range(outer + part, outer + 2 * rank, 2)) for part in (0, 1))
    order = [0, *phases, *range(1, outer), *taps, *range(outer + 2 * rank, len(shape))]
    moved = rewriter.emit(relax.op.permute_dims(kernel, order))
    first, *rest = (shape[axis] for axis in order)
    return rewriter.reshape(moved, [first * math.prod(rest[:rank]), *rest[rank:]])
