"""Converters of layers over images and sequences: convolution, pooling, normalization, sampling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler.open_sizes import IrSize, is_open
from tvmflow.frontends._open_sizes import OpenSizeProblem
from tvmflow.frontends.mxnet._op import (
    Converter,
    Expr,
    Op,
    broadcast_along,
    per_axis,
    shown,
    spatial_rank,
)

R = relax.op


# ---------------------------------------------------------------- convolutions and fully connected layers


_CONV: Final = {1: R.nn.conv1d, 2: R.nn.conv2d, 3: R.nn.conv3d}
_DECONV: Final = {1: R.nn.conv1d_transpose, 2: R.nn.conv2d_transpose, 3: R.nn.conv3d_transpose}


def _kernel(op: Op) -> tuple[int, ...]:
    """Return the size of the kernel, which has as many dimensions as the data's positions."""
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
    """`Convolution`: grouped, strided and dilated, in 1 to 3 dimensions."""
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


def _pooling(op: Op) -> Expr:
    """`Pooling`: max, average, sum or p-norm over windows in 1 to 3 dimensions."""
    return _pool(op, _POOLS)


def _pooling_v1(op: Op) -> Expr:
    """`Pooling_v1`: divides every average by the size of the full window, also at the border."""
    return _pool(op, {**_POOLS, "avg": lambda op, windows: windows.mean(op[0])})


def _pool(op: Op, pools: Mapping[str, _Pool]) -> Expr:
    dims = spatial_rank(op)
    size = op.sizes()[2:]
    if any(map(is_open, size)):
        return _pool_open(op, pools)
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        kernel, stride, before, out = size, (1,) * dims, (0,) * dims, (1,) * dims
    else:
        if not op.has("kernel"):
            op.refuse("the attribute kernel is missing")
        kernel = per_axis(op, "kernel", dims, 1)
        stride, before = per_axis(op, "stride", dims, 1), per_axis(op, "pad", dims, 0)
        convention = op.choice("pooling_convention", "valid", tuple(_OUTPUT_SIZES))
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


def _pool_open(op: Op, pools: Mapping[str, _Pool]) -> Expr:
    """Pool images of an open size: what is divided by must be the same number at all sizes."""
    dims, size = spatial_rank(op), op.sizes()[2:]
    kind = op.choice("pool_type", "max", tuple(pools))
    op.ignore("p_value", "count_include_pad")
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        if kind not in _GLOBAL_POOLS:
            op.fixed(size)
        return _GLOBAL_POOLS[kind](op[0], list(range(2, op.rank())), keepdims=True)
    if not op.has("kernel"):
        op.refuse("the attribute kernel is missing")
    kernel = per_axis(op, "kernel", dims, 1)
    stride, before = per_axis(op, "stride", dims, 1), per_axis(op, "pad", dims, 0)
    convention = op.choice("pooling_convention", "valid", tuple(_OUTPUT_SIZES))
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
        raise OpenSizeProblem(
            f"its last window (pooling_convention=full) differs between sizes; let them be multiples "
            f"of {math.lcm(*stride)} (`multiple_of`)"
        )
    if kind == "avg" and pools[kind] is _average_pool:
        includes = op.flag("count_include_pad", True)
        return windows.pool(_AVG_POOL, op[0], count_include_pad=includes)
    return pools[kind](op, windows)


class _Windows(NamedTuple):
    """The windows of a pooling: one number for each spatial dimension, `out` of them in total."""

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


def _instance_norm(op: Op) -> Expr:
    """`InstanceNorm`: standardizes each channel of each instance."""
    normal = _standardize(op, op[0], range(2, op.rank()), op.number("eps", 1e-3))
    return _scale_and_shift(op, normal, 1)


def _layer_norm(op: Op) -> Expr:
    """`LayerNorm`: standardizes along one axis."""
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
    axes = list(_L2_AXES[op.choice("mode", "instance", tuple(_L2_AXES))](op.rank()))
    total = R.sum(op[0] * op[0], axes, keepdims=True)
    return op[0] / R.sqrt(total + op.scalar(op.number("eps", 1e-10)))


def _lrn(op: Op) -> Expr:
    """`LRN`: `x / (knorm + alpha · mean of x² over nsize channels)^beta`.

    The mean is a pooling along channels.
    """
    size = op.integer("nsize")
    if size % 2 == 0:
        op.refuse(f"nsize={size} is even")
    if op.rank() != 4:
        op.refuse(f"its data has {op.rank()} dimensions, 4 are needed")
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
        if any(map(is_open, times)) or not op.ranges.are_equal(
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
    elif mode in _RESIZED_SIZES:
        fixed = op.fixed(size)
        new_size = [_RESIZED_SIZES[mode](n, scale) for n, scale in zip(fixed, scales, strict=True)]
    elif scales[0] and all(scale.is_integer() for scale in scales):
        new_size = [n * int(scale) for n, scale in zip(size, scales, strict=True)]
    elif scales[0]:
        fixed = op.fixed(size)
        new_size = [int(n * scale) for n, scale in zip(fixed, scales, strict=True)]
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


def _bilinear_sampler(op: Op) -> Expr:
    """`BilinearSampler`: positions are −1 to 1 between the centers of the corner pixels; zeros outside."""
    return _sample(op, op[1])


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


def _roi_pooling(op: Op) -> Expr:
    """`ROIPooling`: the maximum of each cell of a region (image, left, top, right, bottom)."""
    return R.vision.roi_pool(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        layout="NCHW",
    )


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


CONVERTERS: Final[dict[str, Converter]] = {
    "Convolution": _convolution,
    "Convolution_v1": _convolution,
    "Deconvolution": _deconvolution,
    "FullyConnected": _fully_connected,
    "Pooling": _pooling,
    "Pooling_v1": _pooling_v1,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_avg_pooling,
    **dict.fromkeys(("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm"), _batch_norm),
    "GroupNorm": _group_norm,
    "InstanceNorm": _instance_norm,
    "L2Normalization": _l2_normalization,
    "LRN": _lrn,
    "LayerNorm": _layer_norm,
    "_contrib_BatchNormWithReLU": lambda op: R.nn.relu(_batch_norm(op)),
    "_contrib_SyncBatchNorm": _batch_norm,
    "BilinearSampler": _bilinear_sampler,
    "ROIPooling": _roi_pooling,
    "SpatialTransformer": _spatial_transformer,
    "UpSampling": _up_sampling,
    "_contrib_BilinearResize2D": _bilinear_resize,
    "_contrib_ROIAlign": _roi_align,
}
