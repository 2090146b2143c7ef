"""Convolutions on blocked layouts: direct, depthwise, and Winograd."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.compiler.contraction import winograd
from tvmflow.compiler.contraction.machine import SHARED_LANES
from tvmflow.compiler.contraction.winograd import Geometry
from tvmflow.compiler.passes.blocked_layout import direct_convolutions
from tvmflow.compiler.passes.blocked_layout.direct_convolutions import Image
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.quantization import (
    QuantizedData,
    find_quantized_data,
    integer_weight_dtype,
    scale_accumulators,
    to_dot_data,
)
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels import winograd as winograd_kernels
from tvmflow.compiler.tir_kernels.blocked import DEPTHWISE, MATRICES, PAIRS, Groups, Sizes, Window
from tvmflow.core.choices import WINOGRAD
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import is_dynamic, known_sizes
from tvmflow.graph.marks import read_marks

_log = logging.getLogger(__name__)

# The time of a Winograd convolution as a fraction of a direct one's.
_WINOGRAD_SHARE: Final = 0.5
_IMAGE_AXES: Final = 2
# Matrix instructions need a block of zeros for an odd number of data blocks: faster only with more blocks than this.
_MIN_ODD_BLOCKS: Final = 3


def rewrite_conv(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any
) -> relax.Expr | None:
    """Rewrite a convolution over sequences, images or volumes."""
    if not is_supported(rewriter, call, "OI"):
        return None
    image = Image(known_sizes(data)[2:], known_sizes(call)[2:])
    kernel, window = direct_convolutions.crop_kernel(rewriter, image, kernel, Window.of(call))
    dtype = integer_weight_dtype(rewriter.flow, call.args[1]) or rewriter.context.weight_dtype
    quantized = find_data(rewriter, call)
    if quantized is not None and _is_faster_in_floats(rewriter, call, kernel, window):
        quantized = None
    name, groups = f"conv{len(window.strides)}d_NCHWc", int(call.attrs.groups)
    inputs, outputs = (known_sizes(expr)[1] for expr in (data, call))
    is_plain = direct_convolutions.is_plain_data(rewriter, data)
    if ir.is_depthwise(call) or (inputs == groups and not is_plain):
        x = rewriter.to_blocked(data if quantized is None else quantized.integers)
        if (times := outputs // groups) > 1:
            repeated = (x, inputs, times)
            x = rewriter.kernel(blocked.repeat_channels, "repeat_channels", *repeated, pattern=None)
        weights = rewriter.cast(pack_depthwise_kernel(rewriter, kernel), dtype)
        if quantized is not None:
            quantized = quantized._replace(integers=x)
            return _emit_quantized_depthwise(rewriter, quantized, kernel, weights, window, name)
        return rewriter.kernel(
            lambda x, w: blocked.depthwise_conv(x, w, window), f"depthwise_{name}", x, weights
        )
    if quantized is not None:
        x, lanes = direct_convolutions.block_data(rewriter, quantized.integers, dtype)
        reads = Groups(inputs // groups, outputs // groups, lanes, rewriter.block, groups)
        packed = pack_kernel(rewriter, kernel, reads)
        quantized = quantized._replace(integers=x)
        return emit(rewriter, quantized, kernel, packed, window, reads, name)
    if dtype == "float32":
        plain = direct_convolutions.emit_plain_product(rewriter, call, data, kernel, window)
        if plain is not None:
            return plain
    return _emit_convolution(rewriter, call, data, kernel, window, dtype)


def _emit_convolution(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, kernel: Any, window: Window, dtype: str
) -> Any:
    image = Image(known_sizes(data)[2:], known_sizes(call)[2:])
    groups, name = int(call.attrs.groups), f"conv{len(window.strides)}d_NCHWc"
    x, lanes = direct_convolutions.block_data(rewriter, data, dtype)
    terms = direct_convolutions.count_terms(rewriter, dtype)
    geometry = phases = None
    if lanes == rewriter.block:
        geometry = _find_winograd(rewriter, call, kernel, window, terms)
    shape = ir.known_shape(kernel)
    if groups == terms == 1 and dtype == rewriter.context.weight_dtype:
        sizes = [list(rewriter.tuning_sizes.shape(tensor) or ())[2:] for tensor in (data, call)]
        share = _WINOGRAD_SHARE if geometry is not None else 1.0
        phases = choose_phases(Image(*sizes), shape, window, rewriter.block, share)

    def emit_direct(kernel: Any, window: Window, image: Image | None = None) -> Any:
        outputs, inputs = ir.known_shape(kernel)[:2]
        # the empty lanes of a single block are not multiplied
        own_lanes = inputs if groups == terms == 1 and inputs < lanes else lanes
        channels = outputs // groups
        reads = Groups(inputs, channels, own_lanes, rewriter.block, groups)
        reads = direct_convolutions.shorten(rewriter, reads, dtype, joins=True)
        if is_apart := reads.outputs != channels:
            # each group is padded to as many channels of the result as are computed
            o, *rest = ir.known_shape(kernel)
            split = rewriter.reshape(kernel, [groups, o // groups, *rest])
            padded = rewriter.pad_to_multiples(split, [1, reads.outputs])
            kernel = rewriter.reshape(padded, [groups * reads.outputs, *rest])
        packed = pack_kernel(rewriter, kernel, reads)
        result = direct_convolutions.emit(rewriter, name, x, packed, window, reads, dtype, image)
        if not is_apart:
            return result
        join = (result, channels, groups)
        return rewriter.kernel(blocked.join_groups, "join_groups", *join, pattern=None)

    if phases is not None:
        pixels = emit_direct(*pad_kernel(rewriter, kernel, window, image, phases))
        positions = (pixels, shape[0], phases, [0] * len(phases), list(image.result))
        return rewriter.kernel(blocked.interleave_channels, "interleave", *positions, pattern=None)
    if geometry is not None:
        return _emit_winograd(rewriter, name, x, kernel, geometry)
    return emit_direct(kernel, window, image)


def is_supported(rewriter: LayoutRewriter, call: relax.Call, kernel: str) -> bool:
    """Return whether a float32 convolution has fixed channels, the frontends' layouts, and weights.

    `kernel` names the first axes of the weights.
    """
    return (
        rewriter.tuning_sizes.shape(call.args[0]) is not None
        and not any(is_dynamic(known_sizes(expr)[1]) for expr in (call, call.args[0]))
        and ir.shape_of(call.args[1]) is not None
        and not rewriter.context.is_plain(ir.convolution_kind(call))
        and rewriter.flow.is_weight(call.args[1])
        and ir.has_default_layouts(call, kernel)
        and rewriter.is_float(call.args[0])
    )


def pack_depthwise_kernel(rewriter: LayoutRewriter, kernel: Any) -> Any:
    """Emit weights (o, 1, …) as (o/b, …, b)."""
    block = rewriter.block
    kernel = rewriter.pad_to_multiples(kernel, [block])
    outer, _, *size = ir.known_shape(kernel)
    last = [*range(2, 2 + len(size)), 1]
    return rewriter.rearrange(kernel, [outer // block, block, *size], [0, *last])


def pack_kernel(rewriter: LayoutRewriter, kernel: Any, groups: Groups) -> Any:
    """Emit weights (o, i of a group, …) as (o/b, blocks of data, …, lanes of i, b of o).

    There is no axis of lanes if there is one lane. Runs of channels (`groups.run`) may replace blocks of data. If a
    block of the result belongs to several groups, the weights for data of other groups are 0.
    """
    block, lanes, width = groups.block, groups.run or groups.lanes, groups.width
    is_one_group = groups.number == 1 and ir.known_shape(kernel)[0] <= groups.outputs
    kernel = rewriter.pad_to_multiples(kernel, [block, 1])
    o, i, *size = ir.known_shape(kernel)
    blocks = o // block
    if is_one_group:
        spread = rewriter.pad_to_multiples(kernel, [1, width * lanes])
    else:
        kernel = rewriter.pad_to_multiples(kernel, [1, i + 1])
        rows = rewriter.reshape(kernel, [o * (i + 1), *size])
        spread = rewriter.take(rows, _list_weight_rows(groups, blocks), 0)
    inner = [width, lanes] if lanes > 1 else [width]
    split = rewriter.reshape(spread, [blocks, block, *inner, *size])
    first_axis = 2 + len(inner)
    order = [0, 2, *range(first_axis, first_axis + len(size)), *range(3, first_axis), 1]
    return rewriter.emit(relax.op.permute_dims(split, order))


def _list_weight_rows(groups: Groups, blocks: int) -> list[int]:
    """Return the rows of weights for all output channels, as one flat list.

    Each output channel has a row for each data channel that its block reads. The `inputs` rows of output channel `o`
    begin at `o·(inputs + 1)`; a row of zeros follows them.
    """
    o = np.arange(blocks * groups.block)
    unit = 1 if groups.run else groups.lanes
    starts = unit * np.array([groups.first(block * groups.phases) for block in range(blocks)])
    channel = np.arange(groups.depth) + starts[o // groups.block][:, None]
    offset = channel - (o // groups.outputs * groups.inputs)[:, None]
    is_own = (offset >= 0) & (offset < groups.inputs)
    rows = o[:, None] * (groups.inputs + 1) + np.where(is_own, offset, groups.inputs)
    return list(rows.ravel())


def _find_winograd(
    rewriter: LayoutRewriter, call: relax.Call, kernel: Any, window: Window, terms: int
) -> Geometry | None:
    """Return the sizes of a Winograd convolution; None if it is not possible or not faster.

    An instruction of the direct convolution adds `terms` products to each result.
    """
    context, cpu = rewriter.context, rewriter.cpu
    tiles, step = context.winograd_tiles, window.strides[-1]
    out, inner, *edges = ir.known_shape(kernel)
    shape, groups = rewriter.tuning_sizes.shape(call), int(call.attrs.groups)
    # ISA levels that share weights must choose the same tile
    is_shared = context.options.shares_weights and not cpu.multiplicand_lanes
    lanes = SHARED_LANES if is_shared else rewriter.block
    has_fixed_tiles = len(edges) > _IMAGE_AXES or step > 1 or groups > 1
    if (
        not tiles
        or shape is None
        or edges[-2:] != [3, 3]
        or window.strides[-2:] != [step, step]
        or step not in cpu.winograd_strides
        or window.dilation[-2:] != [1, 1]
        or min(window.padding) < 0
        # each block of a tile belongs to one group
        or (groups > 1 and (out // groups % lanes or inner % lanes))
        # tiles of volumes, or with a stride or groups, have fixed positions: dynamic sizes are not supported
        or (has_fixed_tiles and any(map(is_dynamic, known_sizes(call)[2:])))
        # instructions that add several products save more than the transforms
        or (step > 1 and terms > 1)
    ):
        return None
    n, _, *sizes = known_sizes(call)
    is_dynamic_image = any(map(is_dynamic, sizes))
    if terms > 1 or is_dynamic_image:
        # instructions that add several products save more than a rectangle's larger weights; dynamic images need squares
        tiles = tuple(tile for tile in tiles if tile != winograd.RECTANGLE)
    depth, height, width = [1, *shape[2:]][-3:]
    front, top, left = [0, *window.padding[: len(sizes)]][-3:]
    kernel_depth, stride, dilation = (
        [1, *values][-3] for values in (edges, window.strides, window.dilation)
    )
    geometry = Geometry(
        tile=tiles[0],
        shape=(shape[0], depth, height, width),
        padding=(front, top, left),
        kernel_depth=kernel_depth,
        stride=stride,
        dilation=dilation,
        step=step,
    )
    weight_bytes = 2 if context.computes_float16() else 4
    has_few, takes_lanes = cpu.has_few_registers and not is_shared, cpu.multiplicand_lanes > 0
    costs = winograd.costs_by_rule(has_few, takes_lanes)
    convolution = winograd.Convolution(geometry, out, inner, lanes, terms, weight_bytes, groups)
    tile, block = convolution.rank_tiles(tiles, costs)[0], rewriter.block
    if context.measured_tiles and terms == 1 and not is_dynamic_image and not is_dynamic(n):
        ranked = convolution.rank_tiles(context.measured_tiles, costs)
        weight_bytes = 4 * kernel_depth * -(-out // block) * -(-inner // block) * block**2
        choices = [
            ({WINOGRAD: each}, winograd.count_products(each) * weight_bytes) for each in ranked
        ]
        text = _describe(call, kernel, window)
        tile = context.choose(text, read_marks(call), choices)[WINOGRAD]
    _log.debug("%d to %d channels of %s: Winograd tile of %d", inner, out, shape[2:], tile)
    if not tile:
        return None
    geometry = geometry._replace(tile=tile, shape=(n, *[1, *sizes][-3:]))
    if is_dynamic_image:
        return geometry
    # transforming a large tile along one axis after the other takes less time, and much less time to compile
    is_separate = cpu.multiplicand_lanes > 0 or step > 1 or tile > min(winograd.SQUARES)
    geometry = geometry._replace(is_separate=is_separate)
    return winograd.pad_columns(geometry, -(-out // block) // groups, inner, cpu)


def _describe(call: relax.Call, kernel: Any, window: Window) -> str:
    """Return a description of a convolution that is the same for equal convolutions in any model."""
    shapes = [ir.known_shape(tensor) for tensor in (call.args[0], kernel, call)]
    sizes = [*shapes, window.strides, window.padding, window.dilation]
    data, weights, result, *texts = ("×".join(map(str, size)) for size in sizes)
    names = ("strides", "padding", "dilation")
    details = ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
    return f"conv {data} by {weights} to {result}, {details}"


def _is_faster_in_floats(
    rewriter: LayoutRewriter, call: relax.Call, kernel: Any, window: Window
) -> bool:
    terms = rewriter.context.integers.terms
    if terms > PAIRS.terms or ir.is_depthwise(call):
        return False
    return _find_winograd(rewriter, call, kernel, window, terms) is not None


def _emit_winograd(
    rewriter: LayoutRewriter, name: str, x: Any, kernel: Any, geometry: Geometry
) -> Any:
    block = rewriter.block
    kernel = rewriter.cast(rewriter.pad_to_multiples(kernel, [block, block]), "float32")
    o, i = ir.known_shape(kernel)[:2]
    rows, columns = (
        each.weights.astype("float32") for each in winograd_kernels.transforms_of(geometry)
    )
    left = rewriter.emit(relax.op.matmul(relax.const(rows), kernel))
    both = rewriter.emit(relax.op.matmul(left, relax.const(columns.T.copy())))
    split = [o // block, block, i // block, block, geometry.kernel_depth, len(rows), len(columns)]
    weights = rewriter.rearrange(both, split, [5, 6, 0, 4, 2, 3, 1])
    weights = rewriter.cast(weights, rewriter.context.weight_dtype)

    def convolve(x: Any, w: Any, shape: Any) -> Any:
        # the shape has the kernel's own variables
        return winograd_kernels.conv(x, w, geometry._replace(shape=shape))

    return rewriter.kernel(convolve, f"winograd_{name}", x, weights, tuple(geometry.shape))


# ---------------------------------------------------------------- few channels
# Few channels would leave most lanes of a result's vectors empty. So s·t neighboring pixels of the result become
# channels of one pixel (space to depth). The kernel becomes larger, with zeros for the data that a pixel does not read.
# Its strides are s and t times as large. With three channels and a 7×7 kernel, four pixels take 64 vector
# multiplications for each channel of data, not 196.

# The larger kernel must need less than this share of a direct convolution's vector multiplications.
_MAX_SHARE: Final = 0.75
# The cost of moving one element to its pixel, in vector multiplications.
_MOVE_COST: Final = 4


def choose_phases(
    image: Image, kernel: Sequence[int], window: Window, block: int, share: float
) -> tuple[int, ...] | None:
    """Return how many pixels along each axis become channels; None if that is not faster.

    `kernel` is the shape (o, i, …) of the weights. `share` is the cost of the alternative method, as a fraction of
    a direct convolution's multiplications.
    """
    outputs, inputs, *kernel_size = kernel
    if 2 * outputs > block or max(window.dilation) > 1:
        return None

    def cost(phases: Sequence[int]) -> int:
        blocks = -(-math.prod(phases) * outputs // block)
        axes = zip(image.result, kernel_size, phases, window.strides, strict=True)
        sizes = (-(-size // s) * (count + (s - 1) * step) for size, count, s, step in axes)
        return int(blocks * inputs * math.prod(sizes))

    counts = itertools.product(*(range(1, min(block // outputs, n) + 1) for n in image.result))
    best = min((c for c in counts if math.prod(c) * outputs <= block), key=cost)
    moved = _MOVE_COST * outputs * math.prod(image.result)
    limit = min(_MAX_SHARE, share) * cost([1] * len(kernel_size))
    return best if cost(best) + moved < limit else None


def pad_kernel(
    rewriter: LayoutRewriter, kernel: Any, window: Window, image: Image, phases: Sequence[int]
) -> tuple[Any, Window]:
    """Return the larger kernel (s·t·o, i, …) made of weights (o, i, …), and its window."""
    rank = len(phases)
    parts = []
    for phase in itertools.product(*map(range, phases)):
        # the weights of each pixel that becomes channels, with zeros around them
        widths = [0, 0, 0, 0]
        for index, count, step in zip(phase, phases, window.strides, strict=True):
            widths += [index * step, (count - 1 - index) * step]
        parts.append(rewriter.emit(relax.op.nn.pad(kernel, widths)))
    moved = rewriter.emit(relax.op.concat(parts, 0))
    strides = [s * step for s, step in zip(phases, window.strides, strict=True)]
    before, after = window.padding[:rank], []
    for axis, (step, extent) in enumerate(zip(strides, ir.known_shape(moved)[2:], strict=True)):
        size, result = image.data[axis], image.result[axis]
        if is_dynamic(result):
            # enough padding for all sizes
            after.append(window.padding[rank + axis] + extent - ir.known_shape(kernel)[2 + axis])
        else:
            rows = -(-result // phases[axis])
            after.append((rows - 1) * step + extent - size - before[axis])
    return moved, Window(strides, [*before, *after], [1] * rank)


# ---------------------------------------------------------------- integer convolutions
# Convolutions of quantized data on blocked layouts, with dot product instructions where the CPU has them.


def find_data(rewriter: LayoutRewriter, call: relax.Call) -> QuantizedData | None:
    """Return the 8-bit data of a convolution with int8 weights; None if dot products cannot be used."""
    if not rewriter.context.has_dot_products():
        return None
    quantized = find_quantized_data(rewriter.flow, call.args[0])
    if quantized is None or not integer_weight_dtype(rewriter.flow, call.args[1]):
        return None
    data = quantized.visit(rewriter)
    return data._replace(integers=rewriter.resolve(data.integers))


def emit(
    rewriter: LayoutRewriter,
    data: QuantizedData,
    kernel: Any,
    packed: Any,
    window: Window,
    groups: Groups,
    name: str,
) -> Any:
    """Emit a convolution of blocked integers, not yet multiplied by the scale of the weights.

    The weights are given as `kernel` (o, i of a group, …) and as `packed` (o/b, blocks of data, …, lanes of i, b of o).
    """
    data = to_dot_data(rewriter, data, rewriter.context.dot_dtype)
    *outer, _, block = ir.known_shape(packed)
    products = rewriter.context.integers
    multiply: Callable[..., Any]
    if _multiplies_matrices(rewriter, data.integers, window, groups, outer[2:]):
        integers, window = _take_strides(rewriter, data.integers, window)
        # an odd number of blocks is padded with a block of zeros
        data = data._replace(integers=rewriter.pad_to_multiples(integers, [1, 2]))
        packed = rewriter.pad_to_multiples(packed, [1, 2])
        blocks, width, *kernel_size = ir.known_shape(packed)[:-2]
        halves = MATRICES.terms // block
        split = [blocks, width // halves, halves, *kernel_size, block, block]
        last = len(split) - 1
        axes = [0, 1, *range(3, last - 1), last, 2, last - 1]
        weights = rewriter.rearrange(packed, split, axes)
        padding, points = list(window.padding), _count_points(data.integers, window, kernel_size)
        padding[-1] += points % 2
        multiply = functools.partial(blocked.matrix_conv, padding=padding, points=points)
    else:
        weights = rewriter.split_terms(packed, products.terms)
        multiply = functools.partial(blocked.dot_conv, products, window=window, groups=groups)
    name = f"quantized_{name}"
    sums = _emit_accumulators(rewriter, multiply, name, data, rewriter.cast(weights, "int8"))
    return _scale(rewriter, sums, kernel, data)


def _scale(rewriter: LayoutRewriter, sums: Any, kernel: Any, data: QuantizedData) -> Any:
    """Emit accumulators of products with weights (o, …) as float32, times the scale of the data only."""
    shape = [1, -1, *[1] * (len(ir.known_shape(kernel)) - 2), rewriter.block]
    totals = rewriter.pad_to_multiples(kernel, [rewriter.block])
    return scale_accumulators(rewriter, sums, totals, shape, data)


def _take_strides(rewriter: LayoutRewriter, x: Any, window: Window) -> tuple[Any, Window]:
    """Emit the pixels that a strided kernel of one pixel reads; return them and a window with stride 1."""
    strides, rank = list(window.strides), len(window.strides)
    if max(strides) == 1:
        return x, window
    axes, ends = [*range(2, 2 + rank)], known_sizes(x)[2 : 2 + rank]
    taken = relax.op.strided_slice(x, axes, [0] * rank, list(ends), strides)
    return rewriter.emit(taken), window._replace(strides=[1] * rank)


def _count_points(x: Any, window: Window, kernel: Sizes) -> int:
    """Return the number of pixels in a row of a result without dilation; 0 for a dynamic row."""
    width, padding = known_sizes(x)[-2], window.padding
    read = width + padding[len(window.strides) - 1] + padding[-1] - kernel[-1]
    return 0 if is_dynamic(width) else int(read // window.strides[-1]) + 1


def _multiplies_matrices(
    rewriter: LayoutRewriter, x: Any, window: Window, groups: Groups, kernel: Sizes
) -> bool:
    """Return whether int8 matrix instructions compute two pixels and two output channels at once."""
    cpu, (strides, padding, dilation) = rewriter.cpu, window
    points = _count_points(x, window, kernel)
    is_fixed = not any(map(is_dynamic, known_sizes(x)[2:]))
    takes_pixels = is_fixed and math.prod(kernel) == 1 and not any(padding)
    return (
        cpu.has_matrices
        and cpu.multiplicand_lanes == rewriter.block == groups.lanes
        and not rewriter.context.options.shares_weights
        and groups.number == 1
        and len(strides) == _IMAGE_AXES
        and (groups.width % 2 == 0 or groups.width > _MIN_ODD_BLOCKS)
        and (max(*strides, *dilation) == 1 or takes_pixels)
        and min(padding) >= 0
        and points > 1
    )


def _emit_quantized_depthwise(
    rewriter: LayoutRewriter,
    data: QuantizedData,
    kernel: Any,
    packed: Any,
    window: Window,
    name: str,
) -> Any:
    """Emit a depthwise convolution of integers, not yet multiplied by the scale of the weights.

    Dot product instructions run along kernel rows; where none can be used, products are float32.
    """
    name, cpu = f"quantized_depthwise_{name}", rewriter.cpu
    has_instruction = cpu.multiplicand_lanes == rewriter.block == DEPTHWISE.terms and cpu.has_quads
    if not has_instruction or max(window.dilation) > 1 or min(window.padding) < 0:
        convolve = functools.partial(blocked.quantized_depthwise_conv, window=window)
        sums = _emit_accumulators(rewriter, convolve, name, data, packed)
        return rewriter.emit(relax.op.multiply(sums, relax.const(data.scale, "float32")))
    data = to_dot_data(rewriter, data, rewriter.context.dot_dtype)
    missing = -ir.known_shape(kernel)[-1] % DEPTHWISE.terms
    multiples = [1] * (len(ir.known_shape(kernel)) - 1)
    wide = rewriter.pad_to_multiples(kernel, [*multiples, DEPTHWISE.terms])
    window = window._replace(padding=[*window.padding[:-1], window.padding[-1] + missing])
    weights = rewriter.split_terms(pack_depthwise_kernel(rewriter, wide), DEPTHWISE.terms)
    multiply = functools.partial(blocked.depthwise_conv, window=window, products=DEPTHWISE)
    sums = _emit_accumulators(rewriter, multiply, name, data, rewriter.cast(weights, "int8"))
    return _scale(rewriter, sums, kernel, data)


def _emit_accumulators(
    rewriter: LayoutRewriter,
    operator: Callable[..., Any],
    name: str,
    data: QuantizedData,
    weights: Any,
) -> Any:
    """Emit a kernel of data and weights; the data's zero point is a constant in it, or its third input."""
    zero, tensors = data.zero_point, (data.integers, weights)
    if isinstance(zero, int):
        return rewriter.kernel(functools.partial(operator, zero=zero), name, *tensors)
    return rewriter.kernel(lambda x, w, z: operator(x, w, zero=z()), name, *tensors, zero)
