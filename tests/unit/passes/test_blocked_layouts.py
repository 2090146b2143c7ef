"""Blocked layouts and packed weights: every shape computes what the plain road computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from tests.support.kernels import LEVELS, check_alike, host_level, kernels_of, level
from tests.support.tuning import conv, dense, model, relu, softmax
from tvmflow.recipe import Kernels

Layer = Callable[[Any, Any], Any]

SLOWLY = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def channels_of(value: Any) -> int:
    return int(value.ty.shape[1])


def convolution(out: int, kernel: tuple[int, int], **options: Any) -> Layer:
    def layer(value: Any, weight: Any) -> Any:
        groups = int(options.get("groups", 1))
        return relax.op.nn.conv2d(
            value, weight((out, channels_of(value) // groups, *kernel)), **options
        )

    return layer


def depthwise(kernel: tuple[int, int], **options: Any) -> Layer:
    def layer(value: Any, weight: Any) -> Any:
        channels = channels_of(value)
        return relax.op.nn.conv2d(value, weight((channels, 1, *kernel)), groups=channels, **options)

    return layer


def biased(value: Any, weight: Any) -> Any:
    return relax.op.add(value, weight((1, channels_of(value), 1, 1)))


def scaled(value: Any, weight: Any) -> Any:
    return relax.op.multiply(value, weight((channels_of(value), 1, 1)))


def pooled(kind: str, **options: Any) -> Layer:
    return lambda value, _: getattr(relax.op.nn, f"{kind}_pool2d")(value, **options)


def averaged(value: Any, _: Any) -> Any:
    return relax.op.mean(value, [2, 3], keepdims=True)


def sigmoid(value: Any, _: Any) -> Any:
    return relax.op.sigmoid(value)


def twice(layer: Layer) -> Layer:
    """A residual connection around a layer."""
    return lambda value, weight: relax.op.add(value, layer(value, weight))


def beside(*layers: Layer) -> Layer:
    """The channels that several layers give, one after the other."""
    return lambda value, weight: relax.op.concat([each(value, weight) for each in layers], axis=1)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[tuple[int, ...], Layer]:
    """An input shape, and a convolution that fits it: odd sizes, few channels, many, in groups."""
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


@SLOWLY
@given(convolutions(), st.sampled_from(LEVELS))
def test_convolutions_of_every_shape(case: tuple[tuple[int, ...], Layer], mcpu: str) -> None:
    """Any kernel, stride, dilation, padding, number of groups and of channels, with a bias and an activation."""
    shape, layer = case
    check_alike(model(layer, biased, relu, shape=shape), level(mcpu))


@SLOWLY
@given(
    st.sampled_from([1, 3, 4, 16, 24, 33]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(5, 23),
    st.sampled_from(LEVELS),
)
def test_depthwise_convolutions(
    channels: int, kernel: tuple[int, int], stride: int, padding: int, size: int, mcpu: str
) -> None:
    """Each channel by itself, behind a convolution and before one."""
    layers = (
        conv(channels, 1),
        depthwise(kernel, strides=stride, padding=padding),
        scaled,
        conv(5, 1),
    )
    check_alike(model(*layers, shape=(2, 3, size, size + 1)), level(mcpu))


BETWEEN: dict[str, tuple[Layer, ...]] = {
    "residual": (
        twice(same := lambda value, weight: conv(channels_of(value))(value, weight)),
        relu,
    ),
    "concatenation": (beside(conv(32), conv(8)), sigmoid),
    "residual of a concatenation": (beside(same, conv(4)), twice(same)),
    "max pooling": (pooled("max", pool_size=3, strides=2, padding=1),),
    "average pooling": (
        pooled("avg", pool_size=(3, 2), strides=(2, 1), padding=1, ceil_mode=True),
    ),
    "padding that counts": (pooled("avg", pool_size=3, padding=1, count_include_pad=True),),
    "mean": (averaged,),
    "affine": (scaled, biased, sigmoid),
    "exponential": (lambda value, _: relax.op.exp(relax.op.negative(value)),),
    "transposition": (lambda value, _: relax.op.permute_dims(value, [0, 1, 3, 2]),),
    "softmax over channels": (lambda value, _: relax.op.nn.softmax(value, axis=1),),
    "gate": (lambda value, _: relax.op.multiply(value, relax.op.sigmoid(averaged(value, None))),),
    "scalar": (lambda value, _: relax.op.divide(value, relax.const(3.0, "float32")),),
}


@pytest.mark.parametrize("channels", [6, 16, 24, 40])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_lies_between_convolutions(channels: int, between: str) -> None:
    """Residuals, concatenations, pooling, gates, and operators that want the plain layout back."""
    layers = (conv(channels), *BETWEEN[between], conv(7, 1))
    check_alike(model(*layers, shape=(1, 5, 13, 11)), host_level())


def test_data_are_packed_once_and_unpacked_once() -> None:
    """Between the first convolution and the last nothing changes its layout."""
    layers = [
        conv(32),
        relu,
        twice(conv(32)),
        pooled("max", pool_size=2, strides=2),
        conv(32),
        relu,
    ]
    names = kernels_of(model(*layers, shape=(1, 32, 16, 16)), host_level())
    assert sum("unpack" in name for name in names) == 1
    assert sum("pack" in name for name in names) == 2


def test_scales_and_shifts_become_weights() -> None:
    """A norm behind a convolution with a bias leaves one sum and no product."""
    layers = [conv(32), biased, scaled, biased, relu]
    names = kernels_of(model(*layers, shape=(1, 3, 16, 16)), host_level())
    assert "fused_conv2d_add_relu" in names and not any("multiply" in name for name in names)


@SLOWLY
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
    st.integers(1, 70),
    st.sampled_from([1, 2, 5, 16, 30, 48, 100]),
    st.sampled_from(LEVELS),
)
def test_matrix_products(rows: list[int], depth: int, columns: int, mcpu: str) -> None:
    """Any number of rows, inner size and columns, those that fill no vector too."""
    mod = model(dense(columns), relu, dense(3), shape=(*rows, depth))
    check_alike(mod, level(mcpu))


def test_products_of_two_inputs_are_not_packed() -> None:
    """Only weights can be laid out beforehand."""
    mod = model(
        lambda value, _: relax.op.matmul(value, relax.op.permute_dims(value)),
        softmax,
        shape=(24, 24),
    )
    assert not any("dense" in name for name in kernels_of(mod, host_level()))
    check_alike(mod, host_level())


def test_the_recipe_can_turn_each_part_off() -> None:
    """The names in the language are the names of what happens."""
    words = {name: field.annotation.__args__ for name, field in Kernels.model_fields.items()}  # type: ignore[union-attr]
    assert words == {
        "layout": ("blocked", "plain"),
        "weights": ("packed", "plain"),
        "math": ("vector", "libm"),
        "schedules": ("rules", "none"),
    }
