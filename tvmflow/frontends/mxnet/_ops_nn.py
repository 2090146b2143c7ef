"""Converters of MXNet's layers: convolution, pooling, normalization, activations, heads.

Defaults are those of MXNet 1.9's operator definitions; `symbol.json` leaves defaults out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op

R = relax.op
Array = np.ndarray[Any, Any]

_DATA_LAYOUTS: Final = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
_CONV: Final = {1: R.nn.conv1d, 2: R.nn.conv2d, 3: R.nn.conv3d}
_CONV_TRANSPOSE: Final = {
    1: R.nn.conv1d_transpose,
    2: R.nn.conv2d_transpose,
    3: R.nn.conv3d_transpose,
}
_MAX_POOL: Final = {1: R.nn.max_pool1d, 2: R.nn.max_pool2d, 3: R.nn.max_pool3d}
_AVG_POOL: Final = {1: R.nn.avg_pool1d, 2: R.nn.avg_pool2d, 3: R.nn.avg_pool3d}


def _along(value: Expr, axis: int, rank: int) -> Expr:
    """A vector, shaped so that it broadcasts along `axis` of `rank` dimensions."""
    others = [position for position in range(rank) if position != axis]
    return R.expand_dims(value, others) if others else value


def _spatial(op: Op) -> int:
    """The number of spatial dimensions, which the kernel's length must equal."""
    dims = op.rank() - 2
    if dims not in _DATA_LAYOUTS:
        op.refuse(f"its data has {op.rank()} dimensions, 3 to 5 are supported")
    layout = _DATA_LAYOUTS[dims]
    op.require("layout", layout, f"data must be {layout}")
    return dims


def _per_axis(op: Op, key: str, dims: int, default: int) -> tuple[int, ...]:
    """An attribute with one value a spatial dimension; MXNet takes an empty tuple as unset."""
    values = op.integers(key, ()) or (default,) * dims
    if len(values) != dims:
        op.refuse(f"{key} has {len(values)} values, the data has {dims} spatial dimensions")
    return values


def _convolution(op: Op) -> Expr:
    dims = _spatial(op)
    kernel = op.integers("kernel")
    if len(kernel) != dims:
        op.refuse(f"kernel {kernel} does not fit data of shape {op.shape()}")
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    channels = op.shape()[1]
    weight = op.expect_shape(1, (filters, channels // groups, *kernel))
    pad = _per_axis(op, "pad", dims, 0)
    out = _CONV[dims](
        op[0],
        weight,
        strides=_per_axis(op, "stride", dims, 1),
        padding=pad + pad,
        dilation=_per_axis(op, "dilate", dims, 1),
        groups=groups,
    )
    if op.flag("no_bias", False):
        return out
    return R.add(out, _along(op.expect_shape(2, (filters,)), 1, dims + 2))


def _fully_connected(op: Op) -> Expr:
    data = op[0]
    if op.flag("flatten", True):
        rows = op.shape()[0]
        width = math.prod(op.shape()[1:])
        if op.rank() != 2:
            data = R.reshape(data, (rows, width))
    else:
        width = op.shape()[-1]
    hidden = op.integer("num_hidden")
    weight = op.expect_shape(1, (hidden, width))
    out = R.matmul(data, R.permute_dims(weight, [1, 0]))
    if op.flag("no_bias", False):
        return out
    return R.add(out, op.expect_shape(2, (hidden,)))


def gamma_is_fixed(attrs: Mapping[str, str]) -> bool:
    """BatchNorm's default: gamma counts as 1, whatever the checkpoint holds."""
    return str(attrs.get("fix_gamma", "True")).lower() in ("true", "1")


def _batch_norm(op: Op) -> Expr:
    """`data · s + (beta − mean · s)` with `s = gamma / sqrt(var + eps)`: the second part and s are weights only."""
    axis = op.axis(op.integer("axis", 1))
    op.ignore("fix_gamma", "use_global_stats", "output_mean_var")
    size = (op.shape()[axis],)
    gamma = op.expect_shape(1, size) if op.reads(1) else op.scalar(1.0)
    beta, mean, var = (op.expect_shape(index, size) for index in (2, 3, 4))
    scale = op.emit(R.divide(gamma, R.sqrt(R.add(var, op.scalar(op.number("eps", 1e-3))))))
    shift = R.subtract(beta, R.multiply(mean, scale))
    rank = op.rank()
    return R.add(R.multiply(op[0], _along(scale, axis, rank)), _along(shift, axis, rank))


def _pooling(op: Op) -> Expr:
    return _pooled(op, _POOLS)


def _pooling_v1(op: Op) -> Expr:
    """The first version divides every average by the whole window, also where that hangs over."""
    return _pooled(op, {**_POOLS, "avg": lambda op, windows: windows.mean(op[0])})


def _pooled(op: Op, pools: Mapping[str, _Pool]) -> Expr:
    dims = _spatial(op)
    size = op.shape()[2:]
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        kernel, stride, before, out = size, (1,) * dims, (0,) * dims, (1,) * dims
    else:
        if not op.has("kernel"):
            op.refuse("the attribute kernel is missing")
        kernel = _per_axis(op, "kernel", dims, 1)
        stride, before = _per_axis(op, "stride", dims, 1), _per_axis(op, "pad", dims, 0)
        convention = op.choice("pooling_convention", "valid", tuple(_POOLED))
        out = tuple(map(_POOLED[convention], size, kernel, stride, before))
    # zeros behind the data, so that the last window is whole and no rounding mode is needed
    after = tuple(
        max((o - 1) * s + k - n - b, 0)
        for o, s, k, n, b in zip(out, stride, kernel, size, before, strict=True)
    )
    windows = _Windows(size, kernel, stride, before, after, out)
    kind = op.choice("pool_type", "max", tuple(pools))
    if kind != "lp":
        op.ignore("p_value")
    if kind != "avg":
        op.ignore("count_include_pad")
    return pools[kind](op, windows)


class _Windows(NamedTuple):
    """Where a pooling looks, one number a spatial dimension."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[int, ...]

    def pool(self, operator: Any, data: Expr, **options: Any) -> Expr:
        return operator[len(self.kernel)](
            data,
            pool_size=self.kernel,
            strides=self.stride,
            padding=self.before + self.after,
            **options,
        )

    def mean(self, data: Expr) -> Expr:
        """Padding counts as zeros in every window."""
        return self.pool(_AVG_POOL, data, count_include_pad=True)

    def counts(self, padded: Sequence[int], dtype: str) -> Array:
        """How many positions of each window lie within the data and `padded` positions on either side."""
        whole = np.ones((), dtype)
        for n, k, s, b, o, p in zip(
            self.size, self.kernel, self.stride, self.before, self.out, padded, strict=True
        ):
            starts = np.arange(o) * s - b
            inside = np.minimum(starts + k, n + p) - np.maximum(starts, -p)
            whole = np.multiply.outer(whole, np.maximum(inside, 1).astype(dtype))
        return whole


def _average_pool(op: Op, windows: _Windows) -> Expr:
    """MXNet divides by the positions within data and declared padding; what ceiling adds never counts."""
    padded = windows.before if op.flag("count_include_pad", True) else (0,) * len(windows.kernel)
    counts = windows.counts(padded, op.dtype())
    whole = math.prod(windows.kernel)
    if (counts == whole).all():
        return windows.mean(op[0])
    return R.multiply(windows.mean(op[0]), relax.const(whole / counts))


def _sum_pool(op: Op, windows: _Windows) -> Expr:
    return R.multiply(windows.mean(op[0]), op.scalar(math.prod(windows.kernel)))


def _lp_pool(op: Op, windows: _Windows) -> Expr:
    """`(Σ |x|^p)^(1/p)`."""
    power = op.integer("p_value")
    if power not in (1, 2, 3):
        op.refuse(f"p_value={power} is not supported, only 1, 2 and 3")
    size = R.abs(op[0])
    total = R.multiply(
        windows.mean(R.power(size, op.scalar(power)) if power > 1 else size),
        op.scalar(math.prod(windows.kernel)),
    )
    return R.power(total, op.scalar(1 / power)) if power > 1 else total


_Pool = Callable[[Op, _Windows], Expr]

_POOLS: Final[dict[str, _Pool]] = {
    "max": lambda op, windows: windows.pool(_MAX_POOL, op[0]),
    "avg": _average_pool,
    "sum": _sum_pool,
    "lp": _lp_pool,
}
# How many windows fit: (size, kernel, stride, padding) -> count
_POOLED: Final[dict[str, Callable[[int, int, int, int], int]]] = {
    "valid": lambda n, k, s, p: (n + 2 * p - k) // s + 1,
    "full": lambda n, k, s, p: -((k - n - 2 * p) // s) + 1,
}


def _deconvolution(op: Op) -> Expr:
    dims = _spatial(op)
    kernel = op.integers("kernel")
    if len(kernel) != dims:
        op.refuse(f"kernel {kernel} does not fit data of shape {op.shape()}")
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    stride, dilate = _per_axis(op, "stride", dims, 1), _per_axis(op, "dilate", dims, 1)
    weight = op.expect_shape(1, (op.shape()[1], filters // groups, *kernel))
    target = op.integers("target_shape", ())
    if any(target):
        # the padding follows from the size that is wanted (MXNet: DeconvolutionParam::InferPad)
        op.ignore("pad", "adj")
        whole = [
            (n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(op.shape()[2:], stride, dilate, kernel, strict=True)
        ]
        excess = [w - t for w, t in zip(whole, target, strict=True)]
        if min(excess) < 0:
            op.refuse(f"target_shape={target} is larger than the {tuple(whole)} that it can give")
        pad, adj = [(e + 1) // 2 for e in excess], [e % 2 for e in excess]
    else:
        pad, adj = [*_per_axis(op, "pad", dims, 0)], [*_per_axis(op, "adj", dims, 0)]
    if max(stride) > 1 and max(dilate) > 1:
        op.refuse(f"stride={stride} together with dilate={dilate}: MXNet itself is wrong on CPUs")
    if any(a >= s for a, s in zip(adj, stride, strict=True)):
        op.refuse(f"adj {tuple(adj)} must be smaller than stride {stride}")
    out = _CONV_TRANSPOSE[dims](
        op[0],
        weight,
        strides=stride,
        padding=[*pad, *pad],
        output_padding=adj,
        dilation=dilate,
        groups=groups,
    )
    if op.flag("no_bias", True):
        return out
    return R.add(out, _along(op.expect_shape(2, (filters,)), 1, dims + 2))


def _standardized(op: Op, value: Expr, axes: Sequence[int], eps: float) -> Expr:
    """`(x − mean) / sqrt(var + eps)` over `axes`."""
    value = op.emit(value)
    centred = op.emit(R.subtract(value, R.mean(value, list(axes), keepdims=True)))
    var = R.mean(R.multiply(centred, centred), list(axes), keepdims=True)
    return R.divide(centred, R.sqrt(R.add(var, op.scalar(eps))))


def _instance_norm(op: Op) -> Expr:
    rank, size = op.rank(), (op.shape()[1],)
    normal = _standardized(op, op[0], range(2, rank), op.number("eps", 1e-3))
    gamma, beta = (_along(op.expect_shape(index, size), 1, rank) for index in (1, 2))
    return R.add(R.multiply(normal, gamma), beta)


def _layer_norm(op: Op) -> Expr:
    axis = op.axis(op.integer("axis", -1))
    op.ignore("output_mean_var")
    rank, size = op.rank(), (op.shape()[axis],)
    normal = _standardized(op, op[0], [axis], op.number("eps", 1e-5))
    gamma, beta = (_along(op.expect_shape(index, size), axis, rank) for index in (1, 2))
    return R.add(R.multiply(normal, gamma), beta)


def _group_norm(op: Op) -> Expr:
    """gamma and beta hold one value a group (MXNet up to 1.9) or a channel (Gluon since)."""
    op.ignore("output_mean_var")
    shape, groups = op.shape(), op.integer("num_groups", 1)
    batch, channels = shape[:2]
    if channels % groups:
        op.refuse(f"{channels} channels do not divide into num_groups={groups}")
    grouped = (batch, groups, channels // groups, *shape[2:])
    normal = R.reshape(
        _standardized(
            op, R.reshape(op[0], grouped), range(2, len(grouped)), op.number("eps", 1e-5)
        ),
        shape,
    )
    affine = []
    for index in (1, 2):
        if op.shape(index) == (groups,) and groups != channels:
            vector = R.repeat(op[index], channels // groups, axis=0)
        else:
            vector = op.expect_shape(index, (channels,))
        affine.append(_along(vector, 1, len(shape)))
    return R.add(R.multiply(normal, affine[0]), affine[1])


_L2_AXES: Final[dict[str, Callable[[int], range]]] = {
    "instance": lambda rank: range(1, rank),
    "channel": lambda rank: range(1, 2),
    "spatial": lambda rank: range(2, rank),
}


def _l2_normalization(op: Op) -> Expr:
    axes = list(_L2_AXES[op.choice("mode", "instance", tuple(_L2_AXES))](op.rank()))
    total = R.sum(R.multiply(op[0], op[0]), axes, keepdims=True)
    return R.divide(op[0], R.sqrt(R.add(total, op.scalar(op.number("eps", 1e-10)))))


def _lrn(op: Op) -> Expr:
    """`x / (knorm + alpha · mean of x² over nsize channels)^beta`; the mean is a pooling along channels."""
    size = op.integer("nsize")
    if size % 2 == 0:
        op.refuse(f"nsize={size} is even")
    if op.rank() != 4:
        op.refuse(f"its data has {op.rank()} dimensions, 4 are needed")
    batch, channels, height, width = op.shape()
    squares = R.reshape(R.multiply(op[0], op[0]), (batch, 1, channels, height * width))
    mean = R.nn.avg_pool2d(
        squares,
        pool_size=(size, 1),
        padding=(size // 2, 0, size // 2, 0),
        count_include_pad=True,
    )
    base = R.add(
        op.scalar(op.number("knorm", 2.0)),
        R.multiply(op.scalar(op.number("alpha", 1e-4)), R.reshape(mean, op.shape())),
    )
    return R.divide(op[0], R.power(base, op.scalar(op.number("beta", 0.75))))


def _activation(op: Op) -> Expr:
    kind = op.choice("act_type", "", tuple(_ACTIVATIONS))
    return _ACTIVATIONS[kind](op)


_ACTIVATIONS: Final[dict[str, Converter]] = {
    "relu": lambda op: R.nn.relu(op[0]),
    "sigmoid": lambda op: R.sigmoid(op[0]),
    "tanh": lambda op: R.tanh(op[0]),
    "softrelu": lambda op: R.nn.softplus(op[0]),
    "softsign": lambda op: R.divide(op[0], R.add(R.abs(op[0]), op.scalar(1.0))),
}


def _leaky_relu(op: Op) -> Expr:
    op.ignore("lower_bound", "upper_bound", "slope")
    return _LEAKY[op.choice("act_type", "leaky", tuple(_LEAKY))](op)


def _prelu(op: Op) -> Expr:
    gamma = op[1]
    if op.shape(1) == (op.shape()[min(1, op.rank() - 1)],):
        gamma = _along(gamma, min(1, op.rank() - 1), op.rank())
    elif math.prod(op.shape(1)) != 1:
        op.refuse(f"gamma of shape {op.shape(1)} does not fit data of shape {op.shape()}")
    zero = op.scalar(0.0)
    return R.add(R.maximum(op[0], zero), R.multiply(gamma, R.minimum(op[0], zero)))


def _elu(op: Op) -> Expr:
    zero = op.scalar(0.0)
    negative = R.subtract(R.exp(R.minimum(op[0], zero)), op.scalar(1.0))
    return R.add(R.maximum(op[0], zero), R.multiply(op.scalar(op.number("slope", 0.25)), negative))


def _rrelu(op: Op) -> Expr:
    """In inference the slope is the middle of its bounds."""
    slope = (op.number("lower_bound", 0.125) + op.number("upper_bound", 0.334)) / 2
    return R.nn.leakyrelu(op[0], slope)


_LEAKY: Final[dict[str, Converter]] = {
    "leaky": lambda op: R.nn.leakyrelu(op[0], op.number("slope", 0.25)),
    "elu": _elu,
    "selu": lambda op: R.nn.selu(op[0]),
    "gelu": lambda op: R.nn.gelu(op[0]),
    "prelu": _prelu,
    "rrelu": _rrelu,
}


def _softmax_of(function: Callable[..., Expr], sign: float = 1.0) -> Converter:
    def convert(op: Op) -> Expr:
        if op.flag("use_length", False):
            op.refuse("use_length=True is not supported")
        dtype = op.choice("dtype", op.dtype(), ("float16", "float32", "float64"))
        divisor = op.number("temperature", 1.0) * sign
        value = op[0] if divisor == 1.0 else R.divide(op[0], op.scalar(divisor))
        out = function(value, axis=op.axis(op.integer("axis", -1)))
        return out if dtype == op.dtype() else R.astype(out, dtype)

    return convert


def _softmax_activation(op: Op) -> Expr:
    """MXNet's description has it over each instance, but its code takes the last axis."""
    channel = op.choice("mode", "instance", ("instance", "channel")) == "channel"
    return R.nn.softmax(op[0], axis=1 if channel else -1)


def _softmax_output(op: Op) -> Expr:
    op.ignore(*_LOSS_KEYS, "ignore_label", "use_ignore", "out_grad", "smooth_alpha")
    if op.flag("multi_output", False):
        op.ignore("preserve_shape")
        return R.nn.softmax(op[0], axis=1)
    if op.flag("preserve_shape", False) or op.rank() == 2:
        return R.nn.softmax(op[0], axis=-1)
    shape = op.shape()
    rows = R.reshape(op[0], (shape[0], math.prod(shape[1:])))
    return R.reshape(R.nn.softmax(rows, axis=-1), shape)


_LOSS_KEYS: Final = ("grad_scale", "normalization", "valid_thresh")


def _head(function: Callable[[Expr], Expr], *unused: str) -> Converter:
    """A loss or a training aid: in inference its data passes, perhaps through a function."""

    def convert(op: Op) -> Expr:
        op.ignore(*_LOSS_KEYS, *unused)
        return function(op[0])

    return convert


def _identity(value: Expr) -> Expr:
    return value


def _up_sampling(op: Op) -> Expr:
    scale = op.integer("scale")
    kind = op.choice("sample_type", "", ("nearest", "bilinear"))
    if kind == "bilinear":
        return _up_sampling_bilinear(op, scale)
    op.ignore("num_filter")
    mode = op.choice("multi_input_mode", "concat", ("concat", "sum"))
    height, width = (size * scale for size in op.shape()[2:])
    parts = []
    for index, value in enumerate(op.all_inputs()):
        own = op.shape(index)[2:]
        if height % own[0] or width % own[1]:
            op.refuse(f"input {index} of {own} does not divide {(height, width)}")
        rows = R.repeat(value, height // own[0], axis=2)
        parts.append(R.repeat(rows, width // own[1], axis=3))
    if len(parts) == 1:
        return parts[0]
    return R.concat(parts, axis=1) if mode == "concat" else functools.reduce(R.add, parts)


def _up_sampling_bilinear(op: Op, scale: int) -> Expr:
    """MXNet computes it as a deconvolution with one (learned) filter a channel."""
    op.ignore("multi_input_mode", "num_args")
    channels = op.shape()[1]
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


# Output size for an input size and a scale, in BilinearResize2D's modes that need no `like`
_RESIZED: Final[dict[str, Callable[[int, float], int]]] = {
    "odd_scale": lambda n, scale: int(n * scale) if n % 2 == 0 else int((n - 1) * scale) + 1,
    "to_even_down": lambda n, _: n - n % 2,
    "to_even_up": lambda n, _: n + n % 2,
    "to_odd_down": lambda n, _: n - (n + 1) % 2,
    "to_odd_up": lambda n, _: n + (n + 1) % 2,
}


def _bilinear_resize(op: Op) -> Expr:
    mode = op.choice("mode", "size", ("size", "like", *_RESIZED))
    size = op.shape()[2:]
    scales = [op.number(key, 0.0) for key in ("scale_height", "scale_width")]
    wanted = [op.integer(key, 1) for key in ("height", "width")]
    if mode == "like":
        wanted = list(op.shape(1)[2:])
    elif mode in _RESIZED:
        wanted = [_RESIZED[mode](n, scale) for n, scale in zip(size, scales, strict=True)]
    elif scales[0]:
        wanted = [int(n * scale) for n, scale in zip(size, scales, strict=True)]
    aligned = op.flag("align_corners", True)
    if tuple(wanted) == size:
        return op[0]
    if aligned and min(wanted) == 1:
        op.refuse("resizing to 1 with align_corners is not supported")
    return R.image.resize2d(
        op[0],
        tuple(wanted),
        layout="NCHW",
        method="linear",
        coordinate_transformation_mode="align_corners" if aligned else "half_pixel",
    )


def _adaptive_avg_pooling(op: Op) -> Expr:
    size = op.integers("output_size", (1,)) or (1,)
    return R.nn.adaptive_avg_pool2d(op[0], output_size=size if len(size) == 2 else size * 2)


def _bilinear_sampler(op: Op) -> Expr:
    """Positions from −1 to 1 between the centres of the corner pixels; zeros outside."""
    op.ignore("cudnn_off")
    return _sampled(op, op[1])


def _sampled(op: Op, grid: Expr) -> Expr:
    return R.image.grid_sample(
        op[0],
        grid,
        method="bilinear",
        layout="NCHW",
        padding_mode="zeros",
        align_corners=True,
    )


def _spatial_transformer(op: Op) -> Expr:
    op.choice("transform_type", "", ("affine",))
    op.choice("sampler_type", "", ("bilinear",))
    op.ignore("cudnn_off")
    size = op.integers("target_shape", (0, 0))
    if len(size) != 2 or min(size) < 1:
        size = op.shape()[2:]
    matrix = R.reshape(op[1], (op.shape()[0], 2, 3))
    return _sampled(op, R.image.affine_grid(matrix, size, align_corners=True))


def _attention_parts(op: Op, heads: int) -> tuple[list[Expr], tuple[int, int, int]]:
    """Queries, keys and values of (length, batch, heads · 3 · depth), each (batch · heads, length, depth)."""
    length, batch, width = op.shape()
    depth = width // (3 * heads)
    parts = op.emit(R.reshape(op[0], (length, batch * heads, 3, depth)))
    split = [
        R.reshape(R.strided_slice(parts, [2], [part], [part + 1]), (length, batch * heads, depth))
        for part in range(3)
    ]
    return [R.permute_dims(part, [1, 0, 2]) for part in split], (length, batch, depth)


def _self_attention_scores(op: Op) -> Expr:
    (query, key, _), (_, _, depth) = _attention_parts(op, op.integer("heads"))
    scaled = R.divide(query, op.scalar(math.sqrt(depth)))
    return R.matmul(scaled, R.permute_dims(key, [0, 2, 1]))


def _self_attention_values(op: Op) -> Expr:
    heads = op.integer("heads")
    (_, _, value), (length, batch, depth) = _attention_parts(op, heads)
    mixed = R.permute_dims(R.matmul(op[1], value), [1, 0, 2])
    return R.reshape(mixed, (length, batch, heads * depth))


CONVERTERS: Final[dict[str, Converter]] = {
    "Activation": _activation,
    "BatchNorm": _batch_norm,
    "BatchNorm_v1": _batch_norm,
    "BilinearSampler": _bilinear_sampler,
    "BlockGrad": _head(_identity),
    "Convolution": _convolution,
    "Convolution_v1": _convolution,
    "CuDNNBatchNorm": _batch_norm,
    "Deconvolution": _deconvolution,
    "Dropout": _head(_identity, "p", "mode", "axes"),
    "FullyConnected": _fully_connected,
    "GroupNorm": _group_norm,
    "IdentityAttachKLSparseReg": _head(_identity, "sparseness_target", "penalty"),
    "InstanceNorm": _instance_norm,
    "L2Normalization": _l2_normalization,
    "LRN": _lrn,
    "LayerNorm": _layer_norm,
    "LeakyReLU": _leaky_relu,
    "LinearRegressionOutput": _head(_identity),
    "LogisticRegressionOutput": _head(R.sigmoid),
    "MAERegressionOutput": _head(_identity),
    "MakeLoss": _head(_identity),
    "Pooling": _pooling,
    "Pooling_v1": _pooling_v1,
    "SVMOutput": _head(_identity, "margin", "regularization_coefficient", "use_linear"),
    "Softmax": _softmax_output,
    "SoftmaxActivation": _softmax_activation,
    "SoftmaxOutput": _softmax_output,
    "SpatialTransformer": _spatial_transformer,
    "UpSampling": _up_sampling,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_avg_pooling,
    "_contrib_BatchNormWithReLU": lambda op: R.nn.relu(_batch_norm(op)),
    "_contrib_BilinearResize2D": _bilinear_resize,
    "_contrib_SyncBatchNorm": _batch_norm,
    "_contrib_interleaved_matmul_selfatt_qk": _self_attention_scores,
    "_contrib_interleaved_matmul_selfatt_valatt": _self_attention_values,
    "log_softmax": _softmax_of(R.nn.log_softmax),
    "make_loss": _head(_identity),
    "softmax": _softmax_of(R.nn.softmax),
    "softmin": _softmax_of(R.nn.softmax, sign=-1.0),
    "stop_gradient": _head(_identity),
}
