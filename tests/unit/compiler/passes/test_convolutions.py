"""Convolutions over sequences, images and volumes: any groups, channels, dilation, and the operators between them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from tests.support.kernels import LEVELS_HERE, check_alike, host_level, kernels_of, level
from tests.support.tuning import model, relu
from tests.unit.compiler.networks import (
    Layer,
    biased,
    channels_of,
    convolution,
    residual,
    transposed,
)
from tvmflow.compiler.tir_kernels.blocked import Groups, shorten

MANY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
FEW = settings(MANY, max_examples=5)

Case = tuple[tuple[int, ...], Layer]


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    """Return an input shape and a convolution of it."""
    rank = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    strides = [draw(st.integers(1, 3)) for _ in range(rank)]
    spacing = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = [draw(st.integers(0, 2)) for _ in range(2 * rank)]
    size = [(e - 1) * d + 1 + draw(st.integers(0, 9)) for e, d in zip(kernel, spacing, strict=True)]
    groups = draw(st.sampled_from([1, 1, 2, 3, 5, 13]))
    per_group = draw(st.sampled_from([1, 2, 3, 8, 12, 16, 24, 40]))
    out = groups * draw(st.sampled_from([1, 2, 7, 8, 16, 24]))
    options = {"strides": strides, "dilation": spacing, "padding": padding, "groups": groups}
    return (draw(st.integers(1, 2)), groups * per_group, *size), convolution(out, kernel, **options)


@pytest.mark.nightly
@MANY
@pytest.mark.slow
@given(convolutions(), st.sampled_from(LEVELS_HERE))
def test_convolutions_of_any_rank_and_groups(case: Case, mcpu: str) -> None:
    """A bias and an activation follow; all run on blocked data."""
    shape, layer = case
    check_alike(model(layer, biased, relu, shape=shape), level(mcpu))


@st.composite
def dilated_convolutions(draw: st.DrawFn) -> Case:
    """Return an input shape and a convolution whose outer taps may read nothing but padding."""
    rank = draw(st.integers(1, 2))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    spacing = [draw(st.integers(1, 9)) for _ in range(rank)]
    size = [draw(st.integers(1, 12)) for _ in range(rank)]
    least = [max(0, (e - 1) * d + 1 - s) for e, d, s in zip(kernel, spacing, size, strict=True)]
    before = [draw(st.integers(0, 20)) for _ in range(rank)]
    after = [max(n - b, 0) + draw(st.integers(0, 9)) for n, b in zip(least, before, strict=True)]
    strides = [draw(st.integers(1, 3)) for _ in range(rank)]
    options = {"strides": strides, "dilation": spacing, "padding": before + after}
    return (1, draw(st.sampled_from([3, 16, 20])), *size), convolution(18, kernel, **options)


@pytest.mark.nightly
@MANY
@pytest.mark.slow
@given(dilated_convolutions())
def test_taps_that_read_padding_alone(case: Case) -> None:
    """They are left out; the result is the same."""
    shape, layer = case
    check_alike(model(layer, biased, relu, shape=shape), host_level())


GROUPED: dict[str, Case] = {
    "13 groups of 8": ((1, 104, 9, 7), convolution(104, (3, 3), groups=13, padding=1)),
    "groups of 24": ((1, 72, 5, 9), convolution(72, (3, 3), groups=3, strides=2)),
    "groups of 4": ((1, 128, 6, 6), convolution(128, (3, 3), groups=32, padding=1)),
    "12 to 40 a group": ((2, 36, 5, 5), convolution(120, (1, 1), groups=3)),
    "three of each channel": ((1, 33, 8, 5), convolution(99, (3, 3), groups=33, padding=1)),
    "groups of a sequence": ((1, 48, 20), convolution(48, (8,), groups=4, padding=4)),
    "groups of a volume": ((1, 24, 4, 5, 6), convolution(48, (1, 3, 3), groups=3)),
    "transposed groups": ((1, 24, 5, 5), transposed(36, (3, 3), groups=3, strides=2)),
    "a transposed volume": ((1, 20, 3, 4, 5), transposed(18, (2, 3, 3), strides=(1, 2, 2))),
    "dilated beyond the image": (
        (1, 20, 9, 9),
        convolution(16, (3, 3), dilation=(12, 6), padding=(12, 6)),
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_unusual_convolutions_are_blocked(name: str) -> None:
    """Channels of a group need not fill vectors."""
    shape, layer = GROUPED[name]
    mod = model(layer, biased, relu, shape=shape)
    assert any("_NCHWc" in kernel for kernel in kernels_of(mod, host_level()))
    check_alike(mod, host_level())


@pytest.mark.slow
@MANY
@given(
    *(st.integers(1, 40) for _ in range(3)),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([4, 16]),
    st.booleans(),
)
def test_every_block_reads_all_data_of_its_groups(
    inputs: int, outputs: int, number: int, lanes: int, block: int, joins: bool
) -> None:
    """What a block of the result reads holds the channels of all of its groups, and lies within the data."""
    blocks = Groups(inputs, outputs, lanes, block, number)
    groups = shorten(blocks, joins=joins)
    last = -(-inputs * number // lanes) * lanes
    depth = groups.depth
    assert groups.result_blocks * depth <= blocks.result_blocks * blocks.depth
    for place in range(groups.result_blocks):
        start = groups.first(place) * (1 if groups.run else lanes)
        end = min((place + 1) * block, groups.outputs * number)
        own = [channel // groups.outputs * inputs for channel in (place * block, end - 1)]
        assert start <= own[0] and own[1] + inputs <= start + depth
        assert start >= 0 and start + depth <= last


@pytest.mark.parametrize(
    ("groups", "shorter"),
    [
        (Groups(19, 37, 16, 16, 1), {"run": 10}),
        (Groups(35, 35, 16, 16, 1), {"run": 12}),
        (Groups(64, 64, 16, 16, 1), {}),
        (Groups(63, 64, 16, 16, 1), {}),
        (Groups(3, 64, 1, 16, 1), {}),
        (Groups(4, 4, 16, 16, 32), {}),
        (Groups(25, 25, 16, 16, 4), {"run": 13, "outputs": 32}),
        (Groups(80, 20, 16, 16, 3), {"outputs": 32}),
    ],
)
def test_empty_lanes_are_not_multiplied(groups: Groups, shorter: dict[str, int]) -> None:
    """Runs of channels take the place of blocks, and groups have blocks of their own, where that saves enough."""
    assert shorten(groups, joins=True) == groups._replace(**shorter)
    assert shorten(groups, joins=False).outputs == groups.outputs


RAGGED: dict[str, Case] = {
    "19 channels": ((1, 19, 9, 7), convolution(37, (5, 5), padding=2)),
    "35 channels of a sequence": ((2, 35, 21), convolution(35, (5,), dilation=2)),
    "groups of 25": ((2, 100, 9, 7), convolution(100, (3, 3), groups=4, padding=1)),
    "groups of 80 to 20": ((2, 240, 9, 7), convolution(60, (1, 1), groups=3)),
    "33 channels, transposed": ((1, 33, 9, 7), transposed(65, (3, 3), padding=1, strides=2)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_channels(name: str) -> None:
    """The kernel multiplies runs of channels, and groups are joined again."""
    shape, layer = RAGGED[name]
    mod = model(layer, biased, relu, shape=shape)
    names = "".join(kernels_of(mod, host_level()))
    assert ("join_groups" in names) == name.startswith("groups")
    check_alike(mod, level(LEVELS_HERE[-1 - list(RAGGED).index(name) % 2]))


def test_phases_share_blocks_where_no_convolution_follows() -> None:
    """The 132 channels of four phases fill nine blocks in place of twelve; their image is plain."""
    layer = transposed(33, (4, 4), strides=2, padding=1)
    mod = model(layer, biased, relu, shape=(2, 20, 6, 5))
    assert not [name for name in kernels_of(mod, level("x86-64-v4")) if "unpack" in name]
    followed = model(layer, relu, convolution(40, (3, 3)), shape=(2, 20, 6, 5))
    assert [name for name in kernels_of(followed, level("x86-64-v4")) if "unpack" in name]
    check_alike(mod, host_level())


VOLUMES: dict[str, tuple[Layer, ...]] = {
    "residual": (
        residual(
            lambda value, weight: convolution(channels_of(value), (3, 1, 3), padding=[1, 0, 1])(
                value, weight
            )
        ),
        relu,
    ),
    "max pooling": (
        lambda value, _: relax.op.nn.max_pool3d(value, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    ),
    "average pooling": (
        lambda value, _: relax.op.nn.avg_pool3d(value, (2, 2, 3), (2, 1, 2), ceil_mode=True),
    ),
    "adaptive pooling": (
        lambda value, _: relax.op.nn.adaptive_avg_pool3d(value, output_size=(1, 2, 3)),
    ),
    "mean": (lambda value, _: relax.op.mean(value, [2, 3, 4], keepdims=True),),
    "gate": (lambda value, _: relax.op.multiply(value, relax.op.sigmoid(value)),),
}


@pytest.mark.parametrize("between", VOLUMES)
def test_convolutions_over_volumes(between: str) -> None:
    """Data stay blocked between them."""
    layers = (convolution(20, (3, 3, 3), padding=1), *VOLUMES[between], conv3d_of_points)
    mod = model(*layers, shape=(1, 3, 5, 8, 7))
    names = kernels_of(mod, host_level())
    assert sum("unpack" in name for name in names) == 1
    check_alike(mod, host_level())


def conv3d_of_points(value: Any, weight: Any) -> Any:
    return convolution(7, (1, 1, 1))(value, weight)


@pytest.mark.parametrize("mcpu", LEVELS_HERE[1:])
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        ((1, 97, 9, 11), 97),
        ((2, 33, 37), 50),
        ((3, 40, 2, 3, 5), 131),
        ((1, 97, 4, 4), 50),
        ((1, 64, 17, 17), 96),
        ((2, 3, 65), 64),
        ((1, 2, 5, 7), 1),
        ((1, 300, 33, 31), 17),
    ],
)
def test_pointwise_convolutions_of_plain_data(shape: tuple[int, ...], out: int, mcpu: str) -> None:
    """One that no other convolution is next to multiplies plain data, and stores bias and activation with its sums."""
    alone = model(convolution(out, (1,) * (len(shape) - 2)), biased, relu, shape=shape)
    check_alike(alone, level(mcpu))
    (kernel,) = kernels_of(alone, level(mcpu))
    assert "plain" in kernel


def limited(value: Any, _: Any) -> Any:
    return relax.op.clip(value, -0.25, 0.5)


def doubled(value: Any, _: Any) -> Any:
    return relax.op.add(value, value)


@pytest.mark.parametrize(
    ("after", "others"),
    [
        ([limited], 0),
        ([biased, limited, relu], 0),
        ([relu, biased], 1),
        ([doubled, relu], 1),
    ],
)
def test_what_follows_a_product_of_plain_data_is_stored_with_it_or_computed_after_it(
    after: list[Any], others: int
) -> None:
    """One bias, and limits after it, belong to the product; other operators do not."""
    network = model(convolution(97, (1, 1)), *after, shape=(2, 33, 5, 13))
    check_alike(network, level("x86-64-v3"))
    assert len(kernels_of(network, level("x86-64-v3"))) == 1 + others


def pooled(value: Any, _: Any) -> Any:
    return relax.op.nn.max_pool2d(value, pool_size=2, strides=2)


def channels_last(value: Any, _: Any) -> Any:
    return relax.op.permute_dims(value, [0, 2, 3, 1])


def test_pointwise_convolutions_that_stay_blocked() -> None:
    """Those beside another convolution, those that something blocked reads, and those of a few pixels."""
    layers = [convolution(97, (1, 1)), relu, convolution(33, (3, 3))]
    before_pool = model(convolution(96, (1, 1)), relu, pooled, shape=(1, 64, 17, 17))
    head = model(convolution(12, (1, 1)), channels_last, shape=(1, 64, 17, 17))
    deep = model(convolution(64, (1, 1)), relu, shape=(1, 128, 7, 7))
    for network in (before_pool, head, deep, model(*layers, shape=(1, 97, 17, 17))):
        assert not any("plain" in name for name in kernels_of(network, host_level()))
