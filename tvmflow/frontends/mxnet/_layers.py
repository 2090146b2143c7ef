"""Converters of layers over images and sequences, such as convolution and pooling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem
from tvmflow.frontends.mxnet._op import (
    Converter,
    Expr,
    Op,
    broadcast_along,
    per_axis,
    shown,
    spatial_rank,
)
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, sizes_of
from tvmflow.graph.ir_operators import BoxNms, MultiboxDetection

R = relax.op


# ---------------------------------------------------------------- convolutions and fully connected layers


_CONV: Final = {1: R.nn.conv1d, 2: R.nn.conv2d, 3: R.nn.conv3d}
_DECONV: Final = {1: R.nn.conv1d_transpose, 2: R.nn.conv2d_transpose, 3: R.nn.conv3d_transpose}


def _kernel(op: Op) -> tuple[int, ...]:
    dims, kernel = spatial_rank(op), op.integers("kernel")
    if len(kernel) != dims:
        op.refuse(f"kernel {kernel} does not fit data of shape {shown(op.sizes())}")
    return kernel


def _add_bias(op: Op, out: Expr, filters: int, *, no_bias: bool) -> Expr:
    """Return the result with the bias of each filter, unless `no_bias` (by default as given here) is set."""
    if op.flag("no_bias", no_bias):
        return out
    return out + broadcast_along(op.expect_shape(2, (filters,)), 1, op.rank())


def _convolution(op: Op) -> Expr:
    kernel = _kernel(op)
    dims = len(kernel)
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    weight = op.expect_shape(1, (filters, op.size(1) // groups, *kernel))
    out = _CONV[dims](
        op[0],
        weight,
        strides=per_axis(op, "stride", dims, 1),
        padding=per_axis(op, "pad", dims, 0) * 2,
        dilation=per_axis(op, "dilate", dims, 1),
        groups=groups,
    )
    return _add_bias(op, out, filters, no_bias=False)


def _fully_connected(op: Op) -> Expr:
    """`FullyConnected`: data · weightᵀ + bias; `flatten` joins all axes but the first."""
    data, rest = op[0], op.sizes()[-1:]
    if op.flag("flatten", True) and op.rank() != 2:
        rest = op.sizes()[1:]
        data = R.reshape(data, (op.sizes()[0], math.prod(rest)))
    width = math.prod(op.fixed(rest))
    hidden = op.integer("num_hidden")
    weight = op.expect_shape(1, (hidden, width))
    out = R.matmul(data, R.permute_dims(weight, [1, 0]))
    if op.flag("no_bias", False):
        return out
    return out + op.expect_shape(2, (hidden,))


def _deconvolution(op: Op) -> Expr:
    """`Deconvolution`: a transposed convolution; its weight is (input channels, filters / groups, kernel)."""
    kernel = _kernel(op)
    dims = len(kernel)
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    stride, dilate = per_axis(op, "stride", dims, 1), per_axis(op, "dilate", dims, 1)
    weight = op.expect_shape(1, (op.size(1), filters // groups, *kernel))
    pad, adj = _deconvolution_padding(op, kernel, stride, dilate)
    if max(stride) > 1 and max(dilate) > 1:
        op.refuse(
            f"stride={stride} with dilate={dilate} is not supported: MXNet itself miscomputes it on CPUs"
        )
    if any(a >= s for a, s in zip(adj, stride, strict=True)):
        op.refuse(f"adj {adj} must be smaller than stride {stride}")
    out = _DECONV[dims](
        op[0],
        weight,
        strides=stride,
        padding=pad * 2,
        output_padding=adj,
        dilation=dilate,
        groups=groups,
    )
    return _add_bias(op, out, filters, no_bias=True)


def _deconvolution_padding(
    op: Op, kernel: tuple[int, ...], stride: tuple[int, ...], dilate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return padding and output padding of each dimension.

    They follow from `target_shape` where it is set (MXNet: DeconvolutionParam::InferPad).
    """
    target, dims = op.integers("target_shape", ()), len(kernel)
    if not any(target):
        return per_axis(op, "pad", dims, 0), per_axis(op, "adj", dims, 0)
    op.ignore("pad", "adj")
    full_size = tuple(
        (n - 1) * s + d * (k - 1) + 1
        for n, s, d, k in zip(op.fixed(op.sizes()[2:]), stride, dilate, kernel, strict=True)
    )
    excess = [full - t for full, t in zip(full_size, target, strict=True)]
    if min(excess) < 0:
        op.refuse(f"target_shape={target} is larger than its largest output {full_size}")
    return tuple((e + 1) // 2 for e in excess), tuple(e % 2 for e in excess)


# ---------------------------------------------------------------- pooling


_MAX_POOL: Final = {1: R.nn.max_pool1d, 2: R.nn.max_pool2d, 3: R.nn.max_pool3d}
_AVG_POOL: Final = {1: R.nn.avg_pool1d, 2: R.nn.avg_pool2d, 3: R.nn.avg_pool3d}


def _pool(op: Op, pools: Mapping[str, _Pool]) -> Expr:
    dims = spatial_rank(op)
    size = op.sizes()[2:]
    if any(map(is_dynamic, size)):
        return _pool_dynamic(op, pools)
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        kernel, stride, before, out = size, (1,) * dims, (0,) * dims, (1,) * dims
    else:
        kernel, stride, before, convention = _read_windows(op, dims)
        out = tuple(map(_OUTPUT_SIZES[convention], size, kernel, stride, before))
    # Zeros after the data complete the last window, so that no rounding mode is needed.
    after = tuple(
        max((o - 1) * s + k - n - b, 0)
        for o, s, k, n, b in zip(out, stride, kernel, size, before, strict=True)
    )
    windows = _Windows(size=size, kernel=kernel, stride=stride, before=before, after=after, out=out)
    kind = op.choice("pool_type", "max", tuple(pools))
    if kind != "lp":
        op.ignore("p_value")
    if kind != "avg":
        op.ignore("count_include_pad")
    return pools[kind](op, windows)


def _pool_dynamic(op: Op, pools: Mapping[str, _Pool]) -> Expr:
    """Pool images of dynamic size: the divisor must be the same at all sizes."""
    dims, size = spatial_rank(op), op.sizes()[2:]
    kind = op.choice("pool_type", "max", tuple(pools))
    op.ignore("p_value", "count_include_pad")
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        if kind not in _GLOBAL_POOLS:
            op.fixed(size)
        return _GLOBAL_POOLS[kind](op[0], list(range(2, op.rank())), keepdims=True)
    kernel, stride, before, convention = _read_windows(op, dims)
    rests = [n + 2 * b - k for n, b, k in zip(size, before, kernel, strict=True)]
    is_whole = all(
        op.ranges.is_equal(rest // s * s, rest) for rest, s in zip(rests, stride, strict=True)
    )
    windows = _Windows(
        size=size, kernel=kernel, stride=stride, before=before, after=before, out=size
    )
    is_rounded_up = convention == "full" and not is_whole
    if kind == "max":
        return windows.pool(_MAX_POOL, op[0], ceil_mode=is_rounded_up)
    if is_rounded_up:
        raise DynamicShapeProblem(
            f"its last window (pooling_convention=full) differs between sizes; let them be multiples "
            f"of {math.lcm(*stride)} (`multiple_of`)"
        )
    if kind == "avg" and pools[kind] is _average_pool:
        includes = op.flag("count_include_pad", True)
        return windows.pool(_AVG_POOL, op[0], count_include_pad=includes)
    return pools[kind](op, windows)


def _read_windows(
    op: Op, dims: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]:
    """Return kernel, stride and padding of each dimension, and how their number is rounded."""
    if not op.has("kernel"):
        op.refuse("the attribute kernel is missing")
    kernel = per_axis(op, "kernel", dims, 1)
    stride, before = per_axis(op, "stride", dims, 1), per_axis(op, "pad", dims, 0)
    return kernel, stride, before, op.choice("pooling_convention", "valid", tuple(_OUTPUT_SIZES))


class _Windows(NamedTuple):
    """The windows of a pooling: one value for each spatial dimension, `out` of them in total."""

    size: tuple[IrSize, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[IrSize, ...]

    def pool(self, operator: Mapping[int, Any], data: Expr, **options: Any) -> Expr:
        """Return the result of a Relax pooling over these windows."""
        padding = self.before + self.after
        return operator[len(self.kernel)](data, self.kernel, self.stride, padding, **options)

    def mean(self, data: Expr) -> Expr:
        """Return the mean of each window, in which padding counts as zeros."""
        return self.pool(_AVG_POOL, data, count_include_pad=True)

    def counts(self, padded: Sequence[int], dtype: str) -> np.ndarray[Any, Any]:
        """Return how many positions of each window lie within the data and `padded` positions around it."""
        counts = np.ones((), dtype)
        for n, k, s, b, o, p in zip(
            self.size, self.kernel, self.stride, self.before, self.out, padded, strict=True
        ):
            starts = np.arange(o) * s - b
            inside = np.minimum(starts + k, n + p) - np.maximum(starts, -p)
            counts = np.multiply.outer(counts, np.maximum(inside, 1).astype(dtype))
        return counts


def _average_pool(op: Op, windows: _Windows) -> Expr:
    """Divide by the positions within the data and its declared padding; `full` convention adds none."""
    padded = windows.before if op.flag("count_include_pad", True) else (0,) * len(windows.kernel)
    counts = windows.counts(padded, op.dtype())
    window_size = math.prod(windows.kernel)
    if (counts == window_size).all():
        return windows.mean(op[0])
    return windows.mean(op[0]) * relax.const(window_size / counts)


def _lp_pool(op: Op, windows: _Windows) -> Expr:
    """Return `(Σ |x|^p)^(1/p)` of each window."""
    power = op.integer("p_value")
    if power not in (1, 2, 3):
        op.refuse(f"p_value={power} is not supported, only 1, 2 and 3")
    size = R.abs(op[0])
    mean = windows.mean(R.power(size, op.scalar(power)) if power > 1 else size)
    total = mean * op.scalar(math.prod(windows.kernel))
    return R.power(total, op.scalar(1 / power)) if power > 1 else total


_Pool = Callable[[Op, _Windows], Expr]


_GLOBAL_POOLS: Final = {"max": R.max, "avg": R.mean, "sum": R.sum}
_POOLS: Final[dict[str, _Pool]] = {
    "max": lambda op, windows: windows.pool(_MAX_POOL, op[0]),
    "avg": _average_pool,
    "sum": lambda op, windows: windows.mean(op[0]) * op.scalar(math.prod(windows.kernel)),
    "lp": _lp_pool,
}
# `Pooling_v1` divides every average by the size of the full window, also at the border.
_POOLS_V1: Final[dict[str, _Pool]] = {**_POOLS, "avg": lambda op, windows: windows.mean(op[0])}


# The number of windows by convention: (size, kernel, stride, padding) -> count.
_OUTPUT_SIZES: Final[dict[str, Callable[[int, int, int, int], int]]] = {
    "valid": lambda n, k, s, p: (n + 2 * p - k) // s + 1,
    "full": lambda n, k, s, p: -((k - n - 2 * p) // s) + 1,
}


def _adaptive_avg_pooling(op: Op) -> Expr:
    """`contrib.AdaptiveAvgPooling2D`: a single number in `output_size` is for both dimensions."""
    size = op.integers("output_size", (1,)) or (1,)
    return R.nn.adaptive_avg_pool2d(op[0], output_size=size if len(size) == 2 else size * 2)


# ---------------------------------------------------------------- normalization


def gamma_is_fixed(attrs: Mapping[str, str]) -> bool:
    """Return whether gamma counts as 1, whatever the checkpoint has: BatchNorm's default."""
    return str(attrs.get("fix_gamma", "True")).lower() in ("true", "1")


def _batch_norm(op: Op) -> Expr:
    """`BatchNorm`: `data · s + (beta − mean · s)` with `s = gamma / sqrt(var + eps)`.

    s and the second part depend on weights only, and are computed at build time.
    """
    axis = op.axis(op.integer("axis", 1))
    op.ignore("fix_gamma", "use_global_stats", "output_mean_var")
    size = (op.size(axis),)
    gamma = op.expect_shape(1, size) if op.reads(1) else op.scalar(1.0)
    beta, mean, var = (op.expect_shape(index, size) for index in (2, 3, 4))
    scale = op.emit(gamma / R.sqrt(var + op.scalar(op.number("eps", 1e-3))))
    shift = beta - mean * scale
    rank = op.rank()
    return op[0] * broadcast_along(scale, axis, rank) + broadcast_along(shift, axis, rank)


def _standardize(op: Op, value: Expr, axes: Sequence[int], eps: float) -> Expr:
    """Return `(x − mean) / sqrt(var + eps)` over `axes`."""
    value = op.emit(value)
    centered = op.emit(value - R.mean(value, list(axes), keepdims=True))
    var = R.mean(centered * centered, list(axes), keepdims=True)
    return centered / R.sqrt(var + op.scalar(eps))


def _scale_and_shift(op: Op, normal: Expr, axis: int) -> Expr:
    """Return `normal · gamma + beta`, which have one value for each position along `axis`."""
    size = (op.size(axis),)
    gamma, beta = (broadcast_along(op.expect_shape(i, size), axis, op.rank()) for i in (1, 2))
    return normal * gamma + beta


def _layer_norm(op: Op) -> Expr:
    axis = op.axis(op.integer("axis", -1))
    op.ignore("output_mean_var")
    normal = _standardize(op, op[0], [axis], op.number("eps", 1e-5))
    return _scale_and_shift(op, normal, axis)


def _group_norm(op: Op) -> Expr:
    """`GroupNorm`: gamma and beta have one value per group (MXNet up to 1.9) or per channel (later Gluon)."""
    op.ignore("output_mean_var")
    shape, groups = op.sizes(), op.integer("num_groups", 1)
    batch, channels = shape[0], op.size(1)
    if channels % groups:
        op.refuse(f"{channels} channels do not divide into num_groups={groups}")
    grouped = (batch, groups, channels // groups, *shape[2:])
    data, eps = R.reshape(op[0], grouped), op.number("eps", 1e-5)
    normal = R.reshape(_standardize(op, data, range(2, len(grouped)), eps), shape)
    affine = []
    for index in (1, 2):
        if op.shape(index) == (groups,) and groups != channels:
            vector = R.repeat(op[index], channels // groups, axis=0)
        else:
            vector = op.expect_shape(index, (channels,))
        affine.append(broadcast_along(vector, 1, len(shape)))
    return normal * affine[0] + affine[1]


_L2_AXES: Final[dict[str, Callable[[int], range]]] = {
    "instance": lambda rank: range(1, rank),
    "channel": lambda rank: range(1, 2),
    "spatial": lambda rank: range(2, rank),
}


def _l2_normalization(op: Op) -> Expr:
    """`L2Normalization`: `x / sqrt(Σ x² + eps)` over each instance, its channels or its positions."""
    axes = list(op.lookup("mode", "instance", _L2_AXES)(op.rank()))
    total = R.sum(op[0] * op[0], axes, keepdims=True)
    return op[0] / R.sqrt(total + op.scalar(op.number("eps", 1e-10)))


def _lrn(op: Op) -> Expr:
    """`LRN`: `x / (knorm + alpha · mean of x² over nsize channels)^beta`.

    The mean is a pooling along channels.
    """
    size = op.integer("nsize")
    if size % 2 == 0:
        op.refuse(f"nsize={size} is even")
    op.expect_rank(4)
    batch, channels, height, width = op.sizes()
    squares = R.reshape(op[0] * op[0], (batch, 1, channels, height * width))
    padding = (size // 2, 0, size // 2, 0)
    mean = R.nn.avg_pool2d(squares, pool_size=(size, 1), padding=padding, count_include_pad=True)
    knorm, alpha = op.scalar(op.number("knorm", 2.0)), op.scalar(op.number("alpha", 1e-4))
    base = knorm + alpha * R.reshape(mean, op.sizes())
    return op[0] / R.power(base, op.scalar(op.number("beta", 0.75)))


# ---------------------------------------------------------------- sampling of images


def _up_sampling(op: Op) -> Expr:
    """`UpSampling`: repeats each pixel so that all inputs get the size of the first one times `scale`."""
    scale = op.integer("scale")
    kind = op.choice("sample_type", "", ("nearest", "bilinear"))
    if kind == "bilinear":
        return _up_sampling_bilinear(op, scale)
    op.ignore("num_filter")
    mode = op.choice("multi_input_mode", "concat", ("concat", "sum"))
    whole = [size * scale for size in op.sizes()[2:]]
    parts = []
    for index, value in enumerate(op.all_inputs()):
        size = op.sizes(index)[2:]
        times = [op.ranges.simplify(n // part) for n, part in zip(whole, size, strict=True)]
        if any(map(is_dynamic, times)) or not op.ranges.are_equal(
            whole, [n * part for n, part in zip(times, size, strict=True)]
        ):
            op.refuse(f"input {index} of size {shown(size)} does not divide {shown(whole)}")
        rows = R.repeat(value, times[0], axis=2)
        parts.append(R.repeat(rows, times[1], axis=3))
    if len(parts) == 1:
        return parts[0]
    return R.concat(parts, axis=1) if mode == "concat" else functools.reduce(R.add, parts)


def _up_sampling_bilinear(op: Op, scale: int) -> Expr:
    """Bilinear `UpSampling`: a deconvolution with one (learned) filter per channel, as in MXNet."""
    op.ignore("multi_input_mode", "num_args")
    channels = op.size(1)
    if op.integer("num_filter", channels) != channels:
        op.refuse(f"num_filter is not its data's {channels} channels")
    kernel = 2 * scale - scale % 2
    pad = math.ceil((scale - 1) / 2)
    return R.nn.conv2d_transpose(
        op[0],
        op.expect_shape(1, (channels, 1, kernel, kernel)),
        strides=(scale, scale),
        padding=(pad, pad, pad, pad),
        groups=channels,
    )


# Output size for an input size and a scale, in the modes of BilinearResize2D that need no `like`.
_RESIZED_SIZES: Final[dict[str, Callable[[int, float], int]]] = {
    "odd_scale": lambda n, scale: int(n * scale) if n % 2 == 0 else int((n - 1) * scale) + 1,
    "to_even_down": lambda n, _: n - n % 2,
    "to_even_up": lambda n, _: n + n % 2,
    "to_odd_down": lambda n, _: n - (n + 1) % 2,
    "to_odd_up": lambda n, _: n + (n + 1) % 2,
}


def _bilinear_resize(op: Op) -> Expr:
    """`contrib.BilinearResize2D`: the output size comes from size, scale, another tensor or parity."""
    mode = op.choice("mode", "size", ("size", "like", *_RESIZED_SIZES))
    size = op.sizes()[2:]
    scales = [op.number(key, 0.0) for key in ("scale_height", "scale_width")]
    new_size = [op.integer(key, 1) for key in ("height", "width")]
    if mode == "like":
        new_size = list(op.sizes(1)[2:])
    elif mode == "size" and scales[0] and all(scale.is_integer() for scale in scales):
        new_size = [n * int(scale) for n, scale in zip(size, scales, strict=True)]
    elif mode != "size" or scales[0]:
        resize = _RESIZED_SIZES.get(mode, lambda n, scale: int(n * scale))
        new_size = list(map(resize, op.fixed(size), scales))
    aligned = op.flag("align_corners", True)
    if op.ranges.are_equal(new_size, size):
        return op[0]
    if aligned and not all(op.ranges.is_certain(n != 1) for n in new_size):
        op.refuse("resizing to 1 with align_corners is not supported")
    return R.image.resize2d(
        op[0],
        tuple(new_size),
        layout="NCHW",
        method="linear",
        coordinate_transformation_mode="align_corners" if aligned else "half_pixel",
    )


def _sample(op: Op, grid: Expr) -> Expr:
    return R.image.grid_sample(
        op[0], grid, method="bilinear", layout="NCHW", padding_mode="zeros", align_corners=True
    )


def _spatial_transformer(op: Op) -> Expr:
    """`SpatialTransformer`: samples the data on an affine grid, with one matrix per instance."""
    op.choice("transform_type", "", ("affine",))
    op.choice("sampler_type", "", ("bilinear",))
    size = op.integers("target_shape", (0, 0))
    if len(size) != 2 or min(size) < 1:
        size = op.fixed(op.sizes()[2:])
    matrix = R.reshape(op[1], (op.sizes()[0], 2, 3))
    return _sample(op, R.image.affine_grid(matrix, size, align_corners=True))


def _roi_align(op: Op) -> Expr:
    """`contrib.ROIAlign`: the average of bilinear samples in each cell of a region."""
    op.require("position_sensitive", "false", "only the form without it can be imported")
    op.require("aligned", "false", "TVM's and MXNet's results differ")
    if (columns := op.size(-1, 1)) != 5:
        op.refuse(f"regions have {columns} columns, 5 are needed")
    return R.vision.roi_align(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        sample_ratio=op.integer("sample_ratio", -1),
        layout="NCHW",
        mode="avg",
    )


# ---------------------------------------------------------------- detection: anchors, boxes, and non-maximum
# suppression


_FORMATS: Final = ("corner", "center")


def _multibox_prior(op: Op) -> Expr:
    """Convert `MultiBoxPrior`: at each position, all sizes with ratio 0, then size 0 with the others."""
    height, width = op.size(2), op.size(3)
    sizes = np.array(op.numbers("sizes", (1.0,)), "float32")
    ratios = np.sqrt(np.array(op.numbers("ratios", (1.0,)), "float32"))
    offsets = np.array(op.numbers("offsets", (0.5, 0.5)), "float32")
    steps = np.array(op.numbers("steps", (-1.0, -1.0)), "float32")
    if min(steps) <= 0:
        steps = 1 / np.array([height, width], "float32")
    anchor_sizes = np.append(sizes, np.repeat(sizes[0], len(ratios) - 1))
    anchor_ratios = np.append(np.repeat(ratios[0], len(sizes)), ratios[1:])
    half_w = anchor_sizes * height / width * anchor_ratios / 2
    half_h = anchor_sizes / anchor_ratios / 2
    y = ((np.arange(height, dtype="float32") + offsets[0]) * steps[0])[:, None, None]
    x = ((np.arange(width, dtype="float32") + offsets[1]) * steps[1])[None, :, None]
    corners = np.broadcast_arrays(x - half_w, y - half_h, x + half_w, y + half_h)
    boxes = np.stack(corners, axis=-1)
    if op.flag("clip", False):
        boxes = boxes.clip(0, 1)
    return relax.const(boxes.reshape(1, -1, 4), "float32")


def _columns(value: Expr, start: int = 0, count: int = 4) -> list[Expr]:
    """Return columns of the last axis, each of size 1."""
    sizes = sizes_of(value)
    # TVM counts axes from the start with dynamic shapes
    axis = len(sizes) - 1 if sizes and any(map(is_dynamic, sizes)) else -1
    return [R.strided_slice(value, [axis], [i], [i + 1]) for i in range(start, start + count)]


def _to_center(op: Op, corners: list[Expr]) -> list[Expr]:
    """Convert left, top, right, bottom to x, y, width, height."""
    left, top, right, bottom = corners
    half = op.scalar(0.5)
    return [(left + right) * half, (top + bottom) * half, right - left, bottom - top]


def _to_corners(op: Op, center: list[Expr]) -> list[Expr]:
    """Convert x, y, width, height to left, top, right, bottom."""
    x, y, width, height = center
    half_w, half_h = width * op.scalar(0.5), height * op.scalar(0.5)
    return [x - half_w, y - half_h, x + half_w, y + half_h]


def _decode_boxes(
    op: Op, deltas: list[Expr], anchors: list[Expr], scales: tuple[float, ...]
) -> list[Expr]:
    """Return the corners of boxes that are encoded relative to anchors (x, y, width, height)."""
    x, y, width, height = anchors
    dx, dy, dw, dh = (delta * op.scalar(scale) for delta, scale in zip(deltas, scales, strict=True))
    center = [dx * width + x, dy * height + y, R.exp(dw) * width, R.exp(dh) * height]
    return _to_corners(op, center)


def _box_decode(op: Op) -> Expr:
    """`box_decode`: corners of boxes that are encoded relative to anchors."""
    anchors = _columns(op[1])
    if op.choice("format", "center", _FORMATS) == "corner":
        anchors = _to_center(op, anchors)
    scales = tuple(op.number(f"std{index}", 1.0) for index in range(4))
    limit = op.number("clip", -1.0)
    deltas = _columns(op[0])
    if limit > 0:
        # MXNet limits the scaled logarithms of width and height.
        for index in (2, 3):
            deltas[index] = R.minimum(deltas[index] * op.scalar(scales[index]), op.scalar(limit))
        scales = (scales[0], scales[1], 1.0, 1.0)
    return R.concat(_decode_boxes(op, deltas, anchors, scales), axis=-1)


def _box_iou(op: Op) -> Expr:
    """`box_iou`: intersection over union of all boxes of the first input with all of the second."""
    zero = op.scalar(0.0)
    a, a_area = _corners_and_area(op, 0, (-1, 1, 4))
    b, b_area = _corners_and_area(op, 1, (1, -1, 4))
    width, height = (
        R.maximum(R.minimum(a[i + 2], b[i + 2]) - R.maximum(a[i], b[i]), zero) for i in (0, 1)
    )
    intersection = op.emit(width * height)
    union = a_area + b_area - intersection
    overlap = R.where(intersection > zero, intersection / union, zero)
    return R.reshape(overlap, (*op.sizes(0)[:-1], *op.sizes(1)[:-1]))


def _corners_and_area(op: Op, index: int, shape: tuple[int, int, int]) -> tuple[list[Expr], Expr]:
    """Return corners and areas of the boxes in an input; boxes of negative size have the area 0."""
    zero = op.scalar(0.0)
    corners = [op.emit(c) for c in _columns(op.emit(R.reshape(op[index], shape)))]
    if op.choice("format", "corner", _FORMATS) == "center":
        width, height = corners[2], corners[3]
        corners = [op.emit(c) for c in _to_corners(op, corners)]
    else:
        width, height = corners[2] - corners[0], corners[3] - corners[1]
    is_empty = R.logical_or(width < zero, height < zero)
    return corners, R.where(is_empty, zero, width * height)


def _order_candidates(op: Op, valid: Expr, score: Expr) -> tuple[Expr, Expr]:
    """Return indices by descending score, invalid ones last, and the number of valid ones per image."""
    keys = op.emit(R.where(valid, score, op.scalar(-math.inf)))
    count = R.sum(R.astype(valid, "int32"), [1])
    order = R.argsort(keys, axis=1, descending=True, dtype="int32")
    return op.emit(order), op.emit(count)


def _multibox_detection(op: Op) -> Expr:
    """`MultiBoxDetection`: rows of (class, score, left, top, right, bottom), class -1 if there is none.

    The class is the best of 1, 2, …, minus one: MXNet does not read `background_id`.
    """
    op.ignore("background_id")
    batch, _, anchors = op.sizes()
    classes = op.size(1)
    op.expect_shape(1, (batch, anchors * 4))
    op.expect_shape(2, (1, anchors, 4))
    if classes < 2:
        op.refuse(f"its class scores have {classes} classes, at least 2 are needed")
    top, threshold = op.integer("nms_topk", -1), op.number("nms_threshold", 0.5)
    ignores_class = op.flag("force_suppress", False)
    rows, score, valid = _multibox_candidates(op)

    suppresses = 0 < threshold <= 1
    top = max(top, 0) if suppresses else 0
    order, count = _order_candidates(op, valid, score if suppresses else R.zeros_like(score))
    # MXNet first writes valid candidates in the order of the data. That is only seen beyond the top k.
    written = _order_candidates(op, valid, R.zeros_like(score))[0] if top else order
    detection = MultiboxDetection(
        top=top, threshold=threshold, ignores_class=ignores_class, suppresses=suppresses
    )
    return op.emit(detection.call(rows, order, written, count))


def _multibox_candidates(op: Op) -> tuple[Expr, Expr, Expr]:
    """Return class, score and corners of every anchor as rows, the scores, and which are valid."""
    batch, _, anchors = op.sizes()
    classes = op.size(1)
    scales = op.numbers("variances", (0.1, 0.1, 0.2, 0.2))
    if len(scales) != 4:
        op.refuse(f"variances={scales} must be four numbers")
    foreground = op.emit(R.strided_slice(op[0], [1], [1], [classes]))
    score = op.emit(R.max(foreground, [1]))
    label = R.astype(R.argmax(foreground, axis=1), op.dtype())
    valid = op.emit(
        R.logical_and(score > op.scalar(-1.0), score >= op.scalar(op.number("threshold", 0.01)))
    )
    deltas = _columns(op.emit(R.reshape(op[1], (batch, anchors, 4))))
    corners = _decode_boxes(op, deltas, _to_center(op, _columns(op[2])), scales)
    if op.flag("clip", True):
        corners = [R.minimum(R.maximum(c, op.scalar(0.0)), op.scalar(1.0)) for c in corners]
    rows = R.concat([R.expand_dims(label, 2), R.expand_dims(score, 2), *corners], axis=2)
    return op.emit(rows), score, valid


def _box_nms(op: Op) -> Expr:
    """`box_nms`: the rows that are kept, by falling score, then rows of -1."""
    shape = op.sizes()
    n, width = op.fixed(shape[-2:])
    batch = math.prod(shape[:-2])
    first, score_column = op.integer("coord_start", 2), op.integer("score_index", 1)
    class_column, background = op.integer("id_index", -1), op.integer("background_id", -1)
    top = op.integer("topk", -1)
    in_format = op.choice("in_format", "corner", _FORMATS)
    out_format = op.choice("out_format", "corner", _FORMATS)
    min_score = op.number("valid_thresh", 0.0)
    threshold, ignores_class = op.number("overlap_thresh", 0.5), op.flag("force_suppress", False)
    if top == 0:
        return op[0]

    rows = op.emit(R.reshape(op[0], (batch, n, width)))
    score = op.emit(R.squeeze(_columns(rows, score_column, 1)[0], [2]))
    valid = score > op.scalar(min_score)
    if class_column >= 0:
        # MXNet also excludes the class -1, the default of background_id.
        label = R.squeeze(_columns(rows, class_column, 1)[0], [2])
        valid = R.logical_and(valid, R.not_equal(label, op.scalar(background)))
    order, count = _order_candidates(op, op.emit(valid), score)
    nms = BoxNms(
        top=n if top < 0 else min(top, n),
        first=first,
        class_column=-1 if ignores_class else class_column,
        threshold=threshold,
        is_centered=in_format == "center",
    )
    out = op.emit(nms.call(rows, order, count))
    if in_format != out_format:
        out = _convert_format(op, out, first, width, out_format)
    return R.reshape(out, shape)


def _convert_format(op: Op, rows: Expr, first: int, width: int, out_format: str) -> Expr:
    """Return rows with boxes in the other format.

    MXNet does not convert boxes whose first coordinate is negative.
    """
    coordinates = _columns(rows, first)
    convert = {"center": _to_center, "corner": _to_corners}[out_format]
    converted = R.concat(convert(op, coordinates), axis=2)
    boxes = R.strided_slice(rows, [2], [first], [first + 4])
    boxes = R.where(coordinates[0] < op.scalar(0.0), boxes, converted)
    parts = [boxes]
    if first > 0:
        parts.insert(0, R.strided_slice(rows, [2], [0], [first]))
    if first + 4 < width:
        parts.append(R.strided_slice(rows, [2], [first + 4], [width]))
    return R.concat(parts, axis=2) if len(parts) > 1 else boxes


CONVERTERS: Final[dict[str, Converter]] = {
    "Convolution": _convolution,
    "Convolution_v1": _convolution,
    "Deconvolution": _deconvolution,
    "FullyConnected": _fully_connected,
    "Pooling": lambda op: _pool(op, _POOLS),
    "Pooling_v1": lambda op: _pool(op, _POOLS_V1),
    "_contrib_AdaptiveAvgPooling2D": _adaptive_avg_pooling,
    **dict.fromkeys(("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm"), _batch_norm),
    "GroupNorm": _group_norm,
    "InstanceNorm": lambda op: _scale_and_shift(
        op, _standardize(op, op[0], range(2, op.rank()), op.number("eps", 1e-3)), 1
    ),
    "L2Normalization": _l2_normalization,
    "LRN": _lrn,
    "LayerNorm": _layer_norm,
    "_contrib_BatchNormWithReLU": lambda op: R.nn.relu(_batch_norm(op)),
    "_contrib_SyncBatchNorm": _batch_norm,
    "BilinearSampler": lambda op: _sample(op, op[1]),
    "ROIPooling": lambda op: R.vision.roi_pool(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        layout="NCHW",
    ),
    "SpatialTransformer": _spatial_transformer,
    "UpSampling": _up_sampling,
    "_contrib_BilinearResize2D": _bilinear_resize,
    "_contrib_ROIAlign": _roi_align,
    "_contrib_MultiBoxDetection": _multibox_detection,
    "_contrib_MultiBoxPrior": _multibox_prior,
    "_contrib_box_decode": _box_decode,
    "_contrib_box_iou": _box_iou,
    "_contrib_box_nms": _box_nms,
}
