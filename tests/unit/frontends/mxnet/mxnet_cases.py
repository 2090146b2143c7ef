"""Small MXNet graphs, and a script that runs them in MXNet: `python mxnet_cases.py FOLDER [CASE …]`.

MXNet needs a patched NumPy, so it runs in a process of its own. For each case it writes
`CASE-symbol.json`, `CASE-0000.params` and `CASE.npz`: inputs as `in:NAME`, outputs as `out:INDEX`,
and `names`, the outputs' names as MXNet lists them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    """`make(mx.sym, data)` builds the symbol; `inputs` gives arrays, or shapes for seeded noise."""

    make: Callable[..., Any]
    inputs: dict[str, Any]
    rtol: float = 1e-4
    atol: float = 1e-5
    native: bool = False
    """Whether to run it without oneDNN, MXNet's default, because oneDNN fails on it."""


def _one(make: Callable[..., Any], *shape: int, **options: Any) -> Case:
    return Case(lambda S: make(S, S.var("data")), {"data": shape}, **options)


def _two(make: Callable[..., Any], left: Any, right: Any) -> Case:
    return Case(lambda S: make(S, S.var("data"), S.var("other")), {"data": left, "other": right})


def _integers(low: int, high: int, *shape: int, dtype: str = "float32") -> Array:
    drawn: Array = np.random.RandomState(3).randint(low, high, shape).astype(dtype)
    return drawn


def _positive(*shape: int) -> Array:
    return np.random.RandomState(4).uniform(0.1, 2.0, shape).astype("float32")


def _small(*shape: int) -> Array:
    return np.random.RandomState(5).uniform(-0.9, 0.9, shape).astype("float32")


def _boxes(rows: int, *, seed: int, classes: int, centered: bool = False, batch: int = 2) -> Array:
    """Return rows (class, score, box) for box_nms, with equal scores."""
    draw = np.random.RandomState(seed)
    corner = draw.uniform(-0.1, 0.6, (batch, rows, 2))
    size = draw.uniform(0.05, 0.4, (batch, rows, 2))
    label = draw.randint(-1, classes, (batch, rows, 1))
    score = draw.randint(0, 12, (batch, rows, 1)) / 11.0
    box = [corner + size / 2, size] if centered else [corner, corner + size]
    rows_of_all: Array = np.concatenate([label, score, *box], axis=2)
    return rows_of_all.astype("float32")


def _recurrent(mode: str, *, is_from_zeros: bool = False) -> Case:
    """Return two bidirectional layers with states of 3 values, over 5 steps of 2 samples with 4 values.

    Those from zeros are as Gluon exports them: with an open batch, and without their final states.
    """
    gates = {"gru": 3, "lstm": 4}.get(mode, 1)
    count = sum(2 * gates * 3 * (width + 3 + 2) for width in (4, 6))
    states = ["state", "state_cell"][: 1 + (mode == "lstm")]

    def make(S: Any) -> Any:
        operands = {name: S.var(name) for name in ("data", "parameters")}
        operands |= {n: S.zeros((4, 0, 3)) if is_from_zeros else S.var(n) for n in states}
        sizes = {"state_size": 3, "num_layers": 2, "bidirectional": True, "mode": mode}
        layers = S.RNN(**operands, **sizes, p=0.5, state_outputs=not is_from_zeros, name="layers")
        return layers if is_from_zeros else S.Group(list(layers))

    shapes = {} if is_from_zeros else dict.fromkeys(states, (4, 2, 3))
    return Case(make, {"data": (5, 2, 4), "parameters": (count,), **shapes})


def _regions() -> Array:
    """Return regions (image, left, top, right, bottom) in images of 16 × 18, some beyond the border."""
    draw = np.random.RandomState(6)
    corner = draw.uniform(-2, 12, (9, 2))
    size = draw.uniform(0.2, 9, (9, 2))
    image = draw.randint(0, 2, (9, 1))
    rows_of_all: Array = np.concatenate([image, corner, corner + size], axis=1)
    return rows_of_all.astype("float32")


def _head(S: Any, **options: Any) -> Any:
    return S.contrib.MultiBoxDetection(
        S.var("data"), S.var("loc"), S.var("anchor"), name="det", **options
    )


def _head_inputs(seed: int = 8, anchors: int = 40, classes: int = 4) -> dict[str, Any]:
    draw = np.random.RandomState(seed)
    scores = draw.randint(0, 9, (2, classes, anchors)) / 9.0
    corner = draw.uniform(0, 0.7, (1, anchors, 2))
    return {
        "data": scores.astype("float32"),
        "loc": draw.normal(0, 1, (2, anchors * 4)).astype("float32"),
        "anchor": np.concatenate(
            [corner, corner + draw.uniform(0.1, 0.3, corner.shape)], axis=2
        ).astype("float32"),
    }


def _conv(**options: Any) -> Callable[..., Any]:
    return lambda S, x: S.Convolution(x, name="conv", **options)


def _deconv(**options: Any) -> Callable[..., Any]:
    return lambda S, x: S.Deconvolution(x, name="deconv", **options)


def _pool(**options: Any) -> Callable[..., Any]:
    return lambda S, x: S.Pooling(x, name="pool", **options)


def _encoder(S: Any) -> Any:
    """Return one layer of an encoder of tokens, with learned positions, and a mean of the texts."""
    tokens = S.var("data")
    positions = S.Embedding(
        S.contrib.arange_like(tokens, axis=1), input_dim=64, output_dim=32, name="positions"
    )
    words = S.Embedding(tokens, input_dim=50, output_dim=32, name="words")
    x = S.LayerNorm(S.broadcast_add(words, S.expand_dims(positions, axis=0)), name="first")
    x = S.transpose(x, axes=(1, 0, 2))
    qkv = S.FullyConnected(x, num_hidden=96, flatten=False, name="qkv")
    weights = S.softmax(S.contrib.interleaved_matmul_selfatt_qk(qkv, heads=4))
    mixed = S.contrib.interleaved_matmul_selfatt_valatt(qkv, weights, heads=4)
    x = x + S.FullyConnected(mixed, num_hidden=32, flatten=False, name="mixed")
    x = S.LayerNorm(S.transpose(x, axes=(1, 0, 2)), name="last")
    first = S.slice_axis(x, axis=1, begin=0, end=1)
    return S.Concat(first, S.mean(x, axis=1, keepdims=True), dim=2)


def _segmentation(S: Any) -> Any:
    """Return a network from image to image: half the size, back, and beside what it came from."""

    def layer(x: Any, name: str, filters: int) -> Any:
        x = S.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1), name=name)
        return S.Activation(S.BatchNorm(x, name=f"{name}_norm"), act_type="relu")

    fine = layer(S.var("data"), "fine", 8)
    small = S.Pooling(fine, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg")
    coarse = layer(small, "coarse", 16)
    wide = S.Deconvolution(
        coarse, kernel=(4, 4), stride=(2, 2), pad=(1, 1), num_filter=8, name="up"
    )
    return S.Concat(wide, fine, dim=1)


CASES: dict[str, Case] = {
    # -- whole networks
    "encoder": Case(_encoder, {"data": _integers(0, 50, 2, 9)}),
    "segmentation": Case(_segmentation, {"data": (1, 3, 16, 16)}),
    # -- layers
    "conv_1d": _one(_conv(kernel=(3,), num_filter=4, stride=(2,), pad=(1,)), 2, 3, 9),
    "conv_2d": _one(_conv(kernel=(3, 3), num_filter=4, pad=(1, 1), stride=(2, 2)), 2, 3, 7, 8),
    "conv_2d_dilated_groups": _one(
        _conv(kernel=(3, 3), num_filter=4, num_group=2, dilate=(2, 2), pad=(2, 2), no_bias=True),
        1, 4, 8, 8,
    ),
    "conv_2d_depthwise": _one(_conv(kernel=(3, 3), num_filter=6, num_group=6), 1, 6, 6, 6),
    "conv_2d_uneven": _one(_conv(kernel=(1, 3), num_filter=2, pad=(0, 1)), 1, 3, 5, 6),
    "conv_3d": _one(_conv(kernel=(2, 3, 3), num_filter=4, num_group=2), 1, 4, 4, 5, 5),
    "deconv_1d": _one(_deconv(kernel=(4,), num_filter=3, stride=(2,), pad=(1,)), 1, 2, 5),
    "deconv_2d": _one(
        _deconv(kernel=(4, 4), num_filter=3, stride=(2, 2), pad=(1, 1), no_bias=False), 1, 2, 5, 4
    ),
    "deconv_2d_groups_adj": _one(
        _deconv(kernel=(3, 3), num_filter=4, num_group=2, stride=(2, 2), pad=(1, 1), adj=(1, 1)),
        2, 4, 4, 5,
    ),
    "deconv_2d_target": _one(
        _deconv(kernel=(4, 4), num_filter=2, stride=(2, 2), target_shape=(9, 10)),
        1, 3, 5, 5, native=True,
    ),
    "deconv_2d_dilated": _one(
        _deconv(kernel=(2, 2), num_filter=2, dilate=(2, 2)), 1, 3, 4, 4, native=True
    ),
    "deconv_3d": _one(_deconv(kernel=(2, 2, 2), num_filter=2, stride=(2, 2, 2)), 1, 2, 2, 3, 3),
    "dense": _one(lambda S, x: S.FullyConnected(x, num_hidden=5, name="fc"), 2, 3, 4),
    "dense_last_axis": _one(
        lambda S, x: S.FullyConnected(x, num_hidden=5, flatten=False, no_bias=True, name="fc"),
        2, 3, 4,
    ),
    "batch_norm_fixed_gamma": _one(lambda S, x: S.BatchNorm(x, name="bn"), 2, 3, 4, 4),
    "batch_norm": _one(
        lambda S, x: S.BatchNorm(x, fix_gamma=False, eps=1e-5, name="bn"), 2, 3, 4, 4
    ),
    "batch_norm_last_axis": _one(
        lambda S, x: S.BatchNorm(x, fix_gamma=False, axis=-1, use_global_stats=True, name="bn"),
        2, 3, 4,
    ),
    "instance_norm": _one(lambda S, x: S.InstanceNorm(x, name="n"), 2, 3, 4, 5),
    "layer_norm": _one(lambda S, x: S.LayerNorm(x, name="n"), 2, 3, 8),
    "layer_norm_axis": _one(lambda S, x: S.LayerNorm(x, axis=1, eps=1e-3, name="n"), 2, 6, 4),
    "group_norm": _one(lambda S, x: S.GroupNorm(x, num_groups=2, name="n"), 2, 4, 3, 3),
    "l2_instance": _one(lambda S, x: S.L2Normalization(x), 2, 3, 4),
    "l2_channel": _one(lambda S, x: S.L2Normalization(x, mode="channel"), 2, 3, 4, 4),
    "l2_spatial": _one(lambda S, x: S.L2Normalization(x, mode="spatial"), 2, 3, 4, 4),
    "lrn": _one(lambda S, x: S.LRN(x, nsize=5, alpha=0.01, knorm=1.5), 2, 7, 3, 4),
    "batch_norm_relu": _one(lambda S, x: S.contrib.BatchNormWithReLU(x, name="bn"), 2, 3, 4, 4),
    "first_versions": _one(
        lambda S, x: S.Group(
            [
                S.BatchNorm_v1(S.Convolution_v1(x, kernel=(3, 3), num_filter=3, name="c"), name="b"),
                S.Pooling_v1(x, kernel=(3, 3), stride=(2, 2), pool_type="max"),
                S.Pooling_v1(x, kernel=(2, 2), stride=(2, 2), pool_type="avg"),
                S.Pooling_v1(x, kernel=(2, 2), pool_type="sum"),
                S.Pooling_v1(x, global_pool=True, kernel=(2, 2), pool_type="avg"),
            ]
        ),
        1, 2, 6, 7,
    ),
    "pool_v1_full": _one(
        lambda S, x: S.Group(
            [
                S.Pooling_v1(x, kernel=(3, 3), stride=(2, 2), pooling_convention="full", pool_type="max"),
                S.Pooling_v1(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg"),
                S.Pooling_v1(x, kernel=(3, 3), stride=(2, 2), pooling_convention="full", pool_type="avg"),
            ]
        ),
        1, 2, 8, 8,
    ),
    "attention": _one(
        lambda S, x: S.contrib.interleaved_matmul_selfatt_valatt(
            x, S.softmax(S.contrib.interleaved_matmul_selfatt_qk(x, heads=2)), heads=2
        ),
        5, 3, 24,
    ),
    "sampler": _two(
        lambda S, x, y: S.Group([S.BilinearSampler(x, y)]),
        (2, 3, 5, 6), np.random.RandomState(7).uniform(-1.3, 1.3, (2, 2, 4, 3)).astype("float32"),
    ),
    "spatial_transformer": _two(
        lambda S, x, y: S.SpatialTransformer(
            x, y, target_shape=(4, 5), transform_type="affine", sampler_type="bilinear"
        ),
        (2, 3, 6, 7), (2, 6),
    ),
    # -- pooling
    "pool_max": _one(_pool(kernel=(3, 3), stride=(2, 2), pad=(1, 1)), 1, 2, 7, 8),
    "pool_max_full": _one(
        _pool(kernel=(3, 3), stride=(2, 2), pooling_convention="full"), 1, 2, 8, 7
    ),
    "pool_avg": _one(_pool(kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg"), 1, 2, 7, 8),
    "pool_avg_no_pad_count": _one(
        _pool(kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg", count_include_pad=False),
        1, 2, 7, 8,
    ),
    "pool_avg_full": _one(
        _pool(kernel=(3, 3), stride=(2, 2), pool_type="avg", pooling_convention="full"), 1, 2, 8, 8
    ),
    "pool_avg_full_pad": _one(
        _pool(kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg", pooling_convention="full"),
        1, 2, 8, 9,
    ),
    "pool_sum": _one(_pool(kernel=(2, 2), stride=(2, 2), pool_type="sum"), 1, 2, 6, 6),
    "pool_lp": _one(_pool(kernel=(2, 2), stride=(2, 2), pool_type="lp", p_value=2), 1, 2, 6, 6),
    "pool_global_max": _one(_pool(global_pool=True, kernel=(2, 2)), 2, 3, 5, 4),
    "pool_global_avg": _one(_pool(global_pool=True, pool_type="avg"), 2, 3, 5, 4),
    "pool_1d": _one(_pool(kernel=(3,), stride=(2,), pad=(1,)), 1, 2, 9),
    "pool_3d": _one(_pool(kernel=(2, 2, 2), stride=(2, 2, 2), pool_type="avg"), 1, 2, 4, 4, 6),
    "pool_adaptive": _one(
        lambda S, x: S.contrib.AdaptiveAvgPooling2D(x, output_size=(3, 2)), 1, 2, 7, 5
    ),
    "pool_adaptive_one": _one(lambda S, x: S.contrib.AdaptiveAvgPooling2D(x), 1, 2, 7, 5),
    # -- activations and heads
    "activations": _one(
        lambda S, x: S.Group(
            [
                S.Activation(x, act_type=kind)
                for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
            ]
        ),
        2, 3, 4,
    ),
    "leaky": _one(
        lambda S, x: S.Group(
            [
                S.LeakyReLU(x),
                S.LeakyReLU(x, act_type="elu", slope=0.3),
                S.LeakyReLU(x, act_type="selu"),
                S.LeakyReLU(x, act_type="gelu"),
                S.LeakyReLU(x, act_type="rrelu")[0],
            ]
        ),
        2, 3, 4,
    ),
    "prelu": _one(lambda S, x: S.LeakyReLU(x, act_type="prelu", name="p"), 2, 3, 4, 4),
    "softmax": _one(
        lambda S, x: S.Group(
            [
                S.softmax(x),
                S.softmax(x, axis=1, temperature=2.0),
                S.log_softmax(x, axis=1),
                S.softmin(x),
                S.SoftmaxActivation(x),
                S.SoftmaxActivation(x, mode="channel"),
            ]
        ),
        2, 3, 4,
    ),
    "softmax_output": _one(lambda S, x: S.SoftmaxOutput(x, name="softmax"), 3, 5),
    "softmax_output_flat": _one(lambda S, x: S.SoftmaxOutput(x, name="softmax"), 2, 3, 5),
    "softmax_output_multi": _one(
        lambda S, x: S.SoftmaxOutput(x, multi_output=True, name="softmax"), 2, 5, 3, 3
    ),
    "softmax_output_shape": _one(
        lambda S, x: S.SoftmaxOutput(x, preserve_shape=True, name="softmax"), 2, 3, 5
    ),
    "regression_heads": _one(
        lambda S, x: S.Group(
            [
                S.LinearRegressionOutput(x, name="linear"),
                S.LogisticRegressionOutput(x, name="logistic"),
                S.MAERegressionOutput(x, name="mae"),
                S.MakeLoss(x, grad_scale=2.0),
                S.make_loss(x),
                S.BlockGrad(x),
                S.Dropout(x, p=0.3),
            ]
        ),
        3, 4,
    ),
    "svm_output": _one(lambda S, x: S.SVMOutput(x, name="svm"), 3, 4),
    # -- upsampling and cropping
    "up_nearest": _one(lambda S, x: S.UpSampling(x, scale=2, sample_type="nearest"), 1, 2, 3, 4),
    "up_nearest_concat": _two(
        lambda S, x, y: S.UpSampling(x, y, scale=2, sample_type="nearest", num_args=2),
        (1, 2, 4, 4), (1, 3, 2, 2),
    ),
    "up_bilinear": _one(
        lambda S, x: S.UpSampling(x, scale=2, sample_type="bilinear", num_filter=3, name="up"),
        1, 3, 4, 4,
    ),
    "resize": _one(
        lambda S, x: S.Group(
            [
                S.contrib.BilinearResize2D(x, height=7, width=9),
                S.contrib.BilinearResize2D(x, height=7, width=9, align_corners=False),
                S.contrib.BilinearResize2D(x, scale_height=1.5, scale_width=2.0),
                S.contrib.BilinearResize2D(x, mode="odd_scale", scale_height=2, scale_width=2),
                S.contrib.BilinearResize2D(x, mode="to_odd_down"),
            ]
        ),
        1, 2, 4, 5,
    ),
    "resize_like": _two(
        lambda S, x, y: S.contrib.BilinearResize2D(x, y, mode="like"), (1, 2, 4, 5), (1, 1, 6, 7)
    ),
    "crop": _one(
        lambda S, x: S.Group(
            [
                S.Crop(x, num_args=1, h_w=(3, 2), offset=(1, 2)),
                S.Crop(x, num_args=1, h_w=(2, 3), center_crop=True),
            ]
        ),
        1, 2, 5, 6,
    ),
    "crop_like": _two(
        lambda S, x, y: S.Crop(x, y, num_args=2, offset=(1, 1)), (1, 2, 5, 6), (1, 1, 3, 4)
    ),
    "pad": _one(
        lambda S, x: S.Group(
            [
                S.Pad(x, mode="constant", constant_value=1.5, pad_width=(0, 0, 0, 0, 1, 2, 0, 1)),
                S.Pad(x, mode="edge", pad_width=(0, 0, 0, 0, 1, 2, 2, 1)),
                S.Pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 2, 1)),
            ]
        ),
        1, 2, 4, 5,
    ),
    # -- arithmetic
    "binary": _two(
        lambda S, x, y: S.Group(
            [
                x + y, x - y, x * y, x / y,
                S.broadcast_power(S.abs(x), y), S.broadcast_mod(x, y),
                S.broadcast_maximum(x, y), S.broadcast_minimum(x, y), S.broadcast_hypot(x, y),
                S.maximum(x, y), S.minimum(x, y), S.add_n(x, y, x),
            ]
        ),
        (2, 3), _positive(2, 3),
    ),
    "broadcast": _two(
        lambda S, x, y: S.Group(
            [
                S.broadcast_add(x, y), S.broadcast_sub(x, y), S.broadcast_mul(x, y),
                S.broadcast_div(x, y),
            ]
        ),
        (2, 3, 4), _positive(1, 3, 1),
    ),
    "comparisons": _two(
        lambda S, x, y: S.Group(
            [
                S.broadcast_equal(x, y), S.broadcast_not_equal(x, y), S.broadcast_greater(x, y),
                S.broadcast_greater_equal(x, y), S.broadcast_lesser(x, y),
                S.broadcast_lesser_equal(x, y), S.broadcast_logical_and(x, y),
                S.broadcast_logical_or(x, y), S.broadcast_logical_xor(x, y),
                x > 1, x >= 1, x < 1, x <= 1, x == 1, x != 1, S.logical_not(x),
            ]
        ),
        _integers(-1, 2, 4, 5), _integers(-1, 3, 1, 5),
    ),
    "scalars": _one(
        lambda S, x: S.Group(
            [
                x + 2, x - 2, 2 - x, x * 3, x / 4, 4 / (x + 9), S.abs(x) ** 2.5,
                S._internal._RPowerScalar(x, scalar=2.0) if hasattr(S._internal, "_RPowerScalar")
                else S._internal._rpower_scalar(x, scalar=2.0),
                x % 0.7, S._internal._rmod_scalar(x + 9, scalar=3.0),
                S.maximum(x, 0.5), S.minimum(x, 0.5), S.hypot(x, 2.0), S.clip(x, -0.5, 0.25),
                S.smooth_l1(x, scalar=1.5),
            ]
        ),
        3, 5,
    ),
    "unary": _one(
        lambda S, x: S.Group(
            [
                S.abs(x), S.sign(x), S.ceil(x), S.floor(x), S.trunc(x), S.fix(x), S.rint(x * 2),
                S.round(x * 2), S.exp(x), S.expm1(x), S.square(x), S.cbrt(x), S.sin(x), S.cos(x),
                S.tan(x), S.sinh(x), S.cosh(x), S.tanh(x), S.arctan(x), S.arcsinh(x), S.erf(x),
                S.sigmoid(x), S.relu(x), S.softsign(x), S.hard_sigmoid(x), S.degrees(x),
                S.radians(x), S.negative(x), -x,
            ]
        ),
        4, 5,
    ),
    "unary_positive": Case(
        lambda S: (
            lambda x: S.Group(
                [
                    S.log(x), S.log2(x), S.log10(x), S.log1p(x), S.sqrt(x), S.rsqrt(x),
                    S.reciprocal(x), S.rcbrt(x), S.arccosh(x + 1),
                ]
            )
        )(S.var("data")),
        {"data": _positive(4, 5)},
    ),
    "unary_small": Case(
        lambda S: (lambda x: S.Group([S.arcsin(x), S.arccos(x), S.arctanh(x)]))(S.var("data")),
        {"data": _small(4, 5)},
    ),
    "where": _two(lambda S, x, y: S.where(x, y, y * 2), _integers(0, 2, 3, 4), (3, 4)),
    "where_rows": _two(lambda S, x, y: S.where(x, y, y * 2), _integers(0, 2, 3), (3, 4)),
    "reductions": _one(
        lambda S, x: S.Group(
            [
                S.sum(x), S.sum(x, axis=1), S.mean(x, axis=(0, 2), keepdims=True),
                S.max(x, axis=-1), S.min(x, axis=1, exclude=True), S.prod(x, axis=2),
                S.norm(x), S.norm(x, axis=1), S.norm(x, ord=1, axis=(1, 2), keepdims=True),
                S.sum(x, keepdims=True),
            ]
        ),
        2, 3, 4,
    ),
    "arg_reductions": _one(
        lambda S, x: S.Group(
            [
                S.argmax(x, axis=1), S.argmin(x, axis=2), S.argmax(x, axis=1, keepdims=True),
                S.argmax(x), S.argmin(S.round(x), axis=0),
                S.argmax_channel(S.Reshape(x, shape=(2, -1))),
            ]
        ),
        2, 3, 4,
    ),
    "dot": _two(
        lambda S, x, y: S.Group(
            [
                S.dot(x, y, transpose_b=True), S.dot(x, y, transpose_a=True),
                S.dot(x, S.transpose(y)),
            ]
        ),
        (3, 4), (3, 4),
    ),
    "dot_ranks": _two(lambda S, x, y: S.dot(x, y), (2, 3, 4), (4, 5)),
    "batch_dot": _two(
        lambda S, x, y: S.Group(
            [
                S.batch_dot(x, y, transpose_b=True), S.batch_dot(x, y, transpose_a=True),
                S.linalg.gemm2(x, y, transpose_b=True, alpha=0.5),
            ]
        ),
        (2, 3, 4), (2, 3, 4),
    ),
    "cast": _one(
        lambda S, x: S.Group(
            [
                S.cast(x * 3, "int32"), S.cast(x, "float64"), S.amp_cast(x, "float32"),
                S.cast(S.cast(x * 3, "int32") + 2, "float32"),
            ]
        ),
        3, 4,
    ),
    # -- shapes
    "reshape": _one(
        lambda S, x: S.Group(
            [
                S.Reshape(x, shape=(0, -1)), S.Reshape(x, shape=(-2,)),
                S.Reshape(x, shape=(-3, 0)), S.Reshape(x, shape=(0, 0, -4, 2, -1)),
                S.Reshape(x, shape=(-4, -1, 2, -2)), S.Reshape(x, shape=(8, 0, -1), reverse=True),
                S.Reshape(x, shape=(-1, 0), reverse=True), S.Flatten(x), S.expand_dims(x, axis=-1),
                S.squeeze(S.expand_dims(x, axis=1)), S.transpose(x), S.transpose(x, axes=(0, 2, 1)),
                S.SwapAxis(x, dim1=0, dim2=2), S.Reshape(x, shape=(-1,)),
            ]
        ),
        2, 3, 4,
    ),
    "reshape_like": _two(
        lambda S, x, y: S.Group(
            [S.reshape_like(x, y), S.reshape_like(x, y, lhs_begin=0, lhs_end=1, rhs_begin=0, rhs_end=1)]
        ),
        (2, 6), (2, 2, 3),
    ),
    "spaces": _one(
        lambda S, x: S.Group([S.depth_to_space(x, 2), S.space_to_depth(x, 2)]), 1, 8, 4, 6
    ),
    "slices": _one(
        lambda S, x: S.Group(
            [
                S.slice(x, begin=(0, 1), end=(2, 3)),
                S.slice(x, begin=(None, -2, 1), end=(None, None, 6), step=(1, 1, 2)),
                S.slice(x, begin=(None, None, 4), end=(None, None, 0), step=(1, 1, -2)),
                S.slice(x, begin=(None, None, None), end=(None, None, None), step=(None, -1, None)),
                S.slice_axis(x, axis=2, begin=1, end=None), S.slice_axis(x, axis=-1, begin=-3, end=-1),
                S.reverse(x, axis=(0, 2)),
            ]
        ),
        2, 4, 7,
    ),
    "slice_like": _two(
        lambda S, x, y: S.Group([S.slice_like(x, y), S.slice_like(x, y, axes=(1,))]),
        (4, 5), (2, 3),
    ),
    **{f"rnn_{mode}": _recurrent(mode) for mode in ("gru", "lstm", "rnn_relu", "rnn_tanh")},
    "rnn_from_zeros": _recurrent("lstm", is_from_zeros=True),
    "split": _one(
        lambda S, x: S.SliceChannel(x, num_outputs=3, axis=1, name="parts"), 2, 6, 4
    ),
    "split_squeezed": _one(
        lambda S, x: S.SliceChannel(x, num_outputs=2, axis=2, squeeze_axis=True), 2, 3, 2
    ),
    "split_one": _one(lambda S, x: S.SliceChannel(x, num_outputs=1, name="only"), 2, 3),
    "split_v2": _one(
        lambda S, x: S.Group(
            [S.split_v2(x, (1, 4), axis=1)[i] for i in range(3)] + [S.split_v2(x, 2, axis=0)[1]]
        ),
        2, 6,
    ),
    "join": _two(
        lambda S, x, y: S.Group([S.Concat(x, y, dim=1), S.Concat(x, y, dim=-1), S.stack(x, y, axis=1)]),
        (2, 3, 4), (2, 3, 4),
    ),
    "repeat": _one(
        lambda S, x: S.Group(
            [
                S.tile(x, reps=(2, 1, 3)), S.tile(x, reps=(2,)), S.repeat(x, repeats=2, axis=1),
                S.repeat(x, repeats=2),
            ]
        ),
        2, 3,
    ),
    "broadcast_to": _one(
        lambda S, x: S.Group(
            [S.broadcast_to(x, shape=(0, 4, 3)), S.broadcast_axis(x, axis=1, size=5)]
        ),
        2, 1, 3,
    ),
    "broadcast_like": _two(
        lambda S, x, y: S.Group(
            [S.broadcast_like(x, y), S.broadcast_like(x, y, lhs_axes=(0,), rhs_axes=(1,))]
        ),
        (1, 3), (2, 3),
    ),
    "constants": _one(
        lambda S, x: S.Group(
            [
                S.zeros_like(x), S.ones_like(x), S.broadcast_add(x, S.zeros((2, 3))),
                S.broadcast_mul(x, S.ones((1, 3))), S.broadcast_add(x, S.arange(3)),
                S.arange(1, 7, step=1.5, repeat=2), S.full((2, 2), 1.25), S.eye(3, 4, 1),
                S.contrib.arange_like(x, axis=1), S.shape_array(x), S.size_array(x),
                S.contrib.div_sqrt_dim(x), S.identity(x),
            ]
        ),
        2, 3,
    ),
    # -- lookups and sorting
    "embedding": Case(
        lambda S: S.Embedding(S.var("data"), input_dim=6, output_dim=3, name="e"),
        {"data": _integers(-1, 8, 2, 4)},
    ),
    "take": _two(
        lambda S, x, y: S.Group(
            [S.take(y, x), S.take(y, x, axis=1), S.take(y, x, axis=-1, mode="wrap")]
        ),
        _integers(-2, 7, 2, 3), (4, 5),
    ),
    "pick": _two(
        lambda S, x, y: S.Group([S.pick(y, x), S.pick(y, x, keepdims=True, mode="wrap")]),
        _integers(-1, 6, 4), (4, 5),
    ),
    "batch_take": _two(
        lambda S, x, y: S.batch_take(y, x), _integers(-1, 6, 4, dtype="int32"), (4, 5)
    ),
    "gather_nd": _two(lambda S, x, y: S.gather_nd(y, x), _integers(-3, 3, 2, 5), (3, 4, 2)),
    "one_hot": Case(
        lambda S: (
            lambda x: S.Group([S.one_hot(x, 4), S.one_hot(x, 4, on_value=2, off_value=-1)])
        )(S.var("data")),
        {"data": _integers(-1, 6, 2, 3)},
    ),
    "sorting": _one(
        lambda S, x: S.Group(
            [
                S.topk(x, k=3), S.topk(x, k=2, ret_typ="value", axis=1),
                *S.topk(x, k=2, ret_typ="both", is_ascend=True),
                S.sort(x), S.argsort(x, axis=1), S.argsort(x, is_ascend=False, dtype="int32"),
                S.sort(x, axis=None),
            ]
        ),
        2, 5, 6,
    ),
    # -- detection
    "prior": _one(
        lambda S, x: S.Group(
            [
                S.contrib.MultiBoxPrior(x, sizes=(0.3, 0.5), ratios=(1, 2, 0.5)),
                S.contrib.MultiBoxPrior(x, sizes=(0.9,), ratios=(2, 1), clip=True),
                S.contrib.MultiBoxPrior(x, sizes=(0.2,), steps=(0.1, 0.2), offsets=(0.3, 0.6)),
            ]
        ),
        1, 3, 4, 6,
    ),
    "detection": Case(_head, _head_inputs()),
    "detection_forced": Case(
        lambda S: _head(S, force_suppress=True, nms_threshold=0.3, threshold=0.4, clip=False),
        _head_inputs(9),
    ),
    "detection_top": Case(lambda S: _head(S, nms_topk=7, nms_threshold=0.45), _head_inputs(10)),
    "detection_no_nms": Case(
        lambda S: _head(S, nms_threshold=-1.0, threshold=0.7, variances=(0.2, 0.2, 0.1, 0.1)),
        _head_inputs(11),
    ),
    "detection_nothing": Case(lambda S: _head(S, threshold=2.0), _head_inputs(12)),
    "nms": Case(
        lambda S: S.contrib.box_nms(S.var("data"), id_index=0, overlap_thresh=0.3, name="nms"),
        {"data": _boxes(30, seed=1, classes=3)},
    ),
    "nms_forced_top": Case(
        lambda S: S.contrib.box_nms(
            S.var("data"), id_index=0, force_suppress=True, topk=9, valid_thresh=0.2
        ),
        {"data": _boxes(30, seed=2, classes=3)},
    ),
    "nms_background": Case(
        lambda S: S.contrib.box_nms(S.var("data"), id_index=0, background_id=0),
        {"data": _boxes(30, seed=3, classes=3)},
    ),
    "nms_centred": Case(
        lambda S: S.contrib.box_nms(
            S.var("data"), overlap_thresh=0.2, in_format="center", out_format="corner"
        ),
        {"data": _boxes(25, seed=4, classes=2, centered=True)},
    ),
    "nms_to_centre": Case(
        lambda S: S.contrib.box_nms(S.var("data"), out_format="center", valid_thresh=0.1),
        {"data": _boxes(25, seed=5, classes=2)},
    ),
    "nms_columns": Case(
        lambda S: S.contrib.box_nms(
            S.slice_axis(S.var("data"), axis=-1, begin=1, end=None),
            coord_start=1, score_index=0, overlap_thresh=0.4,
        ),
        {"data": _boxes(25, seed=6, classes=2, batch=1)},
    ),
    "nms_one_image": Case(
        lambda S: S.contrib.box_nms(S.Reshape(S.var("data"), shape=(-3, 0)), valid_thresh=0.5),
        {"data": _boxes(12, seed=7, classes=2, batch=1)},
    ),
    "box_decode": _two(
        lambda S, x, y: S.Group(
            [
                S.contrib.box_decode(x, y, 0.1, 0.1, 0.2, 0.2, clip=0.1),
                S.contrib.box_decode(x, y, format="corner"),
            ]
        ),
        (2, 5, 4), _positive(1, 5, 4),
    ),
    "box_iou": _two(
        lambda S, x, y: S.Group([S.contrib.box_iou(x, y), S.contrib.box_iou(x, y, format="center")]),
        _boxes(6, seed=8, classes=1, batch=1)[0, :, 2:], _boxes(4, seed=9, classes=1)[:, :, 2:],
    ),
    "roi_pooling": _two(
        lambda S, x, y: S.ROIPooling(x, y, pooled_size=(3, 2), spatial_scale=0.5),
        (2, 3, 8, 9), _regions(),
    ),
    "roi_align": _two(
        lambda S, x, y: S.Group(
            [
                S.contrib.ROIAlign(x, y, pooled_size=(3, 2), spatial_scale=0.5, sample_ratio=2),
                S.contrib.ROIAlign(x, y, pooled_size=(2, 2), spatial_scale=0.5),
            ]
        ),
        (2, 3, 8, 9), _regions(),
    ),
    # -- small networks
    "mlp_softmax_output": _one(
        lambda S, x: S.SoftmaxOutput(
            S.FullyConnected(
                S.Activation(S.FullyConnected(x, num_hidden=8, name="fc1"), act_type="relu"),
                num_hidden=3, name="fc2",
            ),
            name="softmax",
        ),
        2, 4,
    ),
    "residual": _one(
        lambda S, x: S.Pooling(
            S.Activation(
                x + S.BatchNorm(S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name="c"), name="b"),
                act_type="relu",
            ),
            global_pool=True, pool_type="avg", kernel=(1, 1), name="gap",
        ),
        1, 4, 6, 6,
    ),
    "pyramid": _two(
        lambda S, x, y: S.Concat(
            S.Crop(S.UpSampling(x, scale=2, sample_type="nearest"), y, num_args=2),
            S.Convolution(y, kernel=(1, 1), num_filter=2, name="lateral"),
            dim=1,
        ),
        (1, 2, 4, 4), (1, 3, 7, 7),
    ),
}  # fmt: skip


def start_mxnet() -> Any:
    """Import MXNet 1.9 into this process, in which NumPy gets its old aliases back."""
    os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    for alias in (bool, int, float, complex, object, str):
        if alias.__name__ not in vars(np):
            setattr(np, alias.__name__, alias)
    import mxnet

    return mxnet


def run_case(mx: Any, name: str, folder: Path) -> None:
    """Write checkpoint, inputs and outputs of a case."""
    case = CASES[name]
    seed = zlib.crc32(name.encode())
    save(mx, case.make(mx.sym), case.inputs, name, folder, seed)


def save(mx: Any, symbol: Any, inputs: dict[str, Any], name: str, folder: Path, seed: int) -> None:
    """Run a symbol with seeded noise for arrays that `inputs` lacks, and write everything."""
    draw = np.random.RandomState(seed % 2**32)
    arrays = {
        key: value if isinstance(value, np.ndarray) else draw.normal(0, 1, value).astype("float32")
        for key, value in inputs.items()
    }
    executor = symbol.simple_bind(
        mx.cpu(),
        grad_req="null",
        type_dict={key: str(value.dtype) for key, value in arrays.items()},
        **{key: value.shape for key, value in arrays.items()},
    )
    weights: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for key, value in executor.arg_dict.items():
        if key in arrays:
            value[:] = arrays[key]
        elif not key.endswith("_label"):
            scale = 1 / np.sqrt(max(np.prod(value.shape[1:]), 1.0))
            value[:] = draw.normal(0, scale, value.shape).astype("float32")
            weights[key] = value
    for key, value in executor.aux_dict.items():
        low = 0.3 if key.endswith("var") else -0.5
        value[:] = draw.uniform(low, 1.0, value.shape).astype("float32")
        states[key] = value
    results = executor.forward(is_train=False)
    mx.model.save_checkpoint(str(folder / name), 0, symbol, weights, states)
    np.savez(
        folder / f"{name}.npz",
        names=np.array(symbol.list_outputs()),
        **{f"in:{key}": value for key, value in arrays.items()},
        **{f"out:{index}": value.asnumpy() for index, value in enumerate(results)},
    )


# Gluon's zoo by input size: the smallest that the architecture allows
ZOO: dict[str, int] = {
    "alexnet": 64,
    "densenet121": 224,
    "inceptionv3": 299,
    "mobilenet0.25": 64,
    "mobilenetv2_0.25": 64,
    "resnet18_v1": 64,
    "resnet50_v1": 64,
    "resnet18_v2": 64,
    "resnet50_v2": 64,
    "squeezenet1.0": 224,
    "squeezenet1.1": 224,
    "vgg11": 32,
    "vgg11_bn": 32,
}


def run_zoo(mx: Any, name: str, folder: Path) -> None:
    """Export a network of the Gluon zoo with seeded weights, and its outputs for a seeded image."""
    seed = zlib.crc32(name.encode()) % 2**32
    np.random.seed(seed)
    mx.random.seed(seed)
    draw = np.random.RandomState(seed)
    net = mx.gluon.model_zoo.vision.get_model(name, classes=10)
    # He initialization makes outputs large enough for a comparison.
    net.initialize(mx.init.MSRAPrelu(slope=0.0))
    net.hybridize()
    image = draw.uniform(0, 1, (1, 3, ZOO[name], ZOO[name])).astype("float32")
    net(mx.nd.array(image))
    for key, value in net.collect_params().items():
        if key.endswith(("gamma", "running_var")):
            value.set_data(mx.nd.array(draw.uniform(0.5, 1.5, value.shape)))
        elif key.endswith(("beta", "running_mean", "bias")):
            value.set_data(mx.nd.array(draw.uniform(-0.3, 0.3, value.shape)))
    net.export(str(folder / name), epoch=0)
    output = net(mx.nd.array(image)).asnumpy()
    names = mx.sym.load(str(folder / f"{name}-symbol.json")).list_outputs()
    np.savez(
        folder / f"{name}.npz", **{"names": np.array(names), "in:data": image, "out:0": output}
    )


def ssd(S: Any, classes: int = 3) -> Any:
    """Return a small single-shot detector with three scales, built as in MXNet's SSD example."""
    data = S.var("data")
    features = []
    for index, filters in enumerate((16, 32, 32, 32)):
        data = S.Convolution(
            data, kernel=(3, 3), pad=(1, 1), num_filter=filters, name=f"conv{index}"
        )
        data = S.Activation(S.BatchNorm(data, name=f"bn{index}"), act_type="relu")
        data = S.Pooling(data, kernel=(2, 2), stride=(2, 2), pool_type="max")
        features.append(data)
    scores: list[Any] = []
    offsets: list[Any] = []
    anchors: list[Any] = []
    for index, feature in enumerate(features[1:]):
        sizes, ratios = (0.2 + 0.2 * index, 0.3 + 0.2 * index), (1, 2, 0.5)
        count = len(sizes) + len(ratios) - 1
        for kind, parts, depth in (("cls", scores, classes + 1), ("loc", offsets, 4)):
            head = S.Convolution(
                feature, kernel=(3, 3), pad=(1, 1), num_filter=count * depth, name=f"{kind}{index}"
            )
            parts.append(S.Flatten(S.transpose(head, axes=(0, 2, 3, 1))))
        anchors.append(S.contrib.MultiBoxPrior(feature, sizes=sizes, ratios=ratios, clip=False))
    score = S.Reshape(S.Concat(*scores, dim=1), shape=(0, -1, classes + 1))
    score = S.SoftmaxActivation(S.transpose(score, axes=(0, 2, 1)), mode="channel")
    return S.contrib.MultiBoxDetection(
        score, S.Concat(*offsets, dim=1), S.Concat(*anchors, dim=1),
        name="detection", nms_threshold=0.45, threshold=0.2, nms_topk=100,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    names = arguments[1:] or list(CASES)
    native = [name for name in names if name in CASES and CASES[name].native]
    if native and os.environ.get("MXNET_MKLDNN_ENABLED") != "0":
        subprocess.run(
            [sys.executable, __file__, str(folder), *native],
            env={**os.environ, "MXNET_MKLDNN_ENABLED": "0"},
            check=True,
        )
        names = [name for name in names if name not in native]
    mx = start_mxnet()
    for name in names:
        if name in ZOO:
            run_zoo(mx, name, folder)
        elif name == "ssd":
            save(mx, ssd(mx.sym), {"data": (2, 3, 64, 64)}, name, folder, seed=1)
        else:
            run_case(mx, name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
