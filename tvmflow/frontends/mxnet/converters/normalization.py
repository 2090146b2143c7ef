"""Converters of normalization layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import broadcast_along

R = relax.op


def gamma_is_fixed(attrs: Mapping[str, str]) -> bool:
    """Return whether gamma counts as 1, whatever the checkpoint has: BatchNorm's default."""
    return str(attrs.get("fix_gamma", "True")).lower() in ("true", "1")


def _batch_norm(op: Op) -> Expr:
    """`BatchNorm`: `data · s + (beta − mean · s)` with `s = gamma / sqrt(var + eps)`.

    s and the second part depend on weights only, and are computed at build time.
    """
    axis = op.axis(op.integer("axis", 1))
    op.ignore("fix_gamma", "use_global_stats", "output_mean_var")
    size = (op.shape()[axis],)
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
    size = (op.shape()[axis],)
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
    shape, groups = op.shape(), op.integer("num_groups", 1)
    batch, channels = shape[:2]
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
    """`LRN`: `x / (knorm + alpha · mean of x² over nsize channels)^beta`; the mean is a pooling along channels."""
    size = op.integer("nsize")
    if size % 2 == 0:
        op.refuse(f"nsize={size} is even")
    if op.rank() != 4:
        op.refuse(f"its data has {op.rank()} dimensions, 4 are needed")
    batch, channels, height, width = op.shape()
    squares = R.reshape(op[0] * op[0], (batch, 1, channels, height * width))
    padding = (size // 2, 0, size // 2, 0)
    mean = R.nn.avg_pool2d(squares, pool_size=(size, 1), padding=padding, count_include_pad=True)
    knorm, alpha = op.scalar(op.number("knorm", 2.0)), op.scalar(op.number("alpha", 1e-4))
    base = knorm + alpha * R.reshape(mean, op.shape())
    return op[0] / R.power(base, op.scalar(op.number("beta", 0.75)))


CONVERTERS: Final[dict[str, Converter]] = {
    **dict.fromkeys(("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm"), _batch_norm),
    "GroupNorm": _group_norm,
    "InstanceNorm": _instance_norm,
    "L2Normalization": _l2_normalization,
    "LRN": _lrn,
    "LayerNorm": _layer_norm,
    "_contrib_BatchNormWithReLU": lambda op: R.nn.relu(_batch_norm(op)),
    "_contrib_SyncBatchNorm": _batch_norm,
}
