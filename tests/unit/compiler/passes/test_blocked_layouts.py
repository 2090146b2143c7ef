"""Blocked layouts and packed weights compute what plain kernels do, for every shape."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from tests.support.kernels import FAST, LEVELS_HERE, check_alike, host_level, kernels_of, level
from tests.support.tuning import conv, dense, model, relu, softmax
from tests.unit.compiler.networks import (
    Layer,
    biased,
    channels_of,
    convolution,
    depthwise,
    pooled,
    residual,
    transposed,
)
from tvmflow.compiler import lowering
from tvmflow.core.types import OPTIMIZED_OPERATORS
from tvmflow.targets.tvm_target import make_target

SLOWLY = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
FEW = settings(SLOWLY, max_examples=4)
"""The examples of the default tests."""


def scaled(value: Any, weight: Any) -> Any:
    return relax.op.multiply(value, weight((channels_of(value), 1, 1)))


def averaged(value: Any, _: Any) -> Any:
    return relax.op.mean(value, [2, 3], keepdims=True)


def sigmoid(value: Any, _: Any) -> Any:
    return relax.op.sigmoid(value)


def concatenated(*layers: Layer) -> Layer:
    """Return the concatenated channels of several layers."""
    return lambda value, weight: relax.op.concat([layer(value, weight) for layer in layers], axis=1)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[tuple[int, ...], Layer]:
    """Return an input shape and a convolution of it: odd sizes, few or many channels, groups."""
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = [draw(st.integers(0, 3)) for _ in range(4)]
    size = [(edge - 1) * dilation + 1 + draw(st.integers(0, 20)) for edge in kernel]
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    per_group = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 32]))
    out = groups * draw(st.sampled_from([1, 3, 6, 8, 16, 21, 32, 48]))
    shape = (draw(st.integers(1, 2)), groups * per_group, *size)
    options = {"strides": stride, "dilation": dilation, "padding": padding, "groups": groups}
    return shape, convolution(out, kernel, **options)


@FEW
@given(convolutions(), st.sampled_from(LEVELS_HERE))
def test_convolutions_of_every_shape(case: tuple[tuple[int, ...], Layer], mcpu: str) -> None:
    """Kernel, stride, dilation, padding and numbers of groups and channels are arbitrary; a bias and an activation follow."""
    shape, layer = case
    check_alike(model(layer, biased, relu, shape=shape), level(mcpu))


@pytest.mark.nightly
@pytest.mark.slow
@SLOWLY
@given(
    st.sampled_from([1, 3, 4, 16, 24, 33]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(5, 23),
    st.sampled_from(LEVELS_HERE),
)
def test_depthwise_convolutions(
    channels: int, kernel: tuple[int, int], stride: int, padding: int, size: int, mcpu: str
) -> None:
    """There is a convolution before and after."""
    layers = (
        conv(channels, 1),
        depthwise(kernel, strides=stride, padding=padding),
        scaled,
        conv(5, 1),
    )
    check_alike(model(*layers, shape=(2, 3, size, size + 1)), level(mcpu))


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> tuple[tuple[int, ...], Layer]:
    """Return an input shape and a transposed convolution of it: grouped, depthwise, cropped, padded."""
    kernel = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    strides = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    padding = [draw(st.integers(0, edge - 1)) for edge in kernel * 2]
    groups = draw(st.sampled_from([1, 1, 2, 4, 20]))
    per_group = draw(st.sampled_from([1, 3, 4, 8, 16, 17])) if groups < 20 else 1
    out = groups * (draw(st.sampled_from([1, 4, 8, 16, 21])) if groups < 20 else 1)
    options = {
        "strides": strides,
        "padding": padding,
        "output_padding": [draw(st.integers(0, step - 1)) for step in strides],
        "groups": groups,
    }
    size = [draw(st.integers(5, 12)), draw(st.integers(5, 12))]
    shape = (draw(st.integers(1, 2)), groups * per_group, *size)
    return shape, transposed(out, (kernel[0], kernel[1]), **options)


@pytest.mark.nightly
@pytest.mark.slow
@SLOWLY
@given(transposed_convolutions(), st.sampled_from(LEVELS_HERE))
def test_transposed_convolutions(case: tuple[tuple[int, ...], Layer], mcpu: str) -> None:
    """Stride, padding and output padding are arbitrary, between two convolutions."""
    shape, layer = case
    mod = model(conv(shape[1], 1), layer, biased, relu, conv(5, 1), shape=shape)
    check_alike(mod, level(mcpu))


def _with_channels(names: Iterable[str]) -> list[Any]:
    """Return each name with several numbers of channels, of which all but one are slow tests."""
    return [
        pytest.param(
            name, channels, marks=[] if channels == (6, 32)[index % 2] else [pytest.mark.slow]
        )
        for index, name in enumerate(names)
        for channels in (6, 16, 32)
    ]


SEQUENCES: dict[str, tuple[Layer, ...]] = {
    "residual": (
        residual(
            lambda value, weight: convolution(channels_of(value), (3,), padding=1)(value, weight)
        ),
    ),
    "pooling": (
        lambda value, _: relax.op.nn.max_pool1d(value, pool_size=2, strides=2),
        lambda value, _: relax.op.nn.avg_pool1d(value, pool_size=3, strides=2, padding=1),
    ),
    "gate": (lambda value, _: relax.op.multiply(value, relax.op.sigmoid(value)),),
    "bias": (lambda value, weight: relax.op.add(value, weight((channels_of(value), 1))), relu),
    "transposed": (
        lambda value, weight: relax.op.nn.conv1d_transpose(
            value, weight((channels_of(value), 8, 4)), strides=2, padding=(1, 1)
        ),
    ),
    "depthwise": (
        lambda value, weight: convolution(
            channels_of(value), (5,), groups=channels_of(value), dilation=2, padding=4
        )(value, weight),
    ),
    "transposition": (lambda value, _: relax.op.permute_dims(value, [0, 2, 1]),),
}


@pytest.mark.parametrize(("between", "channels"), _with_channels(SEQUENCES))
def test_convolutions_over_sequences(between: str, channels: int) -> None:
    """They have the kernels of images, with one spatial axis, and data stay blocked between them."""
    layers = (
        convolution(channels, (5,), strides=2, padding=(2, 1)),
        *SEQUENCES[between],
        convolution(6, (3,)),
    )
    mod = model(*layers, shape=(2, 12, 40))
    check_alike(mod, host_level())
    names = kernels_of(mod, host_level())
    assert sum("conv1d" in name and "NCHWc" in name for name in names) >= 2
    if between != "transposition":
        assert sum("unpack" in name for name in names) == 1


BETWEEN: dict[str, tuple[Layer, ...]] = {
    "residual": (
        residual(same := lambda value, weight: conv(channels_of(value))(value, weight)),
        relu,
    ),
    "concatenation": (concatenated(conv(32), conv(8)), sigmoid),
    "residual of a concatenation": (concatenated(same, conv(4)), residual(same)),
    "max pooling": (pooled("max", pool_size=3, strides=2, padding=1),),
    "average pooling": (
        pooled("avg", pool_size=(3, 2), strides=(2, 1), padding=1, ceil_mode=True),
    ),
    "padding that counts": (pooled("avg", pool_size=3, padding=1, count_include_pad=True),),
    "mean": (averaged,),
    "largest": (lambda value, _: relax.op.max(value, [2, 3], keepdims=True),),
    "adaptive pooling": (
        lambda value, _: relax.op.nn.adaptive_avg_pool2d(value, output_size=(3, 2)),
    ),
    "affine": (scaled, biased, sigmoid),
    "exponential": (lambda value, _: relax.op.exp(relax.op.negative(value)),),
    "transposition": (lambda value, _: relax.op.permute_dims(value, [0, 1, 3, 2]),),
    "softmax over channels": (lambda value, _: relax.op.nn.softmax(value, axis=1),),
    "gate": (lambda value, _: relax.op.multiply(value, relax.op.sigmoid(averaged(value, None))),),
    "waves": (lambda value, _: relax.op.cos(relax.op.sin(value)),),
    "steps": (lambda value, _: relax.op.sign(relax.op.floor(value)),),
    "scalar": (lambda value, _: relax.op.divide(value, relax.const(3.0, "float32")),),
}


@pytest.mark.parametrize(("between", "channels"), _with_channels(BETWEEN))
def test_operators_between_convolutions(between: str, channels: int) -> None:
    """Residuals, concatenations, pooling, gates, and operators that need the plain layout."""
    layers = (conv(channels), *BETWEEN[between], conv(7, 1))
    check_alike(model(*layers, shape=(1, 5, 13, 11)), host_level())


@pytest.mark.parametrize(
    ("axes", "size", "keeps_axes"),
    [
        ([2], (17,), False),
        ([-1, -2], (13, 11), False),
        ([3], (13, 11), False),
        ([2], (13, 11), True),
        ([2, 4], (3, 5, 7), False),
    ],
)
@pytest.mark.parametrize(
    ("kind", "channels", "mcpu"),
    [("max", 21, LEVELS_HERE[0]), ("min", 32, LEVELS_HERE[-1]), ("mean", 21, LEVELS_HERE[-1])],
)
def test_spatial_axes_are_reduced_before_data_are_unpacked(
    kind: str, channels: int, mcpu: str, axes: list[int], size: tuple[int, ...], keeps_axes: bool
) -> None:
    """The last numbers alone are unpacked, whether the reduced axes stay or not."""

    def reduced(value: Any, _: Any) -> Any:
        return getattr(relax.op, kind)(value, axes, keepdims=keeps_axes)

    mod, target = (
        model(convolution(channels, (3,) * len(size)), reduced, shape=(2, 5, *size)),
        level(mcpu),
    )
    check_alike(mod, target)
    lowered = lowering.lower(mod, make_target(target), FAST).mod
    [unpack] = [kernel for var, kernel in lowered.functions_items() if "unpack" in var.name_hint]
    assert list(unpack.params[-1].ty.shape) == list(mod["main"].ret_ty.shape)


def test_what_is_reduced_in_blocks_is_joined_and_scaled_as_a_matrix() -> None:
    """Features of two widths, of which one fills no block, meet a plain matrix and weights."""

    def features(value: Any, weight: Any) -> Any:
        largest = relax.op.max(conv(21)(value, weight), [2, 3])
        means = relax.op.mean(conv(16)(value, weight), [2, 3])
        plain = relax.op.sum(value, [2, 3])
        joined = relax.op.concat([means, largest, plain], axis=1)
        return relax.op.multiply(joined, weight((16 + 21 + 5,)))

    mod = model(features, softmax, dense(7), shape=(2, 5, 9, 11))
    check_alike(mod, host_level())


def test_data_are_packed_once_and_unpacked_once() -> None:
    """Data stay blocked from the first convolution to the last."""
    layers = [
        conv(32),
        relu,
        residual(conv(32)),
        pooled("max", pool_size=2, strides=2),
        conv(32),
        relu,
    ]
    names = kernels_of(model(*layers, shape=(1, 32, 16, 16)), host_level())
    assert sum("unpack" in name for name in names) == 1
    assert sum("pack" in name for name in names) == 2


@pytest.mark.parametrize("function", ["sigmoid", "relu"])
def test_functions_of_plain_data_are_computed_before_they_are_packed(function: str) -> None:
    """A transposition would compute them one number at a time; cheap operators belong to it."""

    def weigh(value: Any, _: Any) -> Any:
        compute = {"sigmoid": relax.op.sigmoid, "relu": relax.op.nn.relu}[function]
        return relax.op.multiply(relax.const(0.5), compute(value) * value)

    mod = model(weigh, convolution(32, (3, 3), padding=1), shape=(1, 32, 16, 16))
    assert ("pack" in kernels_of(mod, host_level())) == (function == "sigmoid")
    check_alike(mod, host_level())


def test_constants_join_blocked_data() -> None:
    """They are packed, too."""

    def join(value: Any, _: Any) -> Any:
        ones = relax.const(np.ones((1, 16, 8, 8), np.float32))
        return relax.op.concat([value, ones], axis=1)

    kernel = functools.partial(convolution, kernel=(3, 3), padding=1)
    check_alike(model(kernel(32), join, kernel(16), shape=(1, 3, 8, 8)), host_level())


def test_scales_and_shifts_are_folded_into_weights() -> None:
    """A norm after a convolution with a bias leaves one sum and no product."""
    layers = [conv(32), biased, scaled, biased, relu]
    names = kernels_of(model(*layers, shape=(1, 3, 16, 16)), host_level())
    assert "fused_conv2d_NCHWc_add_relu" in names and not any("multiply" in name for name in names)


@FEW
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
    st.integers(1, 70),
    st.sampled_from([1, 2, 5, 16, 30, 48, 100]),
    st.sampled_from(LEVELS_HERE),
)
def test_matrix_products(rows: list[int], depth: int, columns: int, mcpu: str) -> None:
    """Rows, depth and columns are arbitrary; columns may fill no vector."""
    mod = model(dense(columns), relu, dense(3), shape=(*rows, depth))
    check_alike(mod, level(mcpu))


def test_products_of_two_inputs_are_not_packed() -> None:
    """Only weights can be packed when the library is built."""
    mod = model(
        lambda value, _: relax.op.matmul(value, relax.op.permute_dims(value)),
        softmax,
        shape=(24, 24),
    )
    assert not any("dense" in name for name in kernels_of(mod, host_level()))
    check_alike(mod, host_level())


def self_attention(value: Any, _: Any) -> Any:
    """Attention with one tensor as queries, keys and values."""
    scores = relax.op.nn.softmax(relax.op.matmul(value, relax.op.permute_dims(value, [0, 2, 1])))
    return relax.op.matmul(scores, value)


OPERATOR_LAYERS: dict[str, tuple[tuple[int, ...], Layer]] = {
    "conv1d": ((1, 32, 20), convolution(32, (3,))),
    "conv2d": ((1, 32, 9, 9), convolution(32, (3, 3))),
    "conv3d": ((1, 32, 3, 4, 5), convolution(32, (3, 3, 3))),
    "grouped_conv2d": ((1, 32, 9, 9), convolution(32, (3, 3), groups=2)),
    "depthwise_conv2d": ((1, 32, 9, 9), depthwise((3, 3))),
    "conv1d_transpose": ((1, 32, 9), transposed(32, (3,), strides=2)),
    "conv2d_transpose": ((1, 32, 9, 9), transposed(32, (3, 3), strides=2)),
    "conv3d_transpose": ((1, 32, 3, 4, 5), transposed(32, (3, 3, 3), strides=2)),
    "matmul": ((3, 32), dense(32)),
    "attention": ((2, 16, 32), self_attention),
}


@pytest.mark.parametrize("operator", OPTIMIZED_OPERATORS)
def test_the_recipe_can_keep_an_operator_plain(operator: str) -> None:
    """Its kernel is then the one that TVM makes; other operators keep their optimized kernels."""
    shape, layer = OPERATOR_LAYERS[operator]
    mod = model(layer, shape=shape)
    optimized = re.compile("_NCHWc|_pack|attention")
    assert any(optimized.search(name) for name in kernels_of(mod, host_level()))
    options = replace(FAST, plain=(operator,))
    assert not any(optimized.search(name) for name in kernels_of(mod, host_level(), options))
    others = replace(FAST, plain=tuple(name for name in OPTIMIZED_OPERATORS if name != operator))
    assert any(optimized.search(name) for name in kernels_of(mod, host_level(), others))


def hard_sigmoid(value: Any, _: Any) -> Any:
    shifted = relax.op.clip(relax.op.add(value, relax.const(3.0)), 0, 6)
    return relax.op.divide(shifted, relax.const(6.0))


@pytest.mark.parametrize("channels", [16, 21])
def test_clipped_and_divided_data_stay_blocked(channels: int) -> None:
    """Empty lanes are divided by the same number as all others."""
    mod = model(conv(channels), hard_sigmoid, conv(8), shape=(1, 8, 6, 5))
    check_alike(mod, host_level())
    assert sum("unpack" in name for name in kernels_of(mod, host_level())) == 1


def test_plain_data_are_packed_to_be_concatenated() -> None:
    """One operand comes from a softmax, the other from a convolution."""

    def joined(value: Any, _: Any) -> Any:
        return relax.op.concat([relax.op.nn.softmax(value), value], axis=1)

    mod = model(conv(16), joined, conv(8), shape=(1, 8, 6, 5))
    check_alike(mod, host_level())
    assert any("concatenate" in name for name in kernels_of(mod, host_level()))


def heads(anchors: int) -> Layer:
    """Return the layout of a detector's output: the numbers of an anchor of a pixel are a row."""

    def layer(value: Any, _: Any) -> Any:
        n, channels, height, width = (int(extent) for extent in value.ty.shape)
        split = relax.op.reshape(value, (n, anchors, channels // anchors, height, width))
        rows = relax.op.permute_dims(split, [0, 1, 3, 4, 2])
        return relax.op.reshape(rows, (n, anchors * height * width, channels // anchors))

    return layer


@pytest.mark.parametrize(
    ("channels", "function", "is_moved"),
    [(21, "sigmoid", True), (21, "exp", False), (48, "exp", True)],
)
def test_functions_of_moved_numbers_belong_to_the_convolution(
    channels: int, function: str, is_moved: bool
) -> None:
    """Unless they could make infinities of empty lanes."""
    layers = (conv(channels, 1), heads(3), lambda value, _: getattr(relax.op, function)(value))
    mod = model(*layers, shape=(2, 20, 5, 7))
    kernels = kernels_of(mod, host_level())
    assert any("conv2d_NCHWc" in name and function in name for name in kernels) == is_moved
    check_alike(mod, host_level())
