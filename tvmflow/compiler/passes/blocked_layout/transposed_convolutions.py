"""Transposed convolutions on blocked layouts.

With strides (s, t), each pixel of the data yields s·t pixels of the result. An ordinary convolution computes these as
channels of one pixel, and an interleave puts them in place (sub-pixel convolution, depth-to-space).

Rows s·q to s·q + s − 1 of the result read the same ⌈k/s⌉ rows of data, each with other rows of the weights. Each of
these s·t phases has its own blocks of channels; if channels are few, all phases share blocks. Where some phases have
fewer kernel positions or rows than others, each may be a separate convolution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from tvm import relax

from tvmflow.compiler.passes.blocked_layout import convolutions, direct_convolutions
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.quantization import QuantizedData, integer_weight_dtype
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.blocked import Groups, Window
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    divide_up,
    is_dynamic,
    known_sizes,
    max_size,
    same_sizes,
    simplify,
)

# The cost of another kernel, in vector multiplications.
_KERNEL_COST: Final = 10_000
_MAX_PHASES: Final = 8
# One convolution per phase must be faster by this factor, because interleaving several tensors takes longer.
_MIN_GAIN: Final = 1.15
# The largest fraction of blocks with which phases share blocks: if a convolution reads the image, and if not.
_MAX_BLOCKED_SHARE: Final = 0.5
_MAX_PLAIN_SHARE: Final = 0.85


class _Geometry(NamedTuple):
    """The convolution that computes a transposed one; each field has a value for each spatial axis.

    `padding` lists the padding before each axis, then the padding after each axis. `rows` is the size of the result,
    and `offsets` are the pixels of the interleaved image to skip.
    """

    strides: Sequence[int]
    kernel: list[int]
    padding: list[IrSize]
    rows: list[IrSize]
    offsets: list[int]

    @property
    def window(self) -> Window:
        ones = [1] * len(self.strides)
        return Window(ones, self.padding, ones)


class _Phase(NamedTuple):
    """A phase along one axis: its rows of the result, kernel positions, and padding before and after."""

    rows: IrSize
    positions: list[int]
    before: int
    after: IrSize


def rewrite_conv_transpose(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any
) -> relax.Expr | None:
    """Rewrite a transposed convolution without dilation."""
    window = Window.of(call)
    rank = len(window.strides)
    if not convolutions.is_supported(rewriter, call, "IO") or window.dilation != [1] * rank:
        return None
    size = known_sizes(call)[2:]
    geometry = _analyze(known_sizes(data)[2:], ir.known_shape(kernel)[2:], size, window)
    if any(map(is_dynamic, geometry.padding)):
        return None
    if ir.is_depthwise(call):
        pixels = _emit_depthwise(rewriter, data, kernel, geometry)
    else:
        quantized = convolutions.find_data(rewriter, call)
        convolution = _Convolution(rewriter, call, data, kernel, window, geometry, quantized)
        phases = convolution.list_phases()
        if phases is not None:
            return convolution.emit_phases(phases)
        if quantized is not None or convolution.shares_blocks():
            return convolution.emit_shared()
        # each phase has its own blocks of channels
        flipped = _flip_kernel(rewriter, kernel, geometry, int(call.attrs.groups))
        pixels = convolution.emit(flipped, geometry.window, math.prod(window.strides))
    is_whole = not any(geometry.offsets) and same_sizes(geometry.rows, size)
    if window.strides == [1] * rank and is_whole:
        return pixels
    arguments = (pixels, window.strides, geometry.offsets, size)
    return rewriter.kernel(blocked.interleave, "interleave", *arguments, pattern=None)


def _emit_depthwise(rewriter: LayoutRewriter, data: Any, kernel: Any, geometry: _Geometry) -> Any:
    """Emit the pixels of a depthwise convolution, the phases as blocks of channels."""
    rank = len(geometry.strides)
    flipped = _flip_kernel(rewriter, kernel, geometry, ir.known_shape(kernel)[0])
    packed = convolutions.pack_depthwise_kernel(rewriter, flipped)
    weights = _move_phases(rewriter, packed, geometry, 1)
    return rewriter.kernel(
        lambda x, w: blocked.depthwise_conv(x, w, geometry.window),
        f"depthwise_conv{rank}d_transpose_NCHWc",
        rewriter.to_blocked(data),
        rewriter.cast(weights, rewriter.context.weight_dtype),
    )


class _Convolution:
    """A transposed convolution that is not depthwise, with one group or several."""

    def __init__(
        self,
        rewriter: LayoutRewriter,
        call: relax.Call,
        data: Any,
        kernel: Any,
        window: Window,
        geometry: _Geometry,
        quantized: QuantizedData | None,
    ) -> None:
        self._rewriter = rewriter
        self._data, self._kernel = data, kernel
        weights = integer_weight_dtype(rewriter.flow, call.args[1])
        self._dtype = weights or rewriter.context.weight_dtype
        source = data if quantized is None else quantized.integers
        self._x, self._lanes = direct_convolutions.block_data(rewriter, source, self._dtype)
        self._quantized = quantized and quantized._replace(integers=self._x)
        self._window, self._geometry = window, geometry
        self._groups = int(call.attrs.groups)
        self._is_read_blocked = rewriter.is_read_blocked(call)
        self._channels = known_sizes(data)[1], known_sizes(call)[1]
        self._size = list(known_sizes(call)[2:])
        self._kernel_size = ir.known_shape(kernel)[2:]
        self._typical, self._typical_data = (
            list(rewriter.tuning_sizes.shape(tensor) or ())[2:] for tensor in (call, data)
        )
        self._blocks = -(-self._channels[1] // rewriter.block)
        self._phases = math.prod(window.strides)

    def list_phases(self) -> list[tuple[_Phase, ...]] | None:
        """Return the phases along each axis; None if one convolution for all phases is faster."""
        phases = self._find_phases(self._size, known_sizes(self._data)[2:])
        products = self._count(
            sum(phase.rows * len(phase.positions) for phase in axis)
            for axis in self._find_phases(self._typical, self._typical_data)
        )
        parts = [phase for axis in phases for phase in axis]
        is_possible = all(phase.positions and not is_dynamic(phase.after) for phase in parts)
        cost = _MIN_GAIN * products * self._blocks + self._phases * _KERNEL_COST
        is_faster = cost < min(self._phases * self._blocks, self._count_shared()) * self._work()
        return phases if is_possible and is_faster and self._phases <= _MAX_PHASES else None

    def _find_phases(
        self, size: Sequence[IrSize], data: Sequence[IrSize]
    ) -> list[tuple[_Phase, ...]]:
        strides, padding = self._window.strides, self._window.padding[: len(size)]
        return [
            tuple(
                _find_phase(phase, extent, source, positions, step, before)
                for phase in range(step)
                if is_dynamic(extent) or phase < extent
            )
            for extent, source, positions, step, before in zip(
                size, data, self._kernel_size, strides, padding, strict=True
            )
        ]

    def shares_blocks(self) -> bool:
        """Return whether all phases share blocks of channels; then the image is not blocked."""
        share = _MAX_BLOCKED_SHARE if self._is_read_blocked else _MAX_PLAIN_SHARE
        return self._groups == 1 and self._count_shared() <= share * self._phases * self._blocks

    def _count_shared(self) -> int:
        """Return the number of blocks that the channels of all phases fill together."""
        return int(-(-self._phases * self._channels[1] // self._rewriter.block))

    def _work(self) -> int:
        """Return the vector multiplications for one block of the result of one convolution for all phases."""
        typical = _analyze(self._typical_data, self._kernel_size, self._typical, self._window)
        sizes = zip(typical.rows, typical.kernel, strict=True)
        return self._count(rows * positions for rows, positions in sizes)

    def _count(self, pixels: Iterable[int]) -> int:
        return int(math.prod(pixels) * self._channels[0] // self._groups)

    def emit_phases(self, phases: list[tuple[_Phase, ...]]) -> Any:
        """Emit a convolution for each phase, and the image with their interleaved pixels."""
        rank = len(self._size)
        kernel = _swap_channels(self._rewriter, self._kernel, self._groups, self._kernel_size)
        parts = []
        for phase in itertools.product(*phases):
            own = kernel
            for axis, part in enumerate(phase):
                own = self._rewriter.take(own, part.positions, 2 + axis)
            padding = [part.before for part in phase] + [part.after for part in phase]
            parts.append(self.emit(own, Window([1] * rank, padding, [1] * rank)))
        arguments = (self._window.strides, self._size, *parts)
        return self._rewriter.kernel(
            blocked.interleave_parts, "interleave", *arguments, pattern=None
        )

    def emit_shared(self) -> Any:
        """Emit one convolution with the channels of phase after phase, and the image with its pixels."""
        rank, outputs = len(self._size), self._channels[1]
        flipped = _flip_kernel(self._rewriter, self._kernel, self._geometry, 1)
        shape = ir.known_shape(flipped)
        positions, phases = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
        moved = self._rewriter.emit(relax.op.permute_dims(flipped, [*phases, 0, 1, *positions]))
        size = [self._phases * outputs, shape[1], *(shape[position] for position in positions)]
        pixels = self.emit(self._rewriter.reshape(moved, size), self._geometry.window)
        arguments = (pixels, outputs, self._window.strides, self._geometry.offsets, self._size)
        return self._rewriter.kernel(
            blocked.interleave_channels, "interleave", *arguments, pattern=None
        )

    def emit(self, kernel: Any, window: Window, phases: int | None = None) -> Any:
        """Emit a convolution with weights (o, i of a group, …); `phases` follow each axis of positions."""
        rewriter, rank = self._rewriter, len(self._size)
        channels = self._channels[0], ir.known_shape(kernel)[0]
        inputs, outputs = (count // self._groups for count in channels)
        reads = Groups(inputs, outputs, self._lanes, rewriter.block, self._groups, phases or 1)
        if self._quantized is None:
            reads = direct_convolutions.shorten(rewriter, reads, self._dtype, joins=False)
        packed = convolutions.pack_kernel(rewriter, kernel, reads)
        if phases is not None:
            packed = _move_phases(rewriter, packed, self._geometry, 2)
        name = f"conv{rank}d_transpose_NCHWc"
        if self._quantized is not None:
            return convolutions.emit(rewriter, self._quantized, kernel, packed, window, reads, name)
        return direct_convolutions.emit(rewriter, name, self._x, packed, window, reads, self._dtype)


def _find_phase(
    phase: int, result: IrSize, data: IrSize, positions: int, step: int, padding: int
) -> _Phase:
    """Return the rows `phase`, `phase + step`, … of a result; all sizes are along one axis."""
    rows = simplify(divide_up(result - phase, step))
    skipped, first = divmod(phase + padding, step)
    used = list(range(first, positions, step))[::-1]
    before = len(used) - 1 - skipped
    return _Phase(rows, used, before, simplify(rows + skipped - data))


def _analyze(
    data: Sequence[IrSize], kernel: Sequence[int], result: Sequence[IrSize], window: Window
) -> _Geometry:
    """Return the convolution that computes a transposed one; all sizes are of the spatial axes."""
    axes = []
    # The size of the result determines the padding after each axis.
    sizes = zip(data, kernel, result, window.strides, window.padding[: len(data)], strict=True)
    for size, edge, out, step, pad in sizes:
        length = -(-edge // step)
        # Padding of whole strides only skips rows of data.
        skipped = min(pad // step, length - 1)
        offset = pad - skipped * step
        count = max_size(simplify(divide_up(out + offset, step)), size - skipped)
        after = simplify(count - size + skipped)
        axes.append((length, length - 1 - skipped, after, count, offset))
    inner_kernel, before, after, rows, offsets = map(list, zip(*axes, strict=True))
    padding = before + after
    return _Geometry(
        strides=window.strides, kernel=inner_kernel, padding=padding, rows=rows, offsets=offsets
    )


def _flip_kernel(rewriter: LayoutRewriter, kernel: Any, geometry: _Geometry, groups: int) -> Any:
    """Emit flipped weights (i, o of a group, s·h, t·w) as (o, i of a group, h, s, w, t).

    The last axes are the kernel positions and phases of each axis.
    """
    split = list(zip(geometry.kernel, geometry.strides, strict=True))
    multiples = [1, 1, *(positions * step for positions, step in split)]
    padded = rewriter.pad_to_multiples(kernel, multiples)
    axes = [extent for pair in split for extent in pair]
    return _swap_channels(rewriter, padded, groups, axes, range(3, 3 + len(axes), 2))


def _swap_channels(
    rewriter: LayoutRewriter,
    kernel: Any,
    groups: int,
    size: Sequence[int],
    flipped: Sequence[int] = (),
) -> Any:
    """Emit weights (i, o of a group, …) as (o, i of a group, *size), with some axes reversed."""
    i, o = ir.known_shape(kernel)[:2]
    order = [0, 2, 1, *range(3, 3 + len(size))]
    swapped = rewriter.rearrange(kernel, [groups, i // groups, o, *size], order, flipped)
    return rewriter.reshape(swapped, [groups * o, i // groups, *size])


def _move_phases(rewriter: LayoutRewriter, kernel: Any, geometry: _Geometry, outer: int) -> Any:
    """Emit weights (o/b, …, h, s, w, t, …) as (o/b·s·t, …, h, w, …); `outer` axes come before `h`."""
    shape = ir.known_shape(kernel)
    rank = len(geometry.strides)
    positions, phases = (list(range(outer + part, outer + 2 * rank, 2)) for part in (0, 1))
    order = [0, *phases, *range(1, outer), *positions, *range(outer + 2 * rank, len(shape))]
    moved = rewriter.emit(relax.op.permute_dims(kernel, order))
    first, *rest = (shape[axis] for axis in order)
    return rewriter.reshape(moved, [first * math.prod(rest[:rank]), *rest[rank:]])
