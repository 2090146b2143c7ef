"""Concatenations, slices, splits and shuffles of channels compute on blocked layouts what plain kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from tests.support.kernels import LEVELS_HERE, check_alike, host_level, kernels_of, level
from tests.support.tuning import conv, model, relu

Layer = Callable[[Any, Any], Any]

SLOWLY = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def channels_of(value: Any) -> int:
    return int(value.ty.shape[1])


def concatenated(*layers: Layer) -> Layer:
    """Return the concatenated channels of several layers."""
    return lambda value, weight: relax.op.concat([layer(value, weight) for layer in layers], axis=1)


def shuffled(groups: int) -> Layer:
    """Return a shuffle of channels: they are reshaped to a matrix, which is transposed."""

    def layer(value: Any, _: Any) -> Any:
        n, channels, *size = (int(extent) for extent in value.ty.shape)
        matrix = relax.op.reshape(value, (n, groups, channels // groups, *size))
        order = [0, 2, 1, *range(3, 3 + len(size))]
        return relax.op.reshape(relax.op.permute_dims(matrix, order), (n, channels, *size))

    return layer


def sliced(begin: int, end: int, step: int = 1) -> Layer:
    return lambda value, _: relax.op.strided_slice(value, [1], [begin], [end], [step])


def split_and_joined(cuts: list[int], layer: Layer) -> Layer:
    """Return the channels in parts, in reverse order, with a layer for the first part."""

    def joined(value: Any, weight: Any) -> Any:
        builder = relax.BlockBuilder.current()
        parts = builder.emit(relax.op.split(value, cuts, axis=1))
        first, *rest = [builder.emit(parts[position]) for position in range(len(cuts) + 1)]
        return relax.op.concat([*rest[::-1], layer(first, weight)], axis=1)

    return joined


@st.composite
def moved_channels(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Layer]]:
    """Return an input shape, and layers that move channels between convolutions."""
    count = draw(st.integers(2, 4))
    channels = [draw(st.sampled_from([1, 3, 4, 8, 12, 16, 29, 32, 48])) for _ in range(count)]
    total = sum(channels)
    layers: list[Layer] = [concatenated(*(conv(extent, 1) for extent in channels))]
    groups = [size for size in (2, 3, 4) if total % size == 0]
    shuffle = draw(st.sampled_from([1, *groups]))
    if shuffle > 1:
        layers.append(shuffled(shuffle))
    parts = draw(st.integers(1, 3))
    if parts > 1:
        cuts = sorted({draw(st.integers(1, total - 1)) for _ in range(parts - 1)})
        layers.append(split_and_joined(cuts, conv(draw(st.sampled_from([5, 16])), 1)))
    else:
        begin = draw(st.integers(0, total - 1))
        layers.append(sliced(begin, draw(st.integers(begin + 1, total))))
    size = (draw(st.integers(1, 9)), draw(st.integers(1, 19)))
    return (draw(st.integers(1, 2)), 5, *size), [*layers, conv(7, 1), relu]


@pytest.mark.slow
@SLOWLY
@given(moved_channels(), st.sampled_from(LEVELS_HERE))
def test_channels_that_move_twice(case: tuple[tuple[int, ...], list[Layer]], mcpu: str) -> None:
    """Ragged concatenations, then shuffles, slices and splits: the last one reads what the first one read."""
    shape, layers = case
    check_alike(model(*layers, shape=shape), level(mcpu))


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((2, 5, 7, 11), [concatenated(conv(12, 1), conv(20, 3)), shuffled(2), sliced(3, 21)]),
        ((1, 5, 9, 9), [conv(48, 1), split_and_joined([16, 17], conv(16, 1)), shuffled(4)]),
        ((1, 5, 17, 5), [conv(48, 1), sliced(16, 48), relu]),
        ((1, 3, 6, 6), [concatenated(conv(8, 1), relu, conv(8, 1))]),
    ],
)
def test_channels_stay_blocked(shape: tuple[int, ...], layers: list[Layer]) -> None:
    """Nothing is unpacked between convolutions, and every number is the same."""
    made = model(*layers, conv(16, 1), shape=shape)
    names = kernels_of(made, host_level())
    assert not [name for name in names if "concat" in name or "transpose" in name]
    assert len([name for name in names if "pack" in name]) <= 2
    check_alike(made, host_level())


def test_a_concatenation_that_no_convolution_reads_stays_plain() -> None:
    """It is fused with the kernels that unpack its operands."""
    made = model(concatenated(conv(12, 1), conv(20, 1)), relu, shape=(1, 5, 8, 8))
    assert not [name for name in kernels_of(made, host_level()) if "copy_channels" in name]
    check_alike(made, host_level())


@pytest.mark.parametrize("channels", [8, 20])
def test_vectors_are_no_channels(channels: int) -> None:
    """A tensor of rank 1 behind a convolution is split and sliced as it is."""

    def parts(value: Any, _: Any) -> Any:
        vector = relax.op.reshape(value, (4 * channels,))
        split = relax.op.split(vector, [channels], 0)
        first = relax.op.strided_slice(vector, [0], [1], [channels], assume_inbound=True)
        return relax.op.concat([relax.TupleGetItem(split, 1), first], axis=0)

    check_alike(model(conv(channels, 1), parts, shape=(1, 3, 2, 2)), host_level())


@pytest.mark.parametrize("axes", [[0], [2], [1, 3], [0, 1]])
def test_reversed_axes_are_reversed(axes: list[int]) -> None:
    """All elements stay, in another order: a slice of the same size is not a copy."""

    def reverse(value: Any, _: Any) -> Any:
        shape = [int(n) for n in value.ty.shape]
        starts, ends = [shape[axis] - 1 for axis in axes], [-shape[axis] - 1 for axis in axes]
        return relax.op.strided_slice(value, axes, starts, ends, [-1] * len(axes))

    check_alike(model(conv(17), reverse, conv(8), shape=(2, 3, 6, 5)), host_level())
