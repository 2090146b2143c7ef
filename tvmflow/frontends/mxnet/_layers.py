"""Converters of layers, such as convolution, pooling, normalization and detection."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tvmflow.core.types import Array
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem
from tvmflow.frontends._onnx_graph import NOTHING, Value
from tvmflow.frontends.mxnet._op import Converter, Op, per_axis, shown, spatial_rank
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic

# ---------------------------------------------------------------- convolutions and fully connected layers


def _kernel(op: Op) -> tuple[int, ...]:
    dims, kernel = spatial_rank(op), op.integers("kernel")
    if len(kernel) != dims:
        op.refuse(f"kernel {kernel} does not fit data of shape {shown(op.sizes())}")
    return kernel


def _with_bias(op: Op, filters: int, *, no_bias: bool) -> list[Value]:
    """Return the bias as a list, which is empty if the attribute `no_bias` is set (default as given)."""
    return [] if op.flag("no_bias", no_bias) else [op.expect_shape(2, (filters,))]


def _convolution(op: Op) -> Value:
    kernel = _kernel(op)
    dims = len(kernel)
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    weight = op.expect_shape(1, (filters, op.size(1) // groups, *kernel))
    return op.add(
        "Conv",
        *(op[0], weight, *_with_bias(op, filters, no_bias=False)),
        kernel_shape=kernel,
        strides=per_axis(op, "stride", dims, 1),
        pads=per_axis(op, "pad", dims, 0) * 2,
        dilations=per_axis(op, "dilate", dims, 1),
        group=groups,
    )


def _fully_connected(op: Op) -> Value:
    """Convert `FullyConnected`: data · weightᵀ + bias; `flatten` joins all axes except the first."""
    data, rest = op[0], op.sizes()[-1:]
    if op.flag("flatten", True) and op.rank() != 2:
        rest = op.sizes()[1:]
        data = op.graph.reshape(data, (op.sizes()[0], math.prod(rest)))
    width = math.prod(op.fixed(rest))
    hidden = op.integer("num_hidden")
    weight = op.expect_shape(1, (hidden, width))
    bias = _with_bias(op, hidden, no_bias=False)
    if data.rank == 2:
        return op.add("Gemm", data, weight, *bias, transB=1)
    out = op.add("MatMul", data, op.graph.transpose(weight, [1, 0]))
    return op.add("Add", out, *bias) if bias else out


def _deconvolution(op: Op) -> Value:
    """Convert `Deconvolution`, with weights (input channels, filters / groups, kernel)."""
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
    return op.add(
        "ConvTranspose",
        *(op[0], weight, *_with_bias(op, filters, no_bias=True)),
        kernel_shape=kernel,
        strides=stride,
        pads=pad * 2,
        output_padding=adj,
        dilations=dilate,
        group=groups,
    )


def _deconvolution_padding(
    op: Op, kernel: tuple[int, ...], stride: tuple[int, ...], dilate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return padding and output padding; `target_shape` determines them if it is set (MXNet: InferPad)."""
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


def _pool(op: Op, pools: Mapping[str, _Pool]) -> Value:
    dims, size = spatial_rank(op), op.sizes()[2:]
    has_fixed_size = not any(map(is_dynamic, size))
    kind = op.choice("pool_type", "max", tuple(pools))
    op.ignore("p_value", "count_include_pad")
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        if not has_fixed_size and kind in _GLOBAL_POOLS:
            return op.reduce(_GLOBAL_POOLS[kind], op[0], range(2, op.rank()), keep=True)
        kernel, stride, before, out = op.fixed(size), (1,) * dims, (0,) * dims, (1,) * dims
    else:
        if not op.has("kernel"):
            op.refuse("the attribute kernel is missing")
        kernel = per_axis(op, "kernel", dims, 1)
        stride, before = per_axis(op, "stride", dims, 1), per_axis(op, "pad", dims, 0)
        convention = op.choice("pooling_convention", "valid", tuple(_OUTPUT_SIZES))
        if not has_fixed_size:
            windows = _Windows(size, kernel, stride, before, after=before, out=size)
            return _pool_dynamic(op, pools, kind, windows, convention)
        out = tuple(map(_OUTPUT_SIZES[convention], size, kernel, stride, before))
    # Padding after the data completes the last window, so that the rounding mode does not matter.
    after = tuple(
        max((o - 1) * s + k - n - b, 0)
        for o, s, k, n, b in zip(out, stride, kernel, size, before, strict=True)
    )
    windows = _Windows(size=size, kernel=kernel, stride=stride, before=before, after=after, out=out)
    return pools[kind](op, windows)


def _pool_dynamic(
    op: Op, pools: Mapping[str, _Pool], kind: str, windows: _Windows, convention: str
) -> Value:
    """Pool images of dynamic size; the divisor of averages must not depend on the size."""
    size, kernel, stride, before, _, _ = windows
    rests = [n + 2 * b - k for n, b, k in zip(size, before, kernel, strict=True)]
    is_whole = all(
        op.ranges.is_equal(rest // s * s, rest) for rest, s in zip(rests, stride, strict=True)
    )
    is_rounded_up = convention == "full" and not is_whole
    if kind == "max":
        return windows.pool(op, "MaxPool", op[0], ceil_mode=int(is_rounded_up))
    if is_rounded_up:
        raise DynamicShapeProblem(
            f"its last window (pooling_convention=full) differs between sizes; let them be multiples "
            f"of {math.lcm(*stride)} (`multiple_of`)"
        )
    if kind == "avg" and pools[kind] is _average_pool:
        includes = int(op.flag("count_include_pad", True))
        return windows.pool(op, "AveragePool", op[0], count_include_pad=includes)
    return pools[kind](op, windows)


class _Windows(NamedTuple):
    """Pooling windows, with one value for each spatial dimension; `out` is the number of windows."""

    size: tuple[IrSize, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[IrSize, ...]

    def pool(self, op: Op, operator: str, data: Value, **options: int) -> Value:
        pads = self.before + self.after
        shape = {"kernel_shape": self.kernel, "strides": self.stride, "pads": pads}
        return op.add(operator, data, **shape, **options)

    def mean(self, op: Op) -> Value:
        """Return the mean of each window, in which padding counts as zeros."""
        return self.pool(op, "AveragePool", op[0], count_include_pad=1)

    def counts(self, padded: Sequence[int], dtype: str) -> Array:
        """Return the number of positions of each window inside the data and its padding `padded`."""
        counts = np.ones((), dtype)
        for n, k, s, b, o, p in zip(
            self.size, self.kernel, self.stride, self.before, self.out, padded, strict=True
        ):
            starts = np.arange(o) * s - b
            inside = np.minimum(starts + k, n + p) - np.maximum(starts, -p)
            counts = np.multiply.outer(counts, np.maximum(inside, 1).astype(dtype))
        return counts


def _average_pool(op: Op, windows: _Windows) -> Value:
    """Return averages over data and declared padding, without padding of the `full` convention."""
    padded = windows.before if op.flag("count_include_pad", True) else (0,) * len(windows.kernel)
    op.check_constant(math.prod(max(int(count), 1) for count in windows.out))
    counts = windows.counts(padded, op.dtype())
    window_size = math.prod(windows.kernel)
    mean = windows.mean(op)
    if (counts == window_size).all():
        return mean
    return op.add("Mul", mean, op.graph.constant(window_size / counts, op.dtype()))


def _lp_pool(op: Op, windows: _Windows) -> Value:
    """Return `(Σ |x|^p)^(1/p)` of each window."""
    power = op.integer("p_value")
    if power not in (1, 2, 3):
        op.refuse(f"p_value={power} is not supported, only 1, 2 and 3")
    return windows.pool(op, "LpPool", op[0], p=power)


_Pool = Callable[[Op, _Windows], Value]


_GLOBAL_POOLS: Final = {"max": "ReduceMax", "avg": "ReduceMean", "sum": "ReduceSum"}
_POOLS: Final[dict[str, _Pool]] = {
    "max": lambda op, windows: windows.pool(op, "MaxPool", op[0]),
    "avg": _average_pool,
    "sum": lambda op, windows: op.add("Mul", windows.mean(op), math.prod(windows.kernel)),
    "lp": _lp_pool,
}
# `Pooling_v1` divides every sum by the full window size, even at the border.
_POOLS_V1: Final[dict[str, _Pool]] = {**_POOLS, "avg": lambda op, windows: windows.mean(op)}


# Convention -> number of windows for (size, kernel, stride, padding).
_OUTPUT_SIZES: Final[dict[str, Callable[[int, int, int, int], int]]] = {
    "valid": lambda n, k, s, p: (n + 2 * p - k) // s + 1,
    "full": lambda n, k, s, p: -((k - n - 2 * p) // s) + 1,
}


def _adaptive_avg_pooling(op: Op) -> Value:
    """Convert `contrib.AdaptiveAvgPooling2D`; a single number in `output_size` is for both dimensions."""
    op.expect_rank(4)
    size = op.integers("output_size", (1,)) or (1,)
    size = size if len(size) == 2 else size * 2
    result = op[0]._replace(shape=(*op.sizes()[:2], *size))
    return op.graph.add_own("AdaptiveAveragePool", result, op.dtype(), op[0], output_size=size)


# ---------------------------------------------------------------- normalization


def _batch_norm(op: Op) -> Value:
    """Convert `BatchNorm`: `data · s + (beta − mean · s)` with `s = gamma / sqrt(var + eps)`.

    `s` and the second term depend only on weights, so constant folding computes them.
    """
    axis = op.axis(op.integer("axis", 1))
    op.ignore("fix_gamma", "use_global_stats", "output_mean_var")
    size = (op.size(axis),)
    gamma = op.expect_shape(1, size) if op.reads(1) else op.scalar(1.0)
    beta, mean, var = (op.expect_shape(index, size) for index in (2, 3, 4))
    deviation = op.add("Sqrt", op.add("Add", var, op.number("eps", 1e-3)))
    scale = op.add("Div", gamma, deviation)
    shift = op.add("Sub", beta, op.add("Mul", mean, scale))
    return op.add("Add", op.add("Mul", op[0], op.along(scale, axis)), op.along(shift, axis))


def _layer_norm(op: Op) -> Value:
    axis, last = op.axis(op.integer("axis", -1)), op.rank() - 1
    op.ignore("output_mean_var")
    gamma, beta = (op.expect_shape(index, (op.size(axis),)) for index in (1, 2))
    axes = list(range(op.rank()))
    axes[axis], axes[last] = last, axis
    data = op.graph.transpose(op[0], axes)
    eps = op.number("eps", 1e-5)
    normal = op.add("LayerNormalization", data, gamma, beta, axis=-1, epsilon=eps)
    return op.graph.transpose(normal, axes)


def _instance_norm(op: Op) -> Value:
    gamma, beta = (op.expect_shape(index, (op.size(1),)) for index in (1, 2))
    eps = op.number("eps", 1e-3)
    return op.add("InstanceNormalization", op[0], gamma, beta, epsilon=eps)


def _group_norm(op: Op) -> Value:
    """Convert `GroupNorm`; gamma and beta are per group (MXNet up to 1.9) or per channel (later Gluon)."""
    op.ignore("output_mean_var")
    shape, groups = op.sizes(), op.integer("num_groups", 1)
    channels, graph = op.size(1), op.graph
    if channels % groups:
        op.refuse(f"{channels} channels do not divide into num_groups={groups}")
    is_of_groups = op.shape(1) == op.shape(2) == (groups,)
    affine = (
        [op[1], op[2]] if is_of_groups else [op.filled(n, (groups,), op.dtype()) for n in (1, 0)]
    )
    data = graph.reshape(op[0], (shape[0], groups, channels // groups, *shape[2:]))
    eps = op.number("eps", 1e-5)
    normal = graph.reshape(op.add("InstanceNormalization", data, *affine, epsilon=eps), shape)
    if is_of_groups:
        return normal
    gamma, beta = (op.along(op.expect_shape(index, (channels,)), 1) for index in (1, 2))
    return op.add("Add", op.add("Mul", normal, gamma), beta)


_L2_AXES: Final[dict[str, Callable[[int], range]]] = {
    "instance": lambda rank: range(1, rank),
    "channel": lambda rank: range(1, 2),
    "spatial": lambda rank: range(2, rank),
}


def _l2_normalization(op: Op) -> Value:
    """Convert `L2Normalization`: `x / sqrt(Σ x² + eps)` over each instance, channel or position."""
    axes = op.lookup("mode", "instance", _L2_AXES)(op.rank())
    total = op.reduce("ReduceSumSquare", op[0], axes, keep=True)
    return op.add("Div", op[0], op.add("Sqrt", op.add("Add", total, op.number("eps", 1e-10))))


def _lrn(op: Op) -> Value:
    """Convert `LRN`: `x / (knorm + alpha · mean of x² over nsize channels)^beta`."""
    size = op.integer("nsize")
    if size % 2 == 0:
        op.refuse(f"nsize={size} is even")
    op.expect_rank(4)
    numbers = {"bias": op.number("knorm", 2.0), "alpha": op.number("alpha", 1e-4)}
    return op.add("LRN", op[0], size=size, beta=op.number("beta", 0.75), **numbers)


# ---------------------------------------------------------------- sampling of images


def _repeat_pixels(op: Op, value: Value, times: Sequence[int]) -> Value:
    """Repeat rows and columns of images, using operators that can be fused."""
    batch, channels, height, width = value.shape
    rows, columns = times
    apart = op.graph.reshape(value, (batch, channels, height, 1, width, 1))
    shape = op.graph.integers((batch, channels, height, rows, width, columns))
    whole = (batch, channels, height * rows, width * columns)
    return op.graph.reshape(op.add("Expand", apart, shape), whole)


def _up_sampling(op: Op) -> Value:
    """Convert `UpSampling`: repeat pixels, so that all inputs get the first input's size times `scale`."""
    scale = op.integer("scale")
    kind = op.choice("sample_type", "", ("nearest", "bilinear"))
    if kind == "bilinear":
        return _up_sampling_bilinear(op, scale)
    op.ignore("num_filter")
    mode = op.choice("multi_input_mode", "concat", ("concat", "sum"))
    whole = [op.ranges.simplify(size * scale) for size in op.sizes()[2:]]
    parts = []
    for index, value in enumerate(op.all_inputs()):
        size = op.sizes(index)[2:]
        times = [op.ranges.simplify(n // part) for n, part in zip(whole, size, strict=True)]
        if any(map(is_dynamic, times)) or not op.ranges.are_equal(
            whole, [n * part for n, part in zip(times, size, strict=True)]
        ):
            op.refuse(f"input {index} of size {shown(size)} does not divide {shown(whole)}")
        parts.append(_repeat_pixels(op, value, times))
    if mode == "concat" and len(parts) > 1:
        return op.add("Concat", *parts, axis=1)
    return functools.reduce(lambda a, b: op.add("Add", a, b), parts)


def _up_sampling_bilinear(op: Op, scale: int) -> Value:
    """Convert bilinear `UpSampling`, in MXNet a depthwise deconvolution with learned filters."""
    op.ignore("multi_input_mode", "num_args")
    channels = op.size(1)
    if op.integer("num_filter", channels) != channels:
        op.refuse(f"num_filter is not its data's {channels} channels")
    kernel = 2 * scale - scale % 2
    pad = math.ceil((scale - 1) / 2)
    return op.add(
        "ConvTranspose",
        *(op[0], op.expect_shape(1, (channels, 1, kernel, kernel))),
        kernel_shape=(kernel, kernel),
        strides=(scale, scale),
        pads=(pad, pad, pad, pad),
        output_padding=(0, 0),
        group=channels,
    )


# Mode of BilinearResize2D -> output size for an input size and a scale.
_RESIZED_SIZES: Final[dict[str, Callable[[int, float], int]]] = {
    "odd_scale": lambda n, scale: int(n * scale) if n % 2 == 0 else int((n - 1) * scale) + 1,
    "to_even_down": lambda n, _: n - n % 2,
    "to_even_up": lambda n, _: n + n % 2,
    "to_odd_down": lambda n, _: n - (n + 1) % 2,
    "to_odd_up": lambda n, _: n + (n + 1) % 2,
}


def _bilinear_resize(op: Op) -> Value:
    """Convert `contrib.BilinearResize2D`, whose output size is given by size, scale, tensor or parity."""
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
    coordinates = "align_corners" if aligned else "half_pixel"
    sizes = op.graph.integers([*op.sizes()[:2], *new_size])
    attributes = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    return op.add("Resize", op[0], NOTHING, NOTHING, sizes, **attributes)


def _sample(op: Op, grid: Value) -> Value:
    return op.add("GridSample", op[0], grid, padding_mode="zeros", align_corners=1)


def _spatial_transformer(op: Op) -> Value:
    """Convert `SpatialTransformer`: sample the data on an affine grid, with one matrix per instance."""
    op.choice("transform_type", "", ("affine",))
    op.choice("sampler_type", "", ("bilinear",))
    size = op.integers("target_shape", (0, 0))
    if len(size) != 2 or min(size) < 1:
        size = op.fixed(op.sizes()[2:])
    height, width = size
    op.check_constant(height * width)
    x, y = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
    points = op.graph.constant(np.stack([x, y, np.ones_like(x)], -1).reshape(-1, 3), op.dtype())
    batch = op.sizes()[0]
    matrix = op.graph.transpose(op.graph.reshape(op[1], (batch, 2, 3)), [0, 2, 1])
    return _sample(op, op.graph.reshape(op.add("MatMul", points, matrix), (batch, *size, 2)))


def _roi_align(op: Op) -> Value:
    """Convert `contrib.ROIAlign`: the average of bilinear samples in each cell of a region."""
    op.require("position_sensitive", "false", "only the form without it can be imported")
    op.require("aligned", "false", "TVM's and MXNet's results differ")
    if (columns := op.size(-1, 1)) != 5:
        op.refuse(f"regions have {columns} columns, 5 are needed")
    height, width = op.integers("pooled_size")
    images = op.graph.reshape(op.graph.cut(op[1], {1: slice(0, 1)}), op.sizes(1)[:1])
    return op.add(
        "RoiAlign",
        *(op[0], op.graph.cut(op[1], {1: slice(1, 5)}), op.graph.cast(images, "int64")),
        output_height=height,
        output_width=width,
        spatial_scale=op.number("spatial_scale"),
        sampling_ratio=max(op.integer("sample_ratio", -1), 0),
        coordinate_transformation_mode="output_half_pixel",
    )


def _roi_pooling(op: Op) -> Value:
    return op.add(
        "MaxRoiPool",
        *(op[0], op[1]),
        pooled_shape=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
    )


# ---------------------------------------------------------------- detection: anchors, boxes, suppression


_FORMATS: Final = ("corner", "center")


def _multibox_prior(op: Op) -> Value:
    """Convert `MultiBoxPrior`: per position, all sizes with ratio 0, then size 0 with other ratios."""
    height, width = op.size(2), op.size(3)
    sizes = np.array(op.numbers("sizes", (1.0,)), "float32")
    ratios = np.sqrt(np.array(op.numbers("ratios", (1.0,)), "float32"))
    offsets = np.array(op.numbers("offsets", (0.5, 0.5)), "float32")
    steps = np.array(op.numbers("steps", (-1.0, -1.0)), "float32")
    if min(steps) <= 0:
        steps = 1 / np.array([height, width], "float32")
    anchor_sizes = np.append(sizes, np.repeat(sizes[0], len(ratios) - 1))
    anchor_ratios = np.append(np.repeat(ratios[0], len(sizes)), ratios[1:])
    op.check_constant(height * width * len(anchor_sizes) * 4)
    half_w = anchor_sizes * height / width * anchor_ratios / 2
    half_h = anchor_sizes / anchor_ratios / 2
    y = ((np.arange(height, dtype="float32") + offsets[0]) * steps[0])[:, None, None]
    x = ((np.arange(width, dtype="float32") + offsets[1]) * steps[1])[None, :, None]
    corners = np.broadcast_arrays(x - half_w, y - half_h, x + half_w, y + half_h)
    boxes = np.stack(corners, axis=-1)
    if op.flag("clip", False):
        boxes = boxes.clip(0, 1)
    return op.graph.constant(boxes.reshape(1, -1, 4), "float32")


def _columns(op: Op, value: Value, start: int = 0, count: int = 4) -> list[Value]:
    """Split `count` columns, each of size 1, off the last axis."""
    axis = value.rank - 1
    return [op.graph.cut(value, {axis: slice(i, i + 1)}) for i in range(start, start + count)]


def _to_center(op: Op, corners: list[Value]) -> list[Value]:
    """Convert left, top, right, bottom to x, y, width, height."""
    pairs = list(zip(corners[:2], corners[2:], strict=True))
    middles = [op.add("Mul", op.add("Add", low, high), 0.5) for low, high in pairs]
    return middles + [op.add("Sub", high, low) for low, high in pairs]


def _to_corners(op: Op, center: list[Value]) -> list[Value]:
    """Convert x, y, width, height to left, top, right, bottom."""
    halves = [op.add("Mul", size, 0.5) for size in center[2:]]
    pairs = list(zip(center[:2], halves, strict=True))
    return [op.add(operator, *pair) for operator in ("Sub", "Add") for pair in pairs]


def _decode_boxes(
    op: Op, deltas: list[Value], anchors: list[Value], scales: tuple[float, ...]
) -> list[Value]:
    """Decode boxes relative to anchors (x, y, width, height); return corners."""
    scaled = [op.add("Mul", delta, scale) for delta, scale in zip(deltas, scales, strict=True)]
    center = [
        op.add("Add", op.add("Mul", delta, size), middle)
        for delta, size, middle in zip(scaled[:2], anchors[2:], anchors[:2], strict=True)
    ]
    sizes = [
        op.add("Mul", op.add("Exp", delta), size)
        for delta, size in zip(scaled[2:], anchors[2:], strict=True)
    ]
    return _to_corners(op, center + sizes)


def _box_decode(op: Op) -> Value:
    """Convert `box_decode`: corners of boxes that are encoded relative to anchors."""
    anchors = _columns(op, op[1])
    if op.choice("format", "center", _FORMATS) == "corner":
        anchors = _to_center(op, anchors)
    scales = tuple(op.number(f"std{index}", 1.0) for index in range(4))
    limit = op.number("clip", -1.0)
    deltas = _columns(op, op[0])
    if limit > 0:
        # MXNet clips the scaled logarithms of width and height.
        for index in (2, 3):
            deltas[index] = op.add("Min", op.add("Mul", deltas[index], scales[index]), limit)
        scales = (scales[0], scales[1], 1.0, 1.0)
    return op.add("Concat", *_decode_boxes(op, deltas, anchors, scales), axis=-1)


def _box_iou(op: Op) -> Value:
    """Convert `box_iou`: intersection over union of all pairs of boxes of both inputs."""
    first, second = (math.prod(op.sizes(index)[:-1]) for index in (0, 1))
    a, a_area = _corners_and_area(op, 0, (first, 1, 4))
    b, b_area = _corners_and_area(op, 1, (1, second, 4))
    lengths = []
    for i in (0, 1):
        low, high = op.add("Max", a[i], b[i]), op.add("Min", a[i + 2], b[i + 2])
        lengths.append(op.add("Max", op.add("Sub", high, low), 0.0))
    intersection = op.add("Mul", *lengths)
    union = op.add("Sub", op.add("Add", a_area, b_area), intersection)
    is_some = op.add("Greater", intersection, 0.0)
    overlap = op.add("Where", is_some, op.add("Div", intersection, union), op.scalar(0.0))
    return op.graph.reshape(overlap, (*op.sizes(0)[:-1], *op.sizes(1)[:-1]))


def _corners_and_area(op: Op, index: int, shape: tuple[IrSize, ...]) -> tuple[list[Value], Value]:
    """Return corners and areas of an input's boxes; boxes of negative size have area 0."""
    corners = _columns(op, op.graph.reshape(op[index], shape))
    if op.choice("format", "corner", _FORMATS) == "center":
        sizes = corners[2:]
        corners = _to_corners(op, corners)
    else:
        sizes = _to_center(op, corners)[2:]
    is_empty = op.add("Or", *(op.add("Less", size, 0.0) for size in sizes))
    return corners, op.add("Where", is_empty, op.scalar(0.0), op.add("Mul", *sizes))


def _order_candidates(op: Op, valid: Value, score: Value) -> tuple[Value, Value]:
    """Return indices by descending score with invalid candidates last, and the valid count per image."""
    keys = op.add("Where", valid, score, op.scalar(-math.inf))
    count = op.reduce("ReduceSum", op.graph.cast(valid, "int32"), [1], keep=False)
    return op.graph.add_own("ArgSort", keys, "int32", keys, axis=1, descending=1), count


def _multibox_detection(op: Op) -> Value:
    """Convert `MultiBoxDetection`: rows of (class, score, left, top, right, bottom).

    The class is the best of 1, 2, …, minus one, because MXNet ignores `background_id`; -1 means no object.
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
    equal = op.filled(0.0, score.shape, op.dtype())
    order, count = _order_candidates(op, valid, score if suppresses else equal)
    # MXNet first writes valid candidates in data order, which is visible only beyond the top k.
    written = _order_candidates(op, valid, equal)[0] if top else order
    return op.graph.add_own(
        "MultiboxDetection",
        *(rows, rows.dtype, rows, order, written, count),
        top=top,
        threshold=threshold,
        ignores_class=int(ignores_class),
        suppresses=int(suppresses),
    )


def _multibox_candidates(op: Op) -> tuple[Value, Value, Value]:
    """Return rows of class, score and corners for every anchor, the scores, and the mask of valid anchors."""
    batch, _, anchors = op.sizes()
    scales = op.numbers("variances", (0.1, 0.1, 0.2, 0.2))
    if len(scales) != 4:
        op.refuse(f"variances={scales} must be four numbers")
    foreground = op.graph.cut(op[0], {1: slice(1, op.size(1))})
    score = op.reduce("ReduceMax", foreground, [1], keep=False)
    label = op.graph.cast(op.add("ArgMax", foreground, axis=1, keepdims=0), op.dtype())
    valid = op.add(
        "And",
        op.add("Greater", score, -1.0),
        op.add("GreaterOrEqual", score, op.number("threshold", 0.01)),
    )
    deltas = _columns(op, op.graph.reshape(op[1], (batch, anchors, 4)))
    corners = _decode_boxes(op, deltas, _to_center(op, _columns(op, op[2])), scales)
    if op.flag("clip", True):
        corners = [op.add("Clip", corner, 0.0, 1.0) for corner in corners]
    columns = [op.graph.reshape(value, (batch, anchors, 1)) for value in (label, score)]
    return op.add("Concat", *columns, *corners, axis=2), score, valid


def _box_nms(op: Op) -> Value:
    """Convert `box_nms`: kept rows by descending score, then rows of -1."""
    shape = op.sizes()
    n, width = op.fixed(shape[-2:])
    batch = math.prod(shape[:-2])
    first, score_column = op.integer("coord_start", 2), op.integer("score_index", 1)
    class_column, background = op.integer("id_index", -1), op.integer("background_id", -1)
    for key, index, start, end in (
        ("coord_start", first, 0, width - 4),
        ("score_index", score_column, 0, width - 1),
        ("id_index", class_column, class_column, width - 1),
    ):
        if not start <= index <= end:
            op.refuse(f"{key}={index} does not fit rows of {width} values")
    top = op.integer("topk", -1)
    in_format = op.choice("in_format", "corner", _FORMATS)
    out_format = op.choice("out_format", "corner", _FORMATS)
    min_score = op.number("valid_thresh", 0.0)
    threshold, ignores_class = op.number("overlap_thresh", 0.5), op.flag("force_suppress", False)
    if top == 0:
        return op[0]

    rows = op.graph.reshape(op[0], (batch, n, width))

    def column(index: int) -> Value:
        return op.graph.reshape(_columns(op, rows, index, 1)[0], (batch, n))

    score = column(score_column)
    valid = op.add("Greater", score, min_score)
    if class_column >= 0:
        # MXNet excludes the background class even for its default -1.
        is_other = op.add("Not", op.add("Equal", column(class_column), background))
        valid = op.add("And", valid, is_other)
    order, count = _order_candidates(op, valid, score)
    out = op.graph.add_own(
        "BoxNms",
        *(rows, rows.dtype, rows, order, count),
        top=n if top < 0 else min(top, n),
        first=first,
        class_column=-1 if ignores_class else class_column,
        threshold=threshold,
        is_centered=int(in_format == "center"),
    )
    if in_format != out_format:
        out = _convert_format(op, out, first, width, out_format)
    return op.graph.reshape(out, shape)


def _convert_format(op: Op, rows: Value, first: int, width: int, out_format: str) -> Value:
    """Convert boxes in rows to another format; like MXNet, skip boxes with a negative first coordinate."""
    coordinates = _columns(op, rows, first)
    convert = {"center": _to_center, "corner": _to_corners}[out_format]
    converted = op.add("Concat", *convert(op, coordinates), axis=2)
    boxes = op.graph.cut(rows, {2: slice(first, first + 4)})
    boxes = op.add("Where", op.add("Less", coordinates[0], 0.0), boxes, converted)
    parts = [boxes]
    if first > 0:
        parts.insert(0, op.graph.cut(rows, {2: slice(0, first)}))
    if first + 4 < width:
        parts.append(op.graph.cut(rows, {2: slice(first + 4, width)}))
    return op.add("Concat", *parts, axis=2) if len(parts) > 1 else boxes


# ---------------------------------------------------------------- recurrent layers


class _Cell(NamedTuple):
    """The ONNX operator of a cell, and the position in MXNet of each of its gates in ONNX's order."""

    operator: str
    gates: tuple[int, ...]
    attributes: Mapping[str, Any] = {}


_CELLS: Final = {
    "rnn_relu": _Cell("RNN", (0,), {"activations": ["Relu"]}),
    "rnn_tanh": _Cell("RNN", (0,)),
    "lstm": _Cell("LSTM", (0, 3, 1, 2)),
    "gru": _Cell("GRU", (1, 0, 2), {"linear_before_reset": 1}),
}


def _rnn(op: Op) -> list[Value]:
    """`RNN`: stacked layers over data [steps, batch, features]; returns the results and the final states.

    The parameters are one vector: the input-to-hidden and hidden-to-hidden weights of each layer and direction, then
    both biases of each.
    """
    op.expect_rank(3)
    mode = op.choice("mode", "", tuple(_CELLS))
    cell, has_cell_state = _CELLS[mode], mode == "lstm"
    hidden, layers = op.integer("state_size"), op.integer("num_layers")
    ways = 2 if op.flag("bidirectional", False) else 1
    op.ignore("p", "state_outputs", "lstm_state_clip_nan")
    for key in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max"):
        op.require(key, "None", "such layers are not supported")
    op.require("use_sequence_length", "False", "all sequences must have the length of the data")
    rows = len(cell.gates) * hidden
    widths = [op.size(2), *[ways * hidden] * (layers - 1)]
    op.expect_shape(1, (sum(ways * rows * (width + hidden + 2) for width in widths),))
    state_shape = (layers * ways, op.sizes()[1], hidden)
    # Gluon leaves the batch of its zeros open, as 0
    states = [
        op.filled(0.0, state_shape, op.dtype())
        if op.sizes(index)[1:2] == (0,)
        else op.expect_shape(index, state_shape)
        for index in range(2, 3 + has_cell_state)
    ]
    position = 0

    def take(*shape: int) -> Value:
        """Return the next parameters, with the gates in ONNX's order."""
        nonlocal position
        start, position = position, position + math.prod(shape)
        value = op.graph.reshape(op.graph.cut(op[1], {0: slice(start, position)}), shape)
        parts = op.graph.split(value, 0, [hidden] * len(cell.gates))
        return op.add("Concat", *(parts[gate] for gate in cell.gates), axis=0)

    weights = [[(take(rows, width), take(rows, hidden)) for _ in range(ways)] for width in widths]
    biases = [
        [op.add("Concat", take(rows), take(rows), axis=0) for _ in range(ways)] for _ in widths
    ]
    data, finals = op[0], list[list[Value]]()
    for layer, (pairs, bias) in enumerate(zip(weights, biases, strict=True)):
        begin = [
            op.graph.cut(state, {0: slice(layer * ways, (layer + 1) * ways)}) for state in states
        ]
        stacked = [op.graph.stack(parts, 0) for parts in (*zip(*pairs, strict=True), bias)]
        result, *final = op.graph.add_several(
            cell.operator,
            2 + has_cell_state,
            *(data, *stacked, NOTHING, *begin),
            hidden_size=hidden,
            direction="bidirectional" if ways == 2 else "forward",
            **{
                key: value * ways if isinstance(value, list) else value
                for key, value in cell.attributes.items()
            },
        )
        finals.append(final)
        steps, _, batch, _ = result.shape
        data = op.graph.reshape(
            op.graph.transpose(result, [0, 2, 1, 3]), (steps, batch, ways * hidden)
        )
    return [data, *(op.add("Concat", *parts, axis=0) for parts in zip(*finals, strict=True))]


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
    "InstanceNorm": _instance_norm,
    "L2Normalization": _l2_normalization,
    "LRN": _lrn,
    "LayerNorm": _layer_norm,
    "RNN": _rnn,
    "_contrib_BatchNormWithReLU": lambda op: op.add("Relu", _batch_norm(op)),
    "_contrib_SyncBatchNorm": _batch_norm,
    "BilinearSampler": lambda op: _sample(op, op.graph.transpose(op[1], [0, 2, 3, 1])),
    "ROIPooling": _roi_pooling,
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
