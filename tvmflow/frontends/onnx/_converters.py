"""Converters of operators that TVM's importer lacks, miscomputes, or hides from layout passes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from tvmflow.core.types import Array
from tvmflow.frontends.base import MAX_ELEMENTS
from tvmflow.frontends.onnx._arithmetic import (
    NodeToConvert,
    are_tensors,
    constant,
    count_along,
    is_float,
    known_array,
    known_integer,
    list_sizes,
    read_interpolation,
)
from tvmflow.frontends.onnx._expressions import (
    MAX_DETERMINANT_ROWS,
    MAX_WINDOW,
    Regions,
    Windows,
    add_blocks,
    align_regions,
    clamp_indices,
    combine_samples,
    determinant,
    find_maxima,
    find_samples,
    infer_unpooled_shape,
    reverse_sequences,
)
from tvmflow.frontends.onnx.graph import FROM_START
from tvmflow.graph import resize
from tvmflow.graph.ir import OPAQUE, constant_array, dtype_of
from tvmflow.graph.ir_operators import (
    SELECTED_COLUMNS,
    BlockQuantizedOperands,
    BlockQuantizedWeights,
    ModelOperator,
    NonMaxSuppression,
)
from tvmflow.graph.resize import Interpolation

# ---------------------------------------------------------------- indices


def convert_index(node: NodeToConvert, operator: Callable[..., Any]) -> Any:
    """Convert gathers and scatters; a negative index counts from the end unless the node says otherwise."""
    data, indices, *rest = node.inputs
    is_scatter = operator is relax.op.scatter_elements
    if FROM_START not in node.attributes or not are_tensors((data, indices)):
        return convert_scatter(node) if is_scatter else node.by_tvm()
    if not is_scatter:
        name = "batch_dims" if operator is relax.op.gather_nd else "axis"
        return operator(data, indices, node.integer(name, 0))
    beyond = constant(np.iinfo(dtype_of(indices)).min, indices)
    is_negative = relax.op.less(indices, constant(0, indices))
    limited = node.emit(relax.op.where(is_negative, beyond, indices))
    return convert_scatter(node._replace(inputs=[data, limited, *rest]))


def convert_scatter(node: NodeToConvert) -> Any:
    """Scatter updates; bools are scattered as integers, because TVM cannot add or multiply bools."""
    data, indices, updates = node.inputs
    if dtype_of(data) != "bool" or node.text("reduction", "none") == "none":
        return node.by_tvm()
    wide = [node.cast(operand, "int32") for operand in (data, updates)]
    return relax.op.astype(node.emit(node.convert_by_tvm([wide[0], indices, wide[1]])), "bool")


def convert_slice(node: NodeToConvert) -> Any:
    """Return a slice whose constant bounds are limited to the data.

    For a slice without elements TVM fails. For one that runs backwards from before the data, TVM drops
    the first element.
    """
    data, *bounds = node.inputs
    is_known = all(bound is None or isinstance(bound, tvm.ir.Constant) for bound in bounds)
    if not is_known or not are_tensors([data]):
        return node.by_tvm()
    shape = list_sizes(data)
    starts, ends, axes, steps = (
        [] if bound is None else known_array(bound, "a bound").ravel().tolist()
        for bound in [*bounds, None, None][:4]
    )
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    fits = 0 < len(starts) == len(ends) == len(axes) == len(steps)
    is_fixed = all(
        -len(shape) <= axis < len(shape) and isinstance(shape[axis], int) for axis in axes
    )
    if not fits or not is_fixed or 0 in steps:
        return node.by_tvm()
    limited = [
        _limit_slice(start, end, step, shape[axis])
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True)
    ]
    indices = [axis % len(shape) for axis in axes]
    return relax.op.strided_slice(data, indices, *map(list, zip(*limited, strict=True)))


def _limit_slice(start: int, end: int, step: int, extent: int) -> tuple[int, int, int]:
    """Return the bounds and the step of a slice that stays within an axis, as TVM takes them."""
    first, last = (0, extent) if step > 0 else (-1, extent - 1)
    start, end = (index + extent if index < 0 else index for index in (start, end))
    # Unlike Python, ONNX clamps a start before the data to the first element even for a negative step.
    start, end = min(max(start, 0), last), min(max(end, first), last)
    if (end - start) * step <= 0:
        return 0, 0, 1
    # An end before the first element becomes -extent - 1, because TVM reads -1 as the last element.
    return start, end if end >= 0 else -extent - 1, step


# ---------------------------------------------------------------- convolutions and grids


def convert_conv_integer(node: NodeToConvert) -> Any:
    data, weights, *zero_points = node.inputs
    attributes, rank = node.attributes, len(list_sizes(data)) - 2
    node.refuse_auto_pad()
    zero, weight_zero = [*zero_points, None, None][:2]
    if weight_zero is not None and math.prod(list_sizes(weight_zero)) > 1:
        # The weights have one zero point for each output channel.
        weight_zero = relax.op.reshape(weight_zero, [-1, *[1] * (rank + 1)])
    axes = "DHW"[-rank:]
    operator = getattr(relax.op.nn, f"conv{rank}d")
    return operator(
        _subtract_zero_point(node, data, zero),
        _subtract_zero_point(node, weights, weight_zero),
        strides=attributes.get("strides", [1] * rank),
        padding=attributes.get("pads", [0] * (2 * rank)),
        dilation=attributes.get("dilations", [1] * rank),
        groups=attributes.get("group", 1),
        data_layout=f"NC{axes}",
        kernel_layout=f"OI{axes}",
    )


def _subtract_zero_point(node: NodeToConvert, data: Any, zero_point: Any) -> Any:
    wide = node.cast(data, "int32")
    return wide if zero_point is None else node.emit(wide - relax.op.astype(zero_point, "int32"))


def convert_affine_grid(node: NodeToConvert) -> Any:
    """Return grids in the dtype of their affine matrices; TVM always returns float32."""
    theta, size = node.inputs
    known_array(size, "size")
    grid = node.convert_by_tvm([node.cast(theta, "float32"), size])
    return relax.op.astype(node.emit(grid), dtype_of(theta))


# ---------------------------------------------------------------- sequences


# The maximum number of parts of a split: each part becomes an operator of the imported model.
_MAX_PARTS: Final = 4096


def convert_split_to_sequence(node: NodeToConvert) -> Any:
    """Split data into a tuple of parts: of the given sizes, or of one size (the last part may be smaller).

    TVM divides the axis evenly, and its result does not say how many parts there are.
    """
    data, *sizes = node.inputs
    rank = len(list_sizes(data))
    axis = node.integer("axis", 0) % max(rank, 1)
    extent = list_sizes(data)[axis]
    if not isinstance(extent, int):
        raise ValueError("the axis that it splits needs a fixed size")
    lengths = np.array(1) if not sizes or sizes[0] is None else known_array(sizes[0], "split")
    if lengths.size and lengths.min() < (0 if lengths.ndim else 1):
        raise ValueError(f"a part cannot have {int(lengths.min())} elements")
    count = lengths.size if lengths.ndim else -(-extent // int(lengths))
    if count > _MAX_PARTS:
        raise ValueError(f"it has {count:,} parts, and the limit is {_MAX_PARTS:,}")
    if lengths.ndim:
        cuts = [0, *np.cumsum(lengths).tolist()]
    else:
        cuts = [*range(0, extent, int(lengths)), extent]
    parts = [
        node.builder.emit(relax.op.strided_slice(data, [axis], [start], [end]))
        for start, end in itertools.pairwise(cuts)
    ]
    if len(node.inputs) == 1 and not node.is_set("keepdims", 1):
        parts = [node.builder.emit(relax.op.squeeze(part, [axis])) for part in parts]
    return relax.Tuple(parts)


def convert_concat_from_sequence(node: NodeToConvert) -> Any:
    """Return the parts of a sequence concatenated, without empty ones, or stacked."""
    [parts], axis = node.inputs, int(node.attributes["axis"])
    if node.is_set("new_axis"):
        return relax.op.stack(list(parts), axis)
    kept = [part for part in parts if 0 not in list_sizes(part)] or list(parts)[:1]
    return relax.op.concat(kept, axis)


# ---------------------------------------------------------------- Fourier transforms as matmuls


_MAX_FOURIER_ELEMENTS: Final = 1 << 25
_FOURIER_OPERANDS: Final = "an axis, a step or a length"


def convert_dft(node: NodeToConvert) -> Any:
    """Return the DFT of real or complex values (…, n, …, 1 or 2) along one axis."""
    x, length, axis, *_ = [*node.inputs, None, None]
    shape = list_sizes(x)
    default = node.integer("axis", 1 if node.opset < 20 else -2)
    along = (default if axis is None else known_integer(axis, _FOURIER_OPERANDS)) % len(shape)
    is_inverse, is_onesided = map(node.is_set, ("inverse", "onesided"))
    count, parts = shape[along], shape[-1]
    whole = 2 * (count - 1) if is_inverse and is_onesided else count
    whole = whole if length is None else known_integer(length, _FOURIER_OPERANDS)
    matrix = _transform(count, parts, whole, is_inverse=is_inverse, is_onesided=is_onesided)
    rank = len(shape)
    order = [*(n for n in range(rank - 1) if n != along), along, rank - 1]
    result = _multiply(node, node.emit(relax.op.permute_dims(x, order)), matrix)
    return relax.op.permute_dims(result, [order.index(n) for n in range(rank)])


def convert_stft(node: NodeToConvert) -> Any:
    """Return the STFT (batch, frames, frequencies, 2) of a signal (batch, n, 1 or 2)."""
    signal, step, window, size, *_ = [*node.inputs, None, None]
    shape, hop = list_sizes(signal), known_integer(step, _FOURIER_OPERANDS)
    length = list_sizes(window)[0] if size is None else known_integer(size, _FOURIER_OPERANDS)
    starts = np.arange((shape[1] - length) // hop + 1) * hop
    indices = relax.const((starts[:, None] + np.arange(length)).ravel(), "int64")
    split = [shape[0], len(starts), length, shape[2]]
    frames = node.emit(relax.op.reshape(relax.op.take(signal, indices, 1), split))
    if window is not None:
        frames = node.emit(frames * relax.op.reshape(window, [length, 1]))
    is_onesided = node.is_set("onesided", 1)
    matrix = _transform(length, shape[2], length, is_inverse=False, is_onesided=is_onesided)
    return _multiply(node, frames, matrix)


def _transform(
    count: int, parts: int, length: int, *, is_inverse: bool, is_onesided: bool
) -> Array:
    """Return a DFT matrix (count, parts, frequencies, result parts) for values cut or padded to `length`."""
    is_real = is_inverse and is_onesided
    frequencies = length // 2 + 1 if is_onesided and not is_inverse else length
    if count * parts * frequencies * 2 > _MAX_FOURIER_ELEMENTS:
        raise ValueError(f"a transform of {count:,} numbers is not supported")
    sign = 1 if is_inverse else -1
    product = np.outer(np.arange(count), np.arange(frequencies)) % length
    turn = np.exp(sign * 2j * np.pi * product / length)
    turn[length:] = 0
    if is_real:
        # The other half of the spectrum is the complex conjugate, so these terms count twice.
        index = np.arange(count)
        turn *= np.where((index == 0) | (2 * index == length), 1, 2)[:, None]
        turn[length // 2 + 1 :] = 0
    if is_inverse:
        turn /= length
    real = np.stack([turn.real, turn.imag], -1)
    imaginary = np.stack([-turn.imag, turn.real], -1)
    matrix: Array = np.stack([real, imaginary][:parts], 1)
    return matrix[..., :1] if is_real else matrix


def _multiply(node: NodeToConvert, x: Any, matrix: Array) -> Any:
    count, parts, frequencies, results = matrix.shape
    shape = list_sizes(x)[:-2]
    flat = node.emit(relax.op.reshape(x, [*shape, count * parts]))
    weights = relax.const(matrix.reshape(count * parts, frequencies * results).astype(dtype_of(x)))
    product = node.emit(relax.op.matmul(flat, weights))
    return node.emit(relax.op.reshape(product, [*shape, frequencies, results]))


# ---------------------------------------------------------------- resizing
# TVM does not support rounded sizes, sizes that keep the aspect ratio, some axes, antialiasing, and other
# dtypes than float32.


_MAX_TAPS: Final = 256
_SPATIAL: Final = 2


class _Axis(NamedTuple):
    """An axis to resize: its size in pixels before and after, and the exact length after, before rounding."""

    axis: int
    source: int
    size: int
    length: float


def convert_resize(node: NodeToConvert) -> Any:
    """Convert a Resize with constant scales or sizes; TVM's own converter is used where it is correct."""
    attributes, axes = node.attributes, _find_axes(node)
    antialias = node.is_set("antialias")
    mode = read_interpolation(attributes)
    if axes is None:
        return node.by_tvm()
    is_needed = (
        antialias
        or "axes" in attributes
        or "keep_aspect_ratio_policy" in attributes
        or mode.coordinates == "half_pixel_symmetric"
        # TVM does not resize the batch and channel axes.
        or any(axis.axis < _SPATIAL for axis in axes)
        # Scales are float32, so a size of 6 by 1/3 is accepted as exactly 2.
        or any(not math.isclose(axis.length, axis.size, rel_tol=1e-5) for axis in axes)
    )
    is_supported = resize.is_supported(mode)
    if is_supported and (is_needed or dtype_of(node.inputs[0]) != "float32"):
        return _resize_axes(node, axes, mode, antialias)
    if is_needed:
        raise ValueError(
            f"the mode {mode.coordinates} with a rounded size or axes is not supported"
        )
    return node.by_tvm()


def _resize_axes(
    node: NodeToConvert, axes: Sequence[_Axis], mode: Interpolation, antialias: bool
) -> Any:
    """Emit a kernel for each axis, which interpolates in float32, or in float64 for float64 data.

    As in ONNX Runtime, integers are truncated once after all axes for linear interpolation, and are rounded after
    each axis with antialiasing.
    """
    data, dtype = node.inputs[0], dtype_of(node.inputs[0])
    is_mixed, is_integer = mode.method != "nearest_neighbor", not is_float(node.inputs[0])
    if antialias and dtype == "int8":
        raise ValueError("antialiasing of int8 is not supported")
    wide = "float32" if is_mixed and dtype != "float64" else dtype
    data = node.cast(data, wide) if wide != dtype else data
    tables: dict[int, list[Any]] = {}
    for axis, source, size, length in axes:
        positions, weights = resize.find_taps(source, size, mode, length, antialias=antialias)
        if positions.shape[1] > _MAX_TAPS:
            raise ValueError(f"antialiasing from {source} to {size} pixels is not supported")
        weights = weights.astype(wide) if is_mixed else weights
        tables[axis] = [relax.const(positions), relax.const(weights)]
    is_cut = is_integer and mode.method == "linear" and not antialias
    order = sorted(tables, reverse=is_integer)
    for group in [tuple(sorted(tables))] if is_cut else [(axis,) for axis in order]:
        function = functools.partial(resize.resize, axes=group, steps={})
        operands = [table for axis in group for table in tables[axis]]
        data = node.builder.emit_te(function, data, *operands, primfunc_name_hint="resize")
        if is_integer and antialias:
            limits = np.iinfo(dtype)
            rounded = relax.op.floor(relax.op.add(data, constant(0.5, data)))
            data = node.emit(relax.op.clip(rounded, float(limits.min), float(limits.max)))
    return relax.op.astype(data, dtype) if wide != dtype else data


def _find_axes(node: NodeToConvert) -> list[_Axis] | None:
    """Return the axes that change; None if scales and sizes are not constants."""
    shape = list_sizes(node.inputs[0])
    axes = [int(axis) % len(shape) for axis in node.attributes.get("axes", range(len(shape)))]
    extents = [shape[axis] for axis in axes]
    scales, sizes = (_constant_operand(node, position) for position in (2, 3))
    if scales is not None:
        lengths = [extent * float(scale) for extent, scale in zip(extents, scales, strict=True)]
        counts = [math.floor(length * (1 + 1e-7)) for length in lengths]
    elif sizes is not None:
        counts = [int(size) for size in sizes]
        lengths = [float(count) for count in counts]
        policy = node.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            factor = choose(n / extent for n, extent in zip(counts, extents, strict=True))
            lengths = [extent * factor for extent in extents]
            counts = [math.floor(length + 0.5) for length in lengths]
    else:
        return None
    all_axes = [_Axis(*axis) for axis in zip(axes, extents, counts, lengths, strict=True)]
    return [axis for axis in all_axes if axis.source != axis.length]


def _constant_operand(node: NodeToConvert, position: int) -> Array | None:
    value = node.operand(position)
    if isinstance(value, relax.ShapeExpr):
        return np.array([int(extent) for extent in value.values])
    array = np.asarray(value.value.numpy()) if isinstance(value, tvm.ir.Constant) else None
    return array if array is not None and array.size else None


# ---------------------------------------------------------------- data


def convert_one_hot(node: NodeToConvert) -> Any:
    """Add an axis: one value where the position equals the index, and another value elsewhere."""
    indices, depth, values = node.inputs
    count = known_integer(depth, "depth")
    known = known_array(values, "values")
    off, on = (relax.const(value, str(known.dtype)) for value in known)
    rank = len(list_sizes(indices)) + 1
    axis = node.integer("axis", -1) % rank
    wide = node.emit(relax.op.expand_dims(relax.op.astype(indices, "int64"), axis))
    from_end = relax.op.add(wide, relax.const(count, "int64"))
    wide = relax.op.where(relax.op.less(wide, relax.const(0, "int64")), from_end, wide)
    return relax.op.where(relax.op.equal(wide, count_along(axis, count, rank)), on, off)


def convert_tile(node: NodeToConvert) -> Any:
    """Return repeated data; repeats of axes of size 1 are a broadcast, which kernels read without a copy."""
    data, counts = node.inputs[0], constant_array(node.inputs[1])
    if counts is None or not are_tensors([data]) or counts.size != len(list_sizes(data)):
        return node.by_tvm()
    pairs = list(zip(list_sizes(data), map(int, counts), strict=True))
    if any(count < 1 or (count > 1 and size != 1) for size, count in pairs):
        return node.by_tvm()
    shape = [count if count > 1 else size for size, count in pairs]
    return relax.op.broadcast_to(data, relax.ShapeExpr(shape))


def convert_col2im(node: NodeToConvert) -> Any:
    columns, *operands = node.inputs
    names = ("image_shape", "block_shape")
    image, block = (known_array(x, name).tolist() for x, name in zip(operands, names, strict=True))
    windows = Windows.read(node.attributes, block)
    counts = [
        (size + before + after - gap * (edge - 1) - 1) // stride + 1
        for size, edge, stride, gap, before, after in zip(image, *windows, strict=True)
    ]
    shape = list_sizes(columns)
    fits = len(shape) == 3 and min(counts) >= 1 and not _differ(shape[2], math.prod(counts))
    if not fits or not isinstance(shape[1], int) or shape[1] % math.prod(block):
        raise ValueError(
            f"columns of shape {shape} do not fit blocks of {block} in an image of {image}"
        )
    add = functools.partial(add_blocks, image=image, counts=counts, windows=windows)
    return node.kernel(add, columns)


# The opset in which RoiAlign's default became the half-pixel coordinate transformation.
_ALIGNED_REGIONS: Final = 16
# The maximum number of samples of a bin along an axis: more would make the unrolled kernel too long.
_MAX_SAMPLES: Final = 4
# The square of this limit fits into 32 bits.
_MAX_COUNTED_SAMPLES: Final = 1 << 15
_IMAGE_RANK: Final = 4
# The names of GridSample's cubic mode: before opset 20, and from opset 20 on.
_CUBIC: Final = ("bicubic", "cubic")


def convert_grid_sample(node: NodeToConvert) -> Any:
    """Sample at the positions of a grid.

    Dynamic volumes are rejected, because TVM's kernel for them takes minutes to build.
    """
    shapes = [list_sizes(operand) for operand in node.inputs]
    is_dynamic = any(not isinstance(size, int) for shape in shapes for size in shape)
    if len(shapes[0]) > _IMAGE_RANK and is_dynamic:
        raise ValueError("a volume needs a fixed shape")
    data, grid = node.inputs
    is_reflected = node.text("padding_mode", "zeros") == "reflection"
    if is_reflected and node.is_set("align_corners"):
        # TVM divides by an axis' length minus 1, which may be 0.
        if not is_dynamic:
            for axis in range(2, len(shapes[0])):
                if shapes[0][axis] == 1:
                    data = node.emit(relax.op.concat([data, data], axis))
        elif node.text("mode", "linear") in _CUBIC:
            raise ValueError("with cubic samples of reflected images, these need a fixed shape")
        else:
            return _sample_reflected(node)
    return node.convert_by_tvm([data, grid])


def _sample_reflected(node: NodeToConvert) -> Any:
    """Sample dynamic-size images with reflection padding, by computing the reflected positions here."""
    data, grid = node.inputs
    half, one, two = (constant(value, grid) for value in (0.5, 1, 2))
    # The distance from the first pixel as a fraction of the axis, with period 2.
    away = node.emit(relax.op.abs((grid + one) * half))
    away = node.emit(away - relax.op.floor(away * half) * two)
    away = node.emit(relax.op.minimum(away, two - away))
    indices = node.emit(relax.op.permute_dims(away * two - one, [0, 3, 1, 2]))
    method = node.text("mode", "linear")
    return relax.op.image.grid_sample(
        data,
        indices,
        method="nearest" if method == "nearest" else "bilinear",
        layout="NCHW",
        padding_mode="border",
        align_corners=True,
    )


def convert_roi_align(node: NodeToConvert) -> Any:
    """Convert a RoiAlign; TVM's result differs for aligned regions and for mode max."""
    default = "half_pixel" if node.opset >= _ALIGNED_REGIONS else "output_half_pixel"
    mode = node.text("coordinate_transformation_mode", default)
    regions = Regions(
        height=node.integer("output_height", 1),
        width=node.integer("output_width", 1),
        samples=node.integer("sampling_ratio", 0),
        scale=node.number("spatial_scale", 1.0),
        is_aligned=mode == "half_pixel",
        takes_greatest=node.text("mode", "avg") == "max",
    )
    data, boxes, images = node.inputs
    _check_regions(node, regions)
    height, width = list_sizes(data)[2:]
    is_dynamic = not (isinstance(height, int) and isinstance(width, int))
    if is_dynamic or not 0 < regions.samples <= _MAX_SAMPLES:
        return node.kernel(functools.partial(align_regions, regions=regions), *node.inputs)
    # Channels are vector lanes, so that all lanes share the sampling coordinates.
    find = functools.partial(find_samples, sizes=(height, width), regions=regions)
    found = node.kernel(find, boxes)
    tables = [node.emit(relax.TupleGetItem(found, n)) for n in range(len(found.ty.fields))]
    last = node.builder.emit(relax.op.permute_dims(data, [0, 2, 3, 1]))
    mix = functools.partial(combine_samples, regions=regions)
    mixed = node.builder.emit_te(
        mix, last, images, *tables, primfunc_name_hint="combine_samples", primfunc_attrs=OPAQUE
    )
    return relax.op.permute_dims(mixed, [0, 3, 1, 2])


def _check_regions(node: NodeToConvert, regions: Regions) -> None:
    """Refuse nodes that ONNX Runtime refuses, and a sampling ratio above the limit."""
    data, boxes, images = map(list_sizes, node.inputs)
    mode = node.text("mode", "avg")
    if mode not in ("avg", "max"):
        raise ValueError(f"mode is {mode}, not avg or max")
    if regions.height < 1 or regions.width < 1:
        raise ValueError(f"its bins are {regions.height}×{regions.width}, and it needs one or more")
    if not 0 <= regions.samples <= _MAX_COUNTED_SAMPLES:
        raise ValueError(
            f"sampling_ratio is {regions.samples}, and may be 0 to {_MAX_COUNTED_SAMPLES}"
        )
    if not 0 < regions.scale < math.inf:
        raise ValueError(f"spatial_scale is {regions.scale}, and has to be a number above 0")
    if len(data) != _IMAGE_RANK or len(boxes) != 2 or _differ(boxes[1], 4):
        raise ValueError(f"images of shape {data} and regions of shape {boxes} do not fit")
    if len(images) != 1 or _differ(images[0], boxes[0]):
        raise ValueError(f"numbers of images of shape {images} do not fit regions of shape {boxes}")


def _differ(size: Any, other: Any) -> bool:
    """Return whether two sizes are both known and differ."""
    return isinstance(size, int) and isinstance(other, int) and size != other


def _windows(node: NodeToConvert) -> Windows:
    sizes = list(node.attributes["kernel_shape"])
    rank = len(list_sizes(node.inputs[0])) - 2
    for name, count, least in (
        ("kernel_shape", rank, 1),
        ("strides", rank, 1),
        ("dilations", rank, 1),
        ("pads", 2 * rank, 0),
    ):
        numbers = list(node.attributes.get(name, [least] * count))
        if len(numbers) != count or min(numbers, default=least) < least:
            raise ValueError(f"{name} is {numbers}, and needs {count} numbers from {least} up")
    pads = node.attributes.get("pads", [])
    if any(pad >= size for pad, size in zip(pads, sizes * 2, strict=False)):
        raise ValueError("pads are not smaller than the window")
    return Windows.read(node.attributes, sizes)


def convert_max_pool(node: NodeToConvert) -> Any:
    """Return the maxima of windows, and their indices if a node reads the indices."""
    if node.count_outputs() == 1:
        return node.by_tvm()
    windows = _windows(node)
    if math.prod(windows.sizes) > MAX_WINDOW:
        raise ValueError(f"a window may have at most {MAX_WINDOW:,} elements")
    node.refuse_auto_pad()
    maxima = node.builder.emit(node.by_tvm())
    counts_columns = node.is_set("storage_order")
    find = functools.partial(find_maxima, windows=windows, counts_columns=counts_columns)
    return relax.Tuple([maxima, node.kernel(find, node.inputs[0], maxima)])


def convert_max_unpool(node: NodeToConvert) -> Any:
    """Return zeros with each window's maximum at its index.

    As in ONNX Runtime, indices refer to the given output shape, and are clamped to it.
    """
    maxima, indices, *_ = node.inputs
    windows, pooled = _windows(node), list_sizes(maxima)
    if not tvm_ffi.structural_equal(indices.ty.shape, maxima.ty.shape):
        raise ValueError(
            f"indices of shape {list_sizes(indices)} do not match values of shape {pooled}"
        )
    shape = _constant_operand(node, 2)
    if shape is None and node.operand(2) is not None:
        raise ValueError("its shape depends on the inputs, which is not supported")
    sizes = infer_unpooled_shape(pooled, windows)
    if shape is not None:
        given = [int(size) for size in shape]
        pairs = zip(given, sizes, strict=False)
        is_small = any(isinstance(least, int) and size < least for size, least in pairs)
        if len(given) != len(sizes) or is_small:
            raise ValueError(f"a result of shape {given} does not have room for {sizes}")
        sizes = given
        if (elements := math.prod(given)) > MAX_ELEMENTS:
            text = f"a result of {elements:,} elements is above the limit of {MAX_ELEMENTS:,}"
            raise ValueError(text)
    count = math.prod(sizes)
    zeros = node.emit(relax.op.zeros([count], dtype_of(maxima)))
    inside = node.builder.emit_te(clamp_indices, indices, count, primfunc_name_hint="limit_places")
    flat = [node.emit(relax.op.reshape(value, [-1])) for value in (inside, maxima)]
    scattered = node.emit(relax.op.scatter_elements(zeros, *flat, axis=0))
    return relax.op.reshape(scattered, sizes)


def convert_reverse_sequence(node: NodeToConvert) -> Any:
    """Return data with the first steps of each sequence reversed; steps and sequences are axes 0 and 1."""
    data, lengths = map(list_sizes, node.inputs)
    axes = [node.integer("batch_axis", 1), node.integer("time_axis", 0)]
    if len(data) < 2 or sorted(axes) != [0, 1]:
        text = f"batch_axis and time_axis are {axes} of {len(data)} axes, and have to be 0 and 1"
        raise ValueError(f"{text}, or 1 and 0")
    if len(lengths) != 1 or _differ(lengths[0], data[axes[0]]):
        raise ValueError(f"lengths of shape {lengths} do not fit {data[axes[0]]} sequences")
    return node.builder.emit_te(reverse_sequences, *node.inputs, *axes)


def convert_det(node: NodeToConvert) -> Any:
    [matrices] = node.inputs
    shape = list_sizes(matrices)
    if len(shape) < 2 or _differ(shape[-2], shape[-1]):
        raise ValueError(f"data of shape {shape} are not square matrices")
    rows = shape[-1] if isinstance(shape[-2], int) else shape[-2]
    if not isinstance(rows, int) or rows > MAX_DETERMINANT_ROWS:
        raise ValueError(f"a matrix may have at most {MAX_DETERMINANT_ROWS} rows, and has {rows}")
    return node.builder.emit_te(determinant, matrices)


def convert_non_max_suppression(node: NodeToConvert) -> Any:
    """Convert to a kernel that also counts the selected boxes, or to TVM's with a data-dependent shape.

    ONNX drops a box whose overlap exceeds the threshold; TVM drops it also if the overlap equals the threshold.
    """
    if node.counts_rows:
        return _count_selected(node)
    boxes, scores = node.inputs[:2]
    limit = _known_or(node.operand(2), "max_output_boxes_per_class", np.int64(0))
    limit = np.minimum(limit, list_sizes(scores)[-1])
    overlap = _known_or(node.operand(3), "iou_threshold", np.float32(0))
    score = _known_or(node.operand(4), "score_threshold", np.float32(-np.inf))
    if score < 0:
        scores, score = _ranks_above(node, scores, score), np.float32(0)
    thresholds = (limit, np.nextafter(overlap, np.float32(np.inf)), score)
    constants = [relax.const(np.asarray(threshold)) for threshold in thresholds]
    return node.convert_by_tvm([boxes, scores, *constants])


def _count_selected(node: NodeToConvert) -> Any:
    """Return the selected boxes, padded with rows of zeros to their maximum number.

    As in ONNX Runtime, boxes are ordered by class, then by descending score; equal scores keep the order of the
    boxes. A box is dropped if it overlaps a selected one by more than the threshold, or if its score is NaN.
    """
    boxes, scores = node.inputs[:2]
    limit, overlap, threshold = (node.operand(index) for index in (2, 3, 4))
    batch, classes, count = (int(extent) for extent in scores.ty.shape)
    most = 0 if limit is None else count
    if isinstance(limit, tvm.ir.Constant):
        # Models often pass the largest integer for "all boxes".
        most = min(max(known_integer(limit, ""), 0), count)
    rows = batch * classes * most
    if rows == 0:
        return relax.const(np.zeros((0, SELECTED_COLUMNS), np.int64), "int64")
    defaults = (np.int64(0), np.float32(0), np.float32(-np.inf))
    operands = [
        _as_vector(node, value, default)
        for value, default in zip((limit, overlap, threshold), defaults, strict=True)
    ]
    operator = NonMaxSuppression(
        rows=rows,
        is_centered=node.is_set("center_point_box"),
        takes_all_scores=threshold is None,
    )
    result = node.builder.emit(operator.call(boxes, scores, *operands))
    return node.builder.emit(relax.TupleGetItem(result, 0))


def _as_vector(node: NodeToConvert, value: Any, default: Any) -> Any:
    """Return an operand, or the default of a missing one, as a scalar tensor."""
    if value is None or isinstance(value, tvm.ir.Constant):
        return relax.const(_known_or(value, "", default).reshape(1), str(default.dtype))
    number = node.builder.emit(relax.op.astype(value, str(default.dtype)))
    return node.builder.emit(relax.op.reshape(number, (1,)))


def _ranks_above(node: NodeToConvert, scores: Any, threshold: Any) -> Any:
    """Return positive ranks of scores above a threshold, else 0: TVM does not suppress negative scores."""
    order = node.emit(relax.op.argsort(scores, descending=True, dtype="int64"))
    indices = node.emit(relax.op.argsort(order, dtype="int64"))
    ranks = relax.const(list_sizes(scores)[-1], "int64") - indices
    ranks = node.cast(ranks, dtype_of(scores))
    is_above = node.emit(relax.op.greater(scores, constant(float(threshold), scores)))
    return node.emit(relax.op.where(is_above, ranks, constant(0, scores)))


def _known_or(expr: Any, name: str, default: Any) -> Any:
    """Return a constant operand in the default's dtype, or the default if the operand is missing."""
    return default if expr is None else known_array(expr, name).astype(default.dtype)


def convert_block_quantized(node: NodeToConvert) -> Any:
    sizes = {name: int(node.attributes[name]) for name in ("bits", "group", "depth", "zero")}
    operator = BlockQuantizedWeights(**sizes, rounds_data=node.is_set("rounds_data"))
    return operator.call(*BlockQuantizedOperands(*node.inputs))


def convert_take(node: NodeToConvert) -> Any:
    """Gather entries by indices of any integer dtype; `mode` handles indices outside the axis."""
    data, indices = node.inputs
    positions = node.cast(indices, "int64")
    return relax.op.take(data, positions, node.integer("axis", 0), node.text("mode", "clip"))


def convert_own(node: NodeToConvert, operator: type[ModelOperator]) -> Any:
    kinds = get_type_hints(operator)
    fields = {f.name: kinds[f.name](node.attributes[f.name]) for f in dataclasses.fields(operator)}
    return node.builder.emit(operator(**fields).call(*node.inputs))
